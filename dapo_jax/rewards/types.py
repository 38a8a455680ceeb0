"""Rule-based rewards: what a response is worth, from its text and its length in tokens.

A scorer says whether a response is correct; correctness alone decides the filter of dynamic
sampling. The reward that the advantage sees is the weighted sum of the scorers' rewards with the
soft overlong punishment, which knows lengths and not correctness. Nothing here imports JAX: scorers
run in worker processes.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from dapo_jax.types import Verdict

CORRECT = 1.0  # reward of a correct response by a scorer that gives none of its own


class Score(NamedTuple):
    """What one scorer says of one response."""

    correct: bool
    extracted: str | None = None  # the answer that it read; None: it found none
    # Process supervision: (characters of the text up to the end of the step, its reward), in order.
    steps: tuple[tuple[int, float], ...] = ()
    reward: float | None = None  # None: CORRECT or config.reward.incorrect
    extra: dict[str, Any] | None = None  # anything else, as JSON can hold it


class Task(NamedTuple):
    """A response to be scored."""

    scorers: tuple[str, ...]  # see `scorers.load_scorer`
    text: str
    answer: str
    token_ids: tuple[int, ...] = ()
    metadata: dict[str, Any] | None = None  # of the problem


# A scorer of this project: (text of the response, reference answer) -> Score. See
# `scorers.load_scorer` for what else is accepted.
Scorer = Callable[[str, str], Any]


class Rubric(NamedTuple):
    """How the responses to the problems of a source are judged."""

    scorers: tuple[tuple[str, float], ...]  # (name, weight); the first decides correctness
    correct: float  # reward by a scorer that gives none of its own, for a correct response
    incorrect: float  # for any other

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.scorers)


def as_score(value: Any) -> Score:
    """What a scorer returned as a `Score`.

    Args:
        value: a Score; a bool, whether it is correct; a number, the reward, correct where it is
            above 0; (reward, correct, extra), or a mapping with "reward", "correct" and whatever
            else. An "extracted" in `extra` is the answer that the scorer read, which cons@k counts.

    Raises:
        TypeError, ValueError: it is none of them.
    """
    if isinstance(value, Score):
        steps = tuple((int(end), float(reward)) for end, reward in value.steps)
        reward = None if value.reward is None else _finite(value.reward)
        extracted = _text(value.extracted)
        return Score(bool(value.correct), extracted, steps, reward, _plain(value.extra))
    if isinstance(value, (bool, np.bool_)):
        return Score(bool(value))
    if isinstance(value, (int, float, np.number)):
        return Score(bool(value > 0), reward=_finite(value))
    if isinstance(value, Mapping) and {"reward", "correct"} <= value.keys():
        extra = {name: x for name, x in value.items() if name not in ("reward", "correct")}
        value = (value["reward"], value["correct"], extra)
    if isinstance(value, tuple) and len(value) == 3:
        reward, correct, extra = value
        extra = _plain(extra)
        extracted = None if extra is None else _text(extra.pop("extracted", None))
        return Score(bool(correct), extracted, reward=_finite(reward), extra=extra or None)
    raise TypeError(
        f"a scorer returns a bool, a number, a Score, (reward, correct, extra) or a mapping with "
        f"'reward' and 'correct', not {type(value).__name__}"
    )


def _finite(reward: Any) -> float:
    reward = float(reward)
    if not math.isfinite(reward):
        raise ValueError(f"the scorer's reward is {reward}")
    return reward


def _plain(extra: Any) -> dict[str, Any] | None:
    if extra is None:
        return None
    if not isinstance(extra, Mapping):
        raise TypeError(f"a scorer's extra is a mapping, not {type(extra).__name__}")
    return json.loads(json.dumps(dict(extra), default=_as_json, allow_nan=False))


def _as_json(value: Any) -> Any:
    """NumPy's numbers as numbers, so that their means are metrics; anything else as text."""
    return value.item() if isinstance(value, np.generic) else str(value)


def _text(extracted: Any) -> str | None:
    return None if extracted is None else str(extracted)


def verdict(rubric: Rubric, scores: Sequence[Score] | str) -> Verdict:
    """The verdict on a response from what each scorer of the rubric said of it.

    The reward is the sum of weight times reward over the scorers. Correctness and the answer read
    are the first scorer's, steps those of the first that gives any.

    Args:
        scores: one for each scorer, or why there are none.
    """
    if isinstance(scores, str):
        return _verdict(
            Score(False), [rubric.incorrect * max(weight, 0.0) for _, weight in rubric.scorers]
        )._replace(note=scores)
    rewards = []
    for (_, weight), score in zip(rubric.scorers, scores, strict=True):
        own = rubric.correct if score.correct else rubric.incorrect
        rewards.append(weight * (own if score.reward is None else score.reward))
    steps = next((score.steps for score in scores if score.steps), ())
    extra: dict[str, Any] = {}
    for score in scores:
        extra |= score.extra or {}
    return _verdict(scores[0], rewards)._replace(steps=steps, extra=extra or None)


def _verdict(first: Score, rewards: Sequence[float]) -> Verdict:
    several = tuple(rewards) if len(rewards) > 1 else ()
    return Verdict(first.correct, sum(rewards), first.extracted, rewards=several)


def soft_overlong_punishment(
    lengths_G: ArrayLike, *, max_response_tokens: int, buffer_tokens: int, penalty: float
) -> np.ndarray:
    """The length reward of each response, float64 [G], from 0 down to -penalty.

        R(y) = 0                                  where |y| <= L_max - L_cache
               ((L_max - L_cache) - |y|) / L_cache   in between
               -1                                 where L_max < |y|

    Source: DAPO, arXiv:2503.14476, eq. 13, scaled by `penalty`.

    Args:
        lengths_G: response lengths in tokens, end-of-sequence token included.
        max_response_tokens: L_max.
        buffer_tokens: L_cache; 0 means no punishment.
        penalty: factor on the whole, 1 in the paper.
    """
    lengths_G = np.asarray(lengths_G, np.float64)
    if buffer_tokens == 0:
        return np.zeros_like(lengths_G)
    over_G = lengths_G - (max_response_tokens - buffer_tokens)
    return -penalty * np.clip(over_G / buffer_tokens, 0.0, 1.0)


def parse_scorers(text: str) -> tuple[tuple[str, float], ...]:
    """(name, weight) of each scorer of a `scorer` field: "math_dapo", or several with weights,
    "math_dapo + 0.1 * answer_format".

    Raises:
        ValueError: the text is not such a sum.
    """
    found = []
    for term in text.split(" + "):
        weight, times, name = term.rpartition("*")
        value = float(weight.strip()) if times else 1.0  # float raises with what it was given
        if not name.strip() or not math.isfinite(value) or value == 0:
            raise ValueError(f"{term.strip()!r} is not a scorer, nor weight * scorer")
        found.append((name.strip(), value))
    if len(dict(found)) < len(found):
        raise ValueError("a scorer is named twice")
    return tuple(found)
