"""The optimiser: its learning rate, and the dtype of its moments."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from dapo_jax.training import step as train_step
from dapo_jax.training.optimizer import learning_rate
from tests.support.helpers import tiny_config

CONFIG = tiny_config()


def test_warm_up_starts_at_one_nth():
    optimizer = dataclasses.replace(CONFIG.optimizer, learning_rate=8.0, warmup_steps=4)
    rates = [learning_rate(optimizer, step, 9) for step in range(1, 7)]
    assert rates == [2, 4, 6, 8, 8, 8]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.usefixtures("standard_promotion")
def test_moments_are_float32_whatever_the_parameters_are(dtype):
    state = train_step.new_state(CONFIG.optimizer, {"w": jnp.ones(3, dtype)})
    gradient = {"w": jnp.ones(3, jnp.float32)}
    new, _ = train_step.optimizer_step(CONFIG.optimizer, state, gradient, 0.0, 1e-3)
    assert new.params["w"].dtype == dtype
    for moments in (state.moments, new.moments):
        assert {x.dtype for x in jax.tree.leaves(moments) if x.ndim} == {jnp.dtype("float32")}
