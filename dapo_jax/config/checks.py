"""Relations that must hold between the fields of a config, beyond the range of each.

`Config.from_dict` calls `check`; `dapo_jax.config.objective_checks` has those of the objective.
"""

import re
from typing import TYPE_CHECKING

from dapo_jax.rewards.types import CORRECT_REWARD, parse_scorers
from dapo_jax.types import UserError

if TYPE_CHECKING:  # dapo_jax.config.schema calls these checks
    from dapo_jax.config.schema import Config, MeshConfig, ModelConfig, SourceConfig
    from dapo_jax.config.sft import SftConfig


def require(condition: bool, field: str, value: object, wanted: str) -> None:
    """Raises UserError unless the condition holds; `wanted` follows "must be"."""
    if not condition:
        raise UserError(f"config.{field} must be {wanted}; got {value!r}.")


def require_unset(field: str, value: object, when: str, default: object = None) -> None:
    """Raises UserError unless a field that nothing reads has its default."""
    if value != default:
        raise UserError(
            f"config.{field} is not read when config.{when}: set it to {default} (got {value!r})."
        )


def check_divides(small: str, a: int, large: str, b: int) -> None:
    """Raises UserError unless `a`, the value of field `small`, divides `b`, that of `large`."""
    if b % a:
        below, above = b - b % a, b + a - b % a
        nearest = f"{below} or {above}" if below else str(above)
        raise UserError(
            f"config.{small} ({a}) must divide config.{large} ({b}). The nearest values of "
            f"config.{large} that it divides: {nearest}."
        )


def check_model(model: "ModelConfig") -> None:
    """Raises UserError for contradictions within a model."""
    for token in model.stop_token_ids:
        wanted = f"in the vocabulary: from 0 to {model.vocab_size - 1}"
        require(0 <= token < model.vocab_size, "model.stop_token_ids", token, wanted)
    check_divides("model.num_kv_heads", model.num_kv_heads, "model.num_heads", model.num_heads)
    if model.sliding_window is not None:
        layers = model.sliding_window[1]
        once = 0 < len(layers) == len(set(layers))
        ok = once and all(0 <= layer < model.num_layers for layer in layers)
        wanted = f"layers from 0 to {model.num_layers - 1}, each once"
        require(ok, "model.sliding_window[1]", layers, wanted)
    _check_kernel_blocks(model.kernel_blocks)
    if model.attention not in ("auto", "splash"):
        _require_no_blocks("splash", model, "model.attention", model.attention)
    if not model.lora_rank:
        default = type(model).__dataclass_fields__["lora_alpha"].default
        require_unset("model.lora_alpha", model.lora_alpha, "model.lora_rank is 0", default)


def _check_kernel_blocks(blocks: "tuple[tuple[str, int], ...]") -> None:
    field, sizes = "model.kernel_blocks", dict(blocks)
    names = [name for name, _ in blocks]
    require(len(names) == len(sizes), field, blocks, "names, each once")
    for name, size in blocks:
        # Powers of two, so that rows padded to whole blocks of one size have whole blocks of all.
        least = {"paged_queries": 1, "paged_kv": 16}.get(name, 128)
        wanted = f"a power of two from {least} to 8192"
        power = size & (size - 1) == 0
        require(power and least <= size <= 8192, f"{field}[{name!r}]", size, wanted)
    for name in ("splash_kv", "splash_kv_dkv"):
        part, whole = sizes.get(f"{name}_compute"), sizes.get(name, 512)
        wanted = f"at most that of {name!r} ({whole})"
        require(part is None or part <= whole, f"{field}['{name}_compute']", part, wanted)


def _require_no_blocks(kernel: str, model: "ModelConfig", field: str, value: str) -> None:
    unread = tuple(block for block in model.kernel_blocks if block[0].startswith(kernel))
    require_unset("model.kernel_blocks", unread, f"{field} is {value!r}", ())


def check_training(config: "Config | SftConfig") -> None:
    """Raises UserError for a config that can be evaluated and not trained."""
    if config.model.param_dtype == "int8" and not config.model.lora_rank:
        raise UserError(
            "config.model.param_dtype 'int8' is for the frozen base of adapters, and "
            "config.model.lora_rank is 0. Set lora_rank, or param_dtype to 'float32'."
        )
    if config.model.param_dtype == "bfloat16":
        raise UserError(
            "config.model.param_dtype 'bfloat16' is for evaluation: it rounds away updates at "
            f"config.optimizer.learning_rate {config.optimizer.learning_rate:g}. Set it to "
            "'float32'; config.model.compute_dtype 'bfloat16' is the dtype of the arithmetic."
        )


