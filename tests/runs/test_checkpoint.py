"""Checkpoints: rotation, restored contents, and the effects of damage and storage errors."""

import contextlib
import errno
import gc
import logging
import os
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from dapo_jax.runs import checkpoint, integrity
from dapo_jax.runs.checkpoint import Checkpoints
from dapo_jax.runs.integrity import CheckpointError, Damaged, bit_sums
from dapo_jax.types import UserError
from tests.conftest import ROOT
from tests.support.runs import free_port

# orbax leaves futures of a failed read behind, and Python reports them when it collects them.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def collect():
    """Collects those futures here, not in the test of something else."""
    yield
    gc.collect()


def make_arrays(seed=0):
    return {
        "w": jax.random.normal(jax.random.key(seed), (64, 8)),
        "half": jax.random.normal(jax.random.key(seed + 1), (16,)).astype(jnp.bfloat16),
        "count": jnp.int32(seed),
    }


SHAPE = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
LIKE = jax.tree.map(SHAPE, make_arrays())


def opened(directory, say=print, *, keep_newest=9, keep_best=0, **options):
    return Checkpoints(directory, keep_newest=keep_newest, keep_best=keep_best, say=say, **options)


def write(directory, steps):
    with opened(directory) as checkpoints:
        for step in steps:
            checkpoints.save(step, make_arrays(step), {"step": step}, accuracy=None)
    return directory


def assert_restores(directory, step, say=print):
    """The newest intact checkpoint is that of `step`."""
    with opened(directory, say) as checkpoints:
        found, arrays, _ = checkpoints.restore(LIKE)
    assert found == step
    jax.tree.map(np.testing.assert_array_equal, arrays, make_arrays(step))


def test_the_newest_and_the_best_are_kept(tmp_path):
    accuracies = [0.2, 0.9, None, 0.8, 0.1, None, 0.3]
    with opened(tmp_path, keep_newest=2, keep_best=2) as checkpoints:
        assert checkpoints.restore(LIKE) is None
        for step, accuracy in enumerate(accuracies):
            checkpoints.save(step, make_arrays(step), {"n": step}, accuracy=accuracy)
        checkpoints.wait()
        assert checkpoints.steps == [1, 3, 5, 6]
        assert checkpoints.restore(LIKE)[2] == {"n": 6}


def test_the_best_is_kept_when_the_run_resumes(tmp_path, caplog):
    for accuracies in ({0: 0.2, 1: 0.9, 2: None}, {3: 0.1, 4: None, 5: 0.3}, {6: 0.4, 7: None}):
        with opened(tmp_path, keep_newest=2, keep_best=1) as checkpoints:
            for step, accuracy in accuracies.items():
                checkpoints.save(step, make_arrays(step), {}, accuracy=accuracy)
    with opened(tmp_path) as checkpoints:
        assert checkpoints.steps == [1, 6, 7]
    assert "metrics" not in caplog.text


def test_a_second_run_in_one_directory_replaces_nothing(tmp_path):
    """Two configs may name one bucket. A copy that the user made is no second run."""
    with opened(tmp_path) as first, opened(tmp_path) as second:
        shutil.copytree(write(tmp_path / "elsewhere", [7]) / "7", tmp_path / "old_7")
        first.save(1, make_arrays(1), {}, accuracy=None)
        first.wait()
        for step in (1, 0):
            with pytest.raises(UserError, match=f"checkpoint 1 .* at step {step}, .*another run"):
                second.save(step, make_arrays(2), {}, accuracy=None)
        first.save(2, make_arrays(2), {}, accuracy=None)
    assert checkpoint.find_step(tmp_path, None) == 2
    assert_restores(tmp_path, 2)


def test_all_processes_end_where_the_primary_finds_another_run(tmp_path):
    with opened(tmp_path) as worker:
        worker.all_gather = lambda newest: [5, newest]
        with pytest.raises(UserError, match="checkpoint 5 .* at step 3, .*another run"):
            worker.save(3, make_arrays(3), {}, accuracy=None)
        worker.all_gather = lambda mine: [mine]


