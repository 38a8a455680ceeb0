"""The KV cache in pages: its layout, and attention over it.

A pool holds pages of `page_tokens` tokens; a sequence owns the pages that its row of the page table
names, in order. Page 0 belongs to nobody: what is to be read by nothing is written there.

The pool is laid out for who reads it: [L, pages, 2, K, page, H] for XLA, which gathers the pages of
each sequence; [L, pages, page, 2 K, H], keys and values in turn, for JAX's TPU kernel (ragged paged
attention), which fetches them itself.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from dapo_jax.config import ModelConfig
from dapo_jax.model import NO_WINDOW, Attend

Kernel = Literal["xla", "tpu"]
KEYS_PER_BLOCK, QUERIES_PER_BLOCK = 1024, 32  # of the TPU kernel; not tuned, see docs/rollout.md
_WHOLE = PartitionSpec()


class Layout(NamedTuple):
    """What the programs need to know of a pool."""

    kernel: Kernel
    page_tokens: int
    dtype: str
    heads_axis: str | None = None  # mesh axis over which the kv heads lie

    def pool_shape(self, c: ModelConfig, num_pages: int) -> tuple[int, ...]:
        """Of all layers."""
        L, K, H, A = c.num_layers, c.num_kv_heads, c.head_dim, self.page_tokens
        if self.kernel == "tpu":
            return (L, num_pages, A, 2 * K, H)
        return (L, num_pages, 2, K, A, H)

    def kv_axis(self) -> int:
        """The axis of the pool over which the kv heads lie."""
        return 3


def page_bytes(c: ModelConfig, layout: Layout) -> int:
    """Bytes of one page in all layers."""
    per_token = 2 * c.num_kv_heads * c.head_dim * jnp.dtype(layout.dtype).itemsize
    return c.num_layers * layout.page_tokens * per_token


def from_dense(layout: Layout, k: jax.Array, v: jax.Array) -> jax.Array:
    """Keys and values [L, P, T, K, H], T a multiple of the page, as pages of the pool."""
    L, P, T, K, H = k.shape
    A = layout.page_tokens
    k, v = (x.reshape(L, P * T // A, A, K, H) for x in (k, v))
    if layout.kernel == "tpu":
        return jnp.stack([k, v], axis=4).reshape(L, P * T // A, A, 2 * K, H).astype(layout.dtype)
    return jnp.stack([k, v], axis=2).swapaxes(3, 4).astype(layout.dtype)


def put(pool: jax.Array, page_X: jax.Array, pages: jax.Array) -> jax.Array:
    """The pool with `pages` [L, X, ...] as its pages `page_X`.

    One after another: a scatter of whole pages makes XLA lay the pool out another way on TPUs,
    which is a copy of all of it before and after."""

    def one(x: jax.Array, pool: jax.Array) -> jax.Array:
        page = jax.lax.dynamic_slice_in_dim(pages, x, 1, axis=1)
        return jax.lax.dynamic_update_slice_in_dim(pool, page, page_X[x], axis=1)

    return jax.lax.fori_loop(0, len(page_X), one, pool)


def copied(pool: jax.Array, from_X: jax.Array, to_X: jax.Array) -> jax.Array:
    """The pool with its pages `to_X` the same as `from_X`, which are others."""

    def one(x: jax.Array, pool: jax.Array) -> jax.Array:
        page = jax.lax.dynamic_slice_in_dim(pool, from_X[x], 1, axis=1)
        return jax.lax.dynamic_update_slice_in_dim(pool, page, to_X[x], axis=1)

    return jax.lax.fori_loop(0, len(to_X), one, pool)


def decoding(
    layout: Layout, table_BP: jax.Array, lengths_B: jax.Array, writes_B: jax.Array
) -> Attend:
    """One new token per slot: its key and value enter the pool at `lengths_B`, then it attends to
    everything up to itself.

    Args:
        table_BP: the pages of each slot that its tokens up to the new one lie in, and others.
        writes_B: whether the slot's token is one; else it is kept nowhere.
    """
    A = layout.page_tokens
    page_B = jnp.take_along_axis(table_BP, (lengths_B // A)[:, None], axis=1)[:, 0]
    page_B = jnp.where(writes_B, page_B, 0)
    offset_B = lengths_B % A

    def attend(
        layer: jax.Array | int,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: jax.Array,
        window: jax.Array | int | None,
    ) -> tuple[jax.Array, jax.Array]:
        B, _, K, H = k.shape
        k, v = k[:, 0].astype(cache.dtype), v[:, 0].astype(cache.dtype)
        if layout.kernel == "tpu":
            cache = cache.at[layer, page_B, offset_B].set(jnp.stack([k, v], 2).reshape(B, -1, H))
            # Of all layers, and the table says which: a layer's pages would have to be copied out.
            own_BP = table_BP + layer * cache.shape[1]
            out_BNH = _ragged(
                layout, q[:, 0], cache.reshape(-1, *cache.shape[2:]), own_BP, lengths_B + 1, window
            )
            return out_BNH[:, None], cache
        sides, heads = jnp.arange(2)[None, :, None], jnp.arange(K)[None, None]
        at = (layer, page_B[:, None, None], sides, heads, offset_B[:, None, None])
        cache = cache.at[at].set(jnp.stack([k, v], axis=1))
        # Keys and values apart, [B, P, K, page, H] each: XLA's CPU backend copies less so.
        own = (cache[layer, table_BP, side].swapaxes(1, 2) for side in (0, 1))
        k_BKSH, v_BKSH = (x.reshape(B, K, -1, H).astype(q.dtype) for x in own)
        S = k_BKSH.shape[2]
        back_BS = lengths_B[:, None] - jnp.arange(S)[None]
        mask_BS = back_BS >= 0 if window is None else (back_BS >= 0) & (back_BS < window)
        out_BKGH = _one_query(q.reshape(B, K, -1, H), k_BKSH, v_BKSH, mask_BS)
        return out_BKGH.reshape(q.shape), cache

    return attend


def _one_query(
    q_BKGH: jax.Array, k_BKSH: jax.Array, v_BKSH: jax.Array, mask_BS: jax.Array
) -> jax.Array:
    """`attention.dot_product_attention` of one query a sequence, heads before positions as they lie
    in the pages: nothing is transposed."""
    H = q_BKGH.shape[-1]
    scores_BKGS = jnp.einsum("BKGH,BKSH->BKGS", q_BKGH, k_BKSH, preferred_element_type=jnp.float32)
    scores_BKGS = jnp.where(mask_BS[:, None, None], scores_BKGS * H**-0.5, -1e30)
    weights_BKGS = jax.nn.softmax(scores_BKGS, axis=-1).astype(v_BKSH.dtype)
    return jnp.einsum("BKGS,BKSH->BKGH", weights_BKGS, v_BKSH)


def _ragged(
    layout: Layout,
    q_BNH: jax.Array,
    pages: jax.Array,
    table_BP: jax.Array,
    lengths_B: jax.Array,
    window: jax.Array | int | None,
) -> jax.Array:
    """JAX's TPU kernel, a query a sequence; the heads of each device by themselves."""
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    assert window is None or isinstance(window, int), "the kernel's window is static"
    B, _, H = q_BNH.shape

    def local(q: jax.Array, pages: jax.Array, lengths: jax.Array, table: jax.Array) -> jax.Array:
        return ragged_paged_attention(
            q,
            pages,
            lengths,
            table,
            jnp.arange(B + 1, dtype=jnp.int32),
            jnp.full(1, B, jnp.int32),
            sm_scale=H**-0.5,
            sliding_window=None if window in (None, NO_WINDOW) else window,
            # Given, because the kernel would look them up by the device that this process has.
            num_kv_pages_per_block=max(
                1, min(table.shape[1], KEYS_PER_BLOCK // layout.page_tokens)
            ),
            num_queries_per_block=min(B, QUERIES_PER_BLOCK),
        )

    if layout.heads_axis is not None:
        heads = PartitionSpec(None, layout.heads_axis)
        local = jax.shard_map(
            local,
            in_specs=(heads, PartitionSpec(None, None, layout.heads_axis), _WHOLE, _WHOLE),
            out_specs=heads,
            axis_names={layout.heads_axis},
            check_vma=False,
        )
    return local(q_BNH, pages, lengths_B, table_BP)
