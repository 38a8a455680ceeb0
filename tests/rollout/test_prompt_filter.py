"""GRESO prompt filter, against the paper's equations in plain loops."""

import dataclasses
import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest

from dapo_jax.rollout import metrics, prompt_filter
from dapo_jax.rollout.dynamic_sampling import (
    SamplingState,
    commit,
    open_queue,
    state_from_json,
    state_to_json,
    take_informative,
)
from dapo_jax.rollout.prompt_filter import (
    PromptFilter,
    PromptFilterState,
    next_state,
    sampling_probability,
    uniform,
)
from dapo_jax.types import Problem
from tests.rollout.test_dynamic_sampling import KINDS, Data, make_config, outcomes_of
from tests.support.helpers import make_group

CONFIG = make_config(prefilter=True)
NUM_PROBLEMS = 10  # over and over, in epochs
MIXED = "rrwmrwwmrm"


def group(kind, id, epoch=1):
    made = make_group(KINDS[kind], id=id)
    return made._replace(problem=made.problem._replace(epoch=epoch))


@pytest.mark.parametrize("streak", [0, 1, 3, -1, -2, 40, -40])
def test_the_share_that_is_sampled_is_p_to_the_streak(monkeypatch, streak):
    monkeypatch.setattr(prompt_filter, "MAX_SKIPS", 10**6)
    state = PromptFilterState(0.7, 0.4, {3: streak})
    expected = 1.0
    for _ in range(abs(streak)):
        expected *= 0.7 if streak > 0 else 0.4
    expected = max(expected, 0.01)
    assert sampling_probability(state, 3) == pytest.approx(expected, rel=1e-12)
    n, epochs = 4000, itertools.count()
    source = SimpleNamespace(take=lambda _: [Problem(3, "", (1,), "", "", epoch=next(epochs))])
    filtered, found = PromptFilter(state, 0), 0
    while filtered.next(source).epoch < n:
        found += 1
    assert abs(found / n - expected) <= 4 * np.sqrt(expected * (1 - expected) / n)


def test_the_random_numbers_are_those_of_seed_epoch_and_problem():
    problem = Problem(5, "", (1,), "", "", epoch=2)
    places = itertools.product(range(3), range(20), range(20))
    values = [uniform(seed, problem._replace(id=id, epoch=e)) for seed, id, e in places]
    assert len(set(values)) == len(values) and 0 <= min(values) and max(values) < 1
    assert abs(np.mean(values) - 0.5) < 4 / np.sqrt(12 * len(values))
    assert uniform(0, problem) == uniform(0, problem._replace(prompt="another", answer="7"))


def test_visits_in_a_row_are_counted_by_kind():
    history = {0: "rrr", 1: "www", 2: "rrm", 3: "rrw", 4: "wwr", 5: "mr", 6: "mm", 7: "mwwmw"}
    state = PromptFilterState()
    for visit in range(5):
        groups = [group(kinds[visit], id) for id, kinds in history.items() if visit < len(kinds)]
        state = next_state(state, groups, [])
    assert state is not None and state.streaks == {0: 3, 1: -3, 3: -1, 4: 1, 5: 1, 7: -1}
    twice = next_state(PromptFilterState(), [group("r", 8), group("r", 8)], [])
    assert twice is not None and twice.streaks == {8: 2}, "two visits in one step count as two"


@pytest.mark.parametrize(
    "kinds, easy, hard",
    [
        # Targets: one in twelve all right, one in six all wrong; at the target p falls.
        ("r" + "ww" + 9 * "m", -1, -1),
        (12 * "m", +1, +1),
        ("r" + "w" + 10 * "m", -1, +1),
        (3 * "w" + 9 * "m", +1, -1),
    ],
)
def test_probabilities_move_towards_the_targets(kinds, easy, hard):
    groups = [group(kind, id) for id, kind in enumerate(kinds)]
    after = next_state(PromptFilterState(), groups, [])
    assert after is not None
    assert (after.p_easy, after.p_hard) == (0.5 + easy * 0.01, 0.5 + hard * 0.01)
    for _ in range(100):
        after = next_state(after, groups, [])
    assert after is not None
    assert (after.p_easy, after.p_hard) == tuple(0.95 if s > 0 else 0.05 for s in (easy, hard))


def test_probabilities_rest_in_the_first_epoch_and_without_groups():
    state = PromptFilterState(0.5, 0.5, {4: 2})
    first = [group("r", id, epoch=0) for id in range(4)]
    after = next_state(state, first, [])
    assert after == PromptFilterState(0.5, 0.5, {0: 1, 1: 1, 2: 1, 3: 1, 4: 2})
    moved = next_state(state, first, [Problem(4, "", (1,), "", "", epoch=1)])
    assert moved is not None and moved.p_easy < 0.5
    assert next_state(state, [], []) == state


