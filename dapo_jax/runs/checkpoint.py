"""Checkpoints: arrays and host state saved together, asynchronously, whole or not at all.

orbax writes a step into a temporary directory and renames it when everything is on disk, so that
a kill at any moment leaves the checkpoints before it. What orbax does not do is notice a file that
was damaged later: sums over the bits of every array are kept beside them and compared on restore.

In a bucket (gs://) nothing can be renamed at once: there orbax leaves a file in a step that is
whole, and takes no other for one.
"""

import contextlib
import errno
import functools
import gc
import hashlib
import importlib.util
import json
import logging
import math
import operator
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils
from orbax.checkpoint.checkpoint_managers import preservation_policy

from dapo_jax.types import RunError, UserError, causes

T = TypeVar("T")
DAMAGED = "damaged"
BUCKET = "gs://"


# A save slower than this fails: a quarter of what a 4 TB Filestore of the tier ZONAL writes.
FLOOR_BYTES_PER_SECOND = 100e6
LEAST_TIMEOUT_SECONDS = ocp.options.AsyncOptions().timeout_secs
READS = 3  # attempts to read a checkpoint before a storage error ends the run
PAUSE_SECONDS = 5.0  # between them
# Status codes of tensorstore for files that are missing, cut short or changed.
DECODE_ERRORS = (
    "DATA_LOSS",
    "OUT_OF_RANGE",
    "FAILED_PRECONDITION",
    "NOT_FOUND",
    "INVALID_ARGUMENT",
)
# Errors of this program and its devices, which no state of the storage explains.
OWN_ERRORS = (UserError, MemoryError, jax.errors.JaxRuntimeError)


class CheckpointError(RunError):
    """A checkpoint could not be written or read. Those written before it are intact."""


def timeout_seconds(num_bytes: int) -> int:
    """Returns the time limit of one save: orbax's own, or longer where a checkpoint of `num_bytes`
    takes longer at FLOOR_BYTES_PER_SECOND."""
    return max(LEAST_TIMEOUT_SECONDS, math.ceil(num_bytes / FLOOR_BYTES_PER_SECOND))


