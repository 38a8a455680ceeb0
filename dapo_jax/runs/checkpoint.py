"""Checkpoints: arrays and host state of a step, saved together, asynchronously and atomically.

orbax writes, commits and rotates them. This module adds what orbax lacks: sums over the bits of
every array, by which restoring finds damage; a second attempt after a save that failed; and the
agreement of all processes on the checkpoint that they read. A step in a bucket (gs://) is complete
when it holds orbax's commit file, as nothing is renamed there.
"""

import contextlib
import errno
import functools
import importlib.util
import json
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils
from orbax.checkpoint.checkpoint_managers import preservation_policy

from dapo_jax.runs.integrity import (
    OWN_ERRORS,
    CheckpointError,
    Damaged,
    bit_sums,
    check_sums,
    describe,
    is_disk_full,
    one_failure_reported,
    retried,
    without_warning,
)
from dapo_jax.types import UserError, error_line

T = TypeVar("T")
READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)
DAMAGED = "damaged"
BUCKET = "gs://"
# A slower save fails: a quarter of the rate at which a 4 TB Filestore of the tier ZONAL writes.
FLOOR_BYTES_PER_SECOND = 100e6
LEAST_TIMEOUT_SECONDS = ocp.options.AsyncOptions().timeout_secs


def place(directory: epath.PathLike) -> epath.Path:
    """Returns a directory, or a place in a bucket (gs://BUCKET/PLACE), as a whole path.

    Raises:
        UserError: it is another kind of place, or gcsfs is not installed.
    """
    text = str(directory)
    if "://" not in text:
        return epath.Path(text).expanduser().resolve()
    if not text.startswith(BUCKET):
        raise UserError(
            f"checkpoints cannot be kept in {text}: it must be gs://BUCKET/PLACE or a directory."
        )
    if importlib.util.find_spec("gcsfs") is None:
        raise UserError(f"{text} is read and written with gcsfs: pip install gcsfs.")
    from fsspec.config import conf

    # A cached listing would hide files that tensorstore or another process writes.
    conf.setdefault("gcs", {})["use_listings_cache"] = False
    return epath.Path(text)


