"""The run directory: the files of a run, and the check that a config may resume it.

config.json              the frozen config, versions, git commit and command
metrics.jsonl            one object per rollout step
tensorboard/, wandb/, mlflow.db, mlartifacts/
                         the same for config.log.trackers
trackers.json            the id of the run in them, see `dapo_jax.runs.trackers`
pass_rates.jsonl         for each step [problem, epoch, correct, responses] of the problems tried
rollouts/step_*.jsonl    some responses with their rewards
heldout/step_*.jsonl     the first response to a few held-out problems, at each evaluation
tokenizer/               in Hugging Face format
base/, checkpoints/      see `dapo_jax.training.base_model` and `dapo_jax.runs.checkpoint`
summary.json             at the end
saved                    the newest step with a complete checkpoint
lock                     held by the process that trains here
report.html, report.png  the page of plots
profile/step_*/          traces of config.log.profile_steps, see `dapo_jax.utils.profiling`
"""

import dataclasses
import fcntl
import importlib.metadata
import json
import math
import os
import platform
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dapo_jax.config import Config
from dapo_jax.config.checks import STAGED
from dapo_jax.distributed.process_group import ProcessGroup
from dapo_jax.runs import trackers
from dapo_jax.types import Attempts, Group, Problem, RunError, UserError
from dapo_jax.utils.files import make_writable, write_atomically

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "transformers", "numpy")
# Fields that may differ when a run is resumed: they do not change what is computed. What is read
# from places is compared itself: the base model where it is needed again, and the problems' tokens.
MAY_CHANGE = re.compile(
    r"train\.num_steps|checkpoint\.(every_steps|keep_\w+)|log\..*|reward\.workers"
    r"|rollout\.watchdog_\w+|model\.(path|tokenizer)|data\.(train|heldout)\.[^.]+\.path"
)
LOCK_SECONDS = 120.0  # that a start waits for the process that trains in the directory
HELDOUT_PROBLEMS = 8  # with a response in each file of heldout/
UNREADABLE = (OSError, ValueError, LookupError, TypeError)  # errors of `read_config`


def read_config(file: Path, kind: Any = Config) -> dict[str, Any]:
    """Returns the config in a config.json, as `frozen` wrote it.

    Args:
        kind: its class.

    Raises:
        UNREADABLE: the file holds no complete config.
    """
    values = json.loads(file.read_text())
    if "config" not in values:
        raise ValueError("its config.json is not that of a run")
    config = values["config"]
    missing = [field.name for field in dataclasses.fields(kind) if field.name not in config]
    if "rollout" in missing and "train" in config:
        raise ValueError(
            "its config is that of launch/sft.py. Such a run has its model in Hugging Face format, "
            "in model/, and --model takes its directory"
        )
    if missing:
        raise ValueError(f"its config has no {missing[0]}")
    return config


def checkpoints(workdir: Path, config: Mapping[str, Any]) -> str:
    """Returns the place of a run's checkpoints, from its config as `frozen` wrote it."""
    return config["checkpoint"]["directory"] or str(workdir / "checkpoints")


