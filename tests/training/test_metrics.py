"""Numbers of a step where there is little to count, or where counting is not enough."""

import jax
import numpy as np
import pytest

from dapo_jax.rollout import metrics as rollout_metrics
from dapo_jax.training import metrics
from dapo_jax.training.critic import CriticMetrics, CriticSums
from dapo_jax.training.step import Extremes, Sums, UpdateMetrics
from dapo_jax.types import RunError
from tests.support.helpers import make_group


def update(tokens, ratio):
    zero, below = np.float32(0), np.float32(-np.inf)
    sums = Sums(*[zero] * len(Sums._fields))._replace(tokens=np.float32(tokens))
    extremes = Extremes(ratio, -ratio if tokens else below, zero)
    return UpdateMetrics(sums, extremes, zero, np.int32(0))


def test_a_step_without_a_token_to_train_has_no_extremes():
    """All responses were cut, say. Anything infinite would end the run."""
    nothing = update(0, np.float32(-np.inf))
    numbers = metrics.update_metrics([nothing, nothing], has_mismatch=True)
    assert numbers["batch/tokens_trained"] == 0 and "policy/ratio_max" not in numbers
    assert np.isfinite(list(numbers.values())).all()
    numbers = metrics.update_metrics([nothing, update(5, np.float32(1.25))], has_mismatch=True)
    assert numbers["policy/ratio_max"] == numbers["policy/ratio_min"] == 1.25
    assert jax.tree.all(jax.tree.map(np.isfinite, numbers))


def test_a_skipped_update_is_counted_and_in_no_mean():
    nan, good = np.float32(np.nan), update(4, np.float32(1.5))
    good = good._replace(grad_norm=np.float32(2), sums=good.sums._replace(loss=np.float32(3)))
    skipped = good._replace(grad_norm=nan, skipped=np.int32(1), sums=good.sums._replace(loss=nan))
    numbers = metrics.update_metrics([good, skipped], has_mismatch=False)
    assert numbers["optimizer/updates"] == numbers["optimizer/skipped_updates"] == 1
    assert (numbers["policy/loss"], numbers["optimizer/grad_norm"]) == (3, 2)
    assert numbers["batch/tokens_trained"] == 4


def test_every_sum_has_its_own_metric():
    """Means over the tokens of both updates; of the loss, over the updates."""
    sums = dict(loss=1, entropy=5, token_prob=10, clip_high=15, clip_low=20, clip_dual=25)
    sums |= dict(clip_high_prob=1.5, clip_low_prob=4, clip_dual_prob=7.5, kl_old=30, kl_ref=35)
    one = update(4, np.float32(1.0))
    one = one._replace(sums=one.sums._replace(**{n: np.float32(x) for n, x in sums.items()}))
    two = one._replace(sums=one.sums._replace(tokens=np.float32(6), loss=np.float32(4)))
    numbers = metrics.update_metrics([one, two], has_mismatch=False)
    expected = {
        "loss": 2.5, "entropy": 1, "token_prob": 2,
        "clip_high_share": 3, "clip_low_share": 4, "clip_dual_share": 5,
        "clip_high_prob": 0.1, "clip_low_prob": 0.2, "clip_dual_prob": 0.3,
        "kl_old": 6, "kl_ref": 7, "ratio_max": 1, "ratio_min": 1,
    }  # fmt: skip
    policy = {n: x for n, x in numbers.items() if n.startswith("policy/")}
    assert policy == {f"policy/{name}": pytest.approx(x) for name, x in expected.items()}


def test_the_mismatch_is_that_of_the_first_update_unless_it_was_skipped():
    one = update(4, np.float32(1.0))
    sums = one.sums._replace(mismatch=np.float32(3), mismatch_tokens=np.float32(4))
    one = one._replace(sums=sums, extremes=one.extremes._replace(mismatch_max=np.float32(2)))
    two = one._replace(sums=sums._replace(mismatch=np.float32(9)))

    def mismatch(*updates, has_mismatch=True):
        numbers = metrics.update_metrics(updates, has_mismatch=has_mismatch)
        return [numbers.get(f"rollout/log_prob_mismatch_{name}") for name in ("mean", "max")]

    assert mismatch(one, two) == [0.75, 2]
    assert mismatch(one, two, has_mismatch=False) == [None, None]
    assert mismatch(one._replace(skipped=np.int32(1)), two) == [None, None]


def test_metrics_of_the_critic_are_of_the_updates_that_were_taken():
    def of(tokens, loss, clipped, grad_norm, skipped=0):
        sums = CriticSums(*map(np.float32, (tokens, loss, clipped)))
        return CriticMetrics(sums, np.float32(grad_norm), np.int32(skipped))

    updates = [of(4, 1.0, 1, 2.0), of(5, np.nan, 9, np.nan, 1), of(6, 3.0, 2, 4.0)]
    expected = {"critic/loss": 2.0, "critic/clip_share": 0.3, "critic/grad_norm": 3.0}
    assert metrics.critic_metrics(updates) == pytest.approx(expected)
    assert metrics.critic_metrics(updates[1:2]) == {}


def test_the_probability_of_clipped_tokens_is_a_mean_over_them_alone():
    step = update(100, np.float32(1.0))
    few = step._replace(sums=step.sums._replace(clip_high=np.float32(4), clip_high_prob=0.5))
    more = step._replace(sums=step.sums._replace(clip_high=np.float32(6), clip_high_prob=1.0))
    numbers = metrics.update_metrics([few, more], has_mismatch=True)
    assert numbers["policy/clip_high_prob"] == pytest.approx(0.15)
    assert "policy/clip_low_prob" not in numbers and "policy/clip_dual_prob" not in numbers


def test_returns_that_vary_by_rounding_have_no_variance_to_explain():
    """Sums of rewards and values of a batch in which all responses have the reward 0.1."""
    returns = np.array([0.1, np.nextafter(0.1, 1.0), 0.1])
    assert metrics.explained_variance(np.array([0.0, 0.2, 0.1]), returns) == 0.0


def with_faults(number, of):
    group = make_group([False] * of)
    failed = [v._replace(note="error: TypeError: None") for v in group.verdicts[:number]]
    return [group._replace(verdicts=(*failed, *group.verdicts[number:]))]


def test_a_scorer_that_fails_is_a_warning_and_one_that_always_does_ends_the_run():
    assert (
        rollout_metrics.scorer_faults(with_faults(0, 8)) == rollout_metrics.scorer_faults([]) == ""
    )
    assert rollout_metrics.scorer_faults(with_faults(1, 40)) == ""
    warning = rollout_metrics.scorer_faults(with_faults(2, 8))
    assert warning == "2 of 8 responses could not be scored, such as: error: TypeError: None"
    with pytest.raises(RunError, match=r"8 of 8 .*TypeError.*config\.reward\.scorer"):
        rollout_metrics.scorer_faults(with_faults(8, 8))


def test_a_step_whose_responses_are_all_invalid_ends_the_run():
    """Each is excluded from the loss: the run would continue with non-finite parameters."""
    group = make_group([True, False])
    invalid = tuple(r._replace(finish_reason="invalid") for r in group.responses)
    rollout_metrics.check_finite([group, group._replace(responses=invalid)])
    rollout_metrics.check_finite([])
    with pytest.raises(RunError, match=r"all 2 responses .*config\.optimizer\.learning_rate"):
        rollout_metrics.check_finite([group._replace(responses=invalid)])
