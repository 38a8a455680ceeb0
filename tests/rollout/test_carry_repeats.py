"""Where responses are carried a run repeats bit for bit however long verdicts take, in one process
or in several, and its slots stay busy."""

import functools
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from dapo_jax.distributed import ProcessGroup, work_queue
from dapo_jax.rewards.pool import Scored
from dapo_jax.rewards.types import Rubric, Score
from dapo_jax.rollout import carry
from dapo_jax.rollout.admission import GenerationSettings
from dapo_jax.rollout.carry import CarriedGroup, max_started
from dapo_jax.rollout.collector import RolloutCollector
from dapo_jax.rollout.dynamic_sampling import (
    DynamicSamplingState,
    KeptPrompts,
    commit,
    open_queue,
    state_from_json,
    state_to_json,
    take_kept,
)
from dapo_jax.types import Response
from tests.rollout.test_collector import Data, spell
from tests.support.engines import generate, make_engine, tokens_of
from tests.support.helpers import make_group, make_params, tiny_config
from tests.support.processes import Store

RUBRICS = {"test": Rubric((("begins", 1.0),), 1.0, -1.0)}
CONFIG = tiny_config(rollout__max_staleness=2)
STEPS = 5


class SlowPool:
    """Reward workers whose verdicts arrive after a random number of polls."""

    def __init__(self, seed, most):
        self.rng, self.most = np.random.default_rng(seed), most

    def submit(self, tasks):
        polls = int(self.rng.integers(self.most + 1))
        return SimpleNamespace(tasks=tasks, left=polls)

    def give_up(self):
        pass

    def ready(self, pending):
        pending.left -= 1
        return pending.left < 0

    def collect(self, pending):
        return [Scored((Score(task.text.startswith("7")),), 0.0) for task in pending.tasks]


