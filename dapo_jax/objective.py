"""The objective: pure functions of log-probs, advantages and masks. All arithmetic is float32.

The loss of a mini-batch is sum_t w_t l_t over its response tokens. l_t comes from `surrogate` and
`kl_estimate` on the device; w_t from `loss_weights` on the host, which sees the whole mini-batch.
Deviation from the paper: eq. 8 normalises over the tokens of one prompt's group and then averages
over prompts ("token-mean-per-group"); the default, "token-mean", is over the mini-batch, as in the
reference implementation's current version.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# exp(20) = 4.9e8: a ratio beyond it is a broken log-prob; its gradient is cut as in the reference.
MAX_LOG_RATIO = 20.0


class Surrogate(NamedTuple):
    objective_BT: jax.Array  # float32, to be maximised; 0 outside the mask
    ratio_BT: jax.Array  # float32; 1 outside the mask
    clipped_high_BT: jax.Array  # bool: A > 0 and ratio > 1 + clip_high, no gradient flows
    clipped_low_BT: jax.Array  # bool: A < 0 and ratio < 1 - clip_low, no gradient flows


def surrogate(
    log_prob_BT: jax.Array,
    log_prob_old_BT: jax.Array,
    advantage_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    clip_low: float,
    clip_high: float,
    clip_dual: float | None = None,
) -> Surrogate:
    """The decoupled-clip surrogate of each token.

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
    # Mask before exp: padding may hold any log-prob, and inf * 0 is nan.
    log_ratio_BT = log_prob_BT.astype(jnp.float32) - log_prob_old_BT.astype(jnp.float32)
    log_ratio_BT = jnp.where(mask_BT, log_ratio_BT, 0.0)
    ratio_BT = jnp.exp(jnp.clip(log_ratio_BT, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    advantage_BT = jnp.where(mask_BT, advantage_BT.astype(jnp.float32), 0.0)
    clipped_BT = jnp.clip(ratio_BT, 1 - clip_low, 1 + clip_high)
    objective_BT = jnp.minimum(ratio_BT * advantage_BT, clipped_BT * advantage_BT)
    if clip_dual is not None:
        bounded_BT = jnp.maximum(objective_BT, clip_dual * advantage_BT)
        objective_BT = jnp.where(advantage_BT < 0, bounded_BT, objective_BT)
    return Surrogate(
        objective_BT,
        ratio_BT,
        (advantage_BT > 0) & (ratio_BT > 1 + clip_high),
        (advantage_BT < 0) & (ratio_BT < 1 - clip_low),
    )


def kl_estimate(
    log_prob_BT: jax.Array, log_prob_ref_BT: jax.Array, mask_BT: jax.Array, *, estimator: str
) -> jax.Array:
    """Per-token estimate of KL(policy || reference) in nats, 0 outside the mask.

        d = logp - ref;  k1 = d,  k2 = d^2 / 2,  k3 = exp(-d) - 1 + d

    Source: J. Schulman, "Approximating KL divergence" (2020); k3 is also GRPO's, arXiv:2402.03300,
    eq. 4.
    """
    d_BT = log_prob_BT.astype(jnp.float32) - log_prob_ref_BT.astype(jnp.float32)
    d_BT = jnp.clip(jnp.where(mask_BT, d_BT, 0.0), -MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k1":
        return d_BT
    if estimator == "k2":
        return 0.5 * d_BT * d_BT
    return jnp.expm1(-d_BT) + d_BT


def loss_weights(lengths: Sequence[int], groups: Sequence[int], *, aggregation: str) -> np.ndarray:
    """Weight of every token of each trained response, float64 [responses]; sum of w * length is 1.

        token-mean             1 / sum_j n_j                    DAPO, over the whole mini-batch
        token-mean-per-group   1 / (Q sum_{j in group} n_j)     DAPO eq. 8 as printed
        seq-mean-token-mean    1 / (R n_i)                      GRPO, arXiv:2402.03300, eq. 3

    Args:
        lengths: n_i, trained tokens of each response that is trained, all of the mini-batch.
        groups: which prompt each belongs to.
        aggregation: one of the three names.
    """
    n = np.asarray(lengths, np.float64)
    if aggregation == "token-mean":
        return np.full(len(n), 1 / max(1.0, n.sum()))
    if aggregation == "seq-mean-token-mean":
        return 1 / (len(n) * n)
    ids, group = np.unique(np.asarray(groups), return_inverse=True)
    return 1 / (len(ids) * np.bincount(group, weights=n)[group])
