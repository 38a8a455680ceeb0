"""Entropy in the objective, on the host: the tokens that count and the coefficient of the bonus.

The top-entropy mask multiplies the policy loss:

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


def applied_entropy_coefficient(coefficient: float, entropy: float, *, target: float) -> float:
    """Returns the coefficient of the entropy bonus in the updates of step k.

        alpha_k = c_k 1[e_k <= target]

    Source: Skywork-OR1, arXiv:2505.22312, adaptive entropy control.

    Args:
        coefficient: c_k.
        entropy: e_k, mean over the trained tokens of the batch before its first update, in nats.
        target: in nats per token.
    """
    return coefficient if entropy <= target else 0.0


def adapted_entropy_coefficient(
    coefficient: float, entropy: float, *, target: float, step: float
) -> float:
    """Returns the coefficient for the step after one whose entropy was `entropy`.

        c_{k+1} = c_k + step where e_k < target, else c_k - step, but at least 0

    Source: as `applied_entropy_coefficient`; the bound at 0 is of its authors' program, which has
    an upper one too.

    Args:
        step: change of the coefficient in a rollout step.
    """
    return max(0.0, coefficient + (step if entropy < target else -step))
