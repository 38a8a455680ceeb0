"""From scored groups to columns: lengths in tokens, who is filtered, who is in the baseline."""

import dataclasses
import itertools

import numpy as np
import pytest

from dapo_jax.algorithms import advantages
from dapo_jax.algorithms.kl import adapted_kl_coefficient
from dapo_jax.config import CorrectionConfig
from dapo_jax.data.arithmetic import score_steps
from dapo_jax.training import metrics
from dapo_jax.training.batch import (
    TokenColumns,
    estimate_advantages,
    make_samples,
    reward_components,
    shaped_rewards,
    with_corrections,
)
from dapo_jax.types import RunError
from tests.support.helpers import make_group, tiny_config

# max_response_tokens 32, overlong_buffer_tokens 8: punished from 25 tokens on.


def samples_of(config, groups, step=1):
    return make_samples(config, groups, step, lambda sequences: ["x" * len(s) for s in sequences])


def advantages_of(config, groups, **inputs):
    """Advantage of every token, one array per response."""
    samples = samples_of(config, groups)
    result = estimate_advantages(config, samples, **inputs)
    return np.split(result.advantage_M, np.cumsum(samples.lengths_R)[:-1])


def test_shaped_reward_is_the_scorers_plus_the_punishment_in_tokens():
    group = make_group([True, False, True, False], lengths=[24, 26, 28, 32])
    got = shaped_rewards(tiny_config(), group)
    np.testing.assert_allclose(got, [1.0, -1.0 - 2 / 8, 1.0 - 4 / 8, -2.0])
    texts = tuple(r._replace(text="x" * 10_000) for r in group.responses)
    np.testing.assert_allclose(shaped_rewards(tiny_config(), group._replace(responses=texts)), got)


def test_the_reward_has_a_component_for_each_scorer_and_the_punishment():
    """A verdict of one scorer fills the first: a source may have fewer than others."""
    config = tiny_config(reward__scorer="exact_match + 0.5 * answer_format")
    group = make_group([True, False], lengths=[3, 28])
    both = group.verdicts[0]._replace(reward=1.5, rewards=(1.0, 0.5))
    group = group._replace(verdicts=(both, group.verdicts[1]))
    expected = [[1.0, 0.5, 0.0], [-1.0, 0.0, -4 / 8]]
    np.testing.assert_allclose(reward_components(config, group), expected)
    np.testing.assert_allclose(shaped_rewards(config, group), [1.5, -1.5])


def test_advantages_are_of_the_shaped_reward():
    group = make_group([True, False, True, False], lengths=[24, 26, 28, 32])
    rewards = np.array([1.0, -1.25, 0.5, -2.0])
    expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    for got, want, n in zip(advantages_of(tiny_config(), [group]), expected, (24, 26, 28, 32)):
        np.testing.assert_allclose(got, np.full(n, want), rtol=1e-5)


def test_samples_hold_whole_responses_and_their_staleness():
    group = make_group([True, False])
    samples = samples_of(tiny_config(), [group], step=4)
    np.testing.assert_array_equal(
        samples.tokens_M, np.concatenate([r.tokens for r in group.responses])
    )
    np.testing.assert_array_equal(
        samples.log_prob_M, np.concatenate([r.log_probs for r in group.responses])
    )
    assert samples.prompts == ((1, 2, 3), (1, 2, 3)) and samples.staleness_M.tolist() == [3] * 7
    assert samples.lengths_R.tolist() == [3, 4] and samples.groups_R.tolist() == [0, 0]


def test_tokens_of_several_policies_have_their_own_staleness():
    """And only those of the newest say how far the rollout is from the trainer."""
    group = make_group([True, False], lengths=[3, 4])._replace(step=4)
    versions = np.array([2, 3, 4, 4], np.int32)
    responses = (group.responses[0], group.responses[1]._replace(versions=versions))
    samples = samples_of(tiny_config(), [group._replace(responses=responses)], step=4)
    assert samples.staleness_M.tolist() == [0, 0, 0, 2, 1, 0, 0]
    off = np.array([0.0, 0.0, 0.25, 8.0, 8.0, 0.5, 0.0])
    numbers = metrics.mismatch_metrics(samples, samples.log_prob_M + off)
    assert numbers["rollout/log_prob_mismatch_max"] == 0.5
    assert numbers["rollout/log_prob_mismatch_mean"] == pytest.approx(0.75 / 5)
    assert numbers["mismatch/kl"] == pytest.approx(-0.75 / 5)


