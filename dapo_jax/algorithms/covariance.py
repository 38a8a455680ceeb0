"""Which tokens Clip-Cov and KL-Cov act on: those whose log-prob and advantage vary together most.

    cov_t = (log pi_t - mean(log pi)) (A_t - mean(A)),  means over the trained tokens

Such tokens make the entropy fall. The means and the choice are over the whole mini-batch, with the
log-probs of the parameters that the gradient is taken at; the reference takes each micro-batch by
itself, so that its choice depends on how the mini-batch was cut.

Source: "The entropy mechanism of reinforcement learning for reasoning language models",
arXiv:2505.22617, section 4. NumPy, float64.
"""

import numpy as np
from jaxtyping import Bool, Float


def covariance(
    log_prob_M: Float[np.ndarray, " M"], advantage_M: Float[np.ndarray, " M"]
) -> Float[np.ndarray, " M"]:
    """cov_t of each trained token [M]."""
    log_prob_M = np.asarray(log_prob_M, np.float64)
    advantage_M = np.asarray(advantage_M, np.float64)
    return (log_prob_M - log_prob_M.mean()) * (advantage_M - advantage_M.mean())


def select_clip_cov(
    log_prob_M: Float[np.ndarray, " M"],
    log_prob_old_M: Float[np.ndarray, " M"],
    advantage_M: Float[np.ndarray, " M"],
    priority_M: Float[np.ndarray, " M"],
    *,
    cov_share: float,
    cov_low: float,
    cov_high: float,
    clip_low: float,
    clip_high: float,
) -> Bool[np.ndarray, " M"]:
    """bool [M]: at most max(1, floor(cov_share M)) of the tokens with cov_low < cov_t < cov_high,
    those that the clip has stopped already left out. The bounds are strict, as the reference's.

    Args:
        priority_M: the tokens of lowest priority value are taken; random numbers for the paper's
            uniform choice.
    """
    ratio_M = np.exp(np.asarray(log_prob_M, np.float64) - np.asarray(log_prob_old_M, np.float64))
    up_M = (advantage_M > 0) & (ratio_M > 1 + clip_high)
    down_M = (advantage_M < 0) & (ratio_M < 1 - clip_low)
    cov_M = covariance(log_prob_M, advantage_M)
    candidates = np.flatnonzero((cov_M > cov_low) & (cov_M < cov_high) & ~(up_M | down_M))
    chosen = candidates[np.argsort(priority_M[candidates], kind="stable")]
    selected_M = np.zeros(len(cov_M), bool)
    selected_M[chosen[: max(1, int(cov_share * len(cov_M)))]] = True
    return selected_M


def select_kl_cov(
    log_prob_M: Float[np.ndarray, " M"], advantage_M: Float[np.ndarray, " M"], *, cov_share: float
) -> Bool[np.ndarray, " M"]:
    """bool [M]: the max(1, floor(cov_share M)) tokens of largest cov_t, the earlier of equals."""
    cov_M = covariance(log_prob_M, advantage_M)
    selected_M = np.zeros(len(cov_M), bool)
    selected_M[np.argsort(-cov_M, kind="stable")[: max(1, int(cov_share * len(cov_M)))]] = True
    return selected_M
