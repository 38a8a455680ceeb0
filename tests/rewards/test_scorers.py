"""The scorers on cases by hand and on other graders' verdicts, and what hostile answers cost."""

import json
import time

import pytest

from dapo_jax.rewards import scorers
from dapo_jax.rewards.pool import RewardPool
from dapo_jax.rewards.types import Task
from tests.studies import fuzz_scorers
from tests.support.helpers import SHARED

CASES = SHARED / "data" / "grader_cases"


def cases(name):
    if not (CASES / name).exists():
        pytest.skip(f"other graders' verdicts are not there: {CASES / name}")
    text = (CASES / name).read_text()
    return (
        [json.loads(line) for line in text.splitlines()] if name.endswith("l") else json.loads(text)
    )


@pytest.mark.parametrize(
    "text, content",
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{\frac{1}{2}} and then \boxed{\sqrt{3}}", r"\sqrt{3}"),
        (r"\boxed 7$", "7"),
        (r"\boxed{4", None),
        ("42", None),
        (r"\boxed{}", ""),
        (r"so \boxed {42}. That is all", "42"),
        (r"\boxed5 and {x}", None),
        (r"\boxed{5} by the command \boxed", "5"),
        (r"\boxed{\{1, 2\}} and {3}", r"\{1, 2\}"),
    ],
)
def test_last_boxed(text, content):
    assert scorers.last_boxed(text) == content


@pytest.mark.parametrize(
    "name, response, answer, correct, extracted",
    [
        ("boxed", r"thus \boxed{1,234}", "1234", True, "1234"),
        ("boxed", r"thus \boxed{x = 5}" + "." * 500, "5", True, "5"),
        ("boxed", "Answer: 5", "5", False, None),
        ("math_dapo_strict_box", r"\boxed{5}" + "." * 100, "5", False, None),
        ("math_dapo_strict_box", r"\boxed{5.0}", "5", False, "5.0"),
        # The reference knows a box by its brace only.
        ("math_dapo_strict_box", r"\boxed 5", "5", False, None),
        ("math_dapo_strict_box", r"\boxed{5} and \boxed 6", "5", True, "5"),
        ("math_dapo_strict_box", r"\boxed{5} and \boxed{6", "5", False, None),
        ("math_dapo_boxed", r"\boxed 5", "5", False, None),
        ("math_dapo_boxed", r"\boxed{5}", "5", True, "5"),
        ("math_dapo_boxed", "Answer: 4\n" + r"\boxed{5}", "5", False, "4"),
        ("gsm8k", "5 + 4 = 9\n#### 9", "So she has 9.\n#### 9", True, "9"),
        ("gsm8k", "#### $1,234.", "1,234", True, "1234"),
        ("gsm8k", "The answer is 9", "9", False, None),
        ("gsm8k", "#### 9\n#### 8", "9", False, "8"),
        ("gsm8k", "#### 9\n#### none", "9", True, "9"),
        ("gsm8k", "#### 1234", "$1,234", True, "1234"),
        ("gsm8k", "#### -$5", "-5", True, "-5"),
        ("gsm8k", "#### $-5.", "-$5", True, "-5"),
        ("gsm8k", "#### 9.0", "9", False, "9.0"),
        ("gsm8k", "#### 9/2", "9", True, "9"),
        ("gsm8k", "#### 9", "9/2", False, "9"),
        ("gsm8k", "#### ,", "", False, None),
        ("gsm8k", "9", "9", False, None),
        ("last_number", "4 + 5 = 9 eggs.", "9", True, "9"),
        ("last_number", "It is 9, not 8", "9", False, "8"),
        ("last_number", "9007199254740992", "9007199254740993", False, "9007199254740992"),
        ("last_number", "9" * 400, "1" * 320, False, "9" * 400),
        ("last_number", "$1,234.50.", "1234.5", True, "1234.5"),
        ("last_number", "9 - 12 = -3", "-3", True, "-3"),
        ("last_number", "12-3", "3", True, "3"),
        ("last_number", "7,8", "8", True, "8"),
        ("last_number", "The roots are 3,2024", "2024", True, "2024"),
        ("last_number", "The roots are 3,2024", "4", False, "2024"),
        ("last_number", "1,234,5678", "8", False, "5678"),
        ("last_number", "1,234,567.", "1234567", True, "1234567"),
        ("last_number", "x = \u22125", "5", False, "-5"),
        ("last_number", "x = \u22125", "\u22125", True, "-5"),
        ("last_number", "It is $18.00.", "18", True, "18"),
        ("last_number", "-0.0", "0", True, "0"),
        ("last_number", "100", "100", True, "100"),
        ("last_number", "The answer is .5", "0.5", True, "0.5"),
        ("last_number", "It costs $.50.", "0.5", True, "0.5"),
        ("last_number", "x = -.25", "-0.25", True, "-0.25"),
        ("last_number", "It is...5", "5", True, "5"),
        ("last_number", "So it is.5", "5", True, "5"),
        ("last_number", "version 1.2.3", "3", True, "3"),
        ("last_number", "nine", "9", False, None),
        ("answer_format", "so\nAnswer: 5", "", True, None),
        ("answer_format", "Answer: 5\nor so", "", False, None),
        ("answer_format", r"it is \boxed{5}.", "", True, None),
        ("math_verify", r"it is $\frac12$", "0.5", True, r"\frac{1}{2}"),
        ("math_verify", r"\boxed{\{2, 1\}}", r"\{1, 2\}", True, r"\{2, 1\}"),
        ("math_verify", r"it is \boxed{6}", r"\$6", True, "6"),
        ("math_verify", r"it is \boxed{7}", "6", False, "7"),
        ("math_verify", "no idea", "6", False, None),
        ("math_verify", r"it is \boxed {6}", "6", True, "6"),
        ("math_verify", r"it is \boxed {7} of 6", "6", False, "7"),
    ],
)
def test_by_hand(name, response, answer, correct, extracted):
    score = scorers.SCORERS[name](response, answer)
    assert (score.correct, score.extracted) == (correct, extracted)


