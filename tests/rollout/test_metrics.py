"""Metrics of a rollout, counted by hand."""

import numpy as np
import pytest

from dapo_jax.rollout.dynamic_sampling import Batch
from dapo_jax.rollout.metrics import sampling_metrics
from tests.support.helpers import make_group


def with_texts(group, *texts):
    responses = zip(group.responses, texts, strict=True)
    return group._replace(responses=tuple(r._replace(text=text) for r, text in responses))


def test_metrics_of_what_was_sampled_and_kept():
    kept = with_texts(
        make_group([True, False], lengths=[4, 9], truncated=1), "Wait, no. 7", "is it 7"
    )
    easy = with_texts(make_group([True, True], lengths=[2, 3]), "7", "7, let me check: 7")
    hard = with_texts(make_group([False, False], lengths=[5, 1]), "", "8")
    found = sampling_metrics(Batch([kept], [kept, easy, hard], num_returned=2))
    expected = {
        "sampling/prompts_tried": 3,
        "sampling/prompts_kept": 1,
        "sampling/prompts_all_right": 1,
        "sampling/prompts_all_wrong": 1,
        "perf/prompts_returned": 2,
        "sampling/scorer_faults": 0,
        "accuracy/sampled": 0.5,
        "accuracy/trained": 0.5,
        "length/mean": 4.0,
        "length/max": 9.0,
        "length/truncated_share": pytest.approx(1 / 6),
        "reflection/share": pytest.approx(2 / 6),
        "rollout/invalid": 0,
    }
    assert found == expected
    looping = easy.responses[0]._replace(finish_reason="repetition")
    easy = easy._replace(responses=(looping, easy.responses[1]))
    found = sampling_metrics(
        Batch([kept], [kept, easy, hard], num_returned=2), ends_repetition=True
    )
    assert found == expected | {"rollout/ended_repetition": pytest.approx(1 / 6)}
    given = [np.array([-1.0, np.nan]), np.array([np.nan, np.nan, -1.0])]
    responses = zip(easy.responses, given, strict=True)
    easy = easy._replace(responses=tuple(r._replace(log_probs=x) for r, x in responses))
    found = sampling_metrics(Batch([kept], [kept, easy, hard], num_returned=2), ends_thinking=True)
    assert found == expected | {"rollout/ended_thinking": pytest.approx(2 / 6)}
