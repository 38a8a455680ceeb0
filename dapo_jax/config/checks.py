"""Relations that must hold between the fields of a config, beyond the range of each.

Those of the objective are in `dapo_jax.config.objective_checks`.
"""

import math
import re
from typing import TYPE_CHECKING

from dapo_jax.rewards.types import CORRECT, parse_scorers
from dapo_jax.types import UserError

if TYPE_CHECKING:  # dapo_jax.config.schema calls these checks
    from dapo_jax.config.schema import Config, MeshConfig, ModelConfig, SourceConfig


def require(condition: bool, field: str, value: object, wanted: str) -> None:
    """Raises UserError unless the condition holds; `wanted` follows "must be"."""
    if not condition:
        raise UserError(f"config.{field} must be {wanted}; got {value!r}.")


def check_divides(small: str, a: int, large: str, b: int) -> None:
    """Raises UserError unless `a`, the value of field `small`, divides `b`, that of `large`."""
    if b % a:
        raise UserError(
            f"config.{small} ({a}) must divide config.{large} ({b}). "
            f"Nearest that do: {b - b % a or a} or {b + a - b % a} for config.{large}."
        )


def check_model(model: "ModelConfig") -> None:
    """Raises UserError for what contradicts itself in a model."""
    for token in model.stop_token_ids:
        wanted = f"in the vocabulary: from 0 to {model.vocab_size - 1}"
        require(0 <= token < model.vocab_size, "model.stop_token_ids", token, wanted)
    check_divides("model.num_kv_heads", model.num_kv_heads, "model.num_heads", model.num_heads)


def check_training(config: "Config") -> None:
    """Raises UserError for what training alone cannot do with a config."""
    if config.model.param_dtype == "bfloat16":
        raise UserError(
            "config.model.param_dtype 'bfloat16' is for evaluation: updates at "
            f"config.optimizer.learning_rate {config.optimizer.learning_rate:g} are smaller than "
            "half of what bfloat16 can tell apart, and are rounded away. Set it to 'float32'; "
            "config.model.compute_dtype 'bfloat16' is that of the arithmetic."
        )


def check(config: "Config") -> None:
    """Raises UserError for the first contradiction: names the fields, the values, the remedy."""
    check_model(config.model)
    _check_data(config)
    _check_lengths(config)
    _check_rollout(config)
    _check_sampling(config)
    _check_pretrain(config)
    _check_mesh(config.mesh)
    t = config.train
    check_divides(
        "train.prompts_per_update", t.prompts_per_update, "train.prompts_per_step",
        t.prompts_per_step,
    )  # fmt: skip


def _check_lengths(config: "Config") -> None:
    train, rollout, reward = config.train, config.rollout, config.reward
    longest = config.data.max_prompt_tokens + rollout.max_response_tokens
    if train.row_tokens < longest:
        raise UserError(
            f"config.train.row_tokens ({train.row_tokens}) is shorter than the longest sequence: "
            f"config.data.max_prompt_tokens ({config.data.max_prompt_tokens}) + "
            f"config.rollout.max_response_tokens ({rollout.max_response_tokens}) = {longest}. "
            f"Set it to {longest} or more."
        )
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
    wanted = f"less than {CORRECT:g}, the reward of a correct response"
    require(reward.incorrect < CORRECT, "reward.incorrect", reward.incorrect, wanted)


def _check_rollout(config: "Config") -> None:
    rollout = config.rollout
    if rollout.log_prob_source == "recompute":
        return
    for name, everything in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
        value = getattr(rollout, name)
        if value != everything:
            raise UserError(
                f"config.rollout.{name} ({value}) leaves tokens out and makes the rollout's "
                "log-probs those among the rest, which the trained policy does not have: set "
                f"config.rollout.log_prob_source to 'recompute', or {name} to {everything}."
            )


