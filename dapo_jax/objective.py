"""The objective: pure functions of log-probs, advantages and masks. All arithmetic is float32
(float64 where the inputs are, as in the comparison with the reference's own numbers).

The loss of a mini-batch is sum_t w_t l_t over its response tokens. l_t comes from `surrogate`, or
another of `policy_losses`, and `kl_estimate` on the device; w_t from `loss_weights` on the host,
which sees the whole mini-batch.
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
MAX_K3 = 10.0


class Surrogate(NamedTuple):
    objective_BT: jax.Array  # to be maximised; 0 outside the mask
    ratio_BT: jax.Array  # 1 outside the mask
    clipped_high_BT: jax.Array  # bool: A > 0 and ratio > 1 + clip_high, no gradient flows
    clipped_low_BT: jax.Array  # bool: A < 0 and ratio < 1 - clip_low, no gradient flows


def at_least_float32(x: jax.Array) -> jax.Array:
    """x in float32, or in float64 where it is."""
    return x if x.dtype == jnp.float64 else x.astype(jnp.float32)


def masked_log_ratio(
    log_prob_BT: jax.Array, log_prob_old_BT: jax.Array, mask_BT: jax.Array
) -> jax.Array:
    """log pi_t - log old_t, 0 outside the mask."""
    # Mask before exp: padding may hold any log-prob, and inf * 0 is nan.
    masked = lambda x_BT: jnp.where(mask_BT, at_least_float32(x_BT), 0.0)
    return masked(log_prob_BT) - masked(log_prob_old_BT)


def clamp(x: jax.Array, low: float, high: float) -> jax.Array:
    """x within [low, high]. At the very bounds the gradient passes, as torch.clamp's does; jnp.clip
    would pass half of it."""
    return jnp.where(x < low, low, jnp.where(x > high, high, x)).astype(x.dtype)


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
    log_ratio_BT = masked_log_ratio(log_prob_BT, log_prob_old_BT, mask_BT)
    ratio_BT = jnp.exp(clamp(log_ratio_BT, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    advantage_BT = jnp.where(mask_BT, at_least_float32(advantage_BT), 0.0)
    clipped_BT = clamp(ratio_BT, 1 - clip_low, 1 + clip_high)
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

        d = logp - ref;  k1 = d,  abs = |d|,  k2 = d^2 / 2,  k3 = exp(-d) - 1 + d

    A `+` after the name keeps the value and takes the gradient of k2, which is the one whose
    expectation is the gradient of the KL. k3 is bounded as in the reference: |d| by 20, the value
    by 10, no gradient beyond.

    Source: J. Schulman, "Approximating KL divergence" (2020); k3 is also GRPO's, arXiv:2402.03300,
    eq. 4.
    """
    d_BT = masked_log_ratio(log_prob_BT, log_prob_ref_BT, mask_BT)
    name = estimator.removesuffix("+")
    k2_BT = 0.5 * d_BT * d_BT
    if name == "k1":
        value_BT = d_BT
    elif name == "abs":
        value_BT = d_BT * jax.lax.stop_gradient(jnp.sign(d_BT))  # slope 0 at 0
    elif name == "k2":
        value_BT = k2_BT
    else:
        bounded_BT = clamp(d_BT, -MAX_LOG_RATIO, MAX_LOG_RATIO)
        value_BT = clamp(jnp.expm1(-bounded_BT) + bounded_BT, -MAX_K3, MAX_K3)
    if estimator.endswith("+"):
        value_BT = jax.lax.stop_gradient(value_BT - k2_BT) + k2_BT
    return value_BT


def loss_weights(
    lengths: Sequence[int],
    groups: Sequence[int],
    *,
    aggregation: str,
    max_response_tokens: int,
) -> np.ndarray:
    """Weight of every token of each trained response, float64 [responses].

        token-mean               1 / sum_j n_j                  DAPO, over the whole mini-batch
        token-mean-per-group     1 / (Q sum_{j in group} n_j)   DAPO eq. 8 as printed
        token-sum                1
        seq-mean-token-mean      1 / (R n_i)                    GRPO, arXiv:2402.03300, eq. 3
        seq-mean-token-sum       1 / R                          Dr. GRPO, arXiv:2503.20783, eq. 2
        seq-mean-token-sum-norm  1 / (R L)                      the same as its authors run it

    Q prompts, R responses of n_i tokens, L `max_response_tokens`. Responses without a trained token
    are left out before and count nowhere.

    Args:
        lengths: n_i, trained tokens of each response that is trained, all of the mini-batch.
        groups: which prompt each belongs to.
        aggregation: one of the names.
        max_response_tokens: the constant divisor of the last.
    """
    n = np.asarray(lengths, np.float64)
    if aggregation == "token-sum":
        return np.ones(len(n))
    if aggregation == "seq-mean-token-sum":
        return np.full(len(n), 1 / max(1, len(n)))
    if aggregation == "seq-mean-token-sum-norm":
        return np.full(len(n), 1 / (max(1, len(n)) * max_response_tokens))
    if aggregation == "token-mean":
        return np.full(len(n), 1 / max(1.0, n.sum()))
    if aggregation == "seq-mean-token-mean":
        return 1 / (len(n) * n)
    ids, group = np.unique(np.asarray(groups), return_inverse=True)
    return 1 / (len(ids) * np.bincount(group, weights=n)[group])
