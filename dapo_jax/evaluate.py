"""Held-out evaluation: k samples of every problem, scored."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from dapo_jax import estimators, model
from dapo_jax.reward_pool import RewardPool
from dapo_jax.rollout import scheduler
from dapo_jax.rollout.engine import DecoderEngine
from dapo_jax.scoring import Scoring
from dapo_jax.types import Problem


def evaluate(
    engine: DecoderEngine,
    params: model.Params,
    problems: Sequence[Problem],
    detokenize: scheduler.Detokenize,
    pool: RewardPool,
    *,
    num_samples: int,
    key: jax.Array,
    check_stop: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """avg@k with its 95 % interval over problems, cons@k, pass@k, mean length in tokens and
    truncated share, as metrics `eval/...`."""
    scoring = Scoring(pool, problems)
    responses_QK, _ = scheduler.generate(
        engine,
        params,
        problems,
        detokenize,
        num_samples=num_samples,
        key=key,
        finished=scoring.submit,
        check_stop=check_stop,
    )
    found = scoring.verdicts()
    verdicts = [found[q, k] for q in range(len(problems)) for k in range(num_samples)]
    shape = (len(problems), num_samples)
    correct_QK = np.array([verdict.correct for verdict in verdicts]).reshape(shape)
    extracted = np.array([verdict.extracted for verdict in verdicts], object)
    lengths = np.array([len(r.tokens) for row in responses_QK for r in row])
    truncated = np.array([r.truncated for row in responses_QK for r in row])
    low, high = estimators.bootstrap_interval(correct_QK.mean(axis=1))
    metrics = {
        f"eval/avg@{num_samples}": estimators.avg_at_k(correct_QK),
        "eval/interval_low": low,
        "eval/interval_high": high,
        f"eval/pass@{num_samples}": estimators.pass_at_k(correct_QK, num_samples),
        "eval/length_mean": float(lengths.mean()),
        "eval/truncated_share": float(truncated.mean()),
    }
    # A scorer that does not tell which answer it read leaves nothing to vote on.
    if all(v.extracted is not None for v in verdicts if v.correct):
        answers_QK = extracted.reshape(shape).tolist()
        metrics[f"eval/cons@{num_samples}"] = estimators.cons_at_k(answers_QK, correct_QK)
    return metrics