def test_arrays_are_saved_as_they_were_when_save_was_called(tmp_path):
    """The update donates them right after."""
    arrays = make_arrays(4)
    with opened(tmp_path) as checkpoints:
        checkpoints.save(0, arrays, {}, accuracy=None)
        spoil = jax.jit(lambda x: jax.tree.map(jnp.zeros_like, x), donate_argnums=0)
        jax.block_until_ready(spoil(arrays))
        checkpoints.wait()
        restored = checkpoints.restore(LIKE)[1]
    jax.tree.map(np.testing.assert_array_equal, restored, make_arrays(4))


def test_another_layout_of_devices(tmp_path):
    write(tmp_path, [0])
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    spread, whole = NamedSharding(mesh, PartitionSpec("x")), NamedSharding(mesh, PartitionSpec())
    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=spread if x.ndim else whole)
    with opened(tmp_path) as checkpoints:
        arrays = checkpoints.restore(jax.tree.map(shape, make_arrays()))[1]
    assert arrays["w"].sharding == spread
    jax.tree.map(np.testing.assert_array_equal, arrays, make_arrays(0))


def damage_all(directory, damage):
    for file in directory.rglob("*"):
        if file.is_file() and file.parent.name == "d":
            damage(file)


def flip_a_byte(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    file.write_bytes(content)


def cut_in_half(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize("damage", [flip_a_byte, cut_in_half, os.unlink])
def test_a_damaged_newest_falls_back_and_says_so(tmp_path, damage):
    write(tmp_path, [1, 2])
    damage_all(tmp_path / "2", damage)
    said = []
    assert_restores(tmp_path, 1, said.append)
    assert len(said) == 1 and "checkpoint 2" in said[0] and "damaged" in said[0]
    assert (tmp_path / "damaged" / "2").is_dir()
    assert (tmp_path / "damaged" / "reasons.txt").read_text().startswith("2: ")
    write(tmp_path, [2])  # the run resumes
    assert_restores(tmp_path, 2)


@pytest.mark.parametrize("damage", [flip_a_byte, cut_in_half])
def test_a_damaged_accuracy_costs_its_rank_alone(tmp_path, damage):
    with opened(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, make_arrays(step), {}, accuracy=0.5)
    damage(tmp_path / "1" / "metrics" / "metrics")
    said = []
    assert_restores(tmp_path, 2, said.append)
    assert len(said) == 1 and "the accuracy of checkpoint 1 in" in said[0]
    with opened(tmp_path, keep_newest=1, keep_best=1) as checkpoints:  # the run resumes
        checkpoints.save(3, make_arrays(3), {}, accuracy=0.1)
        checkpoints.wait()
        assert checkpoints.steps == [2, 3]


def test_contents_are_compared_not_only_formats(tmp_path, monkeypatch):
    """Sums find numbers that changed in a file that still decodes."""
    write(tmp_path, [1])
    changed = lambda arrays: {k: [v[0] ^ 1, v[1]] for k, v in bit_sums(arrays).items()}
    monkeypatch.setattr(checkpoint, "bit_sums", changed)
    write(tmp_path, [2])
    monkeypatch.setattr(checkpoint, "bit_sums", bit_sums)
    assert_restores(tmp_path, 1, lambda _: None)


@pytest.mark.parametrize("place", [(0, 0), (1, 0), (63, 7)])
def test_sums_see_every_bit_and_every_place(place):
    w = np.asarray(make_arrays()["w"])
    before, flipped, swapped = bit_sums(jnp.asarray(w)), w.copy(), w.copy()
    flipped.view(np.uint32)[place] ^= 1
    swapped[[2, 5]] = swapped[[5, 2]]
    assert bit_sums(jnp.asarray(flipped)) != before != bit_sums(jnp.asarray(swapped))


def test_sums_need_no_copy_of_the_arrays():
    arrays = [jnp.ones((64, 1024)), jnp.ones((3, 5, 256), jnp.bfloat16), jnp.float32(1)]
    memory = integrity._bit_sums.lower(arrays).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 1000


def test_where_all_are_damaged_nothing_is_moved(tmp_path):
    write(tmp_path, [1, 2])
    damage_all(tmp_path, flip_a_byte)
    for _ in range(2):  # a second start must not take it for a new run
        with opened(tmp_path) as checkpoints:
            with pytest.raises(UserError, match=r"no checkpoint.*\n  2: .*\n  1: "):
                checkpoints.restore(LIKE)
            assert checkpoints.steps == [1, 2]


def test_another_model_is_named(tmp_path):
    write(tmp_path, [1])
    other = LIKE | {"w": jax.ShapeDtypeStruct((64, 9), jnp.float32)}
    with opened(tmp_path) as checkpoints:
        with pytest.raises(UserError, match=r"another model: \['w'\] is float32\[64, 8\]"):
            checkpoints.restore(other)
        assert checkpoints.steps == [1]


@pytest.mark.parametrize("code, text", [
    (errno.ENOSPC, "No space left on device"), (errno.EDQUOT, "Disk quota exceeded")
])  # fmt: skip
def test_a_full_disk_is_named_and_the_checkpoint_before_is_intact(
    tmp_path, monkeypatch, code, text
):
    write(tmp_path, [1])

    def full(*args, **kwargs):
        # As orbax raises it: tensorstore's ValueError inside its own.
        try:
            raise OSError(code, text)
        except OSError as error:
            raise ValueError("RESOURCE_EXHAUSTED") from error

    with opened(tmp_path) as checkpoints:
        monkeypatch.setattr(checkpoints.manager, "save", full)
        with pytest.raises(CheckpointError, match="disk is full"):
            checkpoints.save(2, make_arrays(2), {}, accuracy=None)
    assert_restores(tmp_path, 1)


def test_a_checkpoint_that_a_run_deletes_meanwhile_is_not_called_damaged(tmp_path, monkeypatch):
    write(tmp_path, [1, 2])

    def deleted(directory, step, *_):
        shutil.rmtree(directory / str(step))
        raise Damaged("a file is missing")

    monkeypatch.setattr(checkpoint, "_read", deleted)
    with pytest.raises(UserError, match="checkpoint 2 in .* was deleted while it was read"):
        checkpoint.restore_part(tmp_path, 2, (), LIKE)


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file/checkpoints: Not a directory.* --workdir"):
        opened(tmp_path / "file" / "checkpoints")


@pytest.mark.parametrize(
    "error, refused",
    [
        (PermissionError(errno.EACCES, "Permission denied"), True),
        (OSError(errno.EROFS, "Read-only file system"), True),
        (OSError("Forbidden: https://storage/o\nno storage.objects.create"), True),  # of gcsfs
        (OSError(errno.EIO, "Input/output error"), False),  # it may pass
        (RuntimeError("503: try again"), False),  # gcsfs has errors of its own
    ],
)
def test_a_directory_that_can_only_be_read_is_refused_before_a_step(
    tmp_path, monkeypatch, error, refused
):
    with opened(tmp_path) as checkpoints:
        checkpoints.check_writable()
        assert list(tmp_path.iterdir()) == []

        def fail(*_):
            raise error

        monkeypatch.setattr(type(checkpoints.directory), "write_text", fail)
        with pytest.raises(UserError) if refused else contextlib.nullcontext() as found:
            checkpoints.check_writable()
    wanted = r"cannot be kept in [^:]*: (Perm|Read|Forb)[\s\S]* mend its permissions"
    assert found is None or re.search(wanted, str(found.value))


def test_a_run_that_has_saved_nothing(tmp_path):
    with pytest.raises(UserError, match="has no checkpoint yet: the run has saved none"):
        checkpoint.find_step(tmp_path, None)


def test_a_half_written_checkpoint_does_not_count(tmp_path):
    write(tmp_path, [1])
    (tmp_path / "2.orbax-checkpoint-tmp").mkdir()
    assert_restores(tmp_path, 1)


def test_the_time_limit_of_a_save_grows_with_its_size(tmp_path):
    """The 32B: 32.8 billion times 12 bytes, at 100 MB/s 3,936 s; orbax's own limit is 1,200 s."""
    for num_bytes, seconds in ((393_600_000_000, 3936), (10**9, 1200)):
        with opened(tmp_path, num_bytes=num_bytes) as checkpoints:
            saver = checkpoints.manager._checkpointer
            assert saver._async_manager._timeout_secs == seconds  # pyright: ignore


def fail_reads(monkeypatch, *errors):
    """Makes the next reads of arrays raise these errors; returns the errors still to come."""
    left, real = list(errors), ocp.PyTreeCheckpointHandler.restore

    def restore(handler, *args, **kwargs):
        if left:
            raise left.pop(0)
        return real(handler, *args, **kwargs)

    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "restore", restore)
    monkeypatch.setattr(integrity, "PAUSE_SECONDS", 0.0)
    return left


def io_error(*_, **__):
    return OSError(errno.EIO, "Input/output error")


def test_a_storage_error_that_passes_is_no_damage(tmp_path, monkeypatch):
    write(tmp_path, [1, 2])
    left = fail_reads(monkeypatch, io_error(), ValueError("UNAVAILABLE: connection reset"))
    said = []
    assert_restores(tmp_path, 2, said.append)
    assert not left and not said and not (tmp_path / "damaged").exists()


def test_a_storage_error_that_stays_ends_the_run_and_moves_nothing(tmp_path, monkeypatch):
    write(tmp_path, [1, 2])
    fail_reads(monkeypatch, *[io_error() for _ in range(integrity.READS)])
    with opened(tmp_path) as checkpoints:
        with pytest.raises(CheckpointError, match="checkpoint 2 in .*Input/output") as caught:
            checkpoints.restore(LIKE)
        assert caught.value.restart and checkpoints.steps == [1, 2]


def test_an_error_of_the_device_is_raised_as_it_is(tmp_path, monkeypatch):
    write(tmp_path, [1, 2])
    fail_reads(monkeypatch, jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 86 GiB"))
    with opened(tmp_path) as checkpoints:
        with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
            checkpoints.restore(LIKE)
        assert checkpoints.steps == [1, 2]


class Late:
    """A save's future that fails in the background."""

    def result(self, timeout=None):
        raise io_error()


def fail_in_background(monkeypatch, *fails):
    """Has saves fail after `Checkpoints.save` has returned."""
    fails, real = list(fails), ocp.StandardCheckpointHandler.async_save

    async def save(handler, *args, **kwargs):
        futures = await real(handler, *args, **kwargs)
        return [*(futures or ()), Late()] if fails and fails.pop(0) else futures

    monkeypatch.setattr(ocp.StandardCheckpointHandler, "async_save", save)


def test_a_save_that_fails_is_tried_again(tmp_path, monkeypatch):
    """At once where it fails at once; before the run ends where it fails in the background."""
    said = []

    def fail(*_, **__):
        raise io_error()

    with opened(tmp_path, said.append) as checkpoints:
        monkeypatch.setattr(checkpoints.manager, "save", fail)
        checkpoints.save(1, make_arrays(1), {"step": 1}, accuracy=None)
        checkpoints.wait()
        fail_in_background(monkeypatch, True)
        checkpoints.save(2, make_arrays(2), {"step": 2}, accuracy=None)
    assert [line[:21] for line in said] == ["warning: checkpoint 1", "warning: checkpoint 2"]
    with opened(tmp_path) as checkpoints:
        assert checkpoints.steps == [1, 2]
    assert_restores(tmp_path, 2)


def test_the_next_save_makes_up_for_one_that_failed(tmp_path, monkeypatch):
    fail_in_background(monkeypatch, True, False, True, False)
    arrays, said = make_arrays(1), []
    with opened(tmp_path, said.append) as checkpoints:
        checkpoints.save(1, arrays, {}, accuracy=None)
        jax.tree.map(lambda x: x.delete(), arrays)  # the update donates them
        for step in (2, 3, 4):
            checkpoints.save(step, make_arrays(step), {}, accuracy=None)
    assert len(said) == 2
    with opened(tmp_path) as checkpoints:
        assert checkpoints.steps == [2, 4]


@pytest.mark.parametrize("donated", [False, True])
def test_two_failed_saves_in_a_row_end_the_run(tmp_path, monkeypatch, donated):
    """A save cannot be repeated where its arrays were donated."""
    write(tmp_path, [1])
    fail_in_background(monkeypatch, True, not donated)
    with opened(tmp_path, lambda _: None) as checkpoints:
        arrays = make_arrays(2)
        checkpoints.save(2, arrays, {}, accuracy=None)
        if donated:
            jax.tree.map(lambda x: x.delete(), arrays)
        message = "deleted" if donated else "Input/output.* before it failed"
        with pytest.raises(CheckpointError, match=f"checkpoint 2 in .*{message}") as caught:
            checkpoints.wait()
        assert caught.value.restart
    assert_restores(tmp_path, 1)


# One process of two. The storage of the second first fails, then holds a damaged checkpoint.
PROCESS = """
import errno, sys
place, port, index = sys.argv[1:]
from dapo_jax.distributed import process_group
from dapo_jax.runs import checkpoint, integrity
group = process_group.start(f"127.0.0.1:{port}", 2, int(index), 60)
import jax, numpy as np, orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
at = NamedSharding(Mesh(jax.devices(), "x"), PartitionSpec("x"))
arrays = lambda n: {"x": jax.make_array_from_callback((4,), at, lambda i: np.arange(4.0)[i] + n)}
integrity.PAUSE_SECONDS = 0.0
real = ocp.JsonCheckpointHandler.restore
options = dict(keep_newest=9, keep_best=0, all_gather=group.all_gather)
with checkpoint.Checkpoints(place, **options) as checkpoints:
    for n in (1, 2):
        checkpoints.save(n, arrays(n), {}, accuracy=None)
    checkpoints.wait()
    like = {"x": jax.ShapeDtypeStruct((4,), arrays(0)["x"].dtype, sharding=at)}
    for fault in (OSError(errno.EIO, "Input/output error"), ValueError("DATA_LOSS: x")):
        def read(handler, where, *args, **kwargs):
            if index == "1" and where.parts[-2:] == ("2", "host"):
                raise fault
            return real(handler, where, *args, **kwargs)
        ocp.JsonCheckpointHandler.restore = read
        try:
            step, found, _ = checkpoints.restore(like)
            print("restored", step, [x.data.tolist() for x in found["x"].addressable_shards])
        except checkpoint.CheckpointError as error:
            print("error", error.restart, error)
        print("steps", checkpoints.steps)
group.shutdown(0)
"""


def test_two_processes_agree_on_a_checkpoint_that_one_cannot_read(tmp_path):
    program, port, pipe = tmp_path / "process.py", free_port(), subprocess.PIPE
    program.write_text(PROCESS)
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    env["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"
    command = [sys.executable, program, tmp_path / "checkpoints", str(port)]
    started = [
        subprocess.Popen([*command, str(i)], env=env, stdout=pipe, stderr=pipe, text=True)
        for i in range(2)
    ]
    for i, process in enumerate(started):
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        words = ("error", "steps", "restored")
        error, before, *after = [line for line in out.splitlines() if line.startswith(words)]
        assert error.startswith("error True checkpoint 2") and "Input/output error" in error
        assert before == "steps [1, 2]"
        assert after == [f"restored 1 [[{1.0 + 2 * i}, {2.0 + 2 * i}]]", "steps [1]"]


TAKEN_AWAY = """
import contextlib, gc, sys
from dapo_jax.runs.integrity import one_failure_reported

class Fails:
    def __del__(self):
        raise RuntimeError("Event loop is closed")

def take_away(event, arguments):
    if event == "sys.unraisablehook":  # raised when the hook is found, before it is called
        stack.close()

stack = contextlib.ExitStack()
sys.addaudithook(take_away)
stack.enter_context(one_failure_reported())
Fails()
gc.collect()
print("alive")
"""


def test_a_hook_that_another_thread_is_about_to_call_is_not_freed():
    done = subprocess.run([sys.executable, "-c", TAKEN_AWAY], capture_output=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"alive\n", b"")


def test_nothing_global_changes_where_checkpoints_are_open(tmp_path):
    write(tmp_path, [1])
    hook, level = sys.unraisablehook, logging.getLogger("asyncio").level
    with opened(tmp_path) as checkpoints:
        assert checkpoints.restore(LIKE) is not None
        assert sys.unraisablehook is hook and logging.getLogger("asyncio").level == level


@pytest.mark.parametrize(
    "text, damaged",
    [
        ("DATA_LOSS: x", True),
        ("Error opening driver: Error decoding b-tree node: End of data expected", True),
        ("UNAVAILABLE: the storage does not answer", False),
    ],
)
def test_damage_is_a_failure_to_decode_and_nothing_else(text, damaged):
    assert integrity.is_damage(ValueError(text)) == damaged


def test_processes_that_see_different_checkpoints_start_again(tmp_path):
    """As through a file server's stale listing. `all_gather` gives those of a second process."""
    write(tmp_path, [1, 2])
    with opened(tmp_path, all_gather=lambda steps: [steps, steps and steps[:1]]) as checkpoints:
        message = r"see different checkpoints in .*; here \[1, 2\]"
        with pytest.raises(CheckpointError, match=message) as caught:
            checkpoints.restore(LIKE)
        assert caught.value.restart
