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
    log_prob_N: Float[np.ndarray, " N"], advantage_N: Float[np.ndarray, " N"]
) -> Float[np.ndarray, " N"]:
    """cov_t of each trained token [N]."""
    log_prob_N = np.asarray(log_prob_N, np.float64)
    advantage_N = np.asarray(advantage_N, np.float64)
    return (log_prob_N - log_prob_N.mean()) * (advantage_N - advantage_N.mean())


def select_clip_cov(
    log_prob_N: Float[np.ndarray, " N"],
    log_prob_old_N: Float[np.ndarray, " N"],
    advantage_N: Float[np.ndarray, " N"],
    priority_N: Float[np.ndarray, " N"],
    *,
    cov_share: float,
    cov_low: float,
    cov_high: float,
    clip_low: float,
    clip_high: float,
) -> Bool[np.ndarray, " N"]:
    """bool [N]: at most max(1, floor(cov_share N)) of the tokens with cov_low < cov_t < cov_high,
    those that the clip has stopped already left out. The bounds are strict, as the reference's.

    Args:
        priority_N: the tokens of lowest priority value are taken; random numbers for the paper's
            uniform choice.
    """
    ratio_N = np.exp(np.asarray(log_prob_N, np.float64) - np.asarray(log_prob_old_N, np.float64))
    up_N = (advantage_N > 0) & (ratio_N > 1 + clip_high)
    down_N = (advantage_N < 0) & (ratio_N < 1 - clip_low)
    cov_N = covariance(log_prob_N, advantage_N)
    candidates = np.flatnonzero((cov_N > cov_low) & (cov_N < cov_high) & ~(up_N | down_N))
    chosen = candidates[np.argsort(priority_N[candidates], kind="stable")]
    selected_N = np.zeros(len(cov_N), bool)
    selected_N[chosen[: max(1, int(cov_share * len(cov_N)))]] = True
    return selected_N


def select_kl_cov(
    log_prob_N: Float[np.ndarray, " N"], advantage_N: Float[np.ndarray, " N"], *, cov_share: float
) -> Bool[np.ndarray, " N"]:
    """bool [N]: the max(1, floor(cov_share N)) tokens of largest cov_t, the earlier of equals."""
    cov_N = covariance(log_prob_N, advantage_N)
    selected_N = np.zeros(len(cov_N), bool)
    selected_N[np.argsort(-cov_N, kind="stable")[: max(1, int(cov_share * len(cov_N)))]] = True
    return selected_N