def test_a_visit_without_trained_responses_changes_no_streak():
    """Every response invalid or not scored; with overlong filtering, truncated."""
    state = PromptFilterState(0.5, 0.5, {0: 2, 1: -3})
    fault = lambda g: g._replace(verdicts=tuple(v._replace(note="timeout") for v in g.verdicts))
    groups = [fault(group("w", 0)), make_group([True, False, False, False], id=1, truncated=4)]
    after = next_state(state, groups, [], overlong_filter=True)
    assert after is not None and after.streaks == state.streaks
    right = [make_group([True, True, False], id=1, truncated=1)]
    after = next_state(state, right, [], overlong_filter=True)
    assert after is not None and after.streaks == {0: 2, 1: 1}


def run(state, position, kinds, seed, *, order=0, config=CONFIG):
    """A step whose groups end in an order of their own: (batch, state, position after it)."""
    data, rng = Data(position, NUM_PROBLEMS), np.random.default_rng(order)
    config = dataclasses.replace(config, seed=seed)
    make = lambda problem: group(kinds[problem.id], problem.id, problem.epoch)
    prompts = open_queue(config, state, data, step=1)
    outcomes = outcomes_of(prompts, make, rng, [], most=int(rng.integers(1, 8)))
    batch, state = commit(config, state, prompts, take_informative(outcomes, 4), 1)
    return batch, state, data.position


def visits(groups):
    return [(g.problem.id, g.problem.epoch) for g in groups]


def test_the_choice_does_not_depend_on_which_response_ends_first():
    state, position, skipped = SamplingState(prompt_filter=PromptFilterState()), 0, []
    for _ in range(8):
        found = [run(state, position, MIXED, 0, order=order) for order in range(12)]
        batch, after, end = found[0]
        for other, its_state, its_end in found[1:]:
            assert visits(other.groups) == visits(batch.groups)
            assert visits(other.sampled) == visits(batch.sampled)
            assert other.num_skipped == batch.num_skipped
            assert its_state == after and its_end == end
        assert end - position == len(batch.sampled) + batch.num_skipped
        assert state.prompt_filter is not None
        assert visits(batch.sampled) == [
            (p.id, p.epoch)
            for p in Data(position, NUM_PROBLEMS).take(end - position)
            if uniform(0, p) < sampling_probability(state.prompt_filter, p.id)
        ]
        skipped.append(batch.num_skipped)
        state, position = after, end
    assert sum(skipped[2:]) > 20, "nothing is left out"


def test_a_state_that_went_through_json_makes_the_same_choice():
    one = two = SamplingState(prompt_filter=PromptFilterState())
    position = 0
    for step in range(8):
        batch, one, end = run(one, position, MIXED, 7)
        other, two, its_end = run(two, position, MIXED, 7, order=step)
        two = state_from_json(json.loads(json.dumps(state_to_json(two))))
        assert visits(batch.sampled) == visits(other.sampled) and end == its_end and one == two
        position = end
    assert one.prompt_filter is not None and one.prompt_filter.p_easy != 0.5 and batch.num_skipped
    by_seed = {tuple(visits(run(one, position, MIXED, seed)[0].sampled)) for seed in range(9)}
    assert len(by_seed) > 4, "the seed decides"


def test_a_step_ends_when_all_prompts_teach_nothing(monkeypatch):
    hopeless = PromptFilterState(0.05, 0.05, dict.fromkeys(range(NUM_PROBLEMS), 30))
    monkeypatch.setattr(prompt_filter, "MAX_SKIPS", 50)
    batch, after, position = run(SamplingState(prompt_filter=hopeless), 0, "r" * NUM_PROBLEMS, 0)
    assert batch.num_skipped == 50 and len(batch.sampled) == position - 50 == 5 * 8
    assert batch.groups == [] and after.prompt_filter is not None
    assert after.prompt_filter.streaks[0] > 30


def test_switched_off_nothing_is_left_out():
    state, position, off = SamplingState(), 0, make_config()
    for _ in range(4):
        batch, state, end = run(state, position, MIXED, 0, config=off)
        assert state.prompt_filter is None and batch.num_skipped == 0
        prompts = Data(position, NUM_PROBLEMS).take(end - position)
        assert visits(batch.sampled) == [(p.id, p.epoch) for p in prompts]
        position = end
    assert state_from_json(json.loads(json.dumps(state_to_json(state)))).prompt_filter is None


def test_its_metrics():
    state = PromptFilterState(0.4, 0.6, {0: 3})
    batch, _, _ = run(SamplingState(prompt_filter=state), 10, "r" + 9 * "m", 3)
    assert batch.num_skipped == 1, "another seed is needed for this test"
    assert metrics.prompt_filter_metrics(batch, state) == {
        "prefilter/prompts_skipped": 1,
        "prefilter/skipped_share": 1 / (1 + len(batch.sampled)),
        "prefilter/p_easy": 0.4,
        "prefilter/p_hard": 0.6,
    }
