"""The configuration: frozen dataclasses, built once from an ml_collections file and checked.

A config file is complete: every field below is in it, nothing else is. `Config.from_dict` turns it
into these dataclasses; whatever is unknown, missing, of the wrong type, out of range, contradictory
or read by nothing raises a `UserError` that names the field, the value and the remedy.
"""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, Literal

from dapo_jax.types import UserError


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A Qwen2-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

    pretrained: str | None  # Hugging Face directory or hub id; None: base made by `pretrain`
    tokenizer: str | None  # the same for the tokenizer; None: the arithmetic one is built
    vocab_size: int
    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ff_width: int
    rope_theta: float
    rms_norm_eps: float
    tie_embeddings: bool
    param_dtype: Literal["float32", "bfloat16"]  # of master weights and optimiser moments
    compute_dtype: Literal["float32", "bfloat16"]  # of activations, matmul inputs and the KV cache
    remat: Literal["none", "full"]  # what the backward pass recomputes: nothing, or each layer
    log_prob_chunk_tokens: int  # tokens whose vocabulary-wide logits are alive at once


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh axes (-1: all devices left over) and where logical axes lie on it."""

    data: int
    fsdp: int
    tensor: int
    rules: tuple[tuple[str, str | None], ...]  # (logical axis, mesh axis or None)


@dataclasses.dataclass(frozen=True)
class DataConfig:
    source: Literal["arithmetic", "jsonl"]
    num_train: int | None  # arithmetic: problems generated; None for jsonl
    num_heldout: int | None
    num_terms: tuple[int, ...] | None  # arithmetic: difficulty levels, as terms of the sum
    train_path: str | None  # jsonl: one object per line; None for arithmetic
    heldout_path: str | None
    prompt_key: str | None
    answer_key: str | None
    prompt_template: str | None  # jsonl: str.format template with {prompt}
    max_prompt_tokens: int
    overlong_prompts: Literal["drop", "error"]


@dataclasses.dataclass(frozen=True)
class PretrainConfig:
    """Supervised fit of the base model on generated text of mixed quality."""

    num_steps: int
    rows_per_step: int
    row_tokens: int
    learning_rate: float
    warmup_steps: int
    share_guess: float  # share of texts that answer at once, mostly wrong
    guess_accuracy: float  # share of those guesses that are right
    share_slip: float  # probability that a line of a derivation slips
    share_ramble: float  # probability, at the end of a derivation, to start over instead
    cache_dir: str  # "": the user's cache directory


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    group_size: int  # G, responses per prompt
    max_response_tokens: int  # end-of-sequence token included
    temperature: float
    top_p: float
    slots: int  # sequences decoded at once, over all devices
    prefill_prompts: int  # prompts per prefill call
    log_prob_source: Literal["rollout", "recompute"]  # where the ratio's old log-probs come from


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    scorer: str  # name in dapo_jax.reward.SCORERS, or module:function
    correct: float
    incorrect: float
    overlong_buffer_tokens: int  # L_cache of DAPO eq. 13; 0: no soft overlong punishment
    overlong_penalty: float  # factor on eq. 13
    workers: int  # processes that run the scorer
    timeout_seconds: float  # hard limit for one response


@dataclasses.dataclass(frozen=True)
class DynamicSamplingConfig:
    enabled: bool
    max_rounds: int  # sampling rounds per step
    max_round_prompts: int  # prompts per sampling round at most
    surplus: Literal["carry", "drop"]  # informative groups beyond the batch
    exhausted: Literal[
        "train", "skip", "stop"
    ]  # what to do with a batch that max_rounds left short


# The parameters each policy loss reads; those in brackets may be None.
LOSS_PARAMETERS: dict[str, tuple[str, ...]] = {
    "ppo-clip": ("clip_low", "clip_high", "[clip_dual]"),
    "gspo": ("clip_low", "clip_high"),
    "gspo-token": ("clip_low", "clip_high"),
    "gmpo": ("clip_low", "clip_high"),
    "cispo": ("clip_low", "clip_high"),
    "sapo": ("tau_positive", "tau_negative"),
    "dppo-tv": ("clip_low", "clip_high", "ratio_cap"),
    "dppo-kl": ("clip_low", "clip_high", "ratio_cap"),
    "policy-gradient": (),
    "dro": ("dro_beta",),
}


@dataclasses.dataclass(frozen=True)
class ObjectiveConfig:
    """The loss. Parameters that the chosen policy loss does not read are None."""

    loss: Literal[
        "ppo-clip", "gspo", "gspo-token", "gmpo", "cispo", "sapo", "dppo-tv", "dppo-kl",
        "policy-gradient", "dro",
    ]  # fmt: skip
    clip_low: float | None
    clip_high: float | None
    clip_dual: float | None  # c > 1: bound on the loss where the advantage is negative; None: off
    tau_positive: float | None  # SAPO's gate
    tau_negative: float | None
    ratio_cap: float | None  # DPPO: largest importance weight
    dro_beta: float | None
    aggregation: Literal[
        "token-mean", "token-mean-per-group", "token-sum", "seq-mean-token-mean",
        "seq-mean-token-sum", "seq-mean-token-sum-norm",
    ]  # fmt: skip
    normalise_std: bool  # divide the advantage by the group's standard deviation
    std_ddof: int  # 1: as torch.std and verl; 0: population
    overlong_filter: bool  # leave truncated responses out of the loss
    overlong_in_baseline: bool  # whether those still count in their group's mean and deviation
    kl_coefficient: float  # weight of the KL to the base model in the loss; 0: none, as in DAPO
    kl_estimator: Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+"]

    @property
    def loss_parameters(self) -> dict[str, float | None]:
        """The arguments of the policy loss."""
        names = [name.strip("[]") for name in LOSS_PARAMETERS[self.loss]]
        return {name: getattr(self, name) for name in names}


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    learning_rate: float
    warmup_steps: int  # rollout steps; step s trains at s / warmup_steps of the rate
    weight_decay: float
    beta1: float
    beta2: float
    eps: float
    max_grad_norm: float
    max_nonfinite_updates: int  # skipped updates in a row before the run stops


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    num_steps: int  # rollout steps
    prompts_per_step: int  # groups in the batch of one rollout step
    prompts_per_update: int  # groups in one mini-batch, that is one optimiser step
    row_tokens: int  # length of a packed row
    rows_per_micro_batch: int  # rows whose activations are alive at once, over all devices


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    every_steps: int
    num_samples: int  # k of avg@k
    temperature: float
    top_p: float


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    every_steps: int
    keep_newest: int
    keep_best: int  # by held-out avg@k


@dataclasses.dataclass(frozen=True)
class LogConfig:
    rollouts_per_step: int  # responses written to rollouts/ at each step


@dataclasses.dataclass(frozen=True)
class Config:
    seed: int
    model: ModelConfig
    mesh: MeshConfig
    data: DataConfig
    pretrain: PretrainConfig | None
    rollout: RolloutConfig
    reward: RewardConfig
    dynamic_sampling: DynamicSamplingConfig
    objective: ObjectiveConfig
    optimizer: OptimizerConfig
    train: TrainConfig
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    log: LogConfig

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Config":
        """Checked config from nested mappings such as `ml_collections.ConfigDict.to_dict()`.

        Raises:
            UserError: a field is unknown, missing, of the wrong type, out of range, contradictory
                or read by nothing.
        """
        config = _build(cls, values, "config")
        _check(config)
        return config

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values: what config.json holds."""
        return dataclasses.asdict(self)


