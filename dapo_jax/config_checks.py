"""What a config must satisfy beyond names and types: ranges, and relations between fields.

Those of the objective are in `dapo_jax.objective_checks`.
"""

import math
import re
from typing import Any

from dapo_jax import objective_checks
from dapo_jax.parameters import parse_scorers
from dapo_jax.requirements import divides, get, non_negative, positive, require
from dapo_jax.types import UserError


def check_model(config: Any) -> None:
    """Checks the model of a config.

    Raises:
        UserError: as `check`.
    """
    model = config.model
    positive(
        config,
        *(f"model.{n}" for n in ("vocab_size", "num_layers", "width", "num_heads", "num_kv_heads")),
        *(f"model.{n}" for n in ("head_dim", "ff_width", "rope_theta", "rms_norm_eps")),
        "model.log_prob_chunk_tokens",
    )
    for token in model.stop_token_ids:
        wanted = f"in the vocabulary: from 0 to {model.vocab_size - 1}"
        require(0 <= token < model.vocab_size, "model.stop_token_ids", token, wanted)
    divides(config, "model.num_kv_heads", "model.num_heads")
    require(model.head_dim % 2 == 0, "model.head_dim", model.head_dim, "even (rotary pairs)")


def check_training(config: Any) -> None:
    """Checks what training alone needs of a config.

    Raises:
        UserError: as `check`.
    """
    if config.model.param_dtype == "bfloat16":
        raise UserError(
            "config.model.param_dtype 'bfloat16' is for evaluation: updates at "
            f"config.optimizer.learning_rate {config.optimizer.learning_rate:g} are smaller than "
            "half of what bfloat16 can tell apart, and are rounded away. Set it to 'float32'; "
            "config.model.compute_dtype 'bfloat16' is that of the arithmetic."
        )


