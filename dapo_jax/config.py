"""The configuration: frozen dataclasses, built once from an ml_collections file and checked.

A config file is complete: every field below is in it, nothing else is. `Config.from_dict` turns it
into these dataclasses; whatever is unknown, missing, of the wrong type, out of range, contradictory
or read by nothing raises a `UserError` that names the field, the value and the remedy.
"""

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

from dapo_jax import config_checks
from dapo_jax.parameters import (
    ADVANTAGE_PARAMETERS,
    LOSS_PARAMETERS,
    SELECTION_PARAMETERS,
    parse_scorers,
)
from dapo_jax.types import UserError


@dataclasses.dataclass(frozen=True)
class RopeScalingConfig:
    """Rotary positions beyond the length of the first training: see `dapo_jax.rotary`."""

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    original_max_positions: int | None  # llama3, yarn
    low_freq_factor: float | None  # llama3
    high_freq_factor: float | None
    beta_fast: float | None  # yarn
    beta_slow: float | None
    attention_factor: float | None
    truncate: bool | None


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder with RMSNorm, rotary positions, grouped-query attention and SwiGLU: Qwen2,
    Qwen3, Llama 3 and Mistral. Sizes that are None in a config file with a `path` are read from its
    config.json (see `dapo_jax.hf_config`)."""

    # Hugging Face directory or hub id; None: made by `pretrain`, or without that, random.
    path: str | None
    # The same for the tokenizer; None: that of `path`, or without a path the arithmetic one.
    tokenizer: str | None
    vocab_size: int
    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ff_width: int
    rope_theta: float
    rope_scaling: RopeScalingConfig | None
    rms_norm_eps: float
    qkv_bias: bool  # Qwen2
    qk_norm: bool  # Qwen3: queries and keys of each head are normalised before they are rotated
    tie_embeddings: bool
    sliding_window: int | None  # positions that the layers in sliding_layers see
    sliding_layers: tuple[int, ...]
    # Tokens that end a response, beside the tokenizer's end of sequence; None in a config file
    # with a `path`: those of its generation_config.json.
    stop_token_ids: tuple[int, ...]
    # Of master weights. bfloat16 is for evaluation, and refused in training: an update below 0.2 to
    # 0.4 % of a weight, which at the usual learning rates is every one, is rounded away.
    param_dtype: Literal["float32", "bfloat16"]
    compute_dtype: Literal["float32", "bfloat16"]  # of activations and matmul inputs
    # What is kept of each layer for the backward pass, which computes the rest again; from most
    # memory to least. none: everything; dots: what products give, attention's scores among it;
    # dots_no_batch: what products with weights give; attention_mlp: what attention gives, and the
    # two inputs of the MLP's gate; attention: what attention gives; full: the layer's input alone.
    remat: Literal["none", "dots", "dots_no_batch", "attention_mlp", "attention", "full"]
    # Who attends in training: XLA, splash attention (TPU) or flash attention (GPU). auto: the
    # kernel of the platform where that takes the model.
    attention: Literal["auto", "xla", "splash", "flash"]
    log_prob_chunk_tokens: int  # tokens of a device whose logits, in parts, are alive at once


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh axes (-1: all devices left over) and where logical axes lie on it."""

    data: int
    fsdp: int
    context: int
    tensor: int
    # Devices that draw responses together, the model split over them by the rules for `tensor`;
    # None: as many as `tensor`, or where their memory does not hold model and KV cache, the fewest
    # that do (see `dapo_jax.memory`).
    rollout_tensor: int | None
    rules: tuple[tuple[str, str | None], ...]  # (logical axis, mesh axis or None)


