"""Chunked softmax: running sums over parts of the vocabulary, whose logits never exist at once.

`log_probs` loops over parts of the vocabulary and chunks of tokens; the sampler shares `logits`.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dapo_jax.models.sharding import HeadLayout, axes_of
from dapo_jax.utils.precision import LANES, columns_first, sum_dtype, written_out

# Columns of logits alive at once: enough for matrix products at full speed. Memory is this times
# `model.log_prob_chunk_tokens`.
VOCAB_CHUNK = 4096
BELOW_ALL = -1e30  # finite, so that no difference of two of them is nan


def logits(
    hidden_XD: Float[Array, "*X D"],
    unembed_VD: Float[Array, "V D"],
    *,
    temperature: float,
    exact: bool = False,
) -> Float[Array, "*X V"]:
    """Returns logits [..., V] over the sampling temperature; float32, or float64 as hidden_XD.

    Args:
        exact: round neither factor (arXiv:2506.13585, section 3.2). False: the unembedding is
            rounded to the dtype of hidden_XD.
    """
    dtype, precision = factors(hidden_XD, unembed_VD, exact)
    logits_XV = jnp.einsum(
        "...D,VD->...V",
        hidden_XD.astype(dtype),
        unembed_VD.astype(dtype),
        precision=precision,
        preferred_element_type=sum_dtype(hidden_XD),
    )
    return logits_XV / temperature


def factors(
    hidden_XD: Float[Array, "*X D"], unembed_VD: Float[Array, "V D"], exact: bool
) -> tuple[Any, Any]:
    """Returns the dtype of the factors of logits, and the precision of their product.

    With `exact` the wider of the two dtypes: of two in bfloat16 every product is exact in the
    float32 sum. Accelerators would round float32 factors unless asked for exact products.
    """
    if not exact:
        return hidden_XD.dtype, None
    wider = max(hidden_XD.dtype, unembed_VD.dtype, key=lambda dtype: dtype.itemsize)
    return wider, jax.lax.Precision.HIGHEST


class Sums(NamedTuple):
    """Running sums of each token over the parts of the vocabulary so far, z its logits."""

    top: jax.Array  # max z
    total: jax.Array  # sum exp(z - top)
    spread: jax.Array  # sum exp(z - top) (z - top)
    target: jax.Array  # z of the target token; 0 before its part
    squares: jax.Array | None  # sum exp(z - top)^2; None: not summed


def empty_sums(shape: tuple[int, ...], dtype: Any, *, squares: bool = False) -> Sums:
    """Returns the sums over nothing."""
    zero, below = jnp.zeros(shape, dtype), jnp.full(shape, BELOW_ALL, dtype)
    return Sums(below, zero, zero, zero, zero if squares else None)


def add_part(sums: Sums, z_XP: Float[Array, "X P"], targets_X: Int[Array, " X"]) -> Sums:
    """Adds a part of the vocabulary to the sums of X tokens.

    Args:
        z_XP: logits.
        targets_X: target tokens counted from the part's first, see `VocabParts.targets`.
    """
    P = z_XP.shape[1]
    top = jnp.maximum(sums.top, jnp.max(z_XP, axis=1))
    below_XP = z_XP - top[:, None]
    exp_XP = written_out(jnp.exp(below_XP))
    dot = lambda x_XP: jnp.einsum("XP,XP->X", exp_XP, x_XP)
    index_X1 = jnp.clip(targets_X, 0, P - 1)[:, None]
    z_target_X = jnp.take_along_axis(z_XP, index_X1, axis=1)[:, 0]
    sums = _with_top(sums, top)
    return Sums(
        top=top,
        total=sums.total + jnp.sum(exp_XP, axis=1),
        spread=sums.spread + dot(below_XP),
        target=jnp.where((targets_X >= 0) & (targets_X < P), z_target_X, sums.target),
        squares=None if sums.squares is None else sums.squares + dot(exp_XP),
    )


def sum_shards(sums: Sums, axis: Any) -> Sums:
    """Returns sums over the whole vocabulary from those of each device's shard of it."""
    if axis is None:
        return sums
    largest = functools.partial(jax.lax.pmax, axis_name=axis)
    added = functools.partial(jax.lax.psum, axis_name=axis)
    sums = _with_top(sums, largest(sums.top))
    return Sums(
        top=sums.top,
        total=added(sums.total),
        spread=added(sums.spread),
        target=added(sums.target),
        squares=None if sums.squares is None else added(sums.squares),
    )


