"""The soft overlong punishment, by hand."""

import numpy as np

from dapo_jax.algorithms.overlong import soft_overlong_punishment


def punishment_by_hand(length, longest, cache):
    """DAPO eq. 13, case by case."""
    if length <= longest - cache:
        return 0.0
    if length <= longest:
        return ((longest - cache) - length) / cache
    return -1.0


def test_soft_overlong_punishment_is_equation_13():
    lengths = np.arange(0, 130)
    got = soft_overlong_punishment(lengths, max_response_tokens=100, buffer_tokens=30, penalty=1.0)
    np.testing.assert_allclose(got, [punishment_by_hand(n, 100, 30) for n in lengths])
    assert got[70] == 0 and got[100] == got[129] == -1 and got[85] == -0.5


def test_soft_overlong_punishment_scales_and_switches_off():
    settings = {"max_response_tokens": 100, "buffer_tokens": 30}
    half = soft_overlong_punishment(np.array([85, 100]), penalty=0.5, **settings)
    np.testing.assert_allclose(half, [-0.25, -0.5])
    settings["buffer_tokens"] = 0
    assert not soft_overlong_punishment(np.array([85, 100]), penalty=0.0, **settings).any()
