"""The tokens that Clip-Cov and KL-Cov act on, against loops written from arXiv:2505.22617."""

import math

import numpy as np
import pytest

from dapo_jax.algorithms import covariance

SETTINGS = dict(cov_share=0.1, cov_low=0.05, cov_high=0.8, clip_low=0.2, clip_high=0.28)


def make_tokens(seed=0, N=60):
    """log-probs, those before the update, advantages, priorities."""
    rng = np.random.default_rng(seed)
    log_prob = -rng.exponential(1.0, N)
    old = log_prob - 0.3 * rng.standard_normal(N)
    return log_prob, old, 0.3 + rng.standard_normal(N), rng.random(N)


def covariance_by_hand(log_prob, A):
    N = len(A)
    mean_log_prob, mean_A = sum(log_prob) / N, sum(A) / N
    return [(log_prob[t] - mean_log_prob) * (A[t] - mean_A) for t in range(N)]


def stopped(log_prob, old, A, clip_low, clip_high):
    """Whether the clip leaves a token no gradient."""
    ratio = math.exp(log_prob - old)
    return (A > 0 and ratio > 1 + clip_high) or (A < 0 and ratio < 1 - clip_low)


def clip_cov_by_hand(log_prob, old, A, priority, p):
    cov = covariance_by_hand(log_prob, A)
    candidates = [
        t
        for t in range(len(A))
        if p["cov_low"] < cov[t] < p["cov_high"]
        and not stopped(log_prob[t], old[t], A[t], p["clip_low"], p["clip_high"])
    ]
    candidates.sort(key=lambda t: priority[t])
    chosen = candidates[: max(1, math.floor(p["cov_share"] * len(A)))]
    return [t in chosen for t in range(len(A))], candidates


def kl_cov_by_hand(log_prob, A, share):
    cov = covariance_by_hand(log_prob, A)
    ranks = [sum(other > c for other in cov) for c in cov]  # how many are larger
    return [rank < max(1, math.floor(share * len(A))) for rank in ranks]


@pytest.mark.parametrize("seed", range(3))
def test_covariance(seed):
    log_prob, _, A, _ = make_tokens(seed)
    got = covariance.covariance(log_prob, A)
    np.testing.assert_allclose(got, covariance_by_hand(log_prob, A), rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(got.mean(), np.cov(log_prob, A, ddof=0)[0, 1])
    short = [x.astype(np.float32) for x in (log_prob, A)]
    exact = [x.astype(np.float64) for x in short]
    assert covariance.covariance(*short).dtype == np.float64
    np.testing.assert_array_equal(covariance.covariance(*short), covariance.covariance(*exact))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("share", [1e-4, 0.0166, 0.0167, 0.1, 0.132, 0.5, 1.0])
def test_clip_cov(share, seed):
    tokens, settings = make_tokens(seed), SETTINGS | {"cov_share": share}
    got = covariance.select_clip_cov(*tokens, **settings)
    expected, candidates = clip_cov_by_hand(*tokens, settings)
    assert got.dtype == bool and got.tolist() == expected
    number = {1e-4: 1, 0.0166: 1, 0.0167: 1, 0.1: 6, 0.132: 7}.get(share, len(candidates))
    assert got.sum() == number and 7 < len(candidates) < 30


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "share, number", [(1e-4, 1), (0.0333, 1), (0.0334, 2), (0.1, 6), (0.132, 7), (1.0, 60)]
)
def test_kl_cov(share, number, seed):
    log_prob, _, A, _ = make_tokens(seed)
    got = covariance.select_kl_cov(log_prob, A, cov_share=share)
    assert got.dtype == bool and got.sum() == number
    assert got.tolist() == kl_cov_by_hand(log_prob, A, share)


def test_kl_cov_takes_the_earlier_of_equals():
    log_prob = np.array([-2.0, -1.0, -3.0, -1.0, -3.0, -2.0])
    A = np.array([0.0, 1.0, -1.0, 1.0, -1.0, 0.0])  # covariances 0 1 1 1 1 0
    for share, number in ((0.17, 1), (0.34, 2), (0.5, 3)):
        got = covariance.select_kl_cov(log_prob, A, cov_share=share)
        assert np.flatnonzero(got).tolist() == [1, 2, 3][:number]