@pytest.fixture(scope="module", autouse=True)
def short_delay():
    """Of the cut, so that verdicts take longer and tokens are discarded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(carry, "CUT_DELAY_CALLS", 1)
        yield


@pytest.fixture(scope="module")
def policies():
    return [make_params(CONFIG, seed) for seed in range(STEPS)]


@pytest.fixture(scope="module")
def engines():
    """Of two processes. One is short of pages, so that sequences are preempted."""
    make = lambda pages: make_engine(
        page_tokens=16, samples=4, num_pages=pages, decode_steps=4, resumes=True
    )
    return [make(400), make(14)]


def run(config, engines, policies, *, seed, most_polls, processes=1, fixed=False, rate=0.5):
    """What each step has made of the data, and how full the slots were. The processes move in a
    random order, and the state goes through JSON between two steps, as in a checkpoint.

    Args:
        most_polls: that a verdict takes.
        rate: estimated informative rate at the start.
        fixed: whether all steps have the parameters and the key of the first.
    """
    rng, state, position, found, stats = (
        np.random.default_rng(seed),
        DynamicSamplingState(rate),
        0,
        [],
        [],
    )
    pools = [SlowPool([seed, i], most_polls) for i in range(processes)]
    for step in range(1, STEPS + 1):
        store = Store() if processes > 1 else None
        groups = [ProcessGroup(i, processes, store) for i in range(processes)]
        data = [Data(position) for _ in groups]
        queues = [
            open_queue(config, state, data[i], step=step, share=(i, processes), group=groups[i])
            for i in range(processes)
        ]
        request = GenerationSettings(config.rollout.group_size)
        collectors = [
            RolloutCollector(engines[i], pools[i], RUBRICS, spell, request)
            for i in range(processes)
        ]
        generators = []
        for queue, engine, rollouts in zip(queues, engines, collectors, strict=False):
            of = 1 if fixed else step
            with engine.weights(policies[of - 1]):
                turns = rollouts.run(queue, jax.random.key(of), step=step)
                next(turns)  # the loop has its parameters from here on
                generators.append(turns)
        left = list(generators)
        while left:
            turns = left[rng.integers(len(left))]
            if next(turns, None) is None:
                left.remove(turns)
        queue = queues[0]
        tried = queue.num_resolved
        assert all(other.num_resolved == tried for other in queues)
        parts = [
            (
                {n: g for n, g in q.groups.items() if n < tried},
                {n: r for n, r in q.unfinished.items() if n >= tried},
            )
            for q in queues
        ]
        gathered = functools.partial(lambda parts, _: parts, parts)
        queue.group = SimpleNamespace(all_gather_objects=gathered, is_primary=True)
        kept = [n for n in range(tried) if queue.work_queue.outcomes[n].kept]
        batch, state = commit(config, state, queue, KeptPrompts(tried, kept), step)
        position = data[0].position
        calls = [queue.work_queue.outcomes[n].call for n in range(tried)]
        found.append(
            (
                position,
                [[(r.tokens.tolist(), r.log_probs.tolist()) for r in g.responses]
                 for g in batch.sampled],
                [[None if r.versions is None else r.versions.tolist() for r in g.responses]
                 for g in batch.sampled],
                batch.num_returned,
                (queue.ahead, calls),
                json.dumps(state_to_json(state)),
            )
        )  # fmt: skip
        stats.append(sum((r.stats for r in collectors), start=type(collectors[0].stats)()))
        state = state_from_json(json.loads(json.dumps(state_to_json(state))))
    return found, stats


@pytest.fixture(scope="module")
def prompt_verdicts(engines, policies):
    return run(CONFIG, engines, policies, seed=0, most_polls=0)


@pytest.mark.parametrize("seed, most_polls", [(1, 3), (2, 40)])
def test_the_time_that_verdicts_take_changes_nothing(
    engines, policies, prompt_verdicts, seed, most_polls
):
    found, stats = run(CONFIG, engines, policies, seed=seed, most_polls=most_polls)
    assert found == prompt_verdicts[0]
    # What was sampled while verdicts were awaited was discarded: it did happen.
    discarded = [sum(one.discarded for one in of) for of in (stats, prompt_verdicts[1])]
    assert discarded[0] > discarded[1]


def test_every_step_carries_responses_and_no_group_is_too_old(prompt_verdicts):
    found, stats = prompt_verdicts
    carried = [state_from_json(json.loads(step[-1])).carried for step in found]
    assert all(sum(len(group.responses) for group in groups) >= 8 for groups in carried)
    ages = [
        step - np.asarray(versions)
        for step, (_, _, of_groups, *_) in enumerate(found, start=1)
        for of_responses in of_groups
        for versions in of_responses
        if versions is not None
    ]
    assert max(age.max() for age in ages) in (1, 2) and min(age.min() for age in ages) == 0
    # 16 slots: hardly a decode step has an empty one, the first calls of a step aside.
    assert sum(s.sampled for s in stats) / sum(s.could_sample for s in stats) > 0.9


@pytest.mark.parametrize("most_polls", [0, 10])
def test_two_processes_repeat_in_any_order(monkeypatch, engines, policies, most_polls):
    monkeypatch.setattr(work_queue, "POLL_SECONDS", 0.0)
    runs = [
        run(CONFIG, engines, policies, seed=seed, most_polls=polls, processes=2)
        for seed, polls in ((3, 0), (4, most_polls))
    ]
    assert runs[0][0] == runs[1][0]
    assert sum(stats.preempted for stats in runs[0][1]) > 0, "the second has few pages"


def test_more_prompts_begin_where_the_first_do_not_fill_the_batch(monkeypatch, engines, policies):
    """At an estimate of 1 a step begins 3 batches at most; here it needs more."""
    monkeypatch.setattr(work_queue, "POLL_SECONDS", 0.0)
    few = lambda sequences: ["7" * (int(np.sum(s)) % 16 == 0) + str(s) for s in sequences]
    monkeypatch.setattr("tests.rollout.test_carry_repeats.spell", few)
    for processes in (1, 2):
        runs = [
            run(CONFIG, engines, policies, seed=seed, most_polls=5, processes=processes, rate=1.0)
            for seed in (5, 6)
        ]
        assert runs[0][0] == runs[1][0]
        longer = [step[4] for step in runs[0][0] if len(step[1]) > step[4][0]]
        assert longer[0][0] == max_started(CONFIG, 1.0) == 12
        # On every engine after the last call of those before, so that none is ahead of the cut.
        assert all(min(calls[n:]) > max(calls[:n]) for n, calls in longer)


@pytest.mark.parametrize("polls", [3, 20])
def test_verdicts_on_what_had_finished_before_the_step_change_nothing(policies, polls):
    """More groups than one prefill takes ended in the step before, behind a straggler. They fill
    the batch; whether their verdicts come at once or late, decoding goes on to the cut."""
    engine = make_engine(
        page_tokens=16, samples=4, num_pages=400, decode_steps=4, resumes=True, prefill=4
    )
    tokens, log_probs = np.array([7, 5, 1], np.int32), np.full(3, -1.0, np.float32)

    def response(first):
        own = np.array([first, *tokens[1:]], np.int32)
        return Response(own, log_probs, "stop", spell([own])[0], np.ones(3, np.int32), log_probs)

    finished = tuple((sample, response(7 + sample % 2)) for sample in range(4))
    state = DynamicSamplingState(0.5, tuple(CarriedGroup((i, 0), finished) for i in range(12)))
    found = []
    for of_verdict in (0, polls):
        queue = open_queue(CONFIG, state, Data(0), step=2)
        pool = SlowPool(0, 0)
        pool.rng = SimpleNamespace(integers=lambda _, polls=of_verdict: polls)
        collector = RolloutCollector(engine, pool, RUBRICS, spell, GenerationSettings(4))
        with engine.weights(policies[0]):
            list(collector.outcomes(queue, jax.random.key(2), step=2))
        tried = queue.num_resolved
        kept = [n for n in range(tried) if queue.work_queue.outcomes[n].kept]
        batch, after = commit(CONFIG, state, queue, KeptPrompts(tried, kept), 2)
        found.append((tried, batch.carried_tokens, json.dumps(state_to_json(after))))
    assert found[0] == found[1] and found[0][1] > 0


def test_a_longer_delay_of_the_cut_keeps_more_tokens(
    engines, policies, prompt_verdicts, monkeypatch
):
    monkeypatch.setattr(carry, "CUT_DELAY_CALLS", 4)
    found, _ = run(CONFIG, engines, policies, seed=1, most_polls=40)
    again, _ = run(CONFIG, engines, policies, seed=2, most_polls=2)
    assert found == again
    tokens = lambda step: sum(
        len(r.tokens)
        for group in state_from_json(json.loads(step[-1])).carried
        for _, r in group.responses
    )
    assert tokens(found[0]) > tokens(prompt_verdicts[0][0])


def test_without_dynamic_sampling_a_batch_is_the_next_prompts(engines, policies):
    config = tiny_config(rollout__max_staleness=2, dynamic_sampling__enabled=False)
    found, _ = run(config, engines, policies, seed=0, most_polls=5)
    batch = config.train.prompts_per_step
    assert [step[0] for step in found] == [batch * i for i in range(1, STEPS + 1)]


def test_the_accepted_responses_are_those_of_a_synchronous_step(engines, policies):
    """No bias: with the same parameters and key in all steps, each group is what a synchronous step
    would have sampled for its prompt, whether and wherever it was carried."""
    found, _ = run(CONFIG, engines, policies, seed=0, most_polls=5, fixed=True)
    groups = [responses for step in found for responses in step[1]]
    assert found[-1][0] == len(groups) > 5 * CONFIG.train.prompts_per_step
    problems, key = Data(0).take(len(groups)), jax.random.key(1)
    whole, _ = generate(engines[0], policies[0], problems, key=key)
    assert [[tokens for tokens, _ in group] for group in groups] == tokens_of(whole)
    assert any(v is not None and min(v) < max(v) for step in found for of in step[2] for v in of)


def test_an_engine_that_looks_late_begins_its_prompts_too(monkeypatch, engines, policies):
    """Prompts 0, 1, 2 and 12 fill the batch: 12 is of the second window and of the first engine.
    The second engine, which waits, learns that the first window is scored while 12 is generated, or
    only with the verdict on 12. What it carries of the second window is the same."""
    monkeypatch.setattr(work_queue, "POLL_SECONDS", 0.0)
    found = []
    for late in (False, True):
        store, queues, turns = Store(), [], []
        for i in range(2):
            group = ProcessGroup(i, 2, store)
            state = DynamicSamplingState(1.0)
            queue = open_queue(CONFIG, state, Data(0), step=1, share=(i, 2), group=group)
            queue.keeps = lambda group: group.problem.id in (0, 1, 2, 12)
            settings = GenerationSettings(CONFIG.rollout.group_size)
            rollouts = RolloutCollector(engines[0], SlowPool(i, 0), RUBRICS, spell, settings)
            with engines[0].weights(policies[0]):
                turns.append(rollouts.run(queue, jax.random.key(1), step=1))
                next(turns[i])
            queues.append(queue)
        while len(queues[1].groups) < 6:
            next(turns[1])
        while not queues[0].done:
            next(turns[0])
            if not late:
                next(turns[1], None)
        for generator in turns:
            list(generator)
        assert [(queue.ahead, queue.num_resolved) for queue in queues] == [(12, 13)] * 2
        after = {n: of for n, of in queues[1].unfinished.items() if n > 12}
        begun = lambda of: {s: r.tokens.tolist() for s, r in of.items() if len(r.tokens)}
        found.append({n: begun(of) for n, of in after.items()})
    assert found[0] == found[1] and found[0][13]


def test_what_only_another_process_began_is_carried_by_all(monkeypatch):
    """Prompt 7: this process read no further than the batch, the first four prompts."""
    queue = open_queue(CONFIG, DynamicSamplingState(), data := Data(0), step=1, share=(0, 2))
    for number in range(4):
        queue.report(number, make_group([True, False], id=number))
    begun = Response(np.array([3], np.int32), np.zeros(1, np.float32), "unfinished", "")
    group = SimpleNamespace(
        all_gather_objects=lambda mine: [mine, ({}, {7: {1: begun}})], is_primary=True
    )
    monkeypatch.setattr(queue, "group", group)
    taken = take_kept(queue.resolved())
    _, after = commit(CONFIG, DynamicSamplingState(), queue, taken, 1)
    assert [visit for visit, _ in after.carried] == [(7, 0)] and data.position == 4
