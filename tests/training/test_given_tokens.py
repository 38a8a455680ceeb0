"""Tokens that were given, not sampled, are context: no sum, no mean and no count of an update has
them."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.algorithms.advantages import ADVANTAGES
from dapo_jax.config import CorrectionConfig
from dapo_jax.models import decoder
from dapo_jax.models.attention import xla
from dapo_jax.training import metrics
from dapo_jax.training import step as train_step
from dapo_jax.training.batch import (
    TokenColumns,
    estimate_advantages,
    make_samples,
    with_corrections,
)
from dapo_jax.training.packing import take_columns
from tests.support.helpers import make_params, tiny_config
from tests.training.test_learner import make_learner, make_varied_groups, train_on

pytestmark = pytest.mark.usefixtures("standard_promotion")
TEMPERATURE, KL, BONUS = 0.8, 0.1, 0.01
ONE_UPDATE = {"train__prompts_per_update": 4, "rollout__temperature": TEMPERATURE}
IN_LOSS = {"objective__kl_coefficient": KL, "objective__entropy_coefficient": BONUS}
METHODS = {
    "dapo": IN_LOSS,
    "kl-in-reward": {
        "objective__reward_kl_coefficient": KL,
        "objective__kl_estimator": "k1",
    },
    "gspo": IN_LOSS
    | {
        "objective__loss": "gspo",
        "objective__clip_dual": None,
        "objective__aggregation": "seq-mean-token-mean",
    },
    "ppo": {
        "objective__advantage": "gae",
        "objective__advantage_args": {"gamma": 0.9, "gae_lambda": 0.8},
        "objective__clip_dual": None,
        "objective__reward_kl_coefficient": KL,
        "objective__kl_estimator": "k1",
        "dynamic_sampling__enabled": False,
        "critic": dict(learning_rate=1e-3, value_clip=0.5, head_start_steps=0),
    },
}


def given_groups(seed=0):
    """Groups in which every second response has given tokens: at its beginning, in it, in two
    places, or at its end."""
    rng, out = np.random.default_rng(seed), []
    for group in make_varied_groups():
        responses = []
        for i, response in enumerate(group.responses):
            n = len(response.tokens)
            log_probs = (-3.4 + 0.3 * rng.standard_normal(n)).astype(np.float32)
            if i % 2 and n > 3:
                places = [[0, 1], [n // 2], [1, n - 2], [n - 1]][(len(out) + i // 2) % 4]
                log_probs[places] = np.nan
            responses.append(response._replace(log_probs=log_probs))
        out.append(group._replace(responses=tuple(responses)))
    assert sum(not r.sampled.all() for group in out for r in group.responses) >= 6
    return out


def statistics(params, config, groups):
    """For each response, log-probs and entropies of its tokens, [G][2, T]: one pass over whole
    sequences, each in a row of its own. Padding comes after them, and no token attends to it."""
    T = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    pairs = [(g.problem.prompt_tokens, r.tokens) for g in groups for r in g.responses]
    tokens_RT = np.zeros((len(pairs), T), np.int32)
    for row, (prompt, response) in zip(tokens_RT, pairs):
        row[: len(prompt) + len(response)] = [*prompt, *response]
    attend = xla.packed(jnp.ones(tokens_RT.shape, jnp.int32))
    positions = jnp.broadcast_to(jnp.arange(T), tokens_RT.shape)
    hidden, _ = decoder.bind(config.model, params)(jnp.asarray(tokens_RT), positions, attend)
    logits = jnp.einsum("rtd,vd->rtv", hidden, decoder.unembedding(params)) / TEMPERATURE
    log_p = jax.nn.log_softmax(logits)[:, :-1]
    own = jnp.take_along_axis(log_p, jnp.asarray(tokens_RT)[:, 1:, None], 2)[..., 0]
    both = jnp.stack([own, -(jnp.exp(log_p) * log_p).sum(axis=2)], axis=1)
    firsts = [len(prompt) - 1 for prompt, _ in pairs]
    found = [x[:, at : at + len(y)] for x, at, (_, y) in zip(both, firsts, pairs)]
    return [found[i : i + len(g.responses)] for g, i in zip(groups, range(0, len(found), 4))]


def reward_by_hand(response, verdict):
    """The scorer's, and DAPO eq. 13 on all tokens, given ones too."""
    n = len(response.tokens)
    return verdict.reward + (0.0 if n <= 24 else (24 - n) / 8)


