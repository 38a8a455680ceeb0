"""How queries find keys: `attend` functions of the decoder, see `model.Attend`; that of decoding is
in `rollout.paged`.

In training the program that `attention_kernels.choose` names attends; what is here is XLA's.
Softmax and its sum are float32 whatever the compute dtype (float64 where that is). Each returns the
attended values [B, T, N, H] and the cache.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dapo_jax.models.attention import kernels as attention_kernels
from dapo_jax.models.attention import zigzag
from dapo_jax.models.decoder import NO_WINDOW, Attend
from dapo_jax.utils.precision import at_least_float32, sum_dtype

Arrays = tuple[jax.Array, ...]
# Queries are cut into parts, each with the keys up to its end only: four parts of a row compute 5/8
# of the scores. Above LONG_ROW tokens those of QUERY_CHUNK queries of a row are alive at once.
PARTS, LEAST_PART = 4, 32
LONG_ROW, QUERY_CHUNK = 2048, 256
XLA = attention_kernels.Choice("xla")


class SharedPrompts(NamedTuple):
    """Of packed rows whose responses share their prompts, [B, T]."""

    prefixes_BT: jax.Array  # the segment that a token sees beside its own; its own: none
    positions_BT: jax.Array


class Places(NamedTuple):
    """Where tokens of rows are."""

    segments_BT: jax.Array
    at_BT: jax.Array  # increasing along whatever sees each other; [1, T] where rows are alike
    prefixes_BT: jax.Array | None  # see SharedPrompts; None: nothing is shared


def dot_product_attention(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, mask_BTS: jax.Array
) -> jax.Array:
    """softmax(q k^T / sqrt(H)) v over the positions where `mask_BTS`, as [B, T, N, H].

    A query whose mask is empty (padding) attends uniformly: finite, and read by nothing.
    """
    B, T, N, H = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    G = N // K  # queries per key-value head; their rows are stacked, one product per head
    q_BKXH = q_BTNH.reshape(B, T, K, G, H).transpose(0, 2, 3, 1, 4).reshape(B, K, G * T, H)
    k_BKSH, v_BKSH = k_BSKH.swapaxes(1, 2), v_BSKH.swapaxes(1, 2)
    scores_BKXS = jnp.einsum(
        "BKXH,BKSH->BKXS", q_BKXH, k_BKSH, preferred_element_type=sum_dtype(q_BKXH)
    )
    scores_BKGTS = scores_BKXS.reshape(B, K, G, T, S) * H**-0.5
    scores_BKGTS = jnp.where(mask_BTS[:, None, None], scores_BKGTS, -1e30)
    weights_BKXS = jax.nn.softmax(scores_BKGTS, axis=-1).reshape(B, K, G * T, S)
    out_BKXH = jnp.einsum("BKXS,BKSH->BKXH", weights_BKXS.astype(v_BKSH.dtype), v_BKSH)
    return out_BKXH.reshape(B, K, G, T, H).transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


def packed(
    segments_BT: jax.Array,
    choice: attention_kernels.Choice = XLA,
    shared: SharedPrompts | None = None,
) -> Attend:
    """Attention within the segments of packed rows, causal; leaves the cache alone.

    Args:
        segments_BT: where the tokens of a row lie over devices, in the order of `row_order`, as
            queries, keys and values then are.
        choice: the program that attends, from `attention_kernels.choose`.
        shared: in the order of `segments_BT`; for XLA alone. None: a segment sees itself only.
    """
    assert shared is None or choice.kernel == "xla"
    if choice.kernel == "xla" and choice.context > 1:
        return _over_context(segments_BT, choice, shared)
    T = segments_BT.shape[1]
    long = T > LONG_ROW
    size = max(LEAST_PART, -(-T // PARTS))
    size += -size % QUERY_CHUNK if long else 0
    parts = [slice(start, min(start + size, T)) for start in range(0, T, size)]
    row = Places(segments_BT, jnp.arange(T)[None], None)
    if shared is not None:
        row = Places(segments_BT, shared.positions_BT, shared.prefixes_BT)
    tokens = lambda own: jax.tree.map(lambda x: x[:, own], row)
    places = [(tokens(own), tokens(slice(0, own.stop))) for own in parts]
    # The same in every layer that does not slide: outside the scan over them.
    masks = [] if long else [seen(*of_part, None) for of_part in places]

    def attend(
        layer: jax.Array | int,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: Any,
        window: jax.Array | int | None,
    ) -> tuple[jax.Array, Any]:
        if choice.kernel != "xla":
            return attention_kernels.attend(choice, segments_BT, q, k, v, window), cache
        # Gradients of keys and values are summed over parts and chunks.
        k, v = at_least_float32(k), at_least_float32(v)
        out = []
        for i, own in enumerate(parts):
            arrays = q[:, own], k[:, : own.stop], v[:, : own.stop]
            if long:
                out.append(by_query_chunks(*arrays, *places[i], window))
            else:
                mask = masks[i] if window is None else seen(*places[i], window)
                out.append(_of_part(*arrays, mask))
        return checkpoint_name(jnp.concatenate(out, axis=1), attention_kernels.KEPT), cache

    return attend


def _over_context(
    segments_BT: jax.Array, choice: attention_kernels.Choice, shared: SharedPrompts | None
) -> Attend:
    """Attention of rows whose tokens lie over the context axis: each device has the queries of its
    own part and gathers keys and values."""
    assert choice.layout is not None
    parts, T = choice.context, segments_BT.shape[1]
    order_T = jnp.asarray(zigzag.order(T, parts))

    def local(
        kernels: tuple[Any, ...],
        window: jax.Array,
        rows: tuple[jax.Array, SharedPrompts | None],
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
    ) -> jax.Array:
        whole = lambda x: attention_kernels.whole_rows(x, parts)
        k, v = at_least_float32(whole(k)), at_least_float32(whole(v))
        segments_BC, shared = rows
        if shared is None:
            part = jax.lax.axis_index("context")
            at_C = jax.lax.dynamic_slice_in_dim(order_T, part * (T // parts), T // parts)
            own = Places(segments_BC, at_C[None], None)
            row = Places(whole(segments_BC), jnp.arange(T)[None], None)
        else:
            own = Places(segments_BC, shared.positions_BT, shared.prefixes_BT)
            row = jax.tree.map(whole, own)
        if T > LONG_ROW:
            return by_query_chunks(q, k, v, own, row, window)
        return _of_part(q, k, v, seen(own, row, window))

    program = attention_kernels.of_each_device(local, choice.layout, ())

    def attend(
        layer: jax.Array | int,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: Any,
        window: jax.Array | int | None,
    ) -> tuple[jax.Array, Any]:
        seen_back = jnp.asarray(NO_WINDOW if window is None else window, jnp.int32)
        out = program((), seen_back, (segments_BT, shared), q, k, v)
        return checkpoint_name(out, attention_kernels.KEPT), cache

    return attend


def seen(queries: Places, keys: Places, window: jax.Array | int | None) -> jax.Array:
    """Which of S tokens of a row T of its tokens see, [B, T, S]: those of their segment up to
    themselves, and of its prefix, the last `window` of them."""
    of = lambda x_BT: x_BT[:, :, None] == keys.segments_BT[:, None]
    within_BTS = of(queries.segments_BT)
    if queries.prefixes_BT is not None:
        within_BTS = within_BTS | of(queries.prefixes_BT)
    back_BTS = queries.at_BT[:, :, None] - keys.at_BT[:, None]
    near_BTS = back_BTS >= 0 if window is None else (back_BTS >= 0) & (back_BTS < window)
    return within_BTS & near_BTS


def _of_part(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, mask_BTS: jax.Array
) -> jax.Array:
    k_BSKH, v_BSKH = (x.astype(q_BTNH.dtype) for x in (k_BSKH, v_BSKH))
    return dot_product_attention(q_BTNH, k_BSKH, v_BSKH, mask_BTS)


def by_query_chunks(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    queries: Places,
    keys: Places,
    window: jax.Array | int | None,
) -> jax.Array:
    """`dot_product_attention` of T tokens of a row over S of them, QUERY_CHUNK of the T at a time;
    the backward pass computes their scores again. Other arguments as of `seen`."""
    B, T, N, H = q_BTNH.shape
    C = QUERY_CHUNK

    def cut(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, 0), (0, -T % C)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(len(x), -1, C, *x.shape[2:]).swapaxes(0, 1)

    @jax.checkpoint
    def attended(chunk: tuple[jax.Array, Places]) -> jax.Array:
        q_BCNH, of_chunk = chunk
        return _of_part(q_BCNH, k_BSKH, v_BSKH, seen(of_chunk, keys, window))

    out = jax.lax.map(attended, (cut(q_BTNH), jax.tree.map(cut, queries)))
    return out.swapaxes(0, 1).reshape(B, -1, N, H)[:, :T]


def prefilling(start: jax.Array, num: int) -> Attend:
    """Part of prompts, tokens `start` to `start + num`: its keys and values enter the cache,
    [L, B, T, K, H] each, then it attends to everything up to itself."""

    def attend(
        layer: jax.Array | int,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: Arrays,
        window: jax.Array | int | None,
    ) -> tuple[jax.Array, Arrays]:
        B, T = q.shape[0], cache[0].shape[2]
        zero = jnp.int32(0)
        at = (jnp.asarray(layer, jnp.int32), zero, start.astype(jnp.int32), zero, zero)
        put = lambda x, new: jax.lax.dynamic_update_slice(x, new[None].astype(x.dtype), at)
        cache = tuple(map(put, cache, (k, v)))
        own = lambda x: jax.lax.dynamic_index_in_dim(x, layer, keepdims=False)
        k_BTKH, v_BTKH = map(own, cache)
        back_CT = start + jnp.arange(num)[:, None] - jnp.arange(T)[None]
        mask_CT = back_CT >= 0 if window is None else (back_CT >= 0) & (back_CT < window)
        mask_BCT = jnp.broadcast_to(mask_CT[None], (B, num, T))
        return dot_product_attention(q, k_BTKH, v_BTKH, mask_BCT), cache

    return attend
