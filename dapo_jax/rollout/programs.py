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

from dapo_jax.config import MeshConfig
from dapo_jax.models import chunked_softmax, decoder
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
from dapo_jax.rollout.sampling import Mode, sample
from dapo_jax.rollout.slots import Arrivals, DecodeState
from dapo_jax.rollout.spec import NOT_FINITE, OVER, VALID, EngineSpec, Prefix, Step
from dapo_jax.rollout.tiles import tile_on
from dapo_jax.utils.compilations import return_memory
from dapo_jax.utils.precision import multiply_in

UNROLLED_LAYERS = 32  # at most, on CPUs: there a scan copies each layer's weights at each token


class Loaded(NamedTuple):
    """The parameters as the programs read them."""

    prefill: decoder.Params
    # The same; or, where decoding writes the layers out, with a copy of these one by one: taken out
    # of the stacked ones they would be copied at every call.
    decode: decoder.Params

    def copied_bytes(self, of: decoder.Params) -> int:
        """Bytes on the devices of this process that are not the trainer's own parameters."""
        layers = 0 if self.decode is self.prefill else local_bytes(self.decode["layers"])
        return copied_bytes(self.prefill, of) + layers


def rollout_layout(layout: MeshConfig) -> MeshConfig:
    """The mesh with parameters whole on every shard of the batch: decoding reads all of them for
    every token, and would gather them every time."""
    rules = tuple((name, None if axis in BATCH_AXES else axis) for name, axis in layout.rules)
    return dataclasses.replace(layout, rules=rules)


