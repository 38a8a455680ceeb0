"""Rewards: the length punishment against the paper, the scorers against published verdicts."""

import json

import numpy as np
import pytest

from dapo_jax import reward, scorers
from dapo_jax.types import UserError
from tests.helpers import SHARED


def punishment_by_hand(length, longest, cache):
    """DAPO eq. 13, case by case."""
    if length <= longest - cache:
        return 0.0
    if length <= longest:
        return ((longest - cache) - length) / cache
    return -1.0


def test_soft_overlong_punishment_is_equation_13():
    lengths = np.arange(0, 130)
    got = reward.soft_overlong_punishment(
        lengths, max_response_tokens=100, buffer_tokens=30, penalty=1.0
    )
    np.testing.assert_allclose(got, [punishment_by_hand(n, 100, 30) for n in lengths])
    assert got[70] == 0 and got[100] == got[129] == -1 and got[85] == -0.5


def test_soft_overlong_punishment_scales_and_switches_off():
    settings = {"max_response_tokens": 100, "buffer_tokens": 30}
    half = reward.soft_overlong_punishment([85, 100], penalty=0.5, **settings)
    np.testing.assert_allclose(half, [-0.25, -0.5])
    settings["buffer_tokens"] = 0
    assert not reward.soft_overlong_punishment([85, 100], penalty=0.0, **settings).any()


@pytest.mark.parametrize(
    "text, answer, correct, extracted",
    [
        ("Answer: 12", "12", True, "12"),
        ("Answer: 13\n so Answer:  12 \nmore", "12", True, "12"),
        ("Answer: 12 or 13", "12", False, "12 or 13"),
        ("Answer:\n12", "12", False, None),
        ("12", "12", False, None),
        ("answer: 12", "12", False, None),
        ("Answer: ", "", False, None),
    ],
)
def test_exact_match(text, answer, correct, extracted):
    assert scorers.exact_match(text, answer) == reward.Score(correct, extracted)


@pytest.mark.parametrize(
    "text, correct",
    [
        ("Answer: 42", True),
        ("ANSWER : x = 42", True),
        ("Answer: $\\boxed{42}$", True),
        ("Answer: 42 degrees", True),
        ("Answer: 41\nAnswer: 42", True),
        ("Answer: 42.", False),
        ("Answer: 42.0", False),
        ("**Answer:** 42", False),
        ("\\boxed{42}", False),
        ("Answer: 42" + 300 * " ", False),  # only the last 300 characters are read
    ],
)
def test_math_dapo_faults_included(text, correct):
    assert scorers.math_dapo(text, "42").correct is correct


def test_math_dapo_agrees_with_the_reference():
    file = SHARED / "data" / "grader_cases" / "verl_math_dapo_oracle.json"
    if not file.exists():
        pytest.skip(f"the reference's verdicts are not there: {file}")
    cases = json.loads(file.read_text())
    assert len(cases) > 500
    for case in cases:
        score = scorers.math_dapo(case["solution_str"], case["ground_truth"])
        expected = case["default"]
        assert score.correct is expected["acc"], case
        assert (score.extracted or "[INVALID]") == expected["pred"], case


def test_scorers_by_name_module_and_file(tmp_path):
    assert scorers.load_scorer("exact_match").function is scorers.exact_match
    assert scorers.load_scorer("dapo_jax.scorers:math_dapo").function is scorers.math_dapo
    file = tmp_path / "mine.py"
    file.write_text("def always(response, answer):\n    return True\n")
    assert scorers.load_scorer(f"{file}:always")(reward.Task((), "", "")) == reward.Score(True)


@pytest.mark.parametrize(
    "name, message",
    [
        ("exactmatch", "not one of exact_match, math_dapo"),
        ("nowhere_at_all:f", "cannot be imported"),
        ("dapo_jax.reward:f", "no function 'f'"),
        ("/nowhere/at_all.py:f", "no file"),
        (":f", "not one of"),
    ],
)
def test_wrong_scorers_are_told(name, message):
    with pytest.raises(UserError, match=r"config\.reward\.scorer.*" + message):
        scorers.load_scorer(name)
