"""The rows of the DAPO paper's Table 1 on a task that a small model does not finish.

Command:   python launch/train.py --config=configs/ablation.py:ROW
           python launch/ablate.py runs all rows with several seeds and writes the table
Hardware:  2 CPU cores, 1 GB of memory
Time:      2 minutes on one core; 2 more for the base model of a seed, which later runs reuse
Result:    held-out avg@32 from 14-16 % to 78-93 % (seeds 0 to 4), see docs/table1.md
"""

from collections.abc import Callable, Sequence

from ml_collections import ConfigDict

from configs import tiny_dapo
from dapo_jax.types import UserError

SUMS = dict(path="arithmetic", levels=(3, 7, 9, 11))


# The rows, of any DAPO config. The first six add one technique after another.


def grpo(c: ConfigDict) -> None:
    """Naive GRPO: one bound, the mean of each response, every prompt is kept. No KL, like DAPO."""
    no_clip_higher(c)
    no_overlong_punishment(c)
    no_token_loss(c)
    _no_dynamic_sampling(c)


def overlong_filter(c: ConfigDict) -> None:
    """+ overlong filtering: responses cut at the limit are masked."""
    grpo(c)
    c.objective.overlong_filter = True


def clip_higher(c: ConfigDict) -> None:
    """+ clip-higher."""
    no_overlong_punishment(c)
    no_token_loss(c)
    _no_dynamic_sampling(c)
    c.objective.overlong_filter = True


def overlong_punishment(c: ConfigDict) -> None:
    """+ soft overlong punishment, in place of the filter, as in the published DAPO."""
    no_token_loss(c)
    _no_dynamic_sampling(c)


def token_loss(c: ConfigDict) -> None:
    """+ token-level loss: DAPO without dynamic sampling."""
    _no_dynamic_sampling(c)


def dapo(c: ConfigDict) -> None:
    """+ dynamic sampling: DAPO."""


def no_clip_higher(c: ConfigDict) -> None:
    """DAPO without clip-higher."""
    c.objective.clip_high = c.objective.clip_low


def no_overlong_punishment(c: ConfigDict) -> None:
    """DAPO without soft overlong punishment."""
    c.reward.update(overlong_buffer_tokens=0, overlong_penalty=0.0)


def no_token_loss(c: ConfigDict) -> None:
    """DAPO without token-level loss."""
    c.objective.aggregation = "seq-mean-token-mean"


def _no_dynamic_sampling(c: ConfigDict) -> None:
    c.dynamic_sampling.enabled = False


TABLE_1 = (grpo, overlong_filter, clip_higher, overlong_punishment, token_loss, dapo)
ROWS = (*TABLE_1, no_clip_higher, no_overlong_punishment, no_token_loss)


def change_of(row: str, rows: Sequence[Callable[[ConfigDict], None]]) -> Callable:
    """Returns the function of this name; raises UserError where there is none."""
    named = {change.__name__: change for change in rows}
    if row not in named:
        raise UserError(f"--config=FILE:ROW: {row!r} is not one of {', '.join(named)}.")
    return named[row]


def get_config(row: str = "dapo") -> ConfigDict:
    """Returns tiny_dapo on longer sums, judged as it samples, with the changes of a row."""
    change = change_of(row, ROWS)
    c = tiny_dapo.get_config()
    c.data.train.sums.update(SUMS)
    c.data.heldout.sums.update(SUMS)
    c.rollout.max_response_tokens = 80
    c.evaluation.update(every_steps=4, num_samples=32, top_p=1.0)  # temperature 1 is the default
    c.train.num_steps = 24
    change(c)
    return c
