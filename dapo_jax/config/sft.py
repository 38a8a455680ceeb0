"""The configuration of supervised fine-tuning, for launch/sft.py; see `dapo_jax.config.schema`."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from dapo_jax.config import checks
from dapo_jax.config.schema import (
    GENERATED,
    CheckpointConfig,
    LogConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    Template,
    model_config,
)
from dapo_jax.types import UserError
from dapo_jax.utils import fields
from dapo_jax.utils.fields import Below1, FrozenDict, NonNegativeInt, Positive, PositiveInt

WRITTEN = "word_problems"  # the generator whose problems have written solutions


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExamplesConfig:
    """A data set of prompts with responses, or of chats."""

    # As of a source of problems, see `SourceConfig`; word_problems: generated, with solutions.
    path: str
    split: str | None = None  # a word in the paths of the files to read; None: all files
    num_examples: PositiveInt | None = None  # read or generated at most; None: all
    levels: tuple[int, ...] | None = None  # difficulty levels of generated problems
    # Columns, either a prompt and a response or the messages of a chat; None: found by name, see
    # `dapo_jax.data.records`.
    prompt_key: str | None = None
    response_key: str | None = None
    messages_key: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SftDataConfig:
    train: FrozenDict[ExamplesConfig]
    heldout: FrozenDict[ExamplesConfig] = dataclasses.field(default_factory=FrozenDict)
    heldout_share: Below1 = 0.0  # of the training prompts, where `heldout` has no source
    # As in `DataConfig`: with the values of a later DAPO run, its prompts are those trained on.
    prompt_template: Template | None = None
    chat: bool = True
    system_prompt: str | None = None
    # An example without a response, or longer than train.row_tokens: stop, or leave it out.
    unusable_examples: Literal["error", "drop"] = "error"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SftOptimizerConfig(OptimizerConfig):
    """AdamW, with a rate for supervised fine-tuning. Steps are optimiser steps."""

    learning_rate: Positive = 1e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class SftTrainConfig:
    num_steps: PositiveInt | None = None  # optimiser steps; None: num_epochs
    num_epochs: PositiveInt | None = None  # passes over the examples; None: num_steps
    examples_per_update: PositiveInt = 64  # in the mini-batch of one optimiser step
    row_tokens: PositiveInt = 4096  # length of a packed row
    rows_per_micro_batch: PositiveInt = 8  # packed rows in memory at once, over all devices


@dataclasses.dataclass(frozen=True, kw_only=True)
class SftEvaluationConfig:
    every_steps: PositiveInt = 50  # between evaluations of the held-out loss


@dataclasses.dataclass(frozen=True, kw_only=True)
class SftCheckpointConfig(CheckpointConfig):
    every_steps: PositiveInt = 50


@dataclasses.dataclass(frozen=True, kw_only=True)
class SftConfig:
    seed: NonNegativeInt = 0
    model: ModelConfig
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    data: SftDataConfig
    optimizer: SftOptimizerConfig = SftOptimizerConfig()
    train: SftTrainConfig
    evaluation: SftEvaluationConfig = SftEvaluationConfig()
    checkpoint: SftCheckpointConfig = SftCheckpointConfig()
    log: LogConfig = dataclasses.field(default_factory=LogConfig)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SftConfig":
        """Returns the checked config with these values, and defaults elsewhere; raises UserError as
        `Config.from_dict`."""
        config = fields.build(cls, values, "config")
        model = model_config(dataclasses.asdict(config.model))
        config = dataclasses.replace(config, model=model)
        _check(config)
        return config

    def to_dict(self) -> dict[str, Any]:
        """Returns nested plain values, the content of a run's config.json."""
        return dataclasses.asdict(self)


def _check(config: SftConfig) -> None:
    model, data, train = config.model, config.data, config.train
    checks.check_mesh(config.mesh)
    checks.check_training(config)
    if model.tokenizer is None and model.path is None:
        raise UserError("config.model.tokenizer is needed when config.model.path is None.")
    if not data.train:
        raise UserError("config.data.train names no source; give at least one.")
    for side, sources in (("train", data.train), ("heldout", data.heldout)):
        for name, source in sources.items():
            _check_source(source, f"data.{side}.{name}")
    if data.heldout:
        checks.require_unset("data.heldout_share", data.heldout_share, "data.heldout is given", 0.0)
    if not data.chat:
        checks.require_unset("data.system_prompt", data.system_prompt, "data.chat is False")
    if (train.num_steps is None) == (train.num_epochs is None):
        raise UserError(
            "config.train.num_steps and config.train.num_epochs both say how long to train: give "
            f"one and set the other to None (got {train.num_steps} and {train.num_epochs})."
        )
    unread, default = config.log.rollouts_per_step, LogConfig.rollouts_per_step
    checks.require_unset("log.rollouts_per_step", unread, "train has no rollouts", default)


def _check_source(source: ExamplesConfig, field: str) -> None:
    when = f"{field}.path is {source.path!r}"
    keys = ("prompt_key", "response_key", "messages_key")
    if source.path == WRITTEN:
        known, levels = GENERATED[WRITTEN], source.levels or ()
        given = source.num_examples
        checks.require(given is not None, f"{field}.num_examples", given, f"given for {WRITTEN}")
        wanted = f"a non-empty tuple of {', '.join(map(str, known))}"
        ok = len(levels) > 0 and set(levels) <= set(known)
        checks.require(ok, f"{field}.levels", source.levels, wanted)
        ok = source.split in ("train", "heldout")
        checks.require(ok, f"{field}.split", source.split, "'train' or 'heldout'")
        unread = keys
    else:
        ok = source.path not in GENERATED
        wanted = (
            f"a file, a directory, a data set or {WRITTEN!r}: no other generator writes responses"
        )
        checks.require(ok, f"{field}.path", source.path, wanted)
        unread = ("levels",)
    for name in unread:
        checks.require_unset(f"{field}.{name}", getattr(source, name), when)
    if source.messages_key is not None:
        for name in keys[:2]:
            checks.require_unset(
                f"{field}.{name}", getattr(source, name), f"{field}.messages_key is given"
            )
