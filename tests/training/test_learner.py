"""One pass of training over a batch: log-probs, KL in the reward, skipped updates, rates."""

import dataclasses
import functools
import gc
import math
import weakref
from typing import NamedTuple

import jax
import numpy as np
import pytest

from dapo_jax.algorithms.kl import reward_kl
from dapo_jax.config import CorrectionConfig
from dapo_jax.setup import HostState
from dapo_jax.training import metrics
from dapo_jax.training import step as train_step
from dapo_jax.training.batch import TokenColumns, make_samples
from dapo_jax.training.critic import CriticMetrics, CriticSums
from dapo_jax.training.learner import Learner, _Updates
from dapo_jax.training.packing import take_columns
from dapo_jax.training.schedule import Schedule
from dapo_jax.types import RunError, UserError
from dapo_jax.utils.compilations import CompilationCounter
from dapo_jax.utils.random_streams import named_generator
from tests.support.helpers import (
    logits_of,
    make_group,
    make_mesh,
    make_params,
    segments_of,
    tiny_config,
)
from tests.training.test_metrics import update as update_of

pytestmark = pytest.mark.usefixtures("standard_promotion")
KL_IN_REWARD = {
    "objective__reward_kl_coefficient": 0.1,
    "objective__kl_estimator": "k3",
    "objective__advantage_args": {"normalise_std": False},
    "reward__overlong_buffer_tokens": 0,
    "reward__overlong_penalty": 0.0,
}
CRITIC = {
    "objective__advantage": "gae",
    "dynamic_sampling__enabled": False,
    "critic": dict(learning_rate=1e-3, value_clip=0.5, head_start_steps=2),
}


def make_learner(devices=1, **overrides):
    """(learner, its state, with a reference that is another model)."""
    config = tiny_config(**overrides)
    learner = Learner(config, make_mesh(config, devices), lambda s: [""] * len(s), print)
    if learner.needs_reference:
        learner.reference = make_params(config, seed=1)
    return learner, learner.init_state(make_params(config))


def make_groups(seed=0, **changes):
    """Four groups, half right, their lengths another for each seed."""
    lengths = np.random.default_rng(seed).integers(1, 30, (4, 4)).tolist()
    right = [True, False, False, True]
    return [make_group(right, lengths=n, id=i, **changes) for i, n in enumerate(lengths)]


def make_varied_groups(**changes):
    """`make_groups` with random tokens."""
    rng, groups = np.random.default_rng(0), []
    for group in make_groups(**changes):
        of = [r._replace(tokens=rng.integers(3, 32, len(r.tokens))) for r in group.responses]
        problem = group.problem._replace(prompt_tokens=tuple(rng.integers(3, 32, 5).tolist()))
        groups.append(group._replace(responses=tuple(of), problem=problem))
    return groups


def train_on(learner, state, groups, step=1, updated_steps=0, entropy_coefficient=0.0):
    """The state after the step, and its numbers."""
    schedule = Schedule(updated_steps, 0.1, entropy_coefficient)
    state, _, numbers = learner.train_on(state, schedule, groups, step)
    return state, numbers


def test_a_head_start_of_the_critic_uses_up_none_of_the_policys_warm_up():
    """And a step that made no update uses up nothing: the third and fifth of these are such."""
    learner, state = make_learner(**CRITIC, optimizer__warmup_steps=2, optimizer__learning_rate=0.1)
    cut = make_groups(truncated=4)
    filtered = dataclasses.replace(learner.config.objective, overlong_filter=True)
    learner.config = dataclasses.replace(learner.config, objective=filtered)
    schedule, rates = Schedule.first(learner.config.objective), []
    for step, groups in enumerate([make_groups()] * 2 + [cut] + [make_groups(), cut] * 3, 1):
        before = schedule.updated_steps
        state, schedule, numbers = learner.train_on(state, schedule, groups, step)
        assert schedule.updated_steps == before + (groups is not cut)
        if groups is not cut:
            rates.append(numbers["optimizer/learning_rate"])
    assert rates == pytest.approx([0.0, 0.0, 0.05, 0.1, 0.1])
    assert schedule.updated_steps == 5 and state.critic is not None and state.critic.updates == 10
    assert state.policy.updates == 6


