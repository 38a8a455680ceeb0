"""Leaves prompts out before they are sampled, the likelier the longer they have taught nothing.

A prompt whose responses were all right or all wrong when it was last visited will mostly be so
again; dynamic sampling would draw them and throw them away. With z such visits in a row,

    P(sampled) = max(p^z, floor)
    p = p_easy where the responses were all right, p_hard where they were all wrong

and after each step, with n groups sampled in it, n_easy of them all right and n_hard all wrong,

    p_easy <- p_easy - step   if n_easy / n >= target_easy
              p_easy + step   otherwise,

kept within its bounds, and p_hard in the same way. All of it counts the responses that are trained;
a visit with none of those tells nothing, and changes no z.

Source: GRESO, arXiv:2506.02177. The floor, the bounds, a count that begins anew when a prompt turns
from all right to all wrong, and p that stays as it is in the first epoch are those of the authors'
code (Infini-AI-Lab/GRESO). Their sizing of rounds is not taken: there are no rounds here. Ours are
the bound on the prompts left out in a step, and that nothing depends on timing: what is left out in
a step is a function of the state before it, the seed and the prompts in their order.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dapo_jax.types import Group, Problem
from dapo_jax.utils.random_streams import named_seed


class Settings(NamedTuple):
    """The filter's constants; the defaults are those of GRESO's authors, `max_skips` is ours."""

    initial_probability: float = 0.5  # p_easy and p_hard of a new run
    min_probability: float = 0.05  # bounds of both
    max_probability: float = 0.95
    probability_step: float = 0.01  # by which they move after a step
    target_easy: float = 1 / 12  # share of the sampled groups that may be all right
    target_hard: float = 1 / 6  # and all wrong
    min_sampled: float = 0.01  # probability with which any prompt is sampled, at least
    max_skips: int = 20_000  # prompts left out in a step, at most; those after them are sampled


GRESO = Settings()


class PrefilterState(NamedTuple):
    """What is remembered from step to step; part of the checkpoint."""

    p_easy: float
    p_hard: float
    # By problem id, the visits in a row that taught nothing: above 0 where the responses were all
    # right, below 0 where they were all wrong. A prompt without such a visit is not in it.
    streaks: Mapping[int, int]


def initial_state(config: Settings = GRESO) -> PrefilterState:
    """The state of a new run."""
    return PrefilterState(config.initial_probability, config.initial_probability, {})


def sampling_probability(config: Settings, state: PrefilterState, id: int) -> float:
    """P(sampled) of the prompt of a problem, in (0, 1]."""
    streak = state.streaks.get(id, 0)
    p = state.p_easy if streak > 0 else state.p_hard
    return max(p ** abs(streak), config.min_sampled)


def uniform(seed: int, problem: Problem) -> float:
    """The random number of a visit, in [0, 1): of the seed, the problem's id and the epoch."""
    words = named_seed("prefilter", seed, problem.id, problem.epoch).generate_state(2)
    return int(words[0]) * 2.0**-32 + int(words[1] >> 11) * 2.0**-53


class PromptFilter:
    """Leaves prompts of one step out before they are sampled. Another one over the same source
    leaves out the same prompts.

    Args:
        state: before the step; None: every prompt is sampled.
        seed: of the run, 0 or more.
    """

    def __init__(self, config: Settings, state: PrefilterState | None, seed: int):
        self.config, self.state, self.seed = config, state, seed
        self.skipped: list[Problem] = []  # prompts left out, in order

    def next(self, source: Any) -> Problem:
        """Returns the next prompt to be sampled. Once `max_skips` are left out, no more are."""
        while True:
            (problem,) = source.take(1)
            if self.state is None:
                return problem
            probability = sampling_probability(self.config, self.state, problem.id)
            is_skipped = (
                len(self.skipped) < self.config.max_skips
                and uniform(self.seed, problem) >= probability
            )
            if not is_skipped:
                return problem
            self.skipped.append(problem)


def next_state(
    config: Settings,
    state: PrefilterState | None,
    sampled: Sequence[Group],
    skipped: Sequence[Problem],
    *,
    overlong_filter: bool = False,
) -> PrefilterState | None:
    """The state after a step.

    Args:
        sampled: the groups of the step before dynamic sampling's filter, in prompt order.
        skipped: the prompts left out among them.
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
        if 0 < sum(correct) < len(correct):
            continue
        if all(correct):
            easy, streaks[id] = easy + 1, max(before, 0) + 1
        else:
            hard, streaks[id] = hard + 1, min(before, 0) - 1
    # In the first epoch no prompt has a past: the shares say nothing about p.
    if not skipped and all(group.problem.epoch == 0 for group in sampled):
        return state._replace(streaks=streaks)
    n = len(sampled)
    return PrefilterState(
        _adjusted(config, state.p_easy, easy / n, config.target_easy),
        _adjusted(config, state.p_hard, hard / n, config.target_hard),
        streaks,
    )


def _adjusted(config: Settings, p: float, share: float, target: float) -> float:
    p += -config.probability_step if share >= target else config.probability_step
    return min(max(p, config.min_probability), config.max_probability)


def state_to_json(state: PrefilterState | None) -> dict[str, Any] | None:
    """The state as JSON values."""
    if state is None:
        return None
    return state._asdict() | {"streaks": sorted(state.streaks.items())}


def state_from_json(values: dict[str, Any] | None) -> PrefilterState | None:
    """The inverse of `state_to_json`."""
    if values is None:
        return None
    streaks = {id: streak for id, streak in values["streaks"]}
    return PrefilterState(values["p_easy"], values["p_hard"], streaks)
