"""Packing: sequences of any length become rows of one fixed shape.

Several sequences share a row. Segment ids keep their attention apart and positions restart, so that
packing changes nothing but speed (a test says so).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from dapo_jax.config import Config
from dapo_jax.types import Rows


class Packed(NamedTuple):
    """Rows [rows, row_tokens] and where in them the response tokens lie."""

    rows: Rows  # NumPy arrays; tokens, positions, segments, lag, and a mask of all response tokens
    where_N: np.ndarray  # index of each response token in a flattened row array


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
    dtypes = dict(mask_BT=bool, selected_BT=bool)
    dtypes |= dict(tokens_BT=np.int32, positions_BT=np.int32, segments_BT=np.int32, lag_BT=np.int32)
    shape = (num_rows, row_tokens)
    return Rows(**{name: np.zeros(shape, dtypes.get(name, np.float32)) for name in Rows._fields})


def pack(
    prompts: Sequence[Sequence[int]],
    tokens_N: np.ndarray,
    lengths_R: np.ndarray,
    row_tokens: int,
) -> Packed:
    """As few rows as first-fit-decreasing needs for R prompts with their responses.

    Args:
        prompts: R prompts in tokens.
        tokens_N: int32, the tokens of all responses, one after the other.
        lengths_R: of each response.

    Raises:
        ValueError: a prompt with its response exceeds `row_tokens`.
    """
    total = [len(prompt) + int(n) for prompt, n in zip(prompts, lengths_R)]
    layout = first_fit_decreasing(total, row_tokens)
    rows = empty_rows(len(layout), row_tokens)
    offsets_R = np.cumsum(lengths_R) - lengths_R
    where_N = np.zeros(len(tokens_N), np.int64)
    for row, members in enumerate(layout):
        start = 0
        for segment, i in enumerate(members, start=1):
            n, first = int(lengths_R[i]), start + len(prompts[i])
            whole = slice(start, start + total[i])
            rows.tokens_BT[row, start:first] = prompts[i]
            rows.positions_BT[row, whole] = np.arange(total[i])
            rows.segments_BT[row, whole] = segment
            where_N[offsets_R[i] : offsets_R[i] + n] = row * row_tokens + first + np.arange(n)
            start += total[i]
    packed = Packed(rows, where_N)
    return Packed(fill(packed, tokens_BT=tokens_N, mask_BT=np.ones(len(tokens_N), bool)), where_N)


def fill(packed: Packed, **columns_N: np.ndarray) -> Rows:
    """The rows with columns of response tokens put in their places.

    Args:
        columns_N: by the names of fields of `Rows`; prompts and padding keep what they have.
    """
    replaced = {}
    for name, column_N in columns_N.items():
        filled_BT = getattr(packed.rows, name).copy()
        filled_BT.reshape(-1)[packed.where_N] = column_N
        replaced[name] = filled_BT
    return packed.rows._replace(**replaced)


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


def take_columns(packed: Packed, x_MBT: ArrayLike) -> np.ndarray:
    """The inverse of `fill` after `to_micro_batches`: values of the response tokens [N]."""
    return np.asarray(x_MBT).reshape(-1)[packed.where_N]


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
