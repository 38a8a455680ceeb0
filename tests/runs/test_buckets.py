"""Checkpoints in a bucket: orbax, gcsfs and tensorstore themselves, over HTTP, against an emulator
of Google's storage. Nothing leaves the machine."""

import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from dapo_jax.runs import checkpoint
from dapo_jax.runs.checkpoint import Checkpoints, restore_part
from dapo_jax.types import UserError
from tests.conftest import ROOT
from tests.support.processes import finish_all
from tests.support.runs import free_port, metrics_of, rollouts_of, run_here, start


@pytest.fixture(scope="module")
def storage():
    """The environment variables by which the bucket is found."""
    port = free_port()
    command = [sys.executable, str(ROOT / "tests" / "support" / "storage_server.py"), str(port)]
    pipe, quiet = subprocess.PIPE, subprocess.DEVNULL
    # It logs connections that clients have closed.
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=quiet, text=True) as server:
        assert server.stdout is not None and server.stdout.readline() == "ready\n"
        at = f"http://127.0.0.1:{port}"
        yield {
            "STORAGE_EMULATOR_HOST": at,
            "TENSORSTORE_GCS_HTTP_URL": at,
            "GOOGLE_CLOUD_PROJECT": "project",
        }
        server.stdin.close()


@pytest.fixture
def bucket(storage, monkeypatch, request):
    """A place in a bucket, of the test's own."""
    for name, value in storage.items():
        monkeypatch.setenv(name, value)
    return epath.Path(f"gs://bucket/{request.node.name}")


class Arrays(NamedTuple):
    x: jax.Array
    n: jax.Array


def arrays(n):
    return Arrays(jnp.arange(12.0).reshape(3, 4) * n, jnp.int32(n))


def shapes():
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays(0))


def opened(place, say=print):
    checkpoints = Checkpoints(place, keep_newest=2, keep_best=1, say=say)
    checkpoints.check_writable()
    return checkpoints


def test_checkpoints_are_restored_and_the_oldest_deleted(bucket):
    """A step without the file that orbax leaves last does not count."""
    with opened(bucket / "run") as checkpoints:
        for step, accuracy in enumerate((0.5, 0.9, 0.1, 0.2)):
            checkpoints.save(step, arrays(step), {"step": step}, accuracy=accuracy)
        checkpoints.wait()
        assert checkpoints.steps == [1, 2, 3]
    with opened(bucket / "run") as checkpoints:
        found = checkpoints.restore(shapes())
    assert found is not None and (found[0], found[2]) == (3, {"step": 3})
    jax.tree.map(np.testing.assert_array_equal, found[1], arrays(3))
    assert restore_part(bucket / "run", 1, ("n",), shapes().n)[:2] == (1, 1)
    with pytest.raises(UserError, match="has no checkpoint 0; it has 1, 2, 3"):
        restore_part(bucket / "run", 0, ("n",), shapes().n)
    with pytest.raises(UserError, match="elsewhere: there are no checkpoints"):
        restore_part(bucket / "elsewhere", None, ("n",), shapes().n)
    (mark,) = (file for file in (bucket / "run/3").iterdir() if "commit_success" in file.name)
    mark.unlink()
    assert restore_part(bucket / "run", None, ("n",), shapes().n)[:2] == (2, 2)
    with opened(bucket / "run") as checkpoints:
        found = checkpoints.restore(shapes())
    assert found is not None and found[0] == 2


@pytest.mark.slow
def test_a_damaged_one_is_set_aside(bucket):
    said = []
    with opened(bucket, said.append) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, arrays(step), {"step": step}, accuracy=None)
        checkpoints.wait()
        for file in _files(bucket / "2" / "arrays"):
            if "/d/" in str(file):
                file.write_bytes(b"\0" * 100)
        found = checkpoints.restore(shapes())
        assert found is not None and (found[0], found[2]) == (1, {"step": 1})
        assert len(said) == 1 and "checkpoint 2 in gs://bucket/" in said[0] and "moved" in said[0]
        checkpoints.save(3, arrays(3), {"step": 3}, accuracy=None)
        checkpoints.wait()
        assert checkpoints.steps == [1, 3]
    aside = epath.Path(f"{bucket}_damaged")
    assert (aside / "reasons.txt").read_text().startswith("2: ")
    assert list(_files(aside / "2" / "arrays"))


def _files(place):
    for path in place.iterdir():
        if path.is_dir():
            yield from _files(path)
        else:
            yield path


def test_places_that_cannot_be(bucket, monkeypatch):
    with pytest.raises(UserError, match="cannot be kept in gs://nobodys/run: .* --workdir"):
        opened("gs://nobodys/run")
    with pytest.raises(UserError, match="s3://b/c: it must be gs://BUCKET/PLACE or a directory"):
        opened("s3://b/c")
    monkeypatch.setattr(checkpoint.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UserError, match="gs://b/c .* gcsfs: pip install"):
        opened("gs://b/c")


@pytest.mark.slow
def test_processes_share_nothing_but_the_bucket(storage, home, tmp_path, monkeypatch):
    """Where the base model is not made by the run: each has a directory of its own."""
    for name, value in storage.items():
        monkeypatch.setenv(name, value)
    scorer = {"reward__scorer": f"{ROOT / 'tests' / 'support' / 'scorers.py'}:even"}
    first = scorer | {"pretrain__num_steps": 2}
    run_here(tmp_path / "made", home, **first | {"train__num_steps": 1})
    settings = scorer | {
        "pretrain": None,
        "model__tokenizer": str(tmp_path / "made" / "tokenizer"),
        "mesh__data": 2,
        "checkpoint__directory": "gs://bucket/apart",
    }
    for steps in (1, 2):
        common = (f"--coordinator_address=127.0.0.1:{free_port()}", "--num_processes=2")
        started = [
            start(
                tmp_path / f"of_{i}_{steps}",
                home,
                flags=(*common, f"--process_id={i}"),
                **settings | {"train__num_steps": steps},
            )
            for i in range(2)
        ]
        ended = finish_all(started)
        assert [code for code, *_ in ended] == [0, 0], ended
    assert "resuming after step 1 of 2" in ended[0][1]
    assert not (tmp_path / "of_1_2").exists()


@pytest.mark.slow
def test_a_run_goes_on_from_a_bucket_in_a_new_directory(bucket, home, tmp_path):
    """Machines are new after every preemption."""
    here = {"pretrain__num_steps": 2}
    here["reward__scorer"] = f"{ROOT / 'tests' / 'support' / 'scorers.py'}:even"
    there = here | {"checkpoint__directory": str(bucket)}
    run_here(tmp_path / "whole", home, **here)
    run_here(tmp_path / "first", home, **there, train__num_steps=1)
    assert not (tmp_path / "first" / "checkpoints").exists()
    assert "resuming after step 1 of 3" in run_here(tmp_path / "second", home, **there)[1]
    whole, second = metrics_of(tmp_path / "whole"), metrics_of(tmp_path / "second")
    assert second == whole[2:]
    last = rollouts_of(tmp_path / "second")
    assert last == {name: rollouts_of(tmp_path / "whole")[name] for name in last}
    wanted = "(?s)gs://bucket/.* belongs to a run with another config.*config.seed: 0 there, 1 now"
    with pytest.raises(UserError, match=wanted):
        run_here(tmp_path / "third", home, **there, seed=1)
