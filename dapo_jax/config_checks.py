"""What a config must satisfy beyond names and types: ranges, and relations between fields."""

import math
import re
from typing import Any

from dapo_jax.parameters import (
    ADVANTAGE_PARAMETERS,
    LOSS_PARAMETERS,
    SELECTION_PARAMETERS,
    STATISTICS,
    parse_scorers,
)
from dapo_jax.types import UserError


def _require(condition: bool, field: str, value: Any, wanted: str) -> None:
    if not condition:
        raise UserError(f"config.{field} must be {wanted}; got {value!r}.")


def _positive(config: Any, *fields: str) -> None:
    for field in fields:
        value = _get(config, field)
        _require(value > 0, field, value, "greater than 0")


def _non_negative(config: Any, *fields: str) -> None:
    for field in fields:
        value = _get(config, field)
        _require(value >= 0, field, value, "0 or more")


def _get(config: Any, field: str) -> Any:
    for name in field.split("."):
        config = getattr(config, name)
    return config


def _divides(config: Any, small: str, large: str) -> None:
    a, b = _get(config, small), _get(config, large)
    if b % a:
        raise UserError(
            f"config.{small} ({a}) must divide config.{large} ({b}). "
            f"Nearest that do: {b - b % a or a} or {b + a - b % a} for config.{large}."
        )


def check_model(config: Any) -> None:
    """Checks the model of a config.

    Raises:
        UserError: as `check`.
    """
    model = config.model
    _positive(
        config,
        *(f"model.{n}" for n in ("vocab_size", "num_layers", "width", "num_heads", "num_kv_heads")),
        *(f"model.{n}" for n in ("head_dim", "ff_width", "rope_theta", "rms_norm_eps")),
        "model.log_prob_chunk_tokens",
    )
    for token in model.stop_token_ids:
        wanted = f"in the vocabulary: from 0 to {model.vocab_size - 1}"
        _require(0 <= token < model.vocab_size, "model.stop_token_ids", token, wanted)
    _divides(config, "model.num_kv_heads", "model.num_heads")
    _require(model.head_dim % 2 == 0, "model.head_dim", model.head_dim, "even (rotary pairs)")


