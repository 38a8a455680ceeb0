"""What a run holds, by arithmetic: against the arrays there are, and who draws together for it."""

import dataclasses
import re
from types import SimpleNamespace

import jax
import pytest
from jax.sharding import Mesh

from dapo_jax.config.cli import parse
from dapo_jax.models.sharding import (
    AXES,
    AXIS_TYPES,
    copied_bytes,
    initial_params,
    make_mesh,
    rollout_mesh,
)
from dapo_jax.rollout import memory_budget
from dapo_jax.rollout.engine import DecoderEngine
from dapo_jax.rollout.spec import engine_spec
from dapo_jax.setup import RunComponents
from dapo_jax.tools.plan import chips, plan
from dapo_jax.training import step
from dapo_jax.types import UserError
from dapo_jax.utils.progress import Progress
from tests.support.helpers import tiny_config

ONE = dict(mesh__data=1, mesh__fsdp=1, mesh__context=1, mesh__tensor=1)


def bytes_of(tree):
    """On one device."""
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def buffers(arrays, of):
    """The memory that is one's own, of what the other is of."""
    places = lambda tree: {
        shard.data.unsafe_buffer_pointer()
        for x in jax.tree.leaves(tree)
        for shard in x.addressable_shards
    }
    return places(arrays) - places(of)


def test_a_process_of_several_draws_from_the_trainers_own_arrays():
    """Process 0 of two with four devices each, as far as it goes in one: nothing is copied where
    the parameters lie as they are drawn from."""
    config = tiny_config(**ONE | {"mesh__data": 8})
    mesh = make_mesh(config.mesh)
    own = Mesh(mesh.devices[:4], AXES, axis_types=AXIS_TYPES)
    spec = engine_spec(
        config, own.shape, config.data.max_prompt_tokens, (1,), platform="cpu", run_sizes=mesh.shape
    )
    params = initial_params(config.model, config.mesh, mesh, seed=0)
    loaded = DecoderEngine(spec, own, mesh).load_params(params).prefill
    assert buffers(loaded, params) == set() and copied_bytes(loaded, params) == 0
    assert jax.tree.leaves(loaded)[0].sharding.mesh.size == 4
    halved = tiny_config(**ONE | {"mesh__data": 8, "model__compute_dtype": "bfloat16"})
    spec = dataclasses.replace(spec, model=halved.model)
    loaded = DecoderEngine(spec, own, mesh).load_params(params).prefill
    assert copied_bytes(loaded, params) > 0 and buffers(loaded, params)


def test_what_a_run_holds_besides():
    """A critic has all that the policy has, a reference its parameters."""
    sizes = dict(data=2, fsdp=2, context=1, tensor=2)
    of = lambda name: memory_budget.held(
        parse(["program", f"--config=configs/{name}"], "")[0], sizes
    )
    plain, critic, reference = of("tiny_dapo.py"), of("tiny.py:ppo"), of("tiny.py:grpo")
    parameters = plain.always["parameters"]
    assert plain.always == {"parameters": parameters, "optimiser state": 2 * parameters}
    assert critic.always["critic with optimiser"] == 3 * parameters
    assert reference.always["reference"] == parameters


@pytest.mark.parametrize(
    "changes",
    [
        dict(mesh__data=8),
        dict(mesh__fsdp=4, mesh__tensor=2),
        dict(mesh__fsdp=8, mesh__rollout_tensor=2),
        dict(mesh__fsdp=2, mesh__context=2, mesh__tensor=2, rollout__cache_gib=0.001),
        dict(mesh__data=8, model__compute_dtype="bfloat16", optimizer__moments_dtype="bfloat16"),
        dict(mesh__data=4, mesh__tensor=2),
        dict(mesh__data=4, mesh__fsdp=2, dynamic_sampling__partial_rollouts=True),
    ],
)  # fmt: skip
def test_what_is_held_is_what_there_is(changes):
    config = tiny_config(**ONE | {"model__num_kv_heads": 4} | changes)
    mesh = make_mesh(config.mesh)
    found = memory_budget.held(config, mesh.shape)
    params = initial_params(config.model, config.mesh, mesh, seed=0)
    at = step.state_shardings(config, mesh)
    state = jax.jit(lambda p: step.init_state(config, p), out_shardings=at)(params)
    counters = 64  # bytes of step counts and the like, at most
    assert 0 <= bytes_of(state) - sum(found.always.values()) <= counters
    drawn_on = rollout_mesh(mesh, config.mesh.rollout_tensor)
    spec = engine_spec(config, drawn_on.shape, config.data.max_prompt_tokens, (1,), platform="cpu")
    engine = DecoderEngine(spec, drawn_on, mesh)
    assert found.drawing["KV cache"] == bytes_of(engine.init_decode_state().pool)
    loaded = engine.load_params(params).prefill
    assert found.drawing.get("parameters as drawn from", 0) == copied_bytes(loaded, params) / 8
    assert buffers(loaded, params) == set() or "parameters as drawn from" in found.drawing
    assert found.updating["gradients"] == bytes_of(params), "both are float32"


