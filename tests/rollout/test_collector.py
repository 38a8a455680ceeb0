"""Groups of a step, drawn and scored at once: what goes wrong in a worker costs a verdict, and what
is drawn beyond a batch is used in the next."""

import json
import multiprocessing
import os
import signal
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from dapo_jax.distributed import work_queue
from dapo_jax.distributed.process_group import ProcessGroup
from dapo_jax.distributed.replica import Replica
from dapo_jax.rewards.pool import RewardPool
from dapo_jax.rewards.types import Rubric, Task
from dapo_jax.rollout import collector, metrics
from dapo_jax.rollout.admission import GenerationRequest
from dapo_jax.rollout.collector import RolloutCollector
from dapo_jax.rollout.dynamic_sampling import (
    SamplingState,
    commit,
    open_queue,
    state_from_json,
    state_to_json,
    take_informative,
)
from dapo_jax.types import Problem, StopRequested
from dapo_jax.utils.telemetry import SILENT, Telemetry
from dapo_jax.utils.watchdog import Watchdog
from tests.support.engines import make_engine
from tests.support.helpers import make_params, tiny_config
from tests.support.processes import Store

SCORER = "tests.support.scorers:unhurried"
CONFIG = tiny_config(dynamic_sampling__partial_rollouts=True)


def spell(sequences):
    """Right (what begins with 7) or wrong by the tokens; no two are the same to score."""
    return [
        f"{'78'[int(np.sum(tokens)) % 2]} {np.asarray(tokens).tolist()}" for tokens in sequences
    ]


@pytest.fixture(scope="module")
def engine():
    return make_engine(page_tokens=16, samples=4, num_pages=400, decode_steps=4, resumes=True)


@pytest.fixture(scope="module")
def policies():
    return [make_params(CONFIG, seed) for seed in (0, 1, 2)]


@pytest.fixture(scope="module")
def pool():
    with RewardPool([SCORER], workers=2, timeout_seconds=5.0) as pool:
        pool.score([Task((SCORER,), "", "")])  # so that its workers are there
        yield pool


class Data:
    """Problems in the order of their ids."""

    def __init__(self, place):
        self.place = place

    def take(self, num):
        first, self.place = self.place, self.place + num
        make = lambda i: np.random.default_rng(i).integers(3, 32, 1 + i % 24).tolist()
        return [Problem(i, "", tuple(make(i)), "7", "test") for i in range(first, self.place)]

    def get_state(self):
        return self.place

    def set_state(self, place):
        self.place = place


def one_step(engine, params, pool, state, *, step, place=0, detokenize=spell, telemetry=SILENT):
    """(batch, state after it, place in the data), as the loop has it."""
    data = Data(place)
    rollouts = RolloutCollector(
        engine, pool, {"test": Rubric(((SCORER, 1.0),), 1.0, -1.0)}, detokenize,
        GenerationRequest(CONFIG.rollout.group_size), telemetry=telemetry,
    )  # fmt: skip
    prompts = open_queue(CONFIG, state, data, step=step)
    with engine.weights(params):
        outcomes = rollouts.groups(prompts, jax.random.key(step), step=step)
        taken = take_informative(outcomes, CONFIG.train.prompts_per_step)
    batch, state = commit(CONFIG, state, prompts, taken, step)
    assert len(batch.groups) == 4 and data.place == place + len(batch.sampled)
    assert [g.problem.id for g in batch.sampled] == list(range(place, data.place))
    return batch, state, data.place


def tokens_of(batch):
    return [[r.tokens.tolist() for r in g.responses] for g in batch.sampled]


def test_workers_that_die_are_counted_and_nothing_waits_for_them(engine, policies, pool):
    """Some die of their response; others are killed from outside while groups wait for them."""
    fatal = lambda tokens: int(np.sum(tokens)) % 16 == 3
    calls = []

    def spell_and_kill(sequences):
        calls.append(len(sequences))
        if len(calls) in (3, 6):
            for child in multiprocessing.active_children():
                assert child.pid is not None
                os.kill(child.pid, signal.SIGKILL)
        return ["die" * fatal(s) + text for s, text in zip(sequences, spell(sequences))]

    start = time.monotonic()
    batch, _, _ = one_step(
        engine, policies[0], pool, SamplingState(informative_rate=0.3), step=1,
        detokenize=spell_and_kill,
    )  # fmt: skip
    assert time.monotonic() - start < 120 and len(calls) > 6
    pairs = [(r, v) for g in batch.sampled for r, v in zip(g.responses, g.verdicts, strict=True)]
    died = [v for r, v in pairs if fatal(r.tokens)]
    assert died and all(v.note == "worker died" and not v.correct for v in died)
    # What was scored alone when its worker was killed is lost with it, and counted; no more is.
    faults = metrics.sampling_metrics(batch)["sampling/scorer_faults"]
    assert len(died) <= faults <= len(died) + 4
    assert all(v.correct == spell([r.tokens])[0].startswith("7") for r, v in pairs if not v.note)


