"""Runs as the page of plots sees them, read from their directories, also while they continue."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from dapo_jax.types import UserError
from dapo_jax.utils.bootstrap import bootstrap_interval

# Sections and fields of config.json that two runs of one method may differ in.
MAY_DIFFER = ("seed", "checkpoint", "log")
RESAMPLES = 2000  # of the seeds, for each point


class Run(NamedTuple):
    """One run."""

    name: str  # unique on the page
    directory: Path
    num_samples: int  # k of the held-out metrics
    frozen: dict[str, Any]  # config.json
    steps: list[dict[str, Any]]  # one per line of metrics.jsonl, see `_metrics`
    summary: dict[str, Any] | None  # None while the run continues


class Point(NamedTuple):
    """A value of a plot or table."""

    x: float
    value: float
    interval: tuple[float, float] | None  # 95 %


class Method(NamedTuple):
    """Runs that differ in their seed alone, and have one line in each plot; often one run."""

    name: str
    runs: tuple[Run, ...]

    @property
    def num_samples(self) -> int:
        return self.runs[0].num_samples

    @property
    def last_step(self) -> int:
        """The last step that all runs have done."""
        return min(run.steps[-1]["step"] for run in self.runs)

    def points(self, metric: str, x: str = "step") -> list[Point]:
        """Returns a point for each step at which all runs have the metric.

        Several runs give their mean and its bootstrap interval over seeds. One run gives its value;
        held-out accuracy has the interval over the choice of problems.

        Args:
            x: "step" or "tokens".
        """
        found = [{n["step"]: n for n in r.steps if metric in n and x in n} for r in self.runs]
        points = []
        for step in sorted(set.intersection(*map(set, found))):
            numbers = [of_run[step] for of_run in found]
            values, first, interval = [n[metric] for n in numbers], numbers[0], None
            if len(values) > 1:
                interval = bootstrap_interval(values, resamples=RESAMPLES)
            elif metric == "eval/avg@k" and "eval/interval_low" in first:
                interval = first["eval/interval_low"], first["eval/interval_high"]
            points.append(Point(fmean(n[x] for n in numbers), fmean(values), interval))
        return points

    def has(self, metric: str, x: str = "step") -> bool:
        """Returns whether a step of each run has the metric."""
        return all(any(metric in n and x in n for n in run.steps) for run in self.runs)

    def sources(self) -> list[str]:
        """Returns the names of the held-out sources, if there are several."""
        names = dict.fromkeys(name for numbers in self.runs[0].steps for name in numbers)
        matches = (re.fullmatch("eval/(.+)/avg@k", name) for name in names)
        return [match[1] for match in matches if match]


def by_method(runs: Sequence[Run]) -> list[Method]:
    """Returns the runs with those together that differ in their seed alone, in the order given. A
    run that repeats another is a method of its own."""
    found: list[list[Run]] = []
    for run in runs:
        same = (
            others
            for others in found
            if _without_seed(others[0]) == _without_seed(run)
            and all(_seed(other) != _seed(run) for other in others)
        )
        if (others := next(same, None)) is None:
            found.append([run])
        else:
            others.append(run)
    names = [_method_name(of) for of in found]
    return [
        Method(name if names.count(name) == 1 else of[0].name, tuple(of))
        for name, of in zip(names, found)
    ]


def _without_seed(run: Run) -> dict[str, Any]:
    return {name: value for name, value in run.frozen["config"].items() if name not in MAY_DIFFER}


def _seed(run: Run) -> int:
    return run.frozen["config"]["seed"]


def _method_name(runs: Sequence[Run]) -> str:
    """Returns the name that runs of several seeds share: `dapo` for `dapo_0` and `dapo_1`, or for
    `dapo/seed_0` and `dapo/seed_1`. Where nothing is left, the parent directory's."""
    if len(runs) == 1:
        return runs[0].name
    name = re.sub(r"(^|[-_/])(seed|s)?[-_=]?\d+$", "", runs[0].name)
    return name or runs[0].directory.parent.name


def load_runs(directories: Sequence[Path]) -> list[Run]:
    """Returns the runs of the directories, in the order given; one that is given twice counts once.

    Raises:
        UserError: a directory holds no run, or no step of its run is done.
    """
    places = [*dict.fromkeys(directory.expanduser().resolve() for directory in directories)]
    return [_load_run(name, place) for name, place in zip(_names(places), places)]


def pass_rates(run: Run) -> np.ndarray:
    """Returns the pass rate of each problem tried in each epoch, float64 [problems, epochs], NaN
    where it was not tried. Problems are in the order of their ids; the first epoch is the
    evaluation before the run, if there was one."""
    file = run.directory / "pass_rates.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    # The last line may be half written.
    visits = [v for line in lines if line.endswith("}") for v in json.loads(line)["visits"]]
    if not visits:
        return np.empty((0, 0))
    ids, epochs, correct, responses = np.array(visits).T
    (problems, rows), (kept, columns) = (np.unique(x, return_inverse=True) for x in (ids, epochs))
    rates = np.full((len(problems), len(kept)), np.nan)
    rates[rows, columns] = correct / responses
    return rates


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
        if "rollout" not in frozen["config"]:
            raise UserError(
                f"{directory} is a run of launch/sft.py, which has no page: its numbers are in "
                "metrics.jsonl. Give the --workdir of a run of launch/train.py."
            )
        k = frozen["config"]["evaluation"]["num_samples"]
        file = directory / "metrics.jsonl"
        # The last line may be half written.
        lines = [line for line in file.read_text().splitlines() if line.endswith("}")]
        steps = [_metrics(json.loads(line), k) for line in lines]
        _count_tokens(steps, frozen["config"])
        file = directory / "summary.json"
        summary = json.loads(file.read_text()) if file.exists() else None
    except UserError:  # a ValueError, too
        raise
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
    """Returns metrics with `eval/avg@32` as `eval/avg@k`, and shares of prompts without signal."""
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


def field_at(config: dict[str, Any], name: str, step: int) -> Any:
    """Returns the value of a field, such as "rollout.group_size", in a rollout step.

    Args:
        config: the run's, from config.json. Its stages may change the field.
    """
    section, field = name.split(".")
    value = config[section][field]
    for first, changes in config.get("stages", ()):
        if first <= step:
            value = changes.get(name, value)
    return value


def responses_sampled(numbers: dict[str, Any], config: dict[str, Any]) -> int:
    """Returns how many responses a step sampled, without ReMax's greedy baselines.

    Args:
        numbers: the step's metrics.
        config: see `field_at`.
    """
    group_size = field_at(config, "rollout.group_size", numbers["step"])
    return int(numbers.get("sampling/prompts_tried", 0)) * group_size


def _count_tokens(steps: Sequence[dict[str, Any]], config: dict[str, Any]) -> None:
    """Adds to each step `tokens`, those of all responses sampled since the start."""
    if not any("length/mean" in numbers for numbers in steps):
        return
    tokens = 0.0
    for numbers in steps:
        tokens += numbers.get("length/mean", 0) * responses_sampled(numbers, config)
        numbers["tokens"] = tokens
