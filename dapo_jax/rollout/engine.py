"""A JetStream `Engine` over the decoder: prefill, insert, generate.

JetStream brings the interface; model, cache and sampler are ours. A decode state holds a fixed
number of slots. `generate` draws one token in every occupied slot from the logits stored there and
runs the decoder on it, so that a prompt is prefilled once however many samples are drawn from it.

`prefill_many` and `insert_many` are what the scheduler calls; JetStream's own `prefill` and
`insert` are their one-prompt, one-slot case.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dapo_jax import attention, log_probs, model
from dapo_jax.config import MeshConfig, ModelConfig
from dapo_jax.rollout import jetstream
from dapo_jax.rollout.sampling import sample
from dapo_jax.sharding import BATCH_AXES, batch_sharding, param_shardings, replicated
from dapo_jax.types import Array

INSERT_WIDTH = 16  # slots filled per insert call; a fixed number, so that nothing recompiles


@dataclasses.dataclass(frozen=True)
class EngineSpec:
    """All that the compiled programs depend on besides the mesh."""

    model: ModelConfig
    layout: MeshConfig
    slots: int
    prefill_prompts: int
    max_prompt_tokens: int
    max_response_tokens: int
    stop_tokens: tuple[int, ...]
    temperature: float  # 0: greedy
    top_p: float

    @property
    def cache_tokens(self) -> int:
        return self.max_prompt_tokens + self.max_response_tokens


class Prefix(NamedTuple):
    """Prefilled prompts: keys and values, logits of the next token, random keys."""

    cache: tuple[Array, Array]  # each [L, P, max_prompt_tokens, K, H]
    logits_PV: Array
    lengths_P: Array
    keys_P2: Array  # of the prompt; a sample's key is folded from it


class DecodeState(NamedTuple):
    """What a slot holds. B slots."""

    cache: tuple[Array, Array]  # each [L, B, cache_tokens, K, H]
    logits_BV: Array  # float32, of the next token, divided by the temperature
    lengths_B: Array  # tokens in the cache
    generated_B: Array  # response tokens drawn
    keys_B2: Array  # of the sample
    active_B: Array  # bool


@struct.dataclass
class Results(jetstream.ResultTokens):
    """JetStream's result with the log-prob of each token under the distribution sampled from."""

    log_prob: Any = None

    def copy_to_host_async(self) -> None:
        super().copy_to_host_async()
        if not isinstance(self.log_prob, np.ndarray):
            self.log_prob.copy_to_host_async()

    def convert_to_numpy(self) -> "Results":
        return self.replace(data=np.asarray(self.data), log_prob=np.asarray(self.log_prob))  # type: ignore[attr-defined]


