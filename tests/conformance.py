"""Our functions against the reference's own numbers.

Command: python -m tests.conformance --oracle PATH/verl_0.9.1_seed0.json

The npz with the arrays lies beside the json. Prints one line per family, the cases where we differ
on purpose, the families that are not ours and those that are not there yet, and as a last line how
many were compared. Exits 0 only if every compared case agrees to 1e-5 in value and gradient.
"""

import argparse
import collections
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dapo_jax import advantage, log_probs, objective, policy_losses, reward

TOLERANCE = 1e-5


class Compared(NamedTuple):
    """Pairs of (ours, theirs), and what was left out of them on purpose."""

    pairs: list[tuple[Any, Any]]
    note: str = ""


class Differs(NamedTuple):
    """A difference on purpose: why, and both values."""

    reason: str
    ours: Any
    theirs: Any


class Case(NamedTuple):
    id: str
    arrays: dict[str, np.ndarray]  # inputs by their names
    params: dict[str, Any]
    outputs: dict[str, Any]


def weights(case: Case, mask: np.ndarray, aggregation: str, shared: dict[str, Any]) -> np.ndarray:
    """Weight of every token, [B, T], from our `loss_weights`.

    Args:
        shared: the reference's totals of a batch spread over ranks; empty: this is all of it.
    """
    n = mask.sum(axis=1).astype(int)
    rows = np.flatnonzero(n)
    w = objective.loss_weights(
        n[rows],
        rows,
        aggregation=aggregation,
        max_response_tokens=shared.get("loss_scale_factor") or mask.shape[1],
    )
    # One rank of several: its share of the whole batch's denominator, and the mean over ranks
    # that follows undone.
    ranks = shared.get("dp_size", 1)
    if aggregation == "token-mean":
        ranks *= n.sum() / shared.get("batch_num_tokens", n.sum())
    elif aggregation.startswith("seq"):
        ranks *= len(rows) / shared.get("global_batch_size", len(rows))
    out = np.zeros(mask.shape)
    out[rows] = (w * ranks)[:, None]
    return out * mask


def policy(name: str, **settings: Any) -> Callable[[Case], Compared | Differs | None]:
    """Compares a policy loss; settings name the reference's parameter for each of ours."""

    def compare(case: Case) -> Compared | Differs | None:
        a, p = case.arrays, case.params
        mask = a["response_mask"].astype(bool)
        aggregation, shared = p["loss_agg_mode"], p.get("global_batch_info", {})
        if name == "sapo":
            aggregation = "seq-mean-token-mean"  # the reference's takes no other
        if name == "gmpo":
            aggregation, shared = "seq-mean-token-mean", {}
            if "rollout_is_weights" in a:
                return None
        w = weights(case, mask, aggregation, shared)
        if "rollout_is_weights" in a:
            w = w * a["rollout_is_weights"]
        segments = jnp.ones(mask.shape, jnp.int32)
        arguments = {ours: p[theirs] for ours, theirs in settings.items()}

        def loss(logp: jax.Array) -> jax.Array:
            terms = policy_losses.LOSSES[name](
                logp, jnp.asarray(a["old_log_prob"]), jnp.asarray(a["advantages"]),
                jnp.asarray(mask), segments, **arguments,
            )  # fmt: skip
            return -jnp.sum(jnp.where(mask, jnp.asarray(w) * terms.objective_BT, 0.0))

        value, gradient = jax.value_and_grad(loss)(jnp.asarray(a["log_prob"]))
        theirs = case.outputs["loss"], case.outputs["grad_log_prob"]
        if name == "gmpo" and not mask.any(axis=1).all():
            reason = "a response without a trained token counts nowhere; the reference counts it"
            return Differs(reason, value, theirs[0])
        if name == "gmpo" and np.abs(a["log_prob"] - a["old_log_prob"])[mask].max() > 20:
            reason = "log-ratios are bounded by 20; the reference's are not"
            return Differs(reason, value, theirs[0])
        return Compared([(value, theirs[0]), (gradient, theirs[1])])

    return compare


CLIP = {"clip_low": "clip_ratio_low", "clip_high": "clip_ratio_high"}


def aggregate(case: Case) -> Compared:
    a, p = case.arrays, case.params
    mask = a["loss_mask"].astype(bool)
    w = weights(case, mask, p["loss_agg_mode"], p)
    values = np.where(mask, a["loss_mat"], 0.0)
    return Compared(
        [((w * values).sum(), case.outputs["loss"]), (w, case.outputs["grad_loss_mat"])]
    )


