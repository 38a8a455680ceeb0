"""Bootstrap intervals of a mean: over held-out problems, and over the seeds of a method."""

import numpy as np
from numpy.typing import ArrayLike

BLOCK_VALUES = 1_000_000  # resampled at once


def bootstrap_interval(values: ArrayLike, *, resamples: int = 10_000) -> tuple[float, float]:
    """Returns the 95 % percentile interval (low, high) of the mean of the values, by bootstrap.

    Values are resampled with replacement, by a fixed seed: equal calls give equal intervals. The
    interval lies within the range of the values, so with fewer than about ten it is too narrow.
    Source: Efron and Tibshirani 1993, section 13.3.

    Args:
        values: one per problem or seed, such as its share of correct samples; 1 or more.
        resamples: 1 or more.
    """
    values = np.asarray(values, np.float64)
    assert values.ndim == 1 and values.size, f"values of shape {values.shape}"
    assert resamples >= 1, f"{resamples}"
    generator = np.random.default_rng(0)
    # In blocks: an array of all resamples would be `resamples` times the values.
    most = max(1, BLOCK_VALUES // values.size)
    sizes = [min(most, resamples - done) for done in range(0, resamples, most)]
    means = [generator.choice(values, (size, values.size)).mean(axis=1) for size in sizes]
    low, high = np.quantile(np.concatenate(means), [0.025, 0.975])
    return float(low), float(high)