ENERGY = {"objective__advantage": "optimal-token-baseline"}
KL_COV = {"objective__loss": "kl-cov"}
KL_COV |= {f"objective__clip_{bound}": None for bound in ("low", "high", "dual")}


@pytest.mark.parametrize(
    "ways",
    [
        CRITIC,
        KL_IN_REWARD,
        KL_COV,
        ENERGY,
        ENERGY | {"rollout__max_staleness": 2},
        {"objective__top_entropy_share": 0.2},
        {"rollout__log_prob_source": "recompute"},
    ],
)
def test_the_programs_that_are_compiled_are_those_that_a_step_calls(ways):
    """However a step needs log-probs. Updates are none here: they would take long to compile."""
    learner, state = make_learner(**ways)
    names = "update", "log_probs", "collision", "entropy", "values", "update_critic"
    programs = {name: getattr(learner, name) for name in names if hasattr(learner, name)}
    nothing = np.float32(0)
    of_critic = CriticMetrics(CriticSums(*[nothing] * 3), nothing, np.int32(0))
    results = {"update": update_of(4, np.float32(1)), "update_critic": of_critic}
    compiled, called = set(), set()

    class Program(NamedTuple):
        name: str

        def lower(self, *_):
            return self

        def compile(self):
            compiled.add(self.name)
            return self

        def __call__(self, *arguments):
            called.add(self.name)
            if self.name in results:
                return arguments[0], results[self.name]
            return programs[self.name](*arguments)

    for name in programs:
        setattr(learner, name, Program(name))
    learner.compile()
    schedule = Schedule(2, 0.1, 0.0)  # after the critic's head start
    learner.train_on(state, schedule, make_varied_groups(), 1)
    assert called == compiled


def test_every_forward_pass_and_update_is_reported():
    """However long they take together: the watchdog waits for the next."""
    learner, state = make_learner(rollout__log_prob_source="recompute")
    shown = []
    learner.doing = shown.append
    train_on(learner, state, make_groups())
    assert [text.removeprefix("step 1: ") for text in shown] == [
        *(f"log-probs of {i} of 2 mini-batches computed" for i in (1, 2)),
        *(f"{i} of 2 updates made" for i in (1, 2)),
    ]


def test_the_devices_hold_the_rows_of_two_mini_batches_at_most(monkeypatch):
    """And not those of the whole batch, which no plan counts."""
    learner, state = make_learner(
        rollout__log_prob_source="recompute", objective__kl_coefficient=0.1
    )
    place, placed, held = train_step.micro_batches_on, [], []

    def watched(*args, **kwargs):
        gc.collect()
        held.append(sum(rows() is not None for rows in placed))
        on_mesh, n = place(*args, **kwargs)
        placed.append(weakref.ref(on_mesh.tokens_BT))
        return on_mesh, n

    monkeypatch.setattr(train_step, "micro_batches_on", watched)
    train_on(learner, state, make_groups() * 3)
    assert len(placed) == 3 * 6 and max(held) <= 1


def test_the_host_state_survives_json():
    from dapo_jax.rollout.dynamic_sampling import DynamicSamplingState

    host = HostState(
        {"a": 1}, DynamicSamplingState(), 0.1, 0.2, Schedule(5, 0.3, 0.4), 4.0, 6.0, "a"
    )
    values = host.to_json()
    assert HostState.from_json(values) == host
    for others in (values | {"new": 1}, {k: x for k, x in values.items() if k != "heldout"}):
        with pytest.raises(UserError, match="another version of this code"):
            HostState.from_json(others)


def test_an_update_without_a_trained_token_moves_nothing():
    """Momentum and weight decay alone would move every parameter."""
    learner, state = make_learner(objective__overlong_filter=True)
    state, numbers = train_on(learner, state, make_groups())
    assert numbers["optimizer/updates"] == 2 and numbers["optimizer/empty_updates"] == 0
    before = jax.device_get(state)
    state, numbers = train_on(learner, state, make_groups(truncated=4), 2, 1)
    assert numbers["optimizer/updates"] == 0 and numbers["optimizer/empty_updates"] == 2
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(state))


