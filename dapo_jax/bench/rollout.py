"""How fast responses are drawn: tokens per second, occupancy of the slots, share of the limit."""

import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dapo_jax import model
from dapo_jax.bench.memory import resident_bytes
from dapo_jax.compilations import CompilationCounter
from dapo_jax.config import MeshConfig, ModelConfig, model_config
from dapo_jax.rollout import kernels, scheduler
from dapo_jax.rollout.engine import DecoderEngine
from dapo_jax.rollout.sampling import SamplingParams
from dapo_jax.rollout.spec import EngineSpec
from dapo_jax.sharding import fitting, make_mesh, param_shardings
from dapo_jax.types import Problem, UserError

LENGTHS = ("uniform", "longtail")


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

    def check(self) -> None:
        """Raises UserError for what is out of range."""
        for name, value in self._asdict().items():
            if isinstance(value, int) and value < (0 if name == "slots" else 1):
                raise UserError(f"--{name} must be above 0; got {value}.")
        if self.lengths not in LENGTHS:
            raise UserError(f"--lengths must be {' or '.join(LENGTHS)}; got {self.lengths!r}.")
        if self.dtype not in ("float32", "bfloat16"):
            raise UserError(f"--dtype must be float32 or bfloat16; got {self.dtype!r}.")
        if self.width % self.heads or self.heads % self.kv_heads:
            raise UserError(
                f"--heads ({self.heads}) must divide --width ({self.width}), and --kv_heads "
                f"({self.kv_heads}) --heads."
            )


