"""Aggregation of token losses to the loss of a mini-batch: sum_t w_t l_t / W.

Weights w and denominator W stay apart, so that the sums of micro-batches, packed rows and devices
add up to the same loss however the mini-batch was split. Only trained tokens count in W.

Deviation: DAPO's eq. 8 averages over the tokens of each group first ("token-mean-per-group"); the
default "token-mean" is over the mini-batch, as verl's current version.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Int


class Aggregation(NamedTuple):
    numerator_R: np.ndarray  # float64, w of every trained token of a response
    denominator: float  # W, at least 1e-8


class Counts(NamedTuple):
    """Trained tokens of a mini-batch, float64; a response without any counts nowhere."""

    tokens_R: np.ndarray  # n_i of each response
    group_tokens_R: np.ndarray  # trained tokens of the prompt of each response
    there_R: np.ndarray  # 1 where n_i > 0, else 0
    num_prompts: float  # Q, with a trained token
    num_responses: float  # R, with a trained token
    max_response_tokens: int  # L


# By the name in `config.objective.aggregation`: (w of each response's tokens, W).
AGGREGATIONS: dict[str, Callable[[Counts], tuple[np.ndarray, float]]] = {
    "token-mean": lambda c: (c.there_R, float(c.tokens_R.sum())),
    "token-mean-per-group": lambda c: (_over(c.there_R, c.group_tokens_R), c.num_prompts),
    "token-sum": lambda c: (c.there_R, 1.0),
    "seq-mean-token-mean": lambda c: (_over(c.there_R, c.tokens_R), c.num_responses),
    "seq-mean-token-sum": lambda c: (c.there_R, c.num_responses),
    "seq-mean-token-sum-norm": lambda c: (c.there_R, c.num_responses * c.max_response_tokens),
}


def aggregate(
    lengths_R: Int[np.ndarray, " R"],
    groups_R: Int[np.ndarray, " R"],
    *,
    aggregation: str,
    max_response_tokens: int,
) -> Aggregation:
    """Returns w of each response's tokens and W of the mini-batch.

        name                     w                         W
        token-mean               1                         sum_j n_j   DAPO over the mini-batch
        token-mean-per-group     1 / sum_{j in group} n_j  Q           DAPO eq. 8 as printed
        token-sum                1                         1
        seq-mean-token-mean      1 / n_i                   R           GRPO, 2402.03300, eq. 3
        seq-mean-token-sum       1                         R           Dr. GRPO, 2503.20783, eq. 2
        seq-mean-token-sum-norm  1                         R L         as its authors run it

    Q prompts, R responses of n_i trained tokens, L `max_response_tokens`. A response of n_i = 0 has
    w = 0 and counts nowhere.

    Args:
        lengths_R: n_i, trained tokens of each response of the mini-batch.
        groups_R: prompt of each response.
        aggregation: a name in AGGREGATIONS.
        max_response_tokens: the constant divisor of the last.
    """
    n_R = lengths_R.astype(np.float64)
    there_R = (n_R > 0).astype(np.float64)
    _, group_R = np.unique(groups_R, return_inverse=True)
    tokens_Q = np.bincount(group_R, weights=n_R)
    counts = Counts(
        tokens_R=n_R,
        group_tokens_R=tokens_Q[group_R],
        there_R=there_R,
        num_prompts=float((tokens_Q > 0).sum()),
        num_responses=float(there_R.sum()),
        max_response_tokens=max_response_tokens,
    )
    numerator_R, denominator = AGGREGATIONS[aggregation](counts)
    # Nothing to train on: every w is 0, and the loss is 0 rather than 0 / 0.
    return Aggregation(numerator_R, max(denominator, 1e-8))


def _over(there_R: np.ndarray, tokens_R: np.ndarray) -> np.ndarray:
    return there_R / np.maximum(tokens_R, 1.0)
