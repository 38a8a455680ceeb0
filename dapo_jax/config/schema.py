"""The configuration: frozen dataclasses that hold every field with its meaning, unit and default.

A config file states what differs from these defaults. `Config.from_dict` fills in the rest. A field
that is unknown, missing, of the wrong type, out of range, contradictory or read by nothing is a
`UserError` that names the field, the value and the remedy. The defaults are DAPO as published
(arXiv:2503.14476, section 4.1, and the script of verl's recipe/dapo where the paper is silent).
"""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from dapo_jax.config import checks, objective_checks
from dapo_jax.rewards.types import parse_scorers
from dapo_jax.utils import fields
from dapo_jax.utils.fields import (
    Below1,
    FrozenDict,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    Share,
    UpTo1,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScalingConfig:
    """Rotary positions beyond the length of the first training: see `dapo_jax.models.rotary`."""

    kind: Literal["linear", "llama3", "yarn"]
    factor: Positive
    original_max_positions: PositiveInt | None = None  # llama3, yarn
    low_freq_factor: float | None = None  # llama3
    high_freq_factor: float | None = None
    beta_fast: float | None = None  # yarn
    beta_slow: float | None = None
    attention_factor: float | None = None
    truncate: bool | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder with RMSNorm, rotary positions, grouped-query attention and SwiGLU: Qwen2,
    Qwen3, Llama 3 and Mistral. With a `path`, sizes that a config file leaves out are read from the
    checkpoint's config.json (see `dapo_jax.config.hf_config`)."""

    # Hugging Face directory or hub id; None: made by `pretrain`, or without that, random.
    path: str | None = None
    # The same for the tokenizer; None: that of `path`, or without a path the arithmetic one.
    tokenizer: str | None = None
    vocab_size: PositiveInt
    num_layers: PositiveInt
    hidden_size: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: Annotated[int, fields.Range(lambda x: x > 0 and x % 2 == 0, "even and above 0")]
    intermediate_size: PositiveInt
    rope_theta: Positive = 10_000.0
    rope_scaling: RopeScalingConfig | None = None
    rms_norm_eps: Positive = 1e-6
    qkv_bias: bool = False  # Qwen2
    qk_norm: bool = False  # Qwen3: queries and keys of each head are normalised before rotation
    tie_embeddings: bool = False
    sliding_window: PositiveInt | None = None  # positions that the layers in sliding_layers see
    sliding_layers: tuple[int, ...] = ()
    # Tokens that end a response, beside the tokenizer's end of sequence. Left out with a `path`:
    # those of its generation_config.json.
    stop_token_ids: tuple[int, ...] = ()
    # Of master weights. bfloat16 is for evaluation, and refused in training: an update below 0.2 to
    # 0.4 % of a weight, which at the usual learning rates is every one, is rounded away.
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"  # of activations and matmul inputs
    # What is kept of each layer for the backward pass, which computes the rest again; from most
    # memory to least. none: everything; dots: what products give, attention's scores among it;
    # dots_no_batch: what products with weights give; attention_mlp: what attention gives, and the
    # two inputs of the MLP's gate; attention: what attention gives; full: the layer's input alone.
    remat: Literal["none", "dots", "dots_no_batch", "attention_mlp", "attention", "full"] = "full"
    # Who attends in training: XLA, splash attention (TPU) or flash attention (GPU). auto: the
    # kernel of the platform where that takes the model.
    attention: Literal["auto", "xla", "splash", "flash"] = "auto"
    # Tokens of a device whose logits, in parts, are alive at once.
    log_prob_chunk_tokens: PositiveInt = 4096


AxisSize = Annotated[int, fields.Range(lambda x: x == -1 or x > 0, "positive, or -1 for the rest")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Sizes of the mesh axes (-1: all devices left over) and where logical axes lie on it."""

    data: AxisSize = 1
    fsdp: AxisSize = -1
    context: AxisSize = 1
    tensor: AxisSize = 1
    # Devices that draw responses together, the model split over them by the rules for `tensor`;
    # None: as many as `tensor`, or where their memory does not hold model and KV cache, the fewest
    # that do (see `dapo_jax.rollout.memory_budget`).
    rollout_tensor: PositiveInt | None = None
    # (logical axis of the parameters, mesh axis or None)
    rules: tuple[tuple[str, str | None], ...] = (
        ("vocab", "tensor"),
        ("embed", "fsdp"),
        ("heads", "tensor"),
        ("kv_heads", "tensor"),
        ("ff", "tensor"),
        ("layers", None),
    )


Template = Annotated[str, fields.Range(lambda text: "{prompt}" in text, "a text with {prompt}")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """Problems of one kind. The name it has in config.data is that of its metrics."""

    # A data set of data.sources.DATASETS by name, a hub id (owner/name, or owner/name/place in it),
    # a file or directory of jsonl or parquet, or "arithmetic": generated.
    path: str
    split: str | None = None  # hub, directory: the files that have it in their names; None: all
    # How often it is drawn from, relative to the other sources; None for held-out ones.
    weight: float | None = None
    num_problems: PositiveInt | None = None  # the first so many, or so many generated; None: all
    num_terms: tuple[int, ...] | None = None  # arithmetic: difficulty levels, as terms of the sum
    # Columns, "outer.inner" for a field of one. A prompt is a text, or the messages of a chat.
    prompt_key: str | None = None  # None: as its columns show, see dapo_jax.data.records
    answer_key: str | None = None
    # Where the answer is in its column; None: as it shows.
    answer_in: Literal["text", "boxed", "####"] | None = None
    prompt_template: Template | None = None  # None: config.data.prompt_template
    scorer: str | None = None  # None: config.reward.scorer


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    train: FrozenDict[SourceConfig]
    heldout: FrozenDict[SourceConfig]
    prompt_template: Template | None = None  # around prompts that are texts: str.format
    # Put prompts into the tokenizer's chat template; where it has none, into DAPO's own prompt.
    chat: bool = True
    system_prompt: str | None = None  # chat: of prompts that bring none; None: the template's own
    max_prompt_tokens: PositiveInt = 2048
    # truncate: the beginning is cut off, as the script does.
    overlong_prompts: Literal["drop", "truncate", "error"] = "truncate"
    cache_dir: str = ""  # of tokenised problems; "": the user's cache directory


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """Supervised fit of the base model on generated text of mixed quality."""

    num_terms: tuple[int, ...] = (3, 5, 7, 9)  # difficulty levels, as terms of the sum
    num_steps: PositiveInt = 600
    rows_per_step: PositiveInt = 32
    row_tokens: PositiveInt = 128
    learning_rate: Positive = 3e-3
    share_guess: Below1 = 0.6  # share of texts that answer at once, mostly wrong
    guess_accuracy: Below1 = 0.15  # share of those guesses that are right
    share_slip: Below1 = 0.1  # probability that a line of a derivation slips
    share_ramble: Below1 = 0.6  # probability, at the end of a derivation, to start over instead


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    group_size: PositiveInt = 16  # G, responses per prompt
    # End-of-sequence token included: 16,384 expected and 4,096 of punished buffer.
    max_response_tokens: PositiveInt = 20_480
    temperature: Positive = 1.0
    top_p: UpTo1 = 1.0  # 1: all
    top_k: NonNegativeInt = 0  # 0: all
    min_p: Share = 0.0  # 0: all
    slots: PositiveInt = 128  # sequences decoded at once, over all devices
    prefill_prompts: PositiveInt = 16  # prompts per prefill call
    decode_steps: PositiveInt = 16  # tokens that one call of the device program draws in every slot
    page_tokens: PositiveInt = 128  # of one page of the KV cache
    # Memory of a device for the KV cache; None: enough for every slot at its longest. Where pages
    # run short, the youngest sequences wait, and are continued.
    cache_gib: Positive | None = None
    # Texts after which a response ends, beside the stop tokens; of training and evaluation.
    stop_strings: Annotated[tuple[str, ...], fields.Range(all, "texts that are not empty")] = ()
    # Who attends to the cache: XLA, or JAX's kernel for the platform. auto: the kernel where there
    # is one that takes the model.
    kernel: Literal["auto", "xla", "tpu", "gpu"] = "auto"
    # The ratio's old log-probs: as the rollout stored them (float32: the same to 1e-7), or, as the
    # script does, recomputed by the training program before the first update (bfloat16: they differ
    # by 1e-2 nats a token). Tokens of earlier steps keep those of the policy that sampled them.
    log_prob_source: Literal["rollout", "recompute"] = "recompute"
    # When nothing has moved for so long, the run says what it waits for; 0: never.
    watchdog_seconds: NonNegative = 120.0
    # When nothing has moved for so long in a step, the run ends with the status by which
    # launch/restart.sh starts it again from its last checkpoint; 0: never.
    watchdog_limit_seconds: NonNegative = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardConfig:
    # A name in rewards.scorers.SCORERS, module:function or file.py:function; or several with
    # weights, "math_dapo + 0.1 * answer_format": the first decides what is correct.
    scorer: str = "math_dapo"
    correct: float = 1.0  # by a scorer that gives no reward of its own
    incorrect: float = -1.0
    overlong_buffer_tokens: NonNegativeInt = 4096  # L_cache of DAPO eq. 13; 0: no such punishment
    overlong_penalty: NonNegative = 1.0  # factor on eq. 13
    workers: PositiveInt = 8  # processes that run the scorer
    timeout_seconds: Positive = 10.0  # hard limit for one response


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicSamplingConfig:
    enabled: bool = True
    # A step tries max_rounds x max_round_prompts prompts at most. They are claimed one by one; the
    # reference samples them in rounds. Script: 10 rounds of three batches.
    max_rounds: PositiveInt = 10
    max_round_prompts: PositiveInt = 1536
    # Unfinished responses to prompts that go back to the data are kept, and resumed in the next
    # step by its parameters. What is kept depends on when verdicts arrive: two runs of one seed
    # then differ. A step from one checkpoint is always the same, what it keeps is not.
    partial_rollouts: bool = False
    # Steps, at most, since the oldest token of a response that is resumed.
    max_staleness: PositiveInt = 1
    # What to do with a batch that is short when so many prompts have been tried.
    exhausted: Literal["train", "skip", "stop"] = "train"
    # Leave prompts out unsampled that keep teaching nothing: GRESO, see `rollout.prompt_filter`.
    prefilter: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """Loss and advantage. Each method declares the arguments that it reads beside its function:
    `policy_losses.LOSSES` and `advantage.ADVANTAGES`."""

    loss: str = "ppo-clip"
    clip_low: UpTo1 | None = 0.2  # 1: open below; None: the loss does not clip
    clip_high: Positive | None = 0.28
    # c > 1: bound on the loss where the advantage is negative; None: off. Script: 10.
    clip_dual: Annotated[float, fields.Range(lambda x: x > 1, "above 1")] | None = None
    # Other arguments of the loss; left out: its defaults.
    loss_args: FrozenDict[Any] = dataclasses.field(default_factory=FrozenDict)
    aggregation: Literal[
        "token-mean", "token-mean-per-group", "token-sum", "seq-mean-token-mean",
        "seq-mean-token-sum", "seq-mean-token-sum-norm",
    ] = "token-mean"  # fmt: skip
    advantage: str = "grpo"
    # Arguments of the advantage; left out: its defaults.
    advantage_args: FrozenDict[Any] = dataclasses.field(default_factory=FrozenDict)
    overlong_filter: bool = False  # leave truncated responses out of the loss
    overlong_in_baseline: bool = True  # whether those still count in their group's mean and std
    entropy_coefficient: NonNegative = 0.0  # weight of the entropy bonus
    kl_coefficient: NonNegative = 0.0  # weight of the KL to the base model in the loss
    kl_estimator: Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+"] | None = None
    reward_kl_coefficient: NonNegative = 0.0  # weight of the KL to the base model in the reward
    reward_kl_estimator: Literal["k1", "abs", "k2", "k3"] | None = None
    # Nats per token that the coefficient adapts to; None: fixed.
    reward_kl_target: Positive | None = None
    reward_kl_horizon: PositiveInt | None = None  # responses over which it adapts


# What `reject` may name: how a divergence is reduced, and which.
Statistic = Literal[
    "token-k1", "token-k2", "token-k3", "seq-sum-k1", "seq-sum-k2", "seq-sum-k3",
    "seq-mean-k1", "seq-mean-k2", "seq-mean-k3", "seq-max-k2", "seq-max-k3",
]  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorrectionConfig:
    """Corrections for rollouts that differ from the policy: see
    `dapo_jax.algorithms.importance_correction`."""

    # Which log-probs are held against the rollout's: those that anchor the ratio, made by the
    # training program before the first update, or those at the start of each update.
    policy: Literal["old", "current"] = "old"
    importance: Literal["none", "token", "sequence"] = "none"
    importance_cap: Positive | None = None
    # None: truncated at the cap; else masked outside both (IcePop).
    importance_floor: Positive | None = None
    normalise: bool = False  # importance weights to mean 1 over all tokens, masked ones as 0
    # (statistic, floor or None, cap): tokens or responses outside are rejected.
    reject: tuple[tuple[Statistic, float | None, float], ...] = ()
    sequence_mask_delta: Positive | None = None  # off-policy sequence masking; None: off


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """A value model of the policy's architecture. Other optimiser settings are the policy's."""

    learning_rate: Positive = 1e-5
    warmup_steps: NonNegativeInt = 0  # rollout steps
    value_clip: Positive = 0.5  # values move at most so far from those before the updates
    head_start_steps: NonNegativeInt = 0  # first rollout steps, in which only the critic is trained


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW. The paper gives the learning rate and the warm-up, the script the rest."""

    learning_rate: Positive = 1e-6
    # Rollout steps that update the policy; the s-th of them trains at s / warmup_steps of the rate.
    warmup_steps: NonNegativeInt = 20
    # What follows the warm-up, to the last rollout step.
    decay: Literal["constant", "cosine"] = "constant"
    final_rate_share: Share | None = None  # cosine: share of the rate at the end
    weight_decay: NonNegative = 0.1
    beta1: Below1 = 0.9
    beta2: Below1 = 0.999
    eps: Positive = 1e-8
    max_grad_norm: Positive = 1.0
    # As kept; bfloat16 is rounded to at random.
    moments_dtype: Literal["float32", "bfloat16"] = "float32"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    num_steps: PositiveInt = 625  # rollout steps
    prompts_per_step: PositiveInt = 512  # groups in the batch of one rollout step
    prompts_per_update: PositiveInt = 32  # groups in one mini-batch, that is one optimiser step
    row_tokens: PositiveInt = 22_528  # length of a packed row
    rows_per_micro_batch: PositiveInt = 16  # rows whose activations are alive at once, all devices
    # The responses in a row to one prompt have it there once. Pays for prompts about as long as
    # responses, see docs/update.md; XLA attends then.
    share_prompts: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    every_steps: PositiveInt = 5
    num_samples: PositiveInt = 32  # k of avg@k
    temperature: NonNegative = 1.0  # 0: greedy
    top_p: UpTo1 = 0.7  # 1: all
    top_k: NonNegativeInt = 0  # 0: all
    min_p: Share = 0.0  # 0: all


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    every_steps: PositiveInt = 1
    keep_newest: PositiveInt = 2
    keep_best: NonNegativeInt = 1  # by held-out avg@k
    # Where they are: gs://BUCKET/PLACE or a directory; None: checkpoints/ in that of the run.
    directory: str | None = None


Steps = Annotated[
    tuple[int, ...],
    fields.Range(lambda steps: all(s > 0 for s in steps), "steps from 1 on; () for none"),
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogConfig:
    rollouts_per_step: NonNegativeInt = 16  # responses written to rollouts/ at each step
    profile_steps: Steps = ()  # rollout steps traced by JAX's profiler, see docs/metrics.md


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    seed: NonNegativeInt = 0
    model: ModelConfig
    mesh: MeshConfig = MeshConfig()
    data: DataConfig
    pretrain: PretrainConfig | None = None
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    correction: CorrectionConfig | None = None
    critic: CriticConfig | None = None
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Config":
        """Returns the checked config with these values, and defaults for all that is left out.

        Args:
            values: nested mappings such as `ml_collections.ConfigDict.to_dict()`.

        Raises:
            UserError: a field is unknown, missing, of the wrong type, out of range, contradictory
                or read by nothing.
        """
        config = fields.build(cls, values, "config")
        config = dataclasses.replace(config, objective=objective_checks.bound(config.objective))
        checks.check(config)
        objective_checks.check(config)
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
    """Returns a checked model by itself, for programs that have no config of a run.

    Raises:
        UserError: as `Config.from_dict`.
    """
    model = fields.build(ModelConfig, values, "config.model")
    checks.check_model(model)
    return model
