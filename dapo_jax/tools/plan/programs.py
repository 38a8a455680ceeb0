"""The programs of a run, lowered for shapes: the same jitted functions, with the same shardings and
donations, that the learner and the engine call.
"""

import bisect
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dapo_jax.config import Config
from dapo_jax.models import decoder
from dapo_jax.models.sharding import check_batch_shapes, param_shardings, rollout_mesh, row_sharding
from dapo_jax.rollout.engine import DecoderEngine
from dapo_jax.rollout.engine_config import EngineConfig, make_engine_config
from dapo_jax.rollout.programs import rollout_dtypes, rollout_layout
from dapo_jax.training import critic, packing, step

# Weights are shared, and have no program, where rollouts read them as they lie in training.
PROGRAMS = ("train", "old_logprobs", "weights", "decode", "prefill")
PREEMPTED = "prefill_preempted"  # where the pool of pages is bounded, so that it may run short
CRITIC_PROGRAMS = ("critic_train", "critic_values")  # where there is a critic
# An update never reads it; any token will do.
STOP_TOKENS = (0,)


class Program(NamedTuple):
    """One program of a run on a mesh."""

    lower: Callable[[], Any]
    # Bytes of a device that the run holds while the program runs, beside its arguments.
    held: dict[str, int]
    # Bytes of a device that the program is given.
    argument_bytes: int


class Cache(NamedTuple):
    """The KV cache of a device."""

    pool_bytes: int
    slot_bytes: int  # the pages of one sequence at its longest
    slot_tokens: int
    shards: int


def cache(config: Config, mesh: Mesh) -> Cache:
    """The KV cache of the run's engine on a mesh."""
    drawn_on = rollout_mesh(mesh, config.mesh.rollout_tensor)
    engine_config = _engine_config(config, drawn_on)
    pool = engine_config.pages_bytes(engine_config.shard_pages)
    slot = pool // engine_config.shard_pages * engine_config.table_pages
    return Cache(pool, slot, engine_config.max_tokens, engine_config.shards)


def start_bytes(config: Config, mesh: Mesh) -> dict[str, int]:
    """Bytes of a device at the start of a run, before the first rollout. A base model's parameters
    become the policy's; where a reference is needed they stay as that, and the policy has a copy.
    A checkpoint is restored from shapes alone."""
    params = decoder.param_shapes(config.model)
    state = jax.eval_shape(functools.partial(step.init_state, config), params)
    found = {"policy with optimiser": device_bytes(state, step.state_shardings(config, mesh))}
    if _needs_reference(config):
        at = param_shardings(config.model, config.mesh, mesh)
        found["reference"] = device_bytes(params, at)
    if config.critic is not None:
        values = jax.eval_shape(functools.partial(critic.init_state, config), params)
        found["critic with optimiser"] = device_bytes(values, critic.state_shardings(config, mesh))
    return found


def slots_that_fit(config: Config, mesh: Mesh, free_bytes: int) -> int:
    """The most `config.rollout.slots` for which a cache without bounds is no larger than this on a
    device; 0: not even one a shard."""
    here = cache(config, mesh)

    def pool(slots_of_a_shard: int) -> int:
        slots = slots_of_a_shard * here.shards
        rollout = dataclasses.replace(config.rollout, slots=slots, cache_gib=None)
        return cache(dataclasses.replace(config, rollout=rollout), mesh).pool_bytes

    # A slot's share of the pool is more than the pages of its sequence: prompts have theirs.
    most = max(0, free_bytes) // here.slot_bytes
    return bisect.bisect_right(range(1, most + 1), free_bytes, key=pool) * here.shards


def names(config: Config) -> tuple[str, ...]:
    """Names of all programs that the run may have."""
    bounded = config.rollout.cache_gib is not None or config.dynamic_sampling.partial_rollouts
    found = PROGRAMS + ((PREEMPTED,) if bounded else ())
    return found + (CRITIC_PROGRAMS if config.critic is not None else ())


