"""Rewards: what scorers return, and how scores add up."""

import collections
import json
import types

import numpy as np
import pytest

from dapo_jax.data.dataset import check_scorers
from dapo_jax.rewards import scorers
from dapo_jax.rewards import types as reward
from dapo_jax.rewards.types import Rubric, Score, as_score, parse_scorers, verdict
from dapo_jax.setup import reward_pool
from dapo_jax.types import UserError, Verdict
from tests.support.helpers import SHARED, tiny_config


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
    assert scorers.load_scorer("dapo_jax.rewards.scorers:math_dapo").function is scorers.math_dapo
    file = tmp_path / "mine.py"
    file.write_text("def always(response, answer):\n    return True\n")
    assert scorers.load_scorer(f"{file}:always")(reward.Task((), "", "")) == reward.Score(True)


def test_a_scorers_file_may_define_dataclasses(tmp_path):
    """Their annotations are texts here, which Python looks up in the file's module."""
    file = tmp_path / "mine.py"
    file.write_text(
        "from __future__ import annotations\n"
        "import dataclasses\n"
        "@dataclasses.dataclass\n"
        "class Found:\n"
        "    text: str\n"
        "def same(response, answer):\n"
        "    return Found(response) == Found(answer)\n"
    )
    assert scorers.load_scorer(f"{file}:same")(reward.Task((), "a", "a")) == reward.Score(True)


@pytest.mark.parametrize(
    "name, message",
    [
        ("exactmatch", "not one of exact_match, math_dapo"),
        ("nowhere_at_all:f", "cannot be imported"),
        ("dapo_jax.rewards.types:f", "no function 'f'"),
        ("/nowhere/at_all.py:f", "no file"),
        (":f", "not one of"),
        ("./mine:f", "neither a module nor a file that ends in .py"),
        ("tests.support.scorers:of_a_server", "is an async function"),
        ("builtins:max", "does not say its arguments"),
        ("tests.support.scorers:of_three", r"takes \(response, answer, metadata\); a scorer takes"),
        ("tests.support.scorers:of_any_number", r"takes \(\); a scorer takes \(text, answer\) or"),
    ],
)
def test_wrong_scorers_are_reported(name, message):
    with pytest.raises(UserError, match=r"config\.reward\.scorer.*" + message):
        scorers.load_scorer(name)


@pytest.mark.parametrize("line", ["import helpers_next_to_it", "def f(text, answer) return 1"])
def test_a_scorers_file_that_cannot_be_imported_is_reported(tmp_path, line):
    file = tmp_path / "mine.py"
    file.write_text(f"{line}\n")
    (tmp_path / "helpers_next_to_it.py").touch()
    with pytest.raises(UserError, match=r"^config\.reward\.scorer: .*mine\.py cannot be imported"):
        scorers.load_scorer(f"{file}:f")


@pytest.mark.parametrize("kind", ["train", "heldout"])
def test_the_field_of_a_wrong_scorer_is_named(kind):
    config = tiny_config(**{f"data__{kind}__sums__scorer": "math_dapo + 0.1 * no_such"})
    with pytest.raises(UserError, match=rf"^config\.data\.{kind}\.sums\.scorer: 'no_such' is not"):
        check_scorers(config)


def test_the_pool_of_a_run_has_its_scorers_and_the_comparison_that_votes_need():
    """Only held-out answers are voted on."""
    scorer = "math_verify + 0.1 * answer_format"
    heldout = reward_pool(tiny_config(data__heldout__sums__scorer=scorer)).names
    equal = "dapo_jax.rewards.scorers:equivalent_by_math_verify"
    assert set(heldout) == {"exact_match", "math_verify", "answer_format", equal}
    train = reward_pool(tiny_config(data__train__sums__scorer=scorer)).names
    assert set(train) == set(heldout) - {equal}


