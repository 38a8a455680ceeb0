"""The configuration: frozen dataclasses with the meaning, unit and default of every field.

A config file states what differs from these defaults; `Config.from_dict` fills in the rest. An
unknown, missing, contradictory or unread field is a `UserError` that names it. The defaults are
DAPO as published (arXiv:2503.14476, section 4.1). Where the paper is silent, they are those of
verl's recipe/dapo, "the script" in the comments.
"""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from dapo_jax.config import checks, objective_checks, rope_scaling
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

Forward = Literal["splash_q", "splash_kv", "splash_kv_compute"]
Backward = Literal[
    "splash_q_dkv", "splash_kv_dkv", "splash_kv_dkv_compute", "splash_q_dq", "splash_kv_dq"
]
KernelBlock = Literal[Forward, Backward, "paged_kv", "paged_queries"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder of Qwen2, Qwen3, Llama 3 or Mistral. With a `path`, missing sizes are read from
    its config.json (see `dapo_jax.config.hf_config`)."""

    # Hugging Face directory or hub id; None: made by `pretrain`, or without that, random.
    path: str | None = None
    # Directory or hub id of the tokenizer; None: `path`, or without a path the arithmetic one.
    tokenizer: str | None = None
    vocab_size: PositiveInt
    num_layers: PositiveInt
    hidden_size: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: Annotated[int, fields.Range(lambda x: x > 0 and x % 2 == 0, "even and above 0")]
    intermediate_size: PositiveInt
    rope_theta: Positive = 10_000.0
    # Hugging Face's mapping for longer contexts, see `dapo_jax.config.rope_scaling`.
    rope_scaling: FrozenDict[Any] | None = None
    rms_norm_eps: Positive = 1e-6
    qkv_bias: bool = False  # Qwen2
    qk_norm: bool = False  # Qwen3: RMSNorm on the queries and keys of each head
    tie_embeddings: bool = False
    # (positions, layers that see no more than these); None: every layer sees all.
    sliding_window: tuple[PositiveInt, tuple[int, ...]] | None = None
    # Tokens that end a response, besides the tokenizer's end of sequence.
    stop_token_ids: tuple[int, ...] = ()
    # LoRA (docs/lora.md): rank of the adapters of all linear layers. They alone are trained, and
    # their product is scaled by alpha / rank. 0: no adapters, all weights are trained.
    lora_rank: NonNegativeInt = 0
    lora_alpha: Positive = 32.0
    # Dtype of the trained weights. Training refuses bfloat16, which rounds its updates away. With
    # adapters the other weights are frozen in the compute dtype. int8 needs adapters: the frozen
    # matrices of the layers are in int8, and adapters in float32.
    param_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"  # activations and matmul inputs
    # Dtype of the product that makes logits, in updates and rollouts (docs/update.md). None:
    # compute_dtype, to which the unembedding is rounded. float32: it is read as it is held.
    head_dtype: Literal["float32"] | None = None
    # Values of each layer kept for the backward pass, from most memory to least. none: all; dots:
    # all products; dots_no_batch: products with weights; attention_mlp: attention's output and the
    # inputs of the MLP's gate; attention: its output; full: the layer's input alone.
    remat: Literal["none", "dots", "dots_no_batch", "attention_mlp", "attention", "full"] = "full"
    # Attention in training: XLA, splash attention (TPU), cuDNN's (GPU from Hopper on) or flash
    # attention (GPU). auto: the kernel of the platform where it supports the model.
    attention: Literal["auto", "xla", "splash", "cudnn", "flash"] = "auto"
    # Sizes of blocks of the TPU kernels, in tokens, by name; others have their defaults. splash_*:
    # of attention in training, forward, and backward for keys and values (dkv) and queries (dq).
    # paged_*: keys and values fetched at once in rollouts, and queries computed with them.
    # launch/check.py --tune measures them (docs/accelerators.md).
    kernel_blocks: tuple[tuple[KernelBlock, PositiveInt], ...] = ()
    # Tokens per device whose logits are in memory at once.
    log_prob_chunk_tokens: PositiveInt = 4096

    @property
    def trained_dtype(self) -> str:
        """Dtype of the trained parameters: all, or the adapters."""
        return "float32" if self.param_dtype == "int8" else self.param_dtype

    @property
    def base_dtype(self) -> str:
        """Dtype of the other parameters, matrices in int8 excepted."""
        frozen = self.lora_rank or self.param_dtype == "int8"
        return self.compute_dtype if frozen else self.param_dtype

    @property
    def matrix_dtype(self) -> str:
        """Dtype of the layers' matrices, to which adapters are added."""
        return "int8" if self.param_dtype == "int8" else self.base_dtype


AxisSize = Annotated[int, fields.Range(lambda x: x == -1 or x > 0, "positive, or -1 for the rest")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Sizes of the mesh axes (-1: all remaining devices) and the axes that parameters lie on."""

    data: AxisSize = 1
    fsdp: AxisSize = -1
    context: AxisSize = 1
    tensor: AxisSize = 1
    # Devices of one inference replica, over which the rules for `tensor` split the model; None: as
    # many as `tensor`, or the fewest whose memory holds model and KV cache.
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


def _is_template(text: str) -> bool:
    try:
        return "\0\1" in text.format(prompt="\0\1")
    except (LookupError, ValueError, AttributeError, TypeError):
        return False


TEMPLATE = "a str.format template with {prompt}, every other brace twice, as in \\boxed{{}}"
Template = Annotated[str, fields.Range(_is_template, TEMPLATE)]


# Generators of problems, and their levels: terms of a sum, steps of a word problem.
GENERATED = {"arithmetic": tuple(range(2, 12)), "word_problems": (1, 2)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """A data set. Its name in config.data is part of the names of its metrics."""

    # A name in data.sources.DATASETS, a hub id (owner/name or owner/name/directory), a file or
    # directory of jsonl or parquet, or the name of a generator: a key of GENERATED.
    path: str
    split: str | None = None  # a word in the paths of the files to read; None: all files
    weight: float | None = None  # relative sampling frequency; None for held-out sources
    num_problems: PositiveInt | None = None  # problems read or generated at most; None: all
    levels: tuple[int, ...] | None = None  # difficulty levels of generated problems
    # Columns, "outer.inner" for a field of one; None: found by name, see dapo_jax.data.records.
    prompt_key: str | None = None
    answer_key: str | None = None
    prompt_template: Template | None = None  # None: config.data.prompt_template
    scorer: str | None = None  # None: config.reward.scorer
    # Transcripts of launch/evaluate.py: a training problem's pass rate before the run.
    pass_rates: str | None = None

    @property
    def all_levels(self) -> tuple[int, ...]:
        """The levels of its generator; () where problems are read."""
        return GENERATED.get(self.path, ())


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    train: FrozenDict[SourceConfig]
    heldout: FrozenDict[SourceConfig]
    prompt_template: Template | None = None  # str.format template for prompts that are texts
    # Put prompts into the tokenizer's chat template; where it has none, into DAPO's own prompt.
    chat: bool = True
    system_prompt: str | None = None  # for prompts without one; None: the chat template's
    max_prompt_tokens: PositiveInt = 2048
    # truncate cuts off the beginning, as the script does.
    overlong_prompts: Literal["drop", "truncate", "error"] = "truncate"
    # Training problems are tried while the share of correct responses at their latest visit is in
    # [low, high); those not yet visited always are. None: no limits.
    pass_rate_band: tuple[Share, UpTo1] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """Supervised fit of the base model on generated arithmetic of mixed quality."""

    # The first step has a rate of 0.
    num_steps: Annotated[int, fields.Range(lambda x: x > 1, "at least 2")] = 600
    rows_per_step: PositiveInt = 32  # packed rows, as long as the longest prompt and response


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    group_size: PositiveInt = 16  # G, responses per prompt
    # Includes the end-of-sequence token: 16,384 expected and 4,096 of punished buffer.
    max_response_tokens: PositiveInt = 20_480
    temperature: Positive = 1.0
    top_p: UpTo1 = 1.0  # 1: all
    # Tokens of highest probability; 0: all.
    top_k: Annotated[int, fields.Range(lambda x: 0 <= x < 2**31, "from 0 to 2**31 - 1")] = 0
    min_p: Share = 0.0  # 0: all
    slots: PositiveInt = 128  # sequences decoded at once, over all devices
    prefill_prompts: PositiveInt = 16  # prompts per prefill call
    decode_steps: PositiveInt = 16  # tokens sampled in every slot by one call of the program
    page_tokens: PositiveInt = 128  # tokens in a page of the KV cache
    # GiB of a device for the KV cache; None: enough for every slot at its longest. Where pages run
    # short, the youngest sequences wait and are resumed.
    cache_gib: Positive | None = None
    # Texts after which a response ends, in training and evaluation.
    stop_strings: Annotated[tuple[str, ...], fields.Range(all, "texts that are not empty")] = ()
    # A training response ends, as truncated, once that many tokens in a row each had a probability
    # above 0.99 (MiniMax-M1: 3,000). Not in evaluation.
    end_repetition: PositiveInt | None = None
    # (tokens N, phrase), or None: thinking that has not ended after N tokens is ended. A response
    # whose first N tokens do not have the phrase's last word, such as </think>, is cut there; the
    # phrase is appended, in no loss, and sampling continues. Also in evaluation: with its budget of
    # thinking, a policy is used as it was trained.
    end_of_thinking: tuple[PositiveInt, str] | None = None
    # Attention over the cache: XLA or the platform's kernel. auto: the kernel where it takes the
    # model.
    kernel: Literal["auto", "xla", "tpu", "gpu"] = "auto"
    # Old log-probs of the ratio: the rollout's (float32: equal to 1e-6), or, as in the script,
    # recomputed by the training program before the first update (bfloat16: they differ by 1e-2
    # nats a token). Tokens of earlier steps keep those of the policy that sampled them.
    log_prob_source: Literal["rollout", "recompute"] = "recompute"
    # Rollout steps since the oldest token of a group was sampled, at most. 0: a step waits for its
    # last response. Above: later prompts fill the slots, and unfinished responses are carried into
    # the next step, under its parameters (docs/async.md).
    max_staleness: Annotated[int, fields.Range(lambda x: 0 <= x <= 8, "0 to 8")] = 0
    # Seconds without progress in a step after which the run ends, to be restarted by
    # launch/restart.sh from its last checkpoint; 0: never.
    watchdog_limit_seconds: NonNegative = 0.0

    @property
    def carries(self) -> bool:
        """Returns whether unfinished responses are carried into the next step."""
        return self.max_staleness > 0

    @property
    def resumes(self) -> bool:
        """Returns whether responses are prefilled with the tokens they have, and continued."""
        return self.carries or self.end_of_thinking is not None

    @staticmethod
    def excluding_fields() -> tuple[str, ...]:
        """The names of the fields that leave tokens out, at values other than their defaults."""
        return "top_p", "top_k", "min_p"

    @property
    def excludes_tokens(self) -> bool:
        """Returns whether sampling leaves tokens out: log-probs are then of the others alone."""
        return any(
            getattr(self, name) != getattr(type(self), name) for name in self.excluding_fields()
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardConfig:
    # A name in rewards.scorers.SCORERS, module:function or file.py:function; or several with
    # weights, "math_dapo + 0.1 * answer_format": the first decides correctness.
    scorer: str = "math_dapo"
    incorrect: float = -1.0  # reward of an incorrect response; of a correct one 1
    overlong_buffer_tokens: NonNegativeInt = 4096  # L_cache of DAPO eq. 13; 0: no punishment
    overlong_penalty: NonNegative = 1.0  # factor on eq. 13
    workers: PositiveInt = 8  # processes that run the scorer
    timeout_seconds: Positive = 10.0  # hard limit for one response


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicSamplingConfig:
    enabled: bool = True
    # Prompts tried in a step at most. Script: 10 rounds of three batches.
    max_prompts: PositiveInt = 15_360
    # What a step does with the groups of a short batch once max_prompts have been tried: train on
    # them, skip the update, or stop the run with an error.
    exhausted: Literal["train", "skip", "stop"] = "train"


KLEstimator = Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """Loss and advantage. `algorithms.losses.LOSSES` and `algorithms.advantages.ADVANTAGES`
    declare the arguments of each method."""

    loss: str = "ppo-clip"
    clip_low: UpTo1 | None = 0.2  # 1: open below; None: the loss does not clip
    clip_high: Positive | None = 0.28
    # Bound c on the loss where the advantage is negative; None: off. Script: 10.
    clip_dual: Annotated[float, fields.Range(lambda x: x > 1, "above 1")] | None = None
    # Other arguments of the loss.
    loss_args: FrozenDict[Any] = dataclasses.field(default_factory=FrozenDict)
    aggregation: str = "token-mean"  # a name in algorithms.aggregation.AGGREGATIONS
    advantage: str = "grpo"
    advantage_args: FrozenDict[Any] = dataclasses.field(default_factory=FrozenDict)
    overlong_filter: bool = False  # mask truncated responses in the loss
    overlong_in_baseline: bool = True  # count them in their group's mean and deviation still
    # Share of an update's tokens, those of highest entropy, whose policy loss counts; 1: all.
    top_entropy_share: UpTo1 = 1.0
    # Weight of the entropy bonus; with entropy_adaptation its value in the first step.
    entropy_coefficient: NonNegative = 0.0
    # The entropy in nats per token below which the bonus counts and its coefficient grows, and the
    # change of the coefficient in a step; None: fixed coefficient.
    entropy_adaptation: tuple[Positive, Positive] | None = None
    kl_coefficient: NonNegative = 0.0  # weight of the KL to the base model in the loss
    reward_kl_coefficient: NonNegative = 0.0  # weight of the KL to the base model in the reward
    kl_estimator: KLEstimator = "k3"  # of both; in the reward without +
    # The KL in nats per token that the coefficient adapts to, and the responses over which it does;
    # None: fixed coefficient.
    reward_kl_adaptation: tuple[Positive, PositiveInt] | None = None

    @property
    def reads_reference(self) -> bool:
        """Returns whether the loss or the reward has a KL to the base model."""
        return self.kl_coefficient > 0 or self.reward_kl_coefficient > 0

    @property
    def reads_entropy(self) -> bool:
        """Returns whether the loss depends on the entropies before the first update."""
        return self.top_entropy_share < 1 or self.entropy_adaptation is not None

    def reads(self, field: str) -> bool:
        """Returns whether advantages are computed from this field of `advantages.Outcomes`."""
        from dapo_jax.algorithms.advantages import ADVANTAGES  # here: it takes JAX

        return field in ADVANTAGES[self.advantage].reads


# A divergence and its reduction.
Statistic = Literal[
    "token-k1", "token-k2", "token-k3", "seq-sum-k1", "seq-sum-k2", "seq-sum-k3",
    "seq-mean-k1", "seq-mean-k2", "seq-mean-k3", "seq-max-k2", "seq-max-k3",
]  # fmt: skip


ImportanceLevel = Literal["token", "sequence", "normalised-token", "normalised-sequence"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorrectionConfig:
    """Corrections for rollouts that differ from the policy, see
    `dapo_jax.algorithms.importance_correction`."""

    # Log-probs compared with the rollout's: recomputed before the first update, or at each update.
    # proximal: as old, and the ratio of a carried token too is to the policy before the first
    # update (decoupled PPO), no longer to the one that sampled it.
    policy: Literal["old", "proximal", "current"] = "old"
    # Weights of tokens or of whole responses: (level, floor or None, cap); None: no weights.
    # Without a floor they are truncated at the cap; with one, what is outside is masked (IcePop).
    # Normalised: scaled to mean 1 over all tokens or responses, masked ones included.
    importance: tuple[ImportanceLevel, Positive | None, Positive] | None = None
    # (statistic, floor or None, cap): tokens or responses outside are rejected. sequence-mask: of
    # negative advantage and with mean log(mu/pi) above the cap (DeepSeek-V3.2).
    reject: tuple[tuple[Literal[Statistic, "sequence-mask"], float | None, float], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """A value model of the policy's architecture. Its optimiser has no warm-up and otherwise the
    policy's settings."""

    learning_rate: Positive = 1e-5
    value_clip: Positive = 0.5  # bound on the change of a value in the updates of a step
    head_start_steps: NonNegativeInt = 0  # first rollout steps, which train the critic alone


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW. The paper gives the learning rate and the warm-up, the script the rest."""

    learning_rate: Positive = 1e-6
    warmup_steps: NonNegativeInt = 20  # rollout steps; step s has s / warmup_steps of the rate
    # Share of the rate at the end of the cosine after the warm-up; None: constant rate.
    final_rate_share: Share | None = None
    weight_decay: NonNegative = 0.1
    betas: tuple[Below1, Below1] = (0.9, 0.999)  # decay of the first and second moment
    eps: Positive = 1e-8
    max_grad_norm: Positive = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    num_steps: PositiveInt = 625  # rollout steps
    prompts_per_step: PositiveInt = 512  # groups in the batch of one rollout step
    prompts_per_update: PositiveInt = 32  # groups in the mini-batch of one optimiser step
    row_tokens: PositiveInt = 22_528  # length of a packed row
    rows_per_micro_batch: PositiveInt = 16  # packed rows in memory at once, over all devices
    # Responses in a row share their prompt: faster where prompts are as long as responses.
    share_prompts: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    every_steps: PositiveInt = 5
    num_samples: PositiveInt = 32  # k of avg@k
    temperature: NonNegative = 1.0  # 0: greedy
    top_p: UpTo1 = 0.7  # 1: all


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    every_steps: PositiveInt = 1
    keep_newest: PositiveInt = 2
    # gs://BUCKET/PLACE or a directory; None: checkpoints/ in the run directory.
    directory: str | None = None


Steps = Annotated[
    tuple[int, ...],
    fields.Range(lambda steps: all(s > 0 for s in steps), "steps from 1 on; () for none"),
]


Trackers = Annotated[
    tuple[Literal["tensorboard", "wandb", "trackio", "mlflow"], ...],
    fields.Range(lambda names: len(set(names)) == len(names), "names, each once"),
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogConfig:
    rollouts_per_step: NonNegativeInt = 16  # responses written to rollouts/ at each step
    profile_steps: Steps = ()  # rollout steps traced by JAX's profiler, see docs/metrics.md
    trackers: Trackers = ("tensorboard",)  # besides metrics.jsonl, see docs/trackers.md


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    seed: NonNegativeInt = 0  # below 2**32: keys of JAX have no more bits
    # Stages of the run, in order: (first rollout step, {"section.field": value, ...}). Changes add
    # up. See `dapo_jax.config.checks.check_stages` for the fields.
    stages: tuple[tuple[PositiveInt, FrozenDict[Any]], ...] = ()
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
        """Returns the checked config with these values, and defaults elsewhere.

        Args:
            values: nested mappings such as `ml_collections.ConfigDict.to_dict()`.

        Raises:
            UserError: a field is unknown, missing, out of range, contradictory or not read.
        """
        config = cls.of_run(values)._with_arguments()
        checks.check(config)
        objective_checks.check(config)
        checks.check_stages(config)
        return config

    @classmethod
    def of_run(cls, values: Mapping[str, Any]) -> "Config":
        """Returns the config in a run's config.json. Contradictions between fields are not looked
        for, nor unknown methods of the objective: the version that trained may have allowed more,
        and the config file may have registered methods of its own.

        Raises:
            UserError: a field is unknown, missing or out of range.
        """
        config = fields.build(cls, values, "config")
        return dataclasses.replace(config, model=_with_rope_scaling(config.model))

    def _with_arguments(self) -> "Config":
        objective = objective_checks.with_arguments(self.objective)
        return dataclasses.replace(self, objective=objective)

    def at(self, step: int) -> "Config":
        """Returns the config of a rollout step: with the changes of the stages begun, without
        stages."""
        begun = [changes for first, changes in self.stages if first <= step]
        if not begun:
            return dataclasses.replace(self, stages=())
        values: dict[str, Any] = {**self.to_dict(), "stages": ()}
        for changes in begun:
            for name in ("loss", "advantage"):
                method = f"objective.{name}"
                if changes.get(method, values["objective"][name]) != values["objective"][name]:
                    # The arguments of another method are not its own.
                    changes = {f"{method}_args": {}} | changes
            for name, value in changes.items():
                section, _, field = name.partition(".")
                group, _, argument = field.partition(".")
                if argument and isinstance(held := values[section].get(group), Mapping):
                    field, value = group, {**held, argument: value}
                values[section][field] = value
        staged = Config.of_run(values)  # `checks.check_stages` has checked it
        # A method that stays has its arguments, and may be one that only the config file knows.
        ours, theirs = ((c.objective.loss, c.objective.advantage) for c in (self, staged))
        return staged if ours == theirs else staged._with_arguments()

    @property
    def reads_current_log_probs(self) -> bool:
        """Returns whether each mini-batch is scored at the parameters of its own gradient."""
        from dapo_jax.algorithms.losses import COVARIANCE_LOSSES  # here: it takes JAX

        c = self.correction
        current = c is not None and c.policy == "current"
        return current or self.objective.loss in COVARIANCE_LOSSES

    @property
    def num_scorers(self) -> int:
        """The largest number of scorers that a training source has."""
        sums = [source.scorer or self.reward.scorer for source in self.data.train.values()]
        return max(len(parse_scorers(text)) for text in sums)

    def to_dict(self) -> dict[str, Any]:
        """Returns nested plain values, the content of a run's config.json."""
        return dataclasses.asdict(self)


def _with_rope_scaling(model: ModelConfig) -> ModelConfig:
    """Completes the rope scaling."""
    if model.rope_scaling is None:
        return model
    return dataclasses.replace(model, rope_scaling=rope_scaling.of_field(model.rope_scaling))


def model_config(values: Mapping[str, Any]) -> ModelConfig:
    """Returns a checked model, for programs without the config of a run; raises UserError as
    `Config.from_dict`."""
    model = _with_rope_scaling(fields.build(ModelConfig, values, "config.model"))
    checks.check_model(model)
    return model
