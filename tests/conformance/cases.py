"""The reference's cases, and the results of comparing one."""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

CASES = Path(__file__).parent / "verl_0.9.1.npz"
TOLERANCE = 1e-5


class Compared(NamedTuple):
    """Pairs of (ours, theirs), and what was left out of them on purpose."""

    pairs: list[tuple[Any, Any]]
    note: str = ""


class Differs(NamedTuple):
    """A difference on purpose: why, and both values."""

    reason: str
    ours: Any
    theirs: Any


class Case(NamedTuple):
    id: str
    arrays: dict[str, np.ndarray]  # inputs by their names
    params: dict[str, Any]
    outputs: dict[str, Any]
    metrics: dict[str, float]
    records: list[dict[str, Any]]


class Tokens(NamedTuple):
    """The trained tokens of a case, one response after the other, as host functions see them."""

    mask: np.ndarray  # bool [B, T]
    lengths_R: np.ndarray

    def take(self, x: np.ndarray) -> np.ndarray:
        """[B, T] -> [M]."""
        return np.asarray(x, np.float64)[self.mask]

    def put(self, x_M: np.ndarray) -> np.ndarray:
        """[M] -> [B, T], 0 elsewhere."""
        out = np.zeros(self.mask.shape)
        out[self.mask] = x_M
        return out


def tokens_of(mask: np.ndarray) -> Tokens:
    mask = mask.astype(bool)
    return Tokens(mask, mask.sum(axis=1))


def load() -> list[Case]:
    """Reads the committed cases, with arrays in place of their names.

    The file holds JSON text in `cases`: versions, cases, and for every array its dtype, start and
    shape. The entry of a dtype holds the numbers of all its arrays, equal arrays once.
    """
    with np.load(CASES, allow_pickle=False) as file:
        contents = json.loads(file["cases"].tobytes())
        numbers = {name: file[name] for name in file.files if name != "cases"}

    def take(value: Any) -> Any:
        if not isinstance(value, str) or value not in contents["arrays"]:
            return value
        dtype, start, shape = contents["arrays"][value]
        return numbers[dtype][start : start + math.prod(shape)].reshape(shape)

    return [
        Case(
            case["id"],
            {name: take(value) for name, value in case["inputs"].items()},
            case["params"],
            {name: take(value) for name, value in case["outputs"].items()},
            case.get("metrics", {}),
            case.get("records", []),
        )
        for case in contents["cases"]
    ]


def relative_error(ours: Any, theirs: Any) -> float:
    """Largest difference, relative to the entry or to a millionth of the largest entry."""
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    if ours.shape != theirs.shape or not np.isfinite(ours).all():
        return np.inf
    largest = np.abs(theirs).max(initial=0.0)
    scale = np.maximum(np.abs(theirs), max(1e-6 * largest, 1e-12))
    return float((np.abs(ours - theirs) / scale).max(initial=0.0))
