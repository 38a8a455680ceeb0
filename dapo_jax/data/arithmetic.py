"""Generated arithmetic: problems, and text of mixed quality for the base model.

A problem lists terms to add, `Add: a=7 b=5 c=8`; the number of terms is its difficulty. A sound
derivation keeps a running total, ` a=7:07 b=5:12 c=8:20`, and ends with `Answer: 20`. The base
model is fitted on guesses, mostly wrong, derivations that slip, and writers who start over, often
past the length limit. Reinforcement learning has to find that good derivations pay.
"""

import hashlib
import re
from collections.abc import Sequence

import numpy as np

from dapo_jax.rewards.scorers import exact_match
from dapo_jax.rewards.types import Score

LABELS = "abcdefghijk"
# The tokens of every text below.
WORDS = ("Add:", "\n", ":", "Answer: ", " wait", *(f" {x}=" for x in LABELS), *"0123456789")
# The base model's text: probabilities of an answer at once, that it is right, that a line of a
# derivation slips, and that a writer starts over at the end of one.
SHARE_GUESS, GUESS_ACCURACY, SHARE_SLIP, SHARE_RAMBLE = 0.6, 0.15, 0.1, 0.6
HELDOUT_ONE_IN = 5  # one problem in five, by its hash, is held out


def prompt_text(terms: Sequence[int]) -> str:
    return "Add:" + "".join(f" {x}={n}" for x, n in zip(LABELS, terms)) + "\n"


def is_heldout(text: str) -> bool:
    """Returns whether problems of this text are held out. It is a function of the text alone, so
    the sides of the split cannot overlap."""
    return hashlib.sha256(text.encode()).digest()[0] % HELDOUT_ONE_IN == 0


def generate_problems(
    num: int, *, levels: Sequence[int], heldout: bool, seed: int
) -> list[tuple[str, str]]:
    """Returns `num` distinct (prompt, answer) pairs of one side of the split, with equal shares of
    the numbers of terms `levels`; raises ValueError where a level has too few problems."""
    rng = np.random.default_rng([seed, int(heldout)])
    share = (1 if heldout else HELDOUT_ONE_IN - 1) / HELDOUT_ONE_IN
    for level in levels:
        needed = num * levels.count(level) / len(levels)  # a level may be named twice
        # Up to nine tenths of them, rejection sampling stays quick.
        if needed > 0.9 * share * 9**level:
            raise ValueError(
                f"{level} terms give about {share * 9**level:.0f} distinct problems; "
                f"{num} over the levels need {needed:.0f}"
            )
    seen: set[tuple[int, ...]] = set()
    while len(seen) < num:
        level = levels[len(seen) % len(levels)]
        terms = tuple(rng.integers(1, 10, level).tolist())
        if terms not in seen and is_heldout(prompt_text(terms)) == heldout:
            seen.add(terms)
    # Sorted, because the order of a set is not repeatable.
    problems = sorted(seen)
    return [(prompt_text(t), str(sum(t))) for t in (problems[i] for i in rng.permutation(num))]


def derivation(terms: Sequence[int], rng: np.random.Generator) -> tuple[str, int]:
    """Returns the running totals as text, and the last total; later lines build on a slip."""
    text, total = "", 0
    for label, term in zip(LABELS, terms):
        total += term
        if rng.random() < SHARE_SLIP:
            total = max(0, total + int(rng.choice([-3, -2, -1, 1, 2, 3])))
        text += f" {label}={term}:{total:02d}"
    return text, total


def write_response(
    terms: Sequence[int], rng: np.random.Generator, max_tokens: int
) -> tuple[str, bool]:
    """Returns (text, complete) of mixed quality; incomplete texts are to be cut at `max_tokens`."""
    if rng.random() < SHARE_GUESS:
        answer = sum(terms)
        if rng.random() >= GUESS_ACCURACY:
            answer = max(0, answer + int(rng.choice([-1, 1])) * int(rng.integers(1, 10)))
        return f"Answer: {answer}", True
    text, total = derivation(terms, rng)
    tokens_per_pass = 5 * len(terms) + 1
    tokens = tokens_per_pass
    while rng.random() < SHARE_RAMBLE:
        again, total = derivation(terms, rng)
        text += " wait" + again
        tokens += tokens_per_pass
        if tokens > max_tokens:
            return text, False
    return f"{text}\nAnswer: {total}", True


def score_steps(response: str, answer: str) -> Score:
    """Scores by `exact_match`, and each step: a running total earns 1 where it is the previous one
    plus its term, else -1. The last step is the answer."""
    steps, total = [], 0
    for step in re.finditer(r" ([a-k])=(\d):(\d+)", response):
        if step[1] == LABELS[0]:
            total = 0
        steps.append((step.end(), 1.0 if int(step[3]) == total + int(step[2]) else -1.0))
        total = int(step[3])
    score = exact_match(response, answer)
    steps.append((len(response), 1.0 if score.correct else -1.0))
    return score._replace(steps=tuple(steps))