class Checkpoints:
    """The checkpoints in a directory; a context manager that waits for the last save.

    Every process of the run makes the same calls in the same order.

    Args:
        directory: see `place`; created if missing.
        keep_newest: number of newest checkpoints that are kept.
        keep_best: number of checkpoints with the highest accuracy that are kept in addition.
        say: prints a line, for a damaged checkpoint and for a save that is tried again.
        num_bytes: size of the arrays of one checkpoint, for the time limit of a save.
        all_gather: gathers a small value from each process: `ProcessGroup.all_gather`.
        completed: receives the step of a checkpoint that is known to be complete.

    Raises:
        UserError: the directory cannot be made or listed.
    """

    def __init__(
        self,
        directory: epath.PathLike,
        *,
        keep_newest: int,
        keep_best: int,
        say: Callable[[str], None] = print,
        num_bytes: int = 0,
        all_gather: Callable[[Any], list[Any]] = lambda value: [value],
        completed: Callable[[int], None] = lambda step: None,
    ):
        self.directory, self.say, self.all_gather = place(directory), say, all_gather
        self.completed = completed
        self._pending: tuple[int, Callable[[], Any]] | None = None  # step and write, unfinished
        self._failed = False  # the save before the pending one
        policies = [
            preservation_policy.LatestN(keep_newest),
            preservation_policy.BestN(
                get_metric_fn=lambda metrics: metrics["accuracy"],
                n=keep_best,
                keep_checkpoints_without_metrics=False,
            ),
        ]
        timeout = max(LEAST_TIMEOUT_SECONDS, math.ceil(num_bytes / FLOOR_BYTES_PER_SECOND))
        options = ocp.CheckpointManagerOptions(
            preservation_policy=preservation_policy.AnyPreservationPolicy(policies),
            # The policy above decides; orbax stores accuracies only where there is this too.
            best_fn=lambda metrics: metrics["accuracy"],
            cleanup_tmp_directories=True,
            async_options=ocp.options.AsyncOptions(timeout_secs=timeout),
        )
        self.open = functools.partial(
            ocp.CheckpointManager, self.directory, options=options, item_names=("arrays", "host")
        )
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._drop_damaged_accuracies()
            self.manager = self.open()
        except Exception as error:  # an OSError; of a bucket also errors of its libraries
            raise self._cannot_be_kept(error) from error

    def _cannot_be_kept(self, error: Exception) -> UserError:
        cause = error.strerror if isinstance(error, OSError) else None
        return UserError(
            f"checkpoints cannot be kept in {self.directory}: {cause or error}. Choose "
            "another --workdir or config.checkpoint.directory, or mend its permissions."
        )

    def check_writable(self) -> None:
        """Raises UserError where the directory can only be read: the first save would fail, hours
        later perhaps. Other errors are left to it, as they may pass."""
        if jax.process_index() != 0:
            return
        probe = self.directory / ".writable"
        try:
            probe.write_text("")
            probe.unlink()
        except Exception as error:  # of a bucket also errors of its libraries
            read_only = isinstance(error, OSError) and error.errno in READ_ONLY
            if read_only or "Forbidden" in str(error):  # the second: of gcsfs
                raise self._cannot_be_kept(error) from error

    def _drop_damaged_accuracies(self) -> None:
        """Deletes accuracies that cannot be read: orbax would open no checkpoint."""
        primary = jax.process_index() == 0
        for step in _steps_in(self.directory) if primary else ():
            file = self.directory / str(step) / "metrics" / "metrics"
            try:
                float(json.loads(file.read_text())["accuracy"])
            except FileNotFoundError:  # it was not evaluated
                pass
            except (ValueError, LookupError, TypeError) as error:
                file.unlink()
                self.say(
                    f"warning: the accuracy of checkpoint {step} in {self.directory} cannot be "
                    f"read ({error}); that checkpoint is not kept as the best"
                )
        self.all_gather(None)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.wait()
            self.manager.close()
        else:  # an error of the pending save must not replace the one that is raised
            with contextlib.suppress(Exception):
                self.manager.close()

    @property
    def steps(self) -> list[int]:
        """Saved steps, in order."""
        return sorted(self.manager.all_steps())

    def save(self, step: int, arrays: Any, host: Any, *, accuracy: float | None) -> None:
        """Starts saving; returns once the arrays may be changed or donated.

        A save that fails at once is tried once more; one that fails later is made up for by the
        next save.

        Args:
            step: names the checkpoint.
            arrays: pytree of jax.Array.
            host: a value that JSON can hold.
            accuracy: ranks the best checkpoints; None if it was not measured.

        Raises:
            CheckpointError: two saves in a row could not be written, or the disk is full.
            UserError: another run saves in the directory.
        """
        self._finish()
        self._check_alone(step)
        record = {"arrays": describe(arrays), "sums": bit_sums(arrays), "host": host}
        args = ocp.args.Composite(
            arrays=ocp.args.StandardSave(arrays), host=ocp.args.JsonSave(record)
        )
        metrics = None if accuracy is None else {"accuracy": accuracy}

        def write() -> Any:
            with without_warning("did not provide metrics"):
                return self.manager.save(step, args=args, metrics=metrics)

        self._start(step, write)

    def _check_alone(self, step: int) -> None:
        """Raises UserError, in all processes, where another run has saved this step or a later one:
        orbax would replace that checkpoint, or skip this save without a word."""
        newest = -1
        if jax.process_index() == 0:
            with contextlib.suppress(Exception):  # of the storage: the save meets it too
                newest = max(_steps_in(self.directory), default=-1)
        newest = max(self.all_gather(newest))  # all end, or none does
        if newest >= step:
            raise UserError(
                f"{self.directory} has a checkpoint {newest} that this run, at step {step}, did "
                "not save: another run saves there. Stop one of them, and give each run a "
                "config.checkpoint.directory of its own."
            )

    def wait(self) -> None:
        """Returns when everything is on disk.

        Raises:
            CheckpointError: the last save could not be written, nor a second time.
        """
        last = self._pending
        self._finish()
        if self._failed and last is not None:
            self._start(*last)
            self._finish()

    def _start(self, step: int, write: Callable[[], Any]) -> None:
        self._pending = step, write
        while not self._succeeds(step, write):  # the second failure raises
            pass

    def _finish(self) -> None:
        """Waits until the last save is written or has failed."""
        if self._pending is not None:
            step, _ = self._pending
            if self._succeeds(step, self.manager.wait_until_finished):
                self._failed = False
                self.completed(step)
            self._pending = None

    def _succeeds(self, step: int, write: Callable[[], Any]) -> bool:
        """Returns whether `write` returned in every process. After the first failure in a row, says
        so and opens the manager again.

        Raises:
            CheckpointError: it is the second failure, or the disk is full.
        """
        error: Exception | None = None
        try:
            write()
        except OWN_ERRORS:
            raise
        except Exception as failure:  # an OSError, or a ValueError of tensorstore
            error = failure
        verdict = None if error is None else (error_line(error, -1), is_disk_full(error))
        failures = [failure for failure in self.all_gather(verdict) if failure is not None]
        if not failures:
            return True
        failed = f"checkpoint {step} in {self.directory} could not be written"
        if any(full for _, full in failures):
            raise CheckpointError(
                f"{failed}: the disk is full. The checkpoints before it are intact. Free some "
                "space and start the same command again."
            ) from error
        if self._failed:
            raise CheckpointError(
                f"{failed}: {failures[0][0]}. The save before it failed too. The checkpoints "
                "before them are intact.",
                restart=True,
            ) from error
        self.say(f"warning: {failed}: {failures[0][0]}. The run tries once more.")
        self._failed = True
        with contextlib.suppress(Exception):  # the error that has just been reported
            self.manager.close()
        self.manager = self.open()
        return False

    def restore(self, like: Any) -> tuple[int, Any, Any] | None:
        """Returns (step, arrays, host state) of the newest intact checkpoint; None: there is none.

        Newer, damaged ones are reported and moved to `damaged/`, or next to the directory where
        that is in a bucket. All processes agree on damage before any reads another checkpoint.

        Args:
            like: pytree of jax.ShapeDtypeStruct with the shardings wanted.

        Raises:
            UserError: the arrays are those of another model, or no checkpoint is intact.
            CheckpointError: the storage gave errors, READS times in a row. Nothing is moved.
        """
        damaged: dict[int, str] = {}
        steps = self.steps
        if any(others != steps for others in self.all_gather(steps)):
            raise CheckpointError(
                f"the processes see different checkpoints in {self.directory}; here {steps}.",
                restart=True,
            )
        for step in steps[::-1]:
            found = None
            with one_failure_reported():
                try:
                    found = _read(self.directory, step, like, together=self._together)
                except Damaged as error:
                    damaged[step] = str(error)
            if found is not None:
                self._set_aside(damaged)
                return step, *found
        if damaged:
            # They stay in place: an empty directory would be taken for a new run.
            reasons = "".join(f"\n  {step}: {cause}" for step, cause in damaged.items())
            raise UserError(
                f"no checkpoint in {self.directory} can be read:{reasons}\nRestore one from a "
                "copy, or start a new run in another --workdir."
            )
        return None

    def _together(self, read: Callable[[], T]) -> T:
        """Returns the result of `read`, which waits for no other process, once all have theirs.

        Raises:
            Damaged: in all processes, where one of them found damage.
            CheckpointError: in all, where one of them could not read.
        """
        result: Any = None
        damage = failure = None
        try:
            result = retried(read)
        except Damaged as error:
            damage = str(error)
        except CheckpointError as error:
            failure = str(error)
        verdicts = self.all_gather([failure, damage])
        if failures := [failure for failure, _ in verdicts if failure is not None]:
            raise CheckpointError(failures[0], restart=True)
        if reasons := [damage for _, damage in verdicts if damage is not None]:
            raise Damaged(reasons[0])
        return result

    def _set_aside(self, damaged: dict[int, str]) -> None:
        """Moves damaged checkpoints away, in the primary process."""
        if not damaged:
            return
        self.manager.close()
        if jax.process_index() == 0:
            target = self.directory / DAMAGED
            if str(target).startswith(BUCKET):  # orbax deletes steps without a commit file there
                target = self.directory.with_name(f"{self.directory.name}_{DAMAGED}")
            target.mkdir(exist_ok=True)
            lines = "".join(f"{step}: {cause}\n" for step, cause in damaged.items())
            (target / "reasons.txt").write_text(lines)
            for step, cause in damaged.items():
                self.say(
                    f"warning: checkpoint {step} in {self.directory} is damaged ({cause}); it is "
                    f"moved to {target.name}/ and the one before it is used"
                )
                if (target / str(step)).exists():
                    (target / str(step)).rmtree()
                (self.directory / str(step)).rename(target / str(step))
        multihost_utils.sync_global_devices("damaged checkpoints are set aside")
        self.manager = self.open()


