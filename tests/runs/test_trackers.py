"""Trackers: each gets every step once, and none stops or slows a run."""

import errno
import importlib.util
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from importlib.machinery import ModuleSpec

import pytest
from tensorboardX.proto import event_pb2
from tensorboardX.record_writer import RecordWriter

from dapo_jax.runs import trackers
from dapo_jax.runs.run_directory import RunDirectory, read_config
from dapo_jax.types import UserError
from tests.conftest import ROOT
from tests.support.helpers import tiny_config

# A stand-in for wandb: calls.jsonl is its server. With WANDB_BASE_URL it connects there, and waits.
FAKE = """
import json, os, pathlib, socket

OFFLINE = os.environ.get("WANDB_MODE") == "offline"

class Settings:
    def __init__(self, **settings):
        self.settings = settings

def Table(columns, data, allow_mixed_types):
    return {"columns": columns, "data": data}

class Run:
    def __init__(self, directory):
        self.file = pathlib.Path(directory, "calls.jsonl")
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        steps = [call[1]["step"] for call in map(json.loads, lines) if call[0] == "log"]
        self.offline = OFFLINE
        self.starting_step = 0 if OFFLINE else 1 + max(steps, default=-1)
        self.config = self

    def call(self, name, /, **values):
        with self.file.open("a") as file:
            file.write(json.dumps((name, values)) + "\\n")

    def update(self, config, allow_val_change):
        self.call("config", config=config)

    def log(self, numbers, step, commit):
        self.call("log", numbers=numbers, step=step)

    def finish(self):
        self.call("finish")

def init(*, dir, settings, **arguments):
    if url := os.environ.get("WANDB_BASE_URL"):
        place = url.removeprefix("http://").split(":")
        connection = socket.create_connection((place[0], int(place[1])))
        connection.sendall(b"GET / HTTP/1.1\\r\\n\\r\\n")
        connection.recv(1)  # without a time limit
    run = Run(dir)
    run.call("init", **arguments)
    return run
"""


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """Every tracker stays on this machine, and has time where other tests take it."""
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 300)
    for name in ("WANDB_BASE_URL", "MLFLOW_TRACKING_URI", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """The stand-in in the place of wandb, here and in new processes."""
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "wandb.py").write_text(FAKE)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "packages"), *sys.path])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)


def opened(path, *names, step=-1, say=print, **overrides):
    directory = RunDirectory(path, tiny_config(log__trackers=names, **overrides), say=say)
    directory.rewind(step)
    return directory


def records(step):
    first = {"step": step, "response": f"text of {step}", "correct": True, "reward": 1.0}
    return [first, {"step": step, "response": "", "correct": False, "extra": {"lines": 3}}]


def log(directory, *steps):
    for step in steps:
        directory._write_records("rollouts", step, records(step))
        directory.log({"step": step, "eval/avg@4": step / 8})


def steps_of(path):
    return [json.loads(line)["step"] for line in (path / "metrics.jsonl").read_text().splitlines()]


