"""The update: what it computes, on one device and on eight."""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.config import ModelConfig
from dapo_jax.models import decoder, log_probs, sharding
from dapo_jax.models.attention import xla
from dapo_jax.training import packing
from dapo_jax.training import step as train_step
from tests.algorithms.test_surrogate import surrogate_by_hand
from tests.support.helpers import (
    in_groups,
    logits_of,
    make_mesh,
    make_params,
    random_samples,
    replace_model,
    rows_of,
    segments_of,
    tiny_config,
)

CONFIG = tiny_config(
    objective__kl_coefficient=0.1,
    objective__kl_estimator="k3",
    objective__entropy_coefficient=0.05,
    rollout__temperature=0.8,
)


@pytest.fixture(scope="module")
def params():
    return make_params(CONFIG)


@pytest.fixture(scope="module")
def samples():
    return random_samples(np.random.default_rng(0), 12)


def log_probs_by_hand(config, params, sample):
    """(log p(token), entropy) of each response token, from the whole sequence alone in a batch."""
    tokens = np.array([*sample.prompt_tokens, *sample.response_tokens])
    logits = logits_of(config.model, params, tokens).astype(np.float64)
    logits = logits / config.rollout.temperature
    out = []
    for t in range(len(sample.prompt_tokens), len(tokens)):
        before = logits[t - 1]
        total = np.log(np.exp(before - before.max()).sum()) + before.max()
        p = np.exp(before - total)
        out.append((before[tokens[t]] - total, -(p * np.log(p)).sum()))
    return np.array(out).T


def stack(samples, *, rows_per_micro_batch, num_micro_batches, row_tokens=64, share_prompts=False):
    """(rows, micro-batches used, denominator): the weights of the samples times 3, over 3."""
    rows = rows_of(samples, row_tokens, share_prompts=share_prompts)
    rows = rows._replace(weight_BT=3 * rows.weight_BT)
    return (
        packing.to_micro_batches(
            rows, rows_per_micro_batch=rows_per_micro_batch, num_micro_batches=num_micro_batches
        ),
        np.int32(packing.used_micro_batches(len(rows.tokens_BT), rows_per_micro_batch)),
        np.float32(3),
    )


gradient = jax.jit(train_step.gradient, static_argnums=0)  # compiled once per config and shape


def assert_close(a, b, tolerance):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        scale = max(1e-3, float(np.abs(x).max()))
        np.testing.assert_allclose(np.asarray(x) / scale, np.asarray(y) / scale, atol=tolerance)


def test_row_log_probs_speak_of_their_own_token(params, samples):
    """Packed and shifted, against each sequence alone: an off-by-one cannot pass."""
    rows = rows_of(samples, 64)
    score = functools.partial(log_probs.row_statistics, CONFIG.model, temperature=0.8)
    got = jax.jit(score)(params, rows).log_prob_BT
    expected = {
        tuple(s.response_tokens.tolist()): log_probs_by_hand(CONFIG, params, s)[0] for s in samples
    }
    found = 0
    for row, segment in segments_of(rows):
        at = rows.mask_BT[row] & segment
        hand = expected[tuple(rows.tokens_BT[row, at].tolist())]
        np.testing.assert_allclose(got[row, at], hand, atol=1e-5)
        found += 1
    assert found == len(samples)


@pytest.fixture(scope="module")
def by_hand(params, samples):
    """(log-probs, entropies) of the response tokens of each sample."""
    return [log_probs_by_hand(CONFIG, params, sample) for sample in samples]


def test_loss_is_the_weighted_sum_over_response_tokens(params, samples, by_hand):
    o, total = CONFIG.objective, 0.0
    for sample, (logp, entropy) in zip(samples, by_hand, strict=True):
        adv, mask = np.full(len(logp), sample.advantage), np.ones(len(logp), bool)
        bounds = o.clip_low, o.clip_high, o.clip_dual
        value = surrogate_by_hand(logp, sample.log_prob_old, adv, mask, *bounds)
        # k3 against a reference of log-prob 0, bounded by 10.
        kl = np.minimum(np.exp(-logp) - 1 + logp, 10)
        each = -sample.correction * value + o.kl_coefficient * kl - 0.05 * entropy
        total += (sample.weight * each).sum()
    rows, n, W = stack(samples, rows_per_micro_batch=8, num_micro_batches=2)
    _, sums, _ = gradient(CONFIG, params, rows, n, W)
    np.testing.assert_allclose(sums.loss, total, rtol=1e-4)


