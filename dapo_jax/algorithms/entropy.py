"""The tokens of highest entropy, whose policy loss alone counts; NumPy.

    sum_t w_t 1[H_t >= tau] J_t / W,  tau the (1 - rho) quantile of H_t over trained tokens

Source: "Beyond the 80/20 rule", arXiv:2506.01939; rho is `config.objective.top_entropy_share`. The
denominator W, KL, entropy bonus and metrics are those of all tokens.

tau is of the whole mini-batch, so that its cut into micro-batches does not matter. Deviation: H_t
is the policy's before the first update of the step, in the paper that of the current policy; in the
first update they are the same.
"""

import math

import numpy as np
from jaxtyping import Bool, Float


def select_top_entropy(
    entropy_M: Float[np.ndarray, " M"], *, top_share: float
) -> Bool[np.ndarray, " M"]:
    """Selects the 1 + floor(top_share (M - 1)) tokens of highest entropy, and any equal to the
    lowest of them [M].

    These are the tokens at or above the linearly interpolated quantile, as no entropy lies between
    the two that it interpolates.

    Args:
        entropy_M: of the trained tokens, in nats; at least one.
        top_share: rho, above 0 and at most 1.
    """
    M = len(entropy_M)
    # Rounded: 0.29 * 100 is a little below 29 in floating point.
    selected = 1 + math.floor(round(top_share * (M - 1), 6))
    return entropy_M >= np.partition(entropy_M, M - selected)[M - selected]
