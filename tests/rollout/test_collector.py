"""Rollout collector: generates and scores at once, loses verdicts and no groups to dead workers,
resumes carried responses in the next step."""

import json
import multiprocessing
import os
import signal
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from dapo_jax.distributed import ProcessGroup, Replica, StopSignals, work_queue
from dapo_jax.rewards.pool import RewardPool
from dapo_jax.rewards.types import Rubric, Task
from dapo_jax.rollout import collector, metrics
from dapo_jax.rollout.admission import GenerationSettings
from dapo_jax.rollout.collector import RolloutCollector
from dapo_jax.rollout.dynamic_sampling import (
    DynamicSamplingState,
    commit,
    open_queue,
    state_from_json,
    state_to_json,
    take_kept,
)
from dapo_jax.rollout.scheduler import RolloutStats
from dapo_jax.types import StopRequested
from dapo_jax.utils.progress import Progress
from dapo_jax.utils.telemetry import SILENT, Telemetry
from dapo_jax.utils.watchdog import Watchdog
from tests.rollout import test_dynamic_sampling as dynamic_sampling
from tests.support.engines import make_engine
from tests.support.helpers import make_params, tiny_config
from tests.support.processes import Store

SCORER = "tests.support.scorers:unhurried"
RUBRICS = {"test": Rubric(((SCORER, 1.0),), 1.0, -1.0)}
CONFIG = tiny_config(rollout__max_staleness=2)
SYNC = tiny_config()


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


class Data(dynamic_sampling.Data):
    """Problems in the order of their ids, each with a prompt of its own."""

    def take(self, n):
        make = lambda i: np.random.default_rng(i).integers(3, 32, 1 + i % 24).tolist()
        return [
            p._replace(prompt_tokens=tuple(make(p.id)), answer="7", source="test")
            for p in super().take(n)
        ]


def make_collector(engine, pool, *, detokenize=spell, **more):
    request = GenerationSettings(CONFIG.rollout.group_size)
    return RolloutCollector(engine, pool, RUBRICS, detokenize, request, **more)


def one_step(engine, params, pool, state, *, step, position=0, config=CONFIG, **more):
    """(batch, state after it, position in the data), as the training loop has it."""
    data = Data(position)
    rollouts = make_collector(engine, pool, **more)
    prompts = open_queue(config, state, data, step=step)
    with engine.weights(params):
        outcomes = rollouts.outcomes(prompts, jax.random.key(step), step=step)
        taken = take_kept(outcomes)
    batch, state = commit(config, state, prompts, taken, step)
    assert len(batch.groups) == 4 and data.position == position + len(batch.sampled)
    assert [g.problem.id for g in batch.sampled] == list(range(position, data.position))
    return batch, state, data.position


def tokens_of(batch):
    return [[r.tokens.tolist() for r in g.responses] for g in batch.sampled]


def test_workers_that_die_are_counted_and_nothing_waits_for_them(engine, policies, pool):
    """Some die of their response; others are killed while groups wait for them."""
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
    state = DynamicSamplingState(0.3)
    batch, _, _ = one_step(
        engine, policies[0], pool, state, step=1, config=SYNC, detokenize=spell_and_kill
    )
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
    """A step that claims more prompts than it needs: it expects few to be informative."""
    return one_step(engine, policies[0], pool, DynamicSamplingState(informative_rate=0.2), step=1)


