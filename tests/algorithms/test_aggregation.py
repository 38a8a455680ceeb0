"""Weights and denominators of the aggregations against their definitions."""

import math

import numpy as np
import pytest

from dapo_jax.algorithms.aggregation import AGGREGATIONS, aggregate

MEANS = ["token-mean", "token-mean-per-group", "seq-mean-token-mean"]
SUMS = ["token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
LENGTHS, GROUPS = np.array([3, 50, 1, 7, 7, 0, 0]), np.array([4, 4, 9, 9, 9, 9, 2])


def weights_by_hand(lengths, groups, aggregation):
    """Weight of a token of each response, responses without tokens left out before."""
    out = []
    for n, group in zip(lengths, groups):
        if aggregation == "token-mean":
            out.append(1 / sum(lengths))
        elif aggregation == "token-sum":
            out.append(1.0)
        elif aggregation == "seq-mean-token-sum":
            out.append(1 / len(lengths))
        elif aggregation == "seq-mean-token-sum-norm":
            out.append(1 / len(lengths) / 64)
        elif aggregation == "seq-mean-token-mean":
            out.append(1 / len(lengths) / n)
        else:
            of_group = sum(m for m, g in zip(lengths, groups) if g == group)
            out.append(1 / len(set(groups)) / of_group)
    return out


@pytest.mark.parametrize("aggregation", MEANS + SUMS)
def test_weights(aggregation):
    got = aggregate(LENGTHS, GROUPS, aggregation=aggregation, max_response_tokens=64)
    there = [i for i, n in enumerate(LENGTHS) if n]
    by_hand = weights_by_hand([LENGTHS[i] for i in there], [GROUPS[i] for i in there], aggregation)
    weights = got.numerator_R / got.denominator
    np.testing.assert_allclose(weights[there], by_hand, rtol=1e-12)
    assert not got.numerator_R[5:].any(), "a response without tokens counts nowhere"
    assert aggregation in SUMS or math.isclose((weights * LENGTHS).sum(), 1)


def test_an_unknown_aggregation_is_no_other_one():
    assert set(AGGREGATIONS) == {*MEANS, *SUMS}
    with pytest.raises(KeyError):
        aggregate(LENGTHS, GROUPS, aggregation="nonsense", max_response_tokens=64)


@pytest.mark.parametrize("aggregation", MEANS + SUMS)
def test_nothing_to_train_on_is_a_loss_of_zero(aggregation):
    for lengths, groups in (([], []), ([0, 0], [0, 1])):
        lengths, groups = np.array(lengths, int), np.array(groups, int)
        got = aggregate(lengths, groups, aggregation=aggregation, max_response_tokens=64)
        assert not got.numerator_R.any() and got.denominator > 0


@pytest.mark.parametrize("aggregation", sorted({*MEANS, *SUMS} - {"token-sum"}))
def test_denominators_of_parts_add_up(aggregation):
    """What a host needs to know of the others is one number."""
    parts = [slice(0, 2), slice(2, 7)]  # no group is torn apart
    settings = {"aggregation": aggregation, "max_response_tokens": 64}
    whole = aggregate(LENGTHS, GROUPS, **settings)
    cut = [aggregate(LENGTHS[part], GROUPS[part], **settings) for part in parts]
    assert sum(c.denominator for c in cut) == pytest.approx(whole.denominator, rel=1e-12)
    np.testing.assert_allclose(np.concatenate([c.numerator_R for c in cut]), whole.numerator_R)
