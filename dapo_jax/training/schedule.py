"""Values that change from one rollout step to the next: the position in the schedules of the
learning rates, and the adaptive coefficients of KL and entropy."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from dapo_jax.algorithms.entropy import adapted_entropy_coefficient
from dapo_jax.algorithms.kl import adapted_kl_coefficient
from dapo_jax.config import ObjectiveConfig


class Schedule(NamedTuple):
    """Values that one rollout step leaves to the next; saved with the run."""

    updated_steps: int  # rollout steps that made an update; learning rates advance with these
    reward_kl_coefficient: float
    entropy_coefficient: float

    @classmethod
    def first(cls, objective: ObjectiveConfig) -> "Schedule":
        """Returns the schedule of a run's first step."""
        return cls(0, objective.reward_kl_coefficient, objective.entropy_coefficient)

    def in_stage(self, changes: Mapping[str, Any]) -> "Schedule":
        """Returns the schedule of the first step of a stage: with the coefficients that it sets.

        Args:
            changes: see `config.stages`.
        """
        names = ("reward_kl_coefficient", "entropy_coefficient")
        given = {name: changes.get(f"objective.{name}") for name in names}
        return self._replace(**{name: x for name, x in given.items() if x is not None})

    def after(
        self,
        objective: ObjectiveConfig,
        *,
        updated: bool,
        num_responses: int,
        kl: float | None,
        entropy: float | None,
    ) -> "Schedule":
        """Returns the schedule of the next step.

        Args:
            updated: whether this step updated the policy or the critic.
            num_responses: that this step was trained on.
            kl: mean over the trained tokens of the KL in the reward, nats; None: the reward has
                none, or the policy was not updated.
            entropy: mean over the trained tokens before the first update, nats; None: it was not
                measured, or the policy was not updated.
        """
        kl_coefficient, entropy_coefficient = self.reward_kl_coefficient, self.entropy_coefficient
        if objective.reward_kl_adaptation is not None and kl is not None:
            target, horizon = objective.reward_kl_adaptation
            kl_coefficient = adapted_kl_coefficient(
                kl_coefficient, kl, target=target, horizon=horizon, num_responses=num_responses
            )
        if objective.entropy_adaptation is not None and entropy is not None:
            target, step = objective.entropy_adaptation
            entropy_coefficient = adapted_entropy_coefficient(
                entropy_coefficient, entropy, target=target, step=step
            )
        return Schedule(self.updated_steps + updated, kl_coefficient, entropy_coefficient)