def test_responses_beyond_a_batch_are_resumed_in_the_next(engine, policies, pool, first):
    batch, state, position = first
    assert state.carried and all(visit[0] >= position for visit, _ in state.carried)
    tokens = sum(len(r.tokens) for group in state.carried for _, r in group.responses)
    numbers = metrics.carry_metrics(batch, 1)
    assert numbers["carry/tokens_kept"] == tokens > 100
    assert numbers["carry/tokens_resumed"] == numbers["carry/staleness_max"] == 0

    second, after, end = one_step(engine, policies[1], pool, state, step=2, position=position)
    again = state_from_json(json.loads(json.dumps(state_to_json(state))))
    repeated, _, _ = one_step(engine, policies[1], pool, again, step=2, position=position)
    assert tokens_of(repeated) == tokens_of(second)
    assert [g.verdicts for g in repeated.sampled] == [g.verdicts for g in second.sampled]
    assert all(visit[0] >= end for visit, _ in after.carried)

    resumed = {id: dict(responses) for (id, _), responses in state.carried if id < end}
    assert resumed
    for group in second.sampled:
        for sample, before in resumed.get(group.problem.id, {}).items():
            now, n = group.responses[sample], len(before.tokens)
            assert now.tokens[:n].tobytes() == before.tokens.tobytes()
            assert now.log_probs[:n].tobytes() == before.log_probs.tobytes()
            assert now.versions is not None
            assert now.versions.tolist() == [1] * n + [2] * (len(now.tokens) - n)
    responses = [r for group in resumed.values() for r in group.values()]
    stale = sum(len(r.tokens) for r in responses)
    total = sum(len(tokens) for group in tokens_of(second) for tokens in group)
    finished = sum(r.finish_reason != "unfinished" for r in responses)
    assert finished > 0
    assert metrics.carry_metrics(second, 2) == {
        "carry/tokens_resumed": stale,
        "carry/share": pytest.approx(stale / total),
        "carry/responses_finished": finished,
        "carry/staleness_max": 1,
        "carry/stale_responses": 0,
        "carry/tokens_kept": second.carried_tokens,
    }


def test_stale_responses_are_sampled_again(engine, policies, pool, first):
    """As if nothing had been kept."""
    _, state, position = first
    late, _, _ = one_step(engine, policies[2], pool, state, step=4, position=position)
    empty = state._replace(carried=())
    without, _, _ = one_step(engine, policies[2], pool, empty, step=4, position=position)
    assert late.num_stale == sum(len(group.responses) for group in state.carried)
    assert without.num_stale == 0 and tokens_of(late) == tokens_of(without)
    assert all(r.versions is None for g in late.sampled for r in g.responses)


def test_the_watchdog_knows_what_is_awaited(engine, policies, pool):
    heard = []

    class Listening(Watchdog):
        def waiting_for(self, what):
            heard.append(what)

    telemetry = Telemetry(watchdog=Listening(0.0, print))
    one_step(engine, policies[0], pool, DynamicSamplingState(0.3), step=1, telemetry=telemetry)
    assert any(what.startswith("the device: 16 slots at work, ") for what in heard)
    verdicts = [what for what in heard if what.startswith("reward workers: ")]
    assert any(what.startswith("reward workers: 0 of ") for what in verdicts)
    assert len(set(verdicts)) > 2


@pytest.mark.parametrize("informative", [False, True])
def test_seconds_of_waiting_for_verdicts_are_no_seconds_of_sampling(
    engine, policies, pool, informative
):
    """Also where other prompts would begin if these verdicts were not enough."""
    rollouts = make_collector(engine, pool)
    config = tiny_config(dynamic_sampling__enabled=informative, rollout__group_size=4)
    prompts = open_queue(config, DynamicSamplingState(1.0), Data(0), step=1)
    slow = pool.ready
    deadline = []

    def ready(pending):
        deadline.append(time.monotonic())
        return time.monotonic() > deadline[0] + 2.0 and slow(pending)

    with engine.weights(policies[0]), pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "ready", ready)
        next(rollouts.outcomes(prompts, jax.random.key(1), step=1))
    stats, seconds = rollouts.take_stats()
    assert seconds["reward"] > 0.5 and stats.idle_seconds > 0.2
    nothing = RolloutStats(), {"rollout": 0.0, "reward": 0.0}
    assert rollouts.take_stats() == nothing, "those of the next step"


def test_throughput_counts_the_seconds_of_the_process_that_generated():
    """The primary had no prompt of its own in the step."""
    of_all = [(RolloutStats(), {"rollout": 0.0, "reward": 3.0})]
    of_all += [(RolloutStats(tokens=80), {"rollout": 2.0, "reward": 0.5})]
    each = [(tuple(stats), seconds) for stats, seconds in of_all]
    group = SimpleNamespace(all_gather=lambda own, waiting: each)
    rollouts = RolloutCollector.__new__(RolloutCollector)
    rollouts.replica, rollouts.telemetry = SimpleNamespace(process_group=group), SILENT
    rollouts.stats, rollouts.seconds = of_all[0]
    stats, seconds = rollouts.take_stats()
    assert seconds == {"rollout": 2.0, "reward": 0.5}
    assert metrics.rollout_metrics(stats, seconds, 2)["perf/tokens_per_second"] == 40
    assert rollouts.seconds == {"rollout": 0.0, "reward": 0.0}