@pytest.fixture(scope="module")
def first(engine, policies, pool):
    """A step that begins more prompts than it needs: it expects few of them to be informative."""
    return one_step(engine, policies[0], pool, SamplingState(informative_rate=0.2), step=1)


def test_what_is_drawn_beyond_a_batch_goes_on_in_the_next(engine, policies, pool, first):
    batch, state, place = first
    assert state.begun and all(visit[0] >= place for visit, _ in state.begun)
    kept = sum(len(r.tokens) for b in state.begun for _, r in b.responses)
    numbers = metrics.partial_metrics(batch, 1)
    assert numbers["perf/partial_tokens_kept"] == kept > 100
    assert numbers["partial/tokens_continued"] == numbers["partial/staleness_max"] == 0

    again = state_from_json(json.loads(json.dumps(state_to_json(state))))
    second, after, end = one_step(engine, policies[1], pool, state, step=2, place=place)
    resumed, _, _ = one_step(engine, policies[1], pool, again, step=2, place=place)
    assert tokens_of(resumed) == tokens_of(second)
    assert [g.verdicts for g in resumed.sampled] == [g.verdicts for g in second.sampled]

    old = {visit[0]: dict(responses) for visit, responses in state.begun}
    used = {id: row for id, row in old.items() if id < end}
    assert used
    for group in second.sampled:
        for sample, before in used.get(group.problem.id, {}).items():
            now = group.responses[sample]
            n = len(before.tokens)
            assert now.tokens[:n].tobytes() == before.tokens.tobytes()
            assert now.log_probs[:n].tobytes() == before.log_probs.tobytes()
            assert now.versions is not None and now.versions[:n].tolist() == [1] * n
            assert (now.versions[n:] == 2).all()
    numbers = metrics.partial_metrics(second, 2)
    rows = [r for row in used.values() for r in row.values()]
    continued = sum(len(r.tokens) for r in rows)
    assert numbers["partial/tokens_continued"] == continued
    total = sum(len(tokens) for row in tokens_of(second) for tokens in row)
    assert numbers["partial/share"] == pytest.approx(continued / total)
    ended = sum(r.finish_reason != "unfinished" for r in rows)
    assert numbers["partial/responses_finished"] == ended > 0
    assert numbers["partial/staleness_max"] == 1 and numbers["partial/samples_too_old"] == 0
    assert all(visit[0] >= end for visit, _ in after.begun)


def test_what_has_waited_too_long_is_drawn_afresh(engine, policies, pool, first):
    """As if it had never been begun."""
    _, state, place = first
    late, _, _ = one_step(engine, policies[2], pool, state, step=4, place=place)
    without, _, _ = one_step(
        engine, policies[2], pool, state._replace(begun=()), step=4, place=place
    )
    assert late.too_old == sum(len(b.responses) for b in state.begun) and without.too_old == 0
    assert tokens_of(late) == tokens_of(without)
    assert all(r.versions is None for g in late.sampled for r in g.responses)


def test_the_watchdog_knows_what_is_waited_for(engine, policies, pool):
    heard = []

    class Listening(Watchdog):
        def waiting_for(self, what):
            heard.append(what)

    telemetry = Telemetry(watchdog=Listening(0.0, print))
    one_step(
        engine, policies[0], pool, SamplingState(informative_rate=0.3), step=1, telemetry=telemetry
    )
    assert any(what.startswith("the device: 16 slots at work, ") for what in heard)
    verdicts = [what for what in heard if what.startswith("reward workers: ")]
    assert any(what.startswith("reward workers: 0 of ") for what in verdicts)
    assert len(set(verdicts)) > 2