@pytest.mark.parametrize("in_baseline, mean", [(True, 0.0), (False, 1 / 3)])
def test_a_filtered_response_counts_in_the_baseline_if_the_config_says_so(in_baseline, mean):
    config = tiny_config(
        objective__overlong_filter=True,
        objective__overlong_in_baseline=in_baseline,
        objective__advantage_args={"normalise_std": False},
    )
    group = make_group([True, True, False, False], truncated=1)
    *kept, filtered = advantages_of(config, [group])
    np.testing.assert_allclose([a[0] for a in kept], [1 - mean, 1 - mean, -1 - mean])
    assert not filtered.any()
    assert samples_of(config, [group]).trained_R.tolist() == [True, True, True, False]


def test_a_response_that_broke_off_says_nothing_of_its_prompt():
    """Whatever its verdict: neither in the baseline nor whether the group teaches anything."""
    config = tiny_config(objective__advantage_args={"normalise_std": False})
    assert config.objective.overlong_in_baseline
    group = make_group([True, True, False, False])
    invalid = group.responses[3]._replace(finish_reason="invalid")
    group = group._replace(responses=(*group.responses[:3], invalid))
    *kept, broken = advantages_of(config, [group])
    np.testing.assert_allclose([a[0] for a in kept], [2 / 3, 2 / 3, -4 / 3])
    assert not broken.any() and group.is_informative(overlong_filter=False)
    others = group._replace(responses=(*group.responses[:2], invalid, invalid))
    assert not others.is_informative(overlong_filter=False)


def has_gradient(config, group):
    """Whether any token that is trained has an advantage other than 0."""
    (trained,) = [samples_of(config, [group]).trained_R]
    return any(np.any(a) for a, kept in zip(advantages_of(config, [group]), trained) if kept)


@pytest.mark.parametrize("in_baseline", [True, False])
def test_truncated_responses_that_are_not_trained_make_no_group_informative(in_baseline):
    config = tiny_config(
        objective__overlong_filter=True, objective__overlong_in_baseline=in_baseline
    )
    all_cut = make_group([True, False, False, False], truncated=4)
    rest_right = make_group([True, True, True, False], truncated=1)
    mixed = make_group([True, False, True, False], truncated=1)
    for group, informative in ((all_cut, False), (rest_right, False), (mixed, True)):
        assert group.is_informative(overlong_filter=True) == informative
        assert group.is_informative(overlong_filter=False)
    assert not has_gradient(config, all_cut)


@pytest.mark.parametrize(
    "overlong_filter, in_baseline", [(True, True), (True, False), (False, True)]
)
def test_every_group_that_is_accepted_has_a_gradient(overlong_filter, in_baseline):
    """All groups of four, each response right or wrong, and whole, truncated, broken off or not
    scored: where the filter accepts one some token that is trained has an advantage."""
    config = tiny_config(
        objective__overlong_filter=overlong_filter,
        objective__overlong_in_baseline=in_baseline,
    )
    accepted = 0
    kinds = list(itertools.product((True, False), ("stop", "length", "invalid", "fault")))
    for chosen in itertools.combinations_with_replacement(kinds, 4):
        group = make_group([right for right, _ in chosen])
        responses = tuple(
            r._replace(finish_reason=how if how != "fault" else "stop")
            for r, (_, how) in zip(group.responses, chosen)
        )
        verdicts = tuple(
            v._replace(correct=right and how != "fault", note="timeout" * (how == "fault"))
            for v, (right, how) in zip(group.verdicts, chosen)
        )
        group = group._replace(responses=responses, verdicts=verdicts)
        if group.is_informative(overlong_filter=overlong_filter):
            accepted += 1
            assert has_gradient(config, group), chosen
    assert accepted >= 36


def test_a_fault_of_the_scorer_says_nothing_of_its_prompt():
    """15 right and a timeout: nothing to learn. With a wrong one, the mean is over 15."""
    config = tiny_config(rollout__group_size=16, objective__advantage_args={"normalise_std": False})
    group = make_group([True] * 15 + [False])
    fault = group.verdicts[-1]._replace(note="timeout")
    faulty = group._replace(verdicts=(*group.verdicts[:-1], fault))
    assert group.is_informative(overlong_filter=False)
    assert not faulty.is_informative(overlong_filter=False)
    assert not np.concatenate(advantages_of(config, [faulty])).any()
    assert samples_of(config, [faulty]).trained_R.tolist() == [True] * 15 + [False]

    group = make_group([True] * 14 + [False] * 2)
    faulty = group._replace(verdicts=(*group.verdicts[:-1], fault))
    *kept, lost = advantages_of(config, [faulty])
    mean = (14 - 1) / 15
    np.testing.assert_allclose([a[0] for a in kept], [1 - mean] * 14 + [-1 - mean])
    assert not lost.any() and faulty.is_informative(overlong_filter=False)


