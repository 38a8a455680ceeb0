"""Processes that draw together: what the first decides, the others are told; and whole runs in
which a model lies over the devices of several processes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.distributed.process_group import ProcessGroup
from dapo_jax.distributed.replica import ALONE, Replica
from dapo_jax.models.sharding import (
    check_batch_shapes,
    initial_params,
    make_mesh,
    num_processes,
    own_mesh,
    param_shardings,
    rollout_mesh,
)
from dapo_jax.rollout.engine import DecoderEngine
from dapo_jax.rollout.programs import rollout_dtypes, rollout_layout
from dapo_jax.rollout.spec import engine_spec
from dapo_jax.types import StopRequested, UserError
from tests.support.helpers import tiny_config
from tests.support.processes import RUN, Store, assert_same_run, finish_all, run_all, said
from tests.support.runs import finish, run, start_all

TOGETHER = RUN | {"mesh__rollout_tensor": 2}


def of_two(store, number=4):
    return [Replica(ProcessGroup(i, number, store), 2) for i in range(number)]


def test_the_first_asks_and_the_others_are_told():
    teams = of_two(Store())
    assert [team.is_leader for team in teams] == [True, False, True, False]
    assert [(team.index, team.count) for team in teams] == [(0, 2), (0, 2), (1, 2), (1, 2)]

    def never():
        raise AssertionError("only the first asks")

    asked = iter([3, None, True, 4])
    for team, said_by in ((0, [3, None, True]), (2, [4])):
        assert [teams[team].broadcast(lambda: next(asked)) for _ in said_by] == said_by
        assert [teams[team + 1].broadcast(never) for _ in said_by] == said_by
    assert ALONE.broadcast(lambda: 5) == 5


def test_a_stop_that_the_first_sees_stops_all():
    store = Store()
    first, second, *_ = of_two(store)

    def stop():
        raise StopRequested

    for team, ask in ((first, stop), (second, lambda: None)):
        with pytest.raises(StopRequested):
            team.broadcast(ask)


def test_what_was_told_is_forgotten():
    store = Store()
    first, second, *_ = of_two(store)
    for n in range(1000):
        first.broadcast(lambda n=n: n)
        assert second.broadcast(lambda: None) == n
    assert len(store.values) < 256


def test_who_waits_says_for_whom():
    first, second, *_ = of_two(Store())
    waited = []

    def waiting(what):
        waited.append(what)
        first.broadcast(lambda: 7)

    assert second.broadcast(lambda: 0, waiting) == 7 and waited == ["process 0"]


def test_the_mesh_that_responses_are_drawn_on():
    layout = lambda **sizes: tiny_config(**{f"mesh__{k}": v for k, v in sizes.items()}).mesh
    mesh = make_mesh(layout(data=1, fsdp=8, rollout_tensor=2))
    drawn_on = rollout_mesh(mesh, 2)
    assert dict(drawn_on.shape) == {"data": 4, "fsdp": 1, "context": 1, "tensor": 2}
    assert drawn_on.devices.ravel().tolist() == mesh.devices.ravel().tolist()
    assert own_mesh(drawn_on) is drawn_on and num_processes(drawn_on) == 1
    mesh = make_mesh(layout(data=2, fsdp=2, tensor=2))
    assert rollout_mesh(mesh, None) is mesh
    with pytest.raises(UserError, match=r"rollout_tensor \(3\) must divide the number of devices"):
        rollout_mesh(mesh, 3)


@pytest.mark.parametrize(
    "sizes, fields, message",
    [
        ({"fsdp": 8}, {"mesh__rollout_tensor": 4}, r"config.mesh.rollout_tensor \(4\) does not "),
        (
            {"fsdp": 8},
            {"mesh__rollout_tensor": 2, "rollout__slots": 18},
            r"config.rollout.slots \(18\) must be a multiple of the devices \(8\) / "
            r"config.mesh.rollout_tensor = 4; nearest: 20",
        ),
    ],
)
def test_what_does_not_divide_is_refused(sizes, fields, message):
    axis_sizes = {"data": 1, "fsdp": 1, "context": 1, "tensor": 1} | sizes
    with pytest.raises(UserError, match=message):
        check_batch_shapes(tiny_config(**fields), axis_sizes)


@pytest.mark.parametrize(
    "sizes, together",
    [
        (dict(fsdp=8), 2),
        (dict(data=2, fsdp=4), 4),
        (dict(data=2, fsdp=2, tensor=2), 4),
        (dict(fsdp=4, tensor=2), 1),
        (dict(fsdp=2, context=2, tensor=2), 4),
        (dict(context=8), 2),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parameters_come_to_those_that_draw_together_as_they_are(capfd, sizes, together, dtype):
    """None is whole on a device on the way, which XLA would warn of."""
    sizes = {"data": 1, "fsdp": 1, "context": 1, "tensor": 1, "rollout_tensor": together} | sizes
    config = tiny_config(
        **{f"mesh__{name}": size for name, size in sizes.items()},
        model__num_kv_heads=4,
        model__compute_dtype=dtype,
    )
    mesh = make_mesh(config.mesh)
    drawn_on = rollout_mesh(mesh, together)
    spec = engine_spec(config, drawn_on.shape, 24, (1,), platform="cpu")
    engine = DecoderEngine(spec, drawn_on, mesh)
    params = initial_params(config.model, config.mesh, mesh, seed=0)
    loaded = engine.load_params(params)
    at = param_shardings(config.model, rollout_layout(config.mesh), drawn_on)
    wanted = rollout_dtypes(params, jnp.dtype(dtype))
    for ours, theirs, sharding in zip(
        *map(jax.tree.leaves, (loaded.prefill, wanted, at)), strict=True
    ):
        assert ours.dtype == theirs.dtype and ours.sharding.is_equivalent_to(sharding, ours.ndim)
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
    assert "rematerialization" not in capfd.readouterr().err


@pytest.mark.slow
def test_two_processes_that_draw_together_train_as_one(home, tmp_path):
    """The model is split over both while drawing, and over fsdp in training."""
    settings = TOGETHER | {"mesh__data": 1}
    run(tmp_path / "one", home, devices=2, **settings)
    ended = finish_all(start_all(tmp_path / "two", home, processes=2, devices=1, **settings))
    for code, out, err in ended:
        assert code == 0 and err == "", (out, err)
    assert said(ended[1][1]) == []
    assert_same_run(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
def test_two_teams_train_as_one_process(home, tmp_path):
    run(tmp_path / "one", home, devices=4, **TOGETHER)
    run_all(tmp_path / "four", home, 4, **TOGETHER)
    assert_same_run(tmp_path / "one", tmp_path / "four")


def test_devices_of_half_a_process_are_no_team(home, tmp_path):
    settings = {"mesh__data": 1, "mesh__fsdp": 2, "mesh__tensor": 3, "model__num_kv_heads": 3}
    settings |= {"model__num_heads": 3, "model__width": 24, "model__ff_width": 48}
    started = start_all(tmp_path / "run", home, processes=3, devices=2, **settings)
    for code, _, err in map(finish, started):
        assert code == 2 and "config.mesh.tensor (3) must divide the devices of a process" in err
