"""Partial rollouts: unfinished responses are kept and resumed in the next step.

A rollout ends the moment the batch is full, while responses to prompts beyond it are being
generated. Those prompts go back to the data and come first in the next step. Here their responses
are kept, each token with its log-prob and the rollout step whose parameters sampled it. In the next
step those that have ended are scored again; the others are resumed under the new parameters.

Groups are still accepted in prompt order, which favours no short response. How much is kept depends
on when verdicts arrive. A step is a function of the state that it begins with; its leftovers are
not.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dapo_jax.types import Problem, Response, response_from_json, response_to_json

Visit = tuple[int, int]  # id and epoch of a problem


class Begun(NamedTuple):
    """What was drawn for a prompt that went back to the data."""

    visit: Visit
    # (sample, response) of those that have a token; each response with the versions of its tokens.
    responses: tuple[tuple[int, Response], ...]


def by_visit(begun: Sequence[Begun]) -> dict[Visit, dict[int, Response]]:
    """The responses by problem and sample."""
    return {visit: dict(responses) for visit, responses in begun}


def not_stale(
    begun: Sequence[Begun], *, step: int, max_staleness: int
) -> tuple[tuple[Begun, ...], int]:
    """(those that may go on, how many samples may not and are drawn afresh).

    Args:
        step: the rollout step to come.
        max_staleness: steps, at most, since the oldest token of a sample was drawn.
    """
    kept = []
    for visit, responses in begun:
        young = tuple((s, r) for s, r in responses if step - _oldest(r) <= max_staleness)
        kept.append(Begun(visit, young))
    before, after = (sum(len(responses) for _, responses in b) for b in (begun, kept))
    return tuple(b for b in kept if b.responses), before - after


def _oldest(response: Response) -> int:
    assert response.versions is not None
    return int(response.versions.min())


def next_begun(
    before: Sequence[Begun],
    taken: Sequence[Problem],
    drawn: Sequence[Mapping[int, Response]],
    *,
    decided: int,
    step: int,
) -> tuple[Begun, ...]:
    """What the next step finds: of the prompts begun beyond the batch, and of those of earlier
    steps whose turn has not come.

    A response that ended because the logits were not finite is not kept: the next parameters may do
    better.

    Args:
        before: what the step found.
        taken: problems of the step, in order.
        drawn: of each of them, by sample.
        decided: the first so many are used up.
        step: that drew the tokens of responses without versions.
    """
    left = [
        Begun(
            (problem.id, problem.epoch),
            tuple(
                (sample, _with_versions(response, step))
                for sample, response in sorted(responses.items())
                if len(response.tokens) and not response.invalid
            ),
        )
        for problem, responses in zip(taken[decided:], drawn[decided:], strict=True)
    ]
    met = {(problem.id, problem.epoch) for problem in taken}
    return tuple(b for b in left if b.responses) + tuple(b for b in before if b.visit not in met)


def _with_versions(response: Response, step: int) -> Response:
    if response.versions is not None:
        return response
    return response._replace(versions=np.full(len(response.tokens), step, np.int32))


def to_json(begun: Sequence[Begun]) -> list[Any]:
    """As JSON values; nothing is rounded."""
    return [
        [list(visit), [[sample, response_to_json(r)] for sample, r in responses]]
        for visit, responses in begun
    ]


def from_json(values: Sequence[Any]) -> tuple[Begun, ...]:
    """The inverse of `to_json`."""
    return tuple(
        Begun(tuple(visit), tuple((sample, response_from_json(r)) for sample, r in responses))
        for visit, responses in values
    )