@dataclasses.dataclass(frozen=True)
class SourceConfig:
    """Problems of one kind. The name it has in config.data is that of its metrics."""

    # A data set of dapo_jax.sources.DATASETS by name, a hub id (owner/name, or owner/name/place in
    # it), a file or directory of jsonl or parquet, or "arithmetic": generated.
    path: str
    split: str | None  # hub, directory: the files that have it in their names; None: all
    # How often it is drawn from, relative to the other sources; None for held-out ones.
    weight: float | None
    num_problems: int | None  # the first so many prompts, or so many generated; None: all
    num_terms: tuple[int, ...] | None  # arithmetic: difficulty levels, as terms of the sum
    # Columns, "outer.inner" for a field of one. A prompt is a text, or the messages of a chat.
    prompt_key: str | None  # None: as its columns show, see dapo_jax.rows
    answer_key: str | None
    answer_in: Literal["text", "boxed", "####"] | None  # where in its column; None: as it shows
    prompt_template: str | None  # None: config.data.prompt_template
    scorer: str | None  # None: config.reward.scorer


class Sources(dict[str, SourceConfig]):
    """Sources by their names; not to be changed, and so with a hash as the rest of the config."""

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return hash(tuple(self.items()))


@dataclasses.dataclass(frozen=True)
class DataConfig:
    train: Sources
    heldout: Sources
    prompt_template: str | None  # around prompts that are texts: str.format with {prompt}
    # Put prompts into the tokenizer's chat template; where it has none, into DAPO's own prompt.
    chat: bool
    system_prompt: str | None  # chat: of prompts that bring none; None: the template's own
    max_prompt_tokens: int
    overlong_prompts: Literal["drop", "truncate", "error"]  # truncate: the beginning is cut off
    cache_dir: str  # of tokenised problems; "": the user's cache directory


@dataclasses.dataclass(frozen=True)
class PretrainConfig:
    """Supervised fit of the base model on generated text of mixed quality."""

    num_terms: tuple[int, ...]  # difficulty levels, as terms of the sum
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
    top_p: float  # 1: all
    top_k: int  # 0: all
    min_p: float  # 0: all
    slots: int  # sequences decoded at once, over all devices
    prefill_prompts: int  # prompts per prefill call
    prefill_chunk_tokens: int  # of a prompt, at most, that are prefilled at once
    decode_steps: int  # tokens that one call of the device program draws in every slot
    page_tokens: int  # of one page of the KV cache
    # Memory of a device for the KV cache; None: enough for every slot at its longest. Where pages
    # run short, the youngest sequences wait, and are continued.
    cache_gib: float | None
    # Texts after which a response ends, beside the stop tokens; of training and evaluation.
    stop_strings: tuple[str, ...]
    # Of cached keys and values; auto: model.compute_dtype. int8: one scale a token and head.
    cache_dtype: Literal["auto", "int8"]
    # Who attends to the cache: XLA, or JAX's kernel for the platform. auto: the kernel where there
    # is one that takes the model.
    kernel: Literal["auto", "xla", "tpu", "gpu"]
    # The ratio's old log-probs: as the rollout stored them (float32: the same to 1e-7), or
    # recomputed by the training program before the first update (bfloat16: they differ by 1e-2 nats
    # a token). Tokens of earlier steps keep those of the policy that sampled them.
    log_prob_source: Literal["rollout", "recompute"]
    # When nothing has moved for so long, the run says what it waits for; 0: never.
    watchdog_seconds: float
    # When nothing has moved for so long in a step, here or in another process as far as it is
    # waited for, the run ends with the status by which launch/restart.sh starts it again from its
    # last checkpoint; 0: never.
    watchdog_limit_seconds: float


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    # A name in dapo_jax.scorers.SCORERS, module:function or file.py:function; or several with
    # weights, "math_dapo + 0.1 * answer_format": the first decides what is correct.
    scorer: str
    correct: float  # by a scorer that gives no reward of its own
    incorrect: float
    overlong_buffer_tokens: int  # L_cache of DAPO eq. 13; 0: no soft overlong punishment
    overlong_penalty: float  # factor on eq. 13
    workers: int  # processes that run the scorer
    timeout_seconds: float  # hard limit for one response


@dataclasses.dataclass(frozen=True)
class PrefilterConfig:
    """Prompts that keep teaching nothing are left out unsampled: see `dapo_jax.prefilter`."""

    enabled: bool
    initial_probability: float  # p_easy and p_hard of a new run
    min_probability: float  # bounds of both
    max_probability: float
    probability_step: float  # by which they move after a step; 0: fixed
    target_easy: float  # share of the sampled groups that may be all right
    target_hard: float  # and all wrong
    min_sampled: float  # probability with which any prompt is sampled, at least
    max_skips: int  # prompts left out in a step, at most; those after them are sampled