def programs(config: Config, mesh: Mesh) -> dict[str, Program]:
    """The programs of the run by their names; nothing is compiled.

    Raises:
        UserError: the config does not fit the mesh.
    """
    check_batch_shapes(config, mesh.shape)
    c, t = config.model, config.train
    M = packing.max_micro_batches(config)
    rows_MBT = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((M, t.rows_per_micro_batch, t.row_tokens), x.dtype),
        packing.empty_rows(1, 1),
    )
    integer, real = (jax.ShapeDtypeStruct((), dtype) for dtype in (np.int32, np.float32))
    params = decoder.param_shapes(c)
    params_at = param_shardings(c, config.mesh, mesh)
    state = jax.eval_shape(functools.partial(step.init_state, config), params)
    state_at = step.state_shardings(config, mesh)

    drawn_on = rollout_mesh(mesh, config.mesh.rollout_tensor)
    engine_config = _engine_config(config, drawn_on)
    engine = DecoderEngine(engine_config, drawn_on, mesh)
    rolled = jax.eval_shape(lambda p: rollout_dtypes(p, jnp.dtype(c.compute_dtype)), params)
    rolled_at = param_shardings(c, rollout_layout(engine_config.layout), drawn_on)

    parameters = device_bytes(params, params_at)
    policy = device_bytes(state, state_at)
    copy = device_bytes(rolled, rolled_at)
    pool = engine_config.pages_bytes(engine_config.shard_pages)
    rows = device_bytes(rows_MBT, jax.tree.map(lambda _: row_sharding(mesh, 1), rows_MBT))
    # What a run holds throughout a step; the rollout's copy of the parameters is dropped before the
    # update, see `train.one_step`.
    held = {"policy with optimiser": policy}
    same = jax.tree.map(
        lambda x, a, b: a.is_equivalent_to(b, len(x.shape)), params, params_at, rolled_at
    )
    # Where they are the policy's own they are not copied, and rollouts run beside the optimiser.
    shared = c.param_dtype == c.compute_dtype and all(jax.tree.leaves(same))
    rolling: tuple[str, ...] = ()
    moments: dict[str, int] = {}
    if shared:
        rolling, moments = ("policy with optimiser",), {"optimiser": policy - parameters}
    again = device_bytes(rolled["layers"], rolled_at["layers"]) if engine.copies_layers else 0
    layers_for = lambda other: {f"layers for {other}": again} if again else {}
    if _needs_reference(config):
        held["reference"] = parameters
    values: Any = None
    values_at: Any = None
    if config.critic is not None:
        values = jax.eval_shape(functools.partial(critic.init_state, config), params)
        values_at = critic.state_shardings(config, mesh)
        held["critic with optimiser"] = device_bytes(values, values_at)

    def program(lower: Callable[[], Any], arguments: int, *own: str, **left: int) -> Program:
        beside = {name: size for name, size in held.items() if name not in own} | left
        return Program(lower, beside, arguments)

    update: Any = step.compile_update(config, mesh)
    score: Any = step.compile_scoring(config, mesh)
    found = {
        "train": program(
            lambda: update.lower(state, rows_MBT, integer, real, real),
            policy + rows,
            "policy with optimiser",
        ),
        "old_logprobs": program(
            lambda: score.lower(params, rows_MBT, integer),
            parameters + rows,
            "policy with optimiser",
            optimiser=policy - parameters,
        ),
        "decode": program(
            lambda: engine.lower(rolled, "decode", engine_config.params.mode),
            copy + pool,
            *rolling,
            **moments,
            **layers_for("prefill"),
        ),
        "prefill": program(
            lambda: engine.lower(rolled, "prefill", engine_config.params.mode),
            copy,
            *rolling,
            **moments,
            **layers_for("decode"),
            cache=pool,
        ),
    }
    if engine_config.num_pages is not None:
        # A sequence whose pages were taken away: its prompt with all that it had sampled.
        found[PREEMPTED] = found["prefill"]._replace(
            lower=lambda: engine.lower(rolled, PREEMPTED, engine_config.params.mode)
        )
    if not shared:
        here = jax.tree.map(
            lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), params, params_at
        )
        found["weights"] = program(
            lambda: engine.lower(here, "weights", engine_config.params.mode),
            parameters,
            "policy with optimiser",
            optimiser=policy - parameters,
        )
    if config.critic is not None:
        change: Any = critic.compile_update(config, mesh)
        value: Any = critic.compile_values(config, mesh)
        size = held["critic with optimiser"]
        own_values = device_bytes(values.params, values_at.params)
        found["critic_train"] = program(
            lambda: change.lower(values, rows_MBT, integer, real, real),
            size + rows,
            "critic with optimiser",
        )
        found["critic_values"] = program(
            lambda: value.lower(values.params, rows_MBT, integer),
            own_values + rows,
            "critic with optimiser",
            optimiser=size - own_values,
        )
    return found


def device_bytes(shapes: Any, shardings: Any) -> int:
    """Bytes that a device holds of arrays."""

    def size(x: jax.ShapeDtypeStruct, at: jax.sharding.NamedSharding) -> int:
        return int(np.prod(at.shard_shape(x.shape), dtype=np.int64)) * x.dtype.itemsize

    return sum(jax.tree.leaves(jax.tree.map(size, shapes, shardings)))


def _needs_reference(config: Config) -> bool:
    return config.objective.kl_coefficient > 0 or config.objective.reward_kl_coefficient > 0


def _engine_config(config: Config, mesh: Mesh) -> EngineConfig:
    return make_engine_config(
        config,
        mesh.shape,
        config.data.max_prompt_tokens,
        STOP_TOKENS,
        platform=mesh.devices.flat[0].platform,
    )
