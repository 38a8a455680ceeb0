"""Metrics of a rollout, counted by hand."""

import numpy as np
import pytest

from dapo_jax.rollout import metrics
from dapo_jax.rollout.dynamic_sampling import Batch
from dapo_jax.rollout.metrics import RolloutStats, rollout_metrics, sampling_metrics
from tests.support.helpers import make_group


def test_throughput_and_the_use_of_slots():
    stats = RolloutStats(
        tokens=80, busy_slots=30, slots_offered=40, preempted=3, idle_seconds=1.0,
        sampled=60, could_sample=120, discarded=10,
    )  # fmt: skip
    assert rollout_metrics(stats, {"rollout": 4.0, "reward": 1.0}, num_replicas=2) == {
        "perf/tokens_per_second": 20.0,
        "perf/idle_share": 0.1,
        "perf/preempted": 3,
        "perf/tokens_discarded": 10,
        "perf/slot_occupancy": 0.75,
        "perf/slot_utilisation": 0.5,
    }
    nothing = rollout_metrics(RolloutStats(), {"rollout": 0.0, "reward": 0.0}, 1)
    assert nothing == dict.fromkeys(
        ("perf/tokens_per_second", "perf/idle_share", "perf/preempted"), 0
    )


def test_accuracy_by_source_and_the_means_of_scorers_own_numbers():
    """A source alone has no number of its own; texts have none either."""
    easy, hard = make_group([True, True, False]), make_group([False, True])
    extras = {"steps": 3, "kind": "a"}, {"steps": 5, "format": True}
    verdicts = tuple(v._replace(extra=x) for v, x in zip(hard.verdicts, extras))
    easy = easy._replace(problem=easy.problem._replace(source="easy"))
    hard = hard._replace(problem=hard.problem._replace(source="hard"), verdicts=verdicts)
    found = sampling_metrics(Batch([easy], [easy, hard]))
    named = {n: x for n, x in found.items() if n.startswith(("accuracy/sampled/", "scorer/"))}
    assert named == {
        "accuracy/sampled/easy": pytest.approx(2 / 3),
        "accuracy/sampled/hard": 0.5,
        "scorer/format": 1.0,
        "scorer/steps": 4.0,
    }
    # A scorer reads numbers of any size from a response.
    verdicts = tuple(v._replace(extra={"steps": x}) for v, x in zip(hard.verdicts, (10**400, 3)))
    huge = sampling_metrics(Batch([], [hard._replace(verdicts=verdicts)]))
    assert huge["scorer/steps"] == 3.0
    verdicts = tuple(v._replace(extra={"steps": -1.7e308}) for v in hard.verdicts)
    assert "scorer/steps" not in sampling_metrics(Batch([], [hard._replace(verdicts=verdicts)]))
    alone = sampling_metrics(Batch([easy], [easy]))
    assert not any(name.startswith(("accuracy/sampled/", "scorer/")) for name in alone)


def with_texts(group, *texts):
    responses = zip(group.responses, texts, strict=True)
    return group._replace(responses=tuple(r._replace(text=text) for r, text in responses))


def test_reflection_is_looked_for_in_some_responses(monkeypatch):
    """Of all groups alike; a search takes milliseconds."""
    monkeypatch.setattr(metrics, "MOST_SEARCHED", 8)
    searched = []
    monkeypatch.setattr(metrics, "find_reflection", searched.append)
    groups = [with_texts(make_group([True, False]), f"{i}", f"{i}") for i in range(10)]
    assert sampling_metrics(Batch([], groups))["reflection/share"] == 0.0
    assert len(searched) == 7 and len(set(searched)) == 7
    searched.clear()
    sampling_metrics(Batch([], groups[:4]))
    assert len(searched) == 8


def test_metrics_of_what_was_sampled_and_kept():
    kept = with_texts(
        make_group([True, False], lengths=[4, 9], truncated=1), "Wait, no. 7", "is it 7"
    )
    easy = with_texts(make_group([True, True], lengths=[2, 3]), "7", "7, let me check: 7")
    hard = with_texts(make_group([False, False], lengths=[5, 1]), "", "8")
    invalid = hard.responses[0]._replace(finish_reason="invalid")
    faults = tuple(v._replace(note="timeout") for v in hard.verdicts)
    hard = hard._replace(responses=(invalid, hard.responses[1]), verdicts=faults)
    others = [make_group([True, True], lengths=[2, 2])] * 2
    batch = Batch([kept], [kept, easy, hard, *others], num_returned=4)
    expected = {
        "sampling/prompts_tried": 5,
        "sampling/prompts_kept": 1,
        "sampling/prompts_all_right": 3,
        "sampling/prompts_all_wrong": 1,
        "perf/prompts_returned": 4,
        "sampling/scorer_faults": 2,
        "accuracy/sampled": 0.7,
        "accuracy/trained": 0.5,
        "length/mean": 3.2,
        "length/max": 9.0,
        "length/truncated_share": 0.1,
        "reflection/share": 0.2,
        "rollout/invalid": 1,
    }
    found = sampling_metrics(batch)
    assert found == expected
    looping = easy.responses[0]._replace(finish_reason="repetition")
    easy = easy._replace(responses=(looping, easy.responses[1]))
    batch = batch._replace(sampled=[kept, easy, hard, *others])
    found = sampling_metrics(batch, ends_repetition=True)
    assert found == expected | {"rollout/ended_repetition": 0.1}
    given = [np.array([-1.0, np.nan]), np.array([np.nan, np.nan, -1.0])]
    responses = zip(easy.responses, given, strict=True)
    easy = easy._replace(responses=tuple(r._replace(log_probs=x) for r, x in responses))
    batch = batch._replace(sampled=[kept, easy, hard, *others])
    found = sampling_metrics(batch, ends_thinking=True)
    assert found == expected | {"rollout/ended_thinking": 0.2}