def test_opo_counts_the_tokens_of_a_filtered_response_where_it_counts():
    config = tiny_config(
        objective__overlong_filter=True,
        objective__advantage="opo",
        reward__overlong_buffer_tokens=0,
        reward__overlong_penalty=0.0,
    )
    group = make_group([True, False, False], truncated=1, lengths=[4, 6, 72])
    (right, wrong, filtered) = advantages_of(config, [group])
    baseline = (4 - 6 - 72) / 82
    np.testing.assert_allclose([right[0], wrong[0]], [1 - baseline, -1 - baseline])
    assert not filtered.any()


@pytest.mark.parametrize("advantage", ["grpo", "rloo", "opo", "reinforce++-baseline"])
def test_every_response_cut_is_nothing_to_train_on(advantage):
    config = tiny_config(
        objective__overlong_filter=True,
        objective__overlong_in_baseline=False,
        objective__advantage=advantage,
    )
    none_left = make_group([True, False], truncated=2)
    one_left = make_group([True, False, True], truncated=2)
    for groups in ([none_left], [one_left], [none_left, one_left]):
        assert not np.concatenate(advantages_of(config, groups)).any()


def test_the_kl_is_taken_from_the_reward_of_its_token():
    """gamma = lambda = 1 and values of 0: the return of a token is what is still to come."""
    config = tiny_config(
        objective__advantage="gae",
        critic=dict(learning_rate=1e-3, value_clip=0.5, head_start_steps=0),
    )
    samples = samples_of(config, [make_group([True, False], lengths=[1, 4])])
    kl_penalty_M = np.array([0.1, 0.2, 0.3, 0.4, 0.5])
    got = estimate_advantages(
        config, samples, kl_penalty_M=kl_penalty_M, values_M=np.zeros(5, np.float32)
    )
    by_hand = [1 - 0.1, -1 - 0.2 - 1.2, -1 - 0.3 - 0.4 - 0.5, -1 - 0.4 - 0.5, -1 - 0.5]
    np.testing.assert_allclose(got.return_M, by_hand)
    # An outcome advantage takes the sum of its response.
    grpo = tiny_config(objective__advantage_args={"normalise_std": False})
    a = estimate_advantages(grpo, samples, kl_penalty_M=kl_penalty_M).advantage_M
    half = ((1 - 0.1) - (-1 - 1.4)) / 2
    np.testing.assert_allclose(a, [half, -half, -half, -half, -half])


PROCESS = {
    "objective__advantage": "grpo-process",
    "objective__advantage_args": {"outcome_as_step": True},
}


def test_steps_are_found_in_tokens():
    """Steps are named by characters; the decoder here writes one, two or three to a token."""
    config = tiny_config(**PROCESS)
    group = make_group([True, False], lengths=[4, 4])
    steps = ((3, 1.0), (7, -1.0))  # the third and the seventh character
    verdicts = (group.verdicts[0]._replace(steps=steps), group.verdicts[1])
    decode = lambda sequences: [
        "".join("abc"[: 1 + i % 3] for i in range(len(s))) for s in sequences
    ]
    samples = make_samples(config, [group._replace(verdicts=verdicts)], 1, decode)
    # One, three, six, seven characters after each token.
    assert samples.steps == (((2, 1.0), (4, -1.0)), ())


