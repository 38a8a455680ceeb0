"""Advantages of a group of responses to one prompt."""

import numpy as np

EPSILON = 1e-6  # keeps the division finite when all rewards are equal, as in the reference


def group_advantages(rewards_G: np.ndarray, *, normalise_std: bool, ddof: int) -> np.ndarray:
    """A_i = (R_i - mean(R)) / (std(R) + 1e-6), float32 [G].

    Source: DAPO, arXiv:2503.14476, eq. 9. The paper does not say which standard deviation: `ddof` 1
    is the reference implementation's (torch.std). A group of one has advantage 0; the reference
    gives it its raw reward.

    Args:
        rewards_G: shaped rewards.
        normalise_std: False leaves out the division (Dr. GRPO, arXiv:2503.20783).
        ddof: 0 or 1.
    """
    rewards_G = np.asarray(rewards_G, np.float64)
    if len(rewards_G) < 2 or not np.ptp(rewards_G):
        return np.zeros(len(rewards_G), np.float32)
    centred_G = rewards_G - rewards_G.mean()
    if normalise_std:
        centred_G = centred_G / (rewards_G.std(ddof=ddof) + EPSILON)
    return centred_G.astype(np.float32)