def _check_sampling(config: "Config") -> None:
    sampling = config.dynamic_sampling
    if sampling.enabled and config.rollout.group_size < 2:
        raise UserError(
            "config.dynamic_sampling.enabled needs config.rollout.group_size of at least 2: a "
            "group of one is always all right or all wrong."
        )
    require(sampling.enabled or not sampling.partial_rollouts, "dynamic_sampling.partial_rollouts",
            sampling.partial_rollouts, "False without config.dynamic_sampling.enabled: nothing is "
            "sampled beyond the batch")  # fmt: skip
    if sampling.prefilter and not sampling.enabled:
        raise UserError(
            "config.dynamic_sampling.prefilter needs config.dynamic_sampling.enabled: without it "
            "a batch holds whatever was sampled. Set both to True, or the first to False."
        )


def _check_data(config: "Config") -> None:
    data = config.data
    for side in ("train", "heldout"):
        chosen = getattr(data, side)
        if not chosen:
            raise UserError(f"config.data.{side} names no source; give at least one.")
        for name, source in chosen.items():
            _check_source(source, side, name)
    if data.system_prompt is not None and not data.chat:
        raise UserError(
            "config.data.system_prompt is not read when config.data.chat is False: set it to None "
            f"(got {data.system_prompt!r})."
        )
    _check_scorer(config.reward.scorer, "reward.scorer")


def _check_source(source: "SourceConfig", side: str, name: object) -> None:
    field = f"data.{side}.{name}"
    if not isinstance(name, str) or not re.fullmatch(r"[\w-]+", name):
        raise UserError(
            f"config.data.{side}: {name!r} cannot be the name of a source, which is part of the "
            "names of metrics: use letters, digits, '_' and '-'."
        )
    weight = source.weight
    if side == "train":
        ok = weight is not None and 0 < weight < math.inf
        require(ok, f"{field}.weight", weight, "greater than 0, and finite")
    else:
        require(weight is None, f"{field}.weight", weight, "None: all problems are tried")
    if source.scorer is not None:
        _check_scorer(source.scorer, f"{field}.scorer")
    if source.path == "arithmetic":
        number = source.num_problems
        require(number is not None, f"{field}.num_problems", number, "given for arithmetic")
        _check_num_terms(source.num_terms, f"{field}.num_terms")
        sides = ("train", "heldout")
        require(source.split in sides, f"{field}.split", source.split, "'train' or 'heldout'")
        unread = ("prompt_key", "answer_key")
    else:
        unread = ("num_terms",)
    for unread_name in unread:
        value = getattr(source, unread_name)
        if value is not None:
            raise UserError(
                f"config.{field}.{unread_name} is not read when config.{field}.path is "
                f"{source.path!r}: set it to None (got {value!r})."
            )


def _check_scorer(scorer: str, field: str) -> None:
    try:
        parse_scorers(scorer)
    except ValueError as error:
        raise UserError(
            f"config.{field} ({scorer!r}) must be a scorer, or a sum such as 'math_dapo + 0.1 * "
            f"answer_format': {error}."
        ) from error


def _check_num_terms(levels: tuple[int, ...] | None, field: str) -> None:
    ok = bool(levels) and all(2 <= n <= 11 for n in levels or ())
    require(ok, field, levels, "a non-empty tuple of integers from 2 to 11")


def _check_pretrain(config: "Config") -> None:
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
    if all(source.num_terms is None for source in config.data.train.values()):
        raise UserError(
            "config.pretrain fits the base model on sums as long as those of config.data.train, "
            f"which has none: {', '.join(config.data.train)}. Set it to None, or add a source with "
            "path 'arithmetic'."
        )


def _check_mesh(mesh: "MeshConfig") -> None:
    split = ("data", "fsdp", "tensor")  # parameters over context as over fsdp
    sizes = {axis: getattr(mesh, axis) for axis in (*split, "context")}
    if sum(size == -1 for size in sizes.values()) > 1:
        raise UserError(f"config.mesh: at most one axis may be -1; got {sizes}.")
    for logical, axis in mesh.rules:
        if axis is not None and axis not in split:
            raise UserError(
                f"config.mesh.rules sends {logical!r} to {axis!r}, which is not a mesh axis for "
                f"parameters ({', '.join(split)})."
            )
