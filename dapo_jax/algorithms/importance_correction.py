"""Importance correction of rollouts by another program or older parameters: NumPy, float64.

mu is the policy that sampled a token, pi the one it is compared with, log rho_t = log pi_t -
log mu_t. Importance weights multiply the policy term; a rejected token leaves the loss and every
denominator. Functions take the M trained tokens of R responses one after the other.

Sources: truncated importance sampling, F. Yao et al., "Your efficient RL framework secretly brings
you off-policy RL training" (2025); IcePop, arXiv:2510.18855; rejection by divergence, "When speed
kills stability" (2025), as in verl; sequence masking, DeepSeek-V3.2, arXiv:2512.02556.
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from dapo_jax.algorithms.surrogate import MAX_LOG_RATIO

NORMALISED = "normalised-"  # before the level of importance weights


class Correction(NamedTuple):
    weight_M: np.ndarray  # float64, importance weight of the policy term
    kept_M: np.ndarray  # bool, False: rejected


def importance_weights(
    log_ratio_M: Float[np.ndarray, " M"],
    lengths_R: Int[np.ndarray, " R"],
    *,
    level: str,
    cap: float,
    floor: float | None = None,
) -> Correction:
    """Returns truncated importance weights, or with a floor masked ones.

        w_t = min(rho_t, cap)                     truncated (TIS)
        w_t = rho_t where floor <= rho_t <= cap   masked (IcePop); other tokens are rejected

    Deviation: in the papers a masked token stays in the denominator.

    Args:
        log_ratio_M: log rho_t.
        level: "token", or "sequence": rho is the product over the response.
        cap: above 0.
        floor: in (0, cap], or None.
    """
    log_rho_M = log_ratio_M
    if level == "sequence":
        log_rho_M = np.repeat(_sums(log_ratio_M, lengths_R), lengths_R)
    rho_M = np.exp(np.clip(log_rho_M, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    if floor is None:
        return Correction(np.minimum(rho_M, cap), np.ones(len(rho_M), bool))
    kept_M = (rho_M >= floor) & (rho_M <= cap)
    return Correction(np.where(kept_M, rho_M, 0.0), kept_M)


def normalised(
    weight_M: Float[np.ndarray, " M"], lengths_R: Int[np.ndarray, " R"], *, level: str
) -> Float[np.ndarray, " M"]:
    """Divides the weights by their mean over tokens, or at level "sequence" over responses."""
    n_R = lengths_R[lengths_R > 0]
    if not len(weight_M):
        return weight_M
    if level == "sequence":
        mean = (_sums(weight_M, lengths_R)[lengths_R > 0] / n_R).mean()
    else:
        mean = weight_M.mean()
    return weight_M / mean if mean > 1e-8 else weight_M


def kept_by_divergence(
    log_ratio_M: Float[np.ndarray, " M"],
    lengths_R: Int[np.ndarray, " R"],
    *,
    statistic: str,
    cap: float,
    floor: float | None = None,
) -> Bool[np.ndarray, " M"]:
    """Keeps tokens whose statistic is within its bounds [M].

        k1 = -log rho, k2 = (log rho)^2 / 2, k3 = rho - 1 - log rho, of the token itself, or summed,
        averaged or maximised over its response

    k1 is kept within [log floor, log cap], bounds of mu/pi as a ratio. k2 and k3 are kept up to
    `cap`, and `floor` is None.

    Args:
        log_ratio_M: log rho_t; bounded by 20 first.
        statistic: one of `config.Statistic`.
    """
    log_rho_M = np.clip(log_ratio_M, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    reduction, _, divergence = statistic.rpartition("-")
    x_M = {
        "k1": -log_rho_M,
        "k2": 0.5 * log_rho_M**2,
        "k3": np.exp(log_rho_M) - 1.0 - log_rho_M,
    }[divergence]
    if reduction != "token":
        if reduction == "seq-max":
            x_R = np.array([x.max(initial=0.0) for x in _split(x_M, lengths_R)])
        else:
            x_R = _sums(x_M, lengths_R)
            if reduction == "seq-mean":
                x_R = x_R / np.maximum(lengths_R, 1)
        x_M = np.repeat(x_R, lengths_R)
    if divergence == "k1":
        assert floor is not None
        return (x_M >= np.log(floor)) & (x_M <= np.log(cap))
    return x_M <= cap


def kept_by_sequence_masking(
    log_ratio_M: Float[np.ndarray, " M"],
    advantage_M: Float[np.ndarray, " M"],
    lengths_R: Int[np.ndarray, " R"],
    *,
    delta: float,
) -> Bool[np.ndarray, " M"]:
    """Rejects responses of negative advantage that the policy has moved away from [M].

        rejected if A < 0 and 1/|y| sum_t log(mu_t / pi_t) > delta

    Source: DeepSeek-V3.2, arXiv:2512.02556. A is the mean advantage of the response.
    """
    n_R = np.maximum(lengths_R, 1)
    away_R = _sums(-log_ratio_M, lengths_R) / n_R > delta
    negative_R = _sums(advantage_M, lengths_R) < 0
    return ~np.repeat(away_R & negative_R, lengths_R)


def correct(
    settings: Any,
    log_prob_M: Float[np.ndarray, " M"],
    log_prob_rollout_M: Float[np.ndarray, " M"],
    advantage_M: Float[np.ndarray, " M"],
    lengths_R: Int[np.ndarray, " R"],
    *,
    numerator_M: Float[np.ndarray, " M"] | None = None,
) -> Correction:
    """Applies all corrections of `config.correction` to the trained tokens of a mini-batch.

    Args:
        settings: a `CorrectionConfig`.
        log_prob_M: under pi.
        log_prob_rollout_M: under mu.
        advantage_M: for off-policy sequence masking.
        numerator_M: log-probs in the numerator of the importance weights; None: `log_prob_M`.
    """
    # float64 before the difference: sums over long responses are compared.
    mu_M = np.asarray(log_prob_rollout_M, np.float64)
    log_ratio_M = np.asarray(log_prob_M, np.float64) - mu_M
    weight_M, kept_M = np.ones(len(log_ratio_M)), np.ones(len(log_ratio_M), bool)
    if settings.importance is not None:
        level, floor, cap = settings.importance
        normalises, level = level.startswith(NORMALISED), level.removeprefix(NORMALISED)
        weight_M, kept_M = importance_weights(
            log_ratio_M if numerator_M is None else np.asarray(numerator_M, np.float64) - mu_M,
            lengths_R,
            level=level,
            cap=cap,
            floor=floor,
        )
        if normalises:
            weight_M = normalised(weight_M, lengths_R, level=level)
    for statistic, floor, cap in settings.reject:
        if statistic == "sequence-mask":
            kept_M &= kept_by_sequence_masking(log_ratio_M, advantage_M, lengths_R, delta=cap)
        else:
            kept_M &= kept_by_divergence(
                log_ratio_M, lengths_R, statistic=statistic, floor=floor, cap=cap
            )
    return Correction(weight_M, kept_M)


def mismatch(
    log_prob_M: Float[np.ndarray, " M"],
    log_prob_rollout_M: Float[np.ndarray, " M"],
    lengths_R: Int[np.ndarray, " R"],
) -> dict[str, float]:
    """Measures the log-prob mismatch between pi and the mu that sampled, over trained tokens.

    kl: mean of log mu - log pi in nats per token; k3_kl: by k3; training_ppl, rollout_ppl: mean
    perplexity of a response; chi2_token, chi2_seq: mean rho^2 - 1; prob_gap_mean, _max: |pi - mu|
    of probabilities. Exponents are bounded by 20.
    """
    pi_M = np.asarray(log_prob_M, np.float64)
    mu_M = np.asarray(log_prob_rollout_M, np.float64)
    there_R = lengths_R > 0
    if not there_R.any():
        return {}
    n_R = lengths_R[there_R]
    log_rho_M = pi_M - mu_M
    mean_R = lambda x_M: _sums(x_M, lengths_R)[there_R] / n_R
    bounded = lambda x: np.clip(x, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    gap_M = np.abs(np.exp(pi_M) - np.exp(mu_M))
    return {
        "kl": float(-log_rho_M.mean()),
        "k3_kl": float((np.exp(bounded(log_rho_M)) - log_rho_M - 1.0).mean()),
        "training_ppl": float(np.exp(bounded(-mean_R(pi_M))).mean()),
        "rollout_ppl": float(np.exp(bounded(-mean_R(mu_M))).mean()),
        "chi2_token": float(np.exp(2.0 * bounded(log_rho_M)).mean() - 1.0),
        "chi2_seq": float(np.exp(2.0 * bounded(_sums(log_rho_M, lengths_R)[there_R])).mean() - 1.0),
        "prob_gap_mean": float(gap_M.mean()),
        "prob_gap_max": float(gap_M.max()),
    }


def _sums(x_M: np.ndarray, lengths_R: np.ndarray) -> np.ndarray:
    responses_M = np.repeat(np.arange(len(lengths_R)), lengths_R)
    return np.bincount(responses_M, weights=x_M, minlength=len(lengths_R))


def _split(x_M: np.ndarray, lengths_R: np.ndarray) -> list[np.ndarray]:
    return np.split(x_M, np.cumsum(lengths_R)[:-1]) if len(lengths_R) else []