def calls_of(path, name):
    calls = [json.loads(line) for line in (path / "calls.jsonl").read_text().splitlines()]
    return [values for called, values in calls if called == name]


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_a_resumed_run_goes_on_under_its_id_and_has_every_step_once(
    tmp_path, fake, monkeypatch, mode
):
    monkeypatch.setenv("WANDB_MODE", mode)
    path, said = tmp_path / "a run", []
    with_seed = {"seed": 7}
    directory = opened(path, "wandb", say=said.append, **with_seed)
    log(directory, 0, 1, 2)
    directory.close()
    directory.close()  # once more does nothing
    # Steps after the last checkpoint are made again; log.trackers and num_steps may change.
    longer = {"train__num_steps": 9}
    directory = opened(path, "tensorboard", "wandb", step=1, say=said.append, **with_seed, **longer)
    log(directory, 2, 3)
    directory.log({"step": 4})
    directory.close()
    assert said == [] and steps_of(path) == [0, 1, 2, 3, 4]
    first, second = calls_of(path, "init")
    assert first == second
    assert (first["id"], first["resume"], first["project"]) == (first["name"], "allow", "dapo_jax")
    assert first["id"] == json.loads((path / "trackers.json").read_text())["id"]
    assert first["id"].startswith("a_run-")
    *_, newest = calls_of(path, "config")
    assert newest["config"] == read_config(path / "config.json")
    logged = calls_of(path, "log")
    assert [call["step"] for call in logged] == [0, 1, 2, 3, 4]
    assert logged[3]["numbers"] == {
        "step": 3,
        "eval/avg@4": 3 / 8,
        "transcripts/rollouts": {
            "columns": ["step", "response", "correct", "reward", "extra"],
            "data": [[3, "text of 3", True, 1.0, None], [3, "", False, None, '{"lines": 3}']],
        },
    }
    assert logged[4]["numbers"] == {"step": 4}, "responses are sent once"
    assert len(calls_of(path, "finish")) == 2
    assert list((path / "tensorboard").iterdir())


def test_a_full_disk_switches_tensorboard_off_and_the_run_continues(tmp_path, monkeypatch):
    said = []
    directory = opened(tmp_path, "tensorboard", say=said.append)
    log(directory, 0)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RecordWriter, "write", full)
    log(directory, *range(1, 20))
    directory.close()
    (warning,) = said
    assert "tensorboard failed: [Errno 28] No space left on device; it is switched off" in warning
    assert steps_of(tmp_path) == [*range(20)]


def test_tensorboard_alone_starts_no_process_and_no_name_no_tracker(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers.multiprocessing, "get_context", None)
    directory = opened(tmp_path / "events", "tensorboard")
    log(directory, 0, 1)
    directory.close()
    (events,) = (tmp_path / "events" / "tensorboard").iterdir()
    assert events.read_bytes().count(b"eval/avg_4") == 2
    directory = opened(tmp_path / "nothing")
    log(directory, 0)
    directory.close()
    assert not (tmp_path / "nothing" / "tensorboard").exists()
    assert tiny_config().log.trackers == ("tensorboard",)
    other = RunDirectory(tmp_path / "other", tiny_config(log__trackers=("wandb",)), writes=False)
    other.rewind(-1)
    other.log({"step": 0})
    other.close()
    assert not (tmp_path / "other").exists()


def events_of(file):
    """The events in a file of TensorBoard: the length of each, a sum, its bytes, a sum."""
    data, found = file.read_bytes(), []
    while data:
        size = int.from_bytes(data[:8], "little")
        found.append(event_pb2.Event.FromString(data[12 : 12 + size]))
        data = data[16 + size :]
    return found


def test_tensorboard_has_each_step_at_once_and_drops_those_that_are_repeated(tmp_path):
    """It drops all from the step at which a session starts. A killed run closes no file."""
    for step, logged in ((-1, (0, 1, 2)), (1, (2, 3))):
        before = {*tmp_path.glob("tensorboard/*")}
        directory = opened(tmp_path, "tensorboard", step=step)
        log(directory, *logged)
        (file,) = {*tmp_path.glob("tensorboard/*")} - before
        start, *scalars = [e for e in events_of(file) if not e.file_version]
        directory.close()
        assert start.session_log.status == event_pb2.SessionLog.START
        assert start.step == logged[0]
        assert [*dict.fromkeys(event.step for event in scalars)] == [*logged]


def silent(names):
    """The trackers with the environment that sends them to a server on loopback."""
    key = {"WANDB_API_KEY": "a" * 40, "WANDB_MODE": "online"}
    known = {"wandb": ("WANDB_BASE_URL", key), "mlflow": ("MLFLOW_TRACKING_URI", {})}
    return [(name, *known[name]) for name in names]


