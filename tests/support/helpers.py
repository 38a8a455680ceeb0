"""Configs, models and rows for tests."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from configs import tiny_dapo
from dapo_jax.config import Config, ModelConfig
from dapo_jax.models import chunked_softmax, decoder, sharding
from dapo_jax.models.attention import xla
from dapo_jax.training import packing
from dapo_jax.types import Group, Problem, Response, Rows, Verdict

SHARED = Path(__file__).resolve().parents[3] / "shared"

# Sizes chosen so that the whole loop runs in seconds and every axis divides over eight devices.
SMALL: dict[str, Any] = {
    "model.hidden_size": 32,
    "model.num_layers": 2,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.head_dim": 8,
    "model.intermediate_size": 48,
    "data.train.sums.num_problems": 64,
    "data.train.sums.levels": (3, 4),
    "data.heldout.sums.num_problems": 8,
    "data.heldout.sums.levels": (3, 4),
    "pretrain.num_steps": 100,
    "pretrain.rows_per_step": 8,
    "rollout.group_size": 4,
    "rollout.slots": 16,
    "rollout.prefill_prompts": 8,
    "rollout.max_response_tokens": 32,
    "reward.overlong_buffer_tokens": 8,
    "dynamic_sampling.max_prompts": 32,
    "train.num_steps": 3,
    "train.prompts_per_step": 4,
    "train.prompts_per_update": 2,
    "train.row_tokens": 64,
    "train.rows_per_micro_batch": 8,
    "evaluation.every_steps": 2,
    "evaluation.num_samples": 4,
    "evaluation.top_p": 1.0,  # evaluations have the programs of training rollouts
    "checkpoint.every_steps": 1,
    "log.rollouts_per_step": 4,
}


def source_dict(path: str, **fields: Any) -> dict[str, Any]:
    """A source of problems as a config file gives it."""
    return {"path": path} | fields


def tiny_dict(**overrides: Any) -> dict[str, Any]:
    """configs/tiny_dapo.py at test size as nested dicts, defaults left out; keys are written
    `group__field`."""
    return with_fields(tiny_dapo.get_config().to_dict(), SMALL | dotted(overrides))


def dotted(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Values by `group.field` where they are named `group__field`."""
    return {name.replace("__", "."): value for name, value in overrides.items()}


