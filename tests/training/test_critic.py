"""The critic: its loss against a loop, and its values against each sequence alone."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.models import decoder as model
from dapo_jax.models import sharding
from dapo_jax.models.attention import xla
from dapo_jax.training import critic, packing
from dapo_jax.training import step as train_step
from tests.support.helpers import make_mesh, make_params, replace_model, tiny_config

CONFIG = tiny_config(
    objective__advantage="gae",
    objective__advantage_args={"gae_lambda": 0.95},
    critic={"learning_rate": 1e-3, "value_clip": 0.5, "head_start_steps": 0},
)
C = 0.5


def loss_by_hand(value, old, target):
    """(loss of one token, whether the clipped side is the larger)."""
    clipped = max(old - C, min(old + C, value))
    plain, bounded = (value - target) ** 2, (clipped - target) ** 2
    return max(plain, bounded) / 2, bounded > plain


def make_values(seed=0, shape=(3, 17)):
    """Values, values before the update, returns, mask."""
    rng = np.random.default_rng(seed)
    old = rng.standard_normal(shape)
    value = old + 0.8 * rng.standard_normal(shape)
    return value, old, rng.standard_normal(shape), rng.random(shape) < 0.7


def value_loss(*columns):
    return critic.value_loss(*map(jnp.asarray, columns), value_clip=C)


@pytest.mark.parametrize("seed", range(3))
def test_value_loss(seed):
    value, old, target, mask = make_values(seed)
    loss, worse = value_loss(*(x.astype(np.float32) for x in (value, old, target)), mask)
    assert loss.dtype == jnp.float32
    kinds = set()
    for i in np.ndindex(*mask.shape):
        if not mask[i]:
            assert loss[i] == 0 and not worse[i]
            continue
        expected, bounded = loss_by_hand(value[i], old[i], target[i])
        np.testing.assert_allclose(loss[i], expected, rtol=2e-5, atol=1e-6)
        assert worse[i] == bounded
        kinds.add((bool(bounded), abs(value[i] - old[i]) > C, value[i] > old[i]))
    assert len(kinds) == 6  # the clip reached or not, and which side is larger, up and down


def test_gradient_is_the_slope_and_stops_where_the_clipped_side_is_the_larger():
    with jax.enable_x64(True):
        value, old, target, mask = make_values()
        weights = np.linspace(0.5, 1.5, value.size).reshape(value.shape)
        total = lambda v: jnp.sum(weights * value_loss(v, old, target, mask)[0])
        got, h = jax.grad(total)(jnp.asarray(value)), 1e-6
        worse = np.asarray(value_loss(value, old, target, mask)[1])
        assert got.dtype == jnp.float64 and 3 < worse.sum() < mask.sum() - 3
        for i in np.ndindex(*value.shape):
            sides = [loss_by_hand(value[i] + d, old[i], target[i])[0] for d in (h, -h)]
            slope = mask[i] * weights[i] * (sides[0] - sides[1]) / (2 * h)
            np.testing.assert_allclose(got[i], slope, atol=1e-8)
        assert not got[worse | ~mask].any() and np.asarray(got)[mask & ~worse].all()


def test_within_the_clip_the_loss_is_plain_and_has_its_gradient():
    """Old plus the move is not the value to the last bit; that must not count as clipped."""
    value, old, target, _ = (x.astype(np.float32) for x in make_values(shape=(1, 500)))
    value = old + np.float32(0.49) * np.tanh(value - old)
    everywhere = np.ones(value.shape, bool)
    loss, worse = value_loss(value, old, target, everywhere)
    np.testing.assert_array_equal(loss, np.float32(0.5) * (value - target) ** 2)
    assert not worse.any()
    got = jax.grad(lambda v: jnp.sum(value_loss(v, old, target, everywhere)[0]))(value)
    np.testing.assert_allclose(got, value - target, rtol=1e-6)
    # At the very bound, in numbers that are exact: the gradient still passes.
    bound = [np.full((1, 1), x, np.float32) for x in (1.5, 1.0, 9.0)]
    one = np.ones((1, 1), bool)
    assert not value_loss(*bound, one)[1].any()
    slope = jax.grad(lambda v: value_loss(v, *bound[1:], one)[0][0, 0])(bound[0])
    assert slope[0, 0] == 1.5 - 9.0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30])
def test_nothing_under_the_mask_matters(bad):
    *columns, mask = make_values()
    columns = [x.astype(np.float32) for x in columns]
    spoilt = [np.where(mask, x, bad).astype(np.float32) for x in columns]
    total = lambda v, rest: jnp.sum(value_loss(v, *rest, mask)[0])
    run = jax.value_and_grad(total)
    clean, clean_gradient = run(jnp.asarray(columns[0]), columns[1:])
    loss, gradient = run(jnp.asarray(spoilt[0]), spoilt[1:])
    assert np.isfinite(loss) and loss == clean
    np.testing.assert_array_equal(gradient, clean_gradient)


def test_bfloat16_values_are_computed_in_float32():
    *columns, mask = make_values()
    short = [jnp.asarray(x, jnp.bfloat16) for x in columns]
    loss, _ = value_loss(*short, mask)
    exact, _ = value_loss(*(x.astype(jnp.float32) for x in short), mask)
    assert loss.dtype == jnp.float32
    np.testing.assert_array_equal(loss, exact)


@pytest.fixture(scope="module")
def params():
    """A critic whose head is not 0 any more."""
    head = np.random.default_rng(5).standard_normal(CONFIG.model.hidden_size).astype(np.float32)
    return critic.CriticParams(make_params(CONFIG), jnp.asarray(head))


@pytest.fixture(scope="module")
def sequences():
    """(prompt, response) of several lengths; one response is empty."""
    rng = np.random.default_rng(0)
    tokens = lambda n: rng.integers(3, CONFIG.model.vocab_size, n).astype(np.int32)
    lengths = ((3, 9), (1, 20), (6, 1), (2, 0), (4, 13), (1, 7), (5, 27))
    return [(tokens(p).tolist(), tokens(n)) for p, n in lengths]


def packed_rows(sequences, row_tokens=40, *, share_prompts=False):
    return packing.pack(
        [prompt for prompt, _ in sequences],
        np.concatenate([response for _, response in sequences]),
        np.array([len(response) for _, response in sequences]),
        row_tokens,
        share_prompts=share_prompts,
    )


row_values = jax.jit(critic.row_values, static_argnums=0)


@functools.partial(jax.jit, static_argnums=0)
def hidden_states(config, decoder, tokens_BT):
    positions_BT = jnp.arange(tokens_BT.shape[1])[None]
    attend = xla.packed(jnp.ones_like(tokens_BT))
    return model.bind(config, decoder)(tokens_BT, positions_BT, attend)[0]


def states_before(decoder, prompt, response):
    """The hidden state that predicts each token of the response, the sequence alone in its row."""
    end = len(prompt) + len(response)
    padded = np.zeros((1, 40), np.int32)  # causal: what follows a token cannot change it
    padded[0, :end] = [*prompt, *response]
    hidden = np.asarray(hidden_states(CONFIG.model, decoder, padded), np.float64)[0]
    return [hidden[t - 1] for t in range(len(prompt), end)]


@pytest.mark.parametrize("share", [False, True])
def test_values_of_packed_rows_are_those_of_each_sequence_alone(params, sequences, share):
    """The value of a token is of the state before it: read off the position that predicts it."""
    if share:
        sequences = [(sequences[i - i % 3][0], answer) for i, (_, answer) in enumerate(sequences)]
    packed = packed_rows(sequences, share_prompts=share)
    assert packed.rows.segments_BT.max() > 1, "several sequences share a row"
    assert (packed.rows.prefixes_BT != packed.rows.segments_BT).any() == share
    train = dataclasses.replace(CONFIG.train, share_prompts=share)
    got = row_values(dataclasses.replace(CONFIG, train=train), params, packed.rows)
    assert got.dtype == jnp.float32 and not got[:, 0].any()
    expected = [
        sum(h * w for h, w in zip(state, params.head_D.tolist()))
        for sequence in sequences
        for state in states_before(params.decoder, *sequence)
    ]
    assert np.std(expected) > 0.1
    np.testing.assert_allclose(packing.take_columns(packed, got), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("sizes", [(1, 1, 8, 1), (1, 2, 2, 2)])
def test_eight_devices_have_the_values_and_the_update_of_one(params, sequences, sizes):
    """Where the tokens of a row lie over devices, in zig-zag order, values return to their own."""
    packed = packed_rows(sequences, 48, share_prompts=True)
    M, rng = len(packed.where_M), np.random.default_rng(2)
    columns = {f"{name}_BT": rng.standard_normal(M) for name in ("value_old", "return")}
    rows = packing.fill(packed, weight_BT=rng.random(M), **columns)
    stacked = packing.to_micro_batches(rows, rows_per_micro_batch=2, num_micro_batches=3)
    used = np.int32(packing.used_micro_batches(len(rows.tokens_BT), 2))
    train, found = dataclasses.replace(CONFIG.train, share_prompts=True), []
    for shape in ((1, 1, 1, 1), sizes):
        layout = dataclasses.replace(CONFIG.mesh, **dict(zip(sharding.AXES, shape, strict=True)))
        config = dataclasses.replace(CONFIG, mesh=layout, train=train)
        mesh = make_mesh(config, int(np.prod(shape)))
        state = train_step.new_state(critic.optimizer_config(config), params)
        state = jax.device_put(jax.device_get(state), critic.state_shardings(config, mesh))
        values = critic.jitted_values(config, mesh)(state.params, stacked, used)
        values_M = packing.take_columns(packed, jax.device_get(values))
        update = critic.jitted_update(config, mesh)  # donates the state
        state, result = update(state, stacked, used, np.float32(3), np.float32(1e-3))
        found.append(jax.device_get((values_M, result.sums, result.grad_norm, state.moments)))
    assert used > 1 and np.std(found[0][0]) > 0.1
    for one, many in zip(*map(jax.tree.leaves, found), strict=True):
        scale = max(1e-3, float(np.abs(one).max()))
        np.testing.assert_allclose(many / scale, one / scale, atol=2e-5)


def test_values_are_summed_in_float32_whatever_the_hidden_states_are(params, sequences):
    model = replace_model(CONFIG, compute_dtype="bfloat16")
    got = row_values(dataclasses.replace(CONFIG, model=model), params, packed_rows(sequences).rows)
    assert got.dtype == jnp.float32
    assert (got != got.astype(jnp.bfloat16).astype(jnp.float32)).any(), "rounded to bfloat16"


def test_a_critic_starts_as_a_copy_with_a_head_of_zero(params, sequences):
    state = jax.jit(critic.init_state, static_argnums=0)(CONFIG, params.decoder)
    jax.tree.map(np.testing.assert_array_equal, state.params.decoder, params.decoder)
    assert (
        state.params.head_D.shape == (CONFIG.model.hidden_size,) and not state.params.head_D.any()
    )
    assert state.updates == state.skipped == 0
    assert not row_values(CONFIG, state.params, packed_rows(sequences).rows).any()
    # A copy in memory too: the critic's update gives its own buffers away, not the policy's.
    eager = critic.init_state(CONFIG, params.decoder).params.decoder
    place = lambda tree: {x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree)}
    assert not place(eager) & place(params.decoder)


def test_the_optimiser_is_the_policys_at_the_critics_rate():
    own, policy = vars(critic.optimizer_config(CONFIG)), vars(CONFIG.optimizer)
    changed = {name: own[name] for name in policy if own[name] != policy[name]}
    assert changed == {"learning_rate": 1e-3, "warmup_steps": 0}


@pytest.mark.usefixtures("standard_promotion")
def test_first_update_by_hand(params, sequences):
    """With a head of 0 all values are 0 and only the head has a gradient: -sum_t w_t R_t h_t.

    One AdamW step moves each entry by the rate against the sign of its gradient; of the decoder
    only the weight decay is left. The old values are further off than the clip: V = 0 is beyond it.
    """
    rng, packed, rate, W = np.random.default_rng(1), packed_rows(sequences), 1e-3, 3.0
    N = len(packed.where_M)
    target, old, weight = rng.standard_normal(N), 0.7 * rng.standard_normal(N), rng.random(N)
    rows = packing.fill(packed, weight_BT=weight, value_old_BT=old, return_BT=target)
    stacked = packing.to_micro_batches(rows, rows_per_micro_batch=1, num_micro_batches=8)
    used = np.int32(len(rows.tokens_BT))
    state = critic.init_state(CONFIG, params.decoder)
    update = jax.jit(functools.partial(critic.update, CONFIG))
    new, result = update(state, stacked, used, np.float32(W), np.float32(rate))

    by_hand = [loss_by_hand(0.0, v, r) for v, r in zip(old, target)]
    total = math.fsum(w * loss for w, (loss, _) in zip(weight, by_hand)) / W
    np.testing.assert_allclose(result.sums.loss, total, rtol=1e-5)
    assert result.sums.tokens == N and 1 < used < 8
    assert result.sums.clipped == sum(worse for _, worse in by_hand) > 3

    states = [h for sequence in sequences for h in states_before(params.decoder, *sequence)]
    gradient = np.zeros(CONFIG.model.hidden_size)
    for h, w, r, (_, worse) in zip(states, weight, target, by_hand):
        gradient -= 0.0 if worse else w * r * h / W
    np.testing.assert_allclose(result.grad_norm, np.linalg.norm(gradient), rtol=1e-4)
    clear = np.abs(gradient) > 1e-3
    expected = -rate * np.sign(gradient[clear])
    np.testing.assert_allclose(new.params.head_D[clear], expected, rtol=1e-3)
    kept = 1 - rate * CONFIG.optimizer.weight_decay
    for a, b in zip(jax.tree.leaves(new.params.decoder), jax.tree.leaves(params.decoder)):
        np.testing.assert_allclose(a, kept * b, atol=1e-7)
    assert clear.sum() > 20 and new.updates == 1
