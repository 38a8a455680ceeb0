"""Generated word problems of one or two steps, with whole numbers and answers from 1 to 40.

For small pretrained models, which solve few of them as they are and can learn to solve most of
those with one step. A level is a number of steps. Problems of the same kind and numbers are on one
side of the split, whatever names and things they are about.
"""

import operator
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dapo_jax.data.arithmetic import is_heldout

NAMES = ("Tom", "Mia", "Ben", "Ana", "Sam", "Lea", "Max", "Zoe", "Jack", "Nina", "Omar", "Ruth")
THINGS = ("apples", "books", "coins", "cards", "marbles", "pencils", "stickers", "shells", "eggs")
LARGEST = (10, 7, 5)  # of a, b and c; of larger numbers SmolLM2-135M gets many results wrong
LARGEST_ANSWER = 40
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
MOST_TRIES = 200  # for each problem; one in 2 succeeds, for held-out problems one in 9


class Kind(NamedTuple):
    """Problems that differ in names {x} and {y}, things {t} and numbers {a} > {b} and {c}."""

    text: str
    steps: str  # of the solution, "a - b, m + c"; m is the result of the step before

    def solve(self, a: int, b: int, c: int) -> tuple[str, int]:
        """Returns the equations of the solution as text, and the answer."""
        values, text = {"a": a, "b": b, "c": c}, ""
        for step in self.steps.split(", "):
            left, sign, right = step.split()
            x, y = values[left], values[right]
            values["m"] = OPERATIONS[sign](x, y)
            text += f"{x} {sign} {y} = {values['m']}. "
        return text, values["m"]


ONE_STEP = (
    Kind("{x} has {a} {t} and gets {b} more. How many {t} has {x} now?", "a + b"),
    Kind("{x} had {a} {t} and gave {b} to {y}. How many are left?", "a - b"),
    Kind("There are {c} boxes with {b} {t} in each. How many {t} is that?", "c * b"),
    Kind("{x} has {a} {t}. {y} has {b} more. How many {t} has {y}?", "a + b"),
    Kind(
        "There are {a} {t} on a table. {x} takes {b} away. How many {t} are still there?", "a - b"
    ),
    Kind("{x} saves {b} coins a day. How many is that in {c} days?", "b * c"),
    Kind("{x} has {a} coins and spends {b} on a book. How many are left?", "a - b"),
)
TWO_STEPS = (
    Kind("{x} has {a} {t}, buys {b} more and loses {c}. How many {t} has {x} now?", "a + b, m - c"),
    Kind(
        "{x} had {a} {t}, gave {b} to {y} and then found {c}. How many {t} has {x} now?",
        "a - b, m + c",
    ),
    Kind(
        "{x} has {c} bags with {b} {t} in each and {a} more {t}. How many {t} are there in all?",
        "c * b, m + a",
    ),
    Kind(
        "{x} buys {c} packs of {b} {t} and gives {a} {t} to {y}. How many {t} are left?",
        "c * b, m - a",
    ),
    Kind(
        "{x} has {a} {t} and {y} has {b} fewer. How many {t} do they have together?", "a - b, a + m"
    ),
    Kind(
        "There are {a} people on a bus. {b} get off and {c} get on. How many are on it now?",
        "a - b, m + c",
    ),
    Kind(
        "{x} reads {b} pages a day for {c} days of a book of {a} pages. How many are left?",
        "b * c, a - m",
    ),
)
KINDS = {1: ONE_STEP, 2: TWO_STEPS}


def generate_problems(
    num: int, *, levels: Sequence[int], heldout: bool, seed: int
) -> list[tuple[str, str]]:
    """Returns `num` distinct (prompt, answer) pairs of one side of the split, with equal shares of
    the levels and of their kinds; raises ValueError where a kind has too few problems."""
    found = _generated(num, levels, heldout, seed)
    return [(text, str(answer)) for text, _, answer in found]


def generate_solved(
    num: int, *, levels: Sequence[int], heldout: bool, seed: int
) -> list[tuple[str, str]]:
    """Returns the same problems, each with a written solution in place of its answer."""
    found = _generated(num, levels, heldout, seed)
    return [(text, f"{equations}The answer is {answer}.") for text, equations, answer in found]


def _generated(
    num: int, levels: Sequence[int], heldout: bool, seed: int
) -> list[tuple[str, str, int]]:
    """Returns (problem, equations of its solution, answer) of each."""
    rng = np.random.default_rng([seed, int(heldout)])
    problems: dict[str, tuple[str, int]] = {}
    tries = 0
    while len(problems) < num:
        tries += 1
        if tries > MOST_TRIES * num:
            raise ValueError(f"there are hardly more than {len(problems)} distinct problems")
        kinds = KINDS[levels[len(problems) % len(levels)]]
        kind = kinds[len(problems) // len(levels) % len(kinds)]
        a, b, c = (int(n) for n in rng.integers((3, 2, 2), LARGEST, endpoint=True))
        equations, answer = kind.solve(a, b, c)
        if b >= a or not 0 < answer <= LARGEST_ANSWER or _is_heldout(kind, a, b, c) != heldout:
            continue
        x, y = rng.choice(NAMES, 2, replace=False)
        text = kind.text.format(x=x, y=y, t=rng.choice(THINGS), a=a, b=b, c=c)
        problems[text] = equations, answer
    found = [(text, *solved) for text, solved in problems.items()]
    return [found[i] for i in rng.permutation(num)]


def _is_heldout(kind: Kind, a: int, b: int, c: int) -> bool:
    """Returns whether a kind with the numbers that it uses is held out, whatever it is about."""
    return is_heldout(kind.text.format(x="", y="", t="", a=a, b=b, c=c))