@pytest.mark.parametrize(
    "text, formula",
    [
        ("it is $5$ or $6$", "5"),
        ("it is $5", "itis5"),
        ("so $5$\nor $6$", "5\n6"),
        ("one\n$5$ of\n$$", "one\n5"),
    ],
)
def test_of_a_line_with_a_formula_the_formula_remains(text, formula):
    assert scorers.normalise_minerva(text) == formula


@pytest.mark.parametrize(
    "box, answer, correct",
    [
        ("4.5 \\times 10^{33}", "4.5e33", True),
        ("4.5e33", "4.5e33", True),
        ("4.5 \\times 10^{32}", "4.5e33", False),
        ("10^{-8}", "1e-8", True),
        ("0.00000001", "1E-8", True),
        ("0.0", "1e-8", False),
        ("0.00000003", "0.00000001", False),
        ("3 \\times 10^{-27}", "1.325e-27", False),
        ("0.333333", "0.3333333", True),  # to six decimals, as the library
    ],
)
def test_math_verify_reads_powers_of_ten_and_small_numbers(box, answer, correct):
    """As the references of Minerva Math, a quarter of which are written 4.5e33."""
    assert scorers.math_verify(f"\\boxed{{{box}}}", answer).correct is correct


def test_the_last_number_needs_a_number_to_compare_with():
    with pytest.raises(ValueError, match="needs a number as the answer, not '1/2'"):
        scorers.last_number("It is 2", "1/2")


@pytest.mark.parametrize("part", ["x", "\\text{", "\\textbf{", "\\overline{", "\\boxed{"])
def test_a_long_answer_is_normalised_in_linear_time(part):
    """An answer that ends at no brace: `\\boxed ` reads to the end of the response."""
    start = time.perf_counter()
    assert not scorers.boxed("\\boxed x" + part * 100_000, "1").correct
    assert time.perf_counter() - start < 2.0  # minutes by the published expressions


def test_math_verify_agrees_with_upstreams_own_expectations():
    """Every fourth case, and the two that set an option: LaTeX only, and not strict. The study
    `agreement` has all."""
    latex = [{"match_types": ["latex"]}, {"match_types": ["latex", "expr"], "strict": False}]
    found = cases("math_verify_cases.json")
    missed = [
        case["opts"]
        for i, case in enumerate(found)
        if (i % 4 == 0 or case["opts"] in latex)
        and scorers.math_verify(case["pred"], case["gold"]).correct != bool(case["expected"])
    ]
    assert missed == latex


def test_math_verify_judges_real_outputs_as_their_labels():
    """Every tenth, a few milliseconds each; test_agreement.py has the other scorers on all."""
    for row in cases("qwen_math_real_outputs.jsonl")[::10]:
        score = scorers.math_verify(row["response"], row["ground_truth"])
        assert score.correct == bool(int(row["math_verify"]))


def test_hostile_answers_cost_their_own_verdict():
    deep = "\\sqrt{" * 5000 + "2" + "}" * 5000
    texts = ["$9**9**9**9$", "$9^{9^{9^{9}}}$", deep, "\\boxed{" + deep + "}", "x" * 5_000_000]
    texts += ["$" + "1" * 1_000_000 + "$", "\x00", "\u202e\\boxed{1}", "\ud800", "$\\frac{1}{0}$"]
    texts += ["$99999!!!$", "\\boxed{1}"]
    with RewardPool(["math_verify"], workers=2, timeout_seconds=0.5) as pool:
        scored = pool.score([Task(("math_verify",), text, "1") for text in texts])
    right = [not isinstance(s.scores, str) and s.scores[0].correct for s in scored]
    assert right == [t.endswith("\\boxed{1}") for t in texts]
    assert not any(s.scores == "worker died" for s in scored)


def test_generated_strings_lose_no_worker_and_spoil_no_other_verdict(capsys):
    assert fuzz_scorers.main(["--strings=60", "--timeout_seconds=0.5"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("60 strings") == len(scorers.SCORERS)
    assert printed.count("right ones found wrong: 0 of 3") == len(scorers.SCORERS)