def _with_top(sums: Sums, top: jax.Array) -> Sums:
    """Rescales the sums to another largest logit."""
    down = sums.top - top
    scale = jnp.exp(down)
    return Sums(
        top=top,
        total=sums.total * scale,
        spread=(sums.spread + sums.total * down) * scale,
        target=sums.target,
        squares=None if sums.squares is None else sums.squares * scale**2,
    )


class VocabParts:
    """This device's shard of the vocabulary, split into parts of equal size."""

    def __init__(
        self,
        unembed_VD: jax.Array,
        temperature: float,
        layout: HeadLayout | None,
        *,
        exact: bool = False,
    ):
        V = len(unembed_VD)
        self.temperature, self.exact, self.size = temperature, exact, chunk_size(V, VOCAB_CHUNK)
        self.padded = V % self.size > 0
        self.axis, self.width_axis, self.row_axes = None, None, ()
        if layout is not None:
            (self.axis, self.width_axis), self.row_axes = layout.unembed, layout.row_axes
        first = 0 if self.axis is None else jax.lax.axis_index(self.axis) * V
        self.end = first + V
        parts = in_chunks(unembed_VD, self.size)
        # For a scan: the first token id of each part, its unembedding [P, D].
        self.each = first + self.size * jnp.arange(len(parts)), parts

    def gather(self, unembed_PD: jax.Array) -> jax.Array:
        """Returns the unembedding of a part with its whole width."""
        if self.width_axis is not None:
            unembed_PD = jax.lax.all_gather(unembed_PD, self.width_axis, axis=1, tiled=True)
        return columns_first(unembed_PD)

    def logits(self, hidden_XD: jax.Array, unembed_PD: jax.Array, start: jax.Array) -> jax.Array:
        """Returns logits [X, P]; those of padding in the last part are BELOW_ALL."""
        logits_XP = logits(hidden_XD, unembed_PD, temperature=self.temperature, exact=self.exact)
        if not self.padded:
            return logits_XP
        real_1P = (start + jnp.arange(self.size) < self.end)[None]
        return jnp.where(real_1P, logits_XP, jnp.asarray(BELOW_ALL, logits_XP.dtype))

    def targets(self, targets_X: jax.Array, start: jax.Array) -> jax.Array:
        """Returns tokens counted from the first of a part; -1 for those of the next device.

        The numbers of padding in the last part are those of the next device's first tokens.
        """
        if not self.padded:
            return targets_X - start
        return jnp.where(targets_X < self.end, targets_X - start, -1)

    def reduce(self, d_unembed_PD: jax.Array) -> jax.Array:
        """Sums a gradient over the tokens of all devices, for the width that this device holds."""
        width_axes = axes_of(self.width_axis)
        whole_axes = tuple(axis for axis in self.row_axes if axis not in width_axes)
        if whole_axes:
            d_unembed_PD = jax.lax.psum(d_unembed_PD, whole_axes)
        if set(width_axes) & set(self.row_axes):
            d_unembed_PD = jax.lax.psum_scatter(
                d_unembed_PD, self.width_axis, scatter_dimension=1, tiled=True
            )
        return d_unembed_PD


def chunk_size(length: int, most: int) -> int:
    """Returns the size of equal chunks, at most `most`; of large ones a multiple of a TPU's tile.

    Split elsewhere, the compiler would write the array again tile by tile: a hundred seconds of
    compilation for a row of 22,528 tokens.
    """
    if length <= most:
        return length
    step = LANES if most >= 8 * LANES else 1
    chunks = -(-length // (most - most % step))
    return step * -(-length // (chunks * step))


def in_chunks(x: jax.Array, size: int) -> jax.Array:
    """Returns [X, ...] as [X / size, size, ...], padded with zeros."""
    missing = -len(x) % size
    if missing:
        x = jnp.pad(x, ((0, missing), *[(0, 0)] * (x.ndim - 1)))
    return x.reshape(-1, size, *x.shape[1:])