def place(directory: epath.PathLike) -> epath.Path:
    """A directory, or a place in a bucket (gs://BUCKET/PLACE), as a whole path.

    Raises:
        UserError: it is another kind of place, or what reads buckets is not installed.
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

    # What another process writes, and tensorstore, is to be seen at once.
    conf.setdefault("gcs", {})["use_listings_cache"] = False
    return epath.Path(text)


class _Save(NamedTuple):
    """The arguments of a save."""

    step: int
    arrays: Any
    record: dict[str, Any]
    accuracy: float | None


class Checkpoints:
    """The checkpoints in a directory; a context manager that waits for the last save.

    Every process of the run makes the same calls in the same order.

    Args:
        directory: see `place`; made if it is not there.
        keep_newest: how many of the newest are kept.
        keep_best: how many of those with the highest accuracy are kept besides.
        say: prints a line, for a damaged checkpoint and for a save that is tried again.
        num_bytes: of the arrays of one checkpoint, for the time limit of a save.
        all_gather: gathers a small value from each process: `ProcessGroup.all_gather`.

    Raises:
        UserError: the directory cannot be written to.
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
    ):
        self.directory, self.say, self.all_gather = place(directory), say, all_gather
        self._pending: _Save | None = None  # not known to be on disk
        self._failed = False  # the save before the pending one
        latest = preservation_policy.LatestN(keep_newest)
        best = preservation_policy.BestN(
            get_metric_fn=lambda metrics: metrics["accuracy"],
            n=keep_best,
            keep_checkpoints_without_metrics=False,
        )
        options = ocp.CheckpointManagerOptions(
            preservation_policy=preservation_policy.AnyPreservationPolicy([latest, best]),
            cleanup_tmp_directories=True,
            async_options=ocp.options.AsyncOptions(timeout_secs=timeout_seconds(num_bytes)),
        )
        self.open = functools.partial(
            ocp.CheckpointManager, self.directory, options=options, item_names=("arrays", "host")
        )
        self._logs = contextlib.ExitStack()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self.manager = self.open()
        except Exception as error:  # an OSError; of a bucket also what its libraries raise
            reason = error.strerror if isinstance(error, OSError) else None
            raise UserError(
                f"checkpoints cannot be kept in {self.directory}: {reason or error}. Choose "
                "another --workdir or config.checkpoint.directory, or mend its permissions."
            ) from error

    def __enter__(self) -> "Checkpoints":
        self._logs.enter_context(_without_tracebacks())
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with self._logs:
            if kind is None:
                self.wait()
                self.manager.close()
            else:  # an error of the pending save must not take the place of the one on its way
                with contextlib.suppress(Exception):
                    self.manager.close()

    @property
    def steps(self) -> list[int]:
        """Steps that are saved, in order."""
        return sorted(self.manager.all_steps())

    def save(self, step: int, arrays: Any, host: Any, *, accuracy: float | None) -> None:
        """Starts saving; returns once the arrays may be changed or donated.

        A save that fails is tried once more: this one with the same arrays, the one before it by
        this one.

        Args:
            step: names the checkpoint.
            arrays: pytree of jax.Array.
            host: whatever json can hold.
            accuracy: what the best are chosen by; None where it was not measured.

        Raises:
            CheckpointError: two saves in a row could not be written, or the disk is full.
        """
        self._finish_pending()
        record = {"arrays": _describe(arrays), "sums": _sums(arrays), "host": host}
        self._start(_Save(step, arrays, record, accuracy))

    def wait(self) -> None:
        """Returns when everything is on disk.

        Raises:
            CheckpointError: the last save could not be written.
        """
        pending = self._pending
        self._finish_pending()
        if self._failed and pending is not None:
            if any(x.is_deleted() for x in jax.tree.leaves(pending.arrays)):
                raise CheckpointError(
                    f"checkpoint {pending.step} in {self.directory} could not be written. The "
                    "checkpoints before it are intact.",
                    restart=True,
                )
            self._start(pending)
            self._finish_pending()

    def _start(self, save: _Save) -> None:
        """Starts a save, a second time where it fails at once."""
        self._pending = save
        arguments = ocp.args.Composite(
            arrays=ocp.args.StandardSave(save.arrays), host=ocp.args.JsonSave(save.record)
        )
        metrics = None if save.accuracy is None else {"accuracy": save.accuracy}
        while not self._succeeds(
            lambda: self.manager.save(save.step, args=arguments, metrics=metrics)
        ):
            pass

    def _finish_pending(self) -> None:
        """Waits until the last save is written, or is known to have failed."""
        if self._pending is not None and self._succeeds(self.manager.wait_until_finished):
            self._failed = False
        self._pending = None

    def _succeeds(self, write: Callable[[], Any]) -> bool:
        """Whether `write` returns in every process. Where it fails the first time in a row, says so
        and makes the manager ready for another try.

        Raises:
            CheckpointError: it is the second time, or the disk is full.
        """
        assert self._pending is not None
        error: Exception | None = None
        try:
            write()
        except OWN_ERRORS:
            raise
        except Exception as failure:  # an OSError here, a ValueError of tensorstore's there
            error = failure
        each = self.all_gather(None if error is None else [_reason(error, -1), _is_disk_full(error)])
        reasons = [told for told in each if told is not None]
        if not reasons:
            return True
        (reason, _), full = reasons[0], any(full for _, full in reasons)
        what = f"checkpoint {self._pending.step} in {self.directory} could not be written"
        if full:
            raise CheckpointError(
                f"{what}: the disk is full. The checkpoints before it are intact. Free some space "
                "and start the same command again."
            ) from error
        if self._failed:
            raise CheckpointError(
                f"{what}: {reason}. The save before it failed too. The checkpoints before them are "
                "intact.",
                restart=True,
            ) from error
        self.say(f"warning: {what}: {reason}. The run tries once more.")
        self._failed = True
        with contextlib.suppress(Exception):  # it raises what has just been reported
            self.manager.close()
        self.manager = self.open()
        return False

    def restore(self, like: Any) -> tuple[int, Any, Any] | None:
        """(step, arrays, host state) of the newest checkpoint that is whole; None if there is none.

        Damaged ones that are newer are reported and moved to `damaged/`, or next to the directory
        where that is in a bucket. Damage is a sum that differs or a file that is missing or cannot
        be decoded; all processes agree on it before any reads another checkpoint.

        Args:
            like: pytree of jax.ShapeDtypeStruct with the shardings wanted.

        Raises:
            UserError: the arrays are those of another model, or no checkpoint is whole.
            CheckpointError: the storage gave errors, READS times in a row. Nothing is moved.
        """
        damaged: dict[int, str] = {}
        steps = self.steps
        if any(seen != steps for seen in self.all_gather(steps)):
            raise CheckpointError(
                f"the processes see different checkpoints in {self.directory}; here {steps}.",
                restart=True,
            )
        for step in steps[::-1]:
            with _failures_told_once():
                found = self._verified(step, like, damaged)
            if found is not None:
                self._set_aside(damaged)
                return step, *found
        if damaged:
            # Left where they are: moved away, the next start would take this for a new run.
            reasons = "".join(f"\n  {step}: {reason}" for step, reason in damaged.items())
            raise UserError(
                f"no checkpoint in {self.directory} can be read:{reasons}\nRestore one from a "
                "copy, or start anew in another --workdir."
            )
        return None

    def _verified(self, step: int, like: Any, damaged: dict[int, str]) -> tuple[Any, Any] | None:
        """(arrays, host state) of a checkpoint; None if it is damaged, which is then noted."""
        where = self.directory / str(step)

        def record() -> Any:
            found = _read_record(where)
            _check_same(step, self.directory, found["arrays"], _describe(like))
            return found

        def arrays() -> Any:
            return ocp.StandardCheckpointHandler().restore(
                where / "arrays", args=ocp.args.StandardRestore(like)
            )

        try:
            found = self._together(step, record)
            restored = self._together(step, arrays)
            # All processes compute them together, and all get the same.
            _check_sums(found["sums"], _sums(restored))
        except _Damaged as error:
            damaged[step] = str(error)
            return None
        return restored, found["host"]

    def _together(self, step: int, read: Callable[[], T]) -> T:
        """What `read` returns, which waits for no other process, once it has returned in all.

        Raises:
            _Damaged: in all processes, where one of them found damage.
            CheckpointError: in all, where one of them could not read.
        """
        found: Any = None
        damage = failure = None
        try:
            found = _retried(read)
        except _Damaged as error:
            damage = str(error)
        except CheckpointError as error:
            failure = str(error)
        verdicts = self.all_gather([failure, damage])
        if failures := [failure for failure, _ in verdicts if failure is not None]:
            raise CheckpointError(
                f"checkpoint {step} in {self.directory} could not be read: {failures[0]}. It is "
                "left where it is.",
                restart=True,
            )
        if reasons := [damage for _, damage in verdicts if damage is not None]:
            raise _Damaged(reasons[0])
        return found

    def _set_aside(self, damaged: dict[int, str]) -> None:
        if not damaged:
            return
        self.manager.close()
        if jax.process_index() == 0:
            self._move(damaged)
        multihost_utils.sync_global_devices("damaged checkpoints are set aside")
        self.manager = self.open()

    def _move(self, damaged: dict[int, str]) -> None:
        apart = self.directory / DAMAGED
        if str(apart).startswith(BUCKET):
            # There orbax clears away what is not marked as whole.
            apart = self.directory.with_name(f"{self.directory.name}_{DAMAGED}")
        apart.mkdir(exist_ok=True)
        told = "".join(f"{step}: {reason}\n" for step, reason in damaged.items())
        # In a bucket a directory is there when something is in it.
        (apart / "reasons.txt").write_text(told)
        for step, reason in damaged.items():
            self.say(
                f"warning: checkpoint {step} in {self.directory} is damaged ({reason}); it is "
                f"moved to {apart.name}/ and the one before it is used"
            )
            aside = apart / str(step)
            if aside.exists():
                aside.rmtree()
            (self.directory / str(step)).rename(aside)


