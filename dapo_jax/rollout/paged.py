"""The KV cache in pages: its layout, and attention over it.

A sequence owns the pages of `page_tokens` tokens that its row of the page table names, in order.
Page 0 is a scratch page: masked writes go there and nothing reads it. A pool is a tuple of arrays:
keys and values [L, pages, K, page, H] each for XLA (`tiles`) and the GPU kernel; one array
[L, pages, page, 2 K, H], keys and values in turn, for JAX's TPU kernel (`paged_kernels`).

Invariant: every cached value is finite (`nan_safe`). Masked keys have weight 0, and 0 * NaN is NaN.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dapo_jax.config import ModelConfig
from dapo_jax.models.attention import xla
from dapo_jax.models.decoder import Attend
from dapo_jax.rollout import paged_kernels
from dapo_jax.rollout.tiles import Arrays, Tile, Tiles

# Of two attention programs over values around 1. Rounding to bfloat16 makes a difference of 0.008,
# a missing key 0.05, another page's keys 0.5.
MAX_DIFFERENCE = 2.0**-5


class Layout(NamedTuple):
    """The layout of a pool of pages."""

    kernel: paged_kernels.Kernel
    page_tokens: int
    dtype: str  # of activations and of the cache
    heads_axis: str | None = None  # mesh axis that the kv heads lie over
    blocks: tuple[tuple[str, int], ...] = ()  # see `ModelConfig.kernel_blocks`

    def pool(self, c: ModelConfig, num_pages: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns the shapes of a pool's arrays."""
        L, K, H, A = c.num_layers, c.num_kv_heads, c.head_dim, self.page_tokens
        if self.kernel == "tpu":
            return (jax.ShapeDtypeStruct((L, num_pages, A, 2 * K, H), jnp.dtype(self.dtype)),)
        kept = jax.ShapeDtypeStruct((L, num_pages, K, A, H), jnp.dtype(self.dtype))
        return kept, kept

    @property
    def kv_axis(self) -> int:
        """The axis of the kv heads in the pool's arrays."""
        return 3 if self.kernel == "tpu" else 2


def page_bytes(c: ModelConfig, layout: Layout) -> int:
    """Returns the bytes of one page in all layers."""
    return sum(x.size * x.dtype.itemsize for x in layout.pool(c, 1))


