"""Checkpoints: what is kept, what comes back, and what damage or a full disk does."""

import errno
import gc
import logging
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from dapo_jax.runs import checkpoint
from dapo_jax.runs.checkpoint import CheckpointError, Checkpoints
from dapo_jax.types import RunError, UserError
from tests.conftest import ROOT
from tests.support.runs import free_port

# orbax leaves futures of a failed read behind, and Python tells of them when it collects them.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def collect():
    """So that they are collected here and not in the test of something else."""
    yield
    gc.collect()


def make_arrays(seed=0):
    return {
        "w": jax.random.normal(jax.random.key(seed), (64, 8)),
        "half": jax.random.normal(jax.random.key(seed + 1), (16,)).astype(jnp.bfloat16),
        "count": jnp.int32(seed),
    }


def like(arrays):
    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    return jax.tree.map(shape, arrays)


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def write(directory, steps, *, keep_newest=9, keep_best=0):
    with Checkpoints(directory, keep_newest=keep_newest, keep_best=keep_best) as checkpoints:
        for step in steps:
            checkpoints.save(step, make_arrays(step), {"step": step}, accuracy=None)


def open_again(directory, say=print):
    return Checkpoints(directory, keep_newest=9, keep_best=0, say=say)


def test_arrays_and_host_state_come_back(tmp_path):
    write(tmp_path, [3, 7])
    with open_again(tmp_path) as checkpoints:
        step, arrays, host = checkpoints.restore(like(make_arrays()))
    assert (step, host) == (7, {"step": 7})
    same(arrays, make_arrays(7))


def test_nothing_saved_is_none(tmp_path):
    with open_again(tmp_path / "new") as checkpoints:
        assert checkpoints.restore(like(make_arrays())) is None


def test_the_newest_and_the_best_are_kept(tmp_path):
    accuracies = [0.2, 0.9, None, 0.8, 0.1, None, 0.3]
    with Checkpoints(tmp_path, keep_newest=2, keep_best=2) as checkpoints:
        for step, accuracy in enumerate(accuracies):
            checkpoints.save(step, make_arrays(step), {}, accuracy=accuracy)
        checkpoints.wait()
        assert checkpoints.steps == [1, 3, 5, 6]


def test_what_is_saved_is_what_was_there_when_save_was_called(tmp_path):
    """The arrays are donated right after, as the update does."""
    arrays = make_arrays(4)
    with open_again(tmp_path) as checkpoints:
        checkpoints.save(0, arrays, {}, accuracy=None)
        spoil = jax.jit(lambda x: jax.tree.map(jnp.zeros_like, x), donate_argnums=0)
        jax.block_until_ready(spoil(arrays))
    with open_again(tmp_path) as checkpoints:
        same(checkpoints.restore(like(make_arrays(4)))[1], make_arrays(4))


def test_another_layout_of_devices(tmp_path):
    write(tmp_path, [0])
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    spread, whole = NamedSharding(mesh, PartitionSpec("x")), NamedSharding(mesh, PartitionSpec())
    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=spread if x.ndim else whole)
    wanted = jax.tree.map(shape, make_arrays())
    with open_again(tmp_path) as checkpoints:
        arrays = checkpoints.restore(wanted)[1]
    assert arrays["w"].sharding == spread
    same(arrays, make_arrays(0))


def data_files(directory):
    return [file for file in directory.rglob("*") if file.is_file() and file.parent.name == "d"]