def restore_part(
    directory: epath.PathLike, step: int | None, fields: Sequence[str], like: Any
) -> tuple[int, Any]:
    """(step, part of the arrays) of a checkpoint. Nothing else of it is read, and nothing in the
    directory changes.

    Args:
        step: None: the newest.
        fields: names of those that lead to the part, from the outermost.
        like: the part as a pytree of jax.ShapeDtypeStruct with the shardings wanted.

    Raises:
        UserError: there is no such checkpoint, it is damaged, or it is of another model.
    """
    names = ("arrays", "host")
    directory = place(directory)
    if not directory.is_dir():
        raise UserError(f"{directory}: there are no checkpoints.")
    with (
        _without_tracebacks(),
        ocp.CheckpointManager(
            directory, options=ocp.CheckpointManagerOptions(read_only=True), item_names=names
        ) as manager,
    ):
        steps = sorted(manager.all_steps())
        if not steps or (step is not None and step not in steps):
            raise UserError(
                f"{directory} has no checkpoint {'' if step is None else step}; it has "
                f"{', '.join(map(str, steps)) or 'none'}."
            )
        step = steps[-1] if step is None else step
        try:
            record = _retried(lambda: _read_record(directory / str(step)))
            path = "".join(f".{field}" for field in fields)
            wanted = _describe(like, path)
            saved = {name: value for name, value in record["arrays"].items() if name in wanted}
            _check_same(step, directory, saved, wanted)
            nested = functools.reduce(lambda inner, field: {field: inner}, reversed(fields), like)
            part = ocp.args.PyTreeRestore(
                nested,
                restore_args=ocp.checkpoint_utils.construct_restore_args(nested),
                partial_restore=True,
            )
            read = lambda: manager.restore(step, args=ocp.args.Composite(arrays=part)).arrays
            arrays = functools.reduce(operator.getitem, fields, _retried(read))
            _check_sums({name: record["sums"][name] for name in wanted}, _sums(arrays, path))
        except CheckpointError as error:
            raise CheckpointError(
                f"checkpoint {step} in {directory} could not be read: {error}.", restart=True
            ) from error
        except _Damaged as error:
            raise UserError(
                f"checkpoint {step} in {directory} is damaged ({error}). Choose another --step: "
                f"{', '.join(map(str, steps))}."
            ) from error
    return step, arrays