def from_dense(layout: Layout, dense: Arrays) -> Arrays:
    """Returns keys and values of prompts as pages in the pool's layout.

    Args:
        dense: [L, P, T, K, H] each, T a multiple of the page.
    """
    L, P, T, K, H = dense[0].shape
    A = layout.page_tokens
    paged = [x.reshape(L, P * T // A, A, K, H) for x in dense]
    if layout.kernel == "tpu":
        return (jnp.stack(paged, axis=4).reshape(L, P * T // A, A, 2 * K, -1),)
    return tuple(x.swapaxes(2, 3) for x in paged)


def put(pool: Arrays, page_X: jax.Array, pages: Arrays) -> Arrays:
    """Writes `pages` [L, X, ...] to the pool's pages `page_X`, one after another.

    A scatter of whole pages would make XLA lay the pool out another way on TPUs, which copies all
    of it before and after.
    """
    one = lambda x, pool: _page_put(pool, pages, x, page_X[x])
    return jax.lax.fori_loop(0, len(page_X), one, pool)


def copied(pool: Arrays, from_X: jax.Array, to_X: jax.Array, wanted_X: jax.Array) -> Arrays:
    """Copies the pool's pages `from_X` to its pages `to_X`, which are others, where wanted."""
    # Mostly few of many are wanted: they come first, and the loop ends with them.
    last_X = (~wanted_X).astype(jnp.int32)
    _, from_X, to_X = jax.lax.sort((last_X, from_X, to_X), num_keys=1)
    one = lambda x, pool: _page_put(pool, pool, from_X[x], to_X[x])
    return jax.lax.fori_loop(0, jnp.sum(wanted_X.astype(jnp.int32)), one, pool)


def _page_put(pool: Arrays, source: Arrays, from_page: jax.Array, to_page: jax.Array) -> Arrays:
    return tuple(
        jax.lax.dynamic_update_slice_in_dim(
            into, jax.lax.dynamic_slice_in_dim(x, from_page, 1, axis=1), to_page, axis=1
        )
        for into, x in zip(pool, source)
    )


def nan_safe(attend: Attend) -> Attend:
    """Returns `attend` that caches zeros where a token's key or value is not finite, by head.

    Its output for that head is NaN, and so are the token's logits, where it is noticed. No other
    token sees it.
    """

    def attend_(
        layer: jax.Array | int,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: Any,
        window: jax.Array | int | None,
    ) -> tuple[jax.Array, Any]:
        # By head: devices that share the heads need not communicate.
        finite_BTK = jnp.all(jnp.isfinite(k) & jnp.isfinite(v), axis=-1)
        k, v = (jnp.where(finite_BTK[..., None], x, 0) for x in (k, v))
        out_BTNH, cache = attend(layer, q, k, v, cache, window)
        finite_BTN = jnp.repeat(finite_BTK, q.shape[2] // k.shape[2], axis=2)
        return jnp.where(finite_BTN[..., None], out_BTNH, jnp.nan), cache

    return attend_


def decoding(
    layout: Layout,
    table_BJ: jax.Array,
    lengths_B: jax.Array,
    writes_B: jax.Array,
    tile: Tile,
) -> Attend:
    """Returns the attention of one new token a slot to everything up to itself.

    Its key and value enter the pool at position `lengths_B`.

    Args:
        table_BJ: pages of each slot, for its tokens and the new one at least.
        writes_B: False: the slot has no token; nothing is kept and its output means nothing.
        tile: of XLA's attention.
    """
    A = layout.page_tokens
    page_B = jnp.take_along_axis(table_BJ, (lengths_B // A)[:, None], axis=1)[:, 0]
    page_B = jnp.where(writes_B, page_B, 0)
    offset_B = lengths_B % A
    tiles = Tiles.of(table_BJ, jnp.where(writes_B, lengths_B + 1, 0), A, tile)
    # Of an empty slot kernels read one token, not its last sequence: they want one at least.
    read_B = jnp.where(writes_B, lengths_B + 1, 1)

    def attend(
        layer: jax.Array | int,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: Arrays,
        window: jax.Array | int | None,
    ) -> tuple[jax.Array, Arrays]:
        B, _, K, H = k.shape
        kept = k[:, 0].astype(layout.dtype), v[:, 0].astype(layout.dtype)
        # Kernels get the pages of all layers, as a layer's own would have to be copied out.
        own_BJ = table_BJ + layer * cache[0].shape[1]
        all_layers = lambda x: x.reshape(-1, *x.shape[2:])
        if layout.kernel == "tpu":
            new = jnp.stack(kept, axis=2).reshape(B, -1, H)
            cache = (cache[0].at[layer, page_B, offset_B].set(new),)
            out_BNH = paged_kernels.tpu_attention(
                q[:, 0],
                all_layers(cache[0]),
                own_BJ,
                read_B,
                window,
                layout.heads_axis,
                layout.blocks,
            )
            return out_BNH[:, None], cache
        at = (layer, page_B[:, None], jnp.arange(K)[None], offset_B[:, None])
        cache = tuple(x.at[at].set(new) for x, new in zip(cache, kept))
        if layout.kernel == "gpu":
            pages = tuple(map(all_layers, cache))
            out_BNH = paged_kernels.gpu_attention(q[:, 0], pages, own_BJ, read_B, layout.heads_axis)
            return out_BNH[:, None], cache
        q_BKGH = q.reshape(B, K, -1, H)
        out_BKGH, cache = tiles.attend(layer, q_BKGH, cache, window)
        return out_BKGH.reshape(q.shape), cache

    return nan_safe(attend)


def page_difference(
    layout: Layout, pool: Arrays, at_2: jax.Array, heads: int, table_BJ: jax.Array, tile: Tile
) -> tuple[jax.Array, Arrays]:
    """Compares `decoding` over one page of the pool with XLA's attention to the same values.

    Returns (the largest difference, the pool, whose page holds these values now).

    Args:
        at_2: layer and page. An overflowing index misses the last ones. No constants, as in a run's
            programs.
        heads: query heads.
        table_BJ: a table of the run's shape.
    """
    layer, page = at_2[0], at_2[1]
    B, A = len(table_BJ), layout.page_tokens
    kv_heads = pool[0].shape[layout.kv_axis] // (2 if layout.kernel == "tpu" else 1)
    key_q, key_k, key_v = jax.random.split(jax.random.key(0), 3)
    normal = lambda key, *shape: jax.random.normal(key, (*shape, pool[0].shape[-1]), layout.dtype)
    q_BTNH = normal(key_q, B, 1, heads)
    k_PAKH, v_PAKH = normal(key_k, 1, A, kv_heads), normal(key_v, 1, A, kv_heads)
    at = lambda into: (layer, page, *[jnp.int32(0)] * (into.ndim - 2))
    pool = tuple(
        jax.lax.dynamic_update_slice(into, new, at(into))
        for into, new in zip(pool, from_dense(layout, (k_PAKH[None], v_PAKH[None])))
    )
    first_B = jnp.arange(B) == 0
    attend = decoding(
        layout,
        jnp.zeros_like(table_BJ).at[0, 0].set(page),
        jnp.where(first_B, A - 1, 0),
        first_B,
        tile,
    )
    newest = lambda x: jnp.broadcast_to(x[:, -1:], (B, 1, *x.shape[2:]))
    out_BTNH, pool = attend(layer, q_BTNH, newest(k_PAKH), newest(v_PAKH), pool, None)
    everything = jnp.ones((1, 1, A), bool)
    expected = xla.dot_product_attention(q_BTNH[:1], k_PAKH, v_PAKH, everything)
    difference = out_BTNH[:1].astype(jnp.float32) - expected.astype(jnp.float32)
    return jnp.max(jnp.abs(difference)), pool
