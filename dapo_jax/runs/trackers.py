"""Trackers: services that show a run's metrics and transcripts, next to metrics.jsonl.

The run directory opens those in config.log.trackers. TensorBoard writes files, in this process.
Weights & Biases, trackio and MLflow may hang, and bring threads and exit hooks: each works in a
process of its own that a bounded queue feeds. The run never waits for one: steps that do not fit
are dropped and counted, errors are warnings, and metrics.jsonl has everything. docs/trackers.md.
"""

import concurrent.futures
import contextlib
import fcntl
import importlib
import importlib.util
import json
import multiprocessing
import os
import queue
import re
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from dapo_jax.types import UserError, error_line

T = TypeVar("T")
Tables = Mapping[str, Sequence[Mapping[str, Any]]]  # records of transcripts by name, see `_rows`
PROJECT = "dapo_jax"  # unless the tracker's own environment names another
QUEUE_STEPS = 64  # that wait for a tracker
ATTEMPTS, PAUSE_SECONDS = 3, 5.0  # in a row before a tracker is switched off, and between them
CLOSE_SECONDS = 30.0  # that the end of the run waits for trackers
GRACE_SECONDS = 300  # that a tracker has after SIGTERM, or after the end of the run's process
FILE = "trackers.json"  # in the run directory: the id of the run


class TrackedRun(NamedTuple):
    """A run as trackers see it."""

    id: str  # its id and its name in every tracker
    directory: str
    config: dict[str, Any]
    step: int  # the run continues after it; -1 for a new run


class Tracker(Protocol):
    """One tracker; its package is imported by `start`."""

    def start(self, run: TrackedRun) -> int:
        """Begins or resumes the run; returns the last step that the tracker has of it."""
        ...

    def log(self, step: int, metrics: Mapping[str, float], tables: Tables) -> None:
        """Sends the metrics of a step and the transcripts that belong to it."""
        ...

    def close(self) -> None:
        """Sends what is left."""
        ...


class TensorBoard:
    """Events in tensorboard/, scalars alone. Steps that are repeated replace the earlier ones.

    Written at once: tensorboardX's own writer has a thread, and waits for it for ever once it has
    died of an error.

    Args:
        say: prints a line.
    """

    def __init__(self, say: Callable[[str], None]):
        self.say = say
        self.events: Any = None  # the file; None after an error

    def start(self, run: TrackedRun) -> int:
        # Here, because they take a second to load.
        from tensorboardX import summary
        from tensorboardX.event_file_writer import EventsWriter

        proto: Any = importlib.import_module("tensorboardX.proto.event_pb2")
        self._event = lambda step, **of: proto.Event(wall_time=time.time(), step=step, **of)
        self._scalar = summary.scalar
        with self._reported():
            place = Path(run.directory, "tensorboard")
            place.mkdir(exist_ok=True)
            self.events = EventsWriter(str(place / "events"), f".{run.step + 1}")
            # TensorBoard drops what it has from this step on.
            start = proto.SessionLog(status=proto.SessionLog.START)
            self.events.write_event(self._event(run.step + 1, session_log=start))
            self.events.flush()
        return run.step

    def log(self, step: int, metrics: Mapping[str, float], tables: Tables) -> None:
        with self._reported():
            if self.events is not None:
                for name, value in metrics.items():
                    event = self._event(step, summary=self._scalar(name, value))
                    self.events.write_event(event)
                self.events.flush()

    def close(self) -> None:
        with self._reported():
            if self.events is not None:
                self.events.close()

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            events, self.events = self.events, None
            if events is not None:
                with contextlib.suppress(OSError):
                    events.close()
            self.say(
                f"  warning: log.trackers: tensorboard failed: {error}; it is switched off, the "
                "run continues, metrics.jsonl has everything"
            )


class WandB:
    """Weights & Biases. Its own step is the rollout step: it takes none a second time."""

    def start(self, run: TrackedRun) -> int:
        wandb = importlib.import_module("wandb")
        # Offline each start writes a directory of its own and knows of no other.
        self.sent = Path(run.directory, "wandb", f"{run.id}.step")
        self.table = wandb.Table
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=run.id,
            name=run.id,
            resume="allow",
            dir=run.directory,
            # Its system metrics are those of the run's process, whose child this one is.
            settings=wandb.Settings(console="off", x_stats_pid=os.getppid()),
        )
        self.run.config.update(run.config, allow_val_change=True)
        if self.run.offline:
            return int(self.sent.read_text()) if self.sent.exists() else -1
        return self.run.starting_step - 1

    def log(self, step: int, metrics: Mapping[str, float], tables: Tables) -> None:
        shown = {name: self.table(*_rows(tables[name]), allow_mixed_types=True) for name in tables}
        self.run.log({**metrics, **_transcripts(shown)}, step=step, commit=True)
        self.sent.parent.mkdir(exist_ok=True)
        self.sent.write_text(str(step))

    def close(self) -> None:
        self.run.finish()


