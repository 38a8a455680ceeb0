"""The programs of a run lowered from shapes, and the memory that the run holds meanwhile.

They are the jitted functions that the learner and the engine call, with the same shardings and
donations. Nothing here is compiled; `compiled` does that.
"""

import bisect
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from dapo_jax.config import Config
from dapo_jax.models import decoder, lora
from dapo_jax.models.sharding import (
    check_batch_shapes,
    param_shardings,
    rollout_mesh,
    row_sharding,
    with_shardings,
)
from dapo_jax.rollout import memory_budget
from dapo_jax.rollout.engine import DecoderEngine
from dapo_jax.rollout.engine_config import EngineConfig, make_engine_config
from dapo_jax.rollout.programs import rollout_dtypes, rollout_layout, unrolls
from dapo_jax.training import critic, packing, step

# There is no program "weights" where rollouts read the trainer's own arrays.
PROGRAMS = ("train", "old_logprobs", "weights", "decode", "prefill")
PREEMPTED = "prefill_preempted"  # where the pool of pages is bounded and may run short
CRITIC_PROGRAMS = ("critic_train", "critic_values")
STOP_TOKENS = (0,)  # any will do: memory does not depend on them


class Program(NamedTuple):
    """One program of a run on a mesh."""

    lower: Callable[[], Any]
    held: dict[str, int]  # bytes of a device that the run holds besides the arguments
    argument_bytes: int  # of a device


def names(config: Config) -> tuple[str, ...]:
    """Returns the names of all programs that the run may have."""
    bounded = config.rollout.cache_gib is not None or config.rollout.resumes
    found = PROGRAMS + ((PREEMPTED,) if bounded else ())
    return found + (CRITIC_PROGRAMS if config.critic is not None else ())


def engine_of(config: Config, mesh: Mesh) -> EngineConfig:
    """Returns the engine of the run on the rollout's part of a mesh."""
    on = rollout_mesh(mesh, config.mesh.rollout_tensor)
    platform = on.devices.flat[0].platform
    prompt = config.data.max_prompt_tokens
    return make_engine_config(config, on.shape, prompt, STOP_TOKENS, platform=platform)


def pool_bytes(engine: EngineConfig) -> int:
    """Returns the bytes of a device that the engine's KV cache takes."""
    return engine.pages_bytes(engine.shard_pages)


def slots_that_fit(config: Config, mesh: Mesh, free_bytes: int) -> int:
    """Returns the most `config.rollout.slots` whose unbounded cache takes at most `free_bytes` of a
    device; 0: not one a shard."""
    engine = engine_of(config, mesh)

    def pool(slots_of_a_shard: int) -> int:
        slots = slots_of_a_shard * engine.shards
        rollout = dataclasses.replace(config.rollout, slots=slots, cache_gib=None)
        return pool_bytes(engine_of(dataclasses.replace(config, rollout=rollout), mesh))

    most = max(0, free_bytes) // engine.pages_bytes(1)
    return bisect.bisect_right(range(1, most + 1), free_bytes, key=pool) * engine.shards


