"""Soft overlong punishment, the length reward of DAPO."""

import numpy as np
from jaxtyping import Float, Int


def soft_overlong_punishment(
    lengths_G: Int[np.ndarray, " G"],
    *,
    max_response_tokens: int,
    buffer_tokens: int,
    penalty: float,
) -> Float[np.ndarray, " G"]:
    """Returns the length reward of each response, float64 [G], from 0 down to -penalty.

        R(y) = 0                                  where |y| <= L_max - L_cache
               ((L_max - L_cache) - |y|) / L_cache   in between
               -1                                 where L_max < |y|

    Source: DAPO, arXiv:2503.14476, eq. 13, scaled by `penalty`.

    Args:
        lengths_G: response lengths in tokens, end-of-sequence token included.
        max_response_tokens: L_max.
        buffer_tokens: L_cache; 0: no punishment.
        penalty: factor on the reward, 1 in the paper.
    """
    if buffer_tokens == 0:
        return np.zeros(len(lengths_G))
    over_G = lengths_G - (max_response_tokens - buffer_tokens)
    return -penalty * np.clip(over_G / buffer_tokens, 0.0, 1.0)
