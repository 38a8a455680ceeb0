"""Group advantages against DAPO eq. 9 written as a loop."""

import math

import numpy as np
import pytest

from dapo_jax.advantage import group_advantages


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("rewards", [[1, -1, -1, 1], [1, -1.5, -2, 0.25, 1], [3.0, 1.0]])
def test_equation_9(rewards, ddof):
    mean = sum(rewards) / len(rewards)
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - ddof))
    expected = [(r - mean) / (std + 1e-6) for r in rewards]
    got = group_advantages(np.array(rewards), normalise_std=True, ddof=ddof)
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_without_standard_deviation():
    got = group_advantages(np.array([1.0, -1, -1, -1]), normalise_std=False, ddof=1)
    np.testing.assert_allclose(got, [1.5, -0.5, -0.5, -0.5])


@pytest.mark.parametrize("rewards", [[0.1] * 7, [-1.0], [2.0]])
def test_equal_rewards_and_lone_responses_teach_nothing(rewards):
    got = group_advantages(np.array(rewards), normalise_std=True, ddof=1)
    assert got.tolist() == [0.0] * len(rewards)
