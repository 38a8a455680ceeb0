"""How long rollouts take on many hosts: the scheduler's own code, played over a virtual clock.

Each host has a `RolloutCollector` and a `PromptQueue`: the code of a run. What is not real takes
time and computes nothing (see `virtual`). All hosts see one work queue, and each sees at once what
another reports; in a run they poll it every `POLL_SECONDS`. The host whose clock is behind goes
next.
"""

import dataclasses
import heapq
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from dapo_jax.config import Config
from dapo_jax.distributed.work_queue import WorkQueue
from dapo_jax.rewards.types import Rubric
from dapo_jax.rollout.admission import GenerationRequest
from dapo_jax.rollout.collector import IDLE_SECONDS, RolloutCollector
from dapo_jax.rollout.dynamic_sampling import PRIOR_OUTCOMES, SamplingState, next_rate
from dapo_jax.rollout.engine_config import EngineConfig
from dapo_jax.rollout.prompt_queue import ProblemList, PromptQueue
from dapo_jax.rollout.sampling import SamplingParams
from dapo_jax.tools.plan.virtual import Clock, Costs, VirtualEngine, VirtualPool, Work, detokenize
from dapo_jax.tools.plan.workload import Workload
from dapo_jax.types import Problem

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
    def engine_config(self) -> EngineConfig:
        """Of the engine of a host, in units of tokens. Prompts are of one token."""
        r = self.config.rollout
        most = math.ceil(r.max_response_tokens / self.unit_tokens)
        return EngineConfig(
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


class DealtQueue(PromptQueue):
    """Prompts are not claimed: this host has every `hosts`-th."""

    host = 0
    hosts = 1
    _dealt = 0  # prompts of this host that were begun

    def claim(self) -> int | None:
        number = self.host + self._dealt * self.hosts
        if number >= self.max_prompts:
            return number
        known = self.work_queue.outcomes
        before = (known.get(i, self.expected_rate) for i in range(self.num_resolved, number))
        if self.num_kept + sum(before) >= self.num_prompts:
            return None
        self._dealt += 1
        self.work_queue.claimed += 1
        return number


class EagerQueue(PromptQueue):
    """Counts on no prompt to be informative before it is known."""

    expected_rate = 0.0  # type: ignore[reportAssignmentType]


class OneWorkQueue(WorkQueue):
    """The work queue of all hosts; knows whether there is news."""

    news = False

    def report(self, number: int, kept: bool) -> None:
        super().report(number, kept)
        self.news = True


KINDS = {"ours": PromptQueue, "eager": EagerQueue, "dealt": DealtQueue}


class Host:
    """One host during one rollout: a collector over a virtual engine and virtual workers.

    Args:
        work: of a prompt, by its number.
    """

    def __init__(self, setting: Setting, prompts: PromptQueue, work: Callable[[int], Work]):
        self.clock, self.prompts = Clock(), prompts
        units = lambda tokens: tokens / setting.unit_tokens
        self.engine = VirtualEngine(
            setting.engine_config, self.clock, setting.costs, work, units(setting.prompt_tokens),
            units(setting.config.rollout.page_tokens),
        )  # fmt: skip
        self.pool = VirtualPool(self.clock, setting.config.reward.workers, setting.costs.reward)
        # Others of the same interface stand for an engine and for reward workers.
        engine: Any = self.engine
        pool: Any = self.pool
        request = GenerationRequest(setting.config.rollout.group_size)
        collector = RolloutCollector(engine, pool, RUBRICS, detokenize, request)
        self.outputs = collector.run(prompts, jax.random.key(0))

    def wait(self) -> float:
        """Returns when it has something to do, as far as it knows itself."""
        return min(self.pool.pending, default=math.inf)


def play(hosts: list[Host], queue: OneWorkQueue) -> None:
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
        turn = next(host.outputs, None)
        if turn is not None and not turn.idle:
            heapq.heappush(ready, (host.clock.now, i))
        elif turn is not None:
            idle[i] = max(host.clock.now + IDLE_SECONDS, host.wait())
            if idle[i] < math.inf:
                heapq.heappush(ready, (idle[i], i))
        if queue.news:
            queue.news = False
            # Nothing but a verdict changes whether more prompts are needed.
            for j in idle:
                soon = max(hosts[j].clock.now + IDLE_SECONDS, at)
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
    config, queue = setting.config, OneWorkQueue()
    d, num_prompts = config.dynamic_sampling, config.train.prompts_per_step
    engine_config, group_size = setting.engine_config, config.rollout.group_size
    max_prompts = d.max_prompts
    problems = [Problem(i, "", (i,), "", "") for i in range(max_prompts + hosts)]

    def work(number: int) -> Work:
        group = workload(step, number)
        units_G = np.rint(group.tokens_G / setting.unit_tokens)
        return Work(
            np.clip(units_G, 1, engine_config.max_response_tokens).astype(int), group.right_G
        )

    each = []
    for i in range(hosts):
        prompts = KINDS[policy](
            ProblemList(problems),
            num_prompts=num_prompts,
            max_prompts=max_prompts,
            keeps=lambda group: group.is_informative(overlong_filter=False),
            rate=share,
            rate_weight=PRIOR_OUTCOMES,
        )
        prompts.work_queue = queue
        if isinstance(prompts, DealtQueue):
            prompts.host, prompts.hosts = i, hosts
        each.append(Host(setting, prompts, work))
    play(each, queue)
    seconds = max(host.clock.now for host in each)
    done_H = np.array([min(host.clock.device, seconds) for host in each])
    over_H = np.array([max(0.0, host.clock.device - seconds) for host in each])
    busy_H = np.array([host.clock.busy for host in each]) - over_H
    decided = each[0].prompts.num_resolved
    informative = [i for i in range(decided) if queue.outcomes[i]]
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
        queue.claimed,
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
    found, share = [], SamplingState().informative_rate
    for step in range(steps):
        one = rollout(setting, workload, hosts=hosts, policy=policy, step=step, share=share)
        share = next_rate(share, len(one.batch), one.tried)
        found.append(one)
    return found
