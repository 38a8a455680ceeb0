"""Evaluation: avg@k, cons@k and pass@k during a run, and benchmarks of a model."""

from dapo_jax.evaluation.estimators import avg_at_k, cons_at_k, pass_at_k
from dapo_jax.evaluation.majority_vote import equivalences, votes
from dapo_jax.evaluation.metrics import attempts_of, evaluate, statistics

__all__ = [
    "attempts_of",
    "avg_at_k",
    "cons_at_k",
    "equivalences",
    "evaluate",
    "pass_at_k",
    "statistics",
    "votes",
]
