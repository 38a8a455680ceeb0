"""Benchmark of a whole step, rollout and update, by the trainer's own parts."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

from dapo_jax.models.sharding import check_batch_shapes, fitting, initial_params, make_mesh
from dapo_jax.rollout.engine import DecoderEngine
from dapo_jax.rollout.engine_config import make_engine_config
from dapo_jax.tools.bench.memory import peaks
from dapo_jax.tools.bench.shapes import (
    Shape,
    bench_model,
    generate,
    no_text,
    on_shards,
    random_problems,
    response_lengths,
)
from dapo_jax.tools.bench.train import bench_config
from dapo_jax.training.learner import Learner
from dapo_jax.training.schedule import Schedule
from dapo_jax.types import Group, Problem, Response, UserError, Verdict
from dapo_jax.utils.compilations import CompilationCounter


def bench_step(
    shape: Shape,
    micro_batch: int,
    remat: str,
    base: dict[str, Any],
    one_more: Callable[[Callable[[], None]], Any] | None = None,
) -> dict[str, Any]:
    """Returns the figures of the median of `shape.runs` steps, after a warm-up step.

    A step generates `group` responses to each prompt, calls about half of them correct, and makes
    one update; nothing is filtered.

    Args:
        micro_batch: rows of the update that are computed at once.
        base: a config with its objective and optimiser.
        one_more: called at the end with a function that makes another step, for a trace of it.
    """
    shape.check()
    if shape.group < 2:
        raise UserError(
            f"--group must be 2 or more, as an update compares them; got {shape.group}."
        )
    if micro_batch < 1:
        raise UserError(f"--micro_batch must be above 0; got {micro_batch}.")
    c = bench_model(shape, remat, param_dtype="float32")
    config = bench_config(
        c,
        base,
        prompts=shape.prompts,
        group=shape.group,
        prompt_len=shape.prompt_len,
        row_len=shape.prompt_len + shape.gen_len,
        rows_per_micro_batch=micro_batch,
        **on_shards(shape, fitting(c, jax.device_count())),
        decode_steps=shape.decode_steps,
        page_tokens=shape.page_tokens,
    )
    mesh = make_mesh(config.mesh)
    check_batch_shapes(config, mesh.shape)
    platform = mesh.devices.flat[0].platform
    engine_config = make_engine_config(
        config, mesh.shape, shape.prompt_len, stop_tokens=(), platform=platform
    )
    engine = DecoderEngine(engine_config, mesh)
    learner = Learner(config, mesh, no_text, print)
    state = learner.init_state(initial_params(c, config.mesh, mesh, seed=0))
    schedule = Schedule.first(config.objective)
    problems = random_problems(shape)
    lengths = response_lengths(shape)
    rollouts, updates, padding = [], [], 0.0

    def make_step() -> None:
        nonlocal state, schedule, padding
        step, start = len(updates) + 1, time.perf_counter()
        with engine.weights(state.policy.params):
            responses, _ = generate(engine, shape, problems, seed=step, limits_QG=lengths)
        groups = [_scored(problem, of, step) for problem, of in zip(problems, responses)]
        rollouts.append(time.perf_counter() - start)
        start = time.perf_counter()
        state, schedule, numbers = learner.train_on(state, schedule, groups, step)
        jax.block_until_ready(state)
        updates.append(time.perf_counter() - start)
        padding = numbers["batch/padding_share"]

    make_step()
    counter = CompilationCounter()
    for _ in range(shape.runs):
        make_step()
    compilations = counter.count
    seconds = [a + b for a, b in zip(rollouts, updates)][1:]
    median = statistics.median(seconds)
    of_phase = {
        "rollout": round(statistics.median(rollouts[1:]), 4),
        "update": round(statistics.median(updates[1:]), 4),
    }
    if one_more is not None:
        one_more(make_step)
    return {
        "seconds_per_step": round(median, 4),
        "seconds_by_phase": of_phase,
        "tokens_per_second": round(int(lengths.sum()) / median, 1),
        "compilations": compilations,
        **peaks(),
        "padding_fraction": round(padding, 4),
        "share_prompts": config.train.share_prompts,
        "remat": remat,
        "seconds": [round(t, 4) for t in sorted(seconds)],
        "tokens": int(lengths.sum()),
        "device": jax.devices()[0].device_kind,
        "shape": shape._asdict(),
    }


def _scored(problem: Problem, responses: list[Response], step: int) -> Group:
    """Returns the group; a response is correct if its tokens sum to an even number. The first two
    always differ, for an advantage that is not 0."""
    right = [bool(r.tokens.sum() % 2 == 0) for r in responses]
    right[1] = not right[0]
    verdicts = tuple(Verdict(correct, 1.0 if correct else -1.0) for correct in right)
    ended = tuple(r._replace(finish_reason="stop") for r in responses)
    return Group(problem, ended, verdicts, step)
