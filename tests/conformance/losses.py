"""Families of the loss: policy losses, aggregations, KL, entropy, value loss."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dapo_jax.algorithms import covariance, importance_correction, losses
from dapo_jax.algorithms import surrogate as objective
from dapo_jax.algorithms.aggregation import aggregate
from dapo_jax.algorithms.kl import kl_estimate
from dapo_jax.config import CorrectionConfig
from dapo_jax.models import log_probs
from dapo_jax.training import critic
from tests.conformance.cases import Case, Compared, Differs, tokens_of


def weights(mask: np.ndarray, aggregation: str, shared: dict[str, Any]) -> np.ndarray:
    """Weight of every token, [B, T], from our `aggregate`.

    Args:
        shared: the reference's totals of a batch spread over ranks; empty: this is all of it.
    """
    n = mask.sum(axis=1).astype(int)
    w = aggregate(
        n,
        np.arange(len(n)),
        aggregation=aggregation,
        max_response_tokens=shared.get("loss_scale_factor") or mask.shape[1],
    )
    # One rank of several: its share of the whole batch's denominator, and the mean over ranks
    # that follows undone.
    ranks = shared.get("dp_size", 1)
    if aggregation == "token-mean":
        ranks *= n.sum() / shared.get("batch_num_tokens", n.sum())
    elif aggregation.startswith("seq"):
        rows = (n > 0).sum()
        ranks *= rows / shared.get("global_batch_size", rows)
    return (w.numerator_R / w.denominator * ranks)[:, None] * mask


CLIP = {"clip_low": "clip_ratio_low", "clip_high": "clip_ratio_high"}
DUAL = CLIP | {"clip_dual": "clip_ratio_c"}


def policy(name: str, **settings: str) -> Callable[[Case], Compared | Differs]:
    """Compares a policy loss; settings name the reference's parameter for each of ours."""

    def compare(case: Case) -> Compared | Differs:
        a, p = case.arrays, case.params
        mask = a["response_mask"].astype(bool)
        aggregation, shared = p["loss_agg_mode"], p.get("global_batch_info", {})
        if name == "sapo":
            aggregation = "seq-mean-token-mean"  # the reference's takes no other
        if name == "gmpo":
            aggregation, shared = "seq-mean-token-mean", {}
        arguments = {ours: p[theirs] for ours, theirs in settings.items()}
        correction, kept = _corrected(case, mask)
        w = weights(kept, aggregation, shared) * correction
        selected = []
        if name in losses.COVARIANCE_LOSSES:
            selected = [_selected(name, case, arguments)]
        value, gradient = _loss_and_gradient(
            name, tuple(arguments.items()), a["log_prob"], a["old_log_prob"], a["advantages"],
            kept, w, *selected,
        )  # fmt: skip
        theirs = case.outputs["loss"], case.outputs["grad_log_prob"]
        log_ratio = np.abs(a["log_prob"] - a["old_log_prob"])[mask].max()
        if name == "gmpo" and "rollout_is_weights" in a:
            reason = "a correction multiplies each token's term; there it multiplies the mean"
            return Differs(reason, value, theirs[0])
        if name == "gmpo" and not mask.any(axis=1).all():
            reason = "a response without a trained token counts nowhere; the reference counts it"
            return Differs(reason, value, theirs[0])
        if name in ("gmpo", "kl-cov", "clip-cov") and log_ratio > objective.MAX_LOG_RATIO:
            reason = "log-ratios are bounded by 20; the reference's are not"
            return Differs(reason, value, theirs[0])
        return Compared([(value, theirs[0]), (gradient, theirs[1])])

    return compare


