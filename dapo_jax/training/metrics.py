"""Metrics of a step's updates; docs/metrics.md has the meaning of each."""

from collections.abc import Sequence

import jax
import numpy as np

from dapo_jax.algorithms import importance_correction
from dapo_jax.algorithms.surrogate import MAX_LOG_RATIO
from dapo_jax.training.batch import TokenColumns
from dapo_jax.training.critic import CriticMetrics
from dapo_jax.training.step import UpdateMetrics
from dapo_jax.types import Samples


def update_metrics(updates: Sequence[UpdateMetrics], *, has_mismatch: bool) -> dict[str, float]:
    """Returns statistics over the trained tokens of all mini-batches of a step. A skipped update is
    counted, and excluded from the means.

    Args:
        has_mismatch: whether the old log-probs are the rollout's, so that the first update compares
            them with the trainer's.
    """
    updates = jax.device_get(list(updates))
    taken = [u for u in updates if not u.skipped]
    metrics: dict[str, float] = {
        "optimizer/updates": len(taken),
        "optimizer/skipped_updates": len(updates) - len(taken),
    }
    if not taken:
        return metrics
    total = jax.tree.map(lambda *x: float(np.sum(x, dtype=np.float64)), *[u.sums for u in taken])
    most = jax.tree.map(lambda *x: float(np.max(x)), *[u.extremes for u in taken])
    tokens = max(total.tokens, 1.0)
    metrics |= {
        "policy/loss": total.loss / len(taken),
        "policy/entropy": total.entropy / tokens,
        "policy/token_prob": total.token_prob / tokens,
        "policy/clip_high_share": total.clip_high / tokens,
        "policy/clip_low_share": total.clip_low / tokens,
        "policy/clip_dual_share": total.clip_dual / tokens,
        "policy/kl_old": total.kl_old / tokens,
        "policy/kl_ref": total.kl_ref / tokens,
        "optimizer/grad_norm": float(np.mean([u.grad_norm for u in taken])),
        "batch/tokens_trained": total.tokens,
    }
    for bound in ("clip_high", "clip_low", "clip_dual"):
        if clipped := getattr(total, bound):
            probability = getattr(total, f"{bound}_prob") / clipped
            metrics[f"policy/{bound}_prob"] = probability
    if total.tokens > 0:
        metrics |= {
            "policy/ratio_max": most.ratio_max,
            "policy/ratio_min": -most.minus_ratio_min,
        }
    # Only the first mini-batch is updated at the parameters that sampled its tokens.
    first = updates[0]
    sums = first.sums
    if has_mismatch and not first.skipped and sums.mismatch_tokens > 0:
        metrics["rollout/log_prob_mismatch_mean"] = float(sums.mismatch / sums.mismatch_tokens)
        metrics["rollout/log_prob_mismatch_max"] = float(first.extremes.mismatch_max)
    return metrics


def advantage_metrics(columns: TokenColumns) -> dict[str, float]:
    """Returns statistics of the advantages of trained tokens, and of the critic's values."""
    mask_M = columns.mask_M
    if not mask_M.any():
        return {}
    assert columns.advantage_M is not None
    advantage_M = columns.advantage_M[mask_M]
    numbers = {
        "advantage/mean": float(advantage_M.mean()),
        "advantage/max": float(advantage_M.max()),
        "advantage/min": float(advantage_M.min()),
    }
    if columns.return_M is not None:
        assert columns.value_old_M is not None
        return_M = columns.return_M[mask_M].astype(np.float64)
        value_M = columns.value_old_M[mask_M].astype(np.float64)
        numbers["critic/value_mean"] = float(value_M.mean())
        numbers["critic/return_mean"] = float(return_M.mean())
        numbers["critic/explained_variance"] = explained_variance(value_M, return_M)
    return numbers


def explained_variance(value_M: np.ndarray, return_M: np.ndarray) -> float:
    """Returns 1 - var(return - value) / var(return); 0 where returns vary by rounding alone."""
    variance = float(np.var(return_M, ddof=1)) if len(return_M) > 1 else 0.0
    return 1.0 - float(np.var(return_M - value_M, ddof=1)) / variance if variance > 1e-12 else 0.0


def critic_metrics(updates: Sequence[CriticMetrics]) -> dict[str, float]:
    """Returns statistics of the critic over the trained tokens of all mini-batches, if any."""
    updates = jax.device_get(list(updates))
    taken = [u for u in updates if not u.skipped]
    if not taken:
        return {}
    tokens = max(1.0, float(sum(u.sums.tokens for u in taken)))
    return {
        "critic/loss": float(np.mean([u.sums.loss for u in taken])),
        "critic/clip_share": float(sum(u.sums.clipped for u in taken)) / tokens,
        "critic/grad_norm": float(np.mean([u.grad_norm for u in taken])),
    }


def staleness_metrics(samples: Samples) -> dict[str, float]:
    """Returns how many rollout steps ago the trained tokens were sampled: mean, largest, and the
    share of each age. Stale tokens keep the log-probs of the policy that sampled them and are not
    in `mismatch_metrics`."""
    age_M = samples.staleness_M[samples.trained_M]
    numbers = {
        "batch/stale_share": float((age_M > 0).mean()) if len(age_M) else 0.0,
        "batch/staleness_mean": float(age_M.mean()) if len(age_M) else 0.0,
        "batch/staleness_max": int(age_M.max(initial=0)),
    }
    ages = np.unique(age_M[age_M > 0]).tolist()
    return numbers | {f"batch/stale_share/{age}": float((age_M == age).mean()) for age in ages}


def stale_mismatch_metrics(samples: Samples, log_prob_M: np.ndarray) -> dict[str, float]:
    """Returns how far the policy has moved from those that sampled the stale tokens: the mean of
    |log-prob - theirs| by age, and the effective sample size of all trained tokens,

        (sum w)^2 / (n sum w^2), w = pi / mu

    1 where the policy is the one that sampled. Empty where no token is stale.

    Args:
        log_prob_M: under the policy before the first update.
    """
    trained_M = samples.trained_M
    age_M = samples.staleness_M[trained_M]
    if not age_M.any():
        return {}
    log_ratio_M = (log_prob_M.astype(np.float64) - samples.log_prob_M)[trained_M]
    w_M = np.exp(np.clip(log_ratio_M, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    size = float(w_M.sum() ** 2 / (len(w_M) * (w_M**2).sum()))
    by_age = {
        f"mismatch/stale/{age}": float(np.abs(log_ratio_M[age_M == age]).mean())
        for age in np.unique(age_M[age_M > 0]).tolist()
    }
    return {"mismatch/effective_sample_size": size} | by_age


def mismatch_metrics(samples: Samples, log_prob_old_M: np.ndarray) -> dict[str, float]:
    """Returns the mismatch of the training program's log-probs and the rollout's, over the trained
    tokens that the current parameters sampled."""
    fresh_M = samples.trained_M & (samples.staleness_M == 0)
    if not fresh_M.any():
        return {}
    ours_M, theirs_M = log_prob_old_M[fresh_M], samples.log_prob_M[fresh_M]
    mismatch_M = np.abs(ours_M - theirs_M)
    fresh_R = np.bincount(samples.response_M[fresh_M], minlength=len(samples.lengths_R))
    numbers = importance_correction.mismatch(ours_M, theirs_M, fresh_R)
    return {
        "rollout/log_prob_mismatch_mean": float(mismatch_M.mean()),
        "rollout/log_prob_mismatch_max": float(mismatch_M.max()),
    } | {f"mismatch/{name}": value for name, value in numbers.items()}
