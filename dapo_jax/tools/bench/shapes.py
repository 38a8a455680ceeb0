"""The shape of a benchmark's model and work, its random prompts and lengths, and its rollouts."""

import math
from collections.abc import Sequence
from typing import NamedTuple, get_args, get_type_hints

import jax
import numpy as np

from dapo_jax.config import MeshConfig, ModelConfig, model_config
from dapo_jax.rollout import paged_kernels, scheduler
from dapo_jax.rollout.admission import GenerationSettings
from dapo_jax.rollout.engine import DecoderEngine
from dapo_jax.rollout.engine_config import EngineConfig
from dapo_jax.rollout.sampling import SamplingParams
from dapo_jax.types import Problem, Response, UserError

LENGTHS = ("uniform", "longtail")
REMAT = get_args(get_type_hints(ModelConfig)["remat"])


class Shape(NamedTuple):
    """The model and the work of the benchmarks that generate."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    d_ff: int
    vocab: int
    dtype: str
    prompts: int
    group: int
    prompt_len: int
    gen_len: int
    lengths: str
    slots: int  # 0: one for each response, at most 64 a device
    decode_steps: int
    page_tokens: int
    temperature: float
    top_p: float
    runs: int
    prefill_prompts: int = 0  # in one call; 0: all, at most 8 a device

    def check(self) -> None:
        """Raises UserError for a value out of range."""
        check_model(*self[:7])
        check_positive(self, zero=("slots", "prefill_prompts"))
        if not 0 <= self.temperature < math.inf:
            raise UserError(f"--temperature must be 0 or more; got {self.temperature:g}.")
        if not 0 < self.top_p <= 1:
            raise UserError(f"--top_p must be above 0 and at most 1; got {self.top_p:g}.")
        check_lengths(self.lengths, self.gen_len)


def check_positive(shape: NamedTuple, zero: tuple[str, ...] = ()) -> None:
    """Raises UserError for an integer below 1, or below 0 where `zero` names it."""
    for name, value in shape._asdict().items():
        least, wanted = (0, "0 or more") if name in zero else (1, "above 0")
        if isinstance(value, int) and not isinstance(value, bool) and value < least:
            raise UserError(f"--{name} must be {wanted}; got {value}.")


def check_model(
    layers: int, width: int, heads: int, kv_heads: int, d_ff: int, vocab: int, dtype: str
) -> None:
    """Raises UserError for a model that does not exist."""
    if vocab < 2:
        raise UserError(f"--vocab must be 2 or more, for tokens to differ; got {vocab}.")
    if dtype not in ("float32", "bfloat16"):
        raise UserError(f"--dtype must be float32 or bfloat16; got {dtype!r}.")
    if heads < 1 or kv_heads < 1 or width % heads or heads % kv_heads:
        raise UserError(
            f"--heads ({heads}) must divide --width ({width}), and --kv_heads ({kv_heads}) --heads."
        )
    if width // heads % 2:
        raise UserError(
            f"--width ({width}) over --heads ({heads}) must be even (rotary pairs); got "
            f"{width // heads}."
        )


def check_lengths(lengths: str, longest: int) -> None:
    """Raises UserError if responses of at most `longest` tokens cannot have such lengths."""
    if lengths not in LENGTHS:
        raise UserError(f"--lengths must be {' or '.join(LENGTHS)}; got {lengths!r}.")
    if lengths == "longtail" and longest < 4:
        raise UserError(
            "--lengths=longtail needs responses of up to 4 tokens or more, since their mean is a "
            f"quarter of that; got {longest} (--gen_len, or --row_len less --prompt_len)."
        )


def check_row(row_len: int, prompt_len: int, lengths: str) -> None:
    """Raises UserError if a row cannot hold a prompt with such a response."""
    if row_len <= prompt_len:
        raise UserError(
            f"--row_len ({row_len}) must be above --prompt_len ({prompt_len}): a row holds a "
            "prompt with its response."
        )
    check_lengths(lengths, row_len - prompt_len)


def bench_model(shape: tuple, remat: str = "none", param_dtype: str | None = None) -> ModelConfig:
    """Returns a Qwen2 with tied embeddings.

    Args:
        shape: begins with the fields of `Shape` up to `dtype`.
        param_dtype: of the weights; None: `dtype`.
    """
    if remat not in REMAT:
        raise UserError(f"--remat must be one of {', '.join(REMAT)}; got {remat!r}.")
    layers, width, heads, kv_heads, d_ff, vocab, dtype = shape[:7]
    return model_config(
        dict(
            vocab_size=vocab,
            num_layers=layers,
            hidden_size=width,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=width // heads,
            intermediate_size=d_ff,
            rope_theta=1e6,
            qkv_bias=True,
            tie_embeddings=True,
            param_dtype=param_dtype or dtype,
            compute_dtype=dtype,
            remat=remat,
            # A CPU has caches to keep to; the others have ModelConfig's default.
            **(dict(log_prob_chunk_tokens=256) if jax.default_backend() == "cpu" else {}),
        )
    )


def sample_lengths(size: int, longest: int, lengths: str) -> np.ndarray:
    """Returns the tokens of `size` responses: all `longest`, or log-normal with sigma 1, cut at
    `longest` and scaled to a mean of a quarter of it."""
    if lengths == "uniform":
        return np.full(size, longest)
    raw = np.random.default_rng(0).lognormal(0.0, 1.0, size)
    low, high = 0.0, float(longest)
    for _ in range(60):  # the scale that gives this mean after the cut
        scale = (low + high) / 2
        mean = np.clip(np.ceil(scale * raw), 1, longest).mean()
        low, high = (scale, high) if mean < longest / 4 else (low, scale)
    return np.clip(np.ceil(high * raw), 1, longest).astype(int)


def response_lengths(shape: Shape) -> np.ndarray:
    """Returns the tokens of each response [prompts, group]."""
    lengths = sample_lengths(shape.prompts * shape.group, shape.gen_len, shape.lengths)
    return lengths.reshape(shape.prompts, shape.group)


def on_shards(shape: Shape, layout: MeshConfig) -> dict[str, int]:
    """Returns slots and prompts of a prefill: what the work needs, a multiple of the shards."""
    shards = layout.data * layout.fsdp
    wanted = {
        "slots": shape.slots or min(64 * shards, shape.prompts * shape.group),
        "prefill_prompts": shape.prefill_prompts or min(8 * shards, shape.prompts),
    }
    return {name: n + -n % shards for name, n in wanted.items()}


def bench_engine(shape: Shape, layout: MeshConfig) -> EngineConfig:
    """Returns the config of an engine with this platform's kernel. Responses end at their limits
    alone."""
    c, sizes = bench_model(shape), on_shards(shape, layout)
    kernel, refused = paged_kernels.choose(
        "auto", jax.default_backend(), c, page_tokens=shape.page_tokens
    )
    return EngineConfig(
        model=c,
        layout=layout,
        slots=sizes["slots"],
        prefill_prompts=sizes["prefill_prompts"],
        max_prompt_tokens=shape.prompt_len,
        max_response_tokens=shape.gen_len,
        stop_tokens=(),
        params=SamplingParams.of(shape),
        samples=shape.group,
        decode_steps=shape.decode_steps,
        page_tokens=shape.page_tokens,
        kernel=kernel,
        kernel_refused=refused,
    )


def random_problems(shape: Shape) -> list[Problem]:
    """Returns prompts of `prompt_len` random tokens."""
    rng = np.random.default_rng(1)
    tokens = lambda: tuple(rng.integers(1, shape.vocab, shape.prompt_len).tolist())
    return [Problem(i, "", tokens(), "", "") for i in range(shape.prompts)]


def no_text(sequences: Sequence[np.ndarray]) -> list[str]:
    """Returns empty texts: a benchmark has no tokenizer."""
    return [""] * len(sequences)


def generate(
    engine: DecoderEngine,
    shape: Shape,
    problems: Sequence[Problem],
    *,
    seed: int,
    limits_QG: np.ndarray | None = None,
) -> tuple[list[list[Response]], scheduler.RolloutStats]:
    """Returns `group` responses to each prompt, with empty texts, and what the rollout counted."""
    settings = GenerationSettings(shape.group, limits_QG=limits_QG)
    return scheduler.generate(engine, problems, no_text, jax.random.key(seed), settings)