class Trackio:
    """trackio, which stores locally or in a Space and buffers what it cannot send."""

    def start(self, run: TrackedRun) -> int:
        trackio = importlib.import_module("trackio")
        self.table = trackio.Table
        self.run = trackio.init(
            project=PROJECT, name=run.id, config=run.config, resume="allow", embed=False
        )
        return self.run._next_step - 1  # one after the last that it has

    def log(self, step: int, metrics: Mapping[str, float], tables: Tables) -> None:
        shown = {name: self.table(*_rows(tables[name])) for name in tables}
        metrics = {name: value for name, value in metrics.items() if name != "step"}  # reserved
        self.run.log({**metrics, **_transcripts(shown)}, step=step)

    def close(self) -> None:
        self.run.finish()


class MLflow:
    """MLflow, by its client: the fluent interface's exit hooks and threads are not needed."""

    def start(self, run: TrackedRun) -> int:
        # A server that is away is noticed in half a minute; by default in four.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
        mlflow = importlib.import_module("mlflow")
        self.entities = importlib.import_module("mlflow.entities")
        store = artifacts = None
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            store = f"sqlite:///{Path(run.directory, 'mlflow.db')}"
            artifacts = Path(run.directory, "mlartifacts").as_uri()
        self.client = client = mlflow.MlflowClient(tracking_uri=store)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        if (experiment := client.get_experiment_by_name(name)) is not None:
            place = experiment.experiment_id
        else:
            place = client.create_experiment(name, artifact_location=artifacts)
        tag = f"{PROJECT}.id"  # MLflow makes ids of its own
        found = client.search_runs([place], f"tags.`{tag}` = '{run.id}'", max_results=1)
        mine = found[0] if found else client.create_run(place, run_name=run.id, tags={tag: run.id})
        self.id, had = mine.info.run_id, mine.data
        # Parameters cannot change: a resumed run keeps them, and config.json has the newest.
        flat = {_mlflow_name(name): value for name, value in flatten(run.config).items()}
        params = [
            self.entities.Param(key, str(value))
            for key, value in flat.items()
            if key not in had.params
        ]
        for i in range(0, len(params), 100):  # MLflow's limit
            client.log_batch(self.id, params=params[i : i + 100])
        client.update_run(self.id, status="RUNNING")
        client.log_dict(self.id, run.config, "config.json")
        return int(had.metrics.get("step", -1))

    def log(self, step: int, metrics: Mapping[str, float], tables: Tables) -> None:
        # A table a file: log_table would fetch and send all earlier rows with each step.
        for name, records in tables.items():
            columns, data = _rows(records)
            table = {"columns": columns, "data": data}
            self.client.log_dict(self.id, table, f"transcripts/{name}/step_{step:06d}.json")
        now = int(1000 * time.time())
        points = [
            self.entities.Metric(_mlflow_name(name), float(value), now, step)
            for name, value in metrics.items()
        ]
        self.client.log_batch(self.id, metrics=points)

    def close(self) -> None:
        self.client.set_terminated(self.id)


# By the name of the package and of the extra in pyproject.toml that brings it.
ISOLATED: dict[str, Callable[[], Tracker]] = {"wandb": WandB, "trackio": Trackio, "mlflow": MLflow}


class Isolated:
    """A tracker in a process of its own, which outlives a kill of the run to send what it has.

    Args:
        name: in ISOLATED.
        say: prints a line, here in the run's process.
    """

    def __init__(self, name: str, say: Callable[[str], None]):
        self.name, self.dropped, self.over = name, 0, False
        self.say = lambda text: say(f"  warning: log.trackers: {name} {text}")

    def start(self, run: TrackedRun) -> int:
        context = multiprocessing.get_context("spawn")
        self.reports, report = context.Pipe(duplex=False)
        self.items = context.Queue(QUEUE_STEPS)
        self.items.cancel_join_thread()  # the end of the run does not wait for a full pipe
        arguments = (self.name, run, PAUSE_SECONDS, self.items, report)
        self.process = context.Process(target=_work, args=arguments, daemon=True)
        self.process.start()
        report.close()
        return run.step

    def log(self, step: int, metrics: Mapping[str, float], tables: Tables) -> None:
        self._hear()
        try:
            if self.over:
                raise queue.Full
            self.items.put_nowait((step, metrics, tables))
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        until = time.monotonic() + CLOSE_SECONDS
        self._hear()
        if not self.over:  # a dead process empties no queue
            with contextlib.suppress(queue.Full):
                self.items.put(None, timeout=CLOSE_SECONDS)
        self.process.join(max(0.0, until - time.monotonic()))
        self._hear()
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
            self.say(
                f"did not end in {CLOSE_SECONDS:g} s and may lack steps; metrics.jsonl has all"
            )
        if self.dropped:
            self.say(f"lacks {self.dropped} steps; metrics.jsonl has all")

    def _hear(self) -> None:
        """Prints what the process has reported, and notices its end."""
        try:
            while not self.over and self.reports.poll():
                self.say(self.reports.recv())
        except (EOFError, OSError):
            self.over = True
            self.process.join(1.0)
            if self.process.exitcode:
                self.say(f"died with exit code {self.process.exitcode}; the run continues")