def micro_batches(case: Case) -> Compared:
    """The weights are the whole mini-batch's, whichever micro-batch a row is in."""
    a, p = case.arrays, case.params
    mask = a["loss_mask"].astype(bool)
    w = weights(case, mask, p["loss_agg_mode"], {})
    values = w * np.where(mask, a["loss_mat"], 0.0)
    total = sum(values[rows].sum() for rows in p["splits"])
    return Compared([(total, case.outputs["loss_global"]), (w, case.outputs["grad_global"])])


KL_NAMES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


def kl(case: Case) -> Compared | None:
    a, name = case.arrays, case.params["kl_penalty"]
    if name == "full":
        return None
    base = name.rstrip("+")
    name = KL_NAMES.get(base, base) + "+" * name.endswith("+")
    logp, ref = jnp.asarray(a["logprob"]), jnp.asarray(a["ref_logprob"])
    mask = jnp.ones(logp.shape, bool)
    f = lambda x: objective.kl_estimate(x, ref, mask, estimator=name)
    gradient = jax.grad(lambda x: jnp.sum(f(x) * a["ct"]))(logp)
    return Compared([(f(logp), case.outputs["kl"]), (gradient, case.outputs["grad_logprob"])])


def overlong(case: Case) -> Compared:
    p, lengths = case.params, case.outputs["length"]
    ours = reward.soft_overlong_punishment(
        lengths,
        max_response_tokens=p["max_resp_len"],
        buffer_tokens=p["overlong_buffer_len"],
        penalty=p["penalty_factor"],
    )
    theirs = case.outputs["overlong_reward"]
    # Beyond the limit the reference goes on falling; its rollouts never get there.
    within = lengths <= p["max_resp_len"]
    note = "beyond L_max the punishment stays -1 (eq. 13), the reference's goes on falling"
    return Compared([(ours[within], theirs[within])], "" if within.all() else note)


def log_prob_and_entropy(case: Case) -> Compared:
    """The unembedding is the identity, so that hidden states are logits."""
    a, kind = case.arrays, family_of(case)

    def f(logits: jax.Array) -> jax.Array:
        both = log_probs.token_log_probs(
            logits,
            jnp.eye(logits.shape[-1], dtype=logits.dtype),
            jnp.asarray(a["labels"]),
            temperature=case.params["temperature"],
            chunk_tokens=7,
        )
        return both[kind == "entropy"]

    logits = jnp.asarray(a["logits"])
    gradient = jax.grad(lambda x: jnp.sum(f(x) * a["ct"]))(logits)
    name = "entropy" if kind == "entropy" else "log_prob"
    return Compared([(f(logits), case.outputs[name]), (gradient, case.outputs["grad_logits"])])


def grpo(case: Case) -> Compared | None:
    a, p = case.arrays, case.params
    if "passk" in case.id:
        return None
    mask = a["response_mask"].astype(bool)
    scores, groups = a["token_level_rewards"].astype(np.float64).sum(axis=1), a["index"]
    ours, several = np.zeros(mask.shape), np.zeros(len(mask), bool)
    for group in np.unique(groups):
        rows = np.flatnonzero(groups == group)
        several[rows] = len(rows) > 1
        values = advantage.group_advantages(
            scores[rows], normalise_std=p["norm_adv_by_std_in_grpo"], ddof=1
        )
        ours[rows] = values[:, None] * mask[rows]
    note = "a group of one has advantage 0, the reference gives it its raw reward"
    pairs = [(ours[several], case.outputs["advantages"][several])]
    return Compared(pairs, "" if several.all() else note)


