"""The objective against loops written from the papers, and its behaviour at the edges."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.algorithms import surrogate
from dapo_jax.algorithms.kl import kl_estimate

BOUNDS = dict(clip_low=0.2, clip_high=0.28)


def surrogate_by_hand(logp, old, adv, mask, low, high, dual):
    """DAPO eq. 8, one token at a time."""
    out = np.zeros(logp.shape)
    for i in np.ndindex(*logp.shape):
        if not mask[i]:
            continue
        ratio = math.exp(logp[i] - old[i])
        value = min(ratio * adv[i], min(max(ratio, 1 - low), 1 + high) * adv[i])
        if dual is not None and adv[i] < 0:
            value = max(value, dual * adv[i])
        out[i] = value
    return out


def random_tokens(seed, shape=(4, 9)):
    rng = np.random.default_rng(seed)
    old = -rng.exponential(2.0, shape)
    logp = old + 0.6 * rng.standard_normal(shape)
    return logp, old, rng.standard_normal(shape), rng.random(shape) < 0.7


@pytest.mark.parametrize("dual", [None, 1.5, 10.0])
@pytest.mark.parametrize("seed", range(3))
def test_surrogate_is_equation_8(seed, dual):
    logp, old, adv, mask = random_tokens(seed)
    expected = surrogate_by_hand(logp, old, adv, mask, 0.2, 0.28, dual)
    got = surrogate.surrogate(*map(jnp.asarray, (logp, old, adv, mask)), **BOUNDS, clip_dual=dual)
    np.testing.assert_allclose(got.objective_BT, expected, rtol=2e-5, atol=1e-6)


def test_gradient_stops_at_the_bound_of_its_own_side():
    """Up to 1.28 for a positive advantage, down to 0.8 for a negative one; beyond, no gradient."""
    log_ratios = np.log([0.5, 0.79, 0.81, 1.0, 1.21, 1.27, 1.29, 2.0])

    def total(logp, adv):
        ones = jnp.ones_like(logp)
        return surrogate.surrogate(
            logp, 0 * ones, adv * ones, ones > 0, **BOUNDS
        ).objective_BT.sum()

    for sign, flows in ((1.0, log_ratios < np.log(1.28)), (-1.0, log_ratios > np.log(0.8))):
        gradient = jax.grad(total)(jnp.asarray(log_ratios)[None], jnp.float32(sign))[0]
        expected = np.where(flows, sign * np.exp(log_ratios), 0.0)
        np.testing.assert_allclose(gradient, expected, rtol=1e-5)


def test_clipped_tokens_are_those_beyond_the_bound_of_their_own_side():
    log_ratio = jnp.log(jnp.array([[1.3, 1.3, 0.7, 0.7]]))
    adv = jnp.array([[1.0, -1.0, 1.0, -1.0]])
    got = surrogate.surrogate(log_ratio, 0 * adv, adv, adv < 9, **BOUNDS)
    assert got.clipped_high_BT.tolist() == [[True, False, False, False]]
    assert got.clipped_low_BT.tolist() == [[False, False, False, True]]
    assert got.clipped_dual_BT is None


def test_the_dual_clip_names_the_tokens_whose_loss_it_bounds():
    """r = 4 and 2 about c = 3, for either sign of the advantage; a masked token is none."""
    log_ratio = jnp.log(jnp.array([[4.0, 2.0, 4.0, 2.0, 4.0]]))
    adv = jnp.array([[-1.0, -1.0, 1.0, 1.0, -1.0]])
    mask = jnp.array([[True, True, True, True, False]])
    got = surrogate.surrogate(log_ratio, 0 * adv, adv, mask, **BOUNDS, clip_dual=3.0)
    assert got.clipped_dual_BT is not None
    assert got.clipped_dual_BT.tolist() == [[True, False, False, False, False]]


@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3", "k3+"])
@pytest.mark.parametrize("value", [-np.inf, np.inf, np.nan, 1e30])
def test_nothing_under_the_mask_matters_to_the_kl(estimator, value):
    mask, reference = jnp.array([[True, False]]), jnp.array([[-1.0, value]])
    total = lambda logp: jnp.sum(kl_estimate(logp, reference, mask, estimator=estimator))
    kl, gradient = jax.value_and_grad(total)(jnp.array([[-1.1, value]]))
    assert np.isfinite(kl) and np.isfinite(gradient).all() and gradient[0, 1] == 0


@pytest.mark.parametrize("straight_through", ["", "+"])
@pytest.mark.parametrize("name", ["k1", "abs", "k2", "k3"])
def test_kl_estimators_are_schulmans(name, straight_through):
    rng = np.random.default_rng(0)
    logp, ref = -rng.exponential(1.0, (2, 3, 5))
    mask, d = jnp.ones((3, 5), bool), logp - ref
    expected = {"k1": d, "abs": abs(d), "k2": d**2 / 2, "k3": np.minimum(np.exp(-d) - 1 + d, 10)}

    def estimate(x):
        name_and_mark = name + straight_through
        return kl_estimate(x, jnp.asarray(ref), mask, estimator=name_and_mark)

    np.testing.assert_allclose(estimate(jnp.asarray(logp)), expected[name], rtol=1e-4, atol=1e-6)
    slope = jax.grad(lambda x: estimate(x).sum())(jnp.asarray(logp))
    slopes = {
        "k1": 1 + 0 * d,
        "abs": np.sign(d),
        "k2": d,
        "k3": (expected["k3"] < 10) * (1 - np.exp(-d)),
    }
    expected_slope = d if straight_through else slopes[name]
    np.testing.assert_allclose(slope, expected_slope, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3", "k3+"])
@pytest.mark.parametrize("d", [1e4, -1e4])
def test_far_from_the_reference_the_kl_and_its_gradient_are_finite(estimator, d):
    one = jnp.ones((1, 1))
    total = lambda logp: jnp.sum(kl_estimate(logp, 0 * one, one > 0, estimator=estimator))
    value, slope = jax.value_and_grad(total)(d * one)
    assert np.isfinite(value) and np.isfinite(slope).all()
    assert estimator != "k3" or (value, slope[0, 0]) == (10, 0), "bounded, without a gradient"


@pytest.mark.parametrize("name, value", [("k1+", 1e4), ("abs+", 1e4), ("k2+", 5e7), ("k3+", 10)])
def test_straight_through_estimates_keep_their_value_where_k2_is_large(name, value):
    found = kl_estimate(
        jnp.full((1, 1), 1e4), jnp.zeros((1, 1)), jnp.ones((1, 1)) > 0, estimator=name
    )
    assert float(found[0, 0]) == value
