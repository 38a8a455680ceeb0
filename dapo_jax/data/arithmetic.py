"""Generated arithmetic: problems and text of mixed quality for the base model.

A problem lists terms to add, `Add: a=7 b=5 c=8`. A sound derivation keeps a running total,
` a=7:07 b=5:12 c=8:20`, and ends with `Answer: 20`. The difficulty is the number of terms.

The base model is fitted on what people write, not on what is right: answers given at once and
mostly wrong, derivations in which a line slips, and writers who do not trust their result and
start over, often past the length limit. Good derivations are within reach; reinforcement learning
has to find that they pay.
"""

import hashlib
import re
from collections.abc import Sequence

import numpy as np

from dapo_jax.rewards.scorers import exact_match
from dapo_jax.rewards.types import Score

LABELS = "abcdefghijk"
# Every text below is a sequence of these; `tokenizer` makes a token of each.
WORDS = ("Add:", "\n", ":", "Answer: ", " wait", *(f" {x}=" for x in LABELS), *"0123456789")
# Of those who write for the base model.
SHARE_GUESS = 0.6  # share of texts that answer at once, mostly wrong
GUESS_ACCURACY = 0.15  # share of those guesses that are right
SHARE_SLIP = 0.1  # probability that a line of a derivation slips
SHARE_RAMBLE = 0.6  # probability, at the end of a derivation, to start over instead
HELDOUT_SHARE = 5  # one problem in five, by its hash, belongs to the held-out side


def prompt_text(terms: Sequence[int]) -> str:
    return "Add:" + "".join(f" {x}={n}" for x, n in zip(LABELS, terms)) + "\n"


def is_heldout(terms: Sequence[int]) -> bool:
    """Which side of the split a problem is on. A function of the problem alone, so that the sides
    cannot overlap whatever is generated."""
    return hashlib.sha256(prompt_text(terms).encode()).digest()[0] % HELDOUT_SHARE == 0


def generate_problems(
    num: int, *, num_terms: Sequence[int], heldout: bool, seed: int
) -> list[tuple[str, str]]:
    """`num` distinct (prompt, answer) pairs of one side of the split, the levels in equal shares.

    Args:
        num_terms: the difficulty levels.
        heldout: which side of the split.

    Raises:
        ValueError: a level does not have that many distinct problems.
    """
    rng = np.random.default_rng([seed, int(heldout)])
    share = (1 if heldout else HELDOUT_SHARE - 1) / HELDOUT_SHARE
    for level in num_terms:
        # Below nine tenths of what there is, drawing until a new one comes stays quick.
        if num / len(num_terms) > 0.9 * share * 9**level:
            raise ValueError(
                f"{level} terms give about {share * 9**level:.0f} distinct problems; "
                f"{num} over {len(num_terms)} levels need {num / len(num_terms):.0f}"
            )
    seen: set[tuple[int, ...]] = set()
    while len(seen) < num:
        level = num_terms[len(seen) % len(num_terms)]
        terms = tuple(rng.integers(1, 10, level).tolist())
        if terms not in seen and is_heldout(terms) == heldout:
            seen.add(terms)
    # A set forgets the order in which the levels took turns; sorting makes the result repeatable.
    problems = sorted(seen)
    return [(prompt_text(t), str(sum(t))) for t in (problems[i] for i in rng.permutation(num))]


def derivation(terms: Sequence[int], rng: np.random.Generator) -> tuple[str, int]:
    """(running totals as text, last total); each line slips by 1 to 3 with probability
    SHARE_SLIP, and the lines after it build on the slip."""
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
    """(text, complete) as a writer of mixed quality would answer. An incomplete text rambles on
    past `max_tokens` and is to be cut there."""
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
    """`scorers.exact_match` with the steps of the response: a running total earns 1 where it is
    the one before it plus its term, else -1. A writer who starts over starts from 0. The last step
    is the answer, which ends with the response: 1 where it is correct, else -1."""
    steps, total = [], 0
    for step in re.finditer(r" ([a-k])=(\d):(\d+)", response):
        if step[1] == LABELS[0]:
            total = 0
        steps.append((step.end(), 1.0 if int(step[3]) == total + int(step[2]) else -1.0))
        total = int(step[3])
    score = exact_match(response, answer)
    steps.append((len(response), 1.0 if score.correct else -1.0))
    return score._replace(steps=tuple(steps))
