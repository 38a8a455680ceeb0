"""From scored groups to an update: batch, packing, step, optimizer, critic, learner.

`dapo_jax.training.base_model` is imported by itself: it loads the checkpoint library.
"""

from dapo_jax.training.batch import (
    estimate_advantages,
    make_samples,
    shaped_rewards,
)
from dapo_jax.training.learner import Learner, LearnerState, state_bytes
from dapo_jax.training.packing import Packed, max_micro_batches, pack
from dapo_jax.training.schedule import Schedule
from dapo_jax.training.step import TrainState

__all__ = [
    "Learner",
    "LearnerState",
    "Packed",
    "Schedule",
    "TrainState",
    "estimate_advantages",
    "make_samples",
    "max_micro_batches",
    "pack",
    "shaped_rewards",
    "state_bytes",
]