class Waiting:
    """A process without prompts of its own while another reports all groups, over a virtual clock:
    one every `every` seconds, and none after `last`."""

    def __init__(self, monkeypatch, *, every, last=10_000):
        monkeypatch.setattr(work_queue, "POLL_SECONDS", 0.0)
        clock = SimpleNamespace(sleep=self.sleep, monotonic=time.monotonic)
        monkeypatch.setattr(collector, "time", clock)
        self.now, self.every, self.last = 0, every, last
        store = Store()
        self.prompts = open_queue(
            SYNC, DynamicSamplingState(1.0), Data(0), step=1, group=ProcessGroup(0, 2, store)
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
        if self.numbers and self.now <= self.last and self.now % self.every == 0:
            self.others.report(self.numbers.pop(0), True)
        self.telemetry.watchdog.look()

    def run(self, engine, params, pool):
        rollouts = make_collector(engine, pool, telemetry=self.telemetry)
        with engine.weights(params):
            return take_kept(rollouts.outcomes(self.prompts, jax.random.key(0), step=1))


def test_waiting_for_others_that_make_progress_is_no_silence(monkeypatch, engine, policies, pool):
    waiting = Waiting(monkeypatch, every=25)
    taken = waiting.run(engine, policies[0], pool)
    assert waiting.now == 100 and taken.kept == [0, 1, 2, 3] == list(range(taken.num_tried))


@pytest.mark.parametrize("last, ended", [(0, 30), (25, 55), (75, 105)])
def test_waiting_without_progress_ends(monkeypatch, engine, policies, pool, last, ended):
    waiting = Waiting(monkeypatch, every=25, last=last)
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
    prompts = open_queue(CONFIG, DynamicSamplingState(), data, step=1)
    rollouts = make_collector(engine, pool, telemetry=Telemetry(stop=stop))
    with engine.weights(policies[0]), pytest.raises(StopRequested):
        take_kept(rollouts.outcomes(prompts, jax.random.key(1), step=1))
    assert len(calls) == 3


def test_all_of_a_replica_resolve_the_same_outcomes_in_the_same_iterations(engine, policies, pool):
    """The leader alone scores; the other process gets outcomes with the broadcast of each iteration
    and makes the same calls of its engine."""
    store, found = Store(), []
    for i in range(2):  # one after the other: the store keeps what the leader broadcasts
        group = ProcessGroup(i, 2, store)
        prompts = open_queue(CONFIG, DynamicSamplingState(), Data(0), step=1, group=group)
        replica = Replica(group, 2)
        rollouts = make_collector(engine, pool if i == 0 else None, replica=replica)
        with engine.weights(policies[0]):
            outputs = list(rollouts.run(prompts, jax.random.key(1), step=1))
        found.append([(output.outcomes, output.idle) for output in outputs])
        assert prompts.full and prompts.num_kept == 4
    assert found[0] == found[1] and sum(len(outcomes) for outcomes, _ in found[0]) >= 4


def test_a_signal_to_a_process_that_does_not_lead_is_reported(engine, policies, pool):
    """It goes on until the leader, which reads the report, stops both in the same call."""
    store, key = Store(), jax.random.key(1)
    for i in range(2):  # as above
        group = ProcessGroup(i, 2, store)
        prompts = open_queue(CONFIG, DynamicSamplingState(), Data(0), step=1, group=group)
        signals = StopSignals(Progress(0, quiet=True), group)
        signals.received = signal.SIGTERM if i else None
        telemetry = Telemetry(stop=signals.check)
        rollouts = make_collector(engine, pool, replica=Replica(group, 2), telemetry=telemetry)
        with engine.weights(policies[0]):
            list(rollouts.run(prompts, key, step=1))
        assert prompts.full
    assert ProcessGroup(0, 2, store).stop_requested() == signal.SIGTERM


def test_the_end_of_a_step_gives_up_what_is_still_being_scored(engine, policies, pool):
    """The next step does not wait for verdicts that no batch needs."""
    before = pool.num_chunks
    one_step(engine, policies[0], pool, DynamicSamplingState(0.2), step=1, config=SYNC)
    assert pool.first_wanted.value == pool.num_chunks > before