class Waiting:
    """A process without prompts of its own while another reports all groups, over a clock of its
    own.

    Args:
        told_every: seconds between the other's outcomes; none comes after `last`.
    """

    def __init__(self, monkeypatch, *, told_every, last=10_000):
        monkeypatch.setattr(work_queue, "POLL_SECONDS", 0.0)
        clock = SimpleNamespace(sleep=self.sleep, monotonic=time.monotonic)
        monkeypatch.setattr(collector, "time", clock)
        self.now, self.told_every, self.last = 0, told_every, last
        store = Store()
        self.prompts = open_queue(
            CONFIG, SamplingState(1.0), Data(0), step=1, group=ProcessGroup(0, 2, store)
        )
        self.others = ProcessGroup(1, 2, store).work_queue()
        self.numbers = [self.others.claim() for _ in range(4)]
        watchdog = Watchdog(0.0, print, lambda: float(self.now), most=30.0, give_up=self.give_up)
        watchdog.limited = True
        self.telemetry = Telemetry(watchdog=watchdog)

    def give_up(self, why):
        raise TimeoutError(why)

    def sleep(self, seconds):
        self.now += 1
        if self.numbers and self.now <= self.last and self.now % self.told_every == 0:
            self.others.report(self.numbers.pop(0), True)
        self.telemetry.watchdog.look()

    def run(self, engine, params, pool):
        rollouts = RolloutCollector(
            engine, pool, {}, spell, GenerationRequest(4), telemetry=self.telemetry
        )
        with engine.weights(params):
            return take_informative(rollouts.groups(self.prompts, jax.random.key(0), step=1), 4)


def test_who_waits_for_others_that_get_on_is_not_ended(monkeypatch, engine, policies, pool):
    waiting = Waiting(monkeypatch, told_every=25)
    taken = waiting.run(engine, policies[0], pool)
    assert waiting.now == 100 and taken.kept == [0, 1, 2, 3] == list(range(taken.num_tried))


@pytest.mark.parametrize("last, ended", [(0, 30), (25, 55), (75, 105)])
def test_who_waits_and_hears_nothing_at_all_is_ended(
    monkeypatch, engine, policies, pool, last, ended
):
    waiting = Waiting(monkeypatch, told_every=25, last=last)
    with pytest.raises(TimeoutError, match="nothing has moved for 30 s"):
        waiting.run(engine, policies[0], pool)
    assert abs(waiting.now - ended) <= 1


def test_a_stop_is_raised_between_calls_and_leaves_the_data_alone(engine, policies, pool):
    calls = []

    def stop():
        calls.append(1)
        if len(calls) == 3:
            raise StopRequested

    data = Data(0)
    prompts = open_queue(CONFIG, SamplingState(), data, step=1)
    rollouts = RolloutCollector(
        engine, pool, {"test": Rubric(((SCORER, 1.0),), 1.0, -1.0)}, spell, GenerationRequest(4),
        telemetry=Telemetry(stop=stop),
    )  # fmt: skip
    with engine.weights(policies[0]), pytest.raises(StopRequested):
        take_informative(rollouts.groups(prompts, jax.random.key(1), step=1), 4)
    assert len(calls) == 3


def test_all_of_a_replica_resolve_the_same_outcomes_in_the_same_turns(engine, policies, pool):
    """The leader alone scores and looks; the other process is told of outcomes and of news with the
    broadcast of each turn, and makes the same calls of its engine."""
    store = Store()
    turns = []
    for i in range(2):  # one after the other: what the leader broadcasts is kept in the store
        group = ProcessGroup(i, 2, store)
        prompts = open_queue(CONFIG, SamplingState(), Data(0), step=1, group=group)
        rollouts = RolloutCollector(
            engine, pool if i == 0 else None, {"test": Rubric(((SCORER, 1.0),), 1.0, -1.0)}, spell,
            GenerationRequest(4), replica=Replica(group, 2),
        )  # fmt: skip
        with engine.weights(policies[0]):
            found = list(rollouts.turns(prompts, jax.random.key(1), step=1))
        turns.append([(turn.outcomes, turn.idle) for turn in found])
        assert prompts.full and prompts.num_kept == 4
    assert turns[0] == turns[1] and sum(len(outcomes) for outcomes, _ in turns[0]) >= 4
