"""The KV cache in pages: its layout, and attention over it.

A pool holds pages of `page_tokens` tokens; a sequence owns the pages that its row of the page table
names, in order. Page 0 belongs to nobody: what is to be read by nothing is written there.

A pool is a tuple of arrays with layers and pages in front, laid out for who reads it: keys and
values [L, pages, K, page, H] each, for XLA, which gathers some at a time (`tiles`), and
for JAX's GPU kernel; one array [L, pages, page, 2 K, H], keys and values in turn, for JAX's TPU
kernel. Kernels fetch the pages themselves (see `kernels`).

No page ever holds what is not a number: page 0, and those given out again, are read by sequences
whose weight for them is 0, and 0 * NaN is NaN. See `sound`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dapo_jax.config import ModelConfig
from dapo_jax.models.attention import xla
from dapo_jax.models.decoder import Attend
from dapo_jax.rollout import kernels
from dapo_jax.rollout.tiles import Arrays, Tile, Tiles

# Between two programs for attention to values around 1: bfloat16 makes it 0.008, one key that is
# left out 0.05, those of another page 0.5.
MAX_DIFFERENCE = 2.0**-5


class Layout(NamedTuple):
    """What the programs need to know of a pool."""

    kernel: kernels.Kernel
    page_tokens: int
    dtype: str  # of the model's activations, and of what is cached
    heads_axis: str | None = None  # mesh axis over which the kv heads lie

    def pool(self, c: ModelConfig, num_pages: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Of all layers."""
        L, K, H, A = c.num_layers, c.num_kv_heads, c.head_dim, self.page_tokens
        if self.kernel == "tpu":
            return (jax.ShapeDtypeStruct((L, num_pages, A, 2 * K, H), jnp.dtype(self.dtype)),)
        kept = jax.ShapeDtypeStruct((L, num_pages, K, A, H), jnp.dtype(self.dtype))
        return kept, kept

    @property
    def kv_axis(self) -> int:
        """The axis of the pool's arrays over which the kv heads lie."""
        return 3 if self.kernel == "tpu" else 2


def page_bytes(c: ModelConfig, layout: Layout) -> int:
    """Bytes of one page in all layers."""
    return sum(x.size * x.dtype.itemsize for x in layout.pool(c, 1))


