"""Inference replicas: the leader decides and broadcasts; whole runs whose model lies over the
devices of several processes."""

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from dapo_jax.distributed import ProcessGroup, Replica
from dapo_jax.distributed.replica import ALONE
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
from dapo_jax.rollout.engine_config import make_engine_config
from dapo_jax.rollout.programs import rollout_dtypes, rollout_layout
from dapo_jax.types import StopRequested, UserError
from tests.support.helpers import tiny_config
from tests.support.processes import RUN, Store, assert_same_run, run_all
from tests.support.runs import metrics_of, rollouts_of, run_here


def replicas(store, number=4):
    """The replica of each process, two processes to each."""
    return [Replica(ProcessGroup(i, number, store), 2) for i in range(number)]


def test_the_leader_asks_and_broadcasts():
    of = replicas(Store())
    assert [replica.is_leader for replica in of] == [True, False, True, False]
    assert [(replica.index, replica.count) for replica in of] == [(0, 2), (0, 2), (1, 2), (1, 2)]

    def never():
        raise AssertionError("only the leader asks")

    answers = iter([3, None, True, 4])
    for leader, values in ((0, [3, None, True]), (2, [4])):
        assert [of[leader].broadcast(lambda: next(answers)) for _ in values] == values
        assert [of[leader + 1].broadcast(never) for _ in values] == values
    assert ALONE.broadcast(lambda: 5) == 5


def test_a_stop_that_the_leader_sees_stops_all():
    leader, follower, *_ = replicas(Store())

    def stop():
        raise StopRequested

    for replica, ask in ((leader, stop), (follower, lambda: None)):
        with pytest.raises(StopRequested):
            replica.broadcast(ask)


def test_sent_values_are_deleted():
    store = Store()
    leader, follower, *_ = replicas(store)
    for n in range(1000):
        leader.broadcast(lambda n=n: n)
        assert follower.broadcast(lambda: None) == n
    assert len(store.values) < 256


def test_values_that_were_sent_ahead_are_not_deleted():
    """A leader does not wait for its followers."""
    leader, follower, *_ = replicas(Store())
    for n in range(600):
        leader.broadcast(lambda n=n: n)

    def waiting(name):
        raise AssertionError(f"a value of {name} is gone")

    assert [follower.broadcast(lambda: None, waiting) for _ in range(600)] == [*range(600)]


def test_gathered_values_are_deleted_once_all_have_read_them():
    store = Store()
    groups = [ProcessGroup(i, 2, store) for i in range(2)]
    deadline = time.monotonic() + 60

    def waiting(name):
        assert time.monotonic() < deadline, f"{name} never gave its value"

    gather = lambda group: [group.all_gather([group.index, n], waiting) for n in range(100)]
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(gather, groups))
    assert found[0] == found[1] == [[[0, n], [1, n]] for n in range(100)]
    assert len(store.values) <= 4


def test_a_follower_names_the_process_that_it_awaits():
    leader, follower, *_ = replicas(Store())
    awaited = []

    def waiting(name):
        awaited.append(name)
        leader.broadcast(lambda: 7)

    assert follower.broadcast(lambda: 0, waiting) == 7 and awaited == ["process 0"]


def test_the_mesh_of_rollouts():
    layout = lambda **sizes: tiny_config(**{f"mesh__{k}": v for k, v in sizes.items()}).mesh
    mesh = make_mesh(layout(data=1, fsdp=8, rollout_tensor=2))
    rollout = rollout_mesh(mesh, 2)
    assert dict(rollout.shape) == {"data": 4, "fsdp": 1, "context": 1, "tensor": 2}
    assert rollout.devices.ravel().tolist() == mesh.devices.ravel().tolist()
    assert own_mesh(rollout) is rollout and num_processes(rollout) == 1
    mesh = make_mesh(layout(data=2, fsdp=2, tensor=2))
    assert rollout_mesh(mesh, None) is mesh
    with pytest.raises(UserError, match=r"rollout_tensor \(3\) must divide the number of devices"):
        rollout_mesh(mesh, 3)


