"""Benchmark of packing: how evenly packed rows lie over devices. It counts and runs nothing."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from dapo_jax.models.attention import kernels
from dapo_jax.tools.bench.shapes import check_positive, check_row, sample_lengths
from dapo_jax.training import packing
from dapo_jax.types import UserError


class PackingShape(NamedTuple):
    """A mini-batch."""

    responses: int
    row_len: int  # tokens of a row
    prompt_len: int
    lengths: str
    micro_batch: int  # rows
    shards: int  # devices that share the rows of a micro-batch


def bench_packing(shape: PackingShape) -> dict[str, Any]:
    """Returns rows, padding, the attention of the costliest device over that of the mean one before
    and after rows are put in order, and the share of whole rows that splash attention computes.

    Raises:
        UserError: a value is out of range.
    """
    check_positive(shape)
    check_row(shape.row_len, shape.prompt_len, shape.lengths)
    if shape.micro_batch % shape.shards:
        raise UserError(
            f"--micro_batch ({shape.micro_batch}) must be a multiple of --shards ({shape.shards}): "
            "each device has as many rows."
        )
    longest = shape.row_len - shape.prompt_len
    responses = sample_lengths(shape.responses, longest, shape.lengths)
    lengths = (shape.prompt_len + responses).tolist()
    cut = {"rows_per_micro_batch": shape.micro_batch, "shards": shape.shards}
    layout = packing.first_fit_decreasing(lengths, shape.row_len)
    in_order = packing.balanced(layout, lengths, **cut)
    segments_BT = np.zeros((len(layout), shape.row_len), np.int32)
    for segments_T, row in zip(segments_BT, layout, strict=True):
        n = [lengths[i] for i in row]
        segments_T[: sum(n)] = np.repeat(np.arange(len(n)) + 1, n)
    computed, of_rows = kernels.splash_blocks(jnp.asarray(segments_BT))
    rows = packing.used_micro_batches(len(layout), shape.micro_batch) * shape.micro_batch
    return {
        "rows": len(layout),
        "micro_batches": rows // shape.micro_batch,
        "padding_fraction": round(1 - sum(lengths) / (len(layout) * shape.row_len), 4),
        "padding_with_empty_rows": round(1 - sum(lengths) / (rows * shape.row_len), 4),
        "imbalance_first_fit": round(packing.imbalance(layout, lengths, **cut), 3),
        "imbalance": round(packing.imbalance(in_order, lengths, **cut), 3),
        "splash_blocks": computed,
        "splash_blocks_of_whole_rows": of_rows,
        "pairs_within_sequences": sum(n * (n + 1) // 2 for n in lengths),
        "shape": shape._asdict(),
    }
