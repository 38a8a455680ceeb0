"""Bootstrap intervals, against enumeration of all resamples and cases computed by hand."""

import itertools

import numpy as np

from dapo_jax.utils.bootstrap import bootstrap_interval


def test_bootstrap_interval_of_two_values_is_exact():
    # Resamples of (0, 1) have mean 0, 1/2, 1 with probability 1/4, 1/2, 1/4.
    assert bootstrap_interval([0.0, 1.0]) == (0.0, 1.0)
    assert bootstrap_interval([0.0, 1.0], level=0.4) == (0.5, 0.5)


def test_bootstrap_interval_agrees_with_enumeration():
    values = [0.0, 0.1, 0.5, 1.0]
    means = [np.mean(resample) for resample in itertools.product(values, repeat=4)]
    low, high = bootstrap_interval(values, level=0.8, resamples=20_000, seed=3)
    # Within one percent of probability of the exact quantiles, which are steps.
    assert np.quantile(means, 0.09) <= low <= np.quantile(means, 0.11)
    assert np.quantile(means, 0.89) <= high <= np.quantile(means, 0.91)


def test_bootstrap_interval_repeats_and_degenerates():
    values_Q = np.random.default_rng(0).random(15)
    assert bootstrap_interval(values_Q, seed=4) == bootstrap_interval(values_Q, seed=4)
    assert bootstrap_interval(values_Q, seed=4) != bootstrap_interval(values_Q, seed=5)
    assert bootstrap_interval([0.25, 0.25, 0.25]) == (0.25, 0.25)
    assert bootstrap_interval([0.75]) == (0.75, 0.75)