def fingerprint(arrays: Any) -> str:
    """A hash of the arrays' contents."""
    return hashlib.sha256(json.dumps(_sums(arrays), sort_keys=True).encode()).hexdigest()[:16]


def _check_same(
    step: int, directory: epath.Path, saved: dict[str, Any], wanted: dict[str, Any]
) -> None:
    for name in sorted(saved.keys() | wanted.keys()):
        if saved.get(name) != wanted.get(name):
            there, now = saved.get(name, "nothing"), wanted.get(name, "nothing")
            raise UserError(
                f"checkpoint {step} in {directory} is of another model: {name} is {there} "
                f"there and {now} in this config. Choose another --workdir, or the config it "
                "was made with."
            )


def _describe(arrays: Any, root: str = "") -> dict[str, str]:
    """Shape and dtype of each array by its path, as text."""
    leaves = jax.tree_util.tree_leaves_with_path(arrays)
    return {root + jax.tree_util.keystr(path): f"{x.dtype}{list(x.shape)}" for path, x in leaves}


@jax.jit
def _bit_sums(arrays: list[jax.Array]) -> list[jax.Array]:
    """Of each array, two sums over its words modulo 2^32, the second weighted by position."""

    def sums(x: jax.Array) -> jax.Array:
        x = jax.device_put(x, jax.memory.Space.Device)  # moments may lie in the host's
        kind = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
        words = (x if x.dtype == kind else jax.lax.bitcast_convert_type(x, kind)).astype(jnp.uint32)
        place = sum(
            jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis) * jnp.uint32(2 * stride + 1)
            for axis, stride in enumerate(np.cumprod([1, *words.shape[::-1]])[-2::-1] % 2**31)
        )
        weighted = words * (2 * jnp.asarray(place, jnp.uint32) + 1)
        return jnp.stack([jnp.sum(words, dtype=jnp.uint32), jnp.sum(weighted, dtype=jnp.uint32)])

    return [sums(x) for x in arrays]


