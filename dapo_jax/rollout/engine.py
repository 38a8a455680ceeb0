"""A JetStream `Engine` over the decoder: prefill, insert, generate.

JetStream brings the interface; model, cache and sampler are ours. What the scheduler calls is
`prefill_many`, `enqueue` and `decode`: prompts are prefilled in batches and handed over with the
number of samples wanted, and a call of `decode` draws several tokens in every slot, giving slots
that become free to samples that wait (see `slots`). JetStream's own `prefill`, `insert` and
`generate` work on the same state: one prompt, one slot, one token.

Every shard of the batch (the data and fsdp axes) keeps slots, pages and prompts of its own, and
decodes by itself; the tensor axis splits heads within a shard.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dapo_jax import attention, log_probs, model
from dapo_jax.config import MeshConfig, ModelConfig
from dapo_jax.rollout import jetstream, kernels, paged, slots
from dapo_jax.rollout.sampling import Mode, SamplingParams, sample
from dapo_jax.rollout.slots import Arrivals, DecodeState
from dapo_jax.sharding import BATCH_AXES, param_shardings, replicated
from dapo_jax.types import Array

UNROLLED_LAYERS = 32  # at most, on CPUs: there a scan copies each layer's weights at each token


@dataclasses.dataclass(frozen=True)
class EngineSpec:
    """All that the compiled programs depend on besides the mesh."""

    model: ModelConfig
    layout: MeshConfig
    slots: int  # over all shards
    prefill_prompts: int  # over all shards
    max_prompt_tokens: int
    max_response_tokens: int
    stop_tokens: tuple[int, ...]
    temperature: float = 1.0  # 0: greedy; of requests that do not say
    top_p: float = 1.0
    samples: int = 1  # of one prompt that share its pages
    page_tokens: int = 32
    num_pages: int | None = None  # over all shards; None: no sequence ever waits for one
    decode_steps: int = 8  # tokens a call
    prefill_chunk_tokens: int = 512
    kernel: kernels.Kernel = "xla"
    cache_dtype: Literal["auto", "int8"] = "auto"  # of keys and values; auto: the compute dtype

    @property
    def shards(self) -> int:
        return math.prod((self.layout.data, self.layout.fsdp))

    @property
    def max_tokens(self) -> int:
        return self.max_prompt_tokens + self.max_response_tokens

    @property
    def table_pages(self) -> int:
        """Of one sequence at its longest."""
        return -(-self.max_tokens // self.page_tokens)

    @property
    def entries(self) -> int:
        """Of one shard: enough that no slot waits for a prompt while results are on their way."""
        B, P = self.slots // self.shards, self.prefill_prompts // self.shards
        return 2 * -(-B // self.samples) + P

    @property
    def cancelled(self) -> int:
        """Samples of one shard that a call of `cancel` names, at most: all that are in slots."""
        return self.slots // self.shards

    @property
    def shard_pages(self) -> int:
        """Of one shard, page 0 included."""
        if self.num_pages is not None:
            return self.num_pages // self.shards
        B, prompt = self.slots // self.shards, -(-self.max_prompt_tokens // self.page_tokens)
        # A sample that comes asks for two more than it needs, see `slots.refill`.
        return 1 + B * (self.table_pages + 2) + self.entries * prompt

    @property
    def pool_layout(self) -> paged.Layout:
        heads_axis = dict(self.layout.rules)["kv_heads"]
        return paged.Layout(
            self.kernel, self.page_tokens, self.model.compute_dtype, self.cache_dtype, heads_axis
        )

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(self.temperature, self.top_p)


def halvings(most: int) -> tuple[int, ...]:
    """Numbers of pages up to `most`, each about half of the next. Each has its program, so
    that below three there is no other: it would save little."""
    sizes = [most]
    while -(-sizes[0] // 2) >= 3:
        sizes.insert(0, -(-sizes[0] // 2))
    return tuple(sizes)


class Prefix(NamedTuple):
    """Prefilled prompts; a leading axis for the shards."""

    pages: tuple[Array, ...]  # [R, L, P * pages, ...] each: see `paged`
    hidden_RPD: Array  # after the last token
    length_RP: Array
    key_RP2: Array  # uint32: random keys of the prompts, from which those of samples are folded


class Step(NamedTuple):
    """What a call of `decode` drew: R shards, at most k tokens in each of B slots."""

    token_RkB: Any
    log_prob_RkB: Any  # under the distribution that it was drawn from
    model_log_prob_RkB: Any  # under the untempered model
    flags_RkB: Any  # VALID, OVER, NOT_FINITE
    entry_RkB: Any  # of the sample
    column_RkB: Any
    waiting_Rk: Any  # samples that had found no slot when the token was drawn
    free_R: Any  # pages left


VALID, OVER, NOT_FINITE = 1, 2, 4


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
        layout = dataclasses.replace(spec.layout, data=mesh.shape["data"], fsdp=mesh.shape["fsdp"])
        self.spec = spec = dataclasses.replace(spec, layout=layout)
        self._mesh = mesh
        self._programs = _Programs(spec, mesh)
        prompt = -(-spec.max_prompt_tokens // spec.page_tokens)
        # Longer ones are prompts with what was drawn before their pages were taken away.
        longer = halvings(spec.table_pages) if spec.num_pages is not None else ()
        self.prompt_pages = (*halvings(prompt), *(n for n in longer if n > prompt))
        xla = spec.kernel == "xla"  # the TPU kernel reads no more pages than a sequence has
        self.table_pages = halvings(spec.table_pages) if xla else (spec.table_pages,)

    def prefill_many(
        self,
        params: model.Params,
        tokens_RPT: np.ndarray,
        length_RP: np.ndarray,
        key_RP2: Any,
    ) -> Prefix:
        """Keys, values and last hidden states of prompts padded on the right to whole pages."""
        return self._programs.prefill(params, tokens_RPT, length_RP, key_RP2)

    def enqueue(self, state: DecodeState, prefix: Prefix, arrivals: Arrivals) -> DecodeState:
        """The state with prompts whose samples wait for slots; every array of `arrivals` has a
        leading axis for the shards. The state is donated."""
        return self._programs.enqueue(state, prefix, arrivals)

    def decode(
        self, params: model.Params, state: DecodeState, table_pages: int, mode: Mode
    ) -> tuple[DecodeState, Step]:
        """Up to `decode_steps` tokens in every slot; the state is donated.

        Args:
            table_pages: one of `self.table_pages`; no sequence may outgrow it in this call.
            mode: what the requests need, see `sampling`.
        """
        return self._programs.decode(table_pages, mode, self.spec.decode_steps)(params, state)

    def warm_up(
        self, params: model.Params, modes: Iterable[Mode], *, cancels: bool = False
    ) -> None:
        """Compiles all that requests of these modes can need, whatever their lengths.

        Args:
            cancels: whether samples will be cancelled, also where pages never run short.
        """
        spec = self.spec
        shape = spec.shards, spec.prefill_prompts // spec.shards
        state = self.init_decode_state()
        for pages in self.prompt_pages:
            tokens = np.zeros((*shape, pages * spec.page_tokens), np.int32)
            ones, keys = np.ones(shape, np.int32), np.zeros((*shape, 2), np.uint32)
            prefix = self.prefill_many(params, tokens, ones, keys)
            # Entries that there are not: nothing comes of it.
            nowhere = np.full(shape, spec.entries, np.int32)
            zeros = lambda *more: np.zeros((*shape, *more), np.int32)
            real = np.ones(shape, np.float32)
            asked = SamplingParams(real, real, zeros(), real)
            arrivals = Arrivals(nowhere, zeros(), zeros(), zeros(), zeros(spec.samples), asked)
            state = self.enqueue(state, prefix, arrivals)
        if cancels or spec.num_pages is not None:
            nobody = np.full((spec.shards, spec.cancelled), -1, np.int32)
            state = self.cancel(state, nobody, nobody)
        for mode in modes:
            for pages in self.table_pages:
                state, _ = self.decode(params, state, pages, mode)

    def cancel(
        self, state: DecodeState, entry_RW: np.ndarray, column_RW: np.ndarray
    ) -> DecodeState:
        """The state without these samples, W of each shard (the scheduler's calls have
        `EngineSpec.cancelled`), where -1 stands for none; it is donated."""
        return self._programs.cancel(state, entry_RW, column_RW)

    def prefill(
        self,
        *,
        params: model.Params,
        existing_prefix: Prefix | None = None,
        padded_tokens: Any,
        true_length: int,
        key_2: Any = (0, 0),
    ) -> Prefix:
        """One prompt, on every shard. JetStream's interface has no place for its random key:
        `key_2` is key data, the same for every prompt unless given."""
        if existing_prefix is not None:
            raise ValueError("existing_prefix is not supported: prompts are prefilled whole")
        A, R = self.spec.page_tokens, self.spec.shards
        tokens = np.asarray(padded_tokens)[: self.spec.max_prompt_tokens]
        pages = next(n for n in self.prompt_pages if n * A >= len(tokens))
        tokens_RPT = np.zeros((R, 1, pages * A), np.int32)
        tokens_RPT[:, 0, : len(tokens)] = tokens
        keys_RP2 = np.broadcast_to(np.asarray(key_2, np.uint32), (R, 1, 2))
        return self.prefill_many(
            params, tokens_RPT, np.full((R, 1), true_length, np.int32), keys_RP2
        )

    def insert(self, prefix: Prefix, decode_state: DecodeState, slot: int) -> DecodeState:
        """The prompt of the prefix into one slot; its sample number is the slot's."""
        return self._programs.place(decode_state, prefix, np.int32(slot))

    def generate(
        self, params: model.Params, decode_state: DecodeState
    ) -> tuple[DecodeState, Results]:
        """One more token in every slot; the state is donated. Invalid where a slot is empty."""
        one = self._programs.one(self.spec.table_pages, self.spec.params.mode)
        state, data, log_prob = one(params, decode_state)
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
        return self._programs.init()

    def load_params(self, params: model.Params) -> model.Params:
        """The parameters as decoding reads them: split over the tensor axis only, matrices in the
        compute dtype. Where that is how they are, they are shared and nothing is copied."""
        return self._programs.load(params)

    def lower(self, params: model.Params, program: str, mode: Mode) -> Any:
        """ "decode" or "prefill" of the longest prompts, for shapes of the parameters: lowered, to
        be compiled ahead of time."""
        p, spec = self._programs, self.spec
        sharded = lambda shapes, at: jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, at
        )
        params = sharded(params, p.params_at)
        if program == "decode":
            state = sharded(jax.eval_shape(p.init), p.state_at)
            return p.decode(self.table_pages[-1], mode, spec.decode_steps).lower(params, state)
        R, P = spec.shards, spec.prefill_prompts // spec.shards
        T = next(n for n in self.prompt_pages if n * spec.page_tokens >= spec.max_prompt_tokens)
        rows = lambda *shape: jax.ShapeDtypeStruct((R, P, *shape), jnp.int32)
        keys = jax.ShapeDtypeStruct((R, P, 2), jnp.uint32)
        return p.prefill.lower(params, rows(T * spec.page_tokens), rows(), keys)

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