def check(config: "Config") -> None:
    """Raises UserError for the first contradiction: names the fields, the values, the remedy."""
    check_model(config.model)
    if config.critic is not None and config.model.lora_rank:
        raise UserError(
            f"config.critic: with config.model.lora_rank {config.model.lora_rank} only adapters of "
            "the policy are trained, and there is no value model for them. Set lora_rank to 0, or "
            "an advantage without a critic."
        )
    _check_data(config)
    _check_lengths(config)
    _check_sampling(config)
    _check_pretrain(config)
    check_mesh(config.mesh)
    o, steps = config.optimizer, config.train.num_steps
    steps -= 0 if config.critic is None else config.critic.head_start_steps
    wanted = f"below {steps}, the policy's steps, for a rate that falls to final_rate_share"
    ok = o.final_rate_share is None or o.warmup_steps < steps
    require(ok, "optimizer.warmup_steps", o.warmup_steps, wanted)
    small, large = config.train.prompts_per_update, config.train.prompts_per_step
    check_divides("train.prompts_per_update", small, "train.prompts_per_step", large)


# Sections whose fields a stage may change, and the fields in them that a run has once.
STAGED = ("rollout", "reward", "dynamic_sampling", "objective", "optimizer", "train")
NOT_STAGED = (
    "rollout.max_staleness",
    "rollout.watchdog_limit_seconds",
    "reward.scorer",
    "reward.workers",
    "reward.timeout_seconds",
    "train.num_steps",
)
# A run keeps the base model as its reference from the start if one of these is above 0, or never.
REFERENCES = ("kl_coefficient", "reward_kl_coefficient")


def check_stages(config: "Config") -> None:
    """Raises UserError for the first stage that the run could not enter."""
    before = 1
    for first, changes in config.stages:
        what = f"config.stages: the stage from step {first} on"
        if first <= before:
            raise UserError(
                f"{what} must begin after step {before}. Give the first steps in order, from 2 on."
            )
        before = first
        for name in changes:
            section, _, field = str(name).partition(".")
            if section not in STAGED or name in NOT_STAGED or not field:
                raise UserError(
                    f"{what} cannot change {name!r}. A stage changes fields, such as "
                    f"'train.row_tokens', of {', '.join(STAGED)}, except {', '.join(NOT_STAGED)}. "
                    "Remove it."
                )
        try:
            staged = type(config).from_dict(config.at(first).to_dict())
        except UserError as error:
            raise UserError(f"{what}: {error}") from error
        for name in REFERENCES:
            was, now = (getattr(c.objective, name) for c in (config, staged))
            if (was > 0) != (now > 0):
                raise UserError(
                    f"{what} cannot change config.objective.{name} from {was} to {now}: a run "
                    "needs the base model for it from the start or never. Use a small value for 0."
                )


def _check_lengths(config: "Config") -> None:
    train, rollout, reward = config.train, config.rollout, config.reward
    longest = config.data.max_prompt_tokens + rollout.max_response_tokens
    if train.row_tokens < longest:
        raise UserError(
            f"config.train.row_tokens ({train.row_tokens}) is shorter than the longest sequence: "
            f"config.data.max_prompt_tokens ({config.data.max_prompt_tokens}) + "
            f"config.rollout.max_response_tokens ({rollout.max_response_tokens}). "
            f"Set it to {longest} or more."
        )
    buffer, penalty = reward.overlong_buffer_tokens, reward.overlong_penalty
    wanted = f"less than config.rollout.max_response_tokens ({rollout.max_response_tokens})"
    require(buffer < rollout.max_response_tokens, "reward.overlong_buffer_tokens", buffer, wanted)
    if (buffer == 0) != (penalty == 0):
        raise UserError(
            "config.reward.overlong_buffer_tokens and config.reward.overlong_penalty are both 0 "
            f"(no soft overlong punishment) or both positive; got {buffer} and {penalty}."
        )
    wanted = f"less than {CORRECT_REWARD:g}, the reward of a correct response"
    require(reward.incorrect < CORRECT_REWARD, "reward.incorrect", reward.incorrect, wanted)


