"""What the benchmarks share: the shape of model and work, and random parameters and prompts."""

import math
from typing import NamedTuple, get_args, get_type_hints

import numpy as np

from dapo_jax.config import MeshConfig, ModelConfig, model_config
from dapo_jax.rollout import kernels
from dapo_jax.rollout.engine_config import EngineConfig
from dapo_jax.rollout.sampling import SamplingParams
from dapo_jax.types import Problem, UserError

LENGTHS = ("uniform", "longtail")
REMAT = get_args(get_type_hints(ModelConfig)["remat"])


class Shape(NamedTuple):
    """Of the model and of the work."""

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
    slots: int  # 0: as many as there are responses, at most 64 a device
    decode_steps: int
    page_tokens: int
    temperature: float
    top_p: float
    runs: int
    prefill_prompts: int = 0  # of a call; 0: all there are, at most 8 a device

    def check(self) -> None:
        """Raises UserError for what is out of range."""
        for name, value in self._asdict().items():
            least = 0 if name in ("slots", "prefill_prompts") else 1
            if isinstance(value, int) and value < least:
                wanted = "above 0" if least else "0 or more"
                raise UserError(f"--{name} must be {wanted}; got {value}.")
        if self.vocab < 2:
            raise UserError(f"--vocab must be 2 or more, for tokens to differ; got {self.vocab}.")
        if not 0 <= self.temperature < math.inf:
            raise UserError(f"--temperature must be 0 or more; got {self.temperature:g}.")
        if not 0 < self.top_p <= 1:
            raise UserError(f"--top_p must be above 0 and at most 1; got {self.top_p:g}.")
        check_lengths(self.lengths, self.gen_len)
        if self.dtype not in ("float32", "bfloat16"):
            raise UserError(f"--dtype must be float32 or bfloat16; got {self.dtype!r}.")
        if self.width % self.heads or self.heads % self.kv_heads:
            raise UserError(
                f"--heads ({self.heads}) must divide --width ({self.width}), and --kv_heads "
                f"({self.kv_heads}) --heads."
            )
        if self.width // self.heads % 2:
            raise UserError(
                f"--width ({self.width}) over --heads ({self.heads}) must be even (rotary pairs); "
                f"got {self.width // self.heads}."
            )


def check_lengths(lengths: str, longest: int) -> None:
    """Raises UserError if responses of at most `longest` tokens cannot be so long."""
    if lengths not in LENGTHS:
        raise UserError(f"--lengths must be {' or '.join(LENGTHS)}; got {lengths!r}.")
    if lengths == "longtail" and longest < 4:
        raise UserError(
            "--lengths=longtail needs responses of up to 4 tokens or more, a quarter of which is "
            f"their mean; got {longest} (--gen_len, or --row_len less --prompt_len)."
        )


def bench_model(shape: Shape, remat: str = "none", masters: str | None = None) -> ModelConfig:
    """A Qwen2 with tied embeddings; `remat` as in `ModelConfig`.

    Args:
        masters: dtype of the weights as they are kept; None: `shape.dtype`.
    """
    if remat not in REMAT:
        raise UserError(f"--remat must be one of {', '.join(REMAT)}; got {remat!r}.")
    return model_config(
        dict(
            path=None, tokenizer=None, vocab_size=shape.vocab, num_layers=shape.layers,
            hidden_size=shape.width, num_heads=shape.heads, num_kv_heads=shape.kv_heads,
            head_dim=shape.width // shape.heads, intermediate_size=shape.d_ff, rope_theta=1e6,
            rope_scaling=None, rms_norm_eps=1e-6, qkv_bias=True, qk_norm=False,
            tie_embeddings=True, sliding_window=None, sliding_layers=(), stop_token_ids=(),
            param_dtype=masters or shape.dtype, compute_dtype=shape.dtype, remat=remat,
            attention="auto", log_prob_chunk_tokens=256,
        )
    )  # fmt: skip


def draw_lengths(shape: Shape) -> np.ndarray:
    """Tokens of each response [prompts, group]: all gen_len, or drawn from a log-normal
    distribution with sigma 1, cut off at gen_len and scaled to a mean of gen_len / 4."""
    size = shape.prompts, shape.group
    if shape.lengths == "uniform":
        return np.full(size, shape.gen_len)
    raw = np.random.default_rng(0).lognormal(0.0, 1.0, size)
    low, high = 0.0, float(shape.gen_len)
    for _ in range(60):  # the scale at which the mean, after the cut, is as wanted
        scale = (low + high) / 2
        mean = np.clip(np.ceil(scale * raw), 1, shape.gen_len).mean()
        low, high = (scale, high) if mean < shape.gen_len / 4 else (low, scale)
    return np.clip(np.ceil(high * raw), 1, shape.gen_len).astype(int)


def on_shards(shape: Shape, layout: MeshConfig) -> dict[str, int]:
    """Slots and prompts of a prefill: what the work needs, a multiple of the shards."""
    shards = layout.data * layout.fsdp
    wanted = {
        "slots": shape.slots or min(64 * shards, shape.prompts * shape.group),
        "prefill_prompts": shape.prefill_prompts or min(8 * shards, shape.prompts),
    }
    return {name: n + -n % shards for name, n in wanted.items()}


def bench_engine_config(
    shape: Shape, layout: MeshConfig, *, kernel: kernels.Kernel
) -> EngineConfig:
    """An engine for the work, whose responses end at their limits alone."""
    sizes = on_shards(shape, layout)
    return EngineConfig(
        model=bench_model(shape),
        layout=layout,
        slots=sizes["slots"],
        prefill_prompts=sizes["prefill_prompts"],
        max_prompt_tokens=shape.prompt_len,
        max_response_tokens=shape.gen_len,
        stop_tokens=(),
        params=SamplingParams(shape.temperature, shape.top_p),
        samples=shape.group,
        decode_steps=shape.decode_steps,
        page_tokens=shape.page_tokens,
        kernel=kernel,
    )


def random_problems(shape: Shape) -> list[Problem]:
    """Prompts of `prompt_len` random tokens."""
    rng = np.random.default_rng(1)
    tokens = lambda: tuple(rng.integers(1, shape.vocab, shape.prompt_len).tolist())
    return [Problem(i, "", tokens(), "", "") for i in range(shape.prompts)]
