"""Dynamic sampling: which groups make the batch, and in which order."""

import dataclasses

import numpy as np
import pytest

from dapo_jax.distributed import ProcessGroup, work_queue
from dapo_jax.rollout.dynamic_sampling import (
    PRIOR_OUTCOMES,
    DynamicSamplingState,
    commit,
    open_queue,
    take_kept,
)
from dapo_jax.rollout.prompt_queue import NO_PROMPT
from dapo_jax.types import Problem
from tests.support.helpers import make_group, tiny_config
from tests.support.processes import Store

KINDS = {"r": [True] * 4, "w": [False] * 4, "m": [True, False, False, True]}


def make_config(num_prompts=4, **sampling):
    sampling = {"max_prompts": 40} | sampling
    return tiny_config(
        train__prompts_per_step=num_prompts,
        **{f"dynamic_sampling__{name}": value for name, value in sampling.items()},
    )


CONFIG = make_config()


class Data:
    """Problems 0, 1, 2, ..."""

    def __init__(self, position=0):
        self.position = position

    def take(self, n):
        first, self.position = self.position, self.position + n
        return [Problem(id, "", (1,), "", "") for id in range(first, self.position)]

    def get_state(self):
        return self.position

    def set_state(self, state):
        self.position = state


def outcomes_of(prompts, make, rng, claimed, most=6):
    """A collector whose groups end in an order of their own, up to `most` at once."""
    pending = []
    while not prompts.done:
        while len(pending) < most:
            number = prompts.claim()
            if number in (None, NO_PROMPT):
                break
            claimed.append(number)
            pending.append(number)
        number = pending.pop(rng.integers(len(pending)))
        prompts.report(number, make(prompts.problem(number)))
        yield from prompts.resolved()


def one_step(kinds, seed, rate=1.0, *, config=CONFIG):
    """(batch, state after it, position in the data, numbers of the prompts claimed)."""
    data, rng, claimed = Data(), np.random.default_rng(seed), []
    state = DynamicSamplingState(rate)
    make = lambda problem: make_group(KINDS[kinds[problem.id % len(kinds)]], id=problem.id)
    prompts = open_queue(config, state, data, step=1)
    outcomes = outcomes_of(prompts, make, rng, claimed)
    taken = take_kept(outcomes)
    batch, state = commit(config, state, prompts, taken, 1)
    return batch, state, data.position, claimed


def ids(groups):
    return [group.problem.id for group in groups]


def test_the_filter_looks_at_correctness_not_at_reward():
    """All wrong, of unequal length and so of unequal shaped reward: not informative."""
    group = make_group([False] * 4, lengths=[3, 10, 30, 32], truncated=1)
    verdicts = tuple(v._replace(reward=-1.0 - i) for i, v in enumerate(group.verdicts))
    informative = lambda group: group.is_informative(overlong_filter=False)
    assert not informative(group._replace(verdicts=verdicts))
    assert not informative(make_group([True] * 4)) and informative(make_group([True, False]))


@pytest.mark.parametrize("rate", [1.0, 0.3])
def test_a_step_takes_the_first_informative_groups_whatever_ends_first(rate):
    for seed in range(20):
        batch, state, position, claimed = one_step("rwmmmwwrmmmm", seed, rate)
        assert ids(batch.groups) == [2, 3, 4, 8] and ids(batch.sampled) == list(range(9))
        assert position == 9, "the next step begins after the last prompt of this one"
        assert claimed == list(range(len(claimed))) and batch.num_returned == len(claimed) - 9
        assert state[:2] == DynamicSamplingState(0.5 * 4 / 9 + 0.5 * rate)[:2]
        correct = dict(enumerate([4, 0, 2, 2, 2, 0, 0, 4, 2]))
        assert state.pass_rates == {id: ((0, n, 4),) for id, n in correct.items()}


def test_a_step_claims_no_more_prompts_than_should_be_needed():
    assert one_step("m", 0)[3] == [0, 1, 2, 3]
    assert len(one_step("mw", 0, 0.5)[3]) <= 10


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_a_step_without_informative_groups_claims_all_prompts_and_ends(rate):
    batch, _, position, claimed = one_step("wr", 0, rate)
    assert batch.groups == [] and len(batch.sampled) == position == len(claimed) == 40