def test_devices_of_one_and_a_half_processes_are_no_replica():
    """Three devices of processes with two each."""
    devices = np.array([SimpleNamespace(process_index=i // 2) for i in range(6)])
    mesh: jax.sharding.Mesh = SimpleNamespace(  # type: ignore[assignment]
        is_multi_process=True, shape={"tensor": 3}, devices=devices
    )
    with pytest.raises(UserError, match=r"config.mesh.tensor \(3\) must divide the devices of a"):
        own_mesh(mesh)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"mesh__rollout_tensor": 4}, r"config.mesh.rollout_tensor \(4\) does not "),
        (
            {"mesh__rollout_tensor": 2, "rollout__slots": 18},
            r"config.rollout.slots \(18\) must be a multiple of the devices \(8\) / "
            r"config.mesh.rollout_tensor = 4; nearest: 20",
        ),
    ],
)
def test_sizes_that_do_not_divide_are_refused(fields, message):
    sizes = {"data": 1, "fsdp": 8, "context": 1, "tensor": 1}
    with pytest.raises(UserError, match=message):
        check_batch_shapes(tiny_config(**fields), sizes)


@pytest.mark.parametrize(
    "sizes, rollout_tensor, dtype",
    [
        (dict(fsdp=8), 2, "float32"),
        (dict(data=2, fsdp=4), 4, "bfloat16"),
        (dict(data=2, fsdp=2, tensor=2), 4, "float32"),
        (dict(fsdp=4, tensor=2), 1, "bfloat16"),
        (dict(fsdp=2, context=2, tensor=2), 4, "bfloat16"),
        (dict(context=8), 2, "float32"),
    ],
)
def test_parameters_are_resharded_as_they_are(capfd, sizes, rollout_tensor, dtype):
    """No device holds a whole one on the way, which XLA would warn of."""
    sizes = {"data": 1, "fsdp": 1, "context": 1, "tensor": 1} | sizes
    config = tiny_config(
        **{f"mesh__{name}": size for name, size in sizes.items()},
        mesh__rollout_tensor=rollout_tensor,
        model__num_kv_heads=4,
        model__compute_dtype=dtype,
    )
    mesh = make_mesh(config.mesh)
    rollout = rollout_mesh(mesh, rollout_tensor)
    engine_config = make_engine_config(config, rollout.shape, 24, (1,), platform="cpu")
    params = initial_params(config.model, config.mesh, mesh, seed=0)
    loaded = DecoderEngine(engine_config, rollout, mesh).load_params(params)
    at = param_shardings(config.model, rollout_layout(config.mesh), rollout)
    wanted = rollout_dtypes(config.model, params)
    for ours, theirs, sharding in zip(
        *map(jax.tree.leaves, (loaded.prefill, wanted, at)), strict=True
    ):
        assert ours.dtype == theirs.dtype and ours.sharding.is_equivalent_to(sharding, ours.ndim)
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
    assert "rematerialization" not in capfd.readouterr().err


@pytest.mark.slow
def test_two_replicas_of_two_processes_train_as_one_process(home, tmp_path):
    settings = RUN | {"mesh__rollout_tensor": 2}
    run_here(tmp_path / "one", home, devices=4, **settings)
    _, *others = run_all(tmp_path / "four", home, 4, **settings)
    assert others == [[], [], []]
    assert_same_run(tmp_path / "one", tmp_path / "four")


@pytest.mark.slow
def test_runs_of_two_replicas_that_carry_are_the_same(home, tmp_path):
    """Each replica, of two processes, numbers its decode calls; when verdicts arrive does not
    matter."""
    settings = RUN | {"mesh__rollout_tensor": 2, "rollout__max_staleness": 2, "train__num_steps": 2}
    settings |= {"rollout__end_of_thinking": (12, "\nAnswer: ")}
    for name in ("first", "second"):
        run_all(tmp_path / name, home, 4, **settings)
    steps = metrics_of(tmp_path / "first")
    assert sum(step.get("carry/tokens_resumed", 0) for step in steps) > 0
    assert sum(step.get("rollout/ended_thinking", 0) for step in steps) > 0
    assert steps == metrics_of(tmp_path / "second")
    assert rollouts_of(tmp_path / "first") == rollouts_of(tmp_path / "second")
