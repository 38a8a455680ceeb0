"""Families of the host: advantages, corrections, rewards, scorer, schedule, metrics."""

import dataclasses
from collections.abc import Callable

import numpy as np

from configs import tiny_dapo
from dapo_jax.algorithms import advantages as advantage
from dapo_jax.algorithms import importance_correction
from dapo_jax.algorithms.kl import adapted_kl_coefficient, reward_kl
from dapo_jax.algorithms.overlong import soft_overlong_punishment
from dapo_jax.config import Config
from dapo_jax.evaluation import estimators
from dapo_jax.rewards import scorers
from dapo_jax.training import metrics, optimizer
from dapo_jax.training.batch import TokenColumns
from dapo_jax.types import Group, Problem, Response, Verdict
from tests.conformance.cases import Case, Compared, Differs, tokens_of
from tests.conformance.losses import KL_NAMES, rejections

LONE = "a group of one has advantage 0, the reference gives it its raw reward"


def advantages(
    name: str, *, lone_differs: bool = False, **settings: str
) -> Callable[[Case], Compared | Differs]:
    """Compares an advantage; settings name the reference's parameter for each of ours."""

    def compare(case: Case) -> Compared | Differs:
        a, p = case.arrays, case.params
        tokens = tokens_of(a["response_mask"])
        _, groups_R = np.unique(a["index"], return_inverse=True)
        rewards = a["token_level_rewards"].astype(np.float64)
        outcomes = advantage.Outcomes(
            rewards_R=rewards.sum(axis=1),
            components_RC=np.stack([a[k].astype(np.float64) for k in p["gdpo_reward_keys"]], 1)
            if name == "gdpo"
            else rewards.sum(axis=1)[:, None],
            groups_R=groups_R,
            lengths_R=tokens.lengths_R,
            total_lengths_R=tokens.lengths_R,
            token_rewards_M=tokens.take(rewards),
            baselines_R=a.get("reward_baselines"),
            values_M=tokens.take(a["values"]) if "values" in a else None,
        )
        ours = {mine: p[theirs] for mine, theirs in settings.items()}
        if name in ("grpo", "pass-at-k", "gdpo"):
            ours |= {"normalise_std": p.get("norm_adv_by_std_in_grpo", True), "std_ddof": 1}
        if name == "gdpo":
            ours["component_weights"] = tuple(p["gdpo_reward_weights"] or (1.0, 1.0))
        result = advantage.estimate(name, outcomes, ours)
        compared = tokens.mask.copy()
        lone_R = np.bincount(groups_R)[groups_R] == 1
        note = ""
        if lone_differs and lone_R.any():
            if name in WHITENED:
                theirs = case.outputs["advantages"][tokens.mask]
                return Differs(LONE + ", and whitening spreads it", result.advantage_M, theirs)
            compared[lone_R] = False
            note = LONE
        take = lambda x: np.asarray(x)[compared]
        pairs = [(take(tokens.put(result.advantage_M)), take(case.outputs["advantages"]))]
        if result.return_M is not None:
            pairs.append((take(tokens.put(result.return_M)), take(case.outputs["returns"])))
        return Compared(pairs, note)

    return compare


WHITENED = ("reinforce++-baseline", "gdpo")


