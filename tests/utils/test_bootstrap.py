"""Bootstrap intervals, against enumeration of all resamples and cases computed by hand."""

import itertools

import numpy as np

from dapo_jax.utils.bootstrap import bootstrap_interval


def test_bootstrap_interval_of_two_values_is_exact():
    # Resamples of (0, 1) have mean 0, 1/2, 1 with probability 1/4, 1/2, 1/4.
    assert bootstrap_interval([0.0, 1.0]) == (0.0, 1.0)


def test_bootstrap_interval_agrees_with_enumeration():
    values = [0.0, 0.1, 0.5, 1.0]
    means = [np.mean(resample) for resample in itertools.product(values, repeat=4)]
    low, high = bootstrap_interval(values, resamples=20_000)
    # Within half a percent of probability of the exact quantiles, which are steps.
    assert np.quantile(means, 0.02) <= low <= np.quantile(means, 0.03)
    assert np.quantile(means, 0.97) <= high <= np.quantile(means, 0.98)


def test_bootstrap_interval_repeats_and_degenerates():
    values_Q = np.random.default_rng(0).random(15)
    assert bootstrap_interval(values_Q) == bootstrap_interval(values_Q)
    assert bootstrap_interval([0.25, 0.25, 0.25]) == (0.25, 0.25)
    assert bootstrap_interval([0.75]) == (0.75, 0.75)
