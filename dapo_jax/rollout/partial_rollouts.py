"""Partial rollouts: unfinished responses are kept and resumed in the next step.

A rollout ends the moment the batch is full, while responses to prompts beyond it are being
generated. Those prompts return to the data and come first in the next step. Here their responses
are kept, each token with its log-prob and the rollout step whose parameters sampled it. In the next
step finished ones are scored again; the others are resumed under the new parameters.

Groups are still accepted in prompt order, which favours no short response.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dapo_jax.types import Problem, Response, response_from_json, response_to_json

Visit = tuple[int, int]  # id and epoch of a problem
PartialResponses = Mapping[Visit, Mapping[int, Response]]  # by visit and sample


class PartialGroup(NamedTuple):
    """The responses so far to a prompt that returned to the data."""

    visit: Visit
    responses: tuple[tuple[int, Response], ...]  # (sample, response with versions), not empty


def by_visit(groups: Sequence[PartialGroup]) -> dict[Visit, dict[int, Response]]:
    """Returns the responses by visit and sample."""
    return {visit: dict(responses) for visit, responses in groups}


def without_stale(
    groups: Sequence[PartialGroup], *, step: int, max_staleness: int
) -> tuple[tuple[PartialGroup, ...], int]:
    """Returns the groups without stale responses, and the number of those.

    Args:
        step: the rollout step to come.
        max_staleness: most steps since the oldest token of a response was sampled.
    """

    def is_fresh(response: Response) -> bool:
        assert response.versions is not None
        return step - int(response.versions.min()) <= max_staleness

    kept = [PartialGroup(v, tuple((s, r) for s, r in rs if is_fresh(r))) for v, rs in groups]
    before, after = (sum(len(responses) for _, responses in side) for side in (groups, kept))
    return tuple(group for group in kept if group.responses), before - after


def next_partial(
    before: Sequence[PartialGroup],
    problems: Sequence[Problem],
    unfinished: Mapping[int, Mapping[int, Response]],
    *,
    num_tried: int,
    step: int,
) -> tuple[PartialGroup, ...]:
    """Returns what the next step resumes: responses to prompts beyond the batch, and those of
    earlier steps whose prompts this step did not reach.

    Invalid responses are left out: the next parameters may do better.

    Args:
        before: what this step resumed.
        problems: the prompts of this step, in order; the first `num_tried` are used up.
        unfinished: the responses to each of them at the end of the step, by number and sample.
        step: that sampled the tokens of responses without versions.
    """
    found = []
    for number, problem in enumerate(problems[num_tried:], start=num_tried):
        responses = tuple(
            (sample, _with_versions(response, step))
            for sample, response in sorted(unfinished.get(number, {}).items())
            if len(response.tokens) and not response.invalid
        )
        if responses:
            found.append(PartialGroup((problem.id, problem.epoch), responses))
    reached = {(problem.id, problem.epoch) for problem in problems}
    return (*found, *(group for group in before if group.visit not in reached))


def _with_versions(response: Response, step: int) -> Response:
    if response.versions is not None:
        return response
    return response._replace(versions=np.full(len(response.tokens), step, np.int32))


def to_json(groups: Sequence[PartialGroup]) -> list[Any]:
    """Returns JSON values; nothing is rounded."""
    return [
        [list(visit), [[sample, response_to_json(r)] for sample, r in responses]]
        for visit, responses in groups
    ]


def from_json(values: Sequence[Any]) -> tuple[PartialGroup, ...]:
    """The inverse of `to_json`."""
    return tuple(
        PartialGroup(tuple(visit), tuple((sample, response_from_json(r)) for sample, r in rs))
        for visit, rs in values
    )