def _build(cls: type, values: Any, path: str) -> Any:
    """A dataclass filled from a mapping, its fields checked for presence and type."""
    if not isinstance(values, Mapping):
        raise UserError(f"{path} must be a group of fields, not {values!r}.")
    hints = typing.get_type_hints(cls)
    unknown = sorted(set(values) - set(hints))
    if unknown:
        raise UserError(
            f"{path}.{unknown[0]} is not a field. {path} has: {', '.join(hints)}. "
            "Remove it, or correct its name."
        )
    missing = [name for name in hints if name not in values]
    if missing:
        raise UserError(
            f"{path}.{missing[0]} is missing. Configs are complete: add it "
            "(configs/tiny_dapo.py shows every field)."
        )
    return cls(**{name: _convert(hints[name], values[name], f"{path}.{name}") for name in hints})


def _convert(hint: Any, value: Any, path: str) -> Any:
    """`value` as the annotated type, or a UserError naming what is wanted."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type, hint), value, path)
    if origin is Literal:
        if value not in args:
            choices = ", ".join(repr(arg) for arg in args)
            raise UserError(f"{path} must be one of {choices}; got {value!r}.")
        return value
    if type(None) in args:
        (inner,) = (arg for arg in args if arg is not type(None))
        return None if value is None else _convert(inner, value, path)
    if origin is tuple:
        if not isinstance(value, (tuple, list)):
            raise UserError(f"{path} must be a tuple; got {value!r}.")
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(_convert(args[0], v, f"{path}[{i}]") for i, v in enumerate(value))
        if len(value) != len(args):
            raise UserError(f"{path} must have {len(args)} entries; got {value!r}.")
        return tuple(_convert(a, v, f"{path}[{i}]") for i, (a, v) in enumerate(zip(args, value)))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise UserError(f"{path} must be {hint.__name__}; got {value!r} ({type(value).__name__}).")
    return value


def _require(condition: bool, field: str, value: Any, wanted: str) -> None:
    if not condition:
        raise UserError(f"config.{field} must be {wanted}; got {value!r}.")


def _positive(config: Config, *fields: str) -> None:
    for field in fields:
        value = _get(config, field)
        _require(value > 0, field, value, "greater than 0")


def _non_negative(config: Config, *fields: str) -> None:
    for field in fields:
        value = _get(config, field)
        _require(value >= 0, field, value, "0 or more")


def _get(config: Any, field: str) -> Any:
    for name in field.split("."):
        config = getattr(config, name)
    return config


def _divides(config: Config, small: str, large: str) -> None:
    a, b = _get(config, small), _get(config, large)
    if b % a:
        raise UserError(
            f"config.{small} ({a}) must divide config.{large} ({b}). "
            f"Nearest that do: {b - b % a or a} or {b + a - b % a} for config.{large}."
        )


def _check(config: Config) -> None:
    """Ranges and relations between fields."""
    model, rollout, train = config.model, config.rollout, config.train
    _positive(
        config,
        *(f"model.{n}" for n in ("vocab_size", "num_layers", "width", "num_heads", "num_kv_heads")),
        *(f"model.{n}" for n in ("head_dim", "ff_width", "rope_theta", "rms_norm_eps")),
        "model.log_prob_chunk_tokens",
        "data.max_prompt_tokens",
        *(f"rollout.{n}" for n in ("group_size", "max_response_tokens", "temperature", "slots")),
        "rollout.prefill_prompts",
        *("reward.workers", "reward.timeout_seconds"),
        *("dynamic_sampling.max_rounds", "dynamic_sampling.max_round_prompts"),
        *("optimizer.learning_rate", "optimizer.eps", "optimizer.max_grad_norm"),
        "optimizer.max_nonfinite_updates",
        *(f"train.{n}" for n in ("num_steps", "prompts_per_step", "prompts_per_update")),
        *("train.row_tokens", "train.rows_per_micro_batch"),
        *("evaluation.every_steps", "evaluation.num_samples", "evaluation.temperature"),
        *("checkpoint.every_steps", "checkpoint.keep_newest"),
    )
    _non_negative(
        config,
        *("seed", "reward.overlong_buffer_tokens", "reward.overlong_penalty"),
        *("objective.kl_coefficient", "optimizer.warmup_steps", "optimizer.weight_decay"),
        *("checkpoint.keep_best", "log.rollouts_per_step"),
    )
    for field in ("rollout.top_p", "evaluation.top_p"):
        value = _get(config, field)
        _require(0 < value <= 1, field, value, "in (0, 1]")
    for field in ("optimizer.beta1", "optimizer.beta2"):
        value = _get(config, field)
        _require(0 <= value < 1, field, value, "in [0, 1)")
    objective = config.objective
    _check_loss(objective)
    _require(objective.std_ddof in (0, 1), "objective.std_ddof", objective.std_ddof, "0 or 1")
    _divides(config, "model.num_kv_heads", "model.num_heads")
    _require(model.head_dim % 2 == 0, "model.head_dim", model.head_dim, "even (rotary pairs)")
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
    _check_data(config)
    _check_mesh(config.mesh)


def _check_loss(objective: ObjectiveConfig) -> None:
    """The chosen policy loss has its parameters, in range, and no others are given."""
    read = LOSS_PARAMETERS[objective.loss]
    for name in sorted({name.strip("[]") for names in LOSS_PARAMETERS.values() for name in names}):
        value = getattr(objective, name)
        if value is None and name in read:
            raise UserError(
                f"config.objective.{name} is needed when config.objective.loss is "
                f"{objective.loss!r}."
            )
        if value is not None and name not in read and f"[{name}]" not in read:
            raise UserError(
                f"config.objective.{name} is not read when config.objective.loss is "
                f"{objective.loss!r}: set it to None (got {value!r})."
            )
        if value is not None:
            _require(value > 0, f"objective.{name}", value, "greater than 0")
    clip_low, clip_dual = objective.clip_low, objective.clip_dual
    if clip_low is not None:
        # 1 leaves the lower bound open: a ratio is never negative.
        _require(clip_low <= 1, "objective.clip_low", clip_low, "at most 1")
    if clip_dual is not None:
        _require(clip_dual > 1, "objective.clip_dual", clip_dual, "above 1")


def _check_data(config: Config) -> None:
    data, model = config.data, config.model
    arithmetic = ("num_train", "num_heldout", "num_terms")
    jsonl = ("train_path", "heldout_path", "prompt_key", "answer_key", "prompt_template")
    read, unread = (arithmetic, jsonl) if data.source == "arithmetic" else (jsonl, arithmetic)
    for name in read:
        if getattr(data, name) is None:
            raise UserError(
                f"config.data.{name} is needed when config.data.source is {data.source!r}."
            )
    for name in unread:
        if getattr(data, name) is not None:
            raise UserError(
                f"config.data.{name} is not read when config.data.source is {data.source!r}: set "
                f"it to None (got {getattr(data, name)!r})."
            )
    if data.source == "arithmetic":
        _positive(config, "data.num_train", "data.num_heldout")
        levels = typing.cast(tuple, data.num_terms)
        ok = bool(levels) and all(2 <= n <= 11 for n in levels)
        _require(ok, "data.num_terms", levels, "a non-empty tuple of integers from 2 to 11")
    elif "{prompt}" not in typing.cast(str, data.prompt_template):
        raise UserError(
            f"config.data.prompt_template must contain {{prompt}}; got {data.prompt_template!r}."
        )
    made_here = model.pretrained is None
    if made_here != (config.pretrain is not None):
        raise UserError(
            "config.pretrain makes a base model when config.model.pretrained is None, and must be "
            f"None otherwise; got pretrained={model.pretrained!r} and pretrain "
            f"{'None' if config.pretrain is None else 'given'}."
        )
    if config.pretrain is not None:
        if data.source != "arithmetic" or model.tokenizer is not None:
            raise UserError(
                "config.pretrain fits the base model on generated arithmetic: it needs "
                "config.data.source = 'arithmetic' and config.model.tokenizer = None; got "
                f"{data.source!r} and {model.tokenizer!r}."
            )
        _positive(config, "pretrain.num_steps", "pretrain.rows_per_step", "pretrain.learning_rate")
        warmup, steps = config.pretrain.warmup_steps, config.pretrain.num_steps
        wanted = f"at least 0 and below config.pretrain.num_steps ({steps})"
        _require(0 <= warmup < steps, "pretrain.warmup_steps", warmup, wanted)
        for name in ("share_guess", "guess_accuracy", "share_slip", "share_ramble"):
            value = getattr(config.pretrain, name)
            _require(0 <= value < 1, f"pretrain.{name}", value, "in [0, 1)")
        longest = data.max_prompt_tokens + config.rollout.max_response_tokens
        row_tokens = config.pretrain.row_tokens
        wanted = f"at least {longest}, a prompt with its response"
        _require(row_tokens >= longest, "pretrain.row_tokens", row_tokens, wanted)
    elif model.tokenizer is None:
        raise UserError("config.model.tokenizer is needed when config.model.pretrained is given.")


def _check_mesh(mesh: MeshConfig) -> None:
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
