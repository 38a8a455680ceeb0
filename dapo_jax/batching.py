"""Packing: sequences of any length become rows of one fixed shape.

Several sequences share a row. Segment ids keep their attention apart and positions restart, so that
packing changes nothing but speed (a test says so).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dapo_jax.config import Config
from dapo_jax.types import Rows


class Sample(NamedTuple):
    """One sequence for training: a prompt followed by a response."""

    prompt_tokens: Sequence[int]
    response_tokens: np.ndarray  # int32 [n]
    weight: np.ndarray | float  # weight of each response token in the loss
    trained: bool  # False leaves the response out of the loss and of every count
    log_prob_old: np.ndarray | float  # float32 [n]
    advantage: float
    lag: int  # rollout steps since it was drawn

    @property
    def length(self) -> int:
        return len(self.prompt_tokens) + len(self.response_tokens)


def first_fit_decreasing(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Rows as lists of indices into `lengths`: longest first, each into the first row with room.

    Deterministic: equal lengths keep their order.

    Raises:
        ValueError: a length exceeds `row_tokens`.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if lengths[i] > row_tokens:
            raise ValueError(f"sequence {i} has {lengths[i]} tokens, a row holds {row_tokens}")
        for row, left in enumerate(room):
            if lengths[i] <= left:
                rows[row].append(i)
                room[row] -= lengths[i]
                break
        else:
            rows.append([i])
            room.append(row_tokens - lengths[i])
    return rows


def empty_rows(num_rows: int, row_tokens: int) -> Rows:
    """Rows of nothing but padding, as NumPy arrays."""
    dtypes = dict(mask_BT=bool, tokens_BT=np.int32, positions_BT=np.int32, segments_BT=np.int32)
    dtypes |= dict(lag_BT=np.int32)
    shape = (num_rows, row_tokens)
    return Rows(**{name: np.zeros(shape, dtypes.get(name, np.float32)) for name in Rows._fields})


def pack(samples: Sequence[Sample], row_tokens: int) -> Rows:
    """As few rows as first-fit-decreasing needs, NumPy arrays [rows, row_tokens]."""
    layout = first_fit_decreasing([sample.length for sample in samples], row_tokens)
    rows = empty_rows(len(layout), row_tokens)
    for row, members in enumerate(layout):
        start = 0
        for segment, i in enumerate(members, start=1):
            sample = samples[i]
            whole = slice(start, start + sample.length)
            response = slice(start + len(sample.prompt_tokens), start + sample.length)
            rows.tokens_BT[row, whole] = [*sample.prompt_tokens, *sample.response_tokens]
            rows.positions_BT[row, whole] = np.arange(sample.length)
            rows.segments_BT[row, whole] = segment
            rows.lag_BT[row, response] = sample.lag
            rows.log_prob_old_BT[row, response] = sample.log_prob_old
            if sample.trained:
                rows.mask_BT[row, response] = True
                rows.weight_BT[row, response] = sample.weight
                rows.advantage_BT[row, response] = sample.advantage
            start += sample.length
    return rows


def to_micro_batches(rows: Rows, *, rows_per_micro_batch: int, num_micro_batches: int) -> Rows:
    """The same rows as [micro-batches, rows, tokens], padded with empty rows.

    Args:
        num_micro_batches: the fixed leading size, so that nothing recompiles; those beyond the
            ones that hold data are never computed.

    Raises:
        ValueError: the rows do not fit.
    """
    shape = (num_micro_batches, rows_per_micro_batch)
    missing = shape[0] * shape[1] - len(rows.tokens_BT)
    if missing < 0:
        raise ValueError(f"{len(rows.tokens_BT)} rows do not fit in {shape} micro-batches")
    return Rows(*(np.pad(x, ((0, missing), (0, 0))).reshape(*shape, x.shape[1]) for x in rows))


def used_micro_batches(num_rows: int, rows_per_micro_batch: int) -> int:
    """How many micro-batches hold data."""
    return -(-num_rows // rows_per_micro_batch)


def max_micro_batches(config: Config) -> int:
    """Micro-batches that the longest possible mini-batch needs: the fixed shape of an update.

    Of the longest sequences, k = row_tokens // longest fit in a row, and first-fit leaves at most
    one row with fewer than k.
    """
    t = config.train
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    sequences = t.prompts_per_update * config.rollout.group_size
    rows = -(-sequences // (t.row_tokens // longest))
    return used_micro_batches(rows, t.rows_per_micro_batch)