def bench_model(shape: Shape) -> ModelConfig:
    """A Qwen2 with tied embeddings."""
    return model_config(
        dict(
            path=None, tokenizer=None, vocab_size=shape.vocab, num_layers=shape.layers,
            width=shape.width, num_heads=shape.heads, num_kv_heads=shape.kv_heads,
            head_dim=shape.width // shape.heads, ff_width=shape.d_ff, rope_theta=1e6,
            rope_scaling=None, rms_norm_eps=1e-6, qkv_bias=True, qk_norm=False,
            tie_embeddings=True, sliding_window=None, sliding_layers=(), stop_token_ids=(),
            param_dtype=shape.dtype, compute_dtype=shape.dtype, remat="none",
            attention="auto", log_prob_chunk_tokens=4096,
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


def bench_rollout(shape: Shape) -> dict[str, Any]:
    """The figures, from the median run of `shape.runs` after one that is not counted."""
    shape.check()
    c = bench_model(shape)
    layout: MeshConfig = fitting(c, jax.device_count())
    mesh, shards = make_mesh(layout), layout.data * layout.fsdp
    init = jax.jit(
        lambda key: model.init_params(c, key), out_shardings=param_shardings(c, layout, mesh)
    )
    # Small, so that no token is much more probable than another.
    params = jax.tree.map(lambda x: x if x.ndim < 3 else 0.3 * x, init(jax.random.key(0)))
    up = lambda n: n + -n % shards
    lengths = draw_lengths(shape)
    slots = shape.slots or min(64 * shards, lengths.size)
    spec = EngineSpec(
        model=c,
        layout=layout,
        slots=up(slots),
        prefill_prompts=up(min(shape.prompts, 8 * shards)),
        max_prompt_tokens=shape.prompt_len,
        max_response_tokens=shape.gen_len,
        stop_tokens=(),
        samples=shape.group,
        decode_steps=shape.decode_steps,
        page_tokens=shape.page_tokens,
        kernel=kernels.choose(
            "auto", jax.default_backend(), c, page_tokens=shape.page_tokens, cache_dtype="auto"
        ),
    )
    engine, waiting = DecoderEngine(spec, mesh), _WaitingEngine(spec, mesh)
    params = engine.load_params(params)
    rng = np.random.default_rng(1)
    problems = [
        Problem(i, "", tuple(rng.integers(1, shape.vocab, shape.prompt_len).tolist()), "", "")
        for i in range(shape.prompts)
    ]

    def run(number: int, engine: DecoderEngine = engine) -> tuple[float, scheduler.RolloutStats]:
        begun = time.perf_counter()
        _, stats = scheduler.generate(
            engine,
            params,
            problems,
            lambda sequences: [""] * len(sequences),
            num_samples=shape.group,
            key=jax.random.key(number),
            sampling=SamplingParams(shape.temperature, shape.top_p),
            limits=lambda problem, sample: int(lengths[problem, sample]),
        )
        return time.perf_counter() - begun, stats

    first_seconds, _ = run(0)
    counter = CompilationCounter()
    timed = [run(number) for number in range(1, shape.runs + 1)]
    compilations = counter.count
    waited, _ = run(shape.runs + 1, waiting)
    seconds = sorted(t for t, _ in timed)
    median = seconds[len(seconds) // 2]
    stats = timed[0][1]
    tokens = int(lengths.sum())
    assert stats.tokens == tokens, (stats.tokens, tokens)
    on_cpu = jax.default_backend() == "cpu"
    limit = (
        matmul_tokens_per_second(c, shape, spec.slots)
        if on_cpu
        else memory_tokens_per_second(c, params, lengths, shape.prompt_len, spec.slots)
    )
    return {
        "tokens_per_second": round(tokens / median, 1),
        "occupancy": round(stats.busy_slots / stats.slots_offered, 4) if stats.slots_offered
        else None,
        "compilations": compilations,
        "peak_rss_mb": round(_peak_rss() / 1e6, 1),
        "fraction_of_limit": round(tokens / median / limit, 4),
        "limit": "matrix products" if on_cpu else "memory bandwidth",
        "limit_tokens_per_second": round(limit, 1),
        "seconds": [round(t, 4) for t in seconds],
        "first_seconds": round(first_seconds, 2),
        "seconds_by_phase": {
            name: round(t, 4)
            for name, t in {
                **waiting.seconds, "host": waited - sum(waiting.seconds.values())
            }.items()
        },
        "tokens": tokens,
        "slots": spec.slots,
        "device": jax.devices()[0].device_kind,
        "shape": shape._asdict(),
    }  # fmt: skip


def matmul_tokens_per_second(c: ModelConfig, shape: Shape, slots: int) -> float:
    """What the matrix products of decoding alone would allow, all slots at work: measured with
    products of the very shapes, one after another, on this machine."""
    dtype = jnp.dtype(c.compute_dtype)
    D, H = c.width, c.head_dim
    shapes = [
        (D, c.num_heads * H), (D, c.num_kv_heads * H), (D, c.num_kv_heads * H),
        (c.num_heads * H, D), (D, c.ff_width), (D, c.ff_width), (c.ff_width, D),
    ] * c.num_layers + [(D, c.vocab_size)]  # fmt: skip
    key = jax.random.key(0)
    weights = [jax.random.normal(key, s, dtype) for s in shapes]
    inputs = {n: jax.random.normal(key, (slots, n), dtype) for n in {s[0] for s in shapes}}
    product = jax.jit(lambda inputs, weights: [inputs[w.shape[0]] @ w for w in weights])
    jax.block_until_ready(product(inputs, weights))
    seconds = []
    for _ in range(20):
        begun = time.perf_counter()
        jax.block_until_ready(product(inputs, weights))
        seconds.append(time.perf_counter() - begun)
    return slots / sorted(seconds)[len(seconds) // 2]


def memory_tokens_per_second(
    c: ModelConfig,
    params: Any,
    lengths: np.ndarray,
    prompt_len: int,
    slots: int,
    words: int = 2**28,
) -> float:
    """What reading the weights once a step, and of each sequence its keys and values so far, would
    allow with all slots at work, at the bandwidth measured by copying.

    Args:
        lengths: of the responses, in tokens.
        words: float32 of the array that is copied.
    """
    words_W = jnp.zeros(words, jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    jax.block_until_ready(copy(words_W))
    begun = time.perf_counter()
    for _ in range(10):
        words_W = copy(words_W)
    jax.block_until_ready(words_W)
    bytes_per_second = 10 * 2 * words_W.nbytes / (time.perf_counter() - begun)
    weights = sum(x.nbytes for x in jax.tree.leaves(params))
    if "unembed" in params:
        weights -= params["embed"].nbytes  # of which a step reads a row a slot
    itemsize = jnp.dtype(c.compute_dtype).itemsize
    token = 2 * c.num_layers * c.num_kv_heads * c.head_dim * itemsize
    context = (lengths * (prompt_len + lengths / 2)).sum() / lengths.sum()  # mean over tokens
    return slots * bytes_per_second / (weights + slots * context * token)


class _WaitingEngine(DecoderEngine):
    """The engine with every call waited for and timed: the phases, with nothing overlapping."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.seconds = {"prefill": 0.0, "enqueue": 0.0, "decode": 0.0}

    def _timed(self, phase: str, call: Any, *arguments: Any) -> Any:
        begun = time.perf_counter()
        found = jax.block_until_ready(call(*arguments))
        self.seconds[phase] += time.perf_counter() - begun
        return found

    def prefill_many(self, params: Any, tokens_RPT: Any, length_RP: Any, key_RP2: Any) -> Any:
        call = super().prefill_many
        return self._timed("prefill", call, params, tokens_RPT, length_RP, key_RP2)

    def enqueue(self, state: Any, prefix: Any, arrivals: Any) -> Any:
        return self._timed("enqueue", super().enqueue, state, prefix, arrivals)

    def decode(self, params: Any, state: Any, table_pages: int, mode: Any) -> Any:
        return self._timed("decode", super().decode, params, state, table_pages, mode)


def _peak_rss() -> int:
    return resident_bytes("VmHWM")