def devices(number, of_a_process):
    return [SimpleNamespace(process_index=i // of_a_process) for i in range(number)]


def published(*changes):
    return parse(["program", "--config=configs/qwen32b_dapo.py", *changes], "")[0]


SPREAD = [
    f"--config.{field}"
    for field in ("mesh.tensor=1", "mesh.fsdp=-1", "train.rows_per_micro_batch=128",
                  "rollout.slots=32", "rollout.prefill_prompts=32")
]  # fmt: skip


@pytest.mark.parametrize(
    "number, of_a_process, gib, together",
    [
        (64, 4, 95.73, 1),  # v5p: 65.5 GB whole
        (128, 4, 31.24, 4),  # v6e: a host's
        (128, 4, 15.75, 8),  # v5e: two hosts'; 4 would hold 16.4 GB
        (128, 1, 31.24, 4),  # a process for each
    ],
)
def test_the_fewest_devices_that_hold_it_draw_together(number, of_a_process, gib, together):
    said = []
    config = published(*SPREAD)
    memory_bytes = int(gib * memory_budget.GIB)
    found = memory_budget.with_teams(
        config, devices(number, of_a_process), memory_bytes, said.append
    )
    assert (found.mesh.rollout_tensor or 1) == together
    if together == 1:
        assert found is config and not said
    else:
        assert re.search(
            rf"{together} devices draw responses together: .* of {gib:.2f} GiB", said[0]
        )
        assert dataclasses.replace(found, mesh=config.mesh) == config
        given = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, rollout_tensor=2))
        again = memory_budget.with_teams(
            given, devices(number, of_a_process), memory_bytes, said.append
        )
        assert again is given, "who says how many is not asked"


def test_where_no_number_holds_it_the_arithmetic_is_told():
    with pytest.raises(
        UserError, match=r"by 8 device\(s\) together, each holds parameters 7.63 Gi"
    ) as told:
        memory_budget.with_teams(
            published(*SPREAD, "--config.rollout.slots=64"),
            devices(16, 4),
            15 * memory_budget.GIB,
            print,
        )
    assert "of the 15.00 GiB that it has. Set config.rollout.cache_gib" in str(told.value)
    config = published(*SPREAD)
    assert memory_budget.with_teams(config, devices(16, 4), None, print) is config, (
        "memory not known"
    )


def test_a_run_and_its_plan_take_as_many(monkeypatch, tmp_path):
    """On eight devices with so little memory that two have to draw together."""
    changes = ONE | {"mesh__fsdp": 8, "model__num_kv_heads": 4, "model__path": None}
    config = tiny_config(**changes)
    sizes = dict(data=1, fsdp=8, context=1, tensor=1)
    alone = memory_budget.held(config, sizes).drawing_bytes
    assert memory_budget.device_bytes(jax.devices()) is None, "a CPU does not say"
    monkeypatch.setattr(memory_budget, "device_bytes", lambda _: alone)
    trainer = RunComponents(config, tmp_path, Progress(0, 0, quiet=True))
    assert dict(trainer.engine.mesh.shape) == dict(data=4, fsdp=1, context=1, tensor=2)
    said, target = [], chips.target("local")
    there = [SimpleNamespace(platform="tpu", process_index=0)] * 8
    for_teams = target._replace(devices=there, hbm_bytes=alone)
    assert plan.with_replicas(config, for_teams, said.append) == trainer.config
    assert "2 devices draw responses together: each of 1 (config.mesh.tensor) would" in said[0]
    assert plan.with_replicas(config, target, said.append) is config, "unknown for CPUs"
    least = for_teams._replace(hbm_bytes=1)
    assert plan.with_replicas(config, least, said.append).mesh.rollout_tensor == 4, "and is told"
    found = plan.plan(
        trainer.config, target, ("decode",), said.append, response_tokens=8, prompt_tokens=8
    )
    assert found["rollout_tensor"] == 2
    held = memory_budget.held(trainer.config, sizes)
    n = found["programs"]["decode"]
    rolled = held.drawing["parameters as drawn from"] + held.drawing["KV cache"]
    assert rolled <= n["argument_bytes"] <= 1.1 * rolled


def test_a_cache_that_only_a_team_can_have():
    """4 GiB do not hold the pages of one sequence with all its heads."""
    said = []
    config = published(*SPREAD, "--config.rollout.cache_gib=4")
    found = memory_budget.with_teams(
        config, devices(128, 4), int(15.75 * memory_budget.GIB), said.append
    )
    assert found.mesh.rollout_tensor == 8 and "cache_gib does not hold one sequence" in said[0]
    with pytest.raises(UserError, match=r"config.rollout.cache_gib \(0.01\) holds 2 pages"):
        small = published(*SPREAD, "--config.rollout.cache_gib=0.01")
        memory_budget.with_teams(small, devices(128, 4), int(15.75 * memory_budget.GIB), print)


def test_slots_divide_among_those_that_draw():
    """3 of 6 devices would hold it, but 9 slots are not for two."""
    config = tiny_config(
        **ONE | {"mesh__fsdp": 3, "mesh__tensor": 2, "model__num_heads": 6},
        model__num_kv_heads=6, model__width=24, model__ff_width=48, model__vocab_size=36,
        rollout__slots=9, rollout__prefill_prompts=3, train__rows_per_micro_batch=3,
    )  # fmt: skip
    sizes = dict(data=1, fsdp=3, context=1, tensor=2)
    need = memory_budget.held(config, sizes).drawing_bytes
    assert memory_budget.with_teams(config, devices(6, 6), int(need / 0.95), print) in (
        config,
        memory_budget._together(config, 6),
    )
