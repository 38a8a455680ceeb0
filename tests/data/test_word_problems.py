"""Generated word problems: their answers, and the split."""

import re

import pytest

from dapo_jax.config.schema import GENERATED
from dapo_jax.data import word_problems
from dapo_jax.data.dataset import GENERATORS
from dapo_jax.data.word_problems import KINDS, NAMES, THINGS, generate_problems

# Of Tom, Mia, eggs, a = 20, b = 5 and c = 3, worked out by hand; where c * b - a is negative no
# such problem is generated.
ANSWERS = {1: (25, 15, 15, 25, 15, 15, 15), 2: (22, 18, 35, -5, 35, 18, 5)}


def numbers(text):
    """The kind and the numbers of a problem: its text without names and things."""
    return re.sub("|".join((*NAMES, *THINGS)), "_", text)


@pytest.mark.parametrize("level", KINDS)
def test_the_answer_of_each_kind(level):
    assert tuple(kind.solve(20, 5, 3)[1] for kind in KINDS[level]) == ANSWERS[level]


def test_problems_are_distinct_repeatable_and_within_bounds():
    problems = generate_problems(1400, levels=(1, 2), heldout=False, seed=0)
    assert problems == generate_problems(1400, levels=(1, 2), heldout=False, seed=0)
    assert problems != generate_problems(1400, levels=(1, 2), heldout=False, seed=1)
    assert len(dict(problems)) == 1400
    assert all(1 <= int(answer) <= 40 for _, answer in problems)
    kinds = [re.sub(r"\d+", "#", numbers(text)) for text, _ in problems]
    assert {kinds.count(kind) for kind in kinds} == {100}  # 14 kinds of equal shares


def test_no_kind_with_the_same_numbers_is_on_both_sides():
    sides = [
        {numbers(text) for text, _ in generate_problems(n, levels=(1, 2), heldout=side, seed=seed)}
        for n, side, seed in ((1300, False, 0), (200, True, 1))
    ]
    assert not sides[0] & sides[1]


def test_the_config_knows_the_generators_and_their_levels():
    assert GENERATED.keys() == GENERATORS.keys()
    assert GENERATED["word_problems"] == tuple(KINDS)


def test_one_level_alone():
    texts = [text for text, _ in generate_problems(70, levels=(2,), heldout=True, seed=0)]
    first = {kind.text.split("{")[0] for kind in KINDS[2]}
    assert all(any(text.startswith(begin) for begin in first) for text in texts)
    assert not any("on a table" in text for text in texts)


def test_more_than_there_are_is_an_error(monkeypatch):
    monkeypatch.setattr(word_problems, "MOST_TRIES", 20)
    with pytest.raises(ValueError, match="hardly more than [0-9]+ distinct problems"):
        generate_problems(4000, levels=(1,), heldout=True, seed=0)
