"""Numbers of a step where there is little to count, or where counting is not enough."""

import jax
import numpy as np
import pytest

from dapo_jax.rollout import metrics as rollout_metrics
from dapo_jax.training import metrics
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
