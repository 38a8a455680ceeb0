"""How long rollouts take on many hosts: the scheduler's own code, played over a virtual clock.

Each host has a `scheduler.Run` with its admission, a `dynamic_sampling.Stream`, `Scoring` and
`Grouping`: the code of a run, in the order of `drawing.Drawing`. What is not real takes time and
computes nothing (see `virtual`). All hosts see one board: what one tells the others know at once,
where in a run they look every `board.LOOK_SECONDS`. The host whose clock is behind goes next.
"""

import dataclasses
import heapq
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from dapo_jax.board import Board
from dapo_jax.config import Config
from dapo_jax.dynamic_sampling import SamplingState, Stream, next_share
from dapo_jax.planning.virtual import Clock, Costs, VirtualEngine, VirtualPool, Work, detokenize
from dapo_jax.planning.workload import Workload
from dapo_jax.reward import Rubric
from dapo_jax.rollout import scheduler
from dapo_jax.rollout.programs import Loaded
from dapo_jax.rollout.sampling import SamplingParams
from dapo_jax.rollout.spec import EngineSpec
from dapo_jax.scoring import Grouping, Scoring
from dapo_jax.types import Problem, Response

POLICIES = {
    "ours": "whoever has room claims the next prompt, unless those begun should fill the batch",
    "eager": "the same without the estimate: prompts are begun wherever there is room",
    "dealt": "with the estimate, but host i of H draws prompts i, i + H, ... and no others",
}
MOST_UNITS = 128  # of a response
RUBRICS = {"": Rubric((("virtual", 1.0),), 1.0, -1.0)}