@pytest.mark.parametrize(
    "stands_in, name, variable, more",
    [
        *((True, *case) for case in silent(["wandb"])),
        *((False, *case) for case in silent(["wandb", "mlflow"])),
    ],
)
def test_a_server_that_never_answers_holds_up_no_step(
    tmp_path, monkeypatch, request, stands_in, name, variable, more
):
    if stands_in:
        request.getfixturevalue("fake")
    elif importlib.util.find_spec(name) is None:
        pytest.skip(f"needs {name}: uv sync --inexact --extra {name}")
    monkeypatch.setattr(trackers, "QUEUE_STEPS", 4)
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 0.5)
    path, said = tmp_path / "run", []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(100)
        monkeypatch.setenv(variable, f"http://127.0.0.1:{server.getsockname()[1]}")
        for key, value in more.items():
            monkeypatch.setenv(key, value)
        directory = opened(path, name, say=said.append)
        connection, _ = server.accept()
        start = time.monotonic()
        log(directory, *range(20))
        directory.close()
        seconds = time.monotonic() - start
        connection.close()
    assert seconds < 20, "the server would have held the run for minutes"
    assert steps_of(path) == list(range(20))
    late, dropped = said
    wanted = f"  warning: log.trackers: {name} did not end in 0.5 s and may lack steps; "
    assert late == wanted + "metrics.jsonl has all"
    # Up to QUEUE_STEPS wait, and one more may be on its way.
    assert dropped.split(" steps")[0].rpartition(" ")[2] in ("15", "16")


def test_a_server_that_refuses_is_a_warning_and_switches_its_tracker_off(
    tmp_path, fake, monkeypatch
):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{closed.getsockname()[1]}")
    monkeypatch.setattr(trackers, "PAUSE_SECONDS", 0.01)
    said = []
    directory = opened(tmp_path / "run", "wandb", say=said.append)
    log(directory, 0)
    directory._trackers[0].process.join(60)
    log(directory, 1, 2)
    directory.close()
    failed, off, lacks = said
    start = "  warning: log.trackers: wandb "
    assert failed.startswith(f"{start}failed: [Errno ") and "refused" in failed
    assert failed.endswith("; the run continues, metrics.jsonl has everything")
    assert off == f"{start}is switched off"
    assert lacks == f"{start}lacks 2 steps; metrics.jsonl has all"
    assert steps_of(tmp_path / "run") == [0, 1, 2]


def test_a_tracker_that_dies_is_a_warning(tmp_path, fake):
    said = []
    directory = opened(tmp_path / "run", "wandb", say=said.append)
    directory._trackers[0].process.kill()
    directory._trackers[0].process.join()
    log(directory, 0)
    directory.close()
    assert "wandb died with exit code -9; the run continues" in said[0]
    assert steps_of(tmp_path / "run") == [0]


def test_the_end_of_a_run_does_not_wait_for_a_tracker_that_died_with_a_full_queue(
    tmp_path, fake, monkeypatch
):
    monkeypatch.setattr(trackers, "QUEUE_STEPS", 2)
    said = []
    with socket.create_server(("127.0.0.1", 0)) as silent_server:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{silent_server.getsockname()[1]}")
        directory = opened(tmp_path / "run", "wandb", say=said.append)
        log(directory, 0, 1, 2)
        directory._trackers[0].process.kill()
        directory._trackers[0].process.join()
        monkeypatch.setattr(directory._trackers[0].items, "put", None)  # would wait
        directory.close()
    died, lacks = said
    assert "died with exit code -9" in died and "lacks 1 steps" in lacks


