"""Scores, rubrics and verdicts: from the results of scorers to the reward of a response.

Correctness alone decides the filter of dynamic sampling. The advantage sees the weighted sum of the
scorers' rewards and the soft overlong punishment. Nothing here imports JAX: scorers run in worker
processes.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dapo_jax.types import Verdict

CORRECT_REWARD = 1.0  # reward of a correct response where the scorer returns none


class Score(NamedTuple):
    """The result of one scorer for one response."""

    correct: bool
    extracted: str | None = None  # the answer read; None: no answer found
    # Process supervision: (characters of the text up to the end of the step, its reward), in order.
    steps: tuple[tuple[int, float], ...] = ()
    reward: float | None = None  # None: CORRECT_REWARD or config.reward.incorrect
    extra: dict[str, Any] | None = None  # further values, as JSON can hold them


class Task(NamedTuple):
    """A response to score."""

    scorers: tuple[str, ...]  # see `scorers.load_scorer`
    text: str
    answer: str
    token_ids: tuple[int, ...] = ()
    metadata: dict[str, Any] | None = None  # of the problem


# (text of the response, reference answer) -> Score; `scorers.load_scorer` accepts other forms.
Scorer = Callable[[str, str], Any]


class Rubric(NamedTuple):
    """The scorers of a source, with their weights and rewards."""

    scorers: tuple[tuple[str, float], ...]  # (name, weight); the first decides correctness
    correct_reward: float  # of a correct response where a scorer returns none
    incorrect_reward: float  # of any other

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.scorers)


def as_score(value: Any) -> Score:
    """Returns the result of a scorer as a `Score`.

    Args:
        value: a Score; a bool, the correctness; a number, the reward, correct where above 0;
            (reward, correct, extra); or a mapping with "reward", "correct" and other values. An
            "extracted" among these is the answer read, which cons@k counts.

    Raises:
        TypeError, ValueError: it is none of them, correctness is neither yes nor no, or a reward is
            not finite.
    """
    if isinstance(value, Score):
        try:
            steps = tuple((int(end), float(reward)) for end, reward in value.steps)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"a Score's steps are pairs (characters, reward), not {value.steps!r}"
            ) from error
        return _score(value.correct, value.extracted, steps, value.reward, value.extra)
    if isinstance(value, (bool, np.bool_)):
        return Score(bool(value))
    if isinstance(value, (int, float, np.number)):
        return _score(value > 0, None, (), value, None)
    if isinstance(value, Mapping) and {"reward", "correct"} <= value.keys():
        extra = {name: x for name, x in value.items() if name not in ("reward", "correct")}
        value = (value["reward"], value["correct"], extra)
    if isinstance(value, tuple) and len(value) == 3:
        reward, correct, extra = value
        score = _score(correct, None, (), float(reward), extra)
        others = dict(score.extra or {})
        extracted = others.pop("extracted", None)
        text = None if extracted is None else str(extracted)
        return score._replace(extracted=text, extra=others or None)
    raise TypeError(
        "a scorer returns a bool, a number, a Score, (reward, correct, extra) or a mapping with "
        f"'reward' and 'correct', not {type(value).__name__}"
    )


def _score(correct: Any, extracted: Any, steps: Any, reward: Any, extra: Any) -> Score:
    """Returns a score of plain Python values."""
    if correct not in (0, 1):
        raise TypeError(f"a scorer's correct is True or False (1 or 0), not {correct!r}")
    reward = None if reward is None else float(reward)
    for value in (reward, *(of_step for _, of_step in steps)):
        if value is not None and not math.isfinite(value):
            raise ValueError(f"the scorer's reward is {value}")
    if extra is not None:
        if not isinstance(extra, Mapping):
            raise TypeError(f"a scorer's extra is a mapping, not {type(extra).__name__}")
        # NumPy's numbers as numbers, so that their means are metrics; other values as text.
        plain = lambda x: x.item() if isinstance(x, np.generic) else str(x)
        try:
            extra = json.loads(json.dumps(dict(extra), default=plain, allow_nan=False))
        except ValueError as error:
            raise ValueError(f"a scorer's extra is {dict(extra)}: {error}") from error
    extracted = None if extracted is None else str(extracted)
    return Score(bool(correct), extracted, steps, reward, extra)


def verdict(rubric: Rubric, scores: Sequence[Score] | str) -> Verdict:
    """Returns the verdict on a response from the scores of its rubric.

    The reward is the sum of weight times reward over the scorers. Correctness and the answer read
    are the first scorer's, steps those of the first that gives any.

    Args:
        scores: one for each scorer, or the reason why there are none. Then each scorer counts as
            incorrect, and one with a negative weight as 0.
    """
    if isinstance(scores, str):
        rewards = [rubric.incorrect_reward * max(weight, 0.0) for _, weight in rubric.scorers]
        return _verdict(Score(False), rewards)._replace(note=scores)
    rewards, extra = [], {}
    for (_, weight), score in zip(rubric.scorers, scores, strict=True):
        own = rubric.correct_reward if score.correct else rubric.incorrect_reward
        rewards.append(weight * (own if score.reward is None else score.reward))
        extra |= score.extra or {}
    steps = next((score.steps for score in scores if score.steps), ())
    return _verdict(scores[0], rewards)._replace(steps=steps, extra=extra or None)


def _verdict(first: Score, rewards: Sequence[float]) -> Verdict:
    several = tuple(rewards) if len(rewards) > 1 else ()
    return Verdict(first.correct, sum(rewards), first.extracted, rewards=several)


def parse_scorers(text: str) -> tuple[tuple[str, float], ...]:
    """Returns (name, weight) of each scorer of a field such as "math_dapo + 0.1 * answer_format".

    Raises:
        ValueError: the text is not such a sum.
    """
    if not isinstance(text, str):
        raise ValueError("a scorer is named: built in, or 'path/to/file.py:function'")
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