def rollout_layout(layout: MeshConfig) -> MeshConfig:
    """The mesh with parameters whole on every shard of the batch: decoding reads all of them for
    every token, and would gather them every time."""
    rules = tuple((name, None if axis in BATCH_AXES else axis) for name, axis in layout.rules)
    return dataclasses.replace(layout, rules=rules)


@functools.cache
class _Programs:
    """The compiled programs, with their layouts and donations."""

    def __init__(self, spec: EngineSpec, mesh: Mesh):
        self.spec, self.mesh, c = spec, mesh, spec.model
        platform = mesh.devices.flat[0].platform
        self.unroll = platform == "cpu" and c.num_layers <= UNROLLED_LAYERS
        self.params_at = param_shardings(c, rollout_layout(spec.layout), mesh)
        kv = dict(spec.layout.rules)["kv_heads"]
        batch = PartitionSpec(BATCH_AXES)
        self.rows_at = NamedSharding(mesh, batch)
        before = [None] * spec.pool_layout.kv_axis
        one_at = NamedSharding(mesh, PartitionSpec(BATCH_AXES, *before, kv))
        pool_at = tuple(one_at for _ in self._pool_shapes())
        shapes = jax.eval_shape(lambda: self._empty())
        state_at = jax.tree.map(lambda _: self.rows_at, shapes)._replace(pool=pool_at)
        prefix_at = Prefix(pool_at, self.rows_at, self.rows_at, self.rows_at)
        everywhere, rows, params = replicated(mesh), self.rows_at, self.params_at

        def on_shards(function: Any, *specs: PartitionSpec) -> Any:
            """The function of one shard, on all; an argument with the spec of the batch has a
            leading axis for the shards."""

            def local(*arguments: Any) -> Any:
                own = lambda x, spec: jax.tree.map(lambda a: a[0], x) if spec == batch else x
                found = function(*map(own, arguments, specs))
                return jax.tree.map(lambda a: a[None], found)

            return jax.shard_map(
                local, mesh=mesh, in_specs=specs, out_specs=batch, axis_names=set(BATCH_AXES),
                check_vma=False,
            )  # fmt: skip

        whole = PartitionSpec()
        jit = functools.partial(jax.jit, donate_argnums=0)
        init = jax.jit(on_shards(lambda _: self._empty(), whole), out_shardings=state_at)
        self.init = functools.partial(init, np.int32(0))  # shard_map wants an argument
        self.prefill = jax.jit(
            on_shards(self._prefill, whole, batch, batch, batch),
            in_shardings=(params, rows, rows, rows),
            out_shardings=prefix_at,
        )
        self.enqueue = jit(
            on_shards(self._enqueue, batch, batch, batch),
            in_shardings=(state_at, prefix_at, rows),
            out_shardings=state_at,
        )
        place = jit(
            on_shards(self._place, batch, batch, batch, whole),
            in_shardings=(state_at, prefix_at, rows, everywhere),
            out_shardings=state_at,
        )
        shard_R = np.arange(spec.shards, dtype=np.int32)
        self.place = lambda state, prefix, slot: place(state, prefix, shard_R, slot)
        self.cancel = jit(
            on_shards(self._cancel, batch, batch, batch),
            in_shardings=(state_at, rows, rows),
            out_shardings=state_at,
        )

        self.on_shards, self.state_at, self.everywhere = on_shards, state_at, everywhere
        self._to_dtype = jax.jit(
            lambda params: rollout_dtypes(params, jnp.dtype(c.compute_dtype)),
            out_shardings=self.params_at,
        )
        # One program for each size of the table and each mode.
        self.decode, self.one = functools.cache(self._decode_of), functools.cache(self._one_of)

    def _decode_of(self, table_pages: int, mode: Mode, steps: int) -> Any:
        decode = self.on_shards(
            functools.partial(self._decode, table_pages=table_pages, mode=mode, steps=steps),
            PartitionSpec(),
            PartitionSpec(BATCH_AXES),
        )
        return jax.jit(
            decode,
            donate_argnums=1,
            in_shardings=(self.params_at, self.state_at),
            out_shardings=(self.state_at, self.rows_at),
        )

    def _one_of(self, table_pages: int, mode: Mode) -> Any:
        decode = self._decode_of(table_pages, mode, 1)

        def one(params: Any, state: Any) -> Any:
            state, step = decode(params, state)
            flat = lambda x_RkB: x_RkB[:, 0].reshape(-1)
            valid_B = flat(step.flags_RkB) & VALID
            data_B3 = jnp.stack([flat(step.token_RkB), valid_B, state.drawn_B.reshape(-1)], axis=1)
            return state, data_B3, flat(step.log_prob_RkB)

        return jax.jit(
            one,
            donate_argnums=1,
            in_shardings=(self.params_at, self.state_at),
            out_shardings=(self.state_at, self.everywhere, self.everywhere),
        )

    def load(self, params: model.Params) -> model.Params:
        """See `DecoderEngine.load_params`."""
        if self.spec.model.compute_dtype != self.spec.model.param_dtype:
            params = self._to_dtype(params)
        return jax.device_put(params, self.params_at)

    def _pool_shapes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return self.spec.pool_layout.pool(self.spec.model, self.spec.shard_pages)

    def _empty(self) -> DecodeState:
        spec, c = self.spec, self.spec.model
        dtype = jnp.dtype(c.compute_dtype)
        return slots.empty(
            jax.tree.map(jnp.zeros_like, self._pool_shapes()),
            slots=spec.slots // spec.shards,
            entries=spec.entries,
            samples=spec.samples,
            pages=spec.shard_pages,
            table=spec.table_pages,
            width=c.width,
            dtype=dtype,
        )

    def _prefill(
        self, params: model.Params, tokens_PT: jax.Array, length_P: jax.Array, key_P2: jax.Array
    ) -> Prefix:
        c, (P, T) = self.spec.model, tokens_PT.shape
        dtype = jnp.dtype(c.compute_dtype)
        A, layout = self.spec.page_tokens, self.spec.pool_layout
        kv = jax.ShapeDtypeStruct((c.num_layers, P, T, c.num_kv_heads, c.head_dim), dtype)
        dense = jax.tree.map(jnp.zeros_like, jax.eval_shape(layout.keep, kv, kv))
        # In chunks, so that scores of a long prompt are chunk x prompt at most.
        chunk = next(
            n * A for n in range(max(1, self.spec.prefill_chunk_tokens // A), 0, -1)
            if T % (n * A) == 0
        )  # fmt: skip

        def one(carry: Any, start: jax.Array) -> tuple[Any, None]:
            cache, last_PD = carry
            position_PC = jnp.broadcast_to(start + jnp.arange(chunk)[None], (P, chunk))
            hidden_PCD, cache = model.hidden_states(
                c,
                params,
                jax.lax.dynamic_slice_in_dim(tokens_PT, start, chunk, axis=1),
                position_PC,
                attention.prefilling(start, chunk, layout.keep, layout.read),
                cache,
            )
            at_P = jnp.clip(length_P - 1 - start, 0, chunk - 1)
            here_PD = jnp.take_along_axis(hidden_PCD, at_P[:, None, None], axis=1)[:, 0]
            inside_P = (length_P > start) & (length_P <= start + chunk)
            return (cache, jnp.where(inside_P[:, None], here_PD, last_PD)), None

        first = dense, jnp.zeros((P, c.width), dtype)
        starts = jnp.arange(0, T, chunk, dtype=jnp.int32)
        (dense, last_PD), _ = jax.lax.scan(one, first, starts)
        return Prefix(paged.from_dense(layout, dense), last_PD, length_P, key_P2)

    def _enqueue(self, state: DecodeState, prefix: Prefix, arrivals: Arrivals) -> DecodeState:
        return slots.enqueue(state, *prefix, arrivals, self.spec.page_tokens)

    def _place(self, state: DecodeState, prefix: Prefix, shard: Any, slot: Any) -> DecodeState:
        B = self.spec.slots // self.spec.shards
        key = jax.random.fold_in(jax.random.wrap_key_data(prefix.key_RP2[0]), slot)
        return slots.place(
            state,
            prefix.pages,
            prefix.hidden_RPD[0],
            prefix.length_RP[0],
            jax.random.key_data(key),
            jnp.where(slot // B == shard, slot % B, B),
            self.spec.params,
            self.spec.max_response_tokens,
            self.spec.page_tokens,
        )

    def _cancel(self, state: DecodeState, entry_W: Any, column_W: Any) -> DecodeState:
        return slots.cancel(state, entry_W, column_W, self.spec.page_tokens)

    def _decode(
        self,
        params: model.Params,
        state: DecodeState,
        *,
        table_pages: int,
        mode: Mode,
        steps: int,
    ) -> tuple[DecodeState, Step]:
        spec, c = self.spec, self.spec.model
        A, B = spec.page_tokens, len(state.active_B)
        stops = jnp.asarray(spec.stop_tokens, jnp.int32)
        # Shards whose loops end apart, with collectives of the tensor axis in them, wait for each
        # other for ever on virtual CPU devices.
        together = spec.shards > 1 and self.mesh.shape["tensor"] > 1
        unembed_VD = model.unembedding(params)
        params = model.unstacked(params) if self.unroll else params
        integer = jnp.zeros((steps, B), jnp.int32)
        real = jnp.zeros((steps, B), jnp.float32)
        empty = Step(
            integer, real, real, integer, integer, integer, jnp.zeros(steps, jnp.int32),
            state.num_free,
        )  # fmt: skip

        def more(carry: Any) -> jax.Array:
            i, state, _, moved = carry
            if together:
                return i < steps
            has_work = jnp.any(state.active_B) | jnp.any(state.entries.left_E > 0)
            return (i < steps) & has_work & moved

        def one(carry: Any) -> Any:
            i, state, out, _ = carry
            state = slots.refill(state, A)
            state, goes_B = slots.grow(state, A)
            logits_BV = log_probs.logits(state.hidden_BD, unembed_VD, temperature=1.0)
            drawn = sample(logits_BV, state.key_B2, state.drawn_B, state.params, mode)
            hidden_BTD, pool = model.hidden_states(
                c,
                params,
                drawn.token_B[:, None],
                state.length_B[:, None],
                paged.decoding(
                    spec.pool_layout, state.table_BP[:, :table_pages], state.length_B, goes_B
                ),
                state.pool,
            )
            entry_B, column_B = state.entry_B, state.column_B
            state, over_B = slots.advance(
                state._replace(pool=pool), goes_B, drawn, hidden_BTD[:, 0], stops
            )
            state = slots.close(state, A)
            bits = ((goes_B, VALID), (over_B, OVER), (goes_B & ~drawn.finite_B, NOT_FINITE))
            flags_B = sum(bit * mask_B.astype(jnp.int32) for mask_B, bit in bits)
            row = (
                drawn.token_B, drawn.log_prob_B, drawn.model_log_prob_B, flags_B, entry_B,
                column_B, jnp.sum(state.entries.left_E),
            )  # fmt: skip
            filled = (x.at[i].set(value) for x, value in zip(out, row))
            return i + 1, state, out._make((*filled, state.num_free)), jnp.any(goes_B)

        start = (jnp.int32(0), state, empty, jnp.asarray(True))
        _, state, out, _ = jax.lax.while_loop(more, one, start)
        return state, out


def rollout_dtypes(params: model.Params, dtype: Any) -> model.Params:
    """The parameters as decoding reads them: matrices and biases in the compute dtype; norms stay,
    because they scale in float32."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: x if "norm" in jax.tree_util.keystr(path) else x.astype(dtype), params
    )