def check(config: Any) -> None:
    """Checks ranges and relations between the fields of a `Config`.

    Raises:
        UserError: names the field, the value and the remedy.
    """
    rollout, train = config.rollout, config.train
    check_model(config)
    _positive(
        config,
        "data.max_prompt_tokens",
        *(f"rollout.{n}" for n in ("group_size", "max_response_tokens", "temperature", "slots")),
        *(f"rollout.{n}" for n in ("prefill_prompts", "prefill_chunk_tokens", "decode_steps")),
        "rollout.page_tokens",
        *("reward.workers", "reward.timeout_seconds"),
        *("dynamic_sampling.max_rounds", "dynamic_sampling.max_round_prompts"),
        *("optimizer.learning_rate", "optimizer.eps", "optimizer.max_grad_norm"),
        "optimizer.max_nonfinite_updates",
        *(f"train.{n}" for n in ("num_steps", "prompts_per_step", "prompts_per_update")),
        *("train.row_tokens", "train.rows_per_micro_batch"),
        *("evaluation.every_steps", "evaluation.num_samples"),
        *("checkpoint.every_steps", "checkpoint.keep_newest"),
    )
    _non_negative(
        config,
        *("seed", "reward.overlong_buffer_tokens", "reward.overlong_penalty"),
        *("objective.entropy_coefficient", "optimizer.warmup_steps", "optimizer.weight_decay"),
        *("checkpoint.keep_best", "log.rollouts_per_step", "evaluation.temperature"),
    )
    for field in ("rollout.top_p", "evaluation.top_p"):
        value = _get(config, field)
        _require(0 < value <= 1, field, value, "in (0, 1]")
    for field in ("optimizer.beta1", "optimizer.beta2"):
        value = _get(config, field)
        _require(0 <= value < 1, field, value, "in [0, 1)")
    _require(all(rollout.stop_strings), "rollout.stop_strings", rollout.stop_strings,
             "texts that are not empty; () for none")  # fmt: skip
    objective = config.objective
    _check_parameters(objective)
    _check_data(config)
    _check_advantage(config)
    _check_correction(config)
    _check_critic(config)
    decay, final = config.optimizer.decay, config.optimizer.final_rate_share
    if (decay == "cosine") != (final is not None):
        raise UserError(
            "config.optimizer.final_rate_share is needed with decay 'cosine' and must be None "
            f"otherwise; got {final!r} with {decay!r}."
        )
    if final is not None:
        _require(0 <= final <= 1, "optimizer.final_rate_share", final, "in [0, 1]")
    _divides(config, "train.prompts_per_update", "train.prompts_per_step")
    longest = config.data.max_prompt_tokens + rollout.max_response_tokens
    if train.row_tokens < longest:
        raise UserError(
            f"config.train.row_tokens ({train.row_tokens}) is shorter than the longest sequence: "
            f"config.data.max_prompt_tokens ({config.data.max_prompt_tokens}) + "
            f"config.rollout.max_response_tokens ({rollout.max_response_tokens}) = {longest}. "
            f"Set it to {longest} or more."
        )
    reward = config.reward
    if reward.overlong_buffer_tokens >= rollout.max_response_tokens:
        raise UserError(
            f"config.reward.overlong_buffer_tokens ({reward.overlong_buffer_tokens}) must be less "
            f"than config.rollout.max_response_tokens ({rollout.max_response_tokens}): it is the "
            "last part of the response in which the punishment grows."
        )
    if (reward.overlong_buffer_tokens == 0) != (reward.overlong_penalty == 0):
        raise UserError(
            "config.reward.overlong_buffer_tokens and config.reward.overlong_penalty are both 0 "
            f"(no soft overlong punishment) or both positive; got {reward.overlong_buffer_tokens} "
            f"and {reward.overlong_penalty}."
        )
    _require(reward.correct > reward.incorrect, "reward.correct", reward.correct,
             f"greater than config.reward.incorrect ({reward.incorrect})")  # fmt: skip
    if rollout.top_p < 1 and rollout.log_prob_source == "rollout":
        raise UserError(
            f"config.rollout.top_p ({rollout.top_p}) below 1 makes the rollout's log-probs those "
            "of the nucleus, which the trained policy does not have: set "
            "config.rollout.log_prob_source to 'recompute', or top_p to 1."
        )
    if (
        rollout.cache_dtype == "int8"
        and rollout.log_prob_source == "rollout"
        and config.correction is None
    ):
        raise UserError(
            "config.rollout.cache_dtype 'int8' makes the rollout's log-probs those of rounded keys "
            "and values, which the trained policy does not have: set "
            "config.rollout.log_prob_source to 'recompute', or config.correction, or cache_dtype "
            "to 'auto'."
        )
    if not objective.overlong_filter and not objective.overlong_in_baseline:
        raise UserError(
            "config.objective.overlong_in_baseline = False is read only with "
            "config.objective.overlong_filter = True; set it to True."
        )
    if config.dynamic_sampling.enabled and rollout.group_size < 2:
        raise UserError(
            "config.dynamic_sampling.enabled needs config.rollout.group_size of at least 2: a "
            "group of one is always all right or all wrong."
        )
    _check_prefilter(config.dynamic_sampling)
    _check_pretrain(config)
    _check_mesh(config.mesh)


