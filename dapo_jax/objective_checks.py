"""What the objective of a config must satisfy: its loss, advantage, KL, correction and critic."""

from typing import Any

from dapo_jax.parameters import (
    ADVANTAGE_PARAMETERS,
    LOSS_PARAMETERS,
    SELECTION_PARAMETERS,
    STATISTICS,
)
from dapo_jax.requirements import non_negative, positive, require
from dapo_jax.types import UserError


def check(config: Any) -> None:
    """Checks the objective of a `Config` and what it needs of the rest.

    Raises:
        UserError: names the field, the value and the remedy.
    """
    objective = config.objective
    _check_parameters(objective)
    _check_advantage(config)
    _check_correction(config)
    _check_critic(config)
    _check_ratio(config)
    if not objective.overlong_filter and not objective.overlong_in_baseline:
        raise UserError(
            "config.objective.overlong_in_baseline = False is read only with "
            "config.objective.overlong_filter = True; set it to True."
        )


def _check_parameters(objective: Any) -> None:
    """The chosen loss and advantage have their parameters, in range, and no others are given."""
    tables = {
        "loss": (LOSS_PARAMETERS, SELECTION_PARAMETERS),
        "advantage": (ADVANTAGE_PARAMETERS,),
    }
    for choice, choices in tables.items():
        chosen = getattr(objective, choice)
        read = [name for table in choices for name in table.get(chosen, ())]
        every = {name.strip("[]") for t in choices for names in t.values() for name in names}
        for name in sorted(every):
            value = getattr(objective, name)
            if value is None and name in read:
                raise UserError(
                    f"config.objective.{name} is needed when config.objective.{choice} is "
                    f"{chosen!r}."
                )
            if value is not None and name not in read and f"[{name}]" not in read:
                raise UserError(
                    f"config.objective.{name} is not read when config.objective.{choice} is "
                    f"{chosen!r}: set it to None (got {value!r})."
                )
    above_0 = {name.strip("[]") for names in LOSS_PARAMETERS.values() for name in names}
    for name in sorted(above_0 | {"cov_share", "gpg_norm"}):
        value = getattr(objective, name)
        if value is not None:
            require(value > 0, f"objective.{name}", value, "greater than 0")
    within = {
        # clip_low 1 leaves the lower bound open: a ratio is never negative.
        "clip_low": (lambda x: x <= 1, "at most 1"),
        "clip_dual": (lambda x: x > 1, "above 1"),
        "cov_share": (lambda x: x <= 1, "at most 1"),
        "std_ddof": (lambda x: x in (0, 1), "0 or 1"),
        "gamma": (lambda x: 0 < x <= 1, "in (0, 1]"),
        "gae_lambda": (lambda x: 0 <= x <= 1, "in [0, 1]"),
    }  # fmt: skip
    for name, (holds, wanted) in within.items():
        value = getattr(objective, name)
        if value is not None:
            require(holds(value), f"objective.{name}", value, wanted)
    if objective.cov_low is not None and not objective.cov_low < objective.cov_high:
        raise UserError(
            f"config.objective.cov_low ({objective.cov_low}) must be below "
            f"config.objective.cov_high ({objective.cov_high})."
        )
    for prefix in ("", "reward_"):
        _check_kl(objective, prefix)


def _check_kl(objective: Any, prefix: str) -> None:
    """A KL term has an estimator; without one, nothing of it is given."""
    coefficient = getattr(objective, f"{prefix}kl_coefficient")
    field = f"objective.{prefix}kl_coefficient"
    require(coefficient >= 0, field, coefficient, "0 or more")
    estimator = getattr(objective, f"{prefix}kl_estimator")
    if (coefficient > 0) != (estimator is not None):
        raise UserError(
            f"config.objective.{prefix}kl_estimator is needed with a positive config.{field} and "
            f"must be None without one; got {estimator!r} and {coefficient}."
        )
    if not prefix:
        return
    target, horizon = objective.reward_kl_target, objective.reward_kl_horizon
    if (target is None) != (horizon is None) or (target is not None and coefficient == 0):
        raise UserError(
            "config.objective.reward_kl_target and reward_kl_horizon adapt a positive "
            "config.objective.reward_kl_coefficient: give both, or set both to None for a fixed "
            f"one; got {target!r} and {horizon!r} with coefficient {coefficient}."
        )
    for name, value in (("target", target), ("horizon", horizon)):
        if value is not None:
            require(value > 0, f"objective.reward_kl_{name}", value, "greater than 0")


def _check_ratio(config: Any) -> None:
    """The loss has the ratio that its updates need."""
    loss, rollout, train = config.objective.loss, config.rollout, config.train
    if loss in ("gspo", "gspo-token") and rollout.log_prob_source == "rollout":
        # GSPO's bounds are 3e-4 and 4e-4; between these programs 1e-2 nats a token lie.
        for field, value, exact in (
            ("model.compute_dtype", config.model.compute_dtype, "float32"),
            ("rollout.cache_dtype", rollout.cache_dtype, "auto"),
        ):
            if value != exact:
                raise UserError(
                    f"config.{field} {value!r} makes the rollout's log-probs differ from the "
                    "training program's by more than the bounds of "
                    f"config.objective.loss {loss!r}, so that rounding decides which responses "
                    "are clipped: set config.rollout.log_prob_source to 'recompute', or "
                    f"{field.split('.')[1]} to {exact!r}."
                )
    c = config.correction
    corrected = c is not None and c.policy == "current" and c.importance != "none"
    updates = train.prompts_per_step // max(1, train.prompts_per_update)
    if loss == "policy-gradient" and updates > 1 and not corrected:
        raise UserError(
            f"config.objective.loss {loss!r} has no ratio to the policy that sampled: the "
            f"{updates} updates of a step after the first would be off policy without a "
            f"correction. Set config.train.prompts_per_update to {train.prompts_per_step} "
            f"(config.train.prompts_per_step; got {train.prompts_per_update}), or give "
            "config.correction with policy 'current' and importance weights."
        )


