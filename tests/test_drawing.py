"""Groups of a step, drawn and scored at once: what goes wrong in a worker costs a verdict, and what
is drawn beyond a batch is used in the next."""

import json
import multiprocessing
import os
import signal
import time
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from dapo_jax import board, metrics
from dapo_jax import drawing as drawing_module
from dapo_jax.drawing import Drawing
from dapo_jax.dynamic_sampling import (
    SamplingState,
    Stream,
    state_from_json,
    state_to_json,
    stream_batch,
)
from dapo_jax.processes import Processes
from dapo_jax.progress import Progress
from dapo_jax.reward import Rubric, Task
from dapo_jax.reward_pool import RewardPool
from dapo_jax.rollout import scheduler
from dapo_jax.teams import ALONE, Team
from dapo_jax.types import Problem
from dapo_jax.watchdog import Watchdog
from tests.engines import make_engine
from tests.helpers import make_params, tiny_config
from tests.processes import Store

SCORER = "tests.scorers:unhurried"
CONFIG = tiny_config(dynamic_sampling__partial_rollouts=True)


def spell(sequences):
    """Right (what begins with 7) or wrong by the tokens; no two are the same to score."""
    return [
        f"{'78'[int(np.sum(tokens)) % 2]} {np.asarray(tokens).tolist()}" for tokens in sequences
    ]


@pytest.fixture(scope="module")
def engine():
    return make_engine(page_tokens=16, samples=4, num_pages=400, decode_steps=4, continued=True)


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

    def __init__(self):
        self.place = 0

    def take(self, num):
        first, self.place = self.place, self.place + num
        make = lambda i: np.random.default_rng(i).integers(3, 32, 1 + i % 24).tolist()
        return [Problem(i, "", tuple(make(i)), "7", "test") for i in range(first, self.place)]

    def go_back(self, place):
        self.place = place


def one_step(engine, params, pool, state, *, step, place=0, detokenize=spell, watch=None):
    """(batch, state after it, place in the data), as the loop has it."""
    data = Data()
    data.go_back(place)
    trainer = SimpleNamespace(
        engine=engine, team=ALONE, detokenize=detokenize, config=CONFIG,
        train_rubrics={"test": Rubric(((SCORER, 1.0),), 1.0, -1.0)},
    )  # fmt: skip
    drawing = Drawing(
        trainer, pool, engine.load_params(params), key=jax.random.key(step), step=step,
        progress=Progress(3, 0), check_stop=lambda: None, **({} if watch is None else
        {"watch": watch}),
    )  # fmt: skip
    batch, state = stream_batch(
        CONFIG.dynamic_sampling, state, num_prompts=4, step=step, seed=0, take=data.take,
        position=lambda: data.place, go_back=data.go_back, draw=drawing.draw,
    )  # fmt: skip
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
        engine, policies[0], pool, SamplingState(kept_share=0.3), step=1,
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
    return one_step(engine, policies[0], pool, SamplingState(kept_share=0.2), step=1)


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

    watch = Listening(0.0, print)
    one_step(engine, policies[0], pool, SamplingState(kept_share=0.3), step=1, watch=watch)
    assert any(what.startswith("the device: 16 slots at work, ") for what in heard)
    verdicts = [what for what in heard if what.startswith("reward workers: ")]
    assert any(what.startswith("reward workers: 0 of ") for what in verdicts)
    assert len(set(verdicts)) > 2


class Waiting:
    """A process that has nothing to draw while another draws all prompts, over a clock of its own.

    Args:
        told_every: seconds between the other's verdicts; none comes after `last`.
    """

    def __init__(self, monkeypatch, *, told_every, last=10_000):
        monkeypatch.setattr(board, "LOOK_SECONDS", 0.0)
        monkeypatch.setattr(drawing_module.time, "sleep", self.sleep)
        monkeypatch.setattr(drawing_module.scheduler, "generate", self.generate)
        self.now, self.told_every, self.last = 0, told_every, last
        store = Store()
        ours, self.others = (Processes(i, 2, store).board() for i in range(2))
        self.numbers = [self.others.claim() for _ in range(4)]
        self.watch = Watchdog(
            0.0, print, lambda: float(self.now), most=30.0, give_up=self.give_up
        )  # fmt: skip
        self.watch.limited = True
        trainer: Any = SimpleNamespace(
            engine=None, team=ALONE, detokenize=spell, config=CONFIG, train_rubrics={}
        )
        pool: Any = None
        params: Any = None
        self.drawing = Drawing(
            trainer, pool, params, key=jax.random.key(0), step=1, progress=Progress(3, 0),
            check_stop=lambda: None, watch=self.watch,
        )  # fmt: skip
        self.stream = Stream(CONFIG.dynamic_sampling, 0.5, 4, ours)

    def give_up(self, why):
        raise TimeoutError(why)

    def sleep(self, seconds):
        self.now += 1
        if self.numbers and self.now <= self.last and self.now % self.told_every == 0:
            self.others.tell(self.numbers.pop(0), True)
        self.watch.look()

    def generate(self, *_, enough, **__):
        """Looks for a while as a process does that has nothing to draw, but may get something."""
        while self.now < 50 and not enough():
            self.sleep(0.0)
        return [], scheduler.RolloutStats()

    def run(self):
        self.drawing._draw(self.stream, iter(()))


def test_who_waits_for_others_that_get_on_is_not_ended(monkeypatch):
    waiting = Waiting(monkeypatch, told_every=25)
    waiting.run()
    assert waiting.now == 100 and waiting.stream.accepted == 4


@pytest.mark.parametrize("last, ended", [(0, 30), (25, 55), (75, 105)])
def test_who_waits_and_hears_nothing_at_all_is_ended(monkeypatch, last, ended):
    waiting = Waiting(monkeypatch, told_every=25, last=last)
    with pytest.raises(TimeoutError, match="nothing has moved for 30 s"):
        waiting.run()
    assert abs(waiting.now - ended) <= 1


def test_all_of_a_replica_hear_that_others_get_on(monkeypatch):
    """The first of them alone looks; the others are told of news with what they are told anyway."""
    store, now = Store(), [0.0]
    teams = [Team(Processes(i, 2, store), 2) for i in range(2)]
    first, second = (
        Drawing(
            SimpleNamespace(team=team), None, None, key=None, step=1, progress=None,
            check_stop=lambda: None,
            watch=Watchdog(0.0, print, lambda: now[0], most=30.0, give_up=pytest.fail),
        )
        for team in teams
    )  # fmt: skip
    heard = []
    monkeypatch.setattr(first.watch, "moved", lambda: heard.append("first"))
    monkeypatch.setattr(second.watch, "moved", lambda: heard.append("second"))
    news = iter([(False, 1), (False, 1), (False, 2), (True, 2)])
    asked = lambda *_, enough, **__: [enough() for _ in range(4)]
    monkeypatch.setattr(drawing_module.scheduler, "generate", asked)
    for drawing in (first, second):
        drawing.trainer = SimpleNamespace(
            config=CONFIG, engine=None, detokenize=None, team=drawing.team
        )
        over: Any = drawing._generate([], enough=lambda: next(news))
        assert over == [False, False, False, True]
    assert heard == ["first"] * 2 + ["second"] * 2
