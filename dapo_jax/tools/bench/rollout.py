"""Benchmark of rollouts: tokens per second, occupancy of the slots, seconds by phase."""

import functools
import time
from typing import Any

import jax
import numpy as np

from dapo_jax.models.sharding import fitting, initial_params, make_mesh
from dapo_jax.rollout.engine import DecoderEngine
from dapo_jax.rollout.jetstream import VALID
from dapo_jax.rollout.scheduler import RolloutStats
from dapo_jax.tools.bench.memory import peaks
from dapo_jax.tools.bench.shapes import (
    Shape,
    bench_engine,
    bench_model,
    generate,
    random_problems,
    response_lengths,
)
from dapo_jax.utils.compilations import CompilationCounter


def bench_rollout(shape: Shape) -> dict[str, Any]:
    """Returns the figures of the median of `shape.runs` runs, after a warm-up run."""
    shape.check()
    c = bench_model(shape)
    layout = fitting(c, jax.device_count())
    mesh = make_mesh(layout)
    engine_config = bench_engine(shape, layout)
    engine = DecoderEngine(engine_config, mesh)
    # Small parameters: no token is much more probable than another.
    small = lambda x: x if x.ndim < 3 else 0.3 * x
    params = jax.tree.map(small, initial_params(c, layout, mesh, seed=0))
    problems, lengths = random_problems(shape), response_lengths(shape)

    def run(number: int, engine: DecoderEngine = engine) -> tuple[float, RolloutStats]:
        with engine.weights(params):
            start = time.perf_counter()
            _, stats = generate(engine, shape, problems, seed=number, limits_QG=lengths)
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
    offered = stats.slots_offered
    occupancy = round(stats.busy_slots / offered, 4) if offered else None
    return {
        "tokens_per_second": round(tokens / median, 1),
        "occupancy": occupancy,
        "compilations": compilations,
        **peaks(),
        "seconds": [round(t, 4) for t in seconds],
        "first_seconds": round(first_seconds, 2),
        "seconds_by_phase": {name: round(t, 4) for name, t in phases.items()},
        # Decode: a full call; the last ones of a rollout sample fewer tokens.
        "seconds_per_call": {
            "prefill": round((phases["prefill"] + phases["insert"]) / waiting.calls["prefill"], 6),
            "decode": round(phases["decode"] * engine_config.decode_steps / waiting.steps, 6),
            "host": round(phases["host"] / waiting.calls["decode"], 6),
        },
        "tokens": tokens,
        "slots": engine_config.slots,
        "device": jax.devices()[0].device_kind,
        "shape": shape._asdict(),
    }


class _WaitingEngine(DecoderEngine):
    """The engine with every call waited for and timed, so that no phases overlap."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.seconds = {"prefill": 0.0, "insert": 0.0, "decode": 0.0}
        self.calls = dict.fromkeys(self.seconds, 0)
        self.steps = 0  # decode steps with a busy slot
        self.whole = 0.0  # seconds of the run

    def _timed(self, phase: str, call: Any, *arguments: Any) -> Any:
        start = time.perf_counter()
        found = jax.block_until_ready(call(*arguments))
        self.seconds[phase] += time.perf_counter() - start
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