def advantages_by_hand(name, groups, refs, values):
    """For each response, by position: A of each sampled token; and its return with a critic."""
    found, returns = [], []
    for group, ref_G, value_G in zip(groups, refs, values):
        rewards = [reward_by_hand(r, v) for r, v in zip(group.responses, group.verdicts)]
        if name == "kl-in-reward":
            for i, (response, ref) in enumerate(zip(group.responses, ref_G)):
                at = np.flatnonzero(response.sampled)
                rewards[i] -= KL * sum(response.log_probs[t] - ref[t] for t in at)
        mean = sum(rewards) / len(rewards)
        deviation = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
        for response, reward, ref, value in zip(group.responses, rewards, ref_G, value_G):
            at = [t for t in range(len(response.tokens)) if not math.isnan(response.log_probs[t])]
            if name != "ppo":
                found.append({t: (reward - mean) / (deviation + 1e-6) for t in at})
                continue
            next_value = next_advantage = 0.0
            advantage = {}
            for t in reversed(at):
                r = -KL * (response.log_probs[t] - ref[t]) + (reward if t == at[-1] else 0.0)
                delta = r + 0.9 * next_value - value[t]
                advantage[t] = next_advantage = delta + 0.9 * 0.8 * next_advantage
                next_value = value[t]
            found.append(advantage)
            returns.append({t: a + value[t] for t, a in advantage.items()})
    if name == "ppo":
        every = [a for of in found for a in of.values()]
        mean = sum(every) / len(every)
        deviation = math.sqrt(sum((a - mean) ** 2 for a in every) / (len(every) - 1) + 1e-8)
        found = [{t: (a - mean) / deviation for t, a in of.items()} for of in found]
    return found, returns


def loss_by_hand(name, params, config, groups, refs, advantages):
    """The loss of the mini-batch, response by response, of sampled tokens alone."""
    loss, tokens, each = 0.0, 0, []
    o, found = config.objective, statistics(params, config, groups)
    flat = lambda nested: [x for of_group in nested for x in of_group]
    responses = zip(flat(g.responses for g in groups), flat(refs), flat(found), advantages)
    for response, ref, (log_prob, entropy), advantage in responses:
        at = np.array(sorted(advantage), int)
        A, old = np.array([advantage[t] for t in at]), response.log_probs[at]
        log_prob, entropy, ref = log_prob[at], entropy[at], ref[at]
        log_ratio = log_prob - old
        if name == "gspo":
            log_ratio = log_ratio.sum() / len(at) * np.ones(len(at))
        ratio = jnp.exp(log_ratio)
        J = jnp.minimum(ratio * A, jnp.clip(ratio, 1 - o.clip_low, 1 + o.clip_high) * A)
        if o.clip_dual is not None:
            J = jnp.where(A < 0, jnp.maximum(J, o.clip_dual * A), J)
        terms = -J
        if name in ("dapo", "gspo"):
            k3 = jnp.exp(ref - log_prob) - (ref - log_prob) - 1
            terms = terms + KL * jnp.minimum(k3, 10.0) - BONUS * entropy
        loss, tokens = loss + terms.sum(), tokens + len(at)
        each.append(terms.sum() / len(at))
    return sum(each) / len(each) if name == "gspo" else loss / tokens


