"""From scored groups to samples: lengths in tokens, who is filtered, who is in the baseline."""

import numpy as np
import pytest

from dapo_jax.samples import shaped_rewards, training_samples
from tests.helpers import make_group, tiny_config

# max_response_tokens 32, overlong_buffer_tokens 8: punished from 25 tokens on.


def test_shaped_reward_is_the_scorers_plus_the_punishment_in_tokens():
    group = make_group([True, False, True, False], lengths=[24, 26, 28, 32])
    got = shaped_rewards(tiny_config(), group)
    np.testing.assert_allclose(got, [1.0, -1.0 - 2 / 8, 1.0 - 4 / 8, -2.0])
    texts = tuple(r._replace(text="x" * 10_000) for r in group.responses)
    np.testing.assert_allclose(shaped_rewards(tiny_config(), group._replace(responses=texts)), got)


def test_advantages_are_of_the_shaped_reward():
    group = make_group([True, False, True, False], lengths=[24, 26, 28, 32])
    rewards = np.array([1.0, -1.25, 0.5, -2.0])
    expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    got = [s.advantage for s in training_samples(tiny_config(), [group], 1)]
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_a_sample_holds_the_whole_response_and_its_lag():
    group = make_group([True, False])
    first, _ = training_samples(tiny_config(), [group], 4)
    np.testing.assert_array_equal(first.response_tokens, group.responses[0].tokens)
    assert first.prompt_tokens == (1, 2, 3) and first.lag == 3
    np.testing.assert_array_equal(first.log_prob_old, group.responses[0].log_probs)


@pytest.mark.parametrize(
    "aggregation", ["token-mean", "token-mean-per-group", "seq-mean-token-mean"]
)
def test_weights_sum_to_one_over_the_trained_tokens(aggregation):
    config = tiny_config(objective__aggregation=aggregation, objective__overlong_filter=True)
    groups = [make_group([True, False, True, False], truncated=2), make_group([True, False])]
    samples = training_samples(config, groups, 1)
    assert [s.trained for s in samples] == [True, True, False, False, True, True]
    assert sum(s.weight * len(s.response_tokens) for s in samples) == pytest.approx(1)
    assert all(s.weight == 0 for s in samples if not s.trained)


@pytest.mark.parametrize("in_baseline, mean", [(True, 0.0), (False, 1 / 3)])
def test_a_filtered_response_counts_in_the_baseline_if_the_config_says_so(in_baseline, mean):
    config = tiny_config(
        objective__overlong_filter=True,
        objective__overlong_in_baseline=in_baseline,
        objective__normalise_std=False,
    )
    group = make_group([True, True, False, False], truncated=1)
    samples = training_samples(config, [group], 1)
    np.testing.assert_allclose([s.advantage for s in samples[:3]], [1 - mean, 1 - mean, -1 - mean])
    assert not samples[3].trained


def test_every_response_cut_is_nothing_to_train_on():
    config = tiny_config(objective__overlong_filter=True, objective__overlong_in_baseline=False)
    samples = training_samples(config, [make_group([True, False], truncated=2)], 1)
    assert not any(s.trained for s in samples)
    assert all(np.isfinite(s.advantage) for s in samples)
    one_left = make_group([True, False, True], truncated=2)
    assert all(np.isfinite(s.advantage) for s in training_samples(config, [one_left], 1))