def test_statistics_are_of_the_trained_tokens_of_all_micro_batches(params, samples, by_hand):
    """Every third sample is stale; the mismatch alone leaves it out."""
    samples = [s._replace(staleness=int(i % 3 == 2)) for i, s in enumerate(samples)]
    rows, n, W = stack(samples, rows_per_micro_batch=1, num_micro_batches=8)
    assert 1 < n < 8
    _, sums, extremes = gradient(CONFIG, params, rows, n, W)

    o, lengths = CONFIG.objective, [len(s.response_tokens) for s in samples]
    logp, entropy = np.concatenate(by_hand, axis=1)
    d = logp - np.concatenate([s.log_prob_old for s in samples])
    adv = np.repeat([s.advantage for s in samples], lengths)
    fresh = np.repeat([s.staleness == 0 for s in samples], lengths)
    ratio, prob = np.exp(d), np.exp(logp)
    clipped = {
        "clip_high": (adv > 0) & (ratio > 1 + o.clip_high),
        "clip_low": (adv < 0) & (ratio < 1 - o.clip_low),
        "clip_dual": (adv < 0) & (ratio > o.clip_dual),
    }
    assert all(at.any() for at in clipped.values())
    expected = {
        "tokens": len(logp),
        "entropy": entropy.sum(),
        "token_prob": prob.sum(),
        # KL(old || current) of tokens that the old policy sampled.
        "kl_old": np.minimum(np.exp(d) - 1 - d, 10).sum(),
        "kl_ref": np.minimum(np.exp(-logp) - 1 + logp, 10).sum(),
        "mismatch": np.abs(d[fresh]).sum(),
        "mismatch_tokens": fresh.sum(),
    }
    expected |= {name: at.sum() for name, at in clipped.items()}
    expected |= {f"{name}_prob": prob[at].sum() for name, at in clipped.items()}
    assert expected.keys() == set(sums._fields) - {"loss"}
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(sums, name), value, rtol=1e-4, err_msg=name)
    largest = ratio.max(), -ratio.min(), np.abs(d[fresh]).max()
    np.testing.assert_allclose(extremes, largest, rtol=1e-4)


def test_micro_batches_beyond_the_used_are_not_computed(params, samples):
    rows, n, W = stack(samples, rows_per_micro_batch=1, num_micro_batches=8)
    broken = rows._replace(advantage_BT=rows.advantage_BT.copy())
    broken.advantage_BT[n:] = np.nan
    broken.mask_BT[n:] = True
    assert n < 8
    grads, sums, _ = gradient(CONFIG, params, broken, n, W)
    assert np.isfinite(sums.loss) and all(np.isfinite(g).all() for g in jax.tree.leaves(grads))