def _steps_in(directory: epath.Path) -> list[int]:
    """Returns the steps whose checkpoints are complete, in order. A copy named old_7 is none."""
    places = ocp.utils.checkpoint_steps_paths(directory)
    return sorted(int(place.name) for place in places if place.name.isdigit())


def find_step(directory: epath.PathLike, step: int | None) -> int:
    """Returns the step if there is such a checkpoint; of None the newest one.

    Raises:
        UserError: there is none.
    """
    directory = place(directory)
    if not directory.is_dir():
        raise UserError(f"{directory}: there are no checkpoints.")
    steps = _steps_in(directory)
    if not steps:
        raise UserError(f"{directory} has no checkpoint yet: the run has saved none.")
    if step is not None and step not in steps:
        there = ", ".join(map(str, steps))
        raise UserError(f"{directory} has no checkpoint {step}; it has {there}.")
    return steps[-1] if step is None else step


def restore_part(
    directory: epath.PathLike, step: int | None, fields: Sequence[str], like: Any
) -> tuple[int, Any, Any]:
    """Returns (step, part of the arrays, host state) of a checkpoint; changes nothing.

    Args:
        step: None: the newest.
        fields: names that lead to the part, from the outermost.
        like: the part as a pytree of jax.ShapeDtypeStruct with the shardings wanted.

    Raises:
        UserError: there is no such checkpoint, it is damaged, or it is of another model.
    """
    step, directory = find_step(directory, step), place(directory)
    try:
        return step, *_read(directory, step, like, fields)
    except Damaged as error:
        steps = _steps_in(directory)
        if step not in steps:
            raise UserError(
                f"checkpoint {step} in {directory} was deleted while it was read, as by a run that "
                "still trains. Start the same command again."
            ) from error
        there = ", ".join(map(str, steps))
        raise UserError(
            f"checkpoint {step} in {directory} is damaged ({error}). Choose another --step of "
            f"{there}."
        ) from error


