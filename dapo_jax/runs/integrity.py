"""Integrity of checkpoints: sums over the bits of arrays; damage and storage errors kept apart.

A failed read is damage where a file is missing or cannot be decoded, and otherwise an error of the
storage. Errors of this program and of its devices pass through.
"""

import contextlib
import errno
import gc
import hashlib
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from dapo_jax.types import RunError, UserError, causes, error_line

T = TypeVar("T")
READS = 3  # attempts to read a checkpoint before a storage error ends the run
PAUSE_SECONDS = 5.0  # between attempts
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
    """A checkpoint could not be written or read. Earlier checkpoints are intact."""


class Damaged(Exception):
    """A file of a checkpoint is missing, or holds something else than was written."""


def describe(arrays: Any, root: str = "") -> dict[str, str]:
    """Returns shape and dtype of each array by its path, as text."""
    leaves = jax.tree_util.tree_leaves_with_path(arrays)
    return {root + jax.tree_util.keystr(path): f"{x.dtype}{list(x.shape)}" for path, x in leaves}


def bit_sums(arrays: Any, root: str = "") -> dict[str, list[int]]:
    """Returns two sums over the bits of each array by its path, computed on its devices."""
    leaves = jax.tree_util.tree_leaves_with_path(arrays)
    sums = jax.device_get(_bit_sums([x for _, x in leaves]))
    return {root + jax.tree_util.keystr(path): s.tolist() for (path, _), s in zip(leaves, sums)}


def check_sums(saved: dict[str, list[int]], found: dict[str, list[int]]) -> None:
    """Raises Damaged where an array has other sums than were saved."""
    for name, value in saved.items():
        if found[name] != value:
            raise Damaged(f"the contents of {name} are not what was saved")


def fingerprint(arrays: Any) -> str:
    """Returns a hash of the arrays' contents."""
    return hashlib.sha256(json.dumps(bit_sums(arrays), sort_keys=True).encode()).hexdigest()[:16]


@jax.jit
def _bit_sums(arrays: list[jax.Array]) -> list[jax.Array]:
    """Returns two sums over each array's words modulo 2^32, the second weighted by position."""

    def sums(x: jax.Array) -> jax.Array:
        kind = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
        words = (x if x.dtype == kind else jax.lax.bitcast_convert_type(x, kind)).astype(jnp.uint32)
        position = sum(
            jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis) * jnp.uint32(2 * stride + 1)
            for axis, stride in enumerate(np.cumprod([1, *words.shape[::-1]])[-2::-1] % 2**31)
        )
        weighted = words * (2 * jnp.asarray(position, jnp.uint32) + 1)
        zeros = (jnp.uint32(0), jnp.uint32(0))
        both = lambda a, b: (a[0] + b[0], a[1] + b[1])
        # One reduction: for two of them XLA on CPUs writes out the words of all arrays at once.
        return jnp.stack(jax.lax.reduce((words, weighted), zeros, both, tuple(range(words.ndim))))

    return [sums(x) for x in arrays]


def retried(read: Callable[[], T]) -> T:
    """Returns the result of `read`, after up to READS attempts.

    Raises:
        Damaged: a file is missing or cannot be decoded.
        CheckpointError: the storage gave an error each time.
    """
    for attempt in range(1, READS + 1):
        try:
            return read()
        except (Damaged, *OWN_ERRORS):
            raise
        except Exception as error:  # tensorstore, epath and gcsfs each have their own
            if is_damage(error):
                raise Damaged(error_line(error)) from error
            if attempt == READS:
                raise CheckpointError(error_line(error), restart=True) from error
        time.sleep(PAUSE_SECONDS)
    raise AssertionError


def is_damage(error: Exception) -> bool:
    """Returns whether a file was missing or could not be decoded.

    tensorstore raises a ValueError whose text begins with a code or holds "Error decoding"; orbax
    may raise its own error from that one.
    """
    decoding = (FileNotFoundError, json.JSONDecodeError, UnicodeDecodeError)
    is_decode_error = lambda text: text.startswith(DECODE_ERRORS) or "Error decoding" in text
    return any(
        isinstance(cause, decoding)
        or (isinstance(cause, ValueError) and is_decode_error(str(cause)))
        for cause in causes(error)
    )


def is_disk_full(error: Exception) -> bool:
    """Returns whether a write failed for lack of space, of the disk or of the user's quota;
    tensorstore says so in text alone."""
    texts = ("No space left on device", "Disk quota exceeded")
    return any(
        (isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT))
        or any(text in str(cause) for text in texts)
        for cause in causes(error)
    )


@contextlib.contextmanager
def without_warning(text: str) -> Iterator[None]:
    """Leaves out orbax's warnings that hold this text."""
    logger = logging.getLogger("absl")
    keep = lambda record: text not in record.getMessage()
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


class _WithoutClosedLoops:
    """A `sys.unraisablehook` that leaves out the errors of closed event loops."""

    def __init__(self) -> None:
        self.other = sys.unraisablehook  # for all other errors

    def __call__(self, unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            self.other(unraisable)


# One, which is never freed: Python 3.11 and early 3.12 call the hook without owning it (CPython's
# issue 130163), so a thread that was about to call one that was freed meanwhile would crash.
_WITHOUT_CLOSED_LOOPS = _WithoutClosedLoops()


@contextlib.contextmanager
def one_failure_reported() -> Iterator[None]:
    """Silences asyncio and closed event loops while arrays are read.

    orbax reads all arrays at once and raises the first failure. The others would each print a
    traceback on standard error, hundreds for one damaged checkpoint.
    """
    logger, hook = logging.getLogger("asyncio"), sys.unraisablehook
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    _WITHOUT_CLOSED_LOOPS.other = hook
    sys.unraisablehook = _WITHOUT_CLOSED_LOOPS
    try:
        yield
    finally:
        gc.collect()
        logger.setLevel(level)
        sys.unraisablehook = hook