def test_shared_prompts_change_nothing(params, samples):
    """Fewer rows, the same gradient and statistics, of a loss of whole responses."""
    samples = [s._replace(prompt_tokens=2 * s.prompt_tokens) for s in in_groups(samples, 4)]
    objective = dataclasses.replace(CONFIG.objective, loss="gspo", clip_dual=None)
    found = []
    for share in (False, True):
        train = dataclasses.replace(CONFIG.train, share_prompts=share)
        config = dataclasses.replace(CONFIG, objective=objective, train=train)
        rows, n, W = stack(
            samples, rows_per_micro_batch=1, num_micro_batches=8, share_prompts=share
        )
        found.append((n, gradient(config, params, rows, n, W)))
    (rows_alone, alone), (rows_shared, shared) = found
    assert rows_shared < rows_alone
    assert_close(alone, shared, 2e-6)


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    "sizes, vocab, share_prompts",
    [
        ((2, 2, 1, 2), "tensor", False),
        ((1, 1, 8, 1), None, False),
        ((1, 2, 2, 2), "tensor", True),
    ],
)
def test_eight_devices_give_what_one_gives(params, samples, sizes, vocab, share_prompts):
    samples = in_groups(samples, 4) if share_prompts else samples
    results = []
    for shape in ((1, 1, 1, 1), sizes):
        # With shared prompts, held against one device and rows that share nothing.
        share = share_prompts and shape == sizes
        rows, n, W = stack(
            samples, rows_per_micro_batch=8, num_micro_batches=2, share_prompts=share
        )
        layout = dataclasses.replace(
            CONFIG.mesh,
            **dict(zip(sharding.AXES, shape, strict=True)),
            rules=(("vocab", vocab), *CONFIG.mesh.rules[1:]),
        )
        train = dataclasses.replace(CONFIG.train, share_prompts=share)
        config = dataclasses.replace(CONFIG, mesh=layout, train=train)
        if share:  # and log-probs of trained tokens alone, in chunks
            chunked = dataclasses.replace(config.model, log_prob_chunk_tokens=32)
            config = dataclasses.replace(config, model=chunked)
        mesh = make_mesh(config, int(np.prod(shape)))
        host = jax.device_get(train_step.init_state(config, params))  # the update donates its state
        state = jax.device_put(host, train_step.state_shardings(config, mesh))
        state, result = train_step.jitted_update(config, mesh)(
            state, rows, n, W, np.float32(1e-3), None
        )
        results.append(jax.device_get((state, result)))
        q, (_, *split) = state.params["layers"]["q"], shape
        assert q.addressable_shards[0].data.size == q.size // np.prod(split)
    (one, one_result), (many, many_result) = results
    assert_close(one_result.sums, many_result.sums, 2e-5)
    np.testing.assert_allclose(one_result.grad_norm, many_result.grad_norm, rtol=1e-5)
    assert_close(one.moments, many.moments, 1e-5)  # that is, the clipped gradients
    for a, b in zip(jax.tree.leaves(one.params), jax.tree.leaves(many.params), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.usefixtures("standard_promotion")
def test_adamw_step_by_hand(params, samples):
    """One update against AdamW written out, clipping included."""
    rows, n, W = stack(samples, rows_per_micro_batch=8, num_micro_batches=1)
    grads, _, _ = gradient(CONFIG, params, rows, n, W)
    o, rate = CONFIG.optimizer, 3e-3
    norm = np.sqrt(sum((np.asarray(g, np.float64) ** 2).sum() for g in jax.tree.leaves(grads)))
    update = jax.jit(functools.partial(train_step.update, CONFIG))
    new, result = update(train_step.init_state(CONFIG, params), rows, n, W, np.float32(rate))
    np.testing.assert_allclose(result.grad_norm, norm, rtol=1e-5)
    for p, g, q in zip(*map(jax.tree.leaves, (params, grads, new.params)), strict=True):
        p, g = np.asarray(p, np.float64), np.asarray(g, np.float64)
        g = g * min(1.0, o.max_grad_norm / norm)
        step = g / (np.sqrt(g**2) + o.eps) + o.weight_decay * p
        expected = p - rate * step
        clear = np.abs(g) > 1e-5  # where the sign of the gradient is not rounding
        np.testing.assert_allclose(np.asarray(q)[clear], expected[clear], atol=2e-6)
    assert new.updates == 1


@pytest.mark.usefixtures("standard_promotion")
def test_a_non_finite_gradient_changes_nothing_and_is_counted(params, samples):
    rows, n, W = stack(samples, rows_per_micro_batch=8, num_micro_batches=1)
    rows.advantage_BT[0, 0, np.flatnonzero(rows.mask_BT[0, 0])[0]] = np.inf
    state = train_step.init_state(CONFIG, params)
    update = jax.jit(functools.partial(train_step.update, CONFIG))
    for skipped in (1, 2):
        state, result = update(state, rows, n, W, np.float32(1e-3))
        assert result.skipped == skipped and state.updates == 0
    jax.tree.map(np.testing.assert_array_equal, state.params, params)
    rows, n, W = stack(samples, rows_per_micro_batch=8, num_micro_batches=1)
    state, result = update(state, rows, n, W, np.float32(1e-3))
    assert result.skipped == 0 and state.updates == 1


@pytest.mark.slow
def test_rematerialisation_keeps_less_and_changes_nothing():
    """The gradient through the layers with each policy, and the temporaries of its program, which
    config.py lists from most to least."""
    kinds = typing.get_args(typing.get_type_hints(ModelConfig)["remat"])
    # Sizes at which activations are most of the memory.
    sizes = {
        "num_heads": 4,
        "num_kv_heads": 4,
        "head_dim": 8,
        "intermediate_size": 64,
        "num_layers": 6,
    }
    configs = [replace_model(CONFIG, hidden_size=16, remat=kind, **sizes) for kind in kinds]
    params = decoder.init_params(configs[0], jax.random.key(0))
    rows = rows_of(random_samples(np.random.default_rng(0), 24), 64)

    def total(params, config):
        attend = xla.packed(jnp.asarray(rows.segments_BT))
        tokens_BT, positions_BT = jnp.asarray(rows.tokens_BT), jnp.asarray(rows.positions_BT)
        hidden_BTD, _ = decoder.bind(config, params)(tokens_BT, positions_BT, attend)
        return jnp.sum(hidden_BTD * jnp.sin(jnp.arange(16.0))[None, None])

    needed, found = [], []
    for config in configs:
        program = jax.jit(jax.grad(total), static_argnums=1).lower(params, config).compile()
        needed.append(program.memory_analysis().temp_size_in_bytes)
        found.append(program(params))
    for other in found[1:]:
        assert_close(found[0], other, 1e-6)
    assert needed == sorted(set(needed), reverse=True), dict(zip(kinds, needed))


def test_two_axes_on_one_mesh_axis_are_refused():
    rules = (*CONFIG.mesh.rules[:-2], ("ff", "fsdp"), ("layers", None))
    layout = dataclasses.replace(CONFIG.mesh, rules=rules)
    with pytest.raises(sharding.UserError, match="one mesh axis"):
        sharding.param_specs(CONFIG.model, layout)