def _check_prefilter(sampling: Any) -> None:
    p, prefix = sampling.prefilter, "dynamic_sampling.prefilter"
    if p.enabled and not sampling.enabled:
        raise UserError(
            f"config.{prefix}.enabled needs config.dynamic_sampling.enabled: without it a batch "
            "holds whatever was sampled. Set both to True, or the first to False."
        )
    low, high = p.min_probability, p.max_probability
    _require(0 < low <= 1, f"{prefix}.min_probability", low, "in (0, 1]")
    wanted = f"from config.{prefix}.min_probability ({low}) to 1"
    _require(low <= high <= 1, f"{prefix}.max_probability", high, wanted)
    wanted = f"between the bounds config.{prefix}.min_probability and max_probability"
    _require(low <= p.initial_probability <= high, f"{prefix}.initial_probability",
             p.initial_probability, f"{wanted} ({low} and {high})")  # fmt: skip
    for name in ("probability_step", "target_easy", "target_hard"):
        value = getattr(p, name)
        _require(0 <= value <= 1, f"{prefix}.{name}", value, "in [0, 1]")
    # Above 0, so that no prompt is left out for ever.
    _require(0 < p.min_sampled <= 1, f"{prefix}.min_sampled", p.min_sampled, "in (0, 1]")
    _require(p.max_skips > 0, f"{prefix}.max_skips", p.max_skips, "greater than 0")


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
    positive = {name.strip("[]") for names in LOSS_PARAMETERS.values() for name in names}
    for name in sorted(positive | {"cov_share", "gpg_norm"}):
        value = getattr(objective, name)
        if value is not None:
            _require(value > 0, f"objective.{name}", value, "greater than 0")
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
            _require(holds(value), f"objective.{name}", value, wanted)
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
    _require(coefficient >= 0, field, coefficient, "0 or more")
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
            _require(value > 0, f"objective.reward_kl_{name}", value, "greater than 0")


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
            _require(value > 0, f"correction.{name}", value, "greater than 0")
    if correction.importance_floor is not None:
        wanted = f"at most config.correction.importance_cap ({correction.importance_cap})"
        floor = correction.importance_floor
        _require(floor <= correction.importance_cap, "correction.importance_floor", floor, wanted)
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
        _require(ok and (not ratio or floor is not None), field, (statistic, floor, cap), wanted)
    delta = correction.sequence_mask_delta
    if delta is not None:
        _require(delta > 0, "correction.sequence_mask_delta", delta, "greater than 0")
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
        _positive(config, "critic.learning_rate", "critic.value_clip")
        _non_negative(config, "critic.warmup_steps", "critic.head_start_steps")
        wanted = f"below config.train.num_steps ({config.train.num_steps})"
        head_start = critic.head_start_steps
        _require(head_start < config.train.num_steps, "critic.head_start_steps", head_start, wanted)


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
        _require(r.incorrect >= 0, "reward.incorrect", r.incorrect, f"0 or more {why}")
        _require(r.overlong_penalty == 0, "reward.overlong_penalty", r.overlong_penalty, f"0 {why}")
        kl = o.reward_kl_coefficient
        _require(kl == 0, "objective.reward_kl_coefficient", kl, f"0 {why}")
    if o.advantage == "gdpo":
        num = config.num_scorers + 1
        wanted = f"{num} numbers, for the reward by each scorer and the overlong one"
        weights = o.component_weights
        _require(len(weights) == num, "objective.component_weights", weights, wanted)
        _require(
            o.reward_kl_coefficient == 0,
            "objective.reward_kl_coefficient",
            o.reward_kl_coefficient,
            "0 for objective.advantage 'gdpo', which reads the components of the reward",
        )


def _check_data(config: Any) -> None:
    data = config.data
    for side in ("train", "heldout"):
        chosen = getattr(data, side)
        if not chosen:
            raise UserError(f"config.data.{side} names no source; give at least one.")
        for name, source in chosen.items():
            _check_source(source, side, name)
    _require(
        data.prompt_template is None or "{prompt}" in data.prompt_template,
        "data.prompt_template",
        data.prompt_template,
        "None or a text that contains {prompt}",
    )
    if data.system_prompt is not None and not data.chat:
        raise UserError(
            "config.data.system_prompt is not read when config.data.chat is False: set it to None "
            f"(got {data.system_prompt!r})."
        )
    _check_scorer(config.reward.scorer, "reward.scorer")


