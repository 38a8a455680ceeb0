"""Parts `step` and `resume`: a whole rollout step, and a checkpoint of the state."""

import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dapo_jax.models.sharding import fitting, initial_params, make_mesh
from dapo_jax.runs.checkpoint import Checkpoints
from dapo_jax.tools.bench import Shape, bench_step
from dapo_jax.tools.bench.memory import peaks
from dapo_jax.tools.bench.shapes import bench_model, no_text
from dapo_jax.tools.bench.train import bench_config
from dapo_jax.tools.check.findings import Check, Result
from dapo_jax.tools.check.machine import TRAINING_BYTES, Machine, judged
from dapo_jax.tools.check.trace import Trace, traced
from dapo_jax.training.learner import Learner

BUSY_SHARE = 0.9  # of a step in which a device works; less is called slow


def step_checks(machine: Machine, base: dict[str, Any]) -> dict[str, Check]:
    """Returns the checks of the part `step` by name.

    Args:
        base: the values of configs/tiny_dapo.py.
    """
    found: dict[str, Check] = {}
    for name, model in list(machine.models(TRAINING_BYTES).items())[:1]:
        for lengths in ("uniform", "longtail"):
            shape = _shape(model, machine, lengths)
            found[f"{name}, {lengths}"] = lambda shape=shape: _step(machine, shape, base)
    return found


def _shape(model: tuple, machine: Machine, lengths: str) -> Shape:
    prompt, response, prompts = (32, 64, 4) if machine.is_cpu else (256, 512, 16)
    return Shape(
        *model, prompts=prompts * machine.devices, group=8, prompt_len=prompt, gen_len=response,
        lengths=lengths, slots=0, decode_steps=8, page_tokens=32, temperature=1.0, top_p=1.0,
        runs=2,
    )  # fmt: skip


def _step(machine: Machine, shape: Shape, base: dict[str, Any]) -> Result:
    traces: list[Trace] = []
    found = bench_step(
        shape, 8 * machine.devices, "dots", base, lambda step: traces.append(traced(step))
    )
    phases = found["seconds_by_phase"]
    figures: dict[str, Any] = {
        "seconds": found["seconds_per_step"],
        "tokens_per_second": found["tokens_per_second"],
        "compilations": found["compilations"],
        **{f"{name}_seconds": seconds for name, seconds in phases.items()},
    }
    text = f"{found['seconds_per_step']:.2f} s: " + ", ".join(
        f"{k} {v:.2f}" for k, v in phases.items()
    )
    if found["compilations"]:
        return Result("wrong", f"{text}; it compiled {found['compilations']} times more", figures)
    if not traces[0].operations:
        return Result("ok", f"{text}; the profiler saw no operation of a device", figures)
    idle = traces[0].idle_share
    figures |= {"idle_share": idle, "longest": traces[0].longest(10)}
    return judged(1 - idle, BUSY_SHARE, machine, f"{text}; busy {100 - 100 * idle:.0f} %", figures)


def resume_checks(machine: Machine, base: dict[str, Any]) -> dict[str, Check]:
    """Returns the checks of the part `resume` by name."""
    models = list(machine.models(TRAINING_BYTES).items())[:2]
    return {name: lambda m=model: _resume(m, base) for name, model in models[-1:]}


def _resume(model: tuple, base: dict[str, Any]) -> Result:
    """Saves the state of a run of this model, and restores it bit for bit."""
    c = bench_model(model, param_dtype="float32")
    config = bench_config(
        c,
        base,
        prompts=2,
        group=2,
        prompt_len=16,
        row_len=64,
        rows_per_micro_batch=jax.device_count(),
    )
    mesh = make_mesh(fitting(c, jax.device_count()))
    learner = Learner(config, mesh, no_text, print)
    state = learner.init_state(initial_params(c, config.mesh, mesh, seed=0))
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    before = peaks()["peak_rss_mb"]
    with tempfile.TemporaryDirectory() as place:
        start = time.perf_counter()
        with Checkpoints(Path(place), keep_newest=1, keep_best=0, num_bytes=size) as checkpoints:
            checkpoints.save(1, state, {"step": 1}, accuracy=None)
            held = time.perf_counter() - start
            checkpoints.wait()
            saved = time.perf_counter() - start
            start = time.perf_counter()
            restored = checkpoints.restore(learner.state_like())
            read = time.perf_counter() - start
    assert restored is not None
    same = lambda a, b: bool(np.array_equal(np.asarray(a), np.asarray(b)))
    equal = jax.tree.all(jax.tree.map(same, state, restored[1]))
    figures = {
        "state_bytes": size,
        "blocked_seconds": held,
        "save_seconds": saved,
        "restore_seconds": read,
        "host_peak_mb": peaks()["peak_rss_mb"],
        "host_peak_before_mb": before,
    }
    text = f"{size / 1e9:.2f} GB saved in {saved:.1f} s ({held:.1f} s blocked)"
    text += f", restored in {read:.1f} s"
    return Result("ok" if equal else "wrong", text + ("" if equal else ", and not equal"), figures)
