"""What must hold of the gradient under every policy loss and every aggregation.

One compiled program serves all aggregations of a loss: they differ in the weights of the rows.
"""

import jax
import numpy as np
import pytest

from dapo_jax.algorithms.aggregation import aggregate
from dapo_jax.algorithms.losses import LOSSES
from dapo_jax.models.sharding import param_shardings, row_sharding
from dapo_jax.training import packing, step
from tests.algorithms.test_aggregation import MEANS, SUMS
from tests.algorithms.test_policy_losses import configured
from tests.support.helpers import (
    make_mesh,
    make_params,
    pack_samples,
    random_samples,
    segments_of,
    tiny_config,
)

GROUPS = [0, 0, 0, 1, 1, 1, 1, 2, 2, 2]  # of ten responses
FILTERED, EQUAL_REWARDS = 4, 2  # a response left out of the loss; a group that teaches nothing
MICRO = {
    "model__hidden_size": 16,
    "model__num_layers": 1,
    "model__num_heads": 2,
    "model__num_kv_heads": 1,
    "model__intermediate_size": 16,
    "objective__kl_coefficient": 0.1,
    "objective__kl_estimator": "k3",
    "objective__entropy_coefficient": 0.01,
}
gradient = jax.jit(step.gradient, static_argnums=0, static_argnames="mesh")


def make_batch(seed=0):
    """Ten responses, one of a single token, some far off their old policy; columns by name."""
    rng = np.random.default_rng(seed)
    samples = random_samples(rng, 10, longest=20)
    samples[0] = samples[0]._replace(
        response_tokens=samples[0].response_tokens[:1], log_prob_old=samples[0].log_prob_old[:1]
    )
    lengths_R = np.array([len(s.response_tokens) for s in samples])
    n = lengths_R.sum()
    trained_M = np.repeat(np.arange(10) != FILTERED, lengths_R)
    old_M = np.concatenate([s.log_prob_old for s in samples])
    old_M[lengths_R[0] + rng.choice(lengths_R[1], 2, replace=False)] = -1e4  # of response 1
    old_M[~trained_M] = -np.inf  # whatever stands under the mask
    teaches_M = np.repeat(np.array(GROUPS) != EQUAL_REWARDS, lengths_R)
    columns = {
        "mask_BT": trained_M,
        "log_prob_old_BT": old_M,
        "log_prob_ref_BT": np.where(trained_M, -3.4 + 0.3 * rng.standard_normal(n), -np.inf),
        "advantage_BT": np.repeat(rng.standard_normal(10), lengths_R) * teaches_M,
        "correction_BT": trained_M * rng.uniform(0.5, 1.5, n),
        "selected_BT": trained_M & (rng.random(n) < 0.2),
    }
    return samples, lengths_R, columns


def rows_of_batch(batch, order, aggregation, row_tokens=64, groups=GROUPS):
    """(packed rows, denominator) of these responses, in this order."""
    samples, lengths_R, columns = batch
    offsets = np.cumsum(lengths_R) - lengths_R
    take = lambda x: np.concatenate([x[offsets[i] : offsets[i] + lengths_R[i]] for i in order])
    columns = {name: take(column) for name, column in columns.items()}
    counted = np.array([0 if i == FILTERED else lengths_R[i] for i in order])
    weights = aggregate(
        counted, np.array(groups)[order], aggregation=aggregation, max_response_tokens=32
    )
    columns["weight_BT"] = np.repeat(weights.numerator_R, lengths_R[order]) * columns["mask_BT"]
    packed = pack_samples([samples[i] for i in order], row_tokens)
    return packing.fill(packed, **columns), np.float32(weights.denominator)


def cut(rows, B, M):
    used = packing.used_micro_batches(len(rows.tokens_BT), B)
    return (
        packing.to_micro_batches(rows, rows_per_micro_batch=B, num_micro_batches=M),
        np.int32(used),
    )