def test_recomputed_log_probs_are_those_of_tokens_that_the_policy_itself_sampled():
    """A stale token's ratio is to the policy that sampled it."""
    learner, state = make_learner(rollout__log_prob_source="recompute")
    first, *others = make_groups()
    versions = np.full(len(first.responses[0].tokens), 3, np.int32)
    versions[: len(versions) // 2] = 2
    mixed = (first.responses[0]._replace(versions=versions), *first.responses[1:])
    groups = [group._replace(step=3) for group in (first._replace(responses=mixed), *others[:2])]
    groups.append(others[2]._replace(step=1))  # carried from an earlier step
    samples = make_samples(learner.config, groups, 3, learner.detokenize)
    columns, numbers = learner._forward_pass(state, samples, learner._cut(samples))
    stale_M = samples.staleness_M > 0
    old_M = columns.log_prob_old_M
    assert 0 < stale_M[: len(versions)].sum() < len(versions) and stale_M[-1]
    assert (old_M[stale_M] == -1.0).all(), "what the rollout stored"
    assert not (old_M[~stale_M] == -1.0).any()
    mismatch = np.abs(old_M[~stale_M] + 1.0)
    assert numbers["rollout/log_prob_mismatch_mean"] == pytest.approx(mismatch.mean(), rel=1e-5)
    assert metrics.staleness_metrics(samples) == {
        "batch/stale_share": stale_M.mean(),
        "batch/staleness_mean": samples.staleness_M.mean(),
        "batch/staleness_max": 2,
        "batch/stale_share/1": (samples.staleness_M == 1).mean(),
        "batch/stale_share/2": (samples.staleness_M == 2).mean(),
    }
    # The rollout has -1 everywhere, so a weight is e to the log-prob + 1.
    w_M = np.exp(columns.recomputed_M.astype(float) + 1.0)
    size = numbers["mismatch/effective_sample_size"]
    assert size == pytest.approx(w_M.sum() ** 2 / (len(w_M) * (w_M**2).sum())) and 0 < size < 0.9
    of_2 = np.abs(np.log(w_M[samples.staleness_M == 2])).mean()
    assert numbers["mismatch/stale/2"] == pytest.approx(of_2)
    # Decoupled PPO: the ratio of every token is to the policy before the update.
    correction = CorrectionConfig(policy="proximal", importance=("token", None, 2.0))
    decoupled, state = make_learner(
        rollout__log_prob_source="recompute", rollout__max_staleness=2, correction=correction
    )
    columns, _ = decoupled._forward_pass(state, samples, decoupled._cut(samples))
    assert (columns.log_prob_old_M == columns.recomputed_M).all()


def test_the_greedy_baseline_of_a_prompt_is_subtracted_from_its_own_responses():
    """Although a step takes its groups in another order."""
    learner, state = make_learner(
        objective__advantage="remax",
        reward__overlong_buffer_tokens=0,
        reward__overlong_penalty=0.0,
    )
    learner._update_each = lambda state, *_, **__: (state, _Updates([], [], 0, 0))
    groups = [
        g._replace(verdicts=tuple(v._replace(reward=10.0 * i + v.correct) for v in g.verdicts))
        for i, g in enumerate(make_groups())
    ]
    schedule = Schedule.first(learner.config.objective)
    baselines = [10.0 * i for i in range(len(groups))]
    *_, numbers = learner.train_on(state, schedule, groups, 1, baselines=baselines)
    assert (numbers["advantage/min"], numbers["advantage/max"]) == (0.0, 1.0)


def test_tokens_that_a_correction_rejects_leave_the_denominator_of_their_update():
    """The rollout stored -1 everywhere; the policy's log-probs are about -3.5."""
    correction = CorrectionConfig(policy="old", reject=(("token-k2", None, 3.0),))
    learner, state = make_learner(rollout__log_prob_source="recompute", correction=correction)
    samples = make_samples(learner.config, make_varied_groups(), 1, learner.detokenize)
    batches = learner._cut(samples)
    columns, _ = learner._forward_pass(state, samples, batches)
    columns = learner._with_advantages(samples, columns, None, None)
    for batch in batches:
        random = np.random.default_rng(0)
        rows, denominator = learner._finish(state.policy, samples, batch, columns, random)
        kept = rows.mask_BT.sum()
        assert 0 < kept < batch.packed.rows.mask_BT.sum(), "some are rejected, not all"
        assert denominator == kept == np.count_nonzero(rows.weight_BT)


@pytest.mark.parametrize("aggregation", ["token-mean-per-group", "seq-mean-token-sum-norm"])
def test_an_update_is_aggregated_over_its_own_prompts_and_the_longest_response(aggregation):
    """Per group, each of two prompts has half of the loss and its tokens share it. By the norm,
    each of eight responses has an eighth and a token a 32nd of that, the limit of a response."""
    learner, state = make_learner(objective__aggregation=aggregation)
    samples = make_samples(learner.config, make_groups(), 1, learner.detokenize)
    ones_M = np.ones(len(samples.tokens_M))
    columns = TokenColumns(samples.trained_M, samples.log_prob_M, advantage_M=ones_M)
    batches = learner._cut(samples)
    assert len(batches) == 2
    for batch in batches:
        random = np.random.default_rng(0)
        rows, denominator = learner._finish(state.policy, samples, batch, columns, random)
        lengths, groups = samples.lengths_R[batch.responses], samples.groups_R[batch.responses]
        expected = []
        for n, group in zip(lengths, groups, strict=True):
            of_group = sum(m for m, other in zip(lengths, groups) if other == group)
            per_group = aggregation == "token-mean-per-group"
            expected += [1 / 2 / of_group if per_group else 1 / 8 / 32] * int(n)
        weight_M = take_columns(batch.packed, rows.weight_BT) / denominator
        np.testing.assert_allclose(weight_M, expected, rtol=1e-6)


def test_the_reward_is_charged_the_coefficient_that_has_adapted():
    """Not that of the config, 0.1, with which a run begins."""
    learner, state = make_learner(**KL_IN_REWARD)
    found, charged = {}, learner._reward_kl

    def reward_kl_of(*arguments):
        found["kl_M"] = charged(*arguments)
        return found["kl_M"]

    def update_each(state, samples, _, columns, *__, **___):
        found["samples"], found["advantage_M"] = samples, columns.advantage_M
        return state, _Updates([], [], 0, 0)

    learner._reward_kl, learner._update_each = reward_kl_of, update_each
    learner.train_on(state, Schedule(0, 0.7, 0.0), make_groups(), 1)
    samples, kl_M, advantage_M = found["samples"], found["kl_M"], found["advantage_M"]
    cut = lambda x_M: np.split(x_M, np.cumsum(samples.lengths_R)[:-1])
    scores = samples.rewards_RC.sum(axis=1)
    rewards = [r - 0.7 * sum(kl_n) for r, kl_n in zip(scores, cut(kl_M), strict=True)]
    assert min(map(sum, cut(kl_M))) > 0
    for reward, group, advantage_n in zip(rewards, samples.groups_R, cut(advantage_M)):
        peers = [r for r, other in zip(rewards, samples.groups_R) if other == group]
        np.testing.assert_allclose(advantage_n, reward - sum(peers) / len(peers), atol=1e-9)


def test_the_rates_of_policy_and_critic_end_at_their_share():
    """A half cosine each: the policy's over the two steps after the head start, the critic's over
    all four."""
    falls = {"optimizer__learning_rate": 0.1, "optimizer__final_rate_share": 0.2}
    falls |= {"optimizer__warmup_steps": 0, "train__num_steps": 4}
    learner, state = make_learner(**CRITIC, **falls)
    rates, critic_rates, update_critic = [], [], learner.update_critic

    def noted(*arguments):
        critic_rates.append(float(arguments[-1]))
        return update_critic(*arguments)

    learner.update_critic = noted
    schedule = Schedule.first(learner.config.objective)
    for step in range(1, 5):
        state, schedule, numbers = learner.train_on(state, schedule, make_groups(), step)
        rates.append(numbers["optimizer/learning_rate"])
    assert rates == pytest.approx([0.0, 0.0, 0.06, 0.02])
    shares = [0.2 + 0.4 * (1 + math.cos(math.pi * k / 4)) for k in (1, 2, 3, 4)]
    assert critic_rates[::2] == pytest.approx([1e-3 * share for share in shares])


def test_too_many_updates_without_a_finite_gradient_end_the_run():
    """Two are a warning. They are in no mean, and the schedules stand still."""
    learner, state = make_learner()
    said = []
    learner.say = said.append
    broken = jax.tree.map(lambda x: x * np.float32(np.nan), state.policy.params)
    state = state._replace(policy=state.policy._replace(params=broken))
    schedule = Schedule.first(learner.config.objective)
    state, after, numbers = learner.train_on(state, schedule, make_groups(), 1)
    assert said == ["  warning: non-finite gradient, 2 update(s) skipped at step 1"]
    assert numbers["optimizer/skipped_updates"] == 2 and numbers["optimizer/updates"] == 0
    assert "policy/loss" not in numbers and after.updated_steps == 0
    assert numbers["optimizer/learning_rate"] == 0
    state = state._replace(policy=state.policy._replace(skipped=np.int32(1)))
    with pytest.raises(RunError, match="not finite in 3 updates in a row, at step 2"):
        learner.train_on(state, schedule, make_groups(), 2)


def test_a_step_that_trains_nothing_leaves_the_coefficient_of_the_kl_alone():
    learner, state = make_learner(
        objective__reward_kl_coefficient=0.1,
        objective__reward_kl_adaptation=(0.1, 100),
        objective__overlong_filter=True,
        dynamic_sampling__enabled=False,
    )
    schedule = Schedule.first(learner.config.objective)
    state, after, numbers = learner.train_on(state, schedule, make_groups(truncated=4), 1)
    assert numbers["optimizer/updates"] == 0 and after == schedule
    _, after, numbers = learner.train_on(state, schedule, make_groups(), 2)
    assert numbers["optimizer/updates"] == 2 and after.reward_kl_coefficient != 0.1


def test_log_probs_of_two_distributions_are_not_compared():
    """Those of the rollout are of the tokens that top-p leaves."""
    for top_p in (1.0, 0.9):
        learner, state = make_learner(rollout__log_prob_source="recompute", rollout__top_p=top_p)
        _, numbers = train_on(learner, state, make_groups())
        assert numbers["optimizer/updates"] == 2
        assert any("mismatch" in name for name in numbers) == (top_p == 1.0)


@pytest.mark.parametrize("source, age", [("recompute", 0), ("recompute", 2), ("rollout", 2)])
def test_the_energy_of_tokens_is_of_the_whole_softmax_before_the_update(source, age):
    """The squared norm of the gradient of each token's log-prob by its logits, one response at a
    time, whichever policy sampled the token; and advantages are made of it."""
    learner, state = make_learner(
        objective__advantage="optimal-token-baseline",
        objective__advantage_args={"zero_tail": False},
        rollout__log_prob_source=source,
        rollout__max_staleness=2,
        rollout__temperature=0.8,
    )
    groups = [group._replace(step=3 - age) for group in make_groups()]
    samples = make_samples(learner.config, groups, 3, learner.detokenize)
    columns, _ = learner._forward_pass(state, samples, learner._cut(samples))
    starts = np.cumsum([0, *samples.lengths_R])
    for prompt, first, end in zip(samples.prompts, starts[:-1], starts[1:], strict=True):
        tokens = np.array([*prompt, *samples.tokens_M[first:end]])
        logits = logits_of(learner.config.model, state.policy.params, tokens) / 0.8
        pi = np.asarray(jax.nn.softmax(logits))[len(prompt) - 1 : -1]
        gradient = np.eye(pi.shape[1])[tokens[len(prompt) :]] - pi
        expected = (gradient**2).sum(axis=1)
        np.testing.assert_allclose(columns.energy_M[first:end], expected, atol=2e-6)
    energy_M = columns.energy_M
    columns = learner._with_advantages(samples, columns, None, None)
    # The last token of the longest response of a group is alone: its baseline is its own reward.
    of_group = slice(starts[0], starts[4])
    assert (energy_M[of_group] > 0).all()
    longest = int(np.argmax(samples.lengths_R[:4]))
    assert columns.advantage_M[starts[longest + 1] - 1] == pytest.approx(0, abs=1e-6)
    assert np.abs(columns.advantage_M[of_group]).max() > 0.1


@pytest.mark.parametrize("rows, devices", [(8, 1), (2, 1), (8, 8)])
def test_top_entropies_are_of_a_mini_batch_before_the_first_update(rows, devices):
    """However the mini-batch is cut: the tokens whose policy loss counts in the second update are
    those that one model pass over each whole response gives at the parameters of the start."""
    learner, state = make_learner(
        devices=devices,
        objective__top_entropy_share=0.2,
        rollout__temperature=0.8,
        train__rows_per_micro_batch=rows,
    )
    trained = []
    micro_batches = learner._micro_batches
    learner._micro_batches = lambda rows: trained.append(rows) or micro_batches(rows)
    params = make_params(learner.config)
    state, numbers = train_on(learner, state, make_varied_groups())
    assert numbers["optimizer/updates"] == 2
    found = {}  # entropy of each token of a response, and whether its policy loss counts
    for update, rows in enumerate(trained[2:]):  # the first two are scored
        for row, segment in segments_of(rows):
            at = np.flatnonzero(segment)
            tokens, mask = rows.tokens_BT[row, at], rows.mask_BT[row, at]
            logits = logits_of(learner.config.model, params, tokens) / 0.8
            log_p = np.asarray(jax.nn.log_softmax(logits), np.float64)
            entropy = -(np.exp(log_p) * log_p).sum(axis=1)
            of_update = found.setdefault(update, ([], []))
            of_update[0].extend(entropy[np.flatnonzero(mask) - 1])
            of_update[1].extend(rows.correction_BT[row, at][mask])
            assert (rows.weight_BT[row, at][mask] > 0).all(), "the denominator keeps them"
    for entropies, corrections in found.values():
        tau = np.quantile(entropies, 0.8)
        near = np.abs(np.array(entropies) - tau) < 1e-6
        assert set(corrections) == {0.0, 1.0} and near.sum() <= 4
        expected = (np.array(entropies) >= tau).astype(float)
        np.testing.assert_array_equal(np.array(corrections)[~near], expected[~near])


FILTERED = {"objective__overlong_filter": True, "rollout__temperature": 0.8}


def entropy_by_hand(config, groups):
    """Mean over the tokens of the responses that are trained on, each response alone."""
    params, found = make_params(config), []
    for group in groups:
        prompt = np.array(group.problem.prompt_tokens)
        for response in group.responses:
            if response.finish_reason == "stop":
                logits = logits_of(config.model, params, np.append(prompt, response.tokens)) / 0.8
                log_p = np.asarray(jax.nn.log_softmax(logits), np.float64)[len(prompt) - 1 : -1]
                found.extend(-(np.exp(log_p) * log_p).sum(axis=1))
    return np.mean(found)


@functools.cache
def entropy_before_updates():
    learner, state = make_learner(**FILTERED, objective__entropy_adaptation=(1.0, 0.01))
    return train_on(learner, state, make_varied_groups(truncated=1))[1]["policy/entropy_old"]


@functools.cache
def moments_with_fixed_coefficient(coefficient):
    learner, state = make_learner(**FILTERED, objective__entropy_coefficient=coefficient)
    return moments_of(train_on(learner, state, make_varied_groups(truncated=1))[0])


def moments_of(state):
    return jax.tree.leaves(jax.device_get(state.policy.moments))


@pytest.mark.parametrize("above", [0.01, 0.0, -0.01])
def test_the_entropy_bonus_counts_at_its_target_and_below(above):
    """By the entropy before the first update, in all updates of the step and with the coefficient
    of the step: they are those of a fixed coefficient, and above the target those without one."""
    groups, before = make_varied_groups(truncated=1), entropy_before_updates()
    assert before == pytest.approx(entropy_by_hand(tiny_config(**FILTERED), groups), rel=1e-5)
    adaptation = (before + above, 0.01)
    learner, state = make_learner(**FILTERED, objective__entropy_adaptation=adaptation)
    state, numbers = train_on(learner, state, groups, entropy_coefficient=0.5)
    assert numbers["optimizer/updates"] == 2
    assert numbers["policy/entropy_old"] == before
    assert numbers["policy/entropy_coefficient"] == 0.5
    expected, other = map(moments_with_fixed_coefficient, (0.5, 0.0) if above >= 0 else (0.0, 0.5))
    found = moments_of(state)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)
    apart = [np.abs(a - b).max() for a, b in zip(found, other, strict=True)]
    assert max(apart) > 1e-4


