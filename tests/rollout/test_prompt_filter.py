"""Which prompts are left out before they are sampled, against GRESO's equations in plain loops."""

import dataclasses
import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest

from dapo_jax.rollout import metrics
from dapo_jax.rollout import prompt_filter as prefilter
from dapo_jax.rollout.dynamic_sampling import (
    SamplingState,
    commit,
    open_queue,
    state_from_json,
    state_to_json,
    take_informative,
)
from dapo_jax.rollout.prompt_filter import (
    GRESO,
    PrefilterState,
    PromptFilter,
    initial_state,
    next_state,
    sampling_probability,
    uniform,
)
from dapo_jax.types import Problem
from tests.rollout.test_dynamic_sampling import outcomes_of
from tests.support.helpers import make_group, tiny_config

BASE = tiny_config(
    dynamic_sampling__prefilter=True,
    dynamic_sampling__max_prompts=40,
)
ON = BASE.dynamic_sampling
CONFIG = GRESO
NUM_PROBLEMS = 10
KINDS = {"r": [True] * 4, "w": [False] * 4, "m": [True, False, False, True]}


def group(kind, id, epoch=1):
    made = make_group(KINDS[kind], id=id)
    return made._replace(problem=made.problem._replace(epoch=epoch))


class Data:
    """Ten problems over and over; a position in them is a number."""

    def __init__(self, place=0):
        self.place = place

    def take(self, num):
        first, self.place = self.place, self.place + num
        return [
            Problem(i % NUM_PROBLEMS, "", (1,), "", "", epoch=i // NUM_PROBLEMS)
            for i in range(first, self.place)
        ]

    def get_state(self):
        return self.place

    def set_state(self, state):
        self.place = state


@pytest.mark.parametrize("streak", [0, 1, 3, -1, -2, 40, -40])
def test_the_share_that_is_sampled_is_p_to_the_streak(streak):
    state = PrefilterState(0.7, 0.4, {3: streak})
    expected = 1.0
    for _ in range(abs(streak)):
        expected *= 0.7 if streak > 0 else 0.4
    expected = max(expected, 0.01)
    assert sampling_probability(CONFIG, state, 3) == pytest.approx(expected, rel=1e-12)
    n, epochs = 4000, itertools.count()
    take = lambda _: [Problem(3, "", (1,), "", "", epoch=next(epochs))]
    source = SimpleNamespace(take=take)
    prompt_filter = PromptFilter(CONFIG._replace(max_skips=10**6), state, 0)
    found = 0
    while prompt_filter.next(source).epoch < n:
        found += 1
    deviation = np.sqrt(expected * (1 - expected) / n)
    assert abs(found / n - expected) <= 4 * deviation


def test_the_random_numbers_are_those_of_seed_epoch_and_problem():
    problem = Problem(5, "", (1,), "", "", epoch=2)
    values = [
        uniform(seed, problem._replace(id=id, epoch=epoch))
        for seed in range(3) for id in range(20) for epoch in range(20)
    ]  # fmt: skip
    assert len(set(values)) == len(values) and 0 <= min(values) and max(values) < 1
    assert abs(np.mean(values) - 0.5) < 4 / np.sqrt(12 * len(values))
    assert uniform(0, problem) == uniform(0, problem._replace(prompt="another", answer="7"))


def test_visits_in_a_row_are_counted_by_kind():
    history = {0: "rrr", 1: "www", 2: "rrm", 3: "rrw", 4: "wwr", 5: "mr", 6: "mm", 7: "mwwmw"}
    expected = {0: 3, 1: -3, 3: -1, 4: 1, 5: 1, 7: -1}
    state = initial_state()
    for visit in range(5):
        groups = [group(kinds[visit], id) for id, kinds in history.items() if visit < len(kinds)]
        state = next_state(CONFIG, state, groups, [])
    assert state is not None and state.streaks == expected
    # Two visits in one step count as two.
    state = next_state(CONFIG, initial_state(), [group("r", 8), group("r", 8)], [])
    assert state is not None and state.streaks == {8: 2}


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
    state = PrefilterState(0.5, 0.5, {})
    groups = [group(kind, id) for id, kind in enumerate(kinds)]
    after = next_state(CONFIG, state, groups, [])
    assert after is not None
    assert (after.p_easy, after.p_hard) == (0.5 + easy * 0.01, 0.5 + hard * 0.01)
    many = state
    for _ in range(100):
        many = next_state(CONFIG, many, groups, [])
    assert many is not None
    assert {many.p_easy, many.p_hard} <= {0.05, 0.95}
    assert (many.p_easy == 0.95) == (easy > 0) and (many.p_hard == 0.95) == (hard > 0)


def test_probabilities_rest_in_the_first_epoch_and_without_groups():
    state = PrefilterState(0.5, 0.5, {4: 2})
    first = [group("r", id, epoch=0) for id in range(4)]
    after = next_state(CONFIG, state, first, [])
    assert after == PrefilterState(0.5, 0.5, {0: 1, 1: 1, 2: 1, 3: 1, 4: 2})
    moved = next_state(CONFIG, state, first, [Problem(4, "", (1,), "", "", epoch=1)])
    assert moved is not None and moved.p_easy < 0.5
    assert next_state(CONFIG, state, [], []) == state


def run(state, place, kinds, seed, *, num=4, order=0, config=ON):
    """A step, its groups ending in an order of its own; the place in the data after it."""
    data, rng = Data(place), np.random.default_rng(order)
    config = dataclasses.replace(
        BASE, seed=seed, dynamic_sampling=config,
        train=dataclasses.replace(BASE.train, prompts_per_step=num),
    )  # fmt: skip
    make = lambda problem: group(kinds[problem.id], problem.id, problem.epoch)
    prompts = open_queue(config, state, data, step=1)
    outcomes = outcomes_of(prompts, make, rng, [], most=int(rng.integers(1, 8)))
    taken = take_informative(outcomes, num)
    batch, state = commit(config, state, prompts, taken, 1)
    return batch, state, data.place


def start():
    return SamplingState(prefilter=initial_state())


def visits(groups):
    return [(g.problem.id, g.problem.epoch) for g in groups]


def test_what_is_left_out_does_not_depend_on_which_response_ends_first():
    kinds, skipped = "rrwmrwwmrm", []
    state, place = start(), 0
    for _ in range(8):
        found = [run(state, place, kinds, 0, order=order) for order in range(12)]
        batch, after, end = found[0]
        for other, its_state, its_end in found[1:]:
            assert visits(other.groups) == visits(batch.groups)
            assert visits(other.sampled) == visits(batch.sampled)
            assert other.skipped == batch.skipped
            assert its_state == after and its_end == end
        assert end - place == len(batch.sampled) + batch.skipped
        # Of the prompts in between, those of the law and no others.
        assert state.prefilter is not None
        expected = [
            (p.id, p.epoch)
            for p in Data(place).take(end - place)
            if uniform(0, p) < sampling_probability(CONFIG, state.prefilter, p.id)
        ]
        assert visits(batch.sampled) == expected
        skipped.append(batch.skipped)
        state, place = after, end
    assert sum(skipped[2:]) > 20, "nothing is left out"


def test_a_state_that_went_through_json_goes_on_the_same():
    kinds = "rrwmrwwmrm"
    (one, place), (two, its_place) = (start(), 0), (start(), 0)
    for step in range(8):
        batch, one, place = run(one, place, kinds, 7)
        two = state_from_json(json.loads(json.dumps(state_to_json(two))))
        other, two, its_place = run(two, its_place, kinds, 7, order=step)
        assert visits(batch.sampled) == visits(other.sampled) and place == its_place
        assert batch.skipped == other.skipped
        assert (one.prefilter, one.informative_rate) == (two.prefilter, two.informative_rate)
    assert one.prefilter is not None and one.prefilter.p_easy != 0.5 and batch.skipped
    of_seeds = {tuple(visits(run(one, place, kinds, seed)[0].sampled)) for seed in range(9)}
    assert len(of_seeds) > 4, "the seed decides"


def test_a_step_ends_when_all_that_there_is_teaches_nothing(monkeypatch):
    hopeless = PrefilterState(0.05, 0.05, dict.fromkeys(range(NUM_PROBLEMS), 30))
    monkeypatch.setattr(prefilter, "GRESO", GRESO._replace(max_skips=50))
    state = SamplingState(prefilter=hopeless)
    batch, after, place = run(state, 0, "r" * NUM_PROBLEMS, 0)
    assert batch.skipped == 50 and len(batch.sampled) == place - 50
    assert len(batch.sampled) == 5 * 8
    assert batch.groups == [] and after.prefilter is not None
    assert after.prefilter.streaks[0] > 30


def test_switched_off_nothing_is_left_out():
    off = dataclasses.replace(ON, prefilter=False)
    state, place = SamplingState(), 0
    for _ in range(4):
        batch, state, end = run(state, place, "rrwmrwwmrm", 0, config=off)
        assert state.prefilter is None and batch.skipped == 0
        assert visits(batch.sampled) == [(p.id, p.epoch) for p in Data(place).take(end - place)]
        place = end
    assert state_from_json(json.loads(json.dumps(state_to_json(state)))).prefilter is None


def test_its_metrics():
    state = PrefilterState(0.4, 0.6, {0: 3})
    sampling = SamplingState(prefilter=state)
    batch, _, _ = run(sampling, 10, "r" + 9 * "m", 3)
    told = metrics.prefilter_metrics(batch, state)
    assert batch.skipped == 1, "another seed is needed for this test"
    assert told == {
        "prefilter/prompts_skipped": 1,
        "prefilter/skipped_share": 1 / (1 + len(batch.sampled)),
        "prefilter/p_easy": 0.4,
        "prefilter/p_hard": 0.6,
    }


def test_a_visit_that_says_nothing_of_a_prompt_changes_no_streak():
    """Every response broken off or not scored; with overlong filtering, truncated. One that is
    right among truncated ones is not all right."""
    state = PrefilterState(0.5, 0.5, {0: 2, 1: -3})
    fault = lambda g: g._replace(verdicts=tuple(v._replace(note="timeout") for v in g.verdicts))
    groups = [fault(group("w", 0)), make_group([True, False, False, False], id=1, truncated=4)]
    after = next_state(CONFIG, state, groups, [], overlong_filter=True)
    assert after is not None and after.streaks == state.streaks
    right = [make_group([True, True, False], id=1, truncated=1)]
    after = next_state(CONFIG, state, right, [], overlong_filter=True)
    assert after is not None and after.streaks == {0: 2, 1: 1}