KILLED = """
import os, signal, sys, time
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from tests.runs.test_trackers import log, opened
if __name__ == "__main__":
    path = Path(sys.argv[1])
    directory = opened(path, "wandb")
    log(directory, 0, 1)
    while not (path / "calls.jsonl").exists():
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_run_leaves_nothing_behind_that_runs(tmp_path, fake):
    """Its tracker sends what has reached it, and ends."""
    (tmp_path / "killed.py").write_text(KILLED)
    path = tmp_path / "run"
    command = [sys.executable, str(tmp_path / "killed.py"), str(path), str(tmp_path / "packages")]
    # Its standard error is that of the tracker, too: the end of the file is the end of both.
    done = subprocess.run([*command, str(ROOT)], stderr=subprocess.PIPE, timeout=100)
    assert done.returncode == -signal.SIGKILL
    assert len(calls_of(path, "finish")) == 1


@pytest.mark.parametrize("text", ["", '{"ie": "run-1"}', "0"])
def test_a_damaged_file_of_the_id_does_not_stop_the_run(tmp_path, text):
    first = trackers.run_id(tmp_path)
    (tmp_path / "trackers.json").write_text(text)
    second = trackers.run_id(tmp_path)
    assert first != second == trackers.run_id(tmp_path)


@pytest.mark.parametrize("spec", [None, ModuleSpec("mlflow", None)])  # a directory mlflow/
def test_a_tracker_that_is_not_installed_or_not_known_is_named_at_the_start(
    tmp_path, monkeypatch, spec
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    config = tiny_config(log__trackers=("tensorboard", "mlflow"))
    with pytest.raises(UserError) as refused:
        RunDirectory(tmp_path, config)
    text = "config.log.trackers is ('tensorboard', 'mlflow'), and the package mlflow is not"
    assert str(refused.value).startswith(text)
    assert "uv sync --inexact --extra mlflow" in str(refused.value)
    assert not list(tmp_path.iterdir())
    with pytest.raises(
        UserError, match=r"config.log.trackers\[0\] must be one of .*; got 'neptune'"
    ):
        tiny_config(log__trackers=("neptune",))
    with pytest.raises(UserError, match=r"config.log.trackers must be names, each once; got"):
        tiny_config(log__trackers=("wandb", "wandb"))


def of_wandb(path):
    directories = sorted((path / "wandb").glob("offline-run-*"))
    ids = {directory.name.split("-", 3)[3] for directory in directories}
    tables = [json.loads(f.read_text()) for f in (path / "wandb").rglob("rollouts_*.table.json")]
    steps = sorted(table["data"][0][table["columns"].index("step")] for table in tables)
    return ids, steps, len(directories) == 2


def of_trackio(path):
    database = sqlite3.connect(path.parent / "trackio" / "dapo_jax.db")
    lines = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY step").fetchall()
    config = database.execute("SELECT config FROM configs").fetchall()
    has_table = all("text of" in str(metrics) for _, _, metrics in lines)
    return {name for name, *_ in lines}, [step for _, step, _ in lines], has_table and config


def of_mlflow(path):
    database = sqlite3.connect(path / "mlflow.db")
    names = {name for (name,) in database.execute("SELECT name FROM runs")}
    lines = "SELECT step FROM metrics WHERE key = 'eval/avg_4' ORDER BY step"
    seed = database.execute("SELECT value FROM params WHERE key = 'seed'").fetchall()
    tables = sorted(file.name for file in (path / "mlartifacts").rglob("step_*.json"))
    right = seed == [("0",)] and tables == [f"step_00000{step}.json" for step in range(4)]
    return names, [step for (step,) in database.execute(lines)], right


@pytest.mark.parametrize(
    "name, look", [("wandb", of_wandb), ("trackio", of_trackio), ("mlflow", of_mlflow)]
)
def test_the_package_itself_has_every_step_of_a_resumed_run_once(tmp_path, monkeypatch, name, look):
    """What wandb wrote offline is read from the files of its tables."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"needs {name}: uv sync --inexact --extra {name}")
    path, said = tmp_path / "a run", []
    for step, logged in ((-1, (0, 1, 2)), (1, (2, 3))):
        directory = opened(path, name, step=step, say=said.append)
        log(directory, *logged)
        directory.close()
    assert said == []
    ids, steps, right = look(path)
    assert ids == {json.loads((path / "trackers.json").read_text())["id"]}
    assert steps == [0, 1, 2, 3] and right
    assert os.environ.get("WANDB_SERVICE") is None, "imported here"