def from_dense(layout: Layout, dense: Arrays) -> Arrays:
    """Keys and values of prompts, [L, P, T, K, H] each, T a multiple of the page, as pages of the
    pool."""
    L, P, T, K, H = dense[0].shape
    A = layout.page_tokens
    paged = [x.reshape(L, P * T // A, A, K, H) for x in dense]
    if layout.kernel == "tpu":
        return (jnp.stack(paged, axis=4).reshape(L, P * T // A, A, 2 * K, -1),)
    return tuple(x.swapaxes(2, 3) for x in paged)


def put(pool: Arrays, page_X: jax.Array, pages: Arrays) -> Arrays:
    """The pool with `pages` [L, X, ...] as its pages `page_X`.

    One after another: a scatter of whole pages makes XLA lay the pool out another way on TPUs,
    which is a copy of all of it before and after."""

    def one(x: jax.Array, pool: Arrays) -> Arrays:
        return tuple(
            jax.lax.dynamic_update_slice_in_dim(
                into, jax.lax.dynamic_slice_in_dim(new, x, 1, axis=1), page_X[x], axis=1
            )
            for into, new in zip(pool, pages)
        )

    return jax.lax.fori_loop(0, len(page_X), one, pool)


def copied(pool: Arrays, from_X: jax.Array, to_X: jax.Array, wanted_X: jax.Array) -> Arrays:
    """The pool with its pages `to_X` the same as `from_X`, which are others, where wanted."""
    # Most often few of many are wanted: those first, and no more.
    last_X = (~wanted_X).astype(jnp.int32)
    _, from_X, to_X = jax.lax.sort((last_X, from_X, to_X), num_keys=1)

    def one(x: jax.Array, pool: Arrays) -> Arrays:
        return tuple(
            jax.lax.dynamic_update_slice_in_dim(
                into, jax.lax.dynamic_slice_in_dim(into, from_X[x], 1, axis=1), to_X[x], axis=1
            )
            for into in pool
        )

    return jax.lax.fori_loop(0, jnp.sum(wanted_X.astype(jnp.int32)), one, pool)


def nan_safe(attend: Attend) -> Attend:
    """`attend` that caches zeros for a head of a token whose key or value is not finite. What
    comes out for that head is NaN, which makes everything that follows of the token NaN, and its
    logits: it is noticed there. Nothing else sees it.
    """

    def attend_(
        layer: jax.Array | int,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: Any,
        window: jax.Array | int | None,
    ) -> tuple[jax.Array, Any]:
        # By head: they lie on several devices, which need not ask each other so.
        finite_BTK = jnp.all(jnp.isfinite(k) & jnp.isfinite(v), axis=-1)
        k, v = (jnp.where(finite_BTK[..., None], x, 0) for x in (k, v))
        out_BTNH, cache = attend(layer, q, k, v, cache, window)
        finite_BTN = jnp.repeat(finite_BTK, q.shape[2] // k.shape[2], axis=2)
        return jnp.where(finite_BTN[..., None], out_BTNH, jnp.nan), cache

    return attend_


def decoding(
    layout: Layout,
    table_BP: jax.Array,
    lengths_B: jax.Array,
    writes_B: jax.Array,
    tile: Tile,
) -> Attend:
    """One new token per slot: its key and value enter the pool at `lengths_B`, then it attends to
    everything up to itself.

    Args:
        table_BP: the pages of each slot that its tokens up to the new one lie in, and others.
        writes_B: whether the slot's token is one; else it is kept nowhere, and what comes out for
            it means nothing.
        tile: of XLA's attention.
    """
    A = layout.page_tokens
    page_B = jnp.take_along_axis(table_BP, (lengths_B // A)[:, None], axis=1)[:, 0]
    page_B = jnp.where(writes_B, page_B, 0)
    offset_B = lengths_B % A
    tiles = Tiles.of(table_BP, jnp.where(writes_B, lengths_B + 1, 0), A, tile)
    # A slot that is empty is not read as far as its last sequence went. Kernels want one token.
    seen_B = jnp.where(writes_B, lengths_B + 1, 1)

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
        # To a kernel: the pages of all layers, and the table says which. A layer's own would have
        # to be copied out.
        own_BP = table_BP + layer * cache[0].shape[1]
        everywhere = lambda x: x.reshape(-1, *x.shape[2:])
        if layout.kernel == "tpu":
            new = jnp.stack(kept, axis=2).reshape(B, -1, H)
            cache = (cache[0].at[layer, page_B, offset_B].set(new),)
            out_BNH = kernels.tpu_attention(
                q[:, 0], everywhere(cache[0]), own_BP, seen_B, window, layout.heads_axis
            )
            return out_BNH[:, None], cache
        at = (layer, page_B[:, None], jnp.arange(K)[None], offset_B[:, None])
        cache = tuple(x.at[at].set(new) for x, new in zip(cache, kept))
        if layout.kernel == "gpu":
            pages = tuple(map(everywhere, cache))
            out_BNH = kernels.gpu_attention(q[:, 0], pages, own_BP, seen_B, layout.heads_axis)
            return out_BNH[:, None], cache
        q_BKGH = q.reshape(B, K, -1, H)
        out_BKGH, cache = tiles.attend(layer, q_BKGH, cache, window)
        return out_BKGH.reshape(q.shape), cache

    return nan_safe(attend)


def last_page_difference(
    layout: Layout, pool: Arrays, last_2: jax.Array, heads: int, table_BP: jax.Array, tile: Tile
) -> tuple[jax.Array, Arrays]:
    """Largest difference between `decoding` over one page of the pool and XLA's attention to the
    same keys and values; and the pool, whose page holds them now.

    Args:
        last_2: the last layer and the last page: an index that overflows misses them. An array, as
            programs of a run have it, and not a constant.
        heads: query heads.
        table_BP: of the run's shape; its values mean nothing.
    """
    layer, page = last_2[0], last_2[1]
    B, A = len(table_BP), layout.page_tokens
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
        jnp.zeros_like(table_BP).at[0, 0].set(page),
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
