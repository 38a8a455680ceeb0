"""The optimiser: its steps, its learning rate, and the dtype of its moments."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.training import step as train_step
from dapo_jax.training.optimizer import learning_rate
from tests.support.helpers import tiny_config

CONFIG = tiny_config()


def test_warm_up_starts_at_one_nth():
    optimizer = dataclasses.replace(CONFIG.optimizer, learning_rate=8.0, warmup_steps=4)
    rates = [learning_rate(optimizer, step, 9) for step in range(1, 7)]
    assert rates == [2, 4, 6, 8, 8, 8]


@pytest.mark.usefixtures("standard_promotion")
def test_three_steps_are_adamws():
    """arXiv:1711.05101, algorithm 2, with a rate of its own in each step."""
    o = dataclasses.replace(
        CONFIG.optimizer, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1, max_grad_norm=100.0
    )
    w, m, v = np.array([1.0, -2.0, 0.5]), 0.0, 0.0
    state = train_step.new_state(o, {"w": jnp.asarray(w, jnp.float32)})
    gradients = np.array([[0.3, -0.1, 2], [-0.5, 0.4, 1], [0.2, 0.2, -3]])
    for t, (g, rate) in enumerate(zip(gradients, (0.01, 0.03, 0.02)), 1):
        m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g**2
        step = m / (1 - 0.8**t) / (np.sqrt(v / (1 - 0.95**t)) + 1e-3)
        w = w - rate * (step + 0.1 * w)
        gradient = {"w": jnp.asarray(g, jnp.float32)}
        state, _ = train_step.optimizer_step(o, state, gradient, 0.0, rate)
    np.testing.assert_allclose(state.params["w"], w, rtol=1e-5)
    assert state.updates == 3


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("loss, slope", [(np.inf, 1.0), (np.nan, 1.0), (0.0, np.inf)])
def test_a_loss_or_a_gradient_that_is_not_finite_moves_nothing(loss, slope):
    state = train_step.new_state(CONFIG.optimizer, {"w": jnp.ones(3)})
    gradient = {"w": jnp.full(3, slope, jnp.float32)}
    new, _ = train_step.optimizer_step(CONFIG.optimizer, state, gradient, loss, 1e-3)
    before, after = (state.params, state.moments), (new.params, new.moments)
    jax.tree.map(np.testing.assert_array_equal, before, after)
    assert new.skipped == 1 and new.updates == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.usefixtures("standard_promotion")
def test_moments_are_float32_whatever_the_parameters_are(dtype):
    state = train_step.new_state(CONFIG.optimizer, {"w": jnp.ones(3, dtype)})
    gradient = {"w": jnp.ones(3, jnp.float32)}
    new, _ = train_step.optimizer_step(CONFIG.optimizer, state, gradient, 0.0, 1e-3)
    assert new.params["w"].dtype == dtype
    for moments in (state.moments, new.moments):
        assert {x.dtype for x in jax.tree.leaves(moments) if x.ndim} == {jnp.dtype("float32")}