def with_fields(values: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Sets fields of nested dicts, each named `group.field`; returns the dicts."""
    for name, value in changes.items():
        *groups, field = name.split(".")
        inner = values
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[field] = value
    return values


def tiny_config(**overrides: Any) -> Config:
    """Returns `tiny_dict` as a checked config."""
    return Config.from_dict(tiny_dict(**overrides))


def replace_model(config: Config, **changes: Any) -> ModelConfig:
    return dataclasses.replace(config.model, **changes)


def make_params(config: Config, seed: int = 0) -> decoder.Params:
    return decoder.init_params(config.model, jax.random.key(seed))


def logits_of(c: ModelConfig, params: decoder.Params, tokens_T: Sequence[int]) -> np.ndarray:
    """Returns the logits [T, V] after each token of one sequence, by the forward pass of the
    update. Padded to whole 64 tokens, so that one program serves most lengths."""
    row = np.zeros((2, -(-len(tokens_T) // 64) * 64), np.int32)
    row[:, : len(tokens_T)] = tokens_T, np.ones(len(tokens_T), np.int32)
    return np.asarray(_padded_logits(c, params, *row))[: len(tokens_T)]


@functools.partial(jax.jit, static_argnums=0)
def _padded_logits(
    c: ModelConfig, params: decoder.Params, tokens_T: jax.Array, segments_T: jax.Array
) -> jax.Array:
    attend, places_T = xla.packed(segments_T[None]), jnp.arange(len(tokens_T))
    hidden_BTD, _ = decoder.bind(c, params)(tokens_T[None], places_T[None], attend)
    return chunked_softmax.logits(hidden_BTD[0], decoder.unembedding(params), temperature=1.0)


def in_float64(tree: Any) -> Any:
    """Returns the arrays with float32 ones in float64; to be used under `jax.enable_x64`."""
    wider = lambda x: np.asarray(x, np.float64) if x.dtype == np.float32 else x
    return jax.tree.map(wider, tree)


def make_mesh(config: Config, num_devices: int) -> jax.sharding.Mesh:
    return sharding.make_mesh(config.mesh, jax.devices()[:num_devices])


class Sample(NamedTuple):
    """A prompt with its response and what a row holds of it."""

    prompt_tokens: list[int]
    response_tokens: np.ndarray  # int32 [n]
    weight: float
    log_prob_old: np.ndarray  # float32 [n]
    advantage: float
    correction: float = 1.0
    trained: bool = True
    staleness: int = 0

    @property
    def length(self) -> int:
        return len(self.prompt_tokens) + len(self.response_tokens)


def in_groups(samples: Sequence[Sample], size: int) -> list[Sample]:
    """The samples with the prompt of the first of each `size` for all of these."""
    prompts = [sample.prompt_tokens for sample in samples[::size] for _ in range(size)]
    return [s._replace(prompt_tokens=prompt) for s, prompt in zip(samples, prompts)]


def random_samples(
    rng: np.random.Generator, num: int, *, vocab_size: int = 32, longest: int = 28
) -> list[Sample]:
    """Sequences with plausible old log-probs, advantages and token-mean weights."""
    lengths = rng.integers(1, longest, num)
    weight = 1 / lengths.sum()
    return [
        Sample(
            prompt_tokens=rng.integers(3, vocab_size, rng.integers(1, 9)).tolist(),
            response_tokens=rng.integers(3, vocab_size, n).astype(np.int32),
            weight=weight,
            log_prob_old=(-3.4 + 0.3 * rng.standard_normal(n)).astype(np.float32),
            advantage=float(rng.standard_normal()),
            correction=float(rng.uniform(0.5, 1.5)),
        )
        for n in lengths
    ]


def pack_samples(samples: Sequence[Sample], row_tokens: int, **cut: Any) -> packing.Packed:
    """The samples packed, without their columns; `cut` as of `packing.pack`."""
    return packing.pack(
        [sample.prompt_tokens for sample in samples],
        np.concatenate([sample.response_tokens for sample in samples]),
        np.array([len(sample.response_tokens) for sample in samples]),
        row_tokens,
        **cut,
    )


def segments_of(rows: Rows) -> Iterator[tuple[int, np.ndarray]]:
    """(row, mask of its tokens) of each segment, in order."""
    for row, segments in enumerate(rows.segments_BT):
        for segment in range(1, segments.max() + 1):
            yield row, segments == segment


def rows_of(samples: Sequence[Sample], row_tokens: int, *, share_prompts: bool = False) -> Rows:
    """Packed rows with every column that a loss reads."""
    lengths = [len(sample.response_tokens) for sample in samples]
    of_tokens = lambda values: np.repeat(np.array(values), lengths)
    trained = of_tokens([sample.trained for sample in samples])
    return packing.fill(
        pack_samples(samples, row_tokens, share_prompts=share_prompts),
        mask_BT=trained,
        weight_BT=trained * of_tokens([sample.weight for sample in samples]),
        log_prob_old_BT=np.concatenate([sample.log_prob_old for sample in samples]),
        advantage_BT=trained * of_tokens([sample.advantage for sample in samples]),
        correction_BT=trained * of_tokens([sample.correction for sample in samples]),
        staleness_BT=of_tokens([sample.staleness for sample in samples]),
    )


def make_group(
    correct: list[bool], *, lengths: list[int] | None = None, id: int = 0, truncated: int = 0
) -> Group:
    """A group with these verdicts; its last `truncated` responses are cut at the limit."""
    lengths = lengths or [3 + i for i in range(len(correct))]
    stops = len(correct) - truncated
    responses = tuple(
        Response(
            np.full(n, 5, np.int32),
            np.full(n, -1.0, np.float32),
            "stop" if i < stops else "length",
            f"text {i}",
        )
        for i, n in enumerate(lengths)
    )
    verdicts = tuple(Verdict(c, 1.0 if c else -1.0) for c in correct)
    return Group(Problem(id, f"p{id}", (1, 2, 3), "7", "test"), responses, verdicts, 1)