@functools.partial(jax.jit, static_argnums=(0, 1))  # compiled once for cases of one shape
def _loss_and_gradient(
    name: str,
    arguments: tuple[tuple[str, float], ...],
    logp: jax.Array,
    old: jax.Array,
    advantages: jax.Array,
    kept: jax.Array,
    w: jax.Array,
    *selected: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    def loss(logp: jax.Array) -> jax.Array:
        terms = losses.LOSSES[name].function(
            logp, old, advantages, kept, jnp.ones(kept.shape, jnp.int32), *selected,
            **dict(arguments),
        )  # fmt: skip
        return -jnp.sum(jnp.where(kept, w * terms.objective_BT, 0.0))

    return jax.value_and_grad(loss)(logp)


def _corrected(case: Case, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(importance weights, mask of what is kept): given, or as its bypass mode makes them, where
    the policy of the gradient is held against the rollout."""
    settings = case.params.get("rollout_correction")
    if settings is None:
        return case.arrays.get("rollout_is_weights", np.ones(mask.shape)), mask
    level, cap = settings["rollout_is"], float(settings["rollout_is_threshold"])
    weighted = settings["loss_type"] == "reinforce" and level not in (None, "none")
    prefix = "normalised-" if settings["rollout_is_batch_normalize"] else ""
    config = CorrectionConfig(
        policy="current",
        importance=(f"{prefix}{level}", None, cap) if weighted else None,
        reject=rejections(settings["rollout_rs"], settings["rollout_rs_threshold"]),
    )
    tokens = tokens_of(mask)
    columns = [tokens.take(case.arrays[k]) for k in ("log_prob", "old_log_prob", "advantages")]
    result = importance_correction.correct(config, *columns, tokens.lengths_R)
    return tokens.put(result.weight_M), tokens.put(result.kept_M).astype(bool)


def rejections(names: str | None, thresholds: str) -> tuple[tuple[str, float | None, float], ...]:
    """The reference's comma-separated rejection settings as ours."""
    if not names:
        return ()
    out = []
    for name, threshold in zip(names.split(","), str(thresholds).split(","), strict=True):
        low, _, high = threshold.rpartition("_")
        ratio = name.endswith("k1")
        floor = float(low) if low else 1 / float(high)
        out.append((name.replace("_", "-"), floor if ratio else None, float(high)))
    return tuple(out)


def _selected(name: str, case: Case, arguments: dict[str, Any]) -> np.ndarray:
    a, p = case.arrays, case.params
    tokens = tokens_of(a["response_mask"])
    logp, old, adv = (tokens.take(a[key]) for key in ("log_prob", "old_log_prob", "advantages"))
    if name == "kl-cov":
        chosen = covariance.select_kl_cov(logp, adv, cov_share=p["kl_cov_ratio"])
    else:
        # The reference's cases draw the identity permutation, or take all candidates.
        chosen = covariance.select_clip_cov(
            logp, old, adv, np.arange(len(logp)) * 1.0, **arguments, cov_share=p["clip_cov_ratio"],
            cov_low=p["clip_cov_lb"], cov_high=p["clip_cov_ub"],
        )  # fmt: skip
    return tokens.put(chosen).astype(bool)


def total_loss(case: Case) -> Compared:
    """The clipped surrogate with a KL term and an entropy bonus."""
    a, p = case.arrays, case.params
    mask = a["response_mask"].astype(bool)
    w = weights(mask, p["loss_agg_mode"], {})

    def loss(logp: jax.Array, entropy: jax.Array) -> jax.Array:
        surrogate = objective.surrogate(
            logp,
            jnp.asarray(a["old_log_prob"]),
            jnp.asarray(a["advantages"]),
            jnp.asarray(mask),
            **{ours: p[theirs] for ours, theirs in DUAL.items()},
        )
        kl = kl_estimate(
            logp,
            jnp.asarray(a["ref_log_prob"]),
            jnp.asarray(mask),
            estimator=KL_NAMES[p["kl_loss_type"]],
        )
        each = -surrogate.objective_BT + p["kl_loss_coef"] * kl
        return jnp.sum(w * (each - p["entropy_coeff"] * jnp.where(mask, entropy, 0.0)))

    value, grads = jax.value_and_grad(loss, argnums=(0, 1))(
        jnp.asarray(a["log_prob"]), jnp.asarray(a["entropy"])
    )
    out = case.outputs
    return Compared(
        [(value, out["loss"]), (grads[0], out["grad_log_prob"]), (grads[1], out["grad_entropy"])]
    )


def agg_loss(case: Case) -> Compared:
    a, p = case.arrays, case.params
    mask = a["loss_mask"].astype(bool)
    w = weights(mask, p["loss_agg_mode"], p)
    values = np.where(mask, a["loss_mat"], 0.0)
    return Compared(
        [((w * values).sum(), case.outputs["loss"]), (w, case.outputs["grad_loss_mat"])]
    )


def micro_batches(case: Case) -> Compared:
    """The weights are the whole mini-batch's, whichever micro-batch a row is in."""
    a, p = case.arrays, case.params
    mask = a["loss_mask"].astype(bool)
    w = weights(mask, p["loss_agg_mode"], {})
    values = w * np.where(mask, a["loss_mat"], 0.0)
    total = sum(values[rows].sum() for rows in p["splits"])
    return Compared([(total, case.outputs["loss_global"]), (w, case.outputs["grad_global"])])


KL_NAMES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


def kl(case: Case) -> Compared:
    a, name = case.arrays, case.params["kl_penalty"]
    base = name.rstrip("+")
    name = KL_NAMES.get(base, base) + "+" * name.endswith("+")
    logp, ref = jnp.asarray(a["logprob"]), jnp.asarray(a["ref_logprob"])
    mask = jnp.ones(logp.shape, bool)
    f = lambda x: kl_estimate(x, ref, mask, estimator=name)
    gradient = jax.grad(lambda x: jnp.sum(f(x) * a["ct"]))(logp)
    return Compared([(f(logp), case.outputs["kl"]), (gradient, case.outputs["grad_logprob"])])


def value(case: Case) -> Compared:
    a, p = case.arrays, case.params
    mask = a["response_mask"].astype(bool)
    w = weights(mask, p["loss_agg_mode"], p)

    def loss(value: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss_BT, clipped_BT = critic.value_loss(
            value,
            jnp.asarray(a["values"]),
            jnp.asarray(a["returns"]),
            jnp.asarray(mask),
            value_clip=p["cliprange_value"],
        )
        return jnp.sum(w * loss_BT), jnp.sum(clipped_BT) / mask.sum()

    (total, clipped), gradient = jax.value_and_grad(loss, has_aux=True)(jnp.asarray(a["vpreds"]))
    out = case.outputs
    return Compared(
        [(total, out["loss"]), (clipped, out["clipfrac"]), (gradient, out["grad_vpreds"])]
    )


def statistics(
    logits: jax.Array, labels: np.ndarray, temperature: float, *, collision: bool = False
):
    """Our token statistics; the unembedding is the identity, so that hidden states are logits."""
    return log_probs.token_statistics(
        logits,
        jnp.eye(logits.shape[-1], dtype=logits.dtype),
        jnp.asarray(labels),
        temperature=temperature,
        chunk_tokens=7,
        collision=collision,
    )


def log_prob_and_entropy(case: Case) -> Compared:
    a, name = case.arrays, "entropy" if case.id.startswith("entropy") else "log_prob"
    f = lambda x: getattr(statistics(x, a["labels"], case.params["temperature"]), f"{name}_BT")
    logits = jnp.asarray(a["logits"])
    gradient = jax.grad(lambda x: jnp.sum(f(x) * a["ct"]))(logits)
    return Compared([(f(logits), case.outputs[name]), (gradient, case.outputs["grad_logits"])])


def collision(case: Case) -> Compared:
    a = case.arrays
    found = statistics(jnp.asarray(a["logits"]), a["labels"], 1.0, collision=True)
    return Compared([(found.collision_BT, case.outputs["out"])])


def entropy_loss(case: Case) -> Compared:
    a = case.arrays
    w = weights(a["response_mask"].astype(bool), case.params["loss_agg_mode"], {})
    f = lambda x: jnp.sum(w * statistics(x, a["labels"], 1.0).entropy_BT)
    total, gradient = jax.value_and_grad(f)(jnp.asarray(a["logits"]))
    return Compared([(total, case.outputs["loss"]), (gradient, case.outputs["grad_logits"])])


FAMILIES: dict[str, Callable[[Case], Compared | Differs | None]] = {
    "policy/vanilla_dapo_c10": policy("ppo-clip", **DUAL),
    "policy/vanilla_dapo_c3": policy("ppo-clip", **DUAL),
    "policy/vanilla_sym": policy("ppo-clip", **DUAL),
    "policy_f32/vanilla_dapo_c10": policy("ppo-clip", **DUAL),
    "policy/bypass_ppo_clip": policy("ppo-clip", **DUAL),
    "policy/bypass_reinforce": policy("policy-gradient"),
    "policy/gspo": policy("gspo-token", **CLIP),
    "policy/gspo_paper": policy("gspo-token", **CLIP),
    "policy/sapo": policy("sapo", tau_positive="tau_pos", tau_negative="tau_neg"),
    "policy/gpg": policy("policy-gradient"),
    "policy/cispo": policy("cispo", **CLIP),
    "policy/dppo_tv": policy("dppo-tv", **CLIP, ratio_cap="clip_ratio_c"),
    "policy/dppo_kl": policy("dppo-kl", **CLIP, ratio_cap="clip_ratio_c"),
    "policy/clip_cov_all": policy("clip-cov", **CLIP),
    "policy/clip_cov_idperm": policy("clip-cov", **CLIP),
    "policy/kl_cov": policy("kl-cov", cov_kl_coefficient="ppo_kl_coef"),
    "policy/geo_mean": policy("gmpo", **CLIP),
    "policy/dro": policy("dro", dro_beta="dro_beta"),
    "total_loss": total_loss,
    "agg_loss": agg_loss,
    "microbatch": micro_batches,
    "kl": kl,
    "value": value,
    "logprob": log_prob_and_entropy,
    "entropy": log_prob_and_entropy,
    "entropy_loss": entropy_loss,
    "sum_pi_squared": collision,
}