def _check_source(source: Any, side: str, name: str) -> None:
    field = f"data.{side}.{name}"
    if not isinstance(name, str) or not re.fullmatch(r"[\w-]+", name):
        raise UserError(
            f"config.data.{side}: {name!r} cannot be the name of a source, which is part of the "
            "names of metrics: use letters, digits, '_' and '-'."
        )
    if side == "train":
        ok = source.weight is not None and 0 < source.weight < math.inf
        _require(ok, f"{field}.weight", source.weight, "greater than 0, and finite")
    else:
        _require(
            source.weight is None, f"{field}.weight", source.weight, "None: all problems are tried"
        )
    if source.num_problems is not None:
        _require(source.num_problems > 0, f"{field}.num_problems", source.num_problems, "above 0")
    if source.scorer is not None:
        _check_scorer(source.scorer, f"{field}.scorer")
    if source.path == "arithmetic":
        _require(
            source.num_problems is not None, f"{field}.num_problems", None, "given for arithmetic"
        )
        _check_num_terms(source.num_terms, f"{field}.num_terms")
        sides = ("train", "heldout")
        _require(source.split in sides, f"{field}.split", source.split, "'train' or 'heldout'")
        unread = ("prompt_key", "answer_key", "answer_in")
    else:
        unread = ("num_terms",)
    for unread_name in unread:
        value = getattr(source, unread_name)
        if value is not None:
            raise UserError(
                f"config.{field}.{unread_name} is not read when config.{field}.path is "
                f"{source.path!r}: set it to None (got {value!r})."
            )
    if source.prompt_template is not None:
        _require(
            "{prompt}" in source.prompt_template,
            f"{field}.prompt_template",
            source.prompt_template,
            "None or a text that contains {prompt}",
        )


def _check_scorer(scorer: str, field: str) -> None:
    try:
        parse_scorers(scorer)
    except ValueError as error:
        raise UserError(
            f"config.{field} ({scorer!r}) must be a scorer, or a sum such as 'math_dapo + 0.1 * "
            f"answer_format': {error}."
        ) from error


def _check_num_terms(levels: Any, field: str) -> None:
    ok = bool(levels) and all(2 <= n <= 11 for n in levels)
    _require(ok, field, levels, "a non-empty tuple of integers from 2 to 11")


def _check_pretrain(config: Any) -> None:
    model, pretrain = config.model, config.pretrain
    if model.path is not None and pretrain is not None:
        raise UserError(
            "config.pretrain makes a base model when config.model.path is None, and must be "
            f"None otherwise; got path={model.path!r} and pretrain given."
        )
    if pretrain is None:
        if model.tokenizer is None and model.path is None:
            raise UserError(
                "config.model.tokenizer is needed when config.pretrain and config.model.path are "
                "None."
            )
        return
    if model.tokenizer is not None:
        raise UserError(
            "config.pretrain fits the base model on generated arithmetic: it needs "
            f"config.model.tokenizer = None; got {model.tokenizer!r}."
        )
    _check_num_terms(pretrain.num_terms, "pretrain.num_terms")
    _positive(config, "pretrain.num_steps", "pretrain.rows_per_step", "pretrain.learning_rate")
    warmup, steps = pretrain.warmup_steps, pretrain.num_steps
    wanted = f"at least 0 and below config.pretrain.num_steps ({steps})"
    _require(0 <= warmup < steps, "pretrain.warmup_steps", warmup, wanted)
    for name in ("share_guess", "guess_accuracy", "share_slip", "share_ramble"):
        value = getattr(pretrain, name)
        _require(0 <= value < 1, f"pretrain.{name}", value, "in [0, 1)")
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    row_tokens = pretrain.row_tokens
    wanted = f"at least {longest}, a prompt with its response"
    _require(row_tokens >= longest, "pretrain.row_tokens", row_tokens, wanted)


def _check_mesh(mesh: Any) -> None:
    sizes = {"data": mesh.data, "fsdp": mesh.fsdp, "tensor": mesh.tensor}
    for name, size in sizes.items():
        _require(size == -1 or size > 0, f"mesh.{name}", size, "positive, or -1 for the rest")
    if sum(size == -1 for size in sizes.values()) > 1:
        raise UserError(f"config.mesh: at most one axis may be -1; got {sizes}.")
    for logical, axis in mesh.rules:
        if axis is not None and axis not in sizes:
            raise UserError(
                f"config.mesh.rules sends {logical!r} to {axis!r}, which is not a mesh axis "
                f"({', '.join(sizes)})."
            )