@dataclasses.dataclass(frozen=True)
class DynamicSamplingConfig:
    enabled: bool
    # A step tries max_rounds x max_round_prompts prompts at most, which are begun one by one; the
    # reference samples them in rounds.
    max_rounds: int
    max_round_prompts: int
    # What was drawn for prompts that go back to the data is kept and gone on with in the next step,
    # by its parameters. What is kept depends on when verdicts arrive: two runs of one seed then
    # differ. A step from one checkpoint is always the same, what it keeps is not.
    partial_rollouts: bool
    max_staleness: int  # steps, at most, since the oldest token of a response that is gone on with
    exhausted: Literal[
        "train", "skip", "stop"
    ]  # what to do with a batch that is short when so many prompts have been tried
    prefilter: PrefilterConfig


@dataclasses.dataclass(frozen=True)
class ObjectiveConfig:
    """Loss and advantage. Parameters that the chosen ones do not read are None."""

    loss: Literal[
        "ppo-clip", "gspo", "gspo-token", "gmpo", "cispo", "sapo", "dppo-tv", "dppo-kl",
        "policy-gradient", "dro", "clip-cov", "kl-cov",
    ]  # fmt: skip
    clip_low: float | None
    clip_high: float | None
    clip_dual: float | None  # c > 1: bound on the loss where the advantage is negative; None: off
    tau_positive: float | None  # SAPO's gate
    tau_negative: float | None
    ratio_cap: float | None  # DPPO: largest importance weight
    dro_beta: float | None
    cov_share: float | None  # Clip-Cov, KL-Cov: share of tokens acted on
    cov_low: float | None  # Clip-Cov: bounds of the covariance
    cov_high: float | None
    cov_kl_coefficient: float | None  # KL-Cov: weight of |log ratio| on the chosen tokens
    aggregation: Literal[
        "token-mean", "token-mean-per-group", "token-sum", "seq-mean-token-mean",
        "seq-mean-token-sum", "seq-mean-token-sum-norm",
    ]  # fmt: skip
    advantage: Literal[
        "grpo", "grpo-process", "pass-at-k", "gdpo", "lite-ppo", "rloo", "opo", "remax", "maxrl",
        "gpg", "reinforce++", "reinforce++-baseline", "gae",
    ]  # fmt: skip
    normalise_std: bool | None  # divide by the standard deviation of the group
    std_ddof: int | None  # 1: as torch.std and verl; 0: population
    # grpo-process: the outcome's reward is one more step, which ends with the response.
    outcome_as_step: bool | None
    component_weights: tuple[float, ...] | None  # GDPO: of each scorer's and the overlong reward
    gamma: float | None  # discount per token
    gae_lambda: float | None
    gpg_norm: float | None  # GPG's F_norm
    overlong_filter: bool  # leave truncated responses out of the loss
    overlong_in_baseline: bool  # whether those still count in their group's mean and deviation
    entropy_coefficient: float  # weight of the entropy bonus; 0: none, as in DAPO
    kl_coefficient: float  # weight of the KL to the base model in the loss; 0: none, as in DAPO
    kl_estimator: Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+", "full"] | None
    reward_kl_coefficient: float  # weight of the KL to the base model in the reward; 0: none
    reward_kl_estimator: Literal["k1", "abs", "k2", "k3"] | None
    reward_kl_target: float | None  # nats per token that the coefficient adapts to; None: fixed
    reward_kl_horizon: int | None  # responses over which it adapts

    @property
    def loss_parameters(self) -> dict[str, Any]:
        """The arguments of the policy loss."""
        return self._named(LOSS_PARAMETERS[self.loss])

    @property
    def selection_parameters(self) -> dict[str, Any]:
        """The arguments of the choice of tokens, for the losses that have one."""
        return self._named(SELECTION_PARAMETERS[self.loss])

    @property
    def advantage_parameters(self) -> dict[str, Any]:
        """The arguments of the advantage."""
        return self._named(ADVANTAGE_PARAMETERS[self.advantage])

    def _named(self, names: tuple[str, ...]) -> dict[str, Any]:
        return {name.strip("[]"): getattr(self, name.strip("[]")) for name in names}


