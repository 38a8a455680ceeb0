"""A softmax over a vocabulary that is never whole: its parts, and the sums that run over them."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dapo_jax.models.sharding import HeadLayout, axes_of
from dapo_jax.utils.precision import LANES, columns_first, sum_dtype, written_out

# Columns of logits alive at once. Enough for the products to run at full speed with it; the
# memory is this times `model.log_prob_chunk_tokens`.
VOCAB_CHUNK = 4096
BELOW_ALL = -1e30  # finite, so that no difference of two of them is nan


def logits(hidden_XD: jax.Array, unembed_VD: jax.Array, *, temperature: float) -> jax.Array:
    """Logits [..., V] divided by the sampling temperature; float32, or float64 as hidden_XD is."""
    logits_XV = jnp.einsum(
        "...D,VD->...V",
        hidden_XD,
        unembed_VD.astype(hidden_XD.dtype),
        preferred_element_type=sum_dtype(hidden_XD),
    )
    return logits_XV / temperature


class Beside(NamedTuple):
    """Per token, for the KL to a reference with logits r."""

    apart: jax.Array  # sum exp(z - top) (z - r)
    top: jax.Array  # max r
    total: jax.Array  # sum exp(r - its own top)


class Sums(NamedTuple):
    """Per token over the part of the vocabulary seen so far, z its logits."""

    top: jax.Array  # max z
    total: jax.Array  # sum exp(z - top)
    spread: jax.Array  # sum exp(z - top) (z - top)
    taken: jax.Array  # z of the target; 0 before it was seen
    reference: Beside | None


def no_sums(shape: tuple[int, ...], dtype: Any, *, reference: bool) -> Sums:
    """Before anything was seen."""
    zero, below = jnp.zeros(shape, dtype), jnp.full(shape, BELOW_ALL, dtype)
    return Sums(below, zero, zero, zero, Beside(zero, below, zero) if reference else None)


def add(sums: Sums, z_CP: jax.Array, targets_C: jax.Array, r_CP: jax.Array | None) -> Sums:
    """The sums [C] with a part of the vocabulary added; targets as `Parts.targets` has them."""
    P = z_CP.shape[1]
    top = jnp.maximum(sums.top, jnp.max(z_CP, axis=1))
    below_CP = z_CP - top[:, None]
    exp_CP = written_out(jnp.exp(below_CP))
    dot = lambda x_CP: jnp.einsum("CP,CP->C", exp_CP, x_CP)
    here_C = (targets_C >= 0) & (targets_C < P)
    index_C1 = jnp.clip(targets_C, 0, P - 1)[:, None]
    taken = jnp.take_along_axis(z_CP, index_C1, axis=1)[:, 0]
    sums = relative_to(sums, top)
    if sums.reference is not None:
        assert r_CP is not None
        beside = beside_relative_to(
            sums.reference, jnp.maximum(sums.reference.top, jnp.max(r_CP, axis=1))
        )
        more = jnp.sum(jnp.exp(r_CP - beside.top[:, None]), axis=1)
        apart = beside.apart + dot(z_CP - r_CP)
        sums = sums._replace(reference=Beside(apart, beside.top, beside.total + more))
    return sums._replace(
        total=sums.total + jnp.sum(exp_CP, axis=1),
        spread=sums.spread + dot(below_CP),
        taken=jnp.where(here_C, taken, sums.taken),
    )


def relative_to(sums: Sums, top: jax.Array) -> Sums:
    """The same sums, with another logit in the place of the largest."""
    down = sums.top - top
    scale = jnp.exp(down)
    beside = sums.reference
    return Sums(
        top=top,
        total=sums.total * scale,
        spread=(sums.spread + sums.total * down) * scale,
        taken=sums.taken,
        reference=None if beside is None else beside._replace(apart=beside.apart * scale),
    )


def beside_relative_to(beside: Beside, top: jax.Array) -> Beside:
    """The same for the largest logit of the reference."""
    return beside._replace(top=top, total=beside.total * jnp.exp(beside.top - top))


def over_shards(sums: Sums, axis: Any) -> Sums:
    """Sums over the whole vocabulary from those of each device's part of it."""
    if axis is None:
        return sums
    largest = functools.partial(jax.lax.pmax, axis_name=axis)
    added = functools.partial(jax.lax.psum, axis_name=axis)
    sums = relative_to(sums, largest(sums.top))
    beside = sums.reference
    if beside is not None:
        beside = beside_relative_to(beside, largest(beside.top))
        beside = Beside(added(beside.apart), beside.top, added(beside.total))
    return Sums(sums.top, added(sums.total), added(sums.spread), added(sums.taken), beside)


