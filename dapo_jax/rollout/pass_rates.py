"""Pass rates: how often the policy solved each training problem, visit by visit.

`rollout.dynamic_sampling.commit` adds the groups of every step; checkpoints and the page of a run
hold all visits. With `config.data.pass_rate_band` a problem whose latest pass rate lies outside is
passed over (`ProblemStream.without`).
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dapo_jax.types import Group, Problem, UserError

BEFORE_RUN = -1  # "epoch" of a pass rate that launch/evaluate.py measured


class PassRate(NamedTuple):
    """The responses to a problem in one epoch of its source."""

    epoch: int
    correct: int
    responses: int  # with a verdict: neither invalid nor with a fault of the scorer


PassRates = Mapping[int, tuple[PassRate, ...]]  # visits in order, by the id of the problem


def with_groups(rates: PassRates, groups: Iterable[Group]) -> dict[int, tuple[PassRate, ...]]:
    """Returns the pass rates with one more for the problem of each group that has a verdict."""
    found = dict(rates)
    for group in groups:
        if visit := pass_rate_of(group):
            found[group.problem.id] = (*found.get(group.problem.id, ()), visit)
    return found


def pass_rate_of(group: Group) -> PassRate | None:
    """Returns the pass rate of a group; None where no response has a verdict."""
    correct = group.trained_correct(overlong_filter=False)
    return PassRate(group.problem.epoch, sum(correct), len(correct)) if correct else None


def outside(rates: PassRates, band: tuple[float, float]) -> frozenset[int]:
    """Returns the ids of problems whose latest pass rate is not in [low, high)."""
    low, high = band
    latest = ((problem, visits[-1]) for problem, visits in rates.items())
    return frozenset(problem for problem, v in latest if not low <= v.correct / v.responses < high)


def measured(file: str, problems: Sequence[Problem], field: str) -> dict[int, tuple[PassRate, ...]]:
    """Returns the pass rates in a transcript of launch/evaluate.py. Problems are known by prompt.

    Args:
        file: NAME.jsonl in the output of launch/evaluate.py.
        problems: of one source.
        field: where the file is named, for messages.

    Raises:
        UserError: it cannot be read, or has none of the problems.
    """
    correct: dict[str, list[bool]] = {}
    try:
        for line in Path(file).expanduser().read_text().splitlines():
            record = json.loads(line)
            verdicts = [s["correct"] for s in record["samples"] if not (s["note"] or s["invalid"])]
            correct.setdefault(record["prompt"], []).extend(verdicts)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"{field} ({file}) cannot be read: {error}. Give the file NAME.jsonl that "
            "launch/evaluate.py --benchmarks=train/NAME writes."
        ) from error
    found = {
        problem.id: (PassRate(BEFORE_RUN, sum(of_problem), len(of_problem)),)
        for problem in problems
        if (of_problem := correct.get(problem.prompt))
    }
    if not found:
        raise UserError(
            f"{field} ({file}) has none of the {len(problems)} prompts of this source. Evaluate "
            "them with this config, its prompt template and its tokenizer."
        )
    return found


def to_json(rates: PassRates) -> list[Any]:
    """Returns JSON values: a list [id, [epoch, correct, responses], ...] for each problem."""
    return [[problem, *map(list, visits)] for problem, visits in rates.items()]


def from_json(values: Sequence[Any]) -> dict[int, tuple[PassRate, ...]]:
    """The inverse of `to_json`."""
    return {problem: tuple(PassRate(*v) for v in visits) for problem, *visits in values}