def programs(config: Config, mesh: Mesh) -> dict[str, Program]:
    """Returns the programs of the run by name.

    Raises:
        UserError: the config does not fit the mesh.
    """
    check_batch_shapes(config, mesh.shape)
    c, t = config.model, config.train
    shape = packing.max_micro_batches(config), t.rows_per_micro_batch, t.row_tokens
    rows_ABT = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(shape, x.dtype), packing.empty_rows(1, 1)
    )
    rows = device_bytes(rows_ABT, jax.tree.map(lambda _: row_sharding(mesh, 1), rows_ABT))
    integer, real = (jax.ShapeDtypeStruct((), dtype) for dtype in (np.int32, np.float32))
    params = decoder.param_shapes(c)
    params_at = param_shardings(c, config.mesh, mesh)
    state = jax.eval_shape(functools.partial(step.init_state, config), params)

    rollout_on = rollout_mesh(mesh, config.mesh.rollout_tensor)
    engine_config = engine_of(config, mesh)
    engine, pool = DecoderEngine(engine_config, rollout_on, mesh), pool_bytes(engine_config)
    rolled = jax.eval_shape(functools.partial(rollout_dtypes, c), params)
    rolled_at = param_shardings(c, rollout_layout(engine_config.layout), rollout_on)
    same = jax.tree.map(
        lambda x, y, a, b: x.dtype == y.dtype and a.is_equivalent_to(b, len(x.shape)),
        params,
        rolled,
        params_at,
        rolled_at,
    )
    read, copies = [], {}  # what rollouts read of the trainer's arrays; bytes of copies of others
    parts = zip(("parameters", "frozen parameters"), *map(lora.split, (same, rolled, rolled_at)))
    for name, there, arrays, at in parts:
        if arrays is None:
            continue
        if jax.tree.all(there):
            read.append(name)
        else:
            copies[name] = device_bytes(arrays, at)
    copy = sum(copies.values())
    lower = lambda name: lambda: engine.lower(rolled, name, engine_config.params.mode)
    twice = {}  # in rollouts
    if unrolls(rollout_on.devices.flat[0].platform, c):
        twice = {"layers once more": device_bytes(rolled["layers"], rolled_at["layers"])}

    # The run holds this throughout a step. The rollout's copy is dropped before the update.
    held = dict(memory_budget.held(config, mesh.shape).always)
    if config.critic is not None:
        held["critic"] = held["parameters"]
        held["critic's optimiser"] = held.pop("critic with optimiser") - held["critic"]

    def program(
        lower: Callable[[], Any], own: Sequence[str], argument_bytes: int = 0, **more: int
    ) -> Program:
        """`own`: what of `held` is among the arguments."""
        besides = {name: size for name, size in held.items() if name not in own} | more
        return Program(lower, besides, argument_bytes + sum(held[name] for name in own))

    own = tuple(name for name in held if name.endswith("parameters"))
    update: Any = step.jitted_update(config, mesh)
    entropy_coefficient = None if config.objective.entropy_adaptation is None else real
    score: Any = step.jitted_statistic(config, mesh)
    found = {
        "train": program(
            lambda: update.lower(state, rows_ABT, integer, real, real, entropy_coefficient),
            ("optimiser state", *own),
            rows,
        ),
        "old_logprobs": program(lambda: score.lower(params, rows_ABT, integer), own, rows),
        "decode": program(lower("decode"), read, copy + pool, **twice),
        "prefill": program(lower("prefill"), read, copy, cache=pool, **twice),
    }
    # A preempted sequence is prefilled with what it had sampled.
    if engine_config.num_pages is not None:
        found[PREEMPTED] = program(lower(PREEMPTED), read, copy, cache=pool, **twice)
    if copies:
        here = with_shardings(params, params_at)
        # Each part is moved by a program of its own, and the last is lowered.
        *before, moved = copies
        found["weights"] = program(
            lambda: engine.lower(here, "weights", engine_config.params.mode),
            (moved,),
            **{f"copy of the {name}": copies[name] for name in before},
        )
    if config.critic is not None:
        change: Any = critic.jitted_update(config, mesh)
        value: Any = critic.jitted_values(config, mesh)
        values = jax.eval_shape(functools.partial(critic.init_state, config), params)
        found["critic_train"] = program(
            lambda: change.lower(values, rows_ABT, integer, real, real),
            ("critic", "critic's optimiser"),
            rows,
        )
        found["critic_values"] = program(
            lambda: value.lower(values.params, rows_ABT, integer), ("critic",), rows
        )
    return found


def device_bytes(shapes: Any, shardings: Any) -> int:
    """Returns the bytes that a device holds of arrays."""
    size = lambda x, at: int(np.prod(at.shard_shape(x.shape), dtype=np.int64)) * x.dtype.itemsize
    return sum(jax.tree.leaves(jax.tree.map(size, shapes, shardings)))