class RunDirectory:
    """A run directory, new or of a run that is resumed.

    Args:
        writes: whether this process writes: the primary one.
        say: prints a line, for the warnings of trackers.

    Raises:
        UserError: it is not writable, belongs to a run with another config, or is past the last
            step of this one; another process trains in it; or a tracker is not installed.
    """

    def __init__(
        self,
        path: Path,
        config: Config,
        *,
        writes: bool = True,
        say: Callable[[str], None] = print,
    ):
        self.path, self.writes, self._config, self._say = path, writes, config, say
        if not writes:
            return
        trackers.check_installed(config.log.trackers)
        make_writable(path, "--workdir")
        self._lock: int | None = _lock(path, say)
        try:
            file = path / "config.json"
            if not (file.exists() and _check_resumes(file, config)):
                self._write_config()
        except BaseException:
            self._unlock()
            raise
        self._metrics, self._pass_rates = path / "metrics.jsonl", path / "pass_rates.jsonl"
        self._saved = path / "saved"
        self._trackers: list[trackers.Tracker] | None = None
        self._tables: dict[str, list[dict[str, Any]]] = {}  # of the step that is not logged yet

    def _write_config(self) -> None:
        text = json.dumps(_frozen_config(self._config), indent=1)
        write_atomically(self.path / "config.json", text)

    def check_never_saved(self, checkpoints: Any) -> None:
        """Checks that a run may start from its base model: it is new, or was killed before its
        first checkpoint was complete.

        Args:
            checkpoints: the place where none was found.

        Raises:
            UserError: the directory holds a run that has saved checkpoints.
        """
        if not self.writes:
            return
        last = max(_steps(self.path), default=0)
        # Earlier versions noted nothing; after two intervals a run has saved, or ended in an error.
        late = last > 2 * self._config.checkpoint.every_steps
        if late or self._saved.exists() or (self.path / "summary.json").exists():
            raise UserError(
                f"{self.path} has the metrics of a run up to step {last}, which saved checkpoints, "
                f"and {checkpoints} has none of them. Mount or restore that place, mend "
                "config.checkpoint.directory, or choose another --workdir. To train from the start "
                "in this one, delete its metrics.jsonl, summary.json and saved."
            )

    def note_saved(self, step: int) -> None:
        """Notes that the checkpoint of a step is complete, for `check_never_saved`."""
        if self.writes:
            write_atomically(self._saved, f"{step}\n")

    def rewind(self, step: int) -> None:
        """Deletes metrics and responses after `step`, which a resumed run repeats, and opens the
        trackers. Nothing refuses the start any more: config.json gets its commit and versions.

        Args:
            step: of the restored checkpoint; -1: there is none.
        """
        if not self.writes:
            return
        self._write_config()
        if step >= 0:
            self.note_saved(step)
        for file in (self._metrics, self._pass_rates):
            # What is no text stands for a line that was cut short.
            lines = file.read_text(errors="replace").splitlines() if file.exists() else []
            kept = [line for line in lines if _step_of(line) <= step]
            write_atomically(file, "".join(line + "\n" for line in kept))
        for directory in ("rollouts", "heldout"):
            for file in (self.path / directory).glob("step_*.jsonl"):
                if int(file.stem.removeprefix("step_")) > step:
                    file.unlink()
        (self.path / "summary.json").unlink(missing_ok=True)
        name = trackers.run_id(self.path)
        run = trackers.TrackedRun(name, str(self.path), frozen(self._config), step)
        self._trackers = trackers.open_trackers(self._config.log.trackers, run, self._say)

    def log(self, metrics: dict[str, Any]) -> None:
        """Appends one object to metrics.jsonl, and gives it to the trackers with the responses
        saved since the last one.

        Raises:
            RunError: a value is not finite, or the directory is gone.
        """
        for name, value in metrics.items():
            if not math.isfinite(value):
                remedy = "a lower config.optimizer.learning_rate is the usual remedy"
                if name.startswith(("reward/", "advantage/", "scorer/")):
                    remedy = "look at what config.reward.scorer returns"
                raise RunError(
                    f"{name} is {value} at step {metrics['step']}. Checkpoints before this step "
                    f"are intact. Look at the metrics of the last steps; {remedy}."
                )
        if not self.writes:
            return
        self._check_in_place()
        with self._metrics.open("a") as file:
            file.write(json.dumps(metrics) + "\n")
            file.flush()
            os.fsync(file.fileno())  # a checkpoint must never be newer than its metrics
        assert self._trackers is not None, "rewind() comes before log()"
        for tracker in self._trackers:
            tracker.log(metrics["step"], metrics, self._tables)
        self._tables = {}

    def _check_in_place(self) -> None:
        """Raises RunError if the directory was moved, deleted or unmounted since the start: the
        rest of the run would be in another one."""
        if not (self.path / "config.json").exists():  # written at the start
            raise RunError(
                f"--workdir={self.path} was moved, deleted or unmounted while the run wrote to it. "
                "Restore it and start the same command, which resumes from its last checkpoint."
            )

    def save_rollouts(
        self, step: int, groups: Sequence[Group], rewards: Sequence, most: int
    ) -> None:
        """Writes up to `most` responses of a step, spread over its groups.

        Args:
            rewards: shaped rewards, one sequence per group.
        """
        if not self.writes:
            return
        per_group = max(1, most // max(1, len(groups)))
        records = []
        for group, values in zip(groups, rewards):
            shown = list(zip(group.responses, group.verdicts, values))[:per_group]
            for response, verdict, reward in shown:
                record = {
                    **_start_of_record(step, group.problem),
                    "response": response.text,
                    "correct": verdict.correct,
                    "reward": float(reward),
                    "length": len(response.tokens),
                    "finish_reason": response.finish_reason,
                    "note": verdict.note,
                    **({} if verdict.extra is None else {"extra": verdict.extra}),
                }
                records.append(record)
        self._write_records("rollouts", step, records[:most])

    def save_pass_rates(self, step: int, visits: Sequence[Sequence[int]]) -> None:
        """Appends the visits of a step, [problem, epoch, correct, responses] each."""
        if not self.writes:
            return
        with self._pass_rates.open("a") as file:
            file.write(json.dumps({"step": step, "visits": visits}) + "\n")

    def save_heldout(self, step: int, groups: Sequence[Attempts]) -> None:
        """Writes the first response to a few held-out problems, the same ones at each evaluation.

        Args:
            groups: all problems in order. Those written are spread over them: sources and levels
                may follow one another.
        """
        if not self.writes:
            return
        chosen = np.linspace(0, len(groups) - 1, min(HELDOUT_PROBLEMS, len(groups)))
        records = []
        for problem, attempts in (groups[i] for i in chosen.round().astype(int)):
            first = attempts[0]
            record = {
                **_start_of_record(step, problem),
                "response": first.text,
                "correct": first.verdict.correct,
                "accuracy": sum(a.verdict.correct for a in attempts) / len(attempts),  # avg@k
                "length": first.length,
                "finish_reason": first.finish_reason,
                "note": first.verdict.note,
            }
            records.append(record)
        self._write_records("heldout", step, records)

    def _write_records(self, name: str, step: int, records: Sequence[dict[str, Any]]) -> None:
        directory = self.path / name
        directory.mkdir(exist_ok=True)
        lines = (json.dumps(record) + "\n" for record in records)
        write_atomically(directory / f"step_{step:06d}.jsonl", "".join(lines))
        if records:
            self._tables[name] = list(records)

    def save_summary(self, summary: dict[str, Any]) -> None:
        """Writes summary.json."""
        if not self.writes:
            return
        write_atomically(self.path / "summary.json", json.dumps(summary, indent=1) + "\n")

    def close(self) -> None:
        """Closes the trackers, and waits some seconds for them."""
        if self.writes:
            trackers.close_trackers(self._trackers or ())
            self._trackers = None
            self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _lock(path: Path, say: Callable[[str], None]) -> int:
    """Returns the lock of a run directory: a file descriptor, which holds it until it is closed or
    the process ends. Waits for another process, which may be about to end.

    A file server may keep the lock of a machine that is gone. So one of another machine is waited
    for, and then ignored with a warning.

    Raises:
        UserError: another process of this machine trains in the directory, or its lock is another
            user's and closed to this one.
    """
    try:
        file = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o666)  # a group may share the run
    except PermissionError as error:
        raise UserError(
            f"{path / 'lock'} cannot be written to: another user made it. Let that user train "
            "here, or mend its permissions (chmod g+w)."
        ) from error
    until, waits = time.monotonic() + LOCK_SECONDS, False
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            holder = os.pread(file, 1000, 0).decode(errors="replace") or "unknown"
            if time.monotonic() > until and holder.endswith(f" on {socket.gethostname()}"):
                os.close(file)
                raise UserError(
                    f"another process trains in {path}: {holder}. Stop it, or choose another "
                    "--workdir."
                ) from error
            if time.monotonic() > until:
                say(f"  warning: {path} is still locked by {holder}. Stop it, if it still runs.")
                return file
            if not waits:
                say(f"another process trains in {path}: {holder}; waiting for its end")
            waits = True
            time.sleep(min(1.0, LOCK_SECONDS))
            continue
        except OSError:  # a file system without locks
            pass
        os.ftruncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        return file