@pytest.mark.parametrize("num_tokens", [1, 2, 63, 64, 65, 200, 700])
def test_steps_in_characters_of_several_bytes_end_with_the_token_that_brings_them(num_tokens):
    """One token a byte, so that characters of up to four bytes lie across the ends of blocks; and
    nothing is decoded again and again."""
    decoded = []

    def decode(sequences):
        decoded.extend(sequences)
        return [bytes(s.tolist()).decode("utf-8", errors="replace") for s in sequences]

    written = "aé漢🙂 x\n" * num_tokens
    tokens = np.frombuffer(written.encode()[:num_tokens], np.uint8).astype(np.int32)
    counts = [len(decode([tokens[:n]])[0]) for n in range(num_tokens + 1)]
    ends = range(0, counts[-1], 1 + num_tokens // 50)
    by_hand = [max(1, min(n for n in range(num_tokens + 1) if counts[n] >= end)) for end in ends]
    group = make_group([True, False], lengths=[num_tokens, 1])
    steps = tuple((end, float(end)) for end in [*ends, counts[-1], counts[-1] + 9])
    verdict = group.verdicts[0]._replace(steps=steps)
    responses = (group.responses[0]._replace(tokens=tokens), group.responses[1])
    group = group._replace(responses=responses, verdicts=(verdict, group.verdicts[1]))
    decoded.clear()
    samples = make_samples(tiny_config(**PROCESS), [group], 1, decode)
    assert [n for n, _ in samples.steps[0]] == [*by_hand, num_tokens, num_tokens]
    assert [reward for _, reward in samples.steps[0]] == [reward for _, reward in steps]
    assert sum(map(len, decoded)) <= 1.3 * num_tokens + len(ends) * 8 * 72


def test_a_step_that_ends_with_the_text_ends_with_the_response():
    """The end-of-sequence token, which is no text, is trained with the last step."""
    group = make_group([True, False], lengths=[3, 2])
    decode = lambda sequences: ["ab"[: len(s)] for s in sequences]
    verdict = group.verdicts[0]._replace(steps=((1, 1.0), (2, -1.0)))
    group = group._replace(verdicts=(verdict, group.verdicts[1]))
    samples = make_samples(tiny_config(**PROCESS), [group], 1, decode)
    assert samples.steps == (((1, 1.0), (3, -1.0)), ())


def test_an_estimator_of_a_users_own_is_given_the_steps_that_it_reads(monkeypatch):
    mine = advantages.Advantage(lambda steps, rewards_R: rewards_R, ("steps", "rewards_R"))
    monkeypatch.setitem(advantages.ADVANTAGES, "mine", mine)
    config = tiny_config(objective__advantage="mine", objective__advantage_args={})
    group = make_group([True, False], lengths=[5, 4])
    verdict = group.verdicts[0]._replace(steps=((1, 1.0),))
    group = group._replace(verdicts=(verdict, group.verdicts[1]))
    texts = lambda sequences: ["abcde"[: len(tokens)] for tokens in sequences]
    assert [len(of) for of in make_samples(config, [group], 1, texts).steps] == [1, 0]
    assert not config.objective.reads("energy_M") and not config.objective.reads("baselines_R")


def test_process_supervision_without_a_step_is_refused():
    no_overlong = {"reward__overlong_buffer_tokens": 0, "reward__overlong_penalty": 0.0}
    config = tiny_config(**PROCESS | {"objective__advantage_args": {}}, **no_overlong)
    with pytest.raises(RunError, match="no response has a step.*outcome_as_step to True"):
        samples_of(config, [make_group([True, False])])
    samples_of(config, [])
    samples_of(tiny_config(**PROCESS), [make_group([True, False])])  # the outcome is a step


def test_the_steps_of_a_sum_are_its_lines_and_its_answer():
    text = " a=7:07 b=5:11 c=8:19\nAnswer: 19"
    found = score_steps(text, "20")
    assert found.steps == ((7, 1.0), (14, -1.0), (21, 1.0), (len(text), -1.0))
    assert score_steps("Answer: 20", "20").steps == ((10, 1.0),)


def test_the_coefficient_of_the_kl_adapts():
    adapt = lambda kl: adapted_kl_coefficient(0.2, kl, target=0.1, horizon=1000, num_responses=100)
    assert adapt(0.1) == 0.2
    assert adapt(0.105) == pytest.approx(0.2 * (1 + 0.05 * 0.1))
    assert adapt(10.0) == pytest.approx(0.2 * (1 + 0.2 * 0.1))  # bounded
    assert adapt(0.0) == pytest.approx(0.2 * (1 - 0.2 * 0.1))


CORRECTION = CorrectionConfig(
    policy="current",
    importance=("token", None, 2.0),
    reject=(("seq-mean-k1", 0.5, 2.0),),
)


def test_a_rejected_response_leaves_the_mask_and_the_others_get_weights():
    config = dataclasses.replace(tiny_config(), correction=CORRECTION)
    rollout_M = np.full(5, -1.0, np.float32)
    current_M = np.array([-1.0, 0.0, -3.0, -3.0, -3.0], np.float32)  # the second far below
    mask_M = np.array([True, True, True, True, False])
    columns = TokenColumns(mask_M, rollout_M, advantage_M=np.ones(5))
    got = with_corrections(
        config, columns, np.array([2, 3]), rollout_M, current_M=current_M, priority_M=np.zeros(5)
    )
    assert got.mask_M.tolist() == [True, True, False, False, False]
    np.testing.assert_allclose(got.correction_M[:2], [1.0, 2.0])  # e truncated at 2
    assert columns.mask_M.tolist() == mask_M.tolist(), "the columns given are left alone"


@pytest.mark.parametrize(
    "loss, policy, weights",
    [
        ("ppo-clip", "old", [1.0, 1.5]),
        ("ppo-clip", "proximal", [2.0, 1.5]),
        ("policy-gradient", "old", [2.0, 1.5]),  # it has no ratio to weight the stale token by
    ],
)
def test_a_stale_token_is_weighted_once_and_masked_by_the_policy_before_the_update(
    loss, policy, weights
):
    """Two responses of two tokens; the first token of each is stale. The policy has moved far from
    those of the second response."""
    correction = CorrectionConfig(
        policy=policy, importance=("token", None, 2.0), reject=(("seq-mean-k1", 0.2, 5.0),)
    )
    config = tiny_config()
    objective = dataclasses.replace(config.objective, loss=loss)
    config = dataclasses.replace(config, correction=correction, objective=objective)
    rollout_M = np.full(4, -3.0, np.float32)
    recomputed_M = rollout_M + np.log([4.0, 1.5, 40.0, 1.5]).astype(np.float32)
    stale_M = np.array([True, False, True, False])
    keeps = stale_M & (policy == "old")  # the log-probs of the policy that sampled
    columns = TokenColumns(
        mask_M=np.ones(4, bool),
        log_prob_old_M=np.where(keeps, rollout_M, recomputed_M),
        advantage_M=np.ones(4),
        recomputed_M=recomputed_M,
    )
    got = with_corrections(
        config, columns, np.array([2, 2]), rollout_M, current_M=None, priority_M=np.zeros(4)
    )
    np.testing.assert_allclose(got.correction_M[:2], weights, rtol=1e-6)
    assert got.mask_M.tolist() == [True, True, False, False]


def test_top_entropies_are_chosen_among_the_tokens_that_a_correction_keeps():
    """The two of highest entropy are rejected. Of the three others the two of highest entropy keep
    their policy term, and all three are trained."""
    correction = CorrectionConfig(policy="current", reject=(("token-k2", None, 0.1),))
    config = tiny_config(objective__top_entropy_share=0.5)
    config = dataclasses.replace(config, correction=correction)
    rollout_M = np.full(5, -1.0, np.float32)
    columns = TokenColumns(
        mask_M=np.ones(5, bool),
        log_prob_old_M=rollout_M,
        advantage_M=np.ones(5),
        entropy_M=np.array([5.0, 1.0, 3.0, 4.0, 2.0], np.float32),
    )
    current_M = np.array([-3.0, -1.0, -1.0, -3.0, -1.0], np.float32)
    got = with_corrections(
        config, columns, np.array([2, 3]), rollout_M, current_M=current_M, priority_M=np.zeros(5)
    )
    assert got.mask_M.tolist() == [False, True, True, False, True]
    assert got.correction_M[got.mask_M].tolist() == [0.0, 1.0, 1.0]


@pytest.mark.parametrize(
    "loss, args, bounds, selected",
    [
        ("clip-cov", {"cov_low": 1.0, "cov_high": 5.0}, {"clip_low": 0.2, "clip_high": 0.28}, 1),
        ("kl-cov", {}, {"clip_low": None, "clip_high": None}, 3),
    ],
)
def test_covariances_are_of_the_current_policy(loss, args, bounds, selected):
    """They are 2, 2, -2 and 6, and the ratio of the first token is beyond its bound. By the old
    log-probs they would be -8, 8, -8 and 8."""
    config, args = tiny_config(), {"cov_share": 0.25} | args
    objective = dataclasses.replace(
        config.objective, loss=loss, loss_args=args, clip_dual=None, **bounds
    )
    config = dataclasses.replace(config, objective=objective)
    old_M = np.array([-9.0, -1.0, -1.0, -9.0, 0.0], np.float32)
    columns = TokenColumns(
        mask_M=np.array([True, True, True, True, False]),
        log_prob_old_M=old_M,
        advantage_M=np.array([2.0, 2.0, -2.0, -2.0, 99.0]),
    )
    current_M = np.array([-1.0, -1.0, -1.0, -5.0, 99.0], np.float32)
    got = with_corrections(
        config, columns, np.array([2, 3]), old_M, current_M=current_M, priority_M=np.zeros(5)
    )
    assert np.flatnonzero(got.selected_M).tolist() == [selected]
