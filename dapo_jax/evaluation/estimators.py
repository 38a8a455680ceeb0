"""Statistics of n samples per problem: avg@k, pass@k and cons@k.

Each returns one value per problem; the reported figure is their mean. verl reports best@k and
maj@k as bootstrap averages, which differ from these by resampling noise.
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


def _as_bool_QK(correct_QK: ArrayLike) -> np.ndarray:
    correct_QK = np.asarray(correct_QK)
    assert correct_QK.ndim == 2 and correct_QK.size, f"samples of shape {correct_QK.shape}"
    assert correct_QK.dtype == bool, f"correctness must be bool, not {correct_QK.dtype}"
    return correct_QK