def _sums(arrays: Any, root: str = "") -> dict[str, list[int]]:
    """Sums over the bits of each array by its path; computed where the array lies."""
    leaves = jax.tree_util.tree_leaves_with_path(arrays)
    sums = jax.device_get(_bit_sums([x for _, x in leaves]))
    return {root + jax.tree_util.keystr(path): s.tolist() for (path, _), s in zip(leaves, sums)}


def _check_sums(saved: dict[str, list[int]], found: dict[str, list[int]]) -> None:
    for name, value in saved.items():
        if found[name] != value:
            raise _Damaged(f"the contents of {name} are not what was saved")


class _Damaged(Exception):
    """A file of a checkpoint is missing, or holds something else than was written."""


def _read_record(where: epath.Path) -> dict[str, Any]:
    """The host's part of a checkpoint, with the sums and shapes of its arrays."""
    record = ocp.JsonCheckpointHandler().restore(where / "host", args=ocp.args.JsonRestore())
    if not (isinstance(record, dict) and {"arrays", "sums", "host"} <= record.keys()):
        raise _Damaged(f"{where / 'host'} is not the record of a checkpoint")
    return record


def _retried(read: Callable[[], T]) -> T:
    """What `read` returns, after up to READS attempts.

    Raises:
        _Damaged: a file is missing or cannot be decoded.
        CheckpointError: the storage gave an error each time.
    """
    for attempt in range(READS):
        try:
            return read()
        except (_Damaged, *OWN_ERRORS):
            raise
        except Exception as error:  # tensorstore, epath and gcsfs each have their own
            if _is_damage(error):
                raise _Damaged(_reason(error, 0)) from error
            if attempt == READS - 1:
                raise CheckpointError(_reason(error, 0), restart=True) from error
        time.sleep(PAUSE_SECONDS)
    raise AssertionError


def _is_damage(error: Exception) -> bool:
    """Returns whether a read failed by what it read. tensorstore raises a ValueError whose text
    begins with a code or holds "Error decoding"; orbax may raise its own from that."""
    decoding = (FileNotFoundError, json.JSONDecodeError, UnicodeDecodeError)
    return any(
        isinstance(cause, decoding)
        or (isinstance(cause, ValueError) and _is_decode_error(str(cause)))
        for cause in causes(error)
    )


def _is_decode_error(text: str) -> bool:
    return text.startswith(DECODE_ERRORS) or "Error decoding" in text


def _reason(error: Exception, line: int) -> str:
    return (str(error).strip() or repr(error)).splitlines()[line][:200]


@contextlib.contextmanager
def _without_tracebacks() -> Iterator[None]:
    """Leaves out orbax's log: the traceback of an error in each thread that meets it, which is also
    raised here."""
    logger = logging.getLogger("absl")
    others = lambda record: "orbax" not in record.pathname
    logger.addFilter(others)
    try:
        yield
    finally:
        logger.removeFilter(others)


@contextlib.contextmanager
def _failures_told_once() -> Iterator[None]:
    """Has only the first failure of a read reported, which is raised.

    orbax reads arrays side by side. asyncio would report the other failures on standard error when
    they are collected, and Python the event loop that orbax closed while tensorstore used it.
    """
    logger, hook = logging.getLogger("asyncio"), sys.unraisablehook
    level = logger.level

    def without_closed_loops(unraisable: Any) -> None:
        error = unraisable.exc_value
        if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            hook(unraisable)

    logger.setLevel(logging.CRITICAL)
    sys.unraisablehook = without_closed_loops
    try:
        yield
    finally:
        gc.collect()
        logger.setLevel(level)
        sys.unraisablehook = hook


def _is_disk_full(error: Exception) -> bool:
    # tensorstore tells of it in the text of a ValueError.
    return any(
        (isinstance(cause, OSError) and cause.errno == errno.ENOSPC)
        or "No space left on device" in str(cause)
        for cause in causes(error)
    )
