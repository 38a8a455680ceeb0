"""Checks of a config's objective: loss, advantage, KL, correction and critic."""

import dataclasses
import math
from typing import TYPE_CHECKING

from dapo_jax.config.checks import require, require_unset
from dapo_jax.types import UserError
from dapo_jax.utils import fields

if TYPE_CHECKING:  # dapo_jax.config.schema calls these checks
    from dapo_jax.config.schema import Config, CorrectionConfig, ObjectiveConfig

# Advantages whose baseline is not the group's: a prompt with one response, or all right, teaches.
WITHOUT_GROUPS = ("gae", "reinforce++", "remax")


def with_arguments(objective: "ObjectiveConfig") -> "ObjectiveConfig":
    """Returns the objective with every argument of its loss and its advantage.

    Raises:
        UserError: there is no such method, or it does not take these arguments.
    """
    from dapo_jax.algorithms.advantages import ADVANTAGES
    from dapo_jax.algorithms.aggregation import AGGREGATIONS
    from dapo_jax.algorithms.losses import LOSSES  # here: reading a config.json takes no JAX

    every = (("loss", LOSSES), ("aggregation", AGGREGATIONS), ("advantage", ADVANTAGES))
    for name, methods in every:
        chosen = getattr(objective, name)
        require(chosen in methods, f"objective.{name}", chosen, f"one of {', '.join(methods)}")
    loss, advantage = LOSSES[objective.loss], ADVANTAGES[objective.advantage]
    for name in ("clip_low", "clip_high", "clip_dual"):
        value, when = getattr(objective, name), f"objective.loss is {objective.loss!r}"
        if name not in loss.clips:
            require_unset(f"objective.{name}", value, when)
        elif value is None and name != "clip_dual":
            raise UserError(f"config.objective.{name} is needed when config.{when}.")
    place, kind = "config.objective.loss_args", f"the loss {objective.loss!r}"
    loss_args = fields.bind(loss.arguments, objective.loss_args, place, kind)
    if "cov_low" in loss_args and not loss_args["cov_low"] < loss_args["cov_high"]:
        raise UserError(
            f"config.objective.loss_args.cov_low ({loss_args['cov_low']}) must be below cov_high "
            f"({loss_args['cov_high']})."
        )
    place, kind = "config.objective.advantage_args", f"the advantage {objective.advantage!r}"
    advantage_args = fields.bind(advantage.arguments, objective.advantage_args, place, kind)
    return dataclasses.replace(objective, loss_args=loss_args, advantage_args=advantage_args)


def check(config: "Config") -> None:
    """Raises UserError for the first contradiction in the objective, or between it and the rest."""
    objective = config.objective
    _check_kl(objective)
    _check_reward_kl(config)
    _check_entropy(config)
    _check_advantage(config)
    if config.correction is not None:
        _check_correction(config, config.correction)
    _check_critic(config)
    _check_ratio(config)
    if not objective.overlong_filter:
        in_baseline, when = objective.overlong_in_baseline, "objective.overlong_filter is False"
        require_unset("objective.overlong_in_baseline", in_baseline, when, True)


def _check_kl(objective: "ObjectiveConfig") -> None:
    estimator, coefficient = objective.kl_estimator, objective.reward_kl_coefficient
    if objective.kl_coefficient == coefficient == 0:
        when = "objective.kl_coefficient and config.objective.reward_kl_coefficient are 0"
        require_unset("objective.kl_estimator", estimator, when, type(objective).kl_estimator)
    wanted = (
        "without + in the reward (config.objective.reward_kl_coefficient), which has no gradient"
    )
    ok = coefficient == 0 or not estimator.endswith("+")
    require(ok, "objective.kl_estimator", estimator, wanted)
    adaptation = objective.reward_kl_adaptation
    if adaptation is not None and coefficient == 0:
        raise UserError(
            "config.objective.reward_kl_adaptation adapts a positive "
            "config.objective.reward_kl_coefficient: give one, or set reward_kl_adaptation to "
            f"None; got {adaptation!r} with coefficient {coefficient}."
        )