@pytest.mark.parametrize("limits", [{}, {"max_prompts": 1}])
def test_switched_off_every_group_is_kept(limits):
    """The batch may be larger than dynamic sampling's most prompts."""
    config = make_config(6, enabled=False, **limits)
    for seed in range(10):
        batch, state, position, claimed = one_step("rwmw", seed, config=config)
        assert ids(batch.groups) == ids(batch.sampled) == claimed == list(range(6))
        # A stage that switches it on begins as a run does.
        assert state.informative_rate == DynamicSamplingState().informative_rate
        assert position == 6 and batch.num_returned == 0


def test_a_claim_beyond_the_last_prompt_is_no_prompt_returned(monkeypatch):
    """The second process asks before it has seen that the first has claimed all six."""
    monkeypatch.setattr(work_queue, "POLL_SECONDS", 0.0)
    config, state, store = make_config(6, enabled=False), DynamicSamplingState(), Store()
    first, second = (
        open_queue(config, state, Data(), step=1, group=ProcessGroup(i, 2, store)) for i in range(2)
    )
    for number in range(6):
        assert first.claim() == number
        first.report(number, make_group([True, False], id=number))
    monkeypatch.setattr(second.work_queue, "poll", lambda: None)
    assert second.claim() == NO_PROMPT
    taken = take_kept(first.resolved())
    monkeypatch.setattr(first.group, "all_gather_objects", lambda mine: [mine, ({}, {})])
    assert commit(config, state, first, taken, 1)[0].num_returned == 0


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("informative_share", [0.1, 0.25, 0.8])
def test_the_end_of_a_first_batch_is_not_claimed_prompt_by_prompt(
    monkeypatch, processes, informative_share
):
    """In each wave all prompts start that may, and all end: a wave lasts a whole response."""
    monkeypatch.setattr(work_queue, "POLL_SECONDS", 0.0)
    config = dataclasses.replace(
        make_config(max_prompts=10_000),
        train=dataclasses.replace(CONFIG.train, prompts_per_step=64),
    )
    informative = np.random.default_rng(3).random(10_000) < informative_share
    store = Store() if processes > 1 else None
    queues = [
        open_queue(
            config, DynamicSamplingState(), Data(), step=1, group=ProcessGroup(i, processes, store)
        )
        for i in range(processes)
    ]
    waves = num_claimed = 0
    while not all(queue.done for queue in queues):
        claimed, i = [], 0
        while (number := queues[i % processes].claim()) is not None:
            claimed.append((i % processes, number))
            i += 1
        for i, number in claimed:
            queues[i].work_queue.report(number, bool(informative[number]))
        for queue in queues:
            queue.resolved()
        waves, num_claimed = waves + 1, num_claimed + len(claimed)
    needed = int(np.flatnonzero(informative)[63]) + 1
    assert queues[0].num_resolved == needed <= num_claimed
    # A known share needs about as many waves. With a share held at 1, a tenth took 38.
    assert waves <= 8, waves
    assert num_claimed <= needed + max(64, 0.5 * needed)


def test_the_rate_is_that_of_earlier_steps_until_there_are_outcomes():
    """(2 + 16 x 0.5) / (2 + 16) after two that are informative."""
    queue = open_queue(CONFIG, DynamicSamplingState(0.5), Data(), step=1)
    assert queue.expected_rate == 0.5 and PRIOR_OUTCOMES == 16
    for number in range(2):
        queue.work_queue.report(number, True)
    assert queue.expected_rate == pytest.approx(10 / 18)


@pytest.mark.parametrize("filters", [False, True])
def test_with_overlong_filtering_wrong_answers_that_were_cut_make_no_group_informative(filters):
    """They are left out of the loss: the trained responses are all right."""
    objective = dataclasses.replace(CONFIG.objective, overlong_filter=filters)
    config = dataclasses.replace(CONFIG, objective=objective)
    queue = open_queue(config, DynamicSamplingState(), Data(), step=1)
    for number, truncated in enumerate((2, 0)):
        queue.report(number, make_group([True, True, False, False], truncated=truncated))
    assert [outcome.kept for outcome in queue.resolved()] == [not filters, True]
