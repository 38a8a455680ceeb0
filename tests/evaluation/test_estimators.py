"""avg@k, pass@k and cons@k, against enumeration and cases computed by hand."""

import itertools
import math

import numpy as np
import pytest

from dapo_jax.evaluation.estimators import (
    avg_at_k,
    cons_at_k,
    pass_at_k,
    powers_up_to,
)


def test_avg_at_k_by_hand():
    correct_QK = [[True, False, False, False], [True, True, True, False]]
    assert avg_at_k(correct_QK).tolist() == [1 / 4, 3 / 4]
    assert avg_at_k([[True, False, False]]) == pytest.approx(1 / 3)


@pytest.mark.parametrize("n", [1, 2, 5, 6])
def test_pass_at_k_is_the_mean_over_all_subsets(n):
    correct_QK = np.arange(n) < np.arange(n + 1)[:, None]  # every count from 0 to n
    for k in range(1, n + 1):
        subsets = [list(subset) for subset in itertools.combinations(range(n), k)]
        wanted_Q = [np.mean([correct_K[s].any() for s in subsets]) for correct_K in correct_QK]
        for correct_K, wanted in zip(correct_QK, wanted_Q, strict=True):
            assert pass_at_k(correct_K[None], k) == pytest.approx(wanted, abs=1e-15)
        assert pass_at_k(correct_QK, k) == pytest.approx(np.array(wanted_Q), abs=1e-15)


@pytest.mark.parametrize("c", [1, 7, 5000, 9000, 9500])
def test_pass_at_k_where_binomials_overflow(c):
    # The paper's product form, in logarithms: C(10000, 1000) has 1410 digits.
    n, k = 10_000, 1000
    wanted = (
        -math.expm1(sum(math.log1p(-k / i) for i in range(n - c + 1, n + 1))) if n - c >= k else 1
    )
    assert pass_at_k((np.arange(n) < c)[None], k) == pytest.approx(wanted, rel=1e-10)


def test_pass_at_k_needs_k_samples():
    for k in (0, 3):
        with pytest.raises(AssertionError, match=f"pass@{k} of 2"):
            pass_at_k([[True, False]], k)


@pytest.mark.parametrize(
    "answers, right, wanted",
    [
        (["1", "2", "1", "3"], "1", 1.0),
        (["1", "2", "1", "3"], "2", 0.0),
        (["1", "2", "1", "2", "3"], "1", 1 / 2),  # two tie, one is right
        (["1", "2", "3"], "3", 1 / 3),
        (["1", "2", "3"], "4", 0.0),
        ([None, None, None, "1"], "1", 1.0),  # None never outvotes an answer
        ([None, None, "1", "2"], "1", 1 / 2),
        ([None, None], "1", 0.0),
        (["1"], "1", 1.0),
    ],
)
def test_cons_at_k_by_hand(answers, right, wanted):
    for order in set(itertools.permutations(answers)):
        correct = [[answer == right for answer in order]]
        assert cons_at_k([list(order)], correct) == wanted


def test_cons_at_k_is_the_expectation_of_a_random_tie_break():
    generator = np.random.default_rng(1)
    answers_QK = generator.integers(0, 4, (40, 6)).astype(str).tolist()
    right_Q = generator.integers(0, 4, 40).astype(str)
    wanted = []
    for answers_K, right in zip(answers_QK, right_Q, strict=True):
        most = max(map(answers_K.count, answers_K))
        tied = [a for a in "0123" if answers_K.count(a) == most]
        wanted.append(np.mean([a == right for a in tied]))
    correct_QK = np.array(answers_QK) == right_Q[:, None]
    assert cons_at_k(answers_QK, correct_QK) == pytest.approx(np.array(wanted), abs=1e-15)


def test_an_answer_judged_both_ways_has_the_share_that_is_right():
    """A scorer may look at more than the answer; two texts may both be right."""
    answers, correct = [["1", "1", "1", "2"]], [[True, False, False, True]]
    assert cons_at_k(answers, correct) == pytest.approx(1 / 3)
    assert cons_at_k([["1/2", "0.5", "3"]], [[True, True, False]]) == 2 / 3


def test_the_k_of_pass_at_k():
    assert [powers_up_to(n) for n in (1, 2, 6)] == [[1], [1, 2], [1, 2, 4, 6]]