@pytest.mark.parametrize("name", METHODS)
def test_the_gradient_leaves_out_given_tokens(name):
    learner, state = make_learner(**ONE_UPDATE, **METHODS[name])
    config, groups, calls = learner.config, given_groups(), []
    params = make_params(config)
    if state.critic is not None:
        head = 0.3 * jax.random.normal(jax.random.key(0), (config.model.hidden_size,))
        critic = state.critic._replace(params=state.critic.params._replace(head_D=head))
        state = state._replace(critic=critic)
    update = learner.update
    learner.update = lambda *args: calls.append(args) or update(*jax.tree.map(jnp.copy, args))
    packed, cut = [], learner._cut
    learner._cut = lambda samples: packed.extend(cut(samples)) or packed
    order = np.random.default_rng([config.seed, 1]).permutation(len(groups))
    groups = [groups[i] for i in order]
    _, numbers = train_on(learner, state, [groups[i] for i in np.argsort(order)])

    ((_, rows, used, denominator, *_),) = calls
    with_mesh = jax.device_get(rows)
    run = jax.jit(lambda p, rows: train_step.gradient(config, p, rows, used, denominator)[0])
    got = run(params, jax.tree.map(jnp.asarray, with_mesh))

    reference = jax.jit(lambda p: statistics(p, config, groups))
    with jax.numpy_rank_promotion("allow"):
        refs = [[np.asarray(x[0]) for x in of] for of in reference(learner.reference)]
    lengths = [len(r.tokens) for g in groups for r in g.responses]
    column = lambda name: np.split(
        take_columns(packed[0].packed, getattr(with_mesh, name)), np.cumsum(lengths)[:-1]
    )
    values = np.empty((len(groups), 4), object)
    for i, value in enumerate(column("value_old_BT")):
        values[divmod(i, 4)] = value
    advantages, returns = advantages_by_hand(name, groups, refs, values)
    loss = lambda p: loss_by_hand(name, p, config, groups, refs, advantages)
    with jax.numpy_rank_promotion("allow"):
        value, expected = jax.jit(jax.value_and_grad(loss))(params)
    for x, y in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(y, x, rtol=0, atol=2e-5 * max(np.abs(x).max(), 1e-6))
    assert numbers["policy/loss"] == pytest.approx(float(value), rel=1e-4, abs=1e-6)
    num = sum(map(len, advantages))
    assert numbers["batch/tokens_trained"] == num < sum(lengths)
    assert all(math.isfinite(x) for x in numbers.values())
    if name == "ppo":
        for of_response, return_T in zip(returns, column("return_BT"), strict=True):
            got = [return_T[t] for t in of_response]
            np.testing.assert_allclose(got, list(of_response.values()), atol=1e-5)
        flat = [v[t] for v, of in zip(values.ravel(), advantages) for t in of]
        targets = [x for of in returns for x in of.values()]
        squares = [0.5 * (v - x) ** 2 for v, x in zip(flat, targets)]
        assert numbers["critic/loss"] == pytest.approx(sum(squares) / num, rel=1e-5)
        kl = [
            r.log_probs[t] - ref[t]
            for g, ref_G in zip(groups, refs)
            for r, ref in zip(g.responses, ref_G)
            for t in np.flatnonzero(r.sampled)
        ]
        assert numbers["reward/kl"] == pytest.approx(np.mean(kl), rel=1e-4)


def text(sequences):
    return ["x" * len(s) for s in sequences]


def dropped(groups):
    """The groups without their given tokens."""
    without = lambda r: r._replace(tokens=r.tokens[r.sampled], log_probs=r.log_probs[r.sampled])
    return [g._replace(responses=tuple(map(without, g.responses))) for g in groups]


