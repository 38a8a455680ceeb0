"""How queries find keys: the three `attend` functions of the decoder, see `model.Attend`.

Softmax and its sum are float32 whatever the compute dtype. Each returns the attended values
[B, T, N, H] and the cache. Cache layout: (k, v), each [L, slots, S, K, H].
"""

from typing import Any

import jax
import jax.numpy as jnp

from dapo_jax.model import Attend

Cache = tuple[jax.Array, jax.Array]


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
        layer: jax.Array,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: Any,
        window: jax.Array | None,
    ) -> tuple[jax.Array, Any]:
        seen_BTT = mask_BTT if window is None else mask_BTT & (back_TT < window)[None]
        return dot_product_attention(q, k, v, seen_BTT), cache

    return attend


def prefilling(segments_BT: jax.Array) -> Attend:
    """Packed attention that keeps every layer's keys and values in the cache [L, B, T, K, H]."""
    attend_packed = packed(segments_BT)

    def attend(
        layer: jax.Array,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: Cache,
        window: jax.Array | None,
    ) -> tuple[jax.Array, Cache]:
        cache_k, cache_v = cache
        cache = cache_k.at[layer].set(k), cache_v.at[layer].set(v)
        return attend_packed(layer, q, k, v, None, window)[0], cache

    return attend


def decoding(lengths_B: jax.Array) -> Attend:
    """One new token per slot: its key and value enter the cache at `lengths_B`, then it attends to
    everything up to itself."""

    def attend(
        layer: jax.Array,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: Cache,
        window: jax.Array | None,
    ) -> tuple[jax.Array, Cache]:
        cache_k, cache_v = cache
        slots, S = jnp.arange(cache_k.shape[1]), cache_k.shape[2]
        cache_k = cache_k.at[layer, slots, lengths_B].set(k[:, 0])
        cache_v = cache_v.at[layer, slots, lengths_B].set(v[:, 0])
        back_BS = lengths_B[:, None] - jnp.arange(S)[None]
        mask_BS = back_BS >= 0 if window is None else (back_BS >= 0) & (back_BS < window)
        mask_B1S = mask_BS[:, None]
        k_BSKH = jax.lax.dynamic_index_in_dim(cache_k, layer, keepdims=False)
        v_BSKH = jax.lax.dynamic_index_in_dim(cache_v, layer, keepdims=False)
        return dot_product_attention(q, k_BSKH, v_BSKH, mask_B1S), (cache_k, cache_v)

    return attend