def test_the_coefficients_of_entropy_and_kl_wait_for_updates_of_the_policy():
    """They stand still in the critic's head start and where no token is trained."""
    adapts = {"objective__entropy_adaptation": (3.4, 0.01), "objective__overlong_filter": True}
    adapts["objective__reward_kl_coefficient"] = 0.1
    adapts["objective__reward_kl_adaptation"] = (0.1, 100)
    learner, state = make_learner(**CRITIC, **adapts)
    schedule, seen = Schedule(0, 0.1, entropy_coefficient=0.1), []
    for step, cut in enumerate([0, 0, 0, 4, 0], 1):
        groups, before = make_groups(truncated=cut), schedule.reward_kl_coefficient
        state, schedule, numbers = learner.train_on(state, schedule, groups, step)
        seen.append(("policy/entropy_old" in numbers, schedule.reward_kl_coefficient != before))
    assert seen == [(moved, moved) for moved in (False, False, True, False, True)]
    assert schedule.entropy_coefficient == pytest.approx(0.12) and schedule.updated_steps == 4


@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3"])
def test_the_kl_of_the_reward_is_the_estimators_equation(estimator):
    policy = np.array([-1.0, -2.0, -0.5, -40.0, -0.1], np.float32)
    reference = np.array([-1.0, -1.5, -2.5, -0.1, -40.0], np.float32)
    got = reward_kl(policy, reference, estimator=estimator)
    assert got.dtype == np.float64
    for value, p, q in zip(got, policy.tolist(), reference.tolist(), strict=True):
        d = p - q
        expected = {
            "k1": d,
            "abs": abs(d),
            "k2": d * d / 2,
            # Schulman's, bounded as in the reference.
            "k3": min(10.0, math.exp(-max(-20.0, min(20.0, d))) - 1 + max(-20.0, min(20.0, d))),
        }[estimator]
        assert value == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_filtered_responses_that_count_are_charged_the_kl_as_all_are():
    """Else their rewards and those of the rest, all in one mean, would be of two kinds."""
    learner, _ = make_learner(**KL_IN_REWARD, objective__overlong_filter=True)
    group = make_group([True, False, False], lengths=[1, 2, 2], truncated=1)
    samples = make_samples(learner.config, [group], 1, learner.detokenize)
    # k3 of d = 0, and of d = -log 2: 2 - 1 - log 2.
    off = -math.log(2.0)
    columns = TokenColumns(
        mask_M=np.repeat(samples.trained_R, samples.lengths_R),
        log_prob_old_M=np.array([0.0, 0.0, off, off, off], np.float32),
        log_prob_ref_M=np.zeros(5, np.float32),
    )
    kl_M = learner._reward_kl(samples, columns)
    columns = learner._with_advantages(samples, columns, 0.1 * kl_M, None)
    kl = 1.0 - math.log(2.0)
    rewards = np.array([1.0, -1.0 - 0.1 * kl, -1.0 - 0.2 * kl])
    expected = np.repeat(rewards - rewards.mean(), [1, 2, 2]) * [1, 1, 1, 0, 0]
    np.testing.assert_allclose(columns.advantage_M, expected, rtol=1e-6)
    assert kl_M[columns.mask_M].mean() == pytest.approx(kl / 3, rel=1e-6)


def test_a_kl_in_the_reward_compiles_nothing_after_the_first_step():
    learner, state = make_learner(**KL_IN_REWARD)
    state, _ = train_on(learner, state, make_groups())
    counter = CompilationCounter()
    for step in (2, 3, 4):
        state, _ = train_on(learner, state, make_groups(seed=step), step, step - 1)
    assert counter.count == 0
    jax.jit(lambda x: 3 * x + 2)(1.0)
    assert counter.count == 1, "the counter counts nothing"


def test_named_streams_share_their_numbers_with_no_other():
    streams = [
        np.random.default_rng([0, 1]),
        named_generator("a", 0, 1),
        named_generator("b", 0, 1),
        named_generator("a", 0, 2),
        named_generator("a", 1, 0),
    ]
    assert len({generator.random() for generator in streams}) == len(streams)
    assert named_generator("a", 0, 1).random() == named_generator("a", 0, 1).random()