def _check_sampling(config: "Config") -> None:
    rollout, dynamic = config.rollout, config.dynamic_sampling
    for name in rollout.excluding_fields():
        value, everything = getattr(rollout, name), getattr(type(rollout), name)
        if value != everything and rollout.log_prob_source == "rollout":
            raise UserError(
                f"config.rollout.{name} ({value}) leaves tokens out: the rollout's log-probs are "
                "of the remaining tokens alone, the trained policy's of all. Set "
                f"config.rollout.log_prob_source to 'recompute', or {name} to {everything}."
            )
        if value != everything and rollout.carries:
            raise UserError(
                f"config.rollout.{name} ({value}) leaves tokens out: the log-probs of carried "
                "tokens, which are those of the policy that sampled them, are of the remaining "
                f"tokens alone. Set config.rollout.max_staleness to 0, or {name} to {everything}."
            )
        if value != everything and config.correction is not None:
            raise UserError(
                f"config.rollout.{name} ({value}) leaves tokens out: config.correction would "
                "compare the policy with a distribution over the remaining tokens alone, and "
                f"reject or weigh down every response. Set it to None, or {name} to {everything}."
            )
    if rollout.kernel not in ("auto", "tpu"):
        _require_no_blocks("paged", config.model, "rollout.kernel", rollout.kernel)
    keys = dict(config.model.kernel_blocks).get("paged_kv", rollout.page_tokens)
    wanted = f"at least config.rollout.page_tokens ({rollout.page_tokens})"
    require(keys >= rollout.page_tokens, "model.kernel_blocks['paged_kv']", keys, wanted)
    if rollout.end_repetition is not None:
        tokens, most = rollout.end_repetition, rollout.max_response_tokens
        wanted = (
            f"less than config.rollout.max_response_tokens ({most}), where a response ends anyway, "
            "or None"
        )
        require(tokens < most, "rollout.end_repetition", tokens, wanted)
    if rollout.end_of_thinking is not None:
        tokens, phrase = rollout.end_of_thinking
        wanted = "a phrase whose last word closes thinking, such as '</think>', or the field None"
        require(bool(phrase.split()), "rollout.end_of_thinking[1]", phrase, wanted)
        size, most = len(phrase.encode()), rollout.max_response_tokens
        wanted = (
            f"less than config.rollout.max_response_tokens ({most}) - {size}, the most tokens that "
            "the phrase may have, so that an answer can follow"
        )
        require(tokens < most - size, "rollout.end_of_thinking[0]", tokens, wanted)
        wanted = f"texts that config.rollout.end_of_thinking[1] ({phrase!r}) does not hold"
        ok = not any(text in phrase for text in rollout.stop_strings)
        require(ok, "rollout.stop_strings", rollout.stop_strings, wanted)
    enabled, switch = dynamic.enabled, "config.dynamic_sampling.enabled"
    wanted = f"at least 2 with {switch}: a group of one is always all right or all wrong"
    require(rollout.group_size > 1 or not enabled, "rollout.group_size", 1, wanted)
    most, batch = dynamic.max_prompts, config.train.prompts_per_step
    wanted = f"at least config.train.prompts_per_step ({batch}) with {switch}, to fill a batch"
    require(most >= batch or not enabled, "dynamic_sampling.max_prompts", most, wanted)
    if not enabled:
        require_unset(
            "dynamic_sampling.exhausted", dynamic.exhausted, f"{switch} is False", "train"
        )
    # A worker may score two responses until their limits, and the one it was killed at once more.
    limit, silent = rollout.watchdog_limit_seconds, 3 * config.reward.timeout_seconds + 2
    wanted = f"0, or above {silent:g}: so long no verdict may come where a scorer hangs"
    wanted += " (three times config.reward.timeout_seconds)"
    require(limit == 0 or limit > silent, "rollout.watchdog_limit_seconds", limit, wanted)
    evaluation = config.evaluation
    ok = evaluation.temperature > 0 or evaluation.num_samples == 1
    wanted = "1 with config.evaluation.temperature 0: all samples would be the same"
    require(ok, "evaluation.num_samples", evaluation.num_samples, wanted)