class Setting(NamedTuple):
    """What all hosts are like."""

    config: Config
    slots: int  # of a host
    prefill_prompts: int  # of a host
    unit_tokens: int  # that are drawn as one
    prompt_tokens: int  # mean length
    costs: Costs

    @property
    def spec(self) -> EngineSpec:
        """Of the engine of a host, in units of tokens. Prompts are of one token."""
        r = self.config.rollout
        most = math.ceil(r.max_response_tokens / self.unit_tokens)
        return EngineSpec(
            model=self.config.model,
            layout=dataclasses.replace(self.config.mesh, data=1, fsdp=1, tensor=1),
            slots=self.slots,
            prefill_prompts=self.prefill_prompts,
            max_prompt_tokens=1,
            max_response_tokens=most,
            stop_tokens=(),
            params=SamplingParams.of(r),
            samples=r.group_size,
            page_tokens=most + 1,
            decode_steps=max(1, r.decode_steps // self.unit_tokens),
        )


def unit_tokens(config: Config) -> int:
    """Tokens that are drawn as one: a part of a decode call or whole ones, so that a response has
    no more than MOST_UNITS."""
    k = config.rollout.decode_steps
    least = math.ceil(config.rollout.max_response_tokens / MOST_UNITS)
    return next((d for d in range(least, k + 1) if k % d == 0), math.ceil(least / k) * k)


class Rollout(NamedTuple):
    """One step's rollout."""

    seconds: float  # until the last host knew that the batch is full
    idle_H: np.ndarray  # share of them that the host's device had nothing to do
    wait_H: np.ndarray  # seconds of them after its device had done its last work
    batch: list[int]  # the prompts accepted, by number
    tried: int  # prompts whose verdicts were needed
    begun: int  # prompts
    slots_busy: float  # share of the slots' seconds in which they held a sequence
    tokens: int  # drawn, to the unit
    tokens_lost: int  # of prompts given back
    tokens_cached: int  # by one host at once, at most
    share: float  # of prompts that are informative, as the step began with


class Dealt(Stream):
    """Prompts are not claimed: this host has every `hosts`-th."""

    host = 0
    hosts = 1

    def problems(self, take: Callable[[int], list[Problem]]) -> Iterator[Problem | None]:
        """Its prompts, while those before them should not do."""
        for number in range(self.host, self.most, self.hosts):
            while True:
                self.look()
                known = self.board.verdicts
                before = (known.get(i, self.share) for i in range(self.decided, number))
                if self.accepted + sum(before) < self.num_prompts:
                    break
                yield None
            self.board.begun += 1
            self.see(number, take)
            self.numbers.append(number)
            self.taken.append(self.every[number])
            yield self.taken[-1]


class OneBoard(Board):
    """The board of all hosts; knows whether there is news."""

    news = False

    def tell(self, number: int, informative: bool) -> None:
        super().tell(number, informative)
        self.news = True


class Host:
    """One host during one rollout.

    Args:
        problems: all that there are, in order.
        work: of a prompt, by its number.
    """

    def __init__(
        self,
        setting: Setting,
        stream: Stream,
        problems: list[Problem],
        work: Callable[[int], Work],
    ):
        self.clock, self.stream = Clock(), stream
        units = lambda tokens: tokens / setting.unit_tokens
        self.engine = VirtualEngine(
            setting.spec, self.clock, setting.costs, work, units(setting.prompt_tokens),
            units(setting.config.rollout.page_tokens),
        )  # fmt: skip
        self.pool = VirtualPool(self.clock, setting.config.reward.workers, setting.costs.reward)
        self.data = iter(problems)
        self.turns = self._turns(setting.config.rollout.group_size)

    def _take(self, num: int) -> list[Problem]:
        return [next(self.data) for _ in range(num)]

    def _turns(self, group_size: int) -> Iterator[bool]:
        """As `drawing.Drawing` draws: whether there was anything to do, after each call."""
        stream = self.stream
        # Others of the same interface stand for an engine and for reward workers.
        engine: Any = self.engine
        pool: Any = self.pool
        scoring = Scoring(pool, stream.taken, RUBRICS)
        grouping = Grouping(stream.taken, group_size, 0, stream.scored)

        def ended(news: list[tuple[int, int, Response]]) -> None:
            grouping.responses(news)
            scoring.submit(news)

        def full() -> bool:
            grouping.verdicts(scoring.verdicts(wait=False))
            stream.look()
            return stream.full

        run = scheduler.Run(
            engine, Loaded({}, {}), stream.problems(self._take), detokenize, group_size,
            jax.random.key(0), None, None,
        )  # fmt: skip
        run.finished = ended
        yield from run.turns(full)
        while not (full() or stream.over):
            yield False

    def wait(self) -> float:
        """When it has something to do, as far as it knows itself."""
        return min(self.pool.pending, default=math.inf)


def play(hosts: list[Host], board: OneBoard) -> None:
    """Has each host take its turns until it is done; the one whose clock is behind goes next."""
    ready = [(0.0, i) for i in range(len(hosts))]  # a heap
    idle: dict[int, float] = {}  # hosts that have nothing to do, and until when
    while ready:
        at, i = heapq.heappop(ready)
        if i in idle:
            if at != idle[i]:
                continue  # it was woken since
            del idle[i]
        host = hosts[i]
        host.clock.wait(at)
        moved = next(host.turns, None)
        if moved:
            heapq.heappush(ready, (host.clock.now, i))
        elif moved is not None:
            idle[i] = max(host.clock.now + scheduler.IDLE_SECONDS, host.wait())
            if idle[i] < math.inf:
                heapq.heappush(ready, (idle[i], i))
        if board.news:
            board.news = False
            # Nothing but a verdict changes whether more prompts are needed.
            for j in idle:
                soon = max(hosts[j].clock.now + scheduler.IDLE_SECONDS, at)
                if soon < idle[j]:
                    idle[j] = soon
                    heapq.heappush(ready, (soon, j))
    assert not idle


def rollout(
    setting: Setting, workload: Workload, *, hosts: int, policy: str, step: int, share: float
) -> Rollout:
    """One step's rollout.

    Args:
        share: of the prompts that are informative, as the estimate has it.
    """
    config, board = setting.config, OneBoard()
    d, num_prompts = config.dynamic_sampling, config.train.prompts_per_step
    spec, group_size = setting.spec, config.rollout.group_size
    problems = [
        Problem(i, "", (i,), "", "") for i in range(d.max_rounds * d.max_round_prompts + hosts)
    ]

    def work(number: int) -> Work:
        group = workload(step, number)
        units_G = np.rint(group.tokens_G / setting.unit_tokens)
        return Work(np.clip(units_G, 1, spec.max_response_tokens).astype(int), group.right_G)

    each = []
    for i in range(hosts):
        kind = Dealt if policy == "dealt" else Stream
        full = dataclasses.replace(d, keep_slots_full=True) if policy == "eager" else d
        stream = kind(full, share, num_prompts, board)
        if isinstance(stream, Dealt):
            stream.host, stream.hosts = i, hosts
        each.append(Host(setting, stream, problems, work))
    play(each, board)
    seconds = max(host.clock.now for host in each)
    done_H = np.array([min(host.clock.device, seconds) for host in each])
    over_H = np.array([max(0.0, host.clock.device - seconds) for host in each])
    busy_H = np.array([host.clock.busy for host in each]) - over_H
    decided = each[0].stream.decided
    informative = [i for i in range(decided) if board.verdicts[i]]
    units = sum(host.engine.units for host in each)
    needed = sum(int(work(i).units_G.sum()) for i in range(decided))
    held = sum(host.engine.slot_seconds for host in each)
    assert all(len(workload(step, i).tokens_G) == group_size for i in range(decided))
    return Rollout(
        seconds,
        1 - busy_H / seconds,
        seconds - done_H,
        informative,
        decided,
        board.begun,
        held / (seconds * hosts * setting.slots),
        units * setting.unit_tokens,
        (units - needed) * setting.unit_tokens,
        math.ceil(max(host.engine.cached_units for host in each) * setting.unit_tokens),
        share,
    )


def rollouts(
    setting: Setting, workload: Workload, *, hosts: int, policy: str, steps: int
) -> list[Rollout]:
    """The first steps of a run, one after another: the estimate of the informative share is at
    first what a run begins with."""
    found, share = [], SamplingState().kept_share
    for step in range(steps):
        one = rollout(setting, workload, hosts=hosts, policy=policy, step=step, share=share)
        share = next_share(share, len(one.batch), one.tried)
        found.append(one)
    return found
