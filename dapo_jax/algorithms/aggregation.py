"""Aggregation of token losses to the loss of a mini-batch: sum_t w_t l_t / W.

Weights w and denominator W stay apart, so that the sums of micro-batches, packed rows and devices
add up to the same loss however the mini-batch was split. Only trained tokens count in W.

Deviation: DAPO's eq. 8 averages over the tokens of each group first ("token-mean-per-group"); the
default "token-mean" is over the mini-batch, as verl's current version.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int


class Aggregation(NamedTuple):
    numerator_R: np.ndarray  # float64, w of every trained token of a response
    denominator: float  # W, at least 1e-8


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
        aggregation: one of the names.
        max_response_tokens: the constant divisor of the last.
    """
    n_R = lengths_R.astype(np.float64)
    there_R = n_R > 0
    ones_R = there_R.astype(np.float64)
    R = float(there_R.sum())
    if aggregation == "token-mean":
        numerator_R, denominator = ones_R, n_R.sum()
    elif aggregation == "token-sum":
        numerator_R, denominator = ones_R, 1.0
    elif aggregation == "seq-mean-token-sum":
        numerator_R, denominator = ones_R, R
    elif aggregation == "seq-mean-token-sum-norm":
        numerator_R, denominator = ones_R, R * max_response_tokens
    elif aggregation == "seq-mean-token-mean":
        numerator_R, denominator = ones_R / np.maximum(n_R, 1.0), R
    else:
        _, group_R = np.unique(groups_R, return_inverse=True)
        tokens_Q = np.bincount(group_R, weights=n_R)
        numerator_R = ones_R / np.maximum(tokens_Q[group_R], 1.0)
        denominator = float((tokens_Q > 0).sum())
    # Nothing to train on: every w is 0, and the loss is 0 rather than 0 / 0.
    return Aggregation(numerator_R, max(float(denominator), 1e-8))
