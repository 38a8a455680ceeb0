"""Synchronous and carried rollouts on the task of configs/tiny_dapo.py with a long tail.

Command:   python launch/ablate.py --config=configs/ablation_carry.py --workdir=runs/tail
Hardware:  2 CPU cores, 1 GB of memory
Time:      4 minutes a run on one core
Result:    docs/async.md: carry ends 0.7 points lower, and is slower to 90 %
"""

from ml_collections import ConfigDict

from configs import ablation, tiny_dapo


def sync(c: ConfigDict) -> None:
    """A step waits for its longest response."""


def carry(c: ConfigDict) -> None:
    """Unfinished responses continue in the next step; tokens are at most two steps old."""
    c.rollout.max_staleness = 2


ROWS = (sync, carry)


def get_config(row: str = "carry") -> ConfigDict:
    """Returns tiny_dapo with a limit far above most responses, and the changes of a row."""
    change = ablation.change_of(row, ROWS)
    c = tiny_dapo.get_config()
    c.rollout.update(max_response_tokens=480, slots=32)  # most responses have 20 to 80 tokens
    c.mesh.data = 1
    c.train.update(row_tokens=512, rows_per_micro_batch=4, num_steps=24)
    c.pretrain.rows_per_step = 8
    c.evaluation.update(every_steps=2, num_samples=8)
    change(c)
    return c