NO_PUNISHMENT = {"reward__overlong_buffer_tokens": 0, "reward__overlong_penalty": 0.0}
METHOD_FIELDS = {
    "maxrl": {"reward__incorrect": 0.0},
    "gpg": {"reward__incorrect": 0.0},
    "gdpo": {"objective__advantage_args": {"component_weights": (1.0, 1.0)}},
    "gae": METHODS["ppo"]
    | {"objective__reward_kl_coefficient": 0.0, "objective__kl_estimator": "k3"},
    "reinforce++": {"objective__advantage_args": {"gamma": 0.9}},
}


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_are_those_of_the_responses_without_given_tokens(name):
    fields = {"objective__advantage": name} | METHOD_FIELDS.get(name, {})
    config, groups = tiny_config(**NO_PUNISHMENT, **fields), given_groups()
    if name in ("maxrl", "gpg"):
        verdicts = lambda g: tuple(v._replace(reward=float(v.correct)) for v in g.verdicts)
        groups = [g._replace(verdicts=verdicts(g)) for g in groups]
    both = []
    for of in (groups, dropped(groups)):
        if name == "grpo-process":  # three steps, by the tokens that are sampled
            ends = [np.flatnonzero(r.sampled) + 1 for g in of for r in g.responses]
            steps = [[(int(e[len(e) * i // 3 - 1]), float(i % 2)) for i in (1, 2, 3)] for e in ends]
            steps = iter([tuple(s) for s in steps])
            of = [
                g._replace(verdicts=tuple(v._replace(steps=next(steps)) for v in g.verdicts))
                for g in of
            ]
        both.append(make_samples(config, of, 1, text))
    samples, others = both
    sampled_M = samples.sampled_M
    assert 0 < sampled_M.sum() == len(others.tokens_M) < len(sampled_M)
    rng = np.random.default_rng(0)
    of_tokens = {
        "kl_penalty_M": np.where(sampled_M, rng.standard_normal(len(sampled_M)), 0.0),
        "values_M": rng.standard_normal(len(sampled_M)),
        "energy_M": rng.random(len(sampled_M)),
    }
    baselines = {"baselines_R": rng.standard_normal(len(samples.lengths_R))}
    if name == "maxrl":  # rewards are 0 or more
        of_tokens["kl_penalty_M"] *= 0.0
    got = estimate_advantages(config, samples, **of_tokens, **baselines)
    taken = {key: x[sampled_M] for key, x in of_tokens.items()}
    expected = estimate_advantages(config, others, **taken, **baselines)
    np.testing.assert_allclose(got.advantage_M[sampled_M], expected.advantage_M, rtol=1e-12)
    assert not got.advantage_M[~sampled_M].any() and expected.advantage_M.any()


@pytest.mark.parametrize(
    "fields",
    [
        {"objective__top_entropy_share": 0.3},
        {"objective__loss": "kl-cov", "objective__loss_args": {"cov_share": 0.2}},
        {
            "objective__loss": "clip-cov",
            "objective__loss_args": {"cov_share": 0.1, "cov_low": 0.01, "cov_high": 5.0},
        },
        {
            "rollout__log_prob_source": "recompute",
            "correction": CorrectionConfig(
                policy="old",
                importance=("normalised-sequence", None, 1.5),
                reject=(
                    ("seq-mean-k1", 0.9, 1.1),
                    ("token-k2", None, 0.2),
                    ("sequence-mask", None, 0.05),
                ),
            ),
        },
    ],
    ids=["entropy", "kl-cov", "clip-cov", "correction"],
)
def test_choices_of_tokens_are_those_of_the_responses_without_given_tokens(fields):
    """Corrections, top entropies and covariances, and what is measured of the mismatch."""
    base = tiny_config()
    objective = {k.removeprefix("objective__"): v for k, v in fields.items() if "objective" in k}
    config = dataclasses.replace(
        base,
        objective=dataclasses.replace(base.objective, **objective),
        correction=fields.get("correction"),
    )
    both = [make_samples(config, g, 2, text) for g in (given_groups(), dropped(given_groups()))]
    samples, others = both
    sampled_M, rng = samples.sampled_M, np.random.default_rng(0)
    samples = samples._replace(staleness_M=rng.integers(0, 3, len(sampled_M)))
    others = others._replace(staleness_M=samples.staleness_M[sampled_M])
    random = lambda: rng.standard_normal(len(sampled_M)).astype(np.float32)
    columns = TokenColumns(
        mask_M=samples.trained_M,
        advantage_M=random(),
        log_prob_old_M=samples.log_prob_M,
        recomputed_M=-3.4 + 0.3 * random(),
        entropy_M=np.abs(random()),
    )
    current_M, priority_M = -3.4 + 0.3 * random(), rng.random(len(sampled_M))
    got = with_corrections(
        config,
        columns,
        samples.lengths_R,
        samples.log_prob_M,
        current_M=current_M,
        priority_M=priority_M,
    )
    expected = with_corrections(
        config,
        columns.part(sampled_M),
        others.lengths_R,
        others.log_prob_M,
        current_M=current_M[sampled_M],
        priority_M=priority_M[sampled_M],
    )
    jax.tree.map(np.testing.assert_array_equal, got.part(sampled_M), expected)
    assert not got.mask_M[~sampled_M].any() and not got.correction_M[~sampled_M].any()
    recomputed_M = columns.recomputed_M
    for function in (metrics.mismatch_metrics, metrics.stale_mismatch_metrics):
        measured = function(samples, recomputed_M)
        assert measured and measured == function(others, recomputed_M[sampled_M])
    assert metrics.staleness_metrics(samples) == metrics.staleness_metrics(others)
