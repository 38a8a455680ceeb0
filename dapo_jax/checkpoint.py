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
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils
from orbax.checkpoint.checkpoint_managers import preservation_policy

from dapo_jax.types import RunError, UserError, causes

# orbax logs the traceback of an error in each thread that meets it; here it is told once, in full.
logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)


def _without_closed_loops(before: Callable[[Any], Any]) -> Callable[[Any], None]:
    """An unraisable hook that says nothing of the event loop which orbax closes when a read fails
    while tensorstore still reports to it; the failure itself is raised and told."""

    def hook(unraisable: Any) -> None:
        error = unraisable.exc_value
        if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            before(unraisable)

    return hook


sys.unraisablehook = _without_closed_loops(sys.unraisablehook)

DAMAGED = "damaged"
BUCKET = "gs://"


class CheckpointError(RunError):
    """A checkpoint could not be written. Those written before it are intact."""


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


class Checkpoints:
    """The checkpoints in a directory; a context manager that waits for the last save.

    Args:
        directory: see `place`; made if it is not there.
        keep_newest: how many of the newest are kept.
        keep_best: how many of those with the highest accuracy are kept besides.
        say: prints a line, when a damaged checkpoint is passed over.

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
    ):
        self.directory, self.say = place(directory), say
        latest = preservation_policy.LatestN(keep_newest)
        best = preservation_policy.BestN(
            get_metric_fn=lambda metrics: metrics["accuracy"],
            n=keep_best,
            keep_checkpoints_without_metrics=False,
        )
        options = ocp.CheckpointManagerOptions(
            preservation_policy=preservation_policy.AnyPreservationPolicy([latest, best]),
            cleanup_tmp_directories=True,
        )
        self.open = functools.partial(
            ocp.CheckpointManager, self.directory, options=options, item_names=("arrays", "host")
        )
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
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.wait()
        self.manager.close()

    @property
    def steps(self) -> list[int]:
        """Steps that are saved, in order."""
        return sorted(self.manager.all_steps())

    def save(self, step: int, arrays: Any, host: Any, *, accuracy: float | None) -> None:
        """Starts saving; returns once the arrays may be changed or donated.

        Args:
            step: names the checkpoint.
            arrays: pytree of jax.Array.
            host: whatever json can hold.
            accuracy: what the best are chosen by; None where it was not measured.

        Raises:
            CheckpointError: this save, or the one before it, could not be written.
        """
        record = {"arrays": _describe(arrays), "sums": _sums(arrays), "host": host}
        with _told(f"checkpoint {step} in {self.directory}"):
            self.manager.save(
                step,
                args=ocp.args.Composite(
                    arrays=ocp.args.StandardSave(arrays), host=ocp.args.JsonSave(record)
                ),
                metrics=None if accuracy is None else {"accuracy": accuracy},
            )

    def wait(self) -> None:
        """Returns when everything is on disk.

        Raises:
            CheckpointError: the last save could not be written.
        """
        with _told(f"the last checkpoint in {self.directory}"):
            self.manager.wait_until_finished()

    def restore(self, like: Any) -> tuple[int, Any, Any] | None:
        """(step, arrays, host state) of the newest checkpoint that is whole; None if there is none.

        Damaged ones that are newer are told of and moved to `damaged/`, or beside the directory
        where that is in a bucket.

        Args:
            like: pytree of jax.ShapeDtypeStruct with the shardings wanted.

        Raises:
            UserError: the arrays are those of another model, or no checkpoint is whole.
        """
        damaged: dict[int, str] = {}
        for step in self.steps[::-1]:
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
        try:
            record = self._read(step, host=ocp.args.JsonRestore()).host
            _check_same(step, self.directory, record["arrays"], _describe(like))
            arrays = self._read(step, arrays=ocp.args.StandardRestore(like)).arrays
            _check_sums(record["sums"], _sums(arrays))
        except UserError:
            raise
        except Exception as error:  # what a damaged file raises depends on where it is damaged
            damaged[step] = (str(error).strip() or repr(error)).splitlines()[0][:200]
            return None
        return arrays, record["host"]

    def _read(self, step: int, **items: Any) -> Any:
        return self.manager.restore(step, args=ocp.args.Composite(**items))

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
    options = ocp.CheckpointManagerOptions(read_only=True)
    names = ("arrays", "host")
    directory = place(directory)
    if not directory.is_dir():
        raise UserError(f"{directory}: there are no checkpoints.")
    with ocp.CheckpointManager(directory, options=options, item_names=names) as manager:
        steps = sorted(manager.all_steps())
        if not steps or (step is not None and step not in steps):
            raise UserError(
                f"{directory} has no checkpoint {'' if step is None else step}; it has "
                f"{', '.join(map(str, steps)) or 'none'}."
            )
        step = steps[-1] if step is None else step
        try:
            host = ocp.args.Composite(host=ocp.args.JsonRestore())
            record = manager.restore(step, args=host).host
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
            found = manager.restore(step, args=ocp.args.Composite(arrays=part)).arrays
            arrays = functools.reduce(operator.getitem, fields, found)
            _check_sums({name: record["sums"][name] for name in wanted}, _sums(arrays, path))
        except UserError:
            raise
        except Exception as error:  # what a damaged file raises depends on where it is damaged
            reason = (str(error).strip() or repr(error)).splitlines()[0][:200]
            raise UserError(
                f"checkpoint {step} in {directory} is damaged ({reason}). Choose another --step: "
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
            raise ValueError(f"the contents of {name} are not what was saved")


@contextlib.contextmanager
def _failures_told_once() -> Iterator[None]:
    """orbax reads arrays side by side and raises the first failure. asyncio would report the others
    on standard error, whenever they are collected, as if nobody had dealt with them."""
    logger = logging.getLogger("asyncio")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        gc.collect()
        logger.setLevel(level)


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    """Turns what orbax raises while it writes into a CheckpointError that says what to do."""
    try:
        yield
    except Exception as error:  # an OSError here, a ValueError of tensorstore's there
        reason, remedy = (str(error).strip() or repr(error)).splitlines()[-1][:300], ""
        if any(_is_disk_full(cause) for cause in causes(error)):
            reason, remedy = (
                "the disk is full",
                " Free some space and start the same command again.",
            )
        raise CheckpointError(
            f"{what} could not be written: {reason}. The checkpoints before it are intact.{remedy}"
        ) from error


def _is_disk_full(error: BaseException) -> bool:
    full = isinstance(error, OSError) and error.errno == errno.ENOSPC
    # tensorstore tells of it in the text of a ValueError.
    return full or "No space left on device" in str(error)