class DecoderEngine(jetstream.Engine):
    """The engine the trainer samples from, and evaluates with."""

    def __init__(self, spec: EngineSpec, mesh: Mesh):
        self.spec = spec
        self._mesh = mesh
        self._prefill, self._insert, self._generate, self._init = _programs(spec, mesh)

    def prefill_many(
        self, params: model.Params, tokens_PT: np.ndarray, lengths_P: np.ndarray, keys_P2: Any
    ) -> Prefix:
        """Keys, values and next-token logits of `prefill_prompts` prompts, padded on the right."""
        return self._prefill(params, tokens_PT, lengths_P, keys_P2)

    def insert_many(
        self,
        prefix: Prefix,
        state: DecodeState,
        slots_W: np.ndarray,
        prompts_W: np.ndarray,
        samples_W: np.ndarray,
    ) -> DecodeState:
        """The state with sample `samples_W[i]` of prompt `prompts_W[i]` of the prefix put into slot
        `slots_W[i]`, for INSERT_WIDTH entries; a slot number of `spec.slots` skips its entry."""
        return self._insert(prefix, state, slots_W, prompts_W, samples_W)

    def prefill(
        self,
        *,
        params: model.Params,
        existing_prefix: Prefix | None = None,
        padded_tokens: Any,
        true_length: int,
        key_2: Any = (0, 0),
    ) -> Prefix:
        """One prompt. JetStream's interface has no place for its random key: `key_2` is key data,
        the same for every prompt unless given."""
        if existing_prefix is not None:
            raise ValueError("existing_prefix is not supported: prompts are prefilled whole")
        P, T = self.spec.prefill_prompts, self.spec.max_prompt_tokens
        tokens_PT = np.zeros((P, T), np.int32)
        tokens_PT[0, : len(padded_tokens)] = np.asarray(padded_tokens)[:T]
        lengths_P = np.ones(P, np.int32)
        lengths_P[0] = true_length
        keys_P2 = np.broadcast_to(np.asarray(key_2, np.uint32), (P, 2))
        return self.prefill_many(params, tokens_PT, lengths_P, keys_P2)

    def insert(self, prefix: Prefix, decode_state: DecodeState, slot: int) -> DecodeState:
        """The first prompt of the prefix into one slot; its sample number is the slot's."""
        slots_W = np.full(INSERT_WIDTH, self.spec.slots, np.int32)
        slots_W[0] = slot
        return self.insert_many(prefix, decode_state, slots_W, np.zeros_like(slots_W), slots_W)

    def generate(
        self, params: model.Params, decode_state: DecodeState
    ) -> tuple[DecodeState, Results]:
        """One more token in every slot; the state is donated. Invalid where a slot is empty."""
        state, data, log_prob = self._generate(params, decode_state)
        return state, Results(
            data=data,
            tokens_idx=(0, 1),
            valid_idx=(1, 2),
            length_idx=(2, 3),
            samples_per_slot=1,
            log_prob=log_prob,
        )

    def init_decode_state(self) -> DecodeState:
        """All slots empty."""
        return self._init()

    def load_params(self, params: model.Params) -> model.Params:
        """The parameters in the engine's layout: the trainer's, so nothing is copied."""
        return jax.device_put(
            params, param_shardings(self.spec.model, self.spec.layout, self._mesh)
        )

    def get_prefix_destination_sharding(self) -> Any:
        return None  # prefill and decode share one mesh

    def get_tokenizer(self) -> Any:
        raise NotImplementedError("tokenizers are transformers', outside the engine")

    @property
    def max_concurrent_decodes(self) -> int:
        return self.spec.slots

    @property
    def samples_per_slot(self) -> int:
        return 1

    @property
    def max_prefill_length(self) -> int:
        return self.spec.max_prompt_tokens

    @property
    def mesh(self) -> Mesh:
        return self._mesh

    @property
    def colocated_cpus(self) -> None:
        return None