def optimal_token_baseline(*, holes: bool) -> Callable[[Case], Compared]:
    """Compares the optimal token baseline.

    Args:
        holes: tokens are counted with those of others between them, as the reference's first
            form does; else without, as its form for several turns and our estimator do.
    """

    def compare(case: Case) -> Compared:
        a, zero_tail = case.arrays, case.params["handle_zero_tail"]
        tokens = tokens_of(a["response_mask"])
        _, groups_R = np.unique(a["index"], return_inverse=True)
        rewards = a["token_level_rewards"].astype(np.float64)
        energy = np.zeros(rewards.shape)
        energy[tokens.mask] = advantage.token_energy(
            tokens.take(a["old_log_probs"]), tokens.take(a["sum_pi_squared"])
        )
        seen_R = np.ones(len(groups_R), bool) if holes else tokens.lengths_R > 0
        lone_R = np.bincount(groups_R[seen_R], minlength=len(groups_R))[groups_R] == 1
        if holes:
            ours = np.zeros(rewards.shape)
            returns = np.cumsum((rewards * tokens.mask)[:, ::-1], axis=1)[:, ::-1]
            for group in np.unique(groups_R[~lone_R]):
                at = groups_R == group
                ours[at] = returns[at] - advantage.optimal_baselines(
                    returns[at], energy[at], tokens.mask[at], zero_tail=zero_tail
                )
        else:
            outcomes = advantage.Outcomes(
                rewards_R=rewards.sum(axis=1),
                components_RC=rewards.sum(axis=1)[:, None],
                groups_R=groups_R,
                lengths_R=tokens.lengths_R,
                total_lengths_R=tokens.lengths_R,
                token_rewards_M=tokens.take(rewards),
                energy_M=tokens.take(energy),
            )
            settings = {"zero_tail": zero_tail}
            result = advantage.estimate("optimal-token-baseline", outcomes, settings)
            ours = tokens.put(result.advantage_M)
        compared = tokens.mask & ~lone_R[:, None]
        note = LONE if (lone_R & (tokens.lengths_R > 0)).any() else ""
        return Compared([(ours[compared], case.outputs["advantages"][compared])], note)

    return compare


def whiten(case: Case) -> Compared:
    tokens = tokens_of(case.arrays["mask"])
    ours = advantage.whiten(tokens.take(case.arrays["values"]))
    return Compared([(ours, tokens.take(case.outputs["out"]))])


def importance(case: Case) -> Compared:
    a, p = case.arrays, case.params
    tokens = tokens_of(a["response_mask"])
    log_ratio_M = tokens.take(a["old_log_prob"]) - tokens.take(a["rollout_log_prob"])
    low, _, high = str(p["rollout_is_threshold"]).rpartition("_")
    weight_M, _ = importance_correction.importance_weights(
        log_ratio_M,
        tokens.lengths_R,
        level=p["rollout_is"],
        cap=float(high),
        floor=float(low) if low else None,
    )
    if p["rollout_is_batch_normalize"]:
        weight_M = importance_correction.normalised(
            weight_M, tokens.lengths_R, level=p["rollout_is"]
        )
    return Compared([(tokens.put(weight_M), case.outputs["weights"])])


def rejection(case: Case) -> Compared:
    a, p = case.arrays, case.params
    tokens = tokens_of(a["response_mask"])
    log_ratio_M = tokens.take(a["old_log_prob"]) - tokens.take(a["rollout_log_prob"])
    kept_M = np.ones(len(log_ratio_M), bool)
    for statistic, floor, cap in rejections(p["rollout_rs"], p["rollout_rs_threshold"]):
        kept_M &= importance_correction.kept_by_divergence(
            log_ratio_M, tokens.lengths_R, statistic=statistic, floor=floor, cap=cap
        )
    return Compared([(tokens.put(kept_M), case.outputs["mask"])])


def mismatch(case: Case) -> Compared:
    a = case.arrays
    tokens = tokens_of(a["response_mask"])
    ours = importance_correction.mismatch(
        tokens.take(a["old_log_prob"]), tokens.take(a["rollout_log_prob"]), tokens.lengths_R
    )
    if case.id.startswith("rollout_probs_diff"):
        names = {"prob_gap_mean": "mean", "prob_gap_max": "max"}
        theirs = {n: case.metrics[f"training/rollout_probs_diff_{m}"] for n, m in names.items()}
    else:
        theirs = {name: case.metrics[name] for name in ours if name in case.metrics}
        if not tokens.mask.any(axis=1).all():
            # There a response without a token has perplexity 1 and ratio 1 in these means.
            for name in ("training_ppl", "rollout_ppl", "chi2_seq"):
                del theirs[name]
            note = "means over responses leave out those without a trained token"
            return Compared([(ours[name], value) for name, value in theirs.items()], note)
    assert len(theirs) >= 2
    return Compared([(ours[name], value) for name, value in theirs.items()])


