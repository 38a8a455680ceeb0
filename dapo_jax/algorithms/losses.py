"""Policy losses: the objective of each token, to be maximised. `LOSSES` names them for the config.

All take the same arrays and return the same record: `log_prob_BT` under the policy that is trained,
`log_prob_old_BT` under the policy that anchors the ratio (no gradient), `advantage_BT` (no
gradient), `mask_BT` True on trained tokens, `segments_BT` the response of each token, 0 on padding.
COVARIANCE_LOSSES also take `selected_BT`, the tokens that `covariance` selects. Objectives are
float32, or float64 where the inputs are.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dapo_jax.algorithms.surrogate import (
    MAX_LOG_RATIO,
    Surrogate,
    clamp,
    masked,
    masked_log_ratio,
    surrogate,
)
from dapo_jax.utils.fields import Argument, Positive, UpTo1

MAX_LOG_SEQUENCE_RATIO = 10.0  # as verl's GSPO


def ppo_clip(
    log_prob_BT: Float[Array, "B T"],
    log_prob_old_BT: Float[Array, "B T"],
    advantage_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    segments_BT: Int[Array, "B T"],
    *,
    clip_low: float,
    clip_high: float,
    clip_dual: float | None = None,
) -> Surrogate:
    """Returns `surrogate`: PPO with equal bounds, DAPO with decoupled ones, each with dual clip."""
    arrays = log_prob_BT, log_prob_old_BT, advantage_BT, mask_BT
    return surrogate(*arrays, clip_low=clip_low, clip_high=clip_high, clip_dual=clip_dual)


def gspo(
    log_prob_BT: Float[Array, "B T"],
    log_prob_old_BT: Float[Array, "B T"],
    advantage_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    segments_BT: Int[Array, "B T"],
    *,
    clip_low: float,
    clip_high: float,
    token_level: bool,
) -> Surrogate:
    """Group sequence policy optimization: the ratio is that of the whole response.

        s_i = exp(1/|y_i| sum_t log r_t)
        J_t = min(s_i A, clip(s_i, 1 - clip_low, 1 + clip_high) A)

    with A the mean advantage of the response, or with `token_level` the token's own and
    s_it = sg(s_i) pi_t / sg(pi_t), whose value is s_i and whose gradient is the token's.

    Source: GSPO, arXiv:2507.18071, eq. 5 and 7; token form eq. 13 and 14, which verl implements;
    aggregation seq-mean-token-mean.
    """
    log_ratio_BT = masked_log_ratio(log_prob_BT, log_prob_old_BT, mask_BT)
    log_s_BT = response_mean(log_ratio_BT, mask_BT, segments_BT)
    advantage_BT = masked(advantage_BT, mask_BT)
    if token_level:
        own_BT = masked(log_prob_BT, mask_BT)
        sg = jax.lax.stop_gradient
        log_s_BT = sg(log_s_BT) + own_BT - sg(own_BT)
    else:
        advantage_BT = response_mean(advantage_BT, mask_BT, segments_BT)
    ratio_BT = jnp.exp(jnp.minimum(log_s_BT, MAX_LOG_SEQUENCE_RATIO))
    clipped_BT = clamp(ratio_BT, 1 - clip_low, 1 + clip_high)
    return Surrogate(
        masked(jnp.minimum(ratio_BT * advantage_BT, clipped_BT * advantage_BT), mask_BT),
        jnp.where(mask_BT, ratio_BT, 1.0),
        mask_BT & (advantage_BT > 0) & (ratio_BT > 1 + clip_high),
        mask_BT & (advantage_BT < 0) & (ratio_BT < 1 - clip_low),
    )


def gmpo(
    log_prob_BT: Float[Array, "B T"],
    log_prob_old_BT: Float[Array, "B T"],
    advantage_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    segments_BT: Int[Array, "B T"],
    *,
    clip_low: float,
    clip_high: float,
) -> Surrogate:
    """Geometric-mean policy optimization: the geometric mean of clipped token ratios.

        J_t = A exp(1/|y_i| sum_t l_t)
        l_t A_t = min(A_t log r_t, A_t clip(log r_t, -clip_low, clip_high))

    with A the mean advantage of the response. The bounds are on the log-ratio.

    Source: GMPO, arXiv:2507.20673; aggregation seq-mean-token-mean. Deviation: log-ratios are
    bounded by 20 first.
    """
    log_ratio_BT = _bounded(masked_log_ratio(log_prob_BT, log_prob_old_BT, mask_BT))
    advantage_BT = masked(advantage_BT, mask_BT)
    sign_BT = jnp.sign(advantage_BT)
    clipped_BT = clamp(log_ratio_BT, -clip_low, clip_high)
    kept_BT = sign_BT * jnp.minimum(sign_BT * log_ratio_BT, sign_BT * clipped_BT)
    ratio_BT = jnp.exp(response_mean(kept_BT, mask_BT, segments_BT))
    mean_advantage_BT = response_mean(advantage_BT, mask_BT, segments_BT)
    return Surrogate(
        masked(mean_advantage_BT * ratio_BT, mask_BT),
        jnp.where(mask_BT, jnp.exp(log_ratio_BT), 1.0),
        mask_BT & (advantage_BT > 0) & (log_ratio_BT > clip_high),
        mask_BT & (advantage_BT < 0) & (log_ratio_BT < -clip_low),
    )


def cispo(
    log_prob_BT: Float[Array, "B T"],
    log_prob_old_BT: Float[Array, "B T"],
    advantage_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    segments_BT: Int[Array, "B T"],
    *,
    clip_low: float,
    clip_high: float,
) -> Surrogate:
    """Clipped importance weights on REINFORCE: every token keeps its gradient.

        J_t = sg(clip(r_t, 1 - clip_low, 1 + clip_high)) A_t log pi_t

    Source: CISPO (MiniMax-M1), arXiv:2506.13585, eq. 4; the paper leaves the lower bound open
    (clip_low = 1).
    """
    ratio_BT = jnp.exp(_bounded(masked_log_ratio(log_prob_BT, log_prob_old_BT, mask_BT)))
    weight_BT = jax.lax.stop_gradient(clamp(ratio_BT, 1 - clip_low, 1 + clip_high))
    return Surrogate(
        weight_BT * _advantage_log_prob(advantage_BT, log_prob_BT, mask_BT),
        ratio_BT,
        mask_BT & (ratio_BT > 1 + clip_high),
        mask_BT & (ratio_BT < 1 - clip_low),
    )


def sapo(
    log_prob_BT: Float[Array, "B T"],
    log_prob_old_BT: Float[Array, "B T"],
    advantage_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    segments_BT: Int[Array, "B T"],
    *,
    tau_positive: float,
    tau_negative: float,
) -> Surrogate:
    """Soft adaptive policy optimization: a smooth gate instead of a bound.

        J_t = 4/tau sigmoid(tau (r_t - 1)) A_t
        tau = tau_positive where A_t > 0, else tau_negative

    Source: SAPO, arXiv:2511.20347; aggregation seq-mean-token-mean. Nothing is clipped.
    """
    ratio_BT = jnp.exp(_bounded(masked_log_ratio(log_prob_BT, log_prob_old_BT, mask_BT)))
    advantage_BT = masked(advantage_BT, mask_BT)
    tau_BT = jnp.where(advantage_BT > 0, tau_positive, tau_negative).astype(ratio_BT.dtype)
    gate_BT = 4.0 / tau_BT * jax.nn.sigmoid(tau_BT * (ratio_BT - 1.0))
    never_BT = jnp.zeros_like(mask_BT)
    return Surrogate(gate_BT * advantage_BT, ratio_BT, never_BT, never_BT)


def dppo(
    log_prob_BT: Float[Array, "B T"],
    log_prob_old_BT: Float[Array, "B T"],
    advantage_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    segments_BT: Int[Array, "B T"],
    *,
    clip_low: float,
    clip_high: float,
    ratio_cap: float,
    divergence: str,
) -> Surrogate:
    """Divergence PPO: a token is left out when its probability has moved too far the wrong way.

        J_t = m_t sg(min(r_t, ratio_cap)) A_t log pi_t

    m_t = 0 where A_t > 0, pi_t > old_t and D_t > clip_high, and where A_t <= 0, pi_t < old_t and
    D_t > clip_low; D_t is |pi_t - old_t| ("tv") or the KL of the two-valued distribution "this
    token or any other" ("kl").

    Source: DPPO, arXiv:2602.04879. `clip_low` and `clip_high` bound a divergence here.
    """
    old_BT = masked(log_prob_old_BT, mask_BT)
    new_BT = masked(log_prob_BT, mask_BT)
    ratio_BT = jnp.exp(_bounded(new_BT - old_BT))
    p_BT, q_BT = jnp.exp(new_BT), jnp.exp(old_BT)
    if divergence == "tv":
        distance_BT = jnp.abs(p_BT - q_BT)
    else:
        tiny = 1e-8
        distance_BT = q_BT * (old_BT - new_BT)
        distance_BT += (1 - q_BT) * jnp.log((1 - q_BT + tiny) / (1 - p_BT + tiny))
    up_BT = mask_BT & (advantage_BT > 0) & (p_BT > q_BT) & (distance_BT > clip_high)
    down_BT = mask_BT & (advantage_BT <= 0) & (p_BT < q_BT) & (distance_BT > clip_low)
    weight_BT = jax.lax.stop_gradient(jnp.minimum(ratio_BT, ratio_cap))
    weight_BT = jnp.where(up_BT | down_BT, 0.0, weight_BT)
    objective_BT = weight_BT * _advantage_log_prob(advantage_BT, log_prob_BT, mask_BT)
    return Surrogate(objective_BT, ratio_BT, up_BT, down_BT)


def policy_gradient(
    log_prob_BT: Float[Array, "B T"],
    log_prob_old_BT: Float[Array, "B T"],
    advantage_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    segments_BT: Int[Array, "B T"],
) -> Surrogate:
    """Returns the objective of REINFORCE, A_t log pi_t: no ratio. verl: gpg (arXiv:2504.02546)."""
    ratio_BT = jnp.exp(_bounded(masked_log_ratio(log_prob_BT, log_prob_old_BT, mask_BT)))
    never_BT = jnp.zeros_like(mask_BT)
    objective_BT = _advantage_log_prob(advantage_BT, log_prob_BT, mask_BT)
    return Surrogate(objective_BT, ratio_BT, never_BT, never_BT)


def dro(
    log_prob_BT: Float[Array, "B T"],
    log_prob_old_BT: Float[Array, "B T"],
    advantage_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    segments_BT: Int[Array, "B T"],
    *,
    dro_beta: float,
) -> Surrogate:
    """Direct reward optimisation, per token: REINFORCE less a penalty on the log-ratio.

        J_t = A_t log pi_t - dro_beta/2 (log r_t)^2

    Source: DRO, arXiv:2405.19107, as verl applies it to tokens. Log-ratios are not bounded.
    """
    log_ratio_BT = masked_log_ratio(log_prob_BT, log_prob_old_BT, mask_BT)
    objective_BT = _advantage_log_prob(advantage_BT, log_prob_BT, mask_BT)
    objective_BT -= 0.5 * dro_beta * log_ratio_BT**2
    never_BT = jnp.zeros_like(mask_BT)
    return Surrogate(objective_BT, jnp.exp(_bounded(log_ratio_BT)), never_BT, never_BT)


def clip_cov(
    log_prob_BT: Float[Array, "B T"],
    log_prob_old_BT: Float[Array, "B T"],
    advantage_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    segments_BT: Int[Array, "B T"],
    selected_BT: Bool[Array, "B T"],
    *,
    clip_low: float,
    clip_high: float,
) -> Surrogate:
    """The clipped surrogate, 0 and without gradient on the selected tokens.

    Source: Clip-Cov, arXiv:2505.22617, section 4; selection: `covariance.select_clip_cov`.
    """
    terms = surrogate(
        log_prob_BT, log_prob_old_BT, advantage_BT, mask_BT, clip_low=clip_low, clip_high=clip_high
    )
    return terms._replace(objective_BT=masked(terms.objective_BT, ~selected_BT))


def kl_cov(
    log_prob_BT: Float[Array, "B T"],
    log_prob_old_BT: Float[Array, "B T"],
    advantage_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    segments_BT: Int[Array, "B T"],
    selected_BT: Bool[Array, "B T"],
    *,
    cov_kl_coefficient: float,
) -> Surrogate:
    """The unclipped surrogate with a penalty on the log-ratio of the selected tokens.

        J_t = r_t A_t - [t is selected] cov_kl_coefficient |log r_t|

    Source: KL-Cov, arXiv:2505.22617, section 4, with verl's estimate of the KL; selection:
    `covariance.select_kl_cov`.
    """
    log_ratio_BT = _bounded(masked_log_ratio(log_prob_BT, log_prob_old_BT, mask_BT))
    ratio_BT = jnp.exp(log_ratio_BT)
    # |x| with slope 0 at 0, where policy and old policy agree.
    distance_BT = log_ratio_BT * jax.lax.stop_gradient(jnp.sign(log_ratio_BT))
    objective_BT = ratio_BT * masked(advantage_BT, mask_BT)
    objective_BT -= cov_kl_coefficient * masked(distance_BT, selected_BT)
    never_BT = jnp.zeros_like(mask_BT)
    return Surrogate(objective_BT, ratio_BT, never_BT, never_BT)


class Loss(NamedTuple):
    """A policy loss by its name in `config.objective.loss`, with the settings that it takes."""

    function: Callable[..., Surrogate]
    clips: tuple[str, ...] = ("clip_low", "clip_high")  # fields of config.objective that it reads
    arguments: Mapping[str, Argument] = {}  # the keys of config.objective.loss_args
    # Those of `arguments` that go to the selection of tokens in `covariance`, not to `function`;
    # (): no token is selected.
    selects: tuple[str, ...] = ()

    def keywords(self, objective: Any) -> dict[str, Any]:
        """Returns the function's arguments in a `config.objective`."""
        args = {k: v for k, v in objective.loss_args.items() if k not in self.selects}
        return {name: getattr(objective, name) for name in self.clips} | args