def _check_data(config: "Config") -> None:
    data = config.data
    for side in ("train", "heldout"):
        chosen = getattr(data, side)
        if not chosen:
            raise UserError(f"config.data.{side} names no source; give at least one.")
        for name, source in chosen.items():
            _check_source(source, side, name)
    if data.pass_rate_band is None:
        for name, source in data.train.items():
            field = f"data.train.{name}.pass_rates"
            require_unset(field, source.pass_rates, "data.pass_rate_band is None")
    else:
        low, high = data.pass_rate_band
        require(low < high, "data.pass_rate_band", data.pass_rate_band, "(low, high), low < high")
    if not data.chat:
        require_unset("data.system_prompt", data.system_prompt, "data.chat is False")
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
        ok = weight is not None and weight > 0
        require(ok, f"{field}.weight", weight, "greater than 0")
    else:
        require(weight is None, f"{field}.weight", weight, "None: all problems are evaluated")
        require_unset(f"{field}.pass_rates", source.pass_rates, f"{field} is not of data.train")
    if source.scorer is not None:
        _check_scorer(source.scorer, f"{field}.scorer")
    unread = ("levels",)
    if source.all_levels:
        unread = ("prompt_key", "answer_key")
        number, levels = source.num_problems, source.levels or ()
        require(number is not None, f"{field}.num_problems", number, f"given for {source.path}")
        ok = len(levels) > 0 and set(levels) <= set(source.all_levels)
        wanted = f"a non-empty tuple of {', '.join(map(str, source.all_levels))}"
        require(ok, f"{field}.levels", source.levels, wanted)
        ok = source.split in ("train", "heldout")
        require(ok, f"{field}.split", source.split, "'train' or 'heldout'")
    for name in unread:
        when = f"{field}.path is {source.path!r}"
        require_unset(f"{field}.{name}", getattr(source, name), when)


def _check_scorer(scorer: str, field: str) -> None:
    try:
        parse_scorers(scorer)
    except ValueError as error:
        raise UserError(
            f"config.{field} ({scorer!r}) must be a scorer, or a sum such as 'math_dapo + 0.1 * "
            f"answer_format': {error}."
        ) from error


def _check_pretrain(config: "Config") -> None:
    model, pretrain = config.model, config.pretrain
    if pretrain is None:
        if model.tokenizer is None and model.path is None:
            raise UserError(
                "config.model.tokenizer is needed when config.pretrain and config.model.path are "
                "None."
            )
        return
    why = "None with config.pretrain, which fits a base model on sums; or set that to None"
    require(model.path is None, "model.path", model.path, why)
    require(model.tokenizer is None, "model.tokenizer", model.tokenizer, why)
    if all(source.path != "arithmetic" for source in config.data.train.values()):
        raise UserError(
            "config.pretrain fits the base model on sums as long as those of config.data.train, "
            f"which has none: {', '.join(config.data.train)}. Set it to None, or add a source with "
            "path 'arithmetic'."
        )


def check_mesh(mesh: "MeshConfig") -> None:
    """Raises UserError for contradictions within a mesh."""
    split = ("data", "fsdp", "tensor")  # the axes of parameters; context splits them as fsdp does
    sizes = {axis: getattr(mesh, axis) for axis in (*split, "context")}
    if sum(size == -1 for size in sizes.values()) > 1:
        raise UserError(f"config.mesh: at most one axis may be -1; got {sizes}.")
    given, known = [logical for logical, _ in mesh.rules], dict(type(mesh).rules)
    ok = len(set(given)) == len(given) and set(given) <= known.keys()
    require(ok, "mesh.rules", mesh.rules, f"rules for {', '.join(known)}, one for each")
    for logical, axis in mesh.rules:
        if axis is not None and axis not in split:
            raise UserError(
                f"config.mesh.rules sends {logical!r} to {axis!r}, which is not a mesh axis for "
                f"parameters ({', '.join(split)})."
            )
        # Sums over the parts of the vocabulary must not add up different rows.
        if logical == "vocab" and axis not in (None, "tensor"):
            raise UserError(
                f"config.mesh.rules sends 'vocab' to {axis!r}, over which the rows of a batch are "
                "split: use 'tensor' or None."
            )
        if logical == "embed" and axis == "tensor":
            raise UserError(
                "config.mesh.rules sends 'embed' to 'tensor', over which the activations are "
                "whole: use 'fsdp', 'data' or None."
            )
