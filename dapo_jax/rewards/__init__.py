"""Scorers, the pool of worker processes, asynchronous scoring."""

from dapo_jax.rewards.async_scoring import GroupScoring
from dapo_jax.rewards.pool import RewardPool, Scored
from dapo_jax.rewards.scorers import EQUIVALENCES, SCORERS, load_scorer
from dapo_jax.rewards.types import CORRECT_REWARD, Rubric, Score, Task, parse_scorers, verdict

__all__ = [
    "CORRECT_REWARD",
    "EQUIVALENCES",
    "SCORERS",
    "GroupScoring",
    "RewardPool",
    "Rubric",
    "Score",
]
__all__ += ["Scored", "Task", "load_scorer", "parse_scorers", "verdict"]