class Parts:
    """The vocabulary of this device, cut into parts."""

    def __init__(
        self,
        unembed_VD: jax.Array,
        reference_VD: jax.Array | None,
        temperature: float,
        layout: HeadLayout | None,
    ):
        V = len(unembed_VD)
        self.temperature, self.size = temperature, even_part(V, VOCAB_CHUNK)
        self.filled_up = V % self.size > 0
        self.axis, self.width_axis, self.row_axes = None, None, ()
        if layout is not None:
            (self.axis, self.width_axis), self.row_axes = layout.unembed, layout.row_axes
        first = 0 if self.axis is None else jax.lax.axis_index(self.axis) * V
        self.end = first + V
        parts = jax.tree.map(lambda x: cut(x, self.size), (unembed_VD, reference_VD))
        # For a scan: the first token id of each part, its unembedding [P, D], the reference's.
        self.each = (first + self.size * jnp.arange(len(parts[0])), *parts)

    def whole(self, part: Any) -> Any:
        """A part with the whole width of its columns."""
        start, *unembeds = part
        if self.width_axis is not None:
            gather = lambda x: jax.lax.all_gather(x, self.width_axis, axis=1, tiled=True)
            unembeds = jax.tree.map(gather, unembeds)
        return start, *jax.tree.map(columns_first, unembeds)

    def logits(self, hidden_CD: jax.Array, unembed_PD: jax.Array, start: jax.Array) -> jax.Array:
        """Logits [C, P]; those of columns that only fill up the last part lie below all."""
        logits_CP = logits(hidden_CD, unembed_PD, temperature=self.temperature)
        if not self.filled_up:
            return logits_CP
        real_1P = (start + jnp.arange(self.size) < self.end)[None]
        return jnp.where(real_1P, logits_CP, jnp.asarray(BELOW_ALL, logits_CP.dtype))

    def targets(self, targets_C: jax.Array, start: jax.Array) -> jax.Array:
        """Tokens counted from the first of a part. What only fills up the last part is no token:
        its numbers are those of the tokens that the next device begins with."""
        if not self.filled_up:
            return targets_C - start
        return jnp.where(targets_C < self.end, targets_C - start, -1)

    def own(self, d_unembed_PD: jax.Array) -> jax.Array:
        """The gradient over the tokens of all devices, of the width that this device holds."""
        width_axes = axes_of(self.width_axis)
        whole_axes = tuple(axis for axis in self.row_axes if axis not in width_axes)
        if whole_axes:
            d_unembed_PD = jax.lax.psum(d_unembed_PD, whole_axes)
        if set(width_axes) & set(self.row_axes):
            d_unembed_PD = jax.lax.psum_scatter(
                d_unembed_PD, self.width_axis, scatter_dimension=1, tiled=True
            )
        return d_unembed_PD


def even_part(length: int, most: int) -> int:
    """The size of equal parts, at most `most`; large ones are cut between tiles of a TPU's memory.

    Cut elsewhere, an array has to be laid out anew, which the compiler writes out tile by tile: a
    hundred seconds for the hidden states of a row of 22,528 tokens (docs/log.md).
    """
    if length <= most:
        return length
    step = LANES if most >= 8 * LANES else 1
    parts = -(-length // (most - most % step))
    return step * -(-length // (parts * step))


def cut(x: jax.Array, size: int) -> jax.Array:
    """[N, ...] as [N / size, size, ...], filled up with zeros."""
    missing = -len(x) % size
    if missing:
        x = jnp.pad(x, ((0, missing), *[(0, 0)] * (x.ndim - 1)))
    return x.reshape(-1, size, *x.shape[1:])