def _check_reward_kl(config: "Config") -> None:
    """Checks that one step cannot turn the sign of the coefficient of the KL in the reward."""
    adaptation = config.objective.reward_kl_adaptation
    responses = config.train.prompts_per_step * config.rollout.group_size
    if adaptation is not None and adaptation[1] <= 0.2 * responses:
        raise UserError(
            f"config.objective.reward_kl_adaptation has a horizon of {adaptation[1]:,} responses, "
            f"and a step has {responses:,}: its coefficient would change by more than the whole "
            f"in one step. Set a horizon above {0.2 * responses:,.0f}."
        )


def _check_entropy(config: "Config") -> None:
    """Checks that the entropy can be at either side of its target."""
    adaptation, size = config.objective.entropy_adaptation, config.model.vocab_size
    if adaptation is not None and adaptation[0] >= math.log(size):
        raise UserError(
            f"config.objective.entropy_adaptation has a target of {adaptation[0]} nats per token, "
            f"and no distribution over {size} tokens (config.model.vocab_size) has more than "
            f"{math.log(size):.3f}: the coefficient would grow without end. Set a lower target."
        )


def _check_ratio(config: "Config") -> None:
    """Checks that the loss has the ratio that its updates need."""
    loss, rollout, train = config.objective.loss, config.rollout, config.train
    c, dtype = config.correction, config.model.compute_dtype
    if loss in ("gspo", "gspo-token") and dtype != "float32":
        # GSPO's bounds are 3e-4 and 4e-4; these programs differ by 1e-2 nats a token.
        text = (
            f"config.model.compute_dtype {dtype!r} makes the rollout's log-probs differ from the "
            f"training program's by more than the bounds of config.objective.loss {loss!r}, so "
            "that rounding decides which responses are clipped: set"
        )
        if rollout.log_prob_source == "rollout":
            raise UserError(
                f"{text} config.rollout.log_prob_source to 'recompute', or compute_dtype to "
                "'float32'."
            )
        if rollout.max_staleness > 0 and (c is None or c.policy != "proximal"):
            raise UserError(
                f"{text} config.correction.policy to 'proximal', so that those of stale tokens are "
                "computed again too, or compute_dtype to 'float32'."
            )
    weighted = c is not None and c.importance is not None
    if loss == "policy-gradient" and rollout.max_staleness > 0 and not weighted:
        raise UserError(
            f"config.objective.loss {loss!r} has no ratio to the policy that sampled: stale tokens "
            "would be off policy without a correction. Set config.rollout.max_staleness to 0 (got "
            f"{rollout.max_staleness}), or give config.correction with importance weights."
        )
    corrected = c is not None and c.policy == "current" and c.importance is not None
    updates = train.prompts_per_step // train.prompts_per_update
    if loss == "policy-gradient" and updates > 1 and not corrected:
        raise UserError(
            f"config.objective.loss {loss!r} has no ratio to the policy that sampled: the "
            f"{updates} updates of a step after the first would be off policy without a "
            f"correction. Set config.train.prompts_per_update to {train.prompts_per_step} "
            f"(config.train.prompts_per_step; got {train.prompts_per_update}), or give "
            "config.correction with policy 'current' and importance weights."
        )