def _check_advantage(config: Any) -> None:
    """What an advantage needs of the rest of the config."""
    o, group_size = config.objective, config.rollout.group_size
    alone = ("gae", "reinforce++", "remax")
    if group_size < 2 and o.advantage not in alone:
        raise UserError(
            f"config.objective.advantage {o.advantage!r} compares the responses of a group: "
            f"config.rollout.group_size must be at least 2; got {group_size}. Of a single "
            f"response, one of {', '.join(alone)} can be computed."
        )
    if o.advantage == "maxrl":
        why = "for objective.advantage 'maxrl', whose mean is a pass rate"
        r = config.reward
        require(r.incorrect >= 0, "reward.incorrect", r.incorrect, f"0 or more {why}")
        require(r.overlong_penalty == 0, "reward.overlong_penalty", r.overlong_penalty, f"0 {why}")
        kl = o.reward_kl_coefficient
        require(kl == 0, "objective.reward_kl_coefficient", kl, f"0 {why}")
    if o.advantage == "grpo-process" and not o.outcome_as_step:
        why = (
            "0 for objective.advantage 'grpo-process', which reads the rewards of steps alone; or "
            "set config.objective.outcome_as_step to True"
        )
        penalty, kl = config.reward.overlong_penalty, o.reward_kl_coefficient
        require(penalty == 0, "reward.overlong_penalty", penalty, why)
        require(kl == 0, "objective.reward_kl_coefficient", kl, why)
    if o.advantage == "gdpo":
        num = config.num_scorers + 1
        wanted = f"{num} numbers, for the reward by each scorer and the overlong one"
        weights = o.component_weights
        require(len(weights) == num, "objective.component_weights", weights, wanted)
        require(
            o.reward_kl_coefficient == 0,
            "objective.reward_kl_coefficient",
            o.reward_kl_coefficient,
            "0 for objective.advantage 'gdpo', which reads the components of the reward",
        )


def _check_correction(config: Any) -> None:
    correction, source = config.correction, config.rollout.log_prob_source
    if correction is None:
        return
    if correction.policy == "old" and source == "rollout":
        raise UserError(
            "config.correction.policy 'old' corrects the rollout's log-probs by the training "
            "program's: set config.rollout.log_prob_source to 'recompute', or policy to 'current'."
        )
    used = correction.importance != "none"
    for name in ("importance_cap", "importance_floor"):
        value = getattr(correction, name)
        if value is None and used and name == "importance_cap":
            raise UserError("config.correction.importance_cap is needed with importance weights.")
        if value is not None:
            if not used:
                raise UserError(
                    f"config.correction.{name} is not read when config.correction.importance is "
                    f"'none': set it to None (got {value!r})."
                )
            require(value > 0, f"correction.{name}", value, "greater than 0")
    if correction.importance_floor is not None:
        wanted = f"at most config.correction.importance_cap ({correction.importance_cap})"
        floor = correction.importance_floor
        require(floor <= correction.importance_cap, "correction.importance_floor", floor, wanted)
    if correction.normalise and not used:
        raise UserError("config.correction.normalise is not read without importance weights.")
    if used and correction.policy == "current" and config.objective.loss != "policy-gradient":
        raise UserError(
            f"config.objective.loss {config.objective.loss!r} holds the ratio to the rollout "
            "already; importance weights of config.correction.policy 'current' would count it "
            "twice. Use loss 'policy-gradient', or log_prob_source 'recompute' with policy 'old'."
        )
    for i, (statistic, floor, cap) in enumerate(correction.reject):
        field = f"correction.reject[{i}]"
        if statistic not in STATISTICS:
            raise UserError(f"config.{field}: {statistic!r} is not one of {', '.join(STATISTICS)}.")
        ratio = statistic.endswith("k1")
        ok = cap > 0 and (0 < floor <= cap if ratio and floor is not None else floor is None)
        wanted = (
            f"({statistic!r}, floor, cap) with 0 < floor <= cap, bounds of a ratio"
            if ratio
            else f"({statistic!r}, None, cap) with cap above 0, in nats"
        )
        require(ok and (not ratio or floor is not None), field, (statistic, floor, cap), wanted)
    delta = correction.sequence_mask_delta
    if delta is not None:
        require(delta > 0, "correction.sequence_mask_delta", delta, "greater than 0")
    if not (used or correction.reject or delta is not None):
        raise UserError("config.correction corrects nothing: set it to None.")


def _check_critic(config: Any) -> None:
    critic, advantage = config.critic, config.objective.advantage
    if (critic is not None) != (advantage == "gae"):
        raise UserError(
            "config.critic is needed when config.objective.advantage is 'gae' and must be None "
            f"otherwise; got {advantage!r} and critic {'None' if critic is None else 'given'}."
        )
    if critic is not None:
        positive(config, "critic.learning_rate", "critic.value_clip")
        non_negative(config, "critic.warmup_steps", "critic.head_start_steps")
        wanted = f"below config.train.num_steps ({config.train.num_steps})"
        head_start = critic.head_start_steps
        require(head_start < config.train.num_steps, "critic.head_start_steps", head_start, wanted)
