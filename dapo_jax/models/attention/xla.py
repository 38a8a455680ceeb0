"""Attention to packed rows and to prompts: `attend` functions, see `decoder.Attend`.

Training calls `packed`, which attends by XLA or by the kernel that `kernels.choose` names; prefill
calls `prefilling`; decoding has its own in `rollout.paged`. Softmax and its sum are float32 at
least, whatever the compute dtype.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from dapo_jax.models.attention import kernels, zigzag
from dapo_jax.models.decoder import NO_WINDOW, Attend
from dapo_jax.utils.precision import at_least_float32, sum_dtype

# Queries of a row are split into parts, each with the keys up to its end: four parts compute 5/8 of
# the scores. Above LONG_ROW tokens the scores of QUERY_CHUNK queries of a row are alive at once.
PARTS, LEAST_PART = 4, 32
LONG_ROW, QUERY_CHUNK = 2048, 256
XLA = kernels.Choice("xla")


class SharedPrompts(NamedTuple):
    """Packed rows [B, T] whose responses share their prompts."""

    prefixes_BT: jax.Array  # another segment that a token sees; its own segment: none
    positions_BT: jax.Array


class TokenPositions(NamedTuple):
    """Positions of tokens in packed rows."""

    segments_BT: jax.Array
    positions_BT: jax.Array  # increasing within a segment; [1, T] where rows are alike
    prefixes_BT: jax.Array | None  # see SharedPrompts; None: no prompt is shared


def dot_product_attention(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    mask_BTS: Bool[Array, "B T S"],
) -> Float[Array, "B T N H"]:
    """Returns softmax(q k^T / sqrt(H)) v over the positions of the mask.

    A query whose mask is empty (padding) attends uniformly: finite, and nothing reads it.
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
    segments_BT: Int[Array, "B T"],
    choice: kernels.Choice = XLA,
    shared: SharedPrompts | None = None,
) -> Attend:
    """Returns causal attention within the segments of packed rows, which leaves the cache alone.

    Args:
        segments_BT: in zig-zag order where the tokens of a row lie over devices, as q, k and v.
        choice: the program that attends, from `kernels.choose`.
        shared: in the order of `segments_BT`, for XLA alone. None: a token sees its segment only.
    """
    assert shared is None or choice.kernel == "xla"
    if choice.kernel == "xla" and choice.context > 1:
        return _over_context(segments_BT, choice, shared)
    T = segments_BT.shape[1]
    long = T > LONG_ROW
    size = max(LEAST_PART, -(-T // PARTS))
    size += -size % QUERY_CHUNK if long else 0
    parts = [slice(start, min(start + size, T)) for start in range(0, T, size)]
    row = TokenPositions(segments_BT, jnp.arange(T)[None], None)
    if shared is not None:
        row = TokenPositions(segments_BT, shared.positions_BT, shared.prefixes_BT)
    tokens = lambda own: jax.tree.map(lambda x: x[:, own], row)
    positions = [(tokens(own), tokens(slice(0, own.stop))) for own in parts]
    # The same in every layer that does not slide: outside the scan over them.
    masks = [] if long else [attention_mask(*of_part, None) for of_part in positions]

    def attend(layer: Any, q: Array, k: Array, v: Array, cache: Any, window: Any) -> Any:
        if choice.kernel != "xla":
            return kernels.attend(choice, segments_BT, q, k, v, window), cache
        # Gradients of keys and values are summed over parts and chunks.
        k, v = at_least_float32(k), at_least_float32(v)
        out = []
        for i, own in enumerate(parts):
            arrays = q[:, own], k[:, : own.stop], v[:, : own.stop]
            if long:
                out.append(_by_query_chunks(*arrays, *positions[i], window))
            else:
                mask = masks[i] if window is None else attention_mask(*positions[i], window)
                out.append(_in_q_dtype(*arrays, mask))
        return checkpoint_name(jnp.concatenate(out, axis=1), kernels.KEPT), cache

    return attend


def _over_context(segments_BT: Array, choice: kernels.Choice, shared: Any) -> Attend:
    """Returns attention to rows over the context axis: devices gather keys and values."""
    assert choice.layout is not None
    parts, T = choice.context, segments_BT.shape[1]
    order_T = jnp.asarray(zigzag.order(T, parts))

    def local(_: Any, window: Array, rows: Any, q: Array, k: Array, v: Array) -> Array:
        whole = lambda x: kernels.whole_rows(x, parts)
        k, v = at_least_float32(whole(k)), at_least_float32(whole(v))
        segments_BT, shared = rows
        if shared is None:
            start = jax.lax.axis_index("context") * (T // parts)
            own_T = jax.lax.dynamic_slice_in_dim(order_T, start, T // parts)
            own = TokenPositions(segments_BT, own_T[None], None)
            row = TokenPositions(whole(segments_BT), jnp.arange(T)[None], None)
        else:
            own = TokenPositions(segments_BT, shared.positions_BT, shared.prefixes_BT)
            row = jax.tree.map(whole, own)
        if T > LONG_ROW:
            return _by_query_chunks(q, k, v, own, row, window)
        return _in_q_dtype(q, k, v, attention_mask(own, row, window))

    program = kernels.on_each_device(local, choice.layout, ())

    def attend(layer: Any, q: Array, k: Array, v: Array, cache: Any, window: Any) -> Any:
        window = jnp.asarray(NO_WINDOW if window is None else window, jnp.int32)
        out = program((), window, (segments_BT, shared), q, k, v)
        return checkpoint_name(out, kernels.KEPT), cache

    return attend


def attention_mask(
    queries: TokenPositions, keys: TokenPositions, window: Array | int | None
) -> Bool[Array, "_ T S"]:
    """Returns the mask [B, T, S]: a query sees its segment and its prefix up to itself.

    Args:
        window: the last positions that it sees; None: all.
    """
    of = lambda x_BT: x_BT[:, :, None] == keys.segments_BT[:, None]
    within_BTS = of(queries.segments_BT)
    if queries.prefixes_BT is not None:
        within_BTS = within_BTS | of(queries.prefixes_BT)
    back_BTS = queries.positions_BT[:, :, None] - keys.positions_BT[:, None]
    return within_BTS & _near(back_BTS, window)


def _near(back: Array, window: Array | int | None) -> Array:
    """Returns whether a key `back` positions before its query is seen."""
    return back >= 0 if window is None else (back >= 0) & (back < window)


def _in_q_dtype(q_BTNH: Array, k_BSKH: Array, v_BSKH: Array, mask_BTS: Array) -> Array:
    k_BSKH, v_BSKH = (x.astype(q_BTNH.dtype) for x in (k_BSKH, v_BSKH))
    return dot_product_attention(q_BTNH, k_BSKH, v_BSKH, mask_BTS)


def _by_query_chunks(
    q_BTNH: Array,
    k_BSKH: Array,
    v_BSKH: Array,
    queries: TokenPositions,
    keys: TokenPositions,
    window: Array | int | None,
) -> Array:
    """Attends for QUERY_CHUNK queries at a time; the backward pass computes scores again."""
    B, T, N, H = q_BTNH.shape
    C = QUERY_CHUNK

    def split(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, 0), (0, -T % C)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(len(x), -1, C, *x.shape[2:]).swapaxes(0, 1)

    @jax.checkpoint
    def attended(chunk: tuple[jax.Array, TokenPositions]) -> jax.Array:
        q_chunk, of_chunk = chunk
        return _in_q_dtype(q_chunk, k_BSKH, v_BSKH, attention_mask(of_chunk, keys, window))

    out = jax.lax.map(attended, (split(q_BTNH), jax.tree.map(split, queries)))
    return out.swapaxes(0, 1).reshape(B, -1, N, H)[:, :T]


def prefilling(start: Int[Array, ""], num: int) -> Attend:
    """Returns attention of prompt tokens `start` to `start + num` to all tokens up to themselves.

    The cache holds keys and values [L, B, S, K, H]; those of these tokens are written first.
    """

    def attend(layer: Any, q: Array, k: Array, v: Array, cache: Any, window: Any) -> Any:
        B, S = q.shape[0], cache[0].shape[2]
        zero = jnp.int32(0)
        at = (jnp.asarray(layer, jnp.int32), zero, start.astype(jnp.int32), zero, zero)
        put = lambda x, new: jax.lax.dynamic_update_slice(x, new[None].astype(x.dtype), at)
        cache = tuple(map(put, cache, (k, v)))
        own = lambda x: jax.lax.dynamic_index_in_dim(x, layer, keepdims=False)
        k_BSKH, v_BSKH = map(own, cache)
        mask_TS = _near(start + jnp.arange(num)[:, None] - jnp.arange(S)[None], window)
        mask_BTS = jnp.broadcast_to(mask_TS[None], (B, num, S))
        return dot_product_attention(q, k_BSKH, v_BSKH, mask_BTS), cache

    return attend
