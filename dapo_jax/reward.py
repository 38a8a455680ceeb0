"""Rule-based rewards: what a response is worth, from its text and its length in tokens.

A scorer says whether a response is correct; correctness alone decides the filter of dynamic
sampling. The reward that the advantage sees adds the soft overlong punishment, which knows lengths
and not correctness. Nothing here imports JAX: scorers run in worker processes.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike


class Score(NamedTuple):
    """A scorer's verdict: is it correct, which answer did it read (None: it found none), and for
    process supervision, the steps of the response."""

    correct: bool
    extracted: str | None
    # (characters of the text up to the end of the step, its reward), in order.
    steps: tuple[tuple[int, float], ...] = ()


# (text of the response, reference answer) -> Score. A plain bool is accepted too; then the answers
# cannot be put to a vote and cons@k is not reported.
Scorer = Callable[[str, str], Score | bool]


def soft_overlong_punishment(
    lengths_G: ArrayLike, *, max_response_tokens: int, buffer_tokens: int, penalty: float
) -> np.ndarray:
    """The length reward of each response, float64 [G], from 0 down to -penalty.

        R(y) = 0                                  where |y| <= L_max - L_cache
               ((L_max - L_cache) - |y|) / L_cache   in between
               -1                                 where L_max < |y|

    Source: DAPO, arXiv:2503.14476, eq. 13, scaled by `penalty`.

    Args:
        lengths_G: response lengths in tokens, end-of-sequence token included.
        max_response_tokens: L_max.
        buffer_tokens: L_cache; 0 means no punishment.
        penalty: factor on the whole, 1 in the paper.
    """
    lengths_G = np.asarray(lengths_G, np.float64)
    if buffer_tokens == 0:
        return np.zeros_like(lengths_G)
    over_G = lengths_G - (max_response_tokens - buffer_tokens)
    return -penalty * np.clip(over_G / buffer_tokens, 0.0, 1.0)