def flip_a_byte(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    file.write_bytes(content)


def cut_in_half(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize("damage", [flip_a_byte, cut_in_half, os.unlink])
def test_a_damaged_newest_falls_back_and_says_so(tmp_path, damage):
    write(tmp_path, [1, 2])
    for file in data_files(tmp_path / "2"):
        damage(file)
    said = []
    with open_again(tmp_path, said.append) as checkpoints:
        step, arrays, host = checkpoints.restore(like(make_arrays()))
        assert checkpoints.steps == [1]
        checkpoints.save(2, make_arrays(2), {"step": 2}, accuracy=None)  # the run goes on
    assert (step, host) == (1, {"step": 1})
    same(arrays, make_arrays(1))
    assert len(said) == 1 and "checkpoint 2" in said[0] and "damaged" in said[0]
    assert (tmp_path / "damaged" / "2").is_dir()
    with open_again(tmp_path) as checkpoints:
        assert checkpoints.restore(like(make_arrays()))[0] == 2


def test_contents_are_compared_not_only_formats(tmp_path, monkeypatch):
    """Numbers that changed in a file that still reads well are found by their sums."""
    write(tmp_path, [1])
    with Checkpoints(tmp_path, keep_newest=9, keep_best=0) as checkpoints:
        honest = checkpoint._sums
        lie = lambda arrays: {k: [v[0] ^ 1, v[1]] for k, v in honest(arrays).items()}
        monkeypatch.setattr(checkpoint, "_sums", lie)
        checkpoints.save(2, make_arrays(2), {}, accuracy=None)
        checkpoints.wait()
        monkeypatch.setattr(checkpoint, "_sums", honest)
        assert checkpoints.restore(like(make_arrays()))[0] == 1


@pytest.mark.parametrize("place", [(0, 0), (1, 0), (63, 7)])
def test_sums_see_every_bit_and_every_place(place):
    from dapo_jax.runs.checkpoint import _sums

    arrays = make_arrays()
    before = _sums(arrays)["['w']"]
    value = np.asarray(arrays["w"]).copy()
    value.view(np.uint32)[place] ^= 1
    assert _sums({"w": jnp.asarray(value)})["['w']"] != before
    swapped = np.asarray(arrays["w"]).copy()
    swapped[[2, 5]] = swapped[[5, 2]]
    assert _sums({"w": jnp.asarray(swapped)})["['w']"] != before


def test_all_damaged_is_told_and_nothing_is_moved(tmp_path):
    write(tmp_path, [1, 2])
    for step in (1, 2):
        for file in data_files(tmp_path / str(step)):
            flip_a_byte(file)
    for _ in range(2):  # starting again must not take it for a new run
        with open_again(tmp_path) as checkpoints:
            with pytest.raises(UserError, match="no checkpoint in .* can be read"):
                checkpoints.restore(like(make_arrays()))
            assert checkpoints.steps == [1, 2]


def test_another_model_is_told(tmp_path):
    write(tmp_path, [1])
    other = like(make_arrays()) | {"w": jax.ShapeDtypeStruct((64, 9), jnp.float32)}
    with open_again(tmp_path) as checkpoints:
        with pytest.raises(UserError, match=r"another model: \['w'\] is float32\[64, 8\]"):
            checkpoints.restore(other)
        assert checkpoints.steps == [1]


def test_a_full_disk_is_told_and_the_one_before_is_intact(tmp_path, monkeypatch):
    write(tmp_path, [1])
    with open_again(tmp_path) as checkpoints:

        def full(*args, **kwargs):
            # As orbax raises it: tensorstore's ValueError inside its own.
            try:
                raise OSError(errno.ENOSPC, "No space left on device")
            except OSError as error:
                raise ValueError("RESOURCE_EXHAUSTED") from error

        monkeypatch.setattr(checkpoints.manager, "save", full)
        with pytest.raises(CheckpointError, match="disk is full.*Free some space") as told:
            checkpoints.save(2, make_arrays(2), {}, accuracy=None)
        assert isinstance(told.value, RunError)
    with open_again(tmp_path) as checkpoints:
        assert checkpoints.restore(like(make_arrays()))[0] == 1


def test_a_directory_that_cannot_be_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be kept in"):
        Checkpoints(tmp_path / "file" / "checkpoints", keep_newest=1, keep_best=0)


def test_a_half_written_checkpoint_does_not_count(tmp_path):
    write(tmp_path, [1])
    (tmp_path / "2.orbax-checkpoint-tmp").mkdir()
    with open_again(tmp_path) as checkpoints:
        assert checkpoints.restore(like(make_arrays()))[0] == 1


def test_a_save_has_as_long_as_its_size_takes_on_slow_storage(tmp_path):
    """The 32B: 32.8 billion times 12 bytes, at 100 MB/s 3,936 s; orbax's own limit is 1,200 s."""
    for num_bytes, seconds in ((393_600_000_000, 3936), (10**9, 1200)):
        with Checkpoints(tmp_path, keep_newest=1, keep_best=0, num_bytes=num_bytes) as checkpoints:
            saver = checkpoints.manager._checkpointer
            assert saver._async_manager._timeout_secs == seconds  # pyright: ignore


class Faults:
    """A method of orbax that fails for some of its calls."""

    def __init__(self, monkeypatch, name, *errors):
        self.errors = list(errors)
        real = getattr(ocp.StandardCheckpointHandler, name)

        def call(handler, *args, **kwargs):
            error = self.errors.pop(0) if self.errors else None
            if error is None:
                return real(handler, *args, **kwargs)
            raise error

        monkeypatch.setattr(ocp.StandardCheckpointHandler, name, call)
        monkeypatch.setattr(checkpoint, "PAUSE_SECONDS", 0.0)


def io_error():
    return OSError(errno.EIO, "Input/output error")


def test_a_storage_error_that_passes_is_no_damage(tmp_path, monkeypatch):
    write(tmp_path, [1, 2])
    faults = Faults(monkeypatch, "restore", io_error(), ValueError("UNAVAILABLE: connection reset"))
    said = []
    with open_again(tmp_path, said.append) as checkpoints:
        assert checkpoints.restore(like(make_arrays()))[0] == 2
    assert not faults.errors and not said and not (tmp_path / "damaged").exists()


def test_a_storage_error_that_stays_ends_the_run_and_moves_nothing(tmp_path, monkeypatch):
    write(tmp_path, [1, 2])
    Faults(monkeypatch, "restore", *[io_error() for _ in range(checkpoint.READS)])
    with open_again(tmp_path) as checkpoints:
        with pytest.raises(CheckpointError, match="2 in .* could not be read: .*Input/out") as told:
            checkpoints.restore(like(make_arrays()))
        assert told.value.restart and checkpoints.steps == [1, 2]
    assert not (tmp_path / "damaged").exists()


def test_an_error_of_the_device_is_raised_as_it_is(tmp_path, monkeypatch):
    write(tmp_path, [1, 2])
    Faults(monkeypatch, "restore", jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 86 GiB"))
    with open_again(tmp_path) as checkpoints:
        with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
            checkpoints.restore(like(make_arrays()))
        assert checkpoints.steps == [1, 2]


class Late:
    """A save's future that fails in the background."""

    def result(self, timeout=None):
        raise io_error()


def late_faults(monkeypatch, *fails):
    """Has saves fail after `Checkpoints.save` has returned."""
    fails, real = list(fails), ocp.StandardCheckpointHandler.async_save

    async def save(handler, *args, **kwargs):
        futures = await real(handler, *args, **kwargs)
        return [*(futures or ()), Late()] if fails and fails.pop(0) else futures

    monkeypatch.setattr(ocp.StandardCheckpointHandler, "async_save", save)


def test_a_save_that_fails_is_tried_again(tmp_path, monkeypatch):
    """At once where it fails at once, and before the run ends where it fails in the background."""
    said = []

    def fail(*args, **kwargs):
        raise io_error()

    with open_again(tmp_path, said.append) as checkpoints:
        monkeypatch.setattr(checkpoints.manager, "save", fail)
        checkpoints.save(1, make_arrays(1), {"step": 1}, accuracy=None)
        checkpoints.wait()
        late_faults(monkeypatch, True)
        checkpoints.save(2, make_arrays(2), {"step": 2}, accuracy=None)
    assert [line[:21] for line in said] == ["warning: checkpoint 1", "warning: checkpoint 2"]
    with open_again(tmp_path) as checkpoints:
        assert checkpoints.steps == [1, 2]
        same(checkpoints.restore(like(make_arrays()))[1], make_arrays(2))


def test_the_next_save_is_the_second_try_of_one_that_failed(tmp_path, monkeypatch):
    late_faults(monkeypatch, True, False, True, False)
    arrays, said = make_arrays(1), []
    with open_again(tmp_path, said.append) as checkpoints:
        checkpoints.save(1, arrays, {}, accuracy=None)
        jax.tree.map(lambda x: x.delete(), arrays)  # the update donates them
        for step in (2, 3, 4):
            checkpoints.save(step, make_arrays(step), {}, accuracy=None)
    assert len(said) == 2
    with open_again(tmp_path) as checkpoints:
        assert checkpoints.steps == [2, 4]


def test_two_failed_saves_in_a_row_end_the_run(tmp_path, monkeypatch):
    write(tmp_path, [1])
    late_faults(monkeypatch, True, True)
    with open_again(tmp_path, lambda _: None) as checkpoints:
        checkpoints.save(2, make_arrays(2), {}, accuracy=None)
        checkpoints.save(3, make_arrays(3), {}, accuracy=None)
        with pytest.raises(CheckpointError, match="3 in .*Input/output.* before it failed") as told:
            checkpoints.save(4, make_arrays(4), {}, accuracy=None)
        assert told.value.restart
    with open_again(tmp_path) as checkpoints:
        assert checkpoints.restore(like(make_arrays()))[0] == 1


# One process of two, whose storage has an error of its own in the newest checkpoint.
PROCESS = """
import errno, sys
from pathlib import Path
place, port, index, what = sys.argv[1:]
from dapo_jax.distributed import process_group
from dapo_jax.runs import checkpoint
group = process_group.start(f"127.0.0.1:{port}", 2, int(index), 60)
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
at = NamedSharding(Mesh(jax.devices(), "x"), PartitionSpec("x"))
arrays = lambda n: {"x": jax.make_array_from_callback((4,), at, lambda i: np.arange(4.0)[i] + n)}
checkpoint.PAUSE_SECONDS = 0.0
real = checkpoint._read_record
def read(where):
    if index == "1" and where.name == "2":
        error = OSError(errno.EIO, "Input/output error")
        raise error if what == "io" else ValueError("DATA_LOSS: x")
    return real(where)
options = dict(keep_newest=9, keep_best=0, all_gather=group.all_gather)
with checkpoint.Checkpoints(place, **options) as checkpoints:
    for n in (1, 2):
        checkpoints.save(n, arrays(n), {}, accuracy=None)
    checkpoints.wait()
    checkpoint._read_record = read
    like = {"x": jax.ShapeDtypeStruct((4,), arrays(0)["x"].dtype, sharding=at)}
    try:
        step, found, _ = checkpoints.restore(like)
        print("restored", step, [x.data.tolist() for x in found["x"].addressable_shards])
    except checkpoint.CheckpointError as error:
        print("error", error.restart, error)
    print("steps", checkpoints.steps)
group.shutdown(0)
"""


@pytest.mark.parametrize("what", ["damage", "io"])
def test_two_processes_agree_on_a_checkpoint_that_one_cannot_read(tmp_path, what):
    program, port = tmp_path / "process.py", free_port()
    program.write_text(PROCESS)
    env = os.environ | {
        "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
    }  # fmt: skip
    pipe = subprocess.PIPE
    started = [
        subprocess.Popen(
            [sys.executable, program, tmp_path / "checkpoints", str(port), str(i), what],
            env=env, stdout=pipe, stderr=pipe, text=True,
        )
        for i in range(2)
    ]  # fmt: skip
    for i, process in enumerate(started):
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        lines = out.splitlines()
        if what == "damage":
            assert f"restored 1 [[{1.0 + 2 * i}, {2.0 + 2 * i}]]" in lines and "steps [1]" in lines
        else:
            assert "error True checkpoint 2" in out and "Input/output error" in out
            assert "steps [1, 2]" in lines and not (tmp_path / "checkpoints/damaged").exists()


def test_nothing_global_changes_where_no_checkpoints_are_open(tmp_path):
    hook, filters = sys.unraisablehook, list(logging.getLogger("absl").filters)
    with open_again(tmp_path) as checkpoints:
        assert checkpoints.restore(like(make_arrays())) is None
    assert sys.unraisablehook is hook and logging.getLogger("absl").filters == filters


@pytest.mark.parametrize(
    "text, damaged",
    [
        ("DATA_LOSS: x", True),
        ("Error opening driver: Error decoding b-tree node: End of data expected", True),
        ("UNAVAILABLE: the storage does not answer", False),
    ],
)
def test_what_cannot_be_decoded_is_damage_and_nothing_else(text, damaged):
    assert checkpoint._is_damage(ValueError(text)) == damaged
