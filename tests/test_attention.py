"""Attention in training against a loop over queries, in value and gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax import attention
from dapo_jax.model import NO_WINDOW

B, T, K, G, H = 2, 21, 2, 2, 8
N, WINDOW = K * G, 4
# Two sequences and padding; one of a single token, one, and no padding.
SEGMENTS = np.repeat([[1, 2, 0], [1, 2, 2]], [8, 9, 4], axis=1).astype(np.int32)
SEGMENTS[1, 1:8] = 2


def loop(q, k, v, window):
    """softmax(q k / sqrt(H)) v of every query by itself, in float64; zeros for padding."""
    out = np.zeros(q.shape)
    for b, t, n in np.ndindex(B, T, N):
        see = [s for s in range(max(0, t - window + 1), t + 1) if SEGMENTS[b, s] == SEGMENTS[b, t]]
        scores = np.array([q[b, t, n] @ k[b, s, n // G] for s in see]) / np.sqrt(H)
        weights = np.exp(scores - scores.max())
        out[b, t, n] = weights @ v[b, see, n // G] / weights.sum()
    return out * (SEGMENTS > 0)[:, :, None, None]


@pytest.fixture(scope="module")
def arrays():
    rng = np.random.default_rng(0)
    shapes = (B, T, N, H), (B, T, K, H), (B, T, K, H), (B, T, N, H)
    q, k, v, weights = (rng.standard_normal(shape) for shape in shapes)
    return q, k, v, weights * (SEGMENTS > 0)[:, :, None, None]


@pytest.fixture(scope="module")
def expected(arrays):
    """Of a window: values, and by central differences the derivative along a direction."""

    @functools.cache
    def of(window):
        *inputs, weights = arrays
        rng = np.random.default_rng(1)
        directions = [rng.standard_normal(x.shape) for x in inputs]

        def slope(i):
            ends = []
            for step in (1e-5, -1e-5):
                moved = list(inputs)
                moved[i] = moved[i] + step * directions[i]
                ends.append(np.sum(weights * loop(*moved, window)))
            return (ends[0] - ends[1]) / 2e-5

        return loop(*inputs, window), directions, [slope(i) for i in range(3)]

    return of


def check(attend, arrays, expected, window, *, atol=2e-6):
    """Value and gradient of `attend`, finite everywhere, and none by way of padding."""
    *inputs, weights = (jnp.asarray(x, jnp.float32) for x in arrays)
    seen = NO_WINDOW if window is None else window

    def total(*inputs):
        out = attend(0, *inputs, None, window)[0]
        return jnp.sum(weights * out), out

    program = jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))
    (_, out), grads = program(*inputs)
    values, directions, slopes = expected(seen)
    real = SEGMENTS > 0
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out[real], values[real], rtol=0, atol=atol)
    for grad, direction, slope in zip(grads, directions, slopes, strict=True):
        assert np.isfinite(grad).all() and not np.asarray(grad)[~real].any()
        got = np.sum(np.asarray(grad, np.float64) * direction)
        np.testing.assert_allclose(got, slope, rtol=0, atol=2e-5)


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("long", [False, True])
def test_xla(monkeypatch, arrays, expected, window, long):
    monkeypatch.setattr(attention, "LEAST_PART", 1)  # four parts, of 6, 6, 6 and 3 tokens
    if long:  # three parts, of 8, 8 and 5, in chunks of 4
        monkeypatch.setattr(attention, "LONG_ROW", T - 1)
        monkeypatch.setattr(attention, "QUERY_CHUNK", 4)
    check(attention.packed(jnp.asarray(SEGMENTS)), arrays, expected, window)