def check_installed(names: Sequence[str]) -> None:
    """Raises UserError unless the packages of these trackers are installed."""
    for name in names:
        if name not in ISOLATED:
            continue
        found = importlib.util.find_spec(name)
        # A directory of the name is found too, such as wandb's own; it has no file to import.
        if found is None or found.origin is None:
            raise UserError(
                f"config.log.trackers is {tuple(names)!r}, and the package {name} is not "
                f"installed: uv sync --inexact --extra {name}, or pip install {name}. Or leave it "
                "out."
            )


def open_trackers(
    names: Sequence[str], run: TrackedRun, say: Callable[[str], None]
) -> list[Tracker]:
    """Returns the trackers of these names, started."""
    trackers: list[Tracker] = [
        TensorBoard(say) if name == "tensorboard" else Isolated(name, say) for name in names
    ]
    for tracker in trackers:
        tracker.start(run)
    return trackers


def close_trackers(trackers: Sequence[Tracker]) -> None:
    """Closes all at once, so that the run waits CLOSE_SECONDS at most."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(lambda tracker: tracker.close(), trackers))


def run_id(directory: Path) -> str:
    """Returns the id of the run in a directory, which is new where there is none.

    It is the name of the directory, which may move or have namesakes, and what makes it unique.
    """
    file = directory / FILE
    # A damaged file costs the id alone.
    with contextlib.suppress(FileNotFoundError, ValueError, LookupError, TypeError):
        return json.loads(file.read_text())["id"]
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", directory.name)[:80]
    id, temporary = f"{name}-{secrets.token_hex(4)}", file.with_suffix(".tmp")
    temporary.write_text(json.dumps({"id": id}) + "\n")
    os.replace(temporary, file)
    return id


def flatten(values: Any, prefix: str = "") -> dict[str, Any]:
    """Returns nested values by their dotted names."""
    if not isinstance(values, dict):
        return {prefix: values}
    return {
        key: value
        for name, inner in values.items()
        for key, value in flatten(inner, f"{prefix}.{name}" if prefix else name).items()
    }


def _work(name: str, run: TrackedRun, pause: float, items: Any, reports: Any) -> None:
    """The process of a tracker: logs what arrives, until None arrives or the run's process dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the run's, which then closes this
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(GRACE_SECONDS))
    threading.Thread(target=_end_with_the_run, args=(items,), daemon=True).start()
    tracker, warned = ISOLATED[name](), False

    def attempt(action: Callable[[], T]) -> T:
        nonlocal warned
        for left in reversed(range(ATTEMPTS)):
            try:
                return action()
            except Exception as error:
                line = error_line(error)
                if not warned:
                    reports.send(f"failed: {line}; the run continues, metrics.jsonl has everything")
                    warned = True
                if not left:
                    reports.send("is switched off")
                    raise
            time.sleep(pause)
        raise AssertionError

    try:
        with _one_at_a_time(name, run):
            last = attempt(lambda: tracker.start(run))
            for item in iter(items.get, None):
                if item[0] > last:
                    attempt(lambda item=item: tracker.log(*item))
            attempt(tracker.close)
    except Exception:
        pass  # reported
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # without exit hooks: those of a tracker without its server take minutes


def _end_with_the_run(items: Any) -> None:
    """Ends the process of a tracker some time after the run's has died."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    items.put(None)
    time.sleep(GRACE_SECONDS)
    os._exit(1)


@contextlib.contextmanager
def _one_at_a_time(name: str, run: TrackedRun) -> Iterator[None]:
    """Waits for the tracker's process of an earlier start, which may send its last steps still."""
    with open(Path(run.directory, FILE), "r+") as file:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.lockf(file, fcntl.LOCK_EX, 1, list(ISOLATED).index(name))
        yield


def _rows(records: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Returns the columns and the rows of a table."""
    columns = list(dict.fromkeys(name for record in records for name in record))
    plain = lambda value: value is None or isinstance(value, str | int | float)
    cell = lambda value: value if plain(value) else json.dumps(value)
    return columns, [[cell(record.get(name)) for name in columns] for record in records]


def _transcripts(tables: Mapping[str, Any]) -> dict[str, Any]:
    return {f"transcripts/{name}": table for name, table in tables.items()}


def _mlflow_name(name: str) -> str:
    """Returns a name with the characters that MLflow takes: eval/avg@32 is eval/avg_32."""
    return re.sub(r"[^\w\-. :/]", "_", name)
