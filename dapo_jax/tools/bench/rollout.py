"""How fast responses are drawn: tokens per second, occupancy of the slots, share of the limit."""

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dapo_jax.config import ModelConfig
from dapo_jax.models.sharding import fitting, initial_params, make_mesh
from dapo_jax.rollout import kernels, scheduler
from dapo_jax.rollout.admission import GenerationRequest
from dapo_jax.rollout.engine import DecoderEngine
from dapo_jax.rollout.jetstream import VALID
from dapo_jax.rollout.sampling import SamplingParams
from dapo_jax.tools.bench.memory import peaks
from dapo_jax.tools.bench.shapes import (
    Shape,
    bench_engine_config,
    bench_model,
    draw_lengths,
    random_problems,
)
from dapo_jax.utils.compilations import CompilationCounter


def bench_rollout(shape: Shape) -> dict[str, Any]:
    """The figures, from the median run of `shape.runs` after one that is not counted."""
    shape.check()
    c = bench_model(shape)
    layout = fitting(c, jax.device_count())
    mesh = make_mesh(layout)
    kernel, _ = kernels.choose("auto", jax.default_backend(), c, page_tokens=shape.page_tokens)
    engine_config = bench_engine_config(shape, layout, kernel=kernel)
    engine = DecoderEngine(engine_config, mesh)
    # Small, so that no token is much more probable than another.
    small = lambda x: x if x.ndim < 3 else 0.3 * x
    params = jax.tree.map(small, initial_params(c, layout, mesh, seed=0))
    problems, lengths = random_problems(shape), draw_lengths(shape)

    def run(number: int, engine: DecoderEngine = engine) -> tuple[float, scheduler.RolloutStats]:
        with engine.weights(params):
            start = time.perf_counter()
            _, stats = scheduler.generate(
                engine,
                problems,
                lambda sequences: [""] * len(sequences),
                jax.random.key(number),
                GenerationRequest(
                    shape.group,
                    SamplingParams(shape.temperature, shape.top_p),
                    limits_QG=lengths,
                ),
            )
            return time.perf_counter() - start, stats

    first_seconds, _ = run(0)
    counter = CompilationCounter()
    timed = [run(number) for number in range(1, shape.runs + 1)]
    compilations = counter.count
    waited = [_WaitingEngine(engine_config, mesh) for _ in range(shape.runs)]
    for number, one in enumerate(waited, shape.runs + 1):
        one.whole, _ = run(number, one)
    waiting = sorted(waited, key=lambda one: one.whole)[len(waited) // 2]
    phases = {**waiting.seconds, "host": waiting.whole - sum(waiting.seconds.values())}
    seconds = sorted(t for t, _ in timed)
    median = seconds[len(seconds) // 2]
    stats = timed[0][1]
    tokens = int(lengths.sum())
    assert stats.tokens == tokens, (stats.tokens, tokens)
    peak = peaks()  # before the limit is measured
    on_cpu = jax.default_backend() == "cpu"
    limit = (
        matmul_tokens_per_second(c, shape, engine_config.slots)
        if on_cpu
        else memory_tokens_per_second(
            c,
            engine.load_params(params).decode,
            lengths,
            shape.prompt_len,
            engine_config.slots,
            devices=mesh.size,
            shards=engine_config.shards,
        )
    )
    return {
        "tokens_per_second": round(tokens / median, 1),
        "occupancy": round(stats.busy_slots / stats.slots_offered, 4) if stats.slots_offered
        else None,
        "compilations": compilations,
        **peak,
        "fraction_of_limit": round(tokens / median / limit, 4),
        "limit": "matrix products" if on_cpu else "memory bandwidth",
        "limit_tokens_per_second": round(limit, 1),
        "seconds": [round(t, 4) for t in seconds],
        "first_seconds": round(first_seconds, 2),
        "seconds_by_phase": {name: round(t, 4) for name, t in phases.items()},
        # Of decode: of one that draws all of its tokens; the last of a rollout draws fewer.
        "seconds_per_call": {
            "prefill": round((phases["prefill"] + phases["insert"]) / waiting.calls["prefill"], 6),
            "decode": round(phases["decode"] * engine_config.decode_steps / waiting.steps, 6),
            "host": round(phases["host"] / waiting.calls["decode"], 6),
        },
        "tokens": tokens,
        "slots": engine_config.slots,
        "device": jax.devices()[0].device_kind,
        "shape": shape._asdict(),
    }  # fmt: skip


def matmul_tokens_per_second(c: ModelConfig, shape: Shape, slots: int) -> float:
    """What the matrix products of decoding alone would allow, all slots at work: measured with
    products of the very shapes, one after another, on this machine."""
    dtype = jnp.dtype(c.compute_dtype)
    D, H, F = c.hidden_size, c.head_dim, c.intermediate_size
    shapes = [
        (D, c.num_heads * H), (D, c.num_kv_heads * H), (D, c.num_kv_heads * H),
        (c.num_heads * H, D), (D, F), (D, F), (F, D),
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
    *,
    devices: int = 1,
    shards: int = 1,
    words: int = 2**28,
) -> float:
    """What reading the weights once a step and shard, and of each sequence its keys and values so
    far, would allow with all slots at work, at the bandwidth of one device measured by copying.

    Args:
        lengths: of the responses, in tokens.
        slots: on all devices.
        shards: that slots lie over; the devices of one have the weights between them.
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
    return slots * devices * bytes_per_second / (shards * weights + slots * context * token)


class _WaitingEngine(DecoderEngine):
    """The engine with every call waited for and timed: the phases, with nothing overlapping."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.seconds = {"prefill": 0.0, "insert": 0.0, "decode": 0.0}
        self.calls = dict.fromkeys(self.seconds, 0)
        self.steps = 0  # tokens drawn in a slot
        self.whole = 0.0  # seconds of a run

    def _timed(self, phase: str, call: Any, *arguments: Any) -> Any:
        begun = time.perf_counter()
        found = jax.block_until_ready(call(*arguments))
        self.seconds[phase] += time.perf_counter() - begun
        self.calls[phase] += 1
        return found

    def prefill(self, **arguments: Any) -> Any:
        return self._timed("prefill", functools.partial(super().prefill, **arguments))

    def insert(self, prefix: Any, decode_state: Any, slot: Any) -> Any:
        return self._timed("insert", super().insert, prefix, decode_state, slot)

    def generate(self, params: Any, decode_state: Any, mode: Any = None) -> Any:
        call = super().generate
        state, output = self._timed("decode", call, params, decode_state, mode)
        self.steps += int((np.asarray(output.flags_RkB) & VALID).any(axis=(0, 2)).sum())
        return state, output