TAU = {"tau_positive": Argument(Positive, 1.0), "tau_negative": Argument(Positive, 1.05)}
RATIO_CAP = {"ratio_cap": Argument(Positive, 20.0)}
CLIP_COV = {
    "cov_share": Argument(UpTo1, 2e-4),
    "cov_low": Argument(float, 1.0),
    "cov_high": Argument(float, 5.0),
}
KL_COV = {"cov_share": Argument(UpTo1, 2e-3), "cov_kl_coefficient": Argument(Positive, 1.0)}
# By the name in `config.objective.loss`.
LOSSES = {
    "ppo-clip": Loss(ppo_clip, clips=("clip_low", "clip_high", "clip_dual")),
    "gspo": Loss(functools.partial(gspo, token_level=False)),
    "gspo-token": Loss(functools.partial(gspo, token_level=True)),
    "gmpo": Loss(gmpo),
    "cispo": Loss(cispo),
    "sapo": Loss(sapo, (), TAU),
    "dppo-tv": Loss(functools.partial(dppo, divergence="tv"), arguments=RATIO_CAP),
    "dppo-kl": Loss(functools.partial(dppo, divergence="kl"), arguments=RATIO_CAP),
    "policy-gradient": Loss(policy_gradient, clips=()),
    "dro": Loss(dro, clips=(), arguments={"dro_beta": Argument(Positive)}),
    "clip-cov": Loss(clip_cov, arguments=CLIP_COV, selects=tuple(CLIP_COV)),
    "kl-cov": Loss(kl_cov, (), KL_COV, selects=("cov_share",)),
}
COVARIANCE_LOSSES = tuple(name for name, loss in LOSSES.items() if loss.selects)


def response_mean(
    x_BT: Float[Array, "B T"], mask_BT: Bool[Array, "B T"], segments_BT: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """Returns the mean of x over the masked tokens of each token's response; 0 without any."""
    T, x_BT = x_BT.shape[1], masked(x_BT, mask_BT)

    def total(values_T: jax.Array, segments_T: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(values_T, segments_T, num_segments=T + 1)[segments_T]

    sums_BT = jax.vmap(total)(x_BT, segments_BT)
    counts_BT = jax.vmap(total)(mask_BT.astype(x_BT.dtype), segments_BT)
    return sums_BT / jnp.maximum(counts_BT, 1.0)


def _bounded(log_ratio_BT: Float[Array, "B T"]) -> Float[Array, "B T"]:
    return clamp(log_ratio_BT, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def _advantage_log_prob(
    advantage_BT: Float[Array, "B T"], log_prob_BT: Float[Array, "B T"], mask_BT: Bool[Array, "B T"]
) -> Float[Array, "B T"]:
    """A_t log pi_t, 0 outside the mask, where a log-prob may be -inf."""
    return masked(advantage_BT, mask_BT) * masked(log_prob_BT, mask_BT)
