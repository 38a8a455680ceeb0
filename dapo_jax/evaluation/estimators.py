"""Statistics of n samples per problem: avg@k, pass@k, cons@k and their bootstrap interval.

Each returns one value per problem; the quoted figure is their mean. The reference reports best@k
and maj@k as bootstrap averages, which differ from these by resampling noise.
"""

import collections
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike


def avg_at_k(correct_QK: ArrayLike) -> np.ndarray:
    """Returns the share of correct samples of each problem, float64 [Q].

    Args:
        correct_QK: bool, sample k of problem q is correct.
    """
    return _as_bool_QK(correct_QK).mean(axis=1)


def pass_at_k(correct_QK: ArrayLike, k: int) -> np.ndarray:
    """Returns the unbiased estimate of P(one of k samples is correct), float64 [Q].

        pass@k of problem q = 1 - C(n - c_q, k) / C(n, k)

    with n samples of it, c_q of them correct. Source: Chen et al. 2021, arXiv:2107.03374, eq. 1.

    Args:
        correct_QK: bool, sample of a problem is correct; n = its second dimension.
        k: from 1 to n.
    """
    correct_QK = _as_bool_QK(correct_QK)
    n = correct_QK.shape[1]
    assert 1 <= k <= n, f"pass@{k} of {n} samples"
    # In whole numbers until the one division: nothing overflows and nothing cancels.
    total, counts_Q = math.comb(n, k), correct_QK.sum(axis=1).tolist()
    return np.array([(total - math.comb(n - c, k)) / total for c in counts_Q])


def cons_at_k(answers_QK: Sequence[Sequence[str | None]], correct_QK: ArrayLike) -> np.ndarray:
    """Returns the credit of the majority vote over the answers to each problem, float64 [Q].

    The most frequent answers share the vote: the expectation of breaking the tie at random.

    Args:
        answers_QK: the answer of each sample; equal texts are one answer. None abstains. A problem
            on which all abstain has credit 0.
        correct_QK: bool, the sample is correct. The credit of an answer is the share of its samples
            that are correct: 0 or 1 if the scorer looks at the answer alone.
    """
    correct_QK = _as_bool_QK(correct_QK)
    credits = []
    for answers_K, correct_K in zip(answers_QK, correct_QK.tolist(), strict=True):
        votes: dict[str, list[bool]] = collections.defaultdict(list)
        for answer, correct in zip(answers_K, correct_K, strict=True):
            if answer is not None:
                votes[answer].append(correct)
        most = max(map(len, votes.values()), default=0)
        winners = [float(np.mean(of)) for of in votes.values() if len(of) == most]
        credits.append(sum(winners) / max(len(winners), 1))
    return np.array(credits)


def powers_up_to(n: int) -> list[int]:
    """Returns 1, 2, 4, ... and n itself: the k at which pass@k is reported."""
    return sorted({1 << i for i in range(n.bit_length()) if 1 << i <= n} | {n})


def bootstrap_interval(
    values_Q: ArrayLike, *, confidence: float = 0.95, num_resamples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """Returns the percentile interval (low, high) of the mean over problems, by bootstrap.

    Problems are resampled with replacement; the value of each is fixed. Source: Efron and
    Tibshirani 1993, section 13.3.

    Args:
        values_Q: one value per problem, such as its share of correct samples.
        confidence: probability covered, in (0, 1).
        num_resamples: 1 or more.
        seed: 0 or more; equal seeds give equal intervals.
    """
    values_Q = np.asarray(values_Q, np.float64)
    assert values_Q.ndim == 1 and values_Q.size, f"values of shape {values_Q.shape}"
    assert 0 < confidence < 1 and num_resamples >= 1, f"{confidence}, {num_resamples}"
    generator = np.random.default_rng(seed)
    # One resample at a time: an array of all of them would be num_resamples times the problems.
    means = [generator.choice(values_Q, values_Q.size).mean() for _ in range(num_resamples)]
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def _as_bool_QK(correct_QK: ArrayLike) -> np.ndarray:
    correct_QK = np.asarray(correct_QK)
    assert correct_QK.ndim == 2 and correct_QK.size, f"samples of shape {correct_QK.shape}"
    assert correct_QK.dtype == bool, f"correctness must be bool, not {correct_QK.dtype}"
    return correct_QK
