"""Attention of one query a sequence over the pages in use, by XLA.

Sequences are sorted by length and taken in groups. A loop on the device goes through tiles, some
tokens of every sequence of a group, and ends with the longest of the group. So the cost follows the
tokens in the cache, and no program depends on lengths. The softmax is added up tile by tile
(arXiv:1805.02867), for scores s and values v of the tile's tokens j:

    m' = max(m, max_j s_j),   z' = z e^(m - m') + sum_j e^(s_j - m'),
    o' = o e^(m - m') + sum_j e^(s_j - m') v_j,   attention = o / z at the end

Invariant: no bit of a sequence's output depends on the others. Tiles have one shape and are summed
in one order; one beyond the sequence adds zeros, and m' = m.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

BELOW_ALL = -1e30
Arrays = tuple[jax.Array, ...]


class Tile(NamedTuple):
    """Size of a tile; its tokens are rounded up to whole pages."""

    sequences: int
    tokens: int


def tile_on(platform: str) -> Tile:
    """Returns the tile that fits a CPU's caches (docs/log.md), or elsewhere a larger one."""
    return Tile(8, 32) if platform == "cpu" else Tile(64, 1024)


class Tiles(NamedTuple):
    """The tiles of B sequences in n groups; S sequences with the padding of the last group."""

    from_S: jax.Array  # int32: the sequence in each place, sorted by length
    place_B: jax.Array  # int32: each sequence's place
    table_SJ: jax.Array  # int32: pages, padded to whole tiles
    length_S: jax.Array  # int32: tokens; 0: no query
    end_n: jax.Array  # int32: the first tile beyond each group
    first_n: jax.Array  # int32: the first tile of each group
    group: int  # sequences
    pages: int  # of a sequence in a tile

    @classmethod
    def of(cls, table_BJ: jax.Array, length_B: jax.Array, page_tokens: int, tile: Tile) -> "Tiles":
        """Returns the tiles of sequences with `length_B` tokens."""
        B, J = table_BJ.shape
        group, pages = min(B, tile.sequences), min(J, -(-tile.tokens // page_tokens))
        more = -B % group
        length_S = jnp.pad(length_B, (0, more))
        from_S = jnp.argsort(length_S).astype(jnp.int32)
        place_B = jnp.argsort(from_S)[:B].astype(jnp.int32)
        table_SJ = jnp.pad(table_BJ, ((0, more), (0, -J % pages)))[from_S]
        length_S = length_S[from_S]
        longest_n = length_S.reshape(-1, group)[:, -1]
        tiles_n = -(-longest_n // (pages * page_tokens))
        end_n = jnp.cumsum(tiles_n).astype(jnp.int32)
        return cls(from_S, place_B, table_SJ, length_S, end_n, end_n - tiles_n, group, pages)

    def attend(
        self,
        layer: jax.Array | int,
        q_BKGH: jax.Array,
        cache: Arrays,
        window: jax.Array | int | None,
    ) -> tuple[jax.Array, Arrays]:
        """Returns (attended values [B, K, G, H] of each sequence's last token, the cache).

        Args:
            cache: keys and values [L, pages, K, page, H].
            window: how many of the last tokens a query sees; None: all.
        """
        B, K, G, H = q_BKGH.shape
        A = cache[0].shape[3]
        q_SKGH = q_BKGH[jnp.minimum(self.from_S, B - 1)]
        S, n, c = len(self.from_S), self.group, self.pages
        dtype = cache[1].dtype

        def one(carry: Any) -> Any:
            # The cache is carried: a loop that only read it would get a copy.
            i, cache, m_SKG, z_SKG, o_SKGH = carry
            at = jnp.sum((self.end_n <= i).astype(jnp.int32))
            column = (i - self.first_n[at]) * c
            own = lambda x: jax.lax.dynamic_slice_in_dim(x, at * n, n)
            page_nc = jax.lax.dynamic_slice_in_dim(own(self.table_SJ), column, c, axis=1)
            k, v = (x[layer, page_nc] for x in cache)  # [n, c, K, A, H]
            position_cA = (column + jnp.arange(c)[:, None]) * A + jnp.arange(A)[None]
            back_ncA = own(self.length_S)[:, None, None] - 1 - position_cA[None]
            mask_ncA = back_ncA >= 0
            if window is not None:
                mask_ncA = mask_ncA & (back_ncA < window)
            q, m, z, o = map(own, (q_SKGH, m_SKG, z_SKG, o_SKGH))
            # Page by page: products of one shape are as fast on CPU.
            s = jnp.einsum("nKGH,ncKAH->ncKGA", q, k, preferred_element_type=jnp.float32)
            s = jnp.where(mask_ncA[:, :, None, None], s * H**-0.5, BELOW_ALL)
            most = jnp.maximum(m, jnp.max(s, axis=(1, 4)))
            e = jnp.exp(s - most[:, None, :, :, None])
            less = jnp.exp(m - most)
            z = z * less + jnp.sum(jnp.sum(e, axis=4), axis=1)
            more = jnp.einsum(
                "ncKGA,ncKAH->ncKGH", e.astype(dtype), v, preferred_element_type=jnp.float32
            )
            o = o * less[..., None] + jnp.sum(more, axis=1)
            put = lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, at * n, axis=0)
            return i + 1, cache, put(m_SKG, most), put(z_SKG, z), put(o_SKGH, o)

        real = lambda *shape: jnp.zeros(shape, jnp.float32)
        start = jnp.int32(0), cache, real(S, K, G) + BELOW_ALL, real(S, K, G), real(S, K, G, H)
        last = self.end_n[-1]
        end = jax.lax.while_loop(lambda carry: carry[0] < last, one, start)
        _, cache, _, z_SKG, o_SKGH = end
        # Groups without a query have no sum.
        out_SKGH = o_SKGH / jnp.where(z_SKG == 0, 1, z_SKG)[..., None]
        return out_SKGH[self.place_B].astype(dtype), cache
