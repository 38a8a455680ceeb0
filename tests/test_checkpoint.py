"""Checkpoints: what is kept, what comes back, and what damage or a full disk does."""

import errno
import gc
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from dapo_jax.checkpoint import CheckpointError, Checkpoints
from dapo_jax.types import RunError, UserError

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
        from dapo_jax import checkpoint

        honest = checkpoint._sums
        lie = lambda arrays: {k: [v[0] ^ 1, v[1]] for k, v in honest(arrays).items()}
        monkeypatch.setattr(checkpoint, "_sums", lie)
        checkpoints.save(2, make_arrays(2), {}, accuracy=None)
        checkpoints.wait()
        monkeypatch.setattr(checkpoint, "_sums", honest)
        assert checkpoints.restore(like(make_arrays()))[0] == 1


@pytest.mark.parametrize("place", [(0, 0), (1, 0), (63, 7)])
def test_sums_see_every_bit_and_every_place(place):
    from dapo_jax.checkpoint import _sums

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