def _start_of_record(step: int, problem: Problem) -> dict[str, Any]:
    return {
        "step": step,
        "problem_id": problem.id,
        "source": problem.source,
        "prompt": problem.prompt,
        "answer": problem.answer,
    }


def _step_of(line: str) -> float:
    """Returns the step of a metrics line; infinity for a line that a kill left half written."""
    try:
        return json.loads(line)["step"]
    except (json.JSONDecodeError, KeyError, TypeError):
        return math.inf


def _frozen_config(config: Config) -> dict[str, Any]:
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {
        "config": config.to_dict(),
        "versions": {"python": platform.python_version()} | versions,
        "git_commit": _git_commit(),
        "command": shlex.join(sys.argv),
    }


def _git_commit() -> str | None:
    """Returns the commit of the code; None where neither its archive nor git says it."""
    package = Path(__file__).parents[1]
    command = ["git", "-C", str(package), "rev-parse", "HEAD"]
    try:
        # `git archive`, which makes what pods get, writes the commit there (.gitattributes).
        commit = (package / "COMMIT").read_text().strip()
        if not commit.startswith("$"):
            return commit
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _check_resumes(file: Path, config: Config) -> bool:
    """Returns whether something ran in the directory.

    Raises:
        UserError: it did, with another config, or the file cannot be read.
    """
    path = file.parent
    try:
        old = read_config(file, type(config))
    except UNREADABLE as error:
        raise UserError(
            f"{file} cannot be read ({error}). If this directory holds a run, restore that file; "
            "otherwise choose another --workdir."
        ) from error
    steps, saved = _steps(path), saved_steps(path, old)
    if not (steps or saved or (path / "base").exists()):
        return False  # perhaps for a mistake in the config that is mended now
    # The run resumes from its last checkpoint and repeats later steps.
    last = max(saved or steps, default=0)
    check_same(old, config, path, last)
    check_not_past(last, config, path)
    return True