def _check_advantage(config: "Config") -> None:
    """Checks the fields that an advantage depends on."""
    o, r, group_size = config.objective, config.reward, config.rollout.group_size
    if group_size < 2 and o.advantage not in WITHOUT_GROUPS:
        raise UserError(
            f"config.objective.advantage {o.advantage!r} compares the responses of a group: "
            f"config.rollout.group_size must be at least 2; got {group_size}. A single response "
            f"needs one of {', '.join(WITHOUT_GROUPS)}."
        )
    kl, why = o.reward_kl_coefficient, None
    if o.advantage == "maxrl":
        why = "for objective.advantage 'maxrl', whose mean is a pass rate"
        require(r.incorrect >= 0, "reward.incorrect", r.incorrect, f"0 or more {why}")
    if o.advantage == "gpg":
        why = "for objective.advantage 'gpg', which counts the rewards that are not 0"
        require(r.incorrect == 0, "reward.incorrect", r.incorrect, f"0 {why}")
    if o.advantage == "grpo-process" and not o.advantage_args["outcome_as_step"]:
        why = (
            "for objective.advantage 'grpo-process', which reads the rewards of steps alone; or "
            "set config.objective.advantage_args.outcome_as_step to True"
        )
    if why is not None:  # the punishment and the KL would be parts of the reward
        require(r.overlong_penalty == 0, "reward.overlong_penalty", r.overlong_penalty, f"0 {why}")
        require(kl == 0, "objective.reward_kl_coefficient", kl, f"0 {why}")
    if o.advantage == "gdpo":
        num, weights = config.num_scorers + 1, o.advantage_args["component_weights"]
        wanted = f"{num} numbers, for the reward by each scorer and the overlong one"
        place = "objective.advantage_args.component_weights"
        require(len(weights) == num, place, weights, wanted)
        why = "for objective.advantage 'gdpo', which reads the components of the reward"
        require(kl == 0, "objective.reward_kl_coefficient", kl, f"0 {why}")


def _check_correction(config: "Config", correction: "CorrectionConfig") -> None:
    if correction.policy != "current" and config.rollout.log_prob_source == "rollout":
        raise UserError(
            f"config.correction.policy {correction.policy!r} corrects the rollout's log-probs by "
            "the training program's: set config.rollout.log_prob_source to 'recompute', or policy "
            "to 'current'."
        )
    if correction.policy == "proximal":
        staleness = config.rollout.max_staleness
        wanted = "above 0 for config.correction.policy 'proximal', which is for stale tokens"
        require(staleness > 0, "rollout.max_staleness", staleness, wanted)
    if correction.importance is not None:
        _, floor, cap = correction.importance
        wanted = "(level, floor or None, cap) with a floor of at most the cap"
        ok = floor is None or floor <= cap
        require(ok, "correction.importance", correction.importance, wanted)
    twice = correction.policy == "current" and config.objective.loss != "policy-gradient"
    if correction.importance is not None and twice:
        raise UserError(
            f"config.objective.loss {config.objective.loss!r} already has the ratio to the "
            "rollout; importance weights of config.correction.policy 'current' would count it "
            "twice. Use loss 'policy-gradient', or log_prob_source 'recompute' with policy 'old'."
        )
    for i, (statistic, low, high) in enumerate(correction.reject):
        if statistic.endswith("k1"):
            ok = low is not None and 0 < low <= high
            wanted = f"({statistic!r}, floor, cap) with 0 < floor <= cap, bounds of a ratio"
        else:
            ok = low is None and high > 0
            wanted = f"({statistic!r}, None, cap) with cap above 0, in nats"
        require(ok, f"correction.reject[{i}]", (statistic, low, high), wanted)
    if not (correction.importance or correction.reject):
        raise UserError("config.correction corrects nothing: set it to None.")


def _check_critic(config: "Config") -> None:
    critic, o = config.critic, config.objective
    if (critic is not None) != o.reads("values_M"):
        raise UserError(
            "config.critic is needed when config.objective.advantage is 'gae' and must be None "
            f"otherwise; got {o.advantage!r} and critic {'None' if critic is None else 'given'}."
        )
    if critic is not None:
        wanted = f"below config.train.num_steps ({config.train.num_steps})"
        head_start = critic.head_start_steps
        require(head_start < config.train.num_steps, "critic.head_start_steps", head_start, wanted)
