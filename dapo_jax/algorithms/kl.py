"""Estimates of the KL to the reference: in the loss and in the reward."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from dapo_jax.algorithms.surrogate import MAX_LOG_RATIO, clamp, masked_log_ratio

MAX_K3 = 10.0


def kl_estimate(
    log_prob_BT: Float[Array, "B T"],
    log_prob_ref_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    *,
    estimator: str,
) -> Float[Array, "B T"]:
    """Estimates KL(policy || reference) of each token in nats, 0 outside the mask.

        d = logp - ref;  k1 = d,  abs = |d|,  k2 = d^2 / 2,  k3 = exp(-d) - 1 + d

    A `+` after the name keeps the value and takes the gradient of k2, whose expectation is the
    gradient of the KL. k3 is bounded as in verl: |d| by 20, the value by 10, no gradient beyond.

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
        # In this order the value is exact: k2 minus itself is 0.
        value_BT = jax.lax.stop_gradient(value_BT) + (k2_BT - jax.lax.stop_gradient(k2_BT))
    return value_BT


def reward_kl(
    log_prob_M: Float[np.ndarray, " M"], log_prob_ref_M: Float[np.ndarray, " M"], *, estimator: str
) -> Float[np.ndarray, " M"]:
    """Returns estimates of KL(policy || reference) for the reward, nats per token, float64 [M].

    The values of `kl_estimate`, in NumPy: M differs from step to step, and XLA would
    compile a program for each M.

    Args:
        log_prob_M: under the policy that sampled, float32.
        log_prob_ref_M: under the reference.
        estimator: k1, abs, k2 or k3.
    """
    d_M = (log_prob_M - log_prob_ref_M).astype(np.float64)
    bounded_M = np.clip(d_M, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return {
        "k1": d_M,
        "abs": np.abs(d_M),
        "k2": 0.5 * d_M**2,
        "k3": np.clip(np.expm1(-bounded_M) + bounded_M, -MAX_K3, MAX_K3),
    }[estimator]


def adapted_kl_coefficient(
    coefficient: float, kl: float, *, target: float, horizon: int, num_responses: int
) -> float:
    """Returns the coefficient of the KL in the reward after a step whose KL was `kl`.

        coefficient (1 + clip(kl / target - 1, -0.2, 0.2) num_responses / horizon)

    Source: Ziegler et al., arXiv:1909.08593, section 2.2. `kl` is in nats per token, as in verl; in
    the paper it is of a whole response.
    """
    error = float(np.clip(kl / target - 1.0, -0.2, 0.2))
    return coefficient * (1.0 + error * num_responses / horizon)