@functools.cache
class Programs:
    """The compiled programs, with their layouts and donations."""

    def __init__(self, spec: EngineSpec, mesh: Mesh, trained_on: Mesh):
        return_memory()
        self.spec, self.mesh, c = spec, mesh, spec.model
        platform = mesh.devices.flat[0].platform
        multiply_in(c.compute_dtype, platform)
        self.tile = tile_on(platform)
        self.unroll = platform == "cpu" and c.num_layers <= UNROLLED_LAYERS
        self.params_at = param_shardings(c, rollout_layout(spec.layout), mesh)
        of_one = lambda at: NamedSharding(mesh, PartitionSpec(*at.spec[1:]))
        apart_at = (jax.tree.map(of_one, self.params_at["layers"]),) * c.num_layers
        self.decode_params_at = self.for_decoding(self.params_at, lambda _: apart_at)
        self.one_by_one = jax.jit(decoder.unstacked, out_shardings=apart_at)
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

            # All axes but that of the heads, as a TPU kernel must have none left to the compiler.
            return jax.shard_map(
                local, mesh=mesh, in_specs=specs, out_specs=batch,
                axis_names={*BATCH_AXES, "context"}, check_vma=False,
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
        self.place = lambda state, prefix, slot: place(state, prefix, self.put(shard_R), slot)
        self.cancel = jit(
            on_shards(self._cancel, batch, batch, batch),
            in_shardings=(state_at, rows, rows),
            out_shardings=state_at,
        )

        self.check_last_page = jit(
            on_shards(self._check_last_page, batch, whole),
            in_shardings=(state_at, everywhere),
            out_shardings=(state_at, rows),
        )

        # Of several processes each has to say where arrays of the host go, even on its own devices;
        # those that draw together all have them.
        self.put = lambda tree: tree
        if mesh.is_multi_process:
            self.put = lambda tree: to_mesh(jax.tree.map(np.asarray, tree), rows)
        elif jax.process_count() > 1:
            self.put = functools.partial(jax.device_put, device=rows)
        self.on_shards, self.state_at, self.everywhere = on_shards, state_at, everywhere
        self.elsewhere, together = mesh != trained_on, mesh.shape["tensor"]
        everywhere = rollout_mesh(trained_on, together)
        way = reshard_steps(c, spec.layout, trained_on, together)

        def to_rollout(params: decoder.Params) -> decoder.Params:
            params = rollout_dtypes(params, jnp.dtype(c.compute_dtype))
            for layout in way:
                params = jax.tree.map(
                    lambda at, x: x if at is None else jax.lax.with_sharding_constraint(x, at),
                    layout,
                    params,
                    is_leaf=lambda node: node is None,
                )
            return params

        self.rolled_at = param_shardings(c, rollout_layout(spec.layout), everywhere)
        self.to_rollout = jax.jit(to_rollout, out_shardings=self.rolled_at)
        # One program for each mode.
        self.decode, self.one = functools.cache(self._decode_of), functools.cache(self._one_of)

    def _decode_of(self, mode: Mode, steps: int) -> Any:
        decode = self.on_shards(
            functools.partial(self._decode, mode=mode, steps=steps),
            PartitionSpec(),
            PartitionSpec(BATCH_AXES),
        )
        return jax.jit(
            decode,
            donate_argnums=1,
            in_shardings=(self.decode_params_at, self.state_at),
            out_shardings=(self.state_at, self.rows_at),
        )

    def _one_of(self, mode: Mode) -> Any:
        decode = self._decode_of(mode, 1)

        def one(params: Any, state: Any) -> Any:
            state, step = decode(params, state)
            flat = lambda x_RkB: x_RkB[:, 0].reshape(-1)
            valid_B = flat(step.flags_RkB) & VALID
            data_B3 = jnp.stack([flat(step.token_RkB), valid_B, state.drawn_B.reshape(-1)], axis=1)
            return state, data_B3, flat(step.log_prob_RkB)

        return jax.jit(
            one,
            donate_argnums=1,
            in_shardings=(self.decode_params_at, self.state_at),
            out_shardings=(self.state_at, self.everywhere, self.everywhere),
        )

    def load(self, params: decoder.Params) -> Loaded:
        """See `DecoderEngine.load_params`."""
        c = self.spec.model
        there = jax.tree.map(
            lambda x, at: x.sharding.is_equivalent_to(at, x.ndim), params, self.rolled_at
        )
        # One program brings them to where all processes draw. Not `device_put`, which takes what is
        # laid out otherwise through the host's memory.
        if c.compute_dtype != c.param_dtype or not jax.tree.all(there):
            params = self.to_rollout(params)
        if self.elsewhere:
            params = own_part(params, self.params_at)
        else:
            params = jax.device_put(params, self.params_at)
        return Loaded(params, self.for_decoding(params, self.one_by_one))

    def for_decoding(self, params: Any, one_by_one: Callable[[Any], Any]) -> Any:
        """The parameters, or what there is of each, as `decode` takes them.

        Args:
            one_by_one: of what there is of stacked layers, what there is of each.
        """
        return params | {"layers": one_by_one(params["layers"])} if self.unroll else params

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
            width=c.hidden_size,
            dtype=dtype,
        )

    def _prefill(
        self, params: decoder.Params, tokens_PT: jax.Array, length_P: jax.Array, key_P2: jax.Array
    ) -> Prefix:
        c, (P, T) = self.spec.model, tokens_PT.shape
        dtype = jnp.dtype(c.compute_dtype)
        A, layout = self.spec.page_tokens, self.spec.pool_layout
        # In chunks, so that scores of a long prompt are chunk x prompt at most: as few as can be,
        # all of the same pages, the last one beyond the prompt where they do not divide its own.
        num = -(-T // (A * max(1, self.spec.prefill_chunk_tokens // A)))
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
                paged.sound(xla.prefilling(start, chunk)),
                cache,
            )
            at_P = jnp.clip(length_P - 1 - start, 0, chunk - 1)
            here_PD = jnp.take_along_axis(hidden_PCD, at_P[:, None, None], axis=1)[:, 0]
            inside_P = (length_P > start) & (length_P <= start + chunk)
            # What follows such a token sees zeros in its place, and is finite.
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

    def _check_last_page(self, state: DecodeState, last_2: Any) -> tuple[DecodeState, jax.Array]:
        layout, heads = self.spec.pool_layout, self.spec.model.num_heads
        difference, pool = paged.last_page_difference(
            layout, state.pool, last_2, heads, state.table_BP, self.tile
        )
        return state._replace(pool=pool), difference

    def _decode(
        self,
        params: decoder.Params,
        state: DecodeState,
        *,
        mode: Mode,
        steps: int,
    ) -> tuple[DecodeState, Step]:
        spec, c = self.spec, self.spec.model
        A, B = spec.page_tokens, len(state.active_B)
        stops = jnp.asarray(spec.stop_tokens, jnp.int32)
        # Shards whose loops end apart, with collectives of the tensor axis in them, wait for each
        # other for ever on virtual CPU devices.
        together = spec.shards > 1 and self.mesh.shape["tensor"] > 1
        unembed_VD = decoder.unembedding(params)
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
            logits_BV = chunked_softmax.logits(state.hidden_BD, unembed_VD, temperature=1.0)
            drawn = sample(logits_BV, state.key_B2, state.drawn_B, state.params, mode)
            hidden_BTD, pool = decoder.bind(c, params)(
                drawn.token_B[:, None],
                state.length_B[:, None],
                paged.decoding(spec.pool_layout, state.table_BP, state.length_B, goes_B, self.tile),
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


def rollout_dtypes(params: decoder.Params, dtype: Any) -> decoder.Params:
    """The parameters as decoding reads them: matrices and biases in the compute dtype; norms stay,
    because they scale in float32."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: x if "norm" in jax.tree_util.keystr(path) else x.astype(dtype), params
    )