@pytest.mark.parametrize("low, high, chosen", [
    (1.0, 3.0, []), (0.999, 3.0, [2]), (1.0, 3.001, [0]), (0.999, 3.001, [0, 2]),
    (-9.0, 9.0, [0, 1, 2, 3]), (-1.0, 1.0, []), (-3.0, 1.0, [1]), (9.0, 10.0, []), (3.0, 1.0, []),
])  # fmt: skip
def test_bounds_of_the_covariance_are_strict(low, high, chosen):
    """Covariances 3, -1, 1 and -3; nothing is chosen where there is no candidate."""
    log_prob, A = np.array([-1.0, -3.0, -3.0, -1.0]), np.array([3.0, 1.0, -1.0, -3.0])
    assert covariance.covariance(log_prob, A).tolist() == [3, -1, 1, -3]
    settings = SETTINGS | dict(cov_share=1.0, cov_low=low, cov_high=high)
    got = covariance.select_clip_cov(log_prob, log_prob, A, np.arange(4.0), **settings)
    assert np.flatnonzero(got).tolist() == chosen


@pytest.mark.parametrize("A, ratio, candidate", [
    (1.0, 1.31, False), (1.0, 1.29, True), (1.0, 1.0, True), (1.0, 0.1, True),
    (-1.0, 0.79, False), (-1.0, 0.81, True), (-1.0, 1.0, True), (-1.0, 9.0, True),
    (0.0, 9.0, True), (0.0, 0.1, True),
])  # fmt: skip
@pytest.mark.parametrize("others", [-5.0, 5.0])
def test_what_the_clip_has_stopped_is_left_out(A, ratio, candidate, others):
    """By the sign of its own advantage, whatever the mean of all is."""
    log_prob = np.zeros(3)
    old = np.array([-math.log(ratio), 0.0, 0.0])
    settings = dict(cov_share=1.0, cov_low=-1e-9, cov_high=1e9, clip_low=0.2, clip_high=0.3)
    advantages = np.array([A, others, others])
    got = covariance.select_clip_cov(log_prob, old, advantages, np.zeros(3), **settings)
    assert got.tolist() == [candidate, True, True]


def test_at_the_bounds_of_the_clip_a_token_is_not_stopped():
    settings = dict(cov_share=1.0, cov_low=-1.0, cov_high=1.0)
    log_prob, A = np.full(2, -1.0), np.array([1.0, -1.0])
    for clip_low, clip_high, chosen in ((0, 0, [0, 1]), (-1e-9, 0, [0]), (0, -1e-9, [1])):
        got = covariance.select_clip_cov(
            log_prob, log_prob, A, A, clip_low=clip_low, clip_high=clip_high, **settings
        )
        assert np.flatnonzero(got).tolist() == chosen


@pytest.mark.parametrize("seed", range(3))
def test_order_of_tokens_does_not_matter(seed):
    """The choice depends on the priorities of tokens, not on their rows and micro-batches."""
    tokens = make_tokens(seed)
    order = np.random.default_rng(seed + 9).permutation(len(tokens[0]))
    moved = [x[order] for x in tokens]
    a = covariance.select_clip_cov(*tokens, **SETTINGS)
    b = covariance.select_clip_cov(*moved, **SETTINGS)
    np.testing.assert_array_equal(b, a[order])
    np.testing.assert_array_equal(
        covariance.select_kl_cov(moved[0], moved[2], cov_share=0.1),
        covariance.select_kl_cov(tokens[0], tokens[2], cov_share=0.1)[order],
    )
    others = covariance.select_clip_cov(*tokens[:3], 1 - tokens[3], **SETTINGS)
    assert others.sum() == a.sum() and (others != a).any()


@pytest.mark.parametrize("priority", [0.3, 1e9, -np.inf])
def test_one_token_alone(priority):
    """Its covariance is 0."""
    one = np.array([-1.0])
    for low, chosen in ((-0.1, [True]), (0.0, [False])):
        settings = SETTINGS | {"cov_low": low}
        got = covariance.select_clip_cov(one, one, one, np.array([priority]), **settings)
        assert got.tolist() == chosen
    assert covariance.select_kl_cov(one, one, cov_share=1e-9).tolist() == [True]