@dataclasses.dataclass(frozen=True)
class CorrectionConfig:
    """Corrections for rollouts that differ from the policy: see `dapo_jax.corrections`."""

    # Which log-probs are held against the rollout's: those that anchor the ratio, made by the
    # training program before the first update, or those at the start of each update.
    policy: Literal["old", "current"]
    importance: Literal["none", "token", "sequence"]
    importance_cap: float | None
    importance_floor: float | None  # None: truncated at the cap; else masked outside both (IcePop)
    normalise: bool  # importance weights to mean 1 over all tokens, masked ones as 0
    # (statistic, floor or None, cap): tokens or responses outside are rejected.
    reject: tuple[tuple[str, float | None, float], ...]
    sequence_mask_delta: float | None  # off-policy sequence masking; None: off


@dataclasses.dataclass(frozen=True)
class CriticConfig:
    """A value model of the policy's architecture. Other optimiser settings are the policy's."""

    learning_rate: float
    warmup_steps: int  # rollout steps
    value_clip: float  # values move at most so far from those before the updates
    head_start_steps: int  # rollout steps at the beginning in which only the critic is trained


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    learning_rate: float
    # Rollout steps that update the policy; the s-th of them trains at s / warmup_steps of the rate.
    warmup_steps: int
    decay: Literal["constant", "cosine"]  # what follows the warm-up, to the last rollout step
    final_rate_share: float | None  # cosine: share of the rate at the end
    weight_decay: float
    beta1: float
    beta2: float
    eps: float
    max_grad_norm: float
    max_nonfinite_updates: int  # skipped updates in a row before the run stops
    moments_dtype: Literal["float32", "bfloat16"]  # as kept; bfloat16 is rounded to at random
    offload: bool  # moments lie in the host's memory between steps


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    num_steps: int  # rollout steps
    prompts_per_step: int  # groups in the batch of one rollout step
    prompts_per_update: int  # groups in one mini-batch, that is one optimiser step
    row_tokens: int  # length of a packed row
    rows_per_micro_batch: int  # rows whose activations are alive at once, over all devices
    # The responses in a row to one prompt have it there once. Pays for prompts about as long as
    # responses, see docs/update.md; XLA attends then.
    share_prompts: bool


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    every_steps: int
    num_samples: int  # k of avg@k
    temperature: float  # 0: greedy
    top_p: float  # 1: all
    top_k: int  # 0: all
    min_p: float  # 0: all


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    every_steps: int
    keep_newest: int
    keep_best: int  # by held-out avg@k
    # Where they are: gs://BUCKET/PLACE or a directory; None: checkpoints/ in that of the run.
    directory: str | None


@dataclasses.dataclass(frozen=True)
class LogConfig:
    rollouts_per_step: int  # responses written to rollouts/ at each step
    profile_steps: tuple[int, ...]  # rollout steps traced by JAX's profiler, see docs/metrics.md


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
    correction: CorrectionConfig | None
    critic: CriticConfig | None
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
        config_checks.check(config)
        return config

    @property
    def num_scorers(self) -> int:
        """Of the training source that has the most."""
        sums = [source.scorer or self.reward.scorer for source in self.data.train.values()]
        return max(len(parse_scorers(text)) for text in sums)

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values: what config.json holds."""
        return dataclasses.asdict(self)


def model_config(values: Mapping[str, Any]) -> ModelConfig:
    """A checked model by itself, for programs that have no config of a run.

    Raises:
        UserError: as `Config.from_dict`.
    """
    model = _build(ModelConfig, values, "config.model")
    config_checks.check_model(types.SimpleNamespace(model=model))
    return model


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
    if hint is Sources:
        if not isinstance(value, Mapping):
            raise UserError(f"{path} must be a group of named fields, not {value!r}.")
        return Sources(
            {name: _convert(SourceConfig, v, f"{path}.{name}") for name, v in value.items()}
        )
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
