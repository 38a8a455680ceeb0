"""GRESO prompt filter: leaves prompts out unsampled that keep teaching nothing.

With z visits in a row after which all responses to a prompt were right, or all wrong,

    P(sampled) = max(p^z, floor),    p = p_easy where all were right, p_hard where all were wrong

and after each step, with n groups sampled in it, n_easy of them all right and n_hard all wrong,

    p_easy <- p_easy - step   if n_easy / n >= target_easy
              p_easy + step   otherwise,

within its bounds, and p_hard in the same way. Only trained responses count.

Source: GRESO, arXiv:2506.02177. The floor, the bounds, a count that starts again when a prompt
turns from all right to all wrong, and p that rests in the first epoch are those of the authors'
code (Infini-AI-Lab/GRESO). Two things are ours: the bound on the prompts left out in a step, and
that the choice is a function of the state, the seed and the prompts in order, never of timing.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dapo_jax.types import Group, Problem
from dapo_jax.utils.random_streams import named_seed

# Constants of GRESO's authors.
INITIAL_PROBABILITY = 0.5  # p_easy and p_hard of a new run
MIN_PROBABILITY, MAX_PROBABILITY = 0.05, 0.95  # bounds of both
PROBABILITY_STEP = 0.01  # by which they move after a step
TARGET_EASY, TARGET_HARD = 1 / 12, 1 / 6  # shares of the sampled groups
FLOOR = 0.01  # least probability with which a prompt is sampled
# Ours: most prompts left out in a step. All that come after them are sampled.
MAX_SKIPS = 20_000


class PromptFilterState(NamedTuple):
    """What the filter remembers from step to step; part of the checkpoint."""

    p_easy: float = INITIAL_PROBABILITY
    p_hard: float = INITIAL_PROBABILITY
    # By problem id: uninformative visits in a row, above 0 where all responses were right and below
    # 0 where all were wrong. Prompts without such a visit are not in it.
    streaks: Mapping[int, int] = {}


def sampling_probability(state: PromptFilterState, id: int) -> float:
    """Returns P(sampled) of a problem's prompt, in (0, 1]."""
    streak = state.streaks.get(id, 0)
    p = state.p_easy if streak > 0 else state.p_hard
    return max(p ** abs(streak), FLOOR)


def uniform(seed: int, problem: Problem) -> float:
    """Returns the visit's random number in [0, 1): of the seed, the problem's id and the epoch."""
    words = named_seed("prefilter", seed, problem.id, problem.epoch).generate_state(2)
    return int(words[0]) * 2.0**-32 + int(words[1] >> 11) * 2.0**-53


class PromptFilter:
    """Leaves prompts of one step out. Another filter over the same source leaves out the same.

    Args:
        state: before the step; None: every prompt is sampled.
        seed: of the run, 0 or more.
    """

    def __init__(self, state: PromptFilterState | None, seed: int):
        self.state, self.seed = state, seed
        self.skipped: list[Problem] = []  # prompts left out, in order

    def next(self, source: Any) -> Problem:
        """Returns the next prompt to sample."""
        while True:
            (problem,) = source.take(1)
            if self.state is None or len(self.skipped) >= MAX_SKIPS:
                return problem
            if uniform(self.seed, problem) < sampling_probability(self.state, problem.id):
                return problem
            self.skipped.append(problem)


def next_state(
    state: PromptFilterState | None,
    sampled: Sequence[Group],
    skipped: Sequence[Problem],
    *,
    overlong_filter: bool = False,
) -> PromptFilterState | None:
    """Returns the state after a step.

    Args:
        sampled: groups of the step before dynamic sampling's filter, in prompt order.
        skipped: prompts left out among them.
        overlong_filter: whether truncated responses are left out of the loss.
    """
    if state is None or not sampled:
        return state
    streaks = dict(state.streaks)
    easy = hard = 0
    for group in sampled:
        correct = group.trained_correct(overlong_filter=overlong_filter)
        if not correct:
            continue
        id, before = group.problem.id, streaks.pop(group.problem.id, 0)
        if all(correct):
            easy, streaks[id] = easy + 1, max(before, 0) + 1
        elif not any(correct):
            hard, streaks[id] = hard + 1, min(before, 0) - 1
    # In the first epoch no prompt has a past: the shares say nothing about p.
    if not skipped and all(group.problem.epoch == 0 for group in sampled):
        return state._replace(streaks=streaks)
    n = len(sampled)
    p_easy = _moved(state.p_easy, easy / n, TARGET_EASY)
    return PromptFilterState(p_easy, _moved(state.p_hard, hard / n, TARGET_HARD), streaks)


def _moved(p: float, share: float, target: float) -> float:
    p += -PROBABILITY_STEP if share >= target else PROBABILITY_STEP
    return min(max(p, MIN_PROBABILITY), MAX_PROBABILITY)


def state_to_json(state: PromptFilterState | None) -> dict[str, Any] | None:
    """Returns the state as JSON values."""
    if state is None:
        return None
    return state._asdict() | {"streaks": sorted(state.streaks.items())}


def state_from_json(values: dict[str, Any] | None) -> PromptFilterState | None:
    """The inverse of `state_to_json`."""
    if values is None:
        return None
    return PromptFilterState(values["p_easy"], values["p_hard"], dict(values["streaks"]))