@pytest.mark.parametrize(
    "value, score",
    [
        (True, Score(True)),
        (np.bool_(False), Score(False)),
        (2, Score(True, reward=2.0)),
        (0, Score(False, reward=0.0)),
        (-0.5, Score(False, reward=-0.5)),
        (np.float32(0.5), Score(True, reward=0.5)),
        (np.int64(-1), Score(False, reward=-1.0)),
        ((-1, True, None), Score(True, reward=-1.0)),
        ((np.float32(0.5), np.bool_(False), {}), Score(False, reward=0.5)),
        (
            (1.0, 1, {"extracted": 7, "steps": 3}),
            Score(True, "7", reward=1.0, extra={"steps": 3}),
        ),
        ((1.0, False, {"extracted": None}), Score(False, None, reward=1.0)),
        (
            {"correct": False, "reward": 0.25, "extracted": "x", "format": True},
            Score(False, "x", reward=0.25, extra={"format": True}),
        ),
        (
            types.MappingProxyType(collections.OrderedDict(reward=0, correct=1)),
            Score(True, reward=0.0),
        ),
        (Score(True, "x"), Score(True, "x")),
        (
            Score(np.True_, 7, [(np.int64(3), 1), (5, np.float32(-1))], np.float32(0.5), {}),
            Score(True, "7", ((3, 1.0), (5, -1.0)), 0.5, {}),
        ),
    ],
)
def test_what_a_scorer_may_return(value, score):
    found = as_score(value)
    assert found == score
    plain = [type(found.correct), *(type(end) for end, _ in found.steps)]
    assert plain == [bool] + [int] * len(found.steps)
    assert found.reward is None or type(found.reward) is float
    json.dumps(found, allow_nan=False)


def test_what_else_a_scorer_says_is_made_json():
    extra = {"n": np.int64(3), "x": np.float32(0.5), "flag": np.True_, "inner": {"list": (1, 2)},
             "a set": {1}, 5: None}  # fmt: skip
    wanted = {"n": 3, "x": 0.5, "flag": True, "inner": {"list": [1, 2]}, "a set": "{1}", "5": None}
    for value in ((1.0, True, extra), Score(True, extra=extra)):
        found = as_score(value).extra
        assert found == wanted
        assert isinstance(found["x"], float) and found["flag"] is True, "numbers, not their texts"
    assert extra["n"] == 3 and len(extra) == 6, "the scorer's own is left alone"


@pytest.mark.parametrize(
    "value, wanted",
    [
        (None, "not NoneType"),
        ("1", "not str"),
        ([1.0, True, {}], "not list"),
        ((1.0, True), "not tuple"),
        ((1.0, True, {}, 1), "not tuple"),
        ({"reward": 1.0}, "not dict"),
        ({"correct": True}, "not dict"),
        (np.array([1.0]), "not ndarray"),
        (float("nan"), "reward is nan"),
        (np.float64("inf"), "reward is inf"),
        ((float("-inf"), True, None), "reward is -inf"),
        ({"reward": float("nan"), "correct": True}, "reward is nan"),
        (Score(True, reward=float("nan")), "reward is nan"),
        (Score(True, steps=((1, 1.0), (3, float("nan")))), "reward is nan"),
        (Score(True, steps=((3, float("inf")),)), "reward is inf"),
        (Score(-1.0), "correct is True or False"),  # type: ignore[arg-type]
        ((-1.0, -1.0, None), "correct is True or False .1 or 0., not -1.0"),
        ({"reward": 1.0, "correct": 0.5}, "correct is True or False .1 or 0., not 0.5"),
        ({"reward": 1.0, "correct": float("nan")}, "correct is True or False"),
        ({"reward": 1.0, "correct": None}, "correct is True or False"),
        ({"reward": 1.0, "correct": "yes"}, "correct is True or False"),
        ((None, True, None), "NoneType"),
        (("much", True, None), "much"),
        ((1.0, True, [1]), "a scorer's extra is a mapping, not list"),
        (Score(True, extra=[1]), "a scorer's extra is a mapping, not list"),
        ((1.0, True, {"a": 1.0, "x": float("nan")}), "extra is .*'x': nan.*: .* JSON compliant"),
        ((1.0, True, {"x": np.float32("inf")}), "extra is .*'x': .*inf.*: .* JSON compliant"),
        ((1.0, True, {"x": {"y": [float("nan")]}}), "extra is .*'y': .*nan.*: .* JSON compliant"),
        (Score(True, steps=(0.5, 1.0)), "steps are pairs .characters, reward., not .0.5, 1.0."),  # type: ignore[arg-type]
        (Score(True, steps=((3, "much"),)), "steps are pairs"),  # type: ignore[arg-type]
        (Score(True, steps=((1, 1.0, 2),)), "steps are pairs"),  # type: ignore[arg-type]
        ((1.0, True, {("a", "b"): 1}), "keys must be"),
    ],
)
def test_what_is_no_score(value, wanted):
    with pytest.raises((TypeError, ValueError), match=wanted):
        as_score(value)


