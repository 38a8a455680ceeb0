"""The compiled programs of the engine: what they compute, where their arrays lie, what is donated.

Every shard of the batch (the data and fsdp axes) keeps slots, pages and prompts of its own, and
decodes by itself; the tensor axis splits heads within a shard.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dapo_jax.config import MeshConfig, ModelConfig
from dapo_jax.models import chunked_softmax, decoder, lora
from dapo_jax.models.attention import xla
from dapo_jax.models.sharding import (
    BATCH_AXES,
    copied_bytes,
    local_bytes,
    own_part,
    param_shardings,
    replicated,
    reshard_steps,
    rollout_mesh,
    to_mesh,
)
from dapo_jax.rollout import paged, slots
from dapo_jax.rollout.engine_config import EngineConfig
from dapo_jax.rollout.jetstream import NOT_FINITE, OVER, VALID, DecodeOutput
from dapo_jax.rollout.sampling import Mode, sample
from dapo_jax.rollout.slots import DecodeState, Prefix
from dapo_jax.rollout.tiles import tile_on
from dapo_jax.utils.heap import trim_after_compilations
from dapo_jax.utils.precision import multiply_in

UNROLLED_LAYERS = 32  # at most, see `unrolls`


class RolloutParams(NamedTuple):
    """The parameters as the programs read them."""

    prefill: decoder.Params
    # The same, or with a copy of each layer where decoding writes the layers out one by one.
    decode: decoder.Params

    def copied_bytes(self, of: decoder.Params) -> int:
        """Returns the bytes on this process's devices that are not the trainer's parameters."""
        layers = 0 if self.decode is self.prefill else local_bytes(self.decode["layers"])
        return copied_bytes(self.prefill, of) + layers


def rollout_layout(layout: MeshConfig) -> MeshConfig:
    """Returns the mesh config with parameters whole on every shard of the batch.

    Decoding reads all of them for every token, and would gather them every time.
    """
    rules = tuple((name, None if axis in BATCH_AXES else axis) for name, axis in layout.rules)
    return dataclasses.replace(layout, rules=rules)


def rollout_dtypes(c: ModelConfig, params: decoder.Params) -> decoder.Params:
    """Returns the parameters as decoding reads them: matrices and biases in the compute dtype.

    Norms and the scales of int8 matrices keep theirs, because they scale in float32; and so does
    the unembedding with `head_dtype`.
    """
    dtype = jnp.dtype(c.compute_dtype)
    head = "['embed']" if c.tie_embeddings else "['unembed']"

    def of_rollout(path: Any, x: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path)
        keeps = "norm" in name or "scale" in name or x.dtype == jnp.int8
        keeps = keeps or (c.head_dtype is not None and name == head)
        return x if keeps else x.astype(dtype)

    return jax.tree_util.tree_map_with_path(of_rollout, params)


def unrolls(platform: str, c: ModelConfig) -> bool:
    """Returns whether decoding has no scan over the layers: each layer has arrays of its own.

    A scan, and slices of stacked arrays too, copy each layer's weights at each token on CPUs and
    GPUs; docs/rollout.md. The arrays take as much memory as the layers: too much for adapters on a
    GPU, where the frozen layers are nearly all that a run holds. More layers compile longer.
    """
    fits = platform == "cpu" or not c.lora_rank
    return platform != "tpu" and fits and c.num_layers <= UNROLLED_LAYERS


@functools.cache
class Programs:
    """The jitted programs, with their layouts and donations. Cached: engines of one config and mesh
    share an instance, so that nothing is compiled twice."""

    def __init__(self, config: EngineConfig, mesh: Mesh, trained_on: Mesh):
        trim_after_compilations()
        self.config, self.mesh, c = config, mesh, config.model
        platform = mesh.devices.flat[0].platform
        multiply_in(c.compute_dtype, platform)
        self.tile = tile_on(platform)
        self._place_params(trained_on, platform)

        self.rows_at = rows = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
        before_heads = [None] * config.pool_layout.kv_axis
        page_at = NamedSharding(mesh, PartitionSpec(BATCH_AXES, *before_heads, config.heads_axis))
        shapes = jax.eval_shape(functools.partial(slots.empty, config))
        pool_at = (page_at,) * len(shapes.pool)
        self.state_at = jax.tree.map(lambda _: rows, shapes)._replace(pool=pool_at)
        prefix_at = Prefix(pool_at, rows, rows, rows)
        page_tokens = config.page_tokens

        def init() -> DecodeState:
            every = lambda x: jnp.broadcast_to(x[None], (config.shards, *x.shape))
            return jax.tree.map(every, slots.empty(config))

        self.init = jax.jit(init, out_shardings=self.state_at)
        self.prefill = self._on_shards(
            self._prefill, (self.params_at, rows, rows, rows), prefix_at, whole=0
        )
        self.insert = self._on_shards(
            functools.partial(slots.insert, page_tokens=page_tokens),
            (self.state_at, prefix_at, rows),
            self.state_at,
            donated=(0,),
        )
        self.cancel = self._on_shards(
            functools.partial(slots.cancel, page_tokens=page_tokens),
            (self.state_at, rows, rows),
            self.state_at,
            donated=(0,),
        )
        self.check_page = self._on_shards(
            self._check_page,
            (self.state_at, replicated(mesh)),
            (self.state_at, rows),
            whole=1,
            donated=(0,),
        )
        self.decode = functools.cache(self._decode_in)  # one program for each mode

        # Of several processes each has to say where arrays of the host go, even on its own devices.
        self.put = lambda tree: tree
        if mesh.is_multi_process:
            self.put = lambda tree: to_mesh(jax.tree.map(np.asarray, tree), rows)
        elif jax.process_count() > 1:
            self.put = functools.partial(jax.device_put, device=rows)

    def _place_params(self, trained_on: Mesh, platform: str) -> None:
        """Sets where parameters lie, and the programs that bring the trainer's parameters there."""
        config, mesh, c = self.config, self.mesh, self.config.model
        layout = rollout_layout(config.layout)
        self.unroll = unrolls(platform, c)
        self.params_at = param_shardings(c, layout, mesh)
        of_one = lambda at: NamedSharding(mesh, PartitionSpec(*at.spec[1:]))
        unstacked_at = (jax.tree.map(of_one, self.params_at["layers"]),) * c.num_layers
        self.decode_params_at = self.for_decoding(self.params_at, lambda _: unstacked_at)
        self.unstack = jax.jit(decoder.unstacked, out_shardings=unstacked_at)

        self.elsewhere, tensor = mesh != trained_on, mesh.shape["tensor"]
        self.rolled_at = param_shardings(c, layout, rollout_mesh(trained_on, tensor))
        path = reshard_steps(c, config.layout, trained_on, tensor)

        def mover(part: int) -> Any:
            """Returns the program for the trained parameters (0) or the frozen ones (1)."""

            def move(params: decoder.Params) -> decoder.Params:
                params = rollout_dtypes(c, params)
                for stop in path:
                    params = jax.tree.map(
                        lambda at, x: x if at is None else jax.lax.with_sharding_constraint(x, at),
                        lora.split(stop)[part],
                        params,
                        is_leaf=lambda node: node is None,
                    )
                return params

            return jax.jit(move, out_shardings=lora.split(self.rolled_at)[part])

        self.movers = mover(0), mover(1)

    def _on_shards(
        self,
        function: Any,
        given: Any,
        made: Any,
        *,
        whole: int = -1,
        donated: tuple[int, ...] = (),
    ) -> Any:
        """Returns the jitted program that runs `function`, written for one shard, on all shards.

        Args:
            given: shardings of the arguments, which have a leading axis for the shards.
            made: shardings of the results.
            whole: position of the argument without such an axis.
            donated: positions of the donated arguments.
        """
        batch = PartitionSpec(BATCH_AXES)
        specs = tuple(PartitionSpec() if i == whole else batch for i in range(len(given)))

        def local(*arguments: Any) -> Any:
            own = [
                x if i == whole else jax.tree.map(lambda a: a[0], x)
                for i, x in enumerate(arguments)
            ]
            return jax.tree.map(lambda a: a[None], function(*own))

        # All axes but that of the heads, as a TPU kernel must have none left to the compiler.
        axes = {*BATCH_AXES, "context"}
        program = jax.shard_map(
            local, mesh=self.mesh, in_specs=specs, out_specs=batch, axis_names=axes, check_vma=False
        )
        return jax.jit(program, donate_argnums=donated, in_shardings=given, out_shardings=made)

    def _decode_in(self, mode: Mode) -> Any:
        return self._on_shards(
            functools.partial(self._decode, mode=mode),
            (self.decode_params_at, self.state_at),
            (self.state_at, self.rows_at),
            whole=0,
            donated=(1,),
        )

    def load(self, params: decoder.Params) -> RolloutParams:
        """See `DecoderEngine.load_params`."""
        # One program moves each part. `device_put` would take what is laid out otherwise through
        # the host's memory.
        # Of the part moved, arrays that were in place already are not held twice.
        moves = zip(lora.split(params), self._in_place(params), self.movers, strict=True)
        own = functools.partial(jax.tree.map, lambda there, x, moved: x if there else moved)
        trained, frozen = (
            part if jax.tree.all(there) else own(there, part, mover(part))
            for part, there, mover in moves
        )
        assert trained is not None
        params = lora.join(trained, frozen)
        if self.elsewhere:
            params = own_part(params, self.params_at)
        else:
            params = jax.device_put(params, self.params_at)
        return RolloutParams(params, self.for_decoding(params, self.unstack))

    def _in_place(self, params: decoder.Params) -> tuple[Any, Any]:
        """Returns whether each trained and each frozen parameter is in the rollout's dtype and
        layout."""
        wanted = jax.eval_shape(functools.partial(rollout_dtypes, self.config.model), params)
        there = jax.tree.map(
            lambda x, like, at: x.dtype == like.dtype and x.sharding.is_equivalent_to(at, x.ndim),
            params,
            wanted,
            self.rolled_at,
        )
        return lora.split(there)

    def lower_move(self, params: decoder.Params) -> Any:
        """Returns the program that moves the parameters, lowered; of two the second, which moves
        the most.

        Args:
            params: shapes of the trainer's parameters with their shardings, not all in place.
        """
        moves = zip(lora.split(params), self._in_place(params), self.movers, strict=True)
        part, _, mover = [move for move in moves if not jax.tree.all(move[1])][-1]
        return mover.lower(part)

    def for_decoding(self, params: Any, unstack: Callable[[Any], Any]) -> Any:
        """Returns the parameters, or a tree like theirs, as `decode` takes them.

        Args:
            unstack: makes one entry for each layer of the entry of the stacked layers.
        """
        return params | {"layers": unstack(params["layers"])} if self.unroll else params

    def _prefill(
        self, params: decoder.Params, tokens_PT: jax.Array, length_P: jax.Array, key_P2: jax.Array
    ) -> Prefix:
        c, (P, T) = self.config.model, tokens_PT.shape
        dtype = jnp.dtype(c.compute_dtype)
        A, layout = self.config.page_tokens, self.config.pool_layout
        # The fewest chunks of whole pages, all alike, so that scores are at most chunk x prompt.
        # The last chunk may reach beyond the prompt.
        num = -(-T // (A * max(1, self.config.prefill_chunk_tokens // A)))
        chunk = A * -(-T // (A * num))
        S = num * chunk
        tokens_PS = jnp.pad(tokens_PT, ((0, 0), (0, S - T)))
        dense = (jnp.zeros((c.num_layers, P, S, c.num_kv_heads, c.head_dim), dtype),) * 2

        def one(carry: Any, start: jax.Array) -> tuple[Any, None]:
            cache, last_PD, finite_P = carry
            position_PC = jnp.broadcast_to(start + jnp.arange(chunk)[None], (P, chunk))
            hidden_PCD, cache = decoder.bind(c, params)(
                jax.lax.dynamic_slice_in_dim(tokens_PS, start, chunk, axis=1),
                position_PC,
                paged.nan_safe(xla.prefilling(start, chunk)),
                cache,
            )
            at_P = jnp.clip(length_P - 1 - start, 0, chunk - 1)
            here_PD = jnp.take_along_axis(hidden_PCD, at_P[:, None, None], axis=1)[:, 0]
            inside_P = (length_P > start) & (length_P <= start + chunk)
            # A token after one that is not finite sees zeros in its place, and is finite.
            finite_PC = jnp.all(jnp.isfinite(hidden_PCD), axis=-1)
            padding_PC = position_PC >= length_P[:, None]
            finite_P = finite_P & jnp.all(finite_PC | padding_PC, axis=1)
            return (cache, jnp.where(inside_P[:, None], here_PD, last_PD), finite_P), None

        first = dense, jnp.zeros((P, c.hidden_size), dtype), jnp.ones(P, bool)
        starts = jnp.arange(0, S, chunk, dtype=jnp.int32)
        (dense, last_PD, finite_P), _ = jax.lax.scan(one, first, starts)
        last_PD = jnp.where(finite_P[:, None], last_PD, jnp.nan)
        dense = tuple(x[:, :, :T] for x in dense)
        return Prefix(paged.from_dense(layout, dense), last_PD, length_P, key_P2)

    def _check_page(self, state: DecodeState, at_2: Any) -> tuple[DecodeState, jax.Array]:
        layout, heads = self.config.pool_layout, self.config.model.num_heads
        difference, pool = paged.page_difference(
            layout, state.pool, at_2, heads, state.table_BJ, self.tile
        )
        return state._replace(pool=pool), difference

    def _decode(
        self, params: decoder.Params, state: DecodeState, *, mode: Mode
    ) -> tuple[DecodeState, DecodeOutput]:
        config, c = self.config, self.config.model
        A, B, k = config.page_tokens, len(state.active_B), config.decode_steps
        stops = jnp.asarray(config.stop_tokens, jnp.int32)
        # Shards whose loops end apart, with collectives of the tensor axis in them, wait for each
        # other for ever on virtual CPU devices.
        in_step = config.shards > 1 and self.mesh.shape["tensor"] > 1
        unembed_VD = decoder.unembedding(params)
        integers, reals = jnp.zeros((k, B), jnp.int32), jnp.zeros((k, B), jnp.float32)
        nothing = (
            jnp.zeros((k, B, 3), jnp.int32),
            reals,
            reals,
            integers,
            integers,
            jnp.zeros(k, jnp.int32),
        )

        def more(carry: Any) -> jax.Array:
            i, state, _, moved = carry
            if in_step:
                return i < k
            has_work = jnp.any(state.active_B) | jnp.any(state.requests.waiting_E > 0)
            return (i < k) & has_work & moved

        def one(carry: Any) -> Any:
            i, state, out, _ = carry
            state = slots.refill(state, A)
            state, goes_B = slots.grow(state, A)
            logits_BV = chunked_softmax.logits(
                state.hidden_BD, unembed_VD, temperature=1.0, exact=c.head_dtype is not None
            )
            sampled = sample(logits_BV, state.key_B2, state.sampled_B, state.params, mode)
            attend = paged.decoding(
                config.pool_layout, state.table_BJ, state.length_B, goes_B, self.tile
            )
            hidden_BTD, pool = decoder.bind(c, params)(
                sampled.token_B[:, None], state.length_B[:, None], attend, state.pool
            )
            request_B, sample_index_B = state.request_B, state.sample_index_B
            state, over_B = slots.advance(
                state._replace(pool=pool), goes_B, sampled, hidden_BTD[:, 0], stops
            )
            state = slots.close(state, A)
            bits = ((goes_B, VALID), (over_B, OVER), (goes_B & ~sampled.finite_B, NOT_FINITE))
            flags_B = sum(bit * mask_B.astype(jnp.int32) for mask_B, bit in bits)
            found = (
                jnp.stack([sampled.token_B, flags_B, state.sampled_B], axis=-1),
                sampled.log_prob_B,
                sampled.model_log_prob_B,
                request_B,
                sample_index_B,
                jnp.sum(state.requests.waiting_E),
            )
            out = tuple(x.at[i].set(value) for x, value in zip(out, found))
            return i + 1, state, out, jnp.any(goes_B)

        start = (jnp.int32(0), state, nothing, jnp.asarray(True))
        _, state, out, _ = jax.lax.while_loop(more, one, start)
        return state, DecodeOutput.of(*out, state.num_free)