def check(config: Any) -> None:
    """Checks ranges and relations between the fields of a `Config`.

    Raises:
        UserError: names the field, the value and the remedy.
    """
    rollout, train = config.rollout, config.train
    check_model(config)
    positive(
        config,
        "data.max_prompt_tokens",
        *(f"rollout.{n}" for n in ("group_size", "max_response_tokens", "temperature", "slots")),
        *(f"rollout.{n}" for n in ("prefill_prompts", "prefill_chunk_tokens", "decode_steps")),
        "rollout.page_tokens",
        *("reward.workers", "reward.timeout_seconds"),
        *(f"dynamic_sampling.max_{n}" for n in ("rounds", "round_prompts", "staleness")),
        *("optimizer.learning_rate", "optimizer.eps", "optimizer.max_grad_norm"),
        "optimizer.max_nonfinite_updates",
        *(f"train.{n}" for n in ("num_steps", "prompts_per_step", "prompts_per_update")),
        *("train.row_tokens", "train.rows_per_micro_batch"),
        *("evaluation.every_steps", "evaluation.num_samples"),
        *("checkpoint.every_steps", "checkpoint.keep_newest"),
    )
    non_negative(
        config,
        *("seed", "reward.overlong_buffer_tokens", "reward.overlong_penalty"),
        *("objective.entropy_coefficient", "optimizer.warmup_steps", "optimizer.weight_decay"),
        *("checkpoint.keep_best", "log.rollouts_per_step", "evaluation.temperature"),
        *("rollout.top_k", "evaluation.top_k"),
        *("rollout.watchdog_seconds", "rollout.watchdog_limit_seconds"),
    )
    require(all(step > 0 for step in config.log.profile_steps), "log.profile_steps",
             config.log.profile_steps, "steps from 1 on; () for none")  # fmt: skip
    for section in ("rollout", "evaluation"):
        top_p, min_p = (get(config, f"{section}.{name}") for name in ("top_p", "min_p"))
        require(0 < top_p <= 1, f"{section}.top_p", top_p, "in (0, 1]; 1 keeps all")
        require(0 <= min_p <= 1, f"{section}.min_p", min_p, "from 0 to 1; 0 keeps all")
    for field in ("optimizer.beta1", "optimizer.beta2"):
        value = get(config, field)
        require(0 <= value < 1, field, value, "in [0, 1)")
    require(all(rollout.stop_strings), "rollout.stop_strings", rollout.stop_strings,
             "texts that are not empty; () for none")  # fmt: skip
    _check_data(config)
    objective_checks.check(config)
    decay, final = config.optimizer.decay, config.optimizer.final_rate_share
    if (decay == "cosine") != (final is not None):
        raise UserError(
            "config.optimizer.final_rate_share is needed with decay 'cosine' and must be None "
            f"otherwise; got {final!r} with {decay!r}."
        )
    if final is not None:
        require(0 <= final <= 1, "optimizer.final_rate_share", final, "in [0, 1]")
    divides(config, "train.prompts_per_update", "train.prompts_per_step")
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
    require(reward.correct > reward.incorrect, "reward.correct", reward.correct,
             f"greater than config.reward.incorrect ({reward.incorrect})")  # fmt: skip
    for name, everything in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
        value = getattr(rollout, name)
        if value != everything and rollout.log_prob_source == "rollout":
            raise UserError(
                f"config.rollout.{name} ({value}) leaves tokens out and makes the rollout's "
                "log-probs those among the rest, which the trained policy does not have: set "
                f"config.rollout.log_prob_source to 'recompute', or {name} to {everything}."
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
    if config.dynamic_sampling.enabled and rollout.group_size < 2:
        raise UserError(
            "config.dynamic_sampling.enabled needs config.rollout.group_size of at least 2: a "
            "group of one is always all right or all wrong."
        )
    _check_sampling(config.dynamic_sampling)
    _check_pretrain(config)
    _check_mesh(config.mesh)


def _check_sampling(sampling: Any) -> None:
    require(sampling.enabled or not sampling.partial_rollouts, "dynamic_sampling.partial_rollouts",
            sampling.partial_rollouts, "False without config.dynamic_sampling.enabled: nothing is "
            "sampled beyond the batch")  # fmt: skip
    p, prefix = sampling.prefilter, "dynamic_sampling.prefilter"
    if p.enabled and not sampling.enabled:
        raise UserError(
            f"config.{prefix}.enabled needs config.dynamic_sampling.enabled: without it a batch "
            "holds whatever was sampled. Set both to True, or the first to False."
        )
    low, high = p.min_probability, p.max_probability
    require(0 < low <= 1, f"{prefix}.min_probability", low, "in (0, 1]")
    wanted = f"from config.{prefix}.min_probability ({low}) to 1"
    require(low <= high <= 1, f"{prefix}.max_probability", high, wanted)
    wanted = f"between the bounds config.{prefix}.min_probability and max_probability"
    require(low <= p.initial_probability <= high, f"{prefix}.initial_probability",
             p.initial_probability, f"{wanted} ({low} and {high})")  # fmt: skip
    for name in ("probability_step", "target_easy", "target_hard"):
        value = getattr(p, name)
        require(0 <= value <= 1, f"{prefix}.{name}", value, "in [0, 1]")
    # Above 0, so that no prompt is left out for ever.
    require(0 < p.min_sampled <= 1, f"{prefix}.min_sampled", p.min_sampled, "in (0, 1]")
    require(p.max_skips > 0, f"{prefix}.max_skips", p.max_skips, "greater than 0")


def _check_data(config: Any) -> None:
    data = config.data
    for side in ("train", "heldout"):
        chosen = getattr(data, side)
        if not chosen:
            raise UserError(f"config.data.{side} names no source; give at least one.")
        for name, source in chosen.items():
            _check_source(source, side, name)
    require(
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
        require(ok, f"{field}.weight", source.weight, "greater than 0, and finite")
    else:
        require(
            source.weight is None, f"{field}.weight", source.weight, "None: all problems are tried"
        )
    if source.num_problems is not None:
        require(source.num_problems > 0, f"{field}.num_problems", source.num_problems, "above 0")
    if source.scorer is not None:
        _check_scorer(source.scorer, f"{field}.scorer")
    if source.path == "arithmetic":
        require(
            source.num_problems is not None, f"{field}.num_problems", None, "given for arithmetic"
        )
        _check_num_terms(source.num_terms, f"{field}.num_terms")
        sides = ("train", "heldout")
        require(source.split in sides, f"{field}.split", source.split, "'train' or 'heldout'")
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
        require(
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
    require(ok, field, levels, "a non-empty tuple of integers from 2 to 11")


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
    positive(config, "pretrain.num_steps", "pretrain.rows_per_step", "pretrain.learning_rate")
    warmup, steps = pretrain.warmup_steps, pretrain.num_steps
    wanted = f"at least 0 and below config.pretrain.num_steps ({steps})"
    require(0 <= warmup < steps, "pretrain.warmup_steps", warmup, wanted)
    for name in ("share_guess", "guess_accuracy", "share_slip", "share_ramble"):
        value = getattr(pretrain, name)
        require(0 <= value < 1, f"pretrain.{name}", value, "in [0, 1)")
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    row_tokens = pretrain.row_tokens
    wanted = f"at least {longest}, a prompt with its response"
    require(row_tokens >= longest, "pretrain.row_tokens", row_tokens, wanted)


def _check_mesh(mesh: Any) -> None:
    split = ("data", "fsdp", "tensor")  # parameters over context as over fsdp
    sizes = {axis: getattr(mesh, axis) for axis in (*split, "context")}
    for name, size in sizes.items():
        require(size == -1 or size > 0, f"mesh.{name}", size, "positive, or -1 for the rest")
    together = mesh.rollout_tensor
    require(together is None or together > 0, "mesh.rollout_tensor", together,
             "positive, or None for as many as config.mesh.tensor")  # fmt: skip
    if sum(size == -1 for size in sizes.values()) > 1:
        raise UserError(f"config.mesh: at most one axis may be -1; got {sizes}.")
    for logical, axis in mesh.rules:
        if axis is not None and axis not in split:
            raise UserError(
                f"config.mesh.rules sends {logical!r} to {axis!r}, which is not a mesh axis for "
                f"parameters ({', '.join(split)})."
            )
