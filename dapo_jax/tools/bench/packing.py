"""How evenly packed rows lie over devices: counted, nothing is run."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from dapo_jax.models.attention import kernels
from dapo_jax.tools.bench.shapes import Shape, check_lengths, draw_lengths
from dapo_jax.training import packing
from dapo_jax.types import UserError


class PackingShape(NamedTuple):
    """Of the mini-batch."""

    responses: int
    row_len: int  # tokens of a row
    prompt_len: int
    lengths: str
    micro_batch: int  # rows
    shards: int  # devices that the rows of a micro-batch lie over

    def check(self) -> None:
        """Raises UserError for what is out of range."""
        for name in ("responses", "prompt_len", "micro_batch", "shards"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name} must be above 0; got {getattr(self, name)}.")
        if self.row_len <= self.prompt_len:
            raise UserError(
                f"--row_len ({self.row_len}) must be above --prompt_len ({self.prompt_len}): a row "
                "holds a prompt with its response."
            )
        if self.micro_batch % self.shards:
            raise UserError(
                f"--micro_batch ({self.micro_batch}) must be a multiple of --shards "
                f"({self.shards}): each device has as many rows."
            )
        check_lengths(self.lengths, self.row_len - self.prompt_len)


def bench_packing(shape: PackingShape) -> dict[str, Any]:
    """Rows, padding, the attention of the costliest device over that of the mean one, before and
    after the rows are put in order, and how much of whole rows splash attention computes."""
    shape.check()
    drawn = Shape(
        layers=1, width=1, heads=1, kv_heads=1, d_ff=1, vocab=1, dtype="float32",
        prompts=shape.responses, group=1, prompt_len=shape.prompt_len,
        gen_len=shape.row_len - shape.prompt_len, lengths=shape.lengths, slots=0, decode_steps=1,
        page_tokens=1, temperature=1.0, top_p=1.0, runs=1,
    )  # fmt: skip
    lengths = (shape.prompt_len + draw_lengths(drawn)[:, 0]).tolist()
    cut = {"rows_per_micro_batch": shape.micro_batch, "shards": shape.shards}
    layout = packing.first_fit_decreasing(lengths, shape.row_len)
    in_order = packing.balanced(layout, lengths, **cut)
    segments_BT = np.zeros((len(layout), shape.row_len), np.int32)
    for segments_T, row in zip(segments_BT, layout, strict=True):
        n = [lengths[i] for i in row]
        segments_T[: sum(n)] = np.repeat(np.arange(len(n)) + 1, n)
    computed, of_rows = kernels.splash_blocks(jnp.asarray(segments_BT))
    places = packing.used_micro_batches(len(layout), shape.micro_batch) * shape.micro_batch
    return {
        "rows": len(layout),
        "micro_batches": places // shape.micro_batch,
        "padding_fraction": round(1 - sum(lengths) / (len(layout) * shape.row_len), 4),
        "padding_with_empty_rows": round(1 - sum(lengths) / (places * shape.row_len), 4),
        "imbalance_first_fit": round(packing.imbalance(layout, lengths, **cut), 3),
        "imbalance": round(packing.imbalance(in_order, lengths, **cut), 3),
        "splash_blocks": computed,
        "splash_blocks_of_whole_rows": of_rows,
        "pairs_within_sequences": sum(n * (n + 1) // 2 for n in lengths),
        "shape": shape._asdict(),
    }
