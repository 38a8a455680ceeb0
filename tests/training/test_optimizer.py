"""The optimiser: its learning rate, and moments in bfloat16."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dapo_jax.runs.checkpoint import Checkpoints
from dapo_jax.tools.plan import dry_run
from dapo_jax.training import step as train_step
from dapo_jax.training.optimizer import (
    keep_moments_as,
    learning_rate,
    make_optimizer,
    round_stochastically,
)
from tests.support.helpers import make_mesh, make_params, random_samples, tiny_config
from tests.training.test_step import stack

CONFIG = tiny_config()


def test_warm_up_starts_at_one_nth():
    optimizer = dataclasses.replace(CONFIG.optimizer, learning_rate=8.0, warmup_steps=4)
    rates = [learning_rate(optimizer, step, 9) for step in range(1, 7)]
    assert rates == [2, 4, 6, 8, 8, 8]


def test_rounding_at_random_is_right_on_average():
    x = jnp.asarray([1.0, -1.0, 1.001, -3.1415926, 1e-20, 0.0, 6e4], jnp.float32)
    keys = jax.random.split(jax.random.key(0), 4000)
    rounded = jax.vmap(lambda key: round_stochastically(x, key))(keys)
    assert rounded.dtype == jnp.bfloat16
    samples_KN = np.asarray(rounded.astype(jnp.float32), np.float64)
    for i, value in enumerate(np.asarray(x, np.float64)):
        # What bfloat16 can hold stays; the rest becomes one of its two neighbours.
        exact = value == np.float64(np.asarray(x[i].astype(jnp.bfloat16), np.float32))
        assert len(set(samples_KN[:, i])) == (1 if exact else 2), value
        step = np.ptp(samples_KN[:, i])
        np.testing.assert_allclose(
            samples_KN[:, i].mean(), value, atol=4 * step / 4000**0.5, rtol=1e-7
        )


def test_rounding_at_random_leaves_what_is_not_finite():
    nan = jax.lax.bitcast_convert_type(jnp.uint32(0x7FFFFFFF), jnp.float32)  # a carry would undo it
    x = jnp.stack([nan, jnp.float32(jnp.inf), jnp.float32(-jnp.inf)])
    for seed in range(20):
        got = np.asarray(round_stochastically(x, jax.random.key(seed)).astype(jnp.float32))
        assert np.isnan(got[0]) and got[1] == np.inf and got[2] == -np.inf


def second_moments(adam, gradients_SN):
    """The second moments after each step."""

    def step(state, gradient_M):
        _, state = adam.update(gradient_M, state)
        return state, state.nu.astype(jnp.float32)

    return jax.lax.scan(step, adam.init(gradients_SN[0]), gradients_SN)[1]


@pytest.mark.usefixtures("standard_promotion")
def test_bfloat16_second_moments_stall_when_rounded_to_nearest_and_not_stochastically():
    """Gradients fall from 1 to 0.1, beta2 = 0.999: after 3,000 steps nu is near 0.06 in float32."""
    gradients_SN = jnp.concatenate([jnp.ones((3000, 256)), jnp.full((3000, 256), 0.1)])
    adam = optax.scale_by_adam(0.9, 0.999, 1e-8)

    def plain(params):
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)

    nearest = optax.GradientTransformation(
        lambda p: (lambda s: s._replace(nu=plain(s.nu)))(adam.init(p)),
        lambda g, s, p=None: (lambda new: (new[0], new[1]._replace(nu=plain(new[1].nu))))(
            adam.update(g, s._replace(nu=s.nu.astype(jnp.float32)), p)
        ),
    )
    kinds = adam, nearest, keep_moments_as(adam, "bfloat16")
    run = jax.jit(lambda: [second_moments(kind, gradients_SN) for kind in kinds])
    wide_SN, nearest_SN, random_SN = map(np.asarray, run())
    before, after = 2999, 5999
    np.testing.assert_allclose(wide_SN[before], 1 - 0.999**3000, rtol=1e-3)
    assert nearest_SN[before].max() < 0.5, "it stops growing where a step is half of its precision"
    assert (nearest_SN[before:] == nearest_SN[before]).all(), "and then never moves again"
    for at in (before, after):
        # One of them wanders by some 10 %, from rounding alone; the mean of 256 does not.
        relative_M = random_SN[at] / wide_SN[at]
        assert relative_M.std() < 0.15
        np.testing.assert_allclose(relative_M.mean(), 1, atol=0.02)


def test_moments_have_their_own_dtype():
    for dtype in ("float32", "bfloat16"):
        for params in ("float32", "bfloat16"):
            optimizer = make_optimizer(dataclasses.replace(CONFIG.optimizer, moments_dtype=dtype))
            state = optimizer.init({"w": jnp.ones(3, params)})
            assert {x.dtype for x in jax.tree.leaves(state) if x.ndim} == {jnp.dtype(dtype)}


class Run:
    """Updates of a small model on two devices."""

    def __init__(self, **optimizer):
        mesh_config = dataclasses.replace(CONFIG.mesh, data=1, fsdp=2, tensor=1)
        settings = dataclasses.replace(CONFIG.optimizer, **optimizer)
        self.config = dataclasses.replace(CONFIG, optimizer=settings, mesh=mesh_config)
        mesh = make_mesh(self.config, 2)
        self.at = train_step.state_shardings(self.config, mesh)
        samples = random_samples(np.random.default_rng(0), 12)
        rows, n, W = stack(samples, rows_per_micro_batch=8, num_micro_batches=2)
        self.rest = (rows, n, W, np.float32(1e-3))
        self.program = train_step.compile_update(self.config, mesh)

    def start(self):
        init = lambda key: train_step.init_state(self.config, make_params(self.config))
        return jax.jit(init, out_shardings=self.at)(0)

    def go_on(self, state, updates):
        for _ in range(updates):
            state, result = self.program(state, *self.rest)
            assert result.skipped == 0
        return state


@pytest.fixture(scope="module")
def plain():
    """The state after three updates with moments in float32."""
    with jax.numpy_dtype_promotion("standard"):
        run = Run()
        return jax.device_get(run.go_on(run.start(), 3))


def moments_of(state):
    return [x for x in jax.tree.leaves(state.moments) if x.ndim]


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_a_run_with_bfloat16_moments_resumes_bit_for_bit(tmp_path, plain):
    run = Run(moments_dtype="bfloat16")
    state = run.go_on(run.start(), 1)
    assert {x.dtype for x in moments_of(state)} == {jnp.dtype("bfloat16")}
    with Checkpoints(tmp_path, keep_newest=1, keep_best=0) as checkpoints:
        checkpoints.save(1, state, {}, accuracy=None)
    whole = run.go_on(state, 2)
    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    with Checkpoints(tmp_path, keep_newest=1, keep_best=0) as checkpoints:
        found = checkpoints.restore(jax.tree.map(shape, whole))
    assert found is not None
    again = run.go_on(found[1], 2)
    jax.tree.map(np.testing.assert_array_equal, again, whole)
    # Close to those of moments in float32, and not equal.
    for ours, theirs in zip(jax.tree.leaves(whole.params), jax.tree.leaves(plain.params)):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-3)
    assert any((a != b).any() for a, b in zip(*map(jax.tree.leaves, (whole, plain))))


def test_the_plan_counts_moments_in_their_dtype():
    def lines(**optimizer):
        changes = {f"optimizer__{name}": value for name, value in optimizer.items()}
        text = dry_run.describe(tiny_config(mesh__data=1, **changes)).splitlines()
        return {
            line.split("  ")[1]: line.split("  ", 2)[2].strip() for line in text if "  " in line
        }

    wide, narrow = lines(), lines(moments_dtype="bfloat16")
    mib = lambda text: float(text.split()[0])
    assert wide["AdamW"].endswith("moments in float32")
    assert narrow["AdamW"].endswith("moments in bfloat16")
    np.testing.assert_allclose(mib(wide["optimiser state"]), 2 * mib(wide["parameters"]), atol=0.02)
    np.testing.assert_allclose(mib(narrow["optimiser state"]), mib(wide["parameters"]), atol=0.02)