RUBRIC = Rubric((("first", 1.0), ("second", 0.5), ("third", -2.0)), 3.0, -1.0)


@pytest.mark.parametrize(
    "scores, correct, worth",
    [
        # 1 and -1 of the config are 3 and -1 here, where a scorer has no reward of its own.
        ([Score(True), Score(True), Score(True)], True, 3 + 0.5 * 3 - 2 * 3),
        ([Score(False), Score(True), Score(False)], False, -1 + 0.5 * 3 - 2 * -1),
        ([Score(True), Score(False), Score(True, reward=0.25)], True, 3 + 0.5 * -1 - 2 * 0.25),
        ([Score(False, reward=0.0), Score(True), Score(True)], False, 0 + 0.5 * 3 - 2 * 3),
        ([Score(True, reward=-9.0), Score(False), Score(False)], True, -9 + 0.5 * -1 - 2 * -1),
    ],
)
def test_the_reward_is_the_weighted_sum_and_the_first_decides(scores, correct, worth):
    found = verdict(RUBRIC, scores)
    assert (found.correct, found.reward, found.note) == (correct, pytest.approx(worth), "")


def test_a_verdict_holds_what_the_scorers_say():
    scores = [
        Score(False, None, (), None, {"a": 1, "b": 1}),
        Score(True, "second", ((2, 1.0),), 0.0, {"b": 2}),
        Score(True, "third", ((9, -1.0),), 0.0, None),
    ]
    found = verdict(RUBRIC, scores)
    assert found == Verdict(False, -1.0, None, "", ((2, 1.0),), {"a": 1, "b": 2}, (-1.0, 0.0, 0.0))
    assert verdict(RUBRIC, [Score(True, "x")] * 3).extracted == "x"
    assert verdict(RUBRIC, [Score(True)] * 3).extra is None
    with pytest.raises(ValueError):
        verdict(RUBRIC, scores[:2])


def test_a_response_without_scores_earns_the_least():
    """As if every scorer that can take something away had done so."""
    assert verdict(RUBRIC, "timeout") == Verdict(
        False, -1.5, note="timeout", rewards=(-1.0, -0.5, 0.0)
    )
    assert verdict(Rubric((("only", 1.0),), 1.0, -1.0), "error: x").reward == -1.0
    assert RUBRIC.names == ("first", "second", "third")


@pytest.mark.parametrize(
    "text, wanted",
    [
        ("math_dapo", (("math_dapo", 1.0),)),
        ("math_dapo + 0.1 * answer_format", (("math_dapo", 1.0), ("answer_format", 0.1))),
        ("  2 *  a  + -0.5 * b + c ", (("a", 2.0), ("b", -0.5), ("c", 1.0))),
        ("my/file.py:f + 1e-3 * m:g", (("my/file.py:f", 1.0), ("m:g", 0.001))),
        ("a+b", (("a+b", 1.0),)),  # a path may hold a plus; spaces make the sum
    ],
)
def test_scorers_with_weights(text, wanted):
    assert parse_scorers(text) == wanted


@pytest.mark.parametrize(
    "text, wanted",
    [
        ("", "'' is not a scorer"),
        (" ", "'' is not a scorer"),
        ("a + ", "'' is not a scorer"),
        ("a +  + b", "'' is not a scorer"),
        ("0 * a", r"'0 \* a' is not a scorer, nor weight \* scorer"),
        ("a + nan * b", r"'nan \* b' is not a scorer"),
        ("inf * a", r"'inf \* a' is not a scorer"),
        ("much * a", "could not convert string to float: 'much'"),
        ("2 * 3 * a", r"could not convert string to float: '2 \* 3'"),
        ("a + b + 0.5 * a", "a scorer is named twice"),
    ],
)
def test_what_is_no_sum_of_scorers(text, wanted):
    with pytest.raises(ValueError, match=wanted):
        parse_scorers(text)