FAMILIES: dict[str, Callable[[Case], Compared | Differs | None]] = {
    "policy/vanilla_dapo_c10": policy("ppo-clip", **CLIP, clip_dual="clip_ratio_c"),
    "policy/vanilla_dapo_c3": policy("ppo-clip", **CLIP, clip_dual="clip_ratio_c"),
    "policy/vanilla_sym": policy("ppo-clip", **CLIP, clip_dual="clip_ratio_c"),
    "policy_f32/vanilla_dapo_c10": policy("ppo-clip", **CLIP, clip_dual="clip_ratio_c"),
    "policy/gspo": policy("gspo-token", **CLIP),
    "policy/gspo_paper": policy("gspo-token", **CLIP),
    "policy/sapo": policy("sapo", tau_positive="tau_pos", tau_negative="tau_neg"),
    "policy/gpg": policy("policy-gradient"),
    "policy/cispo": policy("cispo", **CLIP),
    "policy/dppo_tv": policy("dppo-tv", **CLIP, ratio_cap="clip_ratio_c"),
    "policy/dppo_kl": policy("dppo-kl", **CLIP, ratio_cap="clip_ratio_c"),
    "policy/geo_mean": policy("gmpo", **CLIP),
    "policy/dro": policy("dro", dro_beta="dro_beta"),
    "agg_loss": aggregate,
    "microbatch": micro_batches,
    "kl": kl,
    "overlong": overlong,
    "logprob": log_prob_and_entropy,
    "entropy": log_prob_and_entropy,
    "adv/grpo": grpo,
}

NOT_OURS = {"balance": "a workload balancer of torch ranks"}


def family_of(case: Case) -> str:
    """The key of FAMILIES, or a name for what is not there."""
    first, _, rest = case.id.partition("/")
    second = rest.split("/")[0]
    if first in ("policy", "policy_f32"):
        return f"{first}/{second}"
    if first == "adv":
        return (
            "adv/grpo" if second.startswith("grpo") and "passk" not in second else f"adv/{second}"
        )
    return first


def load(path: Path) -> list[Case]:
    """The cases of an oracle file, arrays in place of their names."""
    arrays = np.load(path.with_suffix(".npz"), allow_pickle=False)
    known = set(arrays.files)
    take = lambda value: arrays[value] if isinstance(value, str) and value in known else value
    return [
        Case(
            case["id"],
            {name: take(value) for name, value in case["inputs"].items()},
            case["params"],
            {name: take(value) for name, value in case["outputs"].items()},
        )
        for case in json.loads(path.read_text())["cases"]
    ]


def relative_error(ours: Any, theirs: Any) -> float:
    """Largest difference, relative to the entry or to a millionth of the largest entry."""
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    if ours.shape != theirs.shape:
        return np.inf
    largest = np.abs(theirs).max(initial=0.0)
    scale = np.maximum(np.abs(theirs), max(1e-6 * largest, 1e-12))
    return float((np.abs(ours - theirs) / scale).max(initial=0.0))


def main() -> int:
    """0 if every compared case agrees."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--oracle", type=Path, required=True)
    jax.config.update("jax_enable_x64", True)
    worst: dict[str, float] = collections.defaultdict(float)
    counts: collections.Counter[str] = collections.Counter()
    failed, differing, notes = [], [], collections.Counter()
    not_ours: collections.Counter[str] = collections.Counter()
    missing: collections.Counter[str] = collections.Counter()
    for case in load(parser.parse_args().oracle):
        family = family_of(case)
        if family in NOT_OURS:
            not_ours[family] += 1
            continue
        result = FAMILIES[family](case) if family in FAMILIES else None
        if result is None:
            missing[family] += 1
        elif isinstance(result, Differs):
            differing.append((case.id, result))
        else:
            error = max(relative_error(*pair) for pair in result.pairs)
            counts[family] += 1
            worst[family] = max(worst[family], error)
            if not error <= TOLERANCE:
                failed.append((case.id, error))
            if result.note:
                notes[f"{family}: {result.note}"] += 1
    for family in sorted(counts):
        print(
            f"{family:32s} {counts[family]:4d} compared, worst relative error {worst[family]:.1e}"
        )
    for note, count in sorted(notes.items()):
        print(f"left out on purpose, in {count} cases of {note}")
    for name, result in differing:
        ours, theirs = (float(np.max(np.abs(x))) for x in (result.ours, result.theirs))
        print(f"differs on purpose: {name}: {ours:.6g} here, {theirs:.6g} there: {result.reason}")
    for family, count in sorted(not_ours.items()):
        print(f"not applicable: {family} ({count}): {NOT_OURS[family]}")
    for family, count in sorted(missing.items()):
        print(f"not there yet: {family} ({count})")
    for name, error in failed:
        print(f"FAILED: {name}: relative error {error:.1e}")
    print(
        f"conformance: {counts.total()} compared, {not_ours.total()} not applicable, "
        f"{len(differing)} different on purpose, {missing.total()} not there yet, "
        f"worst relative error {max(worst.values(), default=0.0):.1e}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
