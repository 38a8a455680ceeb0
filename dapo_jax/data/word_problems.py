"""Generated word problems of one or two steps, with whole numbers and answers from 1 to 40.

For small pretrained models, which solve few of them as they are and can learn to solve most of
those with one step. A level is a number of steps. Problems of the same kind and numbers are on one
side of the split, whatever names and things they are about.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from dapo_jax.data.arithmetic import is_heldout

NAMES = ("Tom", "Mia", "Ben", "Ana", "Sam", "Lea", "Max", "Zoe", "Jack", "Nina", "Omar", "Ruth")
THINGS = ("apples", "books", "coins", "cards", "marbles", "pencils", "stickers", "shells", "eggs")
LARGEST = (10, 7, 5)  # of a, b and c; of larger numbers SmolLM2-135M gets many results wrong
LARGEST_ANSWER = 40
MOST_TRIES = 200  # for each problem; one in 2 succeeds, for held-out problems one in 9


class Kind(NamedTuple):
    """Problems that differ in names {x} and {y}, things {t} and numbers {a} > {b} and {c}."""

    text: str
    answer: Callable[[int, int, int], int]


ONE_STEP = (
    Kind("{x} has {a} {t} and gets {b} more. How many {t} has {x} now?", lambda a, b, c: a + b),
    Kind("{x} had {a} {t} and gave {b} to {y}. How many are left?", lambda a, b, c: a - b),
    Kind("There are {c} boxes with {b} {t} in each. How many {t} is that?", lambda a, b, c: c * b),
    Kind("{x} has {a} {t}. {y} has {b} more. How many {t} has {y}?", lambda a, b, c: a + b),
    Kind(
        "There are {a} {t} on a table. {x} takes {b} away. How many {t} are still there?",
        lambda a, b, c: a - b,
    ),
    Kind("{x} saves {b} coins a day. How many is that in {c} days?", lambda a, b, c: c * b),
    Kind("{x} has {a} coins and spends {b} on a book. How many are left?", lambda a, b, c: a - b),
)
TWO_STEPS = (
    Kind(
        "{x} has {a} {t}, buys {b} more and loses {c}. How many {t} has {x} now?",
        lambda a, b, c: a + b - c,
    ),
    Kind(
        "{x} had {a} {t}, gave {b} to {y} and then found {c}. How many {t} has {x} now?",
        lambda a, b, c: a - b + c,
    ),
    Kind(
        "{x} has {c} bags with {b} {t} in each and {a} more {t}. How many {t} are there in all?",
        lambda a, b, c: c * b + a,
    ),
    Kind(
        "{x} buys {c} packs of {b} {t} and gives {a} {t} to {y}. How many {t} are left?",
        lambda a, b, c: c * b - a,
    ),
    Kind(
        "{x} has {a} {t} and {y} has {b} fewer. How many {t} do they have together?",
        lambda a, b, c: a + a - b,
    ),
    Kind(
        "There are {a} people on a bus. {b} get off and {c} get on. How many are on it now?",
        lambda a, b, c: a - b + c,
    ),
    Kind(
        "{x} reads {b} pages a day for {c} days of a book of {a} pages. How many are left?",
        lambda a, b, c: a - b * c,
    ),
)
KINDS = {1: ONE_STEP, 2: TWO_STEPS}


def generate_problems(
    num: int, *, levels: Sequence[int], heldout: bool, seed: int
) -> list[tuple[str, str]]:
    """Returns `num` distinct (prompt, answer) pairs of one side of the split, with equal shares of
    the levels and of their kinds; raises ValueError where a kind has too few problems."""
    rng = np.random.default_rng([seed, int(heldout)])
    problems: dict[str, str] = {}
    tries = 0
    while len(problems) < num:
        tries += 1
        if tries > MOST_TRIES * num:
            raise ValueError(f"there are hardly more than {len(problems)} distinct problems")
        kinds = KINDS[levels[len(problems) % len(levels)]]
        kind = kinds[len(problems) // len(levels) % len(kinds)]
        a, b, c = (int(n) for n in rng.integers((3, 2, 2), LARGEST, endpoint=True))
        answer = kind.answer(a, b, c)
        if b >= a or not 0 < answer <= LARGEST_ANSWER or _is_heldout(kind, a, b, c) != heldout:
            continue
        x, y = rng.choice(NAMES, 2, replace=False)
        problems[kind.text.format(x=x, y=y, t=rng.choice(THINGS), a=a, b=b, c=c)] = str(answer)
    found = list(problems.items())
    return [found[i] for i in rng.permutation(num)]


def _is_heldout(kind: Kind, a: int, b: int, c: int) -> bool:
    """Returns whether a kind with the numbers that it uses is held out, whatever it is about."""
    return is_heldout(kind.text.format(x="", y="", t="", a=a, b=b, c=c))
