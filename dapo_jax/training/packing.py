"""Packing: sequences of any length become rows of one fixed shape.

Several sequences share a row. Segment ids separate their attention and positions restart, so
packing changes nothing but speed.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from dapo_jax.config import Config
from dapo_jax.models.attention.cudnn import most_segments
from dapo_jax.types import Rows


class Packed(NamedTuple):
    """Packed rows [rows, row_tokens], and where the response tokens are."""

    rows: Rows  # NumPy; tokens, positions, segments, and a mask of all response tokens
    where_M: np.ndarray  # index of each response token in a flattened row array


def first_fit_decreasing(
    lengths: Sequence[int], row_tokens: int, prefixes: Sequence[tuple[int, ...]] | None = None
) -> list[list[int]]:
    """Returns rows as lists of indices into `lengths`: longest first, each into the first row that
    has room for its tokens and fewer than `most_segments` sequences. Equal lengths keep their
    order.

    Args:
        prefixes: tokens at the beginning of each sequence that a row holds once for all sequences
            that have them. Sequences of one prefix are placed together, first into rows that hold
            it. None: nothing is shared.

    Raises:
        ValueError: a length exceeds `row_tokens`.
    """
    most = most_segments(row_tokens)
    prefixes = prefixes or [()] * len(lengths)
    turns = {prefix: turn for turn, prefix in enumerate(dict.fromkeys(prefixes))}
    rows: list[list[int]] = []
    room: list[int] = []
    holders: dict[tuple[int, ...], list[int]] = {prefix: [] for prefix in turns}  # rows
    for i in sorted(range(len(lengths)), key=lambda i: (turns[prefixes[i]], -lengths[i], i)):
        if lengths[i] > row_tokens:
            raise ValueError(f"sequence {i} has {lengths[i]} tokens, a row holds {row_tokens}")
        added = lengths[i] - len(prefixes[i])
        having = holders[prefixes[i]] if prefixes[i] else []
        takes = lambda row, added: added <= room[row] and len(rows[row]) < most
        row = next((row for row in having if takes(row, added)), None)
        if row is None:
            added = lengths[i]
            row = next((row for row in range(len(rows)) if takes(row, added)), len(rows))
            having.append(row)
        if row == len(rows):
            rows.append([])
            room.append(row_tokens)
        rows[row].append(i)
        room[row] -= added
    return rows


def balanced(
    layout: Sequence[list[int]],
    lengths: Sequence[int],
    *,
    rows_per_micro_batch: int,
    shards: int,
) -> list[list[int]]:
    """Returns the rows ordered so that the shards of a micro-batch have equal attention cost.

    Devices wait for each other in every layer, so a micro-batch takes as long as its costliest
    shard. Rows of similar cost share a micro-batch; in it each row, costliest first, goes to the
    shard with the lowest cost so far.

    Args:
        layout: rows of `first_fit_decreasing`.
        lengths: of the sequences.
        shards: parts that a micro-batch is cut into.

    Returns:
        Rows of shard 0 of the first micro-batch, of its shard 1, and so on, with empty rows where
        the last micro-batch has too few.
    """
    if shards == 1:
        return list(layout)
    costs = [sum(lengths[i] ** 2 for i in members) for members in layout]  # up to a factor
    order = sorted(range(len(layout)), key=lambda row: (-costs[row], row))
    arranged: list[list[int]] = []
    for first in range(0, len(order), rows_per_micro_batch):
        of_shards: list[list[list[int]]] = [[] for _ in range(shards)]
        load = [0] * shards
        size = rows_per_micro_batch // shards
        for row in order[first : first + rows_per_micro_batch]:
            open_shards = [s for s in range(shards) if len(of_shards[s]) < size]
            least = min(open_shards, key=lambda s: (load[s], len(of_shards[s]), s))
            of_shards[least].append(layout[row])
            load[least] += costs[row]
        for rows in of_shards:
            arranged += [*rows, *([] for _ in range(size - len(rows)))]
    return arranged


def empty_rows(num_rows: int, row_tokens: int) -> Rows:
    """Returns rows of padding, as NumPy arrays."""
    dtypes = dict(mask_BT=bool, selected_BT=bool)
    names = "tokens_BT", "positions_BT", "segments_BT", "prefixes_BT", "staleness_BT"
    dtypes |= dict.fromkeys(names, np.int32)
    shape = (num_rows, row_tokens)
    return Rows(**{name: np.zeros(shape, dtypes.get(name, np.float32)) for name in Rows._fields})


def pack(
    prompts: Sequence[Sequence[int]],
    tokens_M: np.ndarray,
    lengths_R: np.ndarray,
    row_tokens: int,
    *,
    rows_per_micro_batch: int = 1,
    shards: int = 1,
    share_prompts: bool = False,
) -> Packed:
    """Packs R prompts with their responses, first-fit-decreasing.

    Args:
        prompts: R prompts in tokens.
        tokens_M: int32, the tokens of all responses, one after the other.
        lengths_R: of each response.
        rows_per_micro_batch, shards: see `balanced`.
        share_prompts: a row holds a prompt once, as a segment that the segments of its responses
            attend to. The prompt's last token, which predicts the first of a response, begins the
            segment of each response.

    Raises:
        ValueError: a prompt with its response exceeds `row_tokens`.
    """
    total = [len(prompt) + int(n) for prompt, n in zip(prompts, lengths_R)]
    prefixes = [tuple(prompt[:-1]) if share_prompts else () for prompt in prompts]
    layout = balanced(
        first_fit_decreasing(total, row_tokens, prefixes),
        total,
        rows_per_micro_batch=rows_per_micro_batch,
        shards=shards,
    )
    rows = empty_rows(len(layout), row_tokens)
    offsets_R = np.cumsum(lengths_R) - lengths_R
    where_M = np.zeros(len(tokens_M), np.int64)
    for row, members in enumerate(layout):
        start = segment = 0
        shared: dict[tuple[int, ...], int] = {}  # the segments of prefixes
        for i in members:
            prefix, n = prefixes[i], int(lengths_R[i])
            own = prompts[i][len(prefix) :], len(prefix), total[i]
            pieces = [own]  # (tokens that are known here, first position, end)
            if prefix and prefix not in shared:
                shared[prefix] = segment + 1
                pieces = [(prefix, 0, len(prefix)), own]
            for tokens, first, end in pieces:
                segment += 1
                whole = slice(start, start + end - first)
                rows.tokens_BT[row, start : start + len(tokens)] = tokens
                rows.positions_BT[row, whole] = np.arange(first, end)
                rows.segments_BT[row, whole] = segment
                rows.prefixes_BT[row, whole] = shared.get(prefix, segment)
                start = whole.stop
            where_M[offsets_R[i] : offsets_R[i] + n] = row * row_tokens + start - n + np.arange(n)
    packed = Packed(rows, where_M)
    return Packed(fill(packed, tokens_BT=tokens_M, mask_BT=np.ones(len(tokens_M), bool)), where_M)


def fill(packed: Packed, **columns_M: np.ndarray) -> Rows:
    """Returns the rows with these columns written at the response tokens.

    Args:
        columns_M: by the names of fields of `Rows`; prompts and padding keep their values.
    """
    replaced = {}
    for name, column_M in columns_M.items():
        filled_BT = getattr(packed.rows, name).copy()
        filled_BT.reshape(-1)[packed.where_M] = column_M
        replaced[name] = filled_BT
    return packed.rows._replace(**replaced)


def to_micro_batches(rows: Rows, *, rows_per_micro_batch: int, num_micro_batches: int) -> Rows:
    """Returns the rows as micro-batches [A, B, T], padded with empty rows.

    Args:
        num_micro_batches: the fixed leading size, so that nothing recompiles.

    Raises:
        ValueError: the rows do not fit.
    """
    shape = (num_micro_batches, rows_per_micro_batch)
    missing = shape[0] * shape[1] - len(rows.tokens_BT)
    if missing < 0:
        raise ValueError(f"{len(rows.tokens_BT)} rows do not fit in {shape} micro-batches")
    return Rows(*(np.pad(x, ((0, missing), (0, 0))).reshape(*shape, x.shape[1]) for x in rows))


def take_columns(packed: Packed, x_ABT: ArrayLike) -> np.ndarray:
    """Returns the values of the response tokens [M]: the inverse of `fill`, `to_micro_batches`."""
    return np.asarray(x_ABT).reshape(-1)[packed.where_M]


def used_micro_batches(num_rows: int, rows_per_micro_batch: int) -> int:
    """Returns how many micro-batches hold data."""
    return -(-num_rows // rows_per_micro_batch)


def most_rows(lengths: Sequence[int], row_tokens: int) -> int:
    """Returns a bound on the rows of `first_fit_decreasing`, for sequences of at most these
    lengths.

    The smaller of two bounds. By number: a row holds at least as many sequences as it could hold of
    the longest. By tokens: two rows with fewer than `most_segments` sequences hold more than
    `row_tokens` together, since otherwise the earlier row would have taken a sequence of the later.
    """
    most = most_segments(row_tokens)
    by_number = -(-len(lengths) // min(row_tokens // max(lengths), most))
    by_tokens = 2 * -(-sum(lengths) // row_tokens) - 1 + len(lengths) // most
    return min(by_number, by_tokens)


def max_micro_batches(config: Config) -> int:
    """Returns the micro-batches that the longest possible mini-batch needs: the fixed shape of an
    update."""
    t = config.train
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    lengths = [longest] * (t.prompts_per_update * config.rollout.group_size)
    return used_micro_batches(most_rows(lengths, t.row_tokens), t.rows_per_micro_batch)