def check_not_past(step: int, config: Config, where: Any) -> None:
    """Raises UserError if `step`, the last one of the run in `where`, is beyond the config's."""
    if step > config.train.num_steps:
        raise UserError(
            f"config.train.num_steps is {config.train.num_steps}, and the run in {where} is past "
            f"it, at step {step}. Set it to {step} or more, or choose another --workdir."
        )


def check_base(found: str, saved: str | None, model_path: str | None, where: Any) -> None:
    """Raises UserError unless the base model, by its fingerprint, is that of the run in `where`.

    A checkpoint has no base: adapters, or the reference of a KL, are completed with what is at
    `config.model.path` now.
    """
    if found != saved:
        raise UserError(
            f"config.model.path ({model_path}) holds other weights than when the run in {where} "
            "was started; its adapters or its KL belong to those. Give the place that has them (on "
            "the hub owner/name@revision), or start a new run in another --workdir."
        )


def _steps(path: Path) -> list[int]:
    """Returns the steps in metrics.jsonl, which is written before a checkpoint is."""
    file = path / "metrics.jsonl"
    lines = file.read_text(errors="replace").splitlines() if file.exists() else []
    return [int(step) for step in map(_step_of, lines) if step < math.inf]


def saved_steps(path: Path, config: Mapping[str, Any]) -> list[int]:
    """Returns the steps with a checkpoint on disk. Those in a bucket are checked when restored."""
    place = Path(checkpoints(path, config)).expanduser()
    names = [entry.name for entry in place.iterdir()] if place.is_dir() else []
    return [int(name) for name in names if name.isdigit()]


def frozen(config: Config) -> dict[str, Any]:
    """Returns the config as JSON holds it."""
    return json.loads(json.dumps(config.to_dict()))


def check_processes(config: Config, process_group: ProcessGroup) -> None:
    """Raises UserError unless all processes of a run have the same config."""
    values = trackers.flatten(frozen(config))
    process_group.check_equal({f"config.{name}": value for name, value in values.items()})


def check_same(old: dict[str, Any], config: Config, where: Any, step: int) -> None:
    """Raises UserError unless the config may resume a run.

    Args:
        old: the run's config, from `frozen`.
        where: its place, for the error.
        step: the last one done. Stages that begin later may change.
    """
    old, new = (trackers.flatten(values) for values in (old, frozen(config)))
    for values in (old, new):
        values["stages"] = [stage for stage in values.get("stages", ()) if stage[0] <= step]
    # Another version of the code has other fields.
    shown = lambda values, name: repr(values[name]) if name in values else "no such field"
    differing = [
        f"config.{name}: {shown(old, name)} there, {shown(new, name)} now"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name) and not MAY_CHANGE.fullmatch(name)
    ]
    ends = [values.get("train.num_steps") for values in (old, new)]
    begun = [new, *(changes for _, changes in new["stages"])]
    decays = any(values.get("optimizer.final_rate_share") is not None for values in begun)
    if ends[0] != ends[1] and decays:
        differing.append(
            f"config.train.num_steps: {ends[0]} there, {ends[1]} now, and with "
            "config.optimizer.final_rate_share the learning rate of every step depends on it"
        )
    if differing:
        later = ""
        # launch/sft.py has no stages, and a finished run no later step.
        if isinstance(config, Config) and step < config.train.num_steps:
            later = (
                f" To change a field of {', '.join(STAGED)} from step {max(2, step + 1)} on, add a "
                "stage to config.stages (docs/config.md)."
            )
        raise UserError(
            f"{where} belongs to a run with another config:\n  "
            + "\n  ".join(differing)
            + "\nChoose another --workdir, or start with the config it was made with."
            + later
        )