@functools.cache
def _programs(spec: EngineSpec, mesh: Mesh) -> tuple[Any, Any, Any, Any]:
    """The jitted prefill, insert, generate and init programs, with their layouts and donations."""
    c, dtype = spec.model, jnp.dtype(spec.model.compute_dtype)
    params_at = param_shardings(c, spec.layout, mesh)
    kv_axis = dict(spec.layout.rules)["kv_heads"]
    cache_at = NamedSharding(mesh, PartitionSpec(None, BATCH_AXES, None, kv_axis))
    slots_at, everywhere = batch_sharding(mesh), replicated(mesh)
    state_at = DecodeState((cache_at, cache_at), *[slots_at] * 5)
    prefix_at = Prefix((cache_at, cache_at), *[slots_at] * 3)

    def empty_cache(rows: int, tokens: int) -> attention.Cache:
        shape = (c.num_layers, rows, tokens, c.num_kv_heads, c.head_dim)
        return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)

    def next_logits(params: model.Params, hidden_BD: jax.Array) -> jax.Array:
        unembed_VD = model.unembedding(params)
        return log_probs.logits(hidden_BD, unembed_VD, temperature=spec.temperature or 1.0)

    def init() -> DecodeState:
        B = spec.slots
        zeros_B = lambda: jnp.zeros(B, jnp.int32)
        return DecodeState(
            empty_cache(B, spec.cache_tokens),
            jnp.zeros((B, c.vocab_size), jnp.float32),
            zeros_B(),
            zeros_B(),
            jnp.zeros((B, 2), jnp.uint32),
            jnp.zeros(B, bool),
        )

    def prefill(
        params: model.Params, tokens_PT: jax.Array, lengths_P: jax.Array, keys_P2: jax.Array
    ) -> Prefix:
        P, T = tokens_PT.shape
        positions_PT = jnp.broadcast_to(jnp.arange(T)[None], (P, T))
        segments_PT = (positions_PT < lengths_P[:, None]).astype(jnp.int32)
        hidden_PTD, cache = model.hidden_states(
            c,
            params,
            tokens_PT,
            positions_PT,
            attention.prefilling(segments_PT),
            empty_cache(P, T),
        )
        last_PD = jnp.take_along_axis(hidden_PTD, lengths_P[:, None, None] - 1, axis=1)[:, 0]
        return Prefix(cache, next_logits(params, last_PD), lengths_P, keys_P2)

    def insert(
        prefix: Prefix,
        state: DecodeState,
        slots_W: jax.Array,
        prompts_W: jax.Array,
        samples_W: jax.Array,
    ) -> DecodeState:
        def put(into: jax.Array, values: jax.Array) -> jax.Array:
            return into.at[slots_W].set(values, mode="drop")

        def put_cache(into: jax.Array, values: jax.Array) -> jax.Array:
            tokens = slice(0, values.shape[2])
            return into.at[:, slots_W, tokens].set(values[:, prompts_W], mode="drop")

        def sample_key(key_2: jax.Array, sample: jax.Array) -> jax.Array:
            return jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(key_2), sample))

        return DecodeState(
            jax.tree.map(put_cache, state.cache, prefix.cache),
            put(state.logits_BV, prefix.logits_PV[prompts_W]),
            put(state.lengths_B, prefix.lengths_P[prompts_W]),
            put(state.generated_B, jnp.zeros_like(slots_W)),
            put(state.keys_B2, jax.vmap(sample_key)(prefix.keys_P2[prompts_W], samples_W)),
            put(state.active_B, jnp.ones(slots_W.shape, bool)),
        )

    def generate(
        params: model.Params, state: DecodeState
    ) -> tuple[DecodeState, jax.Array, jax.Array]:
        token_B, log_prob_B = sample(
            state.logits_BV,
            state.keys_B2,
            state.generated_B,
            top_p=spec.top_p,
            greedy=spec.temperature == 0,
        )
        generated_B = state.generated_B + state.active_B.astype(jnp.int32)
        stop_B = jnp.isin(token_B, jnp.asarray(spec.stop_tokens, jnp.int32))
        stop_B = stop_B | (generated_B == spec.max_response_tokens)
        # An empty slot writes where nothing is read before an insert overwrites or masks it.
        lengths_B = jnp.minimum(state.lengths_B, spec.cache_tokens - 1)
        hidden_BTD, cache = model.hidden_states(
            c,
            params,
            token_B[:, None],
            lengths_B[:, None],
            attention.decoding(lengths_B),
            state.cache,
        )
        data_B3 = jnp.stack([token_B, state.active_B.astype(jnp.int32), generated_B], axis=1)
        state = DecodeState(
            cache,
            next_logits(params, hidden_BTD[:, 0]),
            state.lengths_B + state.active_B.astype(jnp.int32),
            generated_B,
            state.keys_B2,
            state.active_B & ~stop_B,
        )
        return state, data_B3, log_prob_B

    rows_at = batch_sharding(mesh)
    return (
        jax.jit(
            prefill, in_shardings=(params_at, rows_at, rows_at, rows_at), out_shardings=prefix_at
        ),
        jax.jit(
            insert,
            in_shardings=(prefix_at, state_at, everywhere, everywhere, everywhere),
            out_shardings=state_at,
            donate_argnums=1,
        ),
        jax.jit(
            generate,
            in_shardings=(params_at, state_at),
            out_shardings=(state_at, everywhere, everywhere),
            donate_argnums=1,
        ),
        jax.jit(init, out_shardings=state_at),
    )