def kl_controller(case: Case) -> Compared:
    p, coefficient, values = case.params, case.params["init_kl_coef"], []
    for current, n in p["updates"]:
        coefficient = adapted_kl_coefficient(
            coefficient, current, target=p["target_kl"], horizon=p["horizon"], num_responses=n
        )
        values.append(coefficient)
    theirs = np.asarray(case.outputs["value"])
    return Compared([(values if theirs.size == len(values) else [coefficient], np.ravel(theirs))])


def kl_in_reward(case: Case) -> Compared:
    a, p = case.arrays, case.params
    tokens = tokens_of(a["response_mask"])
    kl = tokens.put(
        reward_kl(
            tokens.take(a["old_log_probs"]),
            tokens.take(a["ref_log_prob"]),
            estimator=KL_NAMES[p["kl_penalty"]],
        )
    )
    rewards = a["token_level_scores"] - p["init_kl_coef"] * kl
    # The reference's mean KL is of responses first, then over them.
    per_response = kl.sum(axis=1)[tokens.lengths_R > 0] / tokens.lengths_R[tokens.lengths_R > 0]
    after = adapted_kl_coefficient(
        p["init_kl_coef"],
        float(per_response.mean()),
        target=p["target_kl"],
        horizon=p["horizon"],
        num_responses=len(tokens.mask),
    )
    theirs = np.ravel(case.outputs["kl_coef_after"])
    return Compared([(rewards, case.outputs["token_level_rewards"]), ([after], theirs)])


def learning_rate(case: Case) -> Compared:
    p, theirs = case.params, np.ravel(case.outputs["lr_factor"])
    cosine = "min_lr_ratio" in p
    config = dataclasses.replace(
        Config.from_dict(tiny_dapo.get_config().to_dict()).optimizer,
        learning_rate=1.0,
        warmup_steps=p["num_warmup_steps"],
        final_rate_share=p["min_lr_ratio"] if cosine else None,
    )
    last = p.get("num_training_steps") or len(theirs)
    ours = [optimizer.learning_rate(config, step, last) for step in range(1, len(theirs))]
    note = "ours of step s is theirs of step s + 1, whose first step trains at rate 0"
    return Compared([(ours, theirs[1:])], note)


