"""The objective: pure functions of arrays, as in the papers that they name."""

from dapo_jax.algorithms.advantages import ADVANTAGES, Advantages, Outcomes, estimate
from dapo_jax.algorithms.aggregation import AGGREGATIONS, Aggregation, aggregate
from dapo_jax.algorithms.covariance import select_clip_cov, select_kl_cov
from dapo_jax.algorithms.importance_correction import Correction, correct, mismatch
from dapo_jax.algorithms.kl import adapted_kl_coefficient, kl_estimate, reward_kl
from dapo_jax.algorithms.losses import COVARIANCE_LOSSES, LOSSES
from dapo_jax.algorithms.overlong import soft_overlong_punishment
from dapo_jax.algorithms.surrogate import Surrogate, clamp

__all__ = [
    "ADVANTAGES",
    "AGGREGATIONS",
    "COVARIANCE_LOSSES",
    "LOSSES",
    "Advantages",
    "Aggregation",
    "Correction",
    "Outcomes",
    "Surrogate",
    "adapted_kl_coefficient",
    "aggregate",
    "clamp",
    "correct",
    "estimate",
    "kl_estimate",
    "mismatch",
    "reward_kl",
    "select_clip_cov",
    "select_kl_cov",
    "soft_overlong_punishment",
]
