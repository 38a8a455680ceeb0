"""Partial rollouts: unfinished responses are kept, and resumed in the next rollout step.

With `config.rollout.max_staleness` above 0; `dynamic_sampling` calls this. docs/async.md has the
design.

Invariant: which responses and tokens are carried depends on the numbers of decode calls, never on
time, so that a run repeats bit for bit.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dapo_jax.config import Config
from dapo_jax.types import (
    UNFINISHED,
    Problem,
    Response,
    response_from_json,
    response_to_json,
)

ProblemVisit = tuple[int, int]  # id and epoch of a problem
CarriedResponses = Mapping[ProblemVisit, Mapping[int, Response]]  # by visit and sample


# About as many decode calls as pass while the last responses of a batch are scored.
CUT_DELAY_CALLS = 4


class CarriedGroup(NamedTuple):
    """The responses so far to a prompt that returned to the data."""

    visit: ProblemVisit
    responses: tuple[tuple[int, Response], ...]  # (sample, response with versions), not empty


def by_visit(groups: Sequence[CarriedGroup]) -> dict[ProblemVisit, dict[int, Response]]:
    """Returns the responses by visit and sample."""
    return {visit: dict(responses) for visit, responses in groups}


def max_started(config: Config, informative_rate: float) -> int:
    """Returns how many prompts, from the first of a step, may start in it.

        (1 + max_staleness) x prompts_per_step / informative_rate

    Where each step uses up prompts_per_step / informative_rate prompts, the last of these is used
    up `max_staleness` steps later, so that none becomes stale.
    """
    d, steps = config.dynamic_sampling, 1 + config.rollout.max_staleness
    batch = config.train.prompts_per_step
    if not d.enabled:
        return steps * batch
    return steps * min(d.max_prompts, math.ceil(batch / max(informative_rate, 1e-6)))


def without_stale(
    groups: Sequence[CarriedGroup], *, step: int, max_staleness: int
) -> tuple[tuple[CarriedGroup, ...], int]:
    """Returns the groups that are not too old, and the number of responses of the others.

    A group goes as a whole and is sampled again from its prompt: without its oldest responses
    alone, it would hold too many short ones.

    Args:
        step: the rollout step to come.
        max_staleness: most steps since the oldest token of a group was sampled.
    """

    def is_fresh(group: CarriedGroup) -> bool:
        versions = [r.versions for _, r in group.responses if r.versions is not None]
        return step - min(int(of_response.min()) for of_response in versions) <= max_staleness

    stale = [group for group in groups if not is_fresh(group)]
    kept = tuple(group for group in groups if is_fresh(group))
    return kept, sum(len(group.responses) for group in stale)


def next_carried(
    before: Sequence[CarriedGroup],
    problems: Sequence[Problem],
    unfinished: Mapping[int, Mapping[int, Response]],
    *,
    num_tried: int,
    step: int,
) -> tuple[CarriedGroup, ...]:
    """Returns what the next step resumes: responses to prompts beyond the batch, and those of
    earlier steps whose prompts this step did not begin. Sorted by visit.

    Invalid responses are left out: the next parameters may do better.

    Args:
        before: what this step resumed.
        problems: the prompts of this step, in order; the first `num_tried` are used up.
        unfinished: the responses to each of them at the end of the step, by number and sample.
        step: that sampled the tokens of responses without versions.
    """
    found = {group.visit: group for group in before}
    for number, problem in enumerate(problems):
        visit = problem.id, problem.epoch
        if number < num_tried or number in unfinished:
            found.pop(visit, None)
        if number < num_tried:
            continue
        responses = tuple(
            (sample, _with_versions(response, step))
            for sample, response in sorted(unfinished.get(number, {}).items())
            if len(response.tokens) and not response.invalid
        )
        if responses:
            found[visit] = CarriedGroup(visit, responses)
    return tuple(found[visit] for visit in sorted(found, key=lambda visit: visit[::-1]))


def cut(response: Response, calls: np.ndarray, last_call: int) -> Response:
    """Returns the response without the tokens of calls after `last_call`.

    Args:
        calls: int32 [length], number of the decode call of each token; 0: of an earlier step.
    """
    n = int(np.searchsorted(calls, last_call, side="right"))
    if n == len(response.tokens):
        return response
    optional = lambda array: None if array is None else array[:n]
    return Response(
        response.tokens[:n],
        response.log_probs[:n],
        UNFINISHED,
        "",
        optional(response.versions),
        optional(response.model_log_probs),
    )


def _with_versions(response: Response, step: int) -> Response:
    if response.versions is not None:
        return response
    return response._replace(versions=np.full(len(response.tokens), step, np.int32))


def to_json(groups: Sequence[CarriedGroup]) -> list[Any]:
    """Returns JSON values; nothing is rounded."""
    return [
        [list(visit), [[sample, response_to_json(r)] for sample, r in responses]]
        for visit, responses in groups
    ]


def from_json(values: Sequence[Any]) -> tuple[CarriedGroup, ...]:
    """The inverse of `to_json`."""
    return tuple(
        CarriedGroup(tuple(visit), tuple((sample, response_from_json(r)) for sample, r in rs))
        for visit, rs in values
    )