def assert_same(a, b):
    largest = max(float(np.abs(x).max()) for x in jax.tree.leaves(a))
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.isfinite(x).all()
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), atol=3e-6 * largest)


NOT_SLOW = "ppo-clip", "gspo", "kl-cov"
slow = lambda name: () if name in NOT_SLOW else pytest.mark.slow


@pytest.mark.parametrize("name", [pytest.param(name, marks=slow(name)) for name in LOSSES])
def test_no_way_of_cutting_the_batch_matters(name):
    """Packing, padding, order and micro-batches; eight devices as one."""
    sizes = {"mesh__data": 2, "mesh__fsdp": 2, "mesh__context": 2}
    config = tiny_config(**configured(name), **MICRO, **sizes, train__prompts_per_update=4)
    params, batch, order = make_params(config), make_batch(), np.arange(10)
    mesh = make_mesh(config, 8)
    spread = jax.device_put(params, param_shardings(config.model, config.mesh, mesh))
    for aggregation in MEANS + SUMS:
        rows, W = rows_of_batch(batch, order, aggregation)
        whole = gradient(config, params, *cut(rows, 8, 1), W)[0]
        assert_same(whole, gradient(config, params, *cut(rows, 2, 5), W)[0])
        shuffled, W = rows_of_batch(batch, order[::-1].copy(), aggregation)
        assert_same(whole, gradient(config, params, *cut(shuffled, 8, 1), W)[0])
        # Each response in a row of its own, most of it padding.
        alone = [rows_of_batch(batch, np.array([i]), aggregation)[0] for i in order]
        alone = type(rows)(*(np.concatenate(x) for x in zip(*alone)))
        alone = alone._replace(weight_BT=weights_like(alone, rows))
        assert_same(whole, gradient(config, params, *cut(alone, 2, 5), W)[0])
        rows_M, n = cut(rows, 8, 1)
        rows_M = jax.device_put(rows_M, row_sharding(mesh, batch_dim=1))
        assert_same(whole, gradient(config, spread, rows_M, n, W, mesh=mesh)[0])


def weights_like(rows, other):
    """The weights of `other`, token by token of the same responses in another layout."""
    found = {}
    for row, at in segments_of(other):
        found[tuple(other.tokens_BT[row, at])] = other.weight_BT[row, at]
    weights = np.zeros_like(rows.weight_BT)
    for row, at in segments_of(rows):
        weights[row, at] = found[tuple(rows.tokens_BT[row, at])]
    return weights


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"dro", "kl-cov", "policy-gradient"}))
def test_a_group_of_equal_rewards_has_no_gradient(name):
    """Not of the two losses that have a term without the advantage, nor of the one without a
    ratio. Where the old log-probs of a response make no difference, its policy term has no
    gradient."""
    config = tiny_config(**configured(name), **MICRO)
    params, (samples, lengths_R, columns) = make_params(config), make_batch()
    # Without the tokens far off their old policy, in whose gradient all others would drown.
    columns["log_prob_old_BT"] = np.clip(columns["log_prob_old_BT"], -3.6, -3.3)

    def gradient_with(groups, aggregation):
        """The gradient with other old log-probs for the responses of these groups."""
        spoilt = np.repeat(np.isin(GROUPS, groups), lengths_R) & columns["mask_BT"]
        old_M = columns["log_prob_old_BT"] + np.where(spoilt, -0.5, 0.0)
        batch = (samples, lengths_R, columns | {"log_prob_old_BT": old_M})
        rows, W = rows_of_batch(batch, np.arange(10), aggregation)
        return jax.tree.leaves(gradient(config, params, *cut(rows, 8, 1), W)[0])

    for aggregation in MEANS + SUMS:
        none, equal, teaching = (
            gradient_with(groups, aggregation) for groups in ([], [EQUAL_REWARDS], [0, 1])
        )
        assert all((x == y).all() for x, y in zip(none, equal, strict=True))
        assert any((x != y).any() for x, y in zip(none, teaching, strict=True))