def _read(
    directory: epath.Path,
    step: int,
    like: Any,
    fields: Sequence[str] = (),
    *,
    together: Callable[[Callable[[], Any]], Any] = retried,
) -> tuple[Any, Any]:
    """Returns (the part of the arrays that `fields` lead to, host state) of a checkpoint.

    Raises:
        Damaged: a file is missing, cannot be decoded, or holds something else than was saved.
        UserError: the arrays are those of another model.
        CheckpointError: the storage gave errors.
    """
    where, root = directory / str(step), "".join(f".{field}" for field in fields)
    wanted = describe(like, root)

    def read_record() -> dict[str, Any]:
        record = ocp.JsonCheckpointHandler().restore(where / "host", args=ocp.args.JsonRestore())
        if not (isinstance(record, dict) and {"arrays", "sums", "host"} <= record.keys()):
            raise Damaged(f"{where / 'host'} is not the record of a checkpoint")
        saved = {name: x for name, x in record["arrays"].items() if name.startswith(root)}
        for name in sorted(saved.keys() | wanted.keys()):
            if saved.get(name) != wanted.get(name):
                there, now = saved.get(name, "nothing"), wanted.get(name, "nothing")
                raise UserError(
                    f"checkpoint {step} in {directory} is of another model: {name} is {there} "
                    f"there and {now} in this config. Choose another --workdir, or the config it "
                    "was made with."
                )
        return record

    def read_arrays() -> Any:
        nested = functools.reduce(lambda inner, field: {field: inner}, reversed(fields), like)
        args = ocp.args.PyTreeRestore(
            nested,
            restore_args=ocp.checkpoint_utils.construct_restore_args(nested),
            partial_restore=True,
        )
        restored = ocp.PyTreeCheckpointHandler().restore(where / "arrays", args=args)
        return functools.reduce(operator.getitem, fields, restored)

    try:
        record = together(read_record)
        arrays = together(read_arrays)
    except CheckpointError as error:
        raise CheckpointError(
            f"checkpoint {step} in {directory} could not be read: {error}. It stays in place.",
            restart=True,
        ) from error
    # All processes compute the sums together and get the same.
    check_sums({name: record["sums"][name] for name in wanted}, bit_sums(arrays, root))
    return arrays, record["host"]
