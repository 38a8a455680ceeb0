"""How queries find keys: `attend` functions of the decoder, see `model.Attend`; that of decoding is
in `rollout.paged`.

Softmax and its sum are float32 whatever the compute dtype. Each returns the attended values
[B, T, N, H] and the cache.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dapo_jax.model import Attend

Arrays = tuple[jax.Array, ...]


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
    scores_BKXS = jnp.einsum("BKXH,BKSH->BKXS", q_BKXH, k_BKSH, preferred_element_type=jnp.float32)
    scores_BKGTS = scores_BKXS.reshape(B, K, G, T, S) * H**-0.5
    scores_BKGTS = jnp.where(mask_BTS[:, None, None], scores_BKGTS, -1e30)
    weights_BKXS = jax.nn.softmax(scores_BKGTS, axis=-1).reshape(B, K, G * T, S)
    out_BKXH = jnp.einsum("BKXS,BKSH->BKXH", weights_BKXS.astype(v_BKSH.dtype), v_BKSH)
    return out_BKXH.reshape(B, K, G, T, H).transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


def packed(segments_BT: jax.Array) -> Attend:
    """Attention within the segments of packed rows, causal; leaves the cache alone."""
    T = segments_BT.shape[1]
    back_TT = jnp.arange(T)[:, None] - jnp.arange(T)[None, :]
    mask_BTT = (segments_BT[:, :, None] == segments_BT[:, None, :]) & (back_TT >= 0)[None]

    def attend(
        layer: jax.Array | int,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: Any,
        window: jax.Array | int | None,
    ) -> tuple[jax.Array, Any]:
        seen_BTT = mask_BTT if window is None else mask_BTT & (back_TT < window)[None]
        return dot_product_attention(q, k, v, seen_BTT), cache

    return attend


def prefilling(
    start: jax.Array,
    num: int,
    keep: Callable[[jax.Array, jax.Array], Arrays],
    read: Callable[[Arrays], tuple[jax.Array, jax.Array]],
) -> Attend:
    """Part of prompts, tokens `start` to `start + num`: its keys and values enter the cache, arrays
    of [L, B, T, K, ...], then it attends to everything up to itself.

    Args:
        keep: keys and values [..., H] as the cache holds them.
        read: the other way round.
    """

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
        put = lambda x, new: jax.lax.dynamic_update_slice(x, new[None], at[: x.ndim])
        cache = tuple(map(put, cache, keep(k, v)))
        own = (jax.lax.dynamic_index_in_dim(x, layer, keepdims=False) for x in cache)
        k_BTKH, v_BTKH = read(tuple(own))
        back_CT = start + jnp.arange(num)[:, None] - jnp.arange(T)[None]
        mask_CT = back_CT >= 0 if window is None else (back_CT >= 0) & (back_CT < window)
        mask_BCT = jnp.broadcast_to(mask_CT[None], (B, num, T))
        return dot_product_attention(q, k_BTKH, v_BTKH, mask_BCT), cache

    return attend