def overlong(case: Case) -> Compared:
    p, lengths = case.params, case.outputs["length"]
    ours = soft_overlong_punishment(
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


def math_dapo(case: Case) -> Compared:
    """Exact agreement, as 0 or 1."""
    if case.id.endswith("normalize_final_answer"):
        same = [scorers.normalise_minerva(r["in"]) == r["out"] for r in case.records]
        return Compared([(np.array(same, float), np.ones(len(same)))])
    ours = [scorers.math_dapo(r["solution"], r["ground_truth"]) for r in case.records]
    same = [
        o.correct == r["minerva_only_acc"]
        and (o.extracted or "[INVALID]") == r["minerva_only_pred"]
        for o, r in zip(ours, case.records)
    ]
    differ = sum(o.correct != r["acc"] for o, r in zip(ours, case.records))
    note = (
        f"the published runs' scorer has no \\boxed fallback: {differ} verdicts differ from 0.9.1"
    )
    return Compared([(np.array(same, float), np.ones(len(same)))], note)


def filter_groups(case: Case) -> Compared:
    """Groups of verdicts. The filter sees correctness only."""
    pairs = []
    for record in case.records:
        if record["group"] not in ("all_right", "all_wrong", "mixed", "bool"):
            continue
        verdicts = tuple(Verdict(bool(v), float(v)) for v in record["values"])
        response = Response(np.zeros(1, np.int32), np.zeros(1, np.float32), "stop", "")
        group = Group(Problem(0, "", (), "", ""), (response,) * len(verdicts), verdicts, 0)
        pairs.append(
            (float(group.is_informative(overlong_filter=False)), float(record["recipe_keep"]))
        )
    note = "correctness is a boolean here: no group differs by a float, and one alone is dropped"
    return Compared(pairs, note)


def val_metrics(case: Case) -> Compared:
    """avg@k; what the reference bootstraps is computed exactly here."""
    p, pairs = case.params, []
    sources, uids = np.array(p["data_sources"]), np.array(p["sample_uids"])
    for source in np.unique(sources):
        rows = sources == source
        groups = [
            np.array(p["infos"]["acc"])[rows & (uids == uid)] for uid in np.unique(uids[rows])
        ]
        correct_QK = np.array(groups, bool)
        k = correct_QK.shape[1]
        ours = estimators.avg_at_k(correct_QK).mean()
        pairs.append((ours, case.metrics[f"{source}/acc/mean@{k}"]))
    note = "best, worst and majority of k are bootstraps with seed 42 there, exact here"
    return Compared(pairs, note)


def data_metrics(case: Case) -> Compared:
    a, theirs = case.arrays, case.metrics
    tokens = tokens_of(a["response_mask"])
    M = int(tokens.lengths_R.sum())
    returns_M = tokens.take(a["advantages"])  # the case has no other returns
    columns = TokenColumns(
        np.ones(M, bool),
        log_prob_old_M=np.zeros(M),
        advantage_M=tokens.take(a["advantages"]),
        return_M=returns_M,
        value_old_M=tokens.take(a["values"]),
    )
    ours = metrics.advantage_metrics(columns)
    names = {
        "advantage/mean": "critic/advantages/mean",
        "advantage/max": "critic/advantages/max",
        "advantage/min": "critic/advantages/min",
        "critic/return_mean": "critic/returns/mean",
        "critic/value_mean": "critic/values/mean",
    }
    pairs = [(ours[mine], theirs[other]) for mine, other in names.items()]
    # The reference adds 1e-5 to the variance it divides by.
    variance = np.var(returns_M, ddof=1)
    explained = 1 - (1 - theirs["critic/vf_explained_var"]) * (variance + 1e-5) / variance
    pairs.append((ours["critic/explained_variance"], explained))
    return Compared(pairs, "explained variance without the reference's 1e-5 in its denominator")


FAMILIES: dict[str, Callable[[Case], Compared | Differs | None]] = {
    "adv/grpo": advantages("grpo", lone_differs=True),
    "adv/grpo_passk": advantages("pass-at-k"),
    "adv/gdpo": advantages("gdpo", lone_differs=True),
    "adv/gae": advantages("gae", gamma="gamma", gae_lambda="lam"),
    "adv/rloo": advantages("rloo", lone_differs=True),
    "adv/rloo_vectorized": advantages("rloo"),
    "adv/opo": advantages("opo", lone_differs=True),
    "adv/remax": advantages("remax"),
    "adv/optimal_token_baseline": optimal_token_baseline(holes=True),
    "adv/tir_optimal_token_baseline": optimal_token_baseline(holes=False),
    "adv/gpg": advantages("gpg", lone_differs=True, gpg_norm="f_norm"),
    "adv/reinforce_plus_plus": advantages("reinforce++", gamma="gamma"),
    "adv/reinforce_plus_plus_baseline": advantages("reinforce++-baseline", lone_differs=True),
    "util": whiten,
    "rollout_is": importance,
    "rollout_rs": rejection,
    "offpolicy_metrics": mismatch,
    "rollout_probs_diff": mismatch,
    "kl_controller": kl_controller,
    "kl_in_reward": kl_in_reward,
    "lr": learning_rate,
    "overlong": overlong,
    "math_dapo": math_dapo,
    "filter_groups": filter_groups,
    "val_metrics": val_metrics,
    "data_metrics": data_metrics,
}
