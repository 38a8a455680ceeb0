"""Runs as the page of plots sees them, read from their directories, also while they continue."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dapo_jax.types import UserError


class Run(NamedTuple):
    """One run."""

    name: str  # unique on the page
    directory: Path
    num_samples: int  # k of the held-out metrics
    frozen: dict[str, Any]  # config.json
    steps: list[dict[str, Any]]  # one per line of metrics.jsonl; `eval/avg@32` as `eval/avg@k`
    summary: dict[str, Any] | None  # None while the run continues

    def values(self, metric: str) -> list[tuple[float, float]]:
        """Returns (rollout step, value) of each step that has the metric."""
        return [(n["step"], n[metric]) for n in self.steps if metric in n]

    def sources(self) -> list[str]:
        """Returns the names of the held-out sources, if there are several."""
        names = dict.fromkeys(name for numbers in self.steps for name in numbers)
        matches = (re.fullmatch("eval/(.+)/avg@k", name) for name in names)
        return [match[1] for match in matches if match]


def load_runs(directories: Sequence[Path]) -> list[Run]:
    """Returns the runs of the directories, in the order given.

    Raises:
        UserError: a directory is given twice, holds no run, or no step of its run is done.
    """
    places = [directory.expanduser().resolve() for directory in directories]
    for place in places:
        if places.count(place) > 1:
            raise UserError(f"{place} is given twice; leave one out.")
    return [_load_run(name, place) for name, place in zip(_names(places), places)]


def _names(places: Sequence[Path]) -> list[str]:
    """Returns the ends of the paths, as short as they can be and differ."""
    depth = 1
    while True:
        names = ["/".join(place.parts[-depth:]) for place in places]
        if len(set(names)) == len(names):
            return names
        depth += 1


def _load_run(name: str, directory: Path) -> Run:
    file = directory / "config.json"
    try:
        frozen = json.loads(file.read_text())
        k = frozen["config"]["evaluation"]["num_samples"]
        file = directory / "metrics.jsonl"
        # The last line may be half written.
        lines = [line for line in file.read_text().splitlines() if line.endswith("}")]
        steps = [_metrics(json.loads(line), k) for line in lines]
        file = directory / "summary.json"
        summary = json.loads(file.read_text()) if file.exists() else None
    except OSError as error:
        raise UserError(
            f"{directory} holds no run: {error.filename} cannot be read ({error.strerror}). "
            "Give the --workdir of a run of launch/train.py."
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{file} is not as launch/train.py writes it ({type(error).__name__}: {error})."
        ) from error
    if not steps:
        raise UserError(f"{directory}: no step is done yet; there is nothing to plot.")
    return Run(name, directory, k, frozen, steps, summary)


def _metrics(numbers: dict[str, Any], k: int) -> dict[str, Any]:
    """Returns metrics with names that do not hold k, and shares of prompts without signal."""
    of_k = f"@{k}"
    numbers = {
        f"{name.removesuffix(of_k)}@k" if name.endswith(of_k) else name: value
        for name, value in numbers.items()
    }
    tried = numbers.get("sampling/prompts_tried", 0)
    if tried:
        numbers["share/all_right"] = numbers["sampling/prompts_all_right"] / tried
        numbers["share/all_wrong"] = numbers["sampling/prompts_all_wrong"] / tried
    return numbers | {"step": int(numbers["step"])}
