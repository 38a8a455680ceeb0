"""The surrogate of DAPO: pure functions of log-probs, advantages and masks.

The loss of a mini-batch is sum_t w_t l_t / W over its response tokens. l_t comes from `surrogate`
or another policy loss, `kl.kl_estimate` and the entropy; w_t and W from `aggregation`. Arithmetic
is float32, or float64 where the inputs are.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dapo_jax.utils.precision import at_least_float32

# exp(20) = 4.9e8: a ratio beyond it is a broken log-prob; its gradient is cut, as in verl.
MAX_LOG_RATIO = 20.0


class Surrogate(NamedTuple):
    objective_BT: jax.Array  # to be maximised; 0 outside the mask
    ratio_BT: jax.Array  # 1 outside the mask
    clipped_high_BT: jax.Array  # bool: A > 0 and ratio > 1 + clip_high, no gradient flows
    clipped_low_BT: jax.Array  # bool: A < 0 and ratio < 1 - clip_low, no gradient flows
    # bool: A < 0 and ratio > clip_dual, no gradient flows; None: the loss has no dual clip
    clipped_dual_BT: jax.Array | None = None


def masked(x: Float[Array, "*shape"], mask: Bool[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns x where the mask holds and 0 elsewhere, in float32 at least."""
    return jnp.where(mask, at_least_float32(x), 0.0)


def masked_log_ratio(
    log_prob_BT: Float[Array, "B T"],
    log_prob_old_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
) -> Float[Array, "B T"]:
    """Returns log pi_t - log old_t, 0 outside the mask."""
    # Mask before exp: padding may hold any log-prob, and inf * 0 is nan.
    return masked(log_prob_BT, mask_BT) - masked(log_prob_old_BT, mask_BT)


def clamp(x: Float[Array, "*shape"], low: float, high: float) -> Float[Array, "*shape"]:
    """Bounds x. At the bounds the gradient passes, as torch.clamp's; jnp.clip passes half of it."""
    return jnp.where(x < low, low, jnp.where(x > high, high, x)).astype(x.dtype)


def surrogate(
    log_prob_BT: Float[Array, "B T"],
    log_prob_old_BT: Float[Array, "B T"],
    advantage_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    *,
    clip_low: float,
    clip_high: float,
    clip_dual: float | None = None,
) -> Surrogate:
    """Returns the decoupled-clip surrogate of each token.

        J_t = min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t),  r_t = exp(logp_t - old_t)

    and with `clip_dual` = c, J_t = max(J_t, c A_t) where A_t < 0.

    Source: DAPO, arXiv:2503.14476, eq. 8; dual clip: arXiv:1912.09729, eq. 5.

    Args:
        log_prob_BT: under the policy that is trained.
        log_prob_old_BT: under the policy that anchors the ratio; no gradient.
        advantage_BT: A_t; no gradient.
        mask_BT: True on trained tokens.
        clip_low: in (0, 1).
        clip_high: above 0.
        clip_dual: above 1, or None.
    """
    log_ratio_BT = masked_log_ratio(log_prob_BT, log_prob_old_BT, mask_BT)
    ratio_BT = jnp.exp(clamp(log_ratio_BT, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    advantage_BT = masked(advantage_BT, mask_BT)
    clipped_BT = clamp(ratio_BT, 1 - clip_low, 1 + clip_high)
    objective_BT = jnp.minimum(ratio_BT * advantage_BT, clipped_BT * advantage_BT)
    dual_BT = None
    if clip_dual is not None:
        dual_BT = (advantage_BT < 0) & (objective_BT < clip_dual * advantage_BT)
        bounded_BT = jnp.maximum(objective_BT, clip_dual * advantage_BT)
        objective_BT = jnp.where(advantage_BT < 0, bounded_BT, objective_BT)
    return Surrogate(
        objective_BT,
        ratio_BT,
        (advantage_BT > 0) & (ratio_BT > 1 + clip_high),
        (advantage_BT < 0) & (ratio_BT < 1 - clip_low),
        dual_BT,
    )
