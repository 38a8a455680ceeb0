"""Simulated rollouts on many hosts: the run's own collector and queue over a virtual clock.

Each host has a `RolloutCollector` and a `PromptQueue`, with the virtual engine and reward workers
of `virtual`. All hosts share one work queue and see each report at once; in a run they poll it
every `POLL_SECONDS`. The host whose clock is behind moves next.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from dapo_jax.config import Config
from dapo_jax.distributed.work_queue import WorkQueue
from dapo_jax.rewards.types import Rubric
from dapo_jax.rollout import carry
from dapo_jax.rollout.admission import GenerationSettings
from dapo_jax.rollout.collector import IDLE_SECONDS, RolloutCollector
from dapo_jax.rollout.dynamic_sampling import DynamicSamplingState, next_rate, open_queue
from dapo_jax.rollout.engine_config import EngineConfig
from dapo_jax.rollout.prompt_queue import ProblemList, PromptQueue
from dapo_jax.rollout.sampling import SamplingParams
from dapo_jax.tools.plan.virtual import Clock, Costs, Group, VirtualEngine, VirtualPool, detokenize
from dapo_jax.tools.plan.workload import Workload
from dapo_jax.types import Problem

MOST_UNITS = 128  # units of a response
RUBRICS = {"": Rubric((("virtual", 1.0),), 1.0, -1.0)}


class Setting(NamedTuple):
    """The hosts of a simulation, all alike."""

    config: Config
    slots: int  # of one host
    prefill_prompts: int  # of one host
    unit_tokens: int  # tokens sampled as one
    prompt_tokens: int  # mean length
    costs: Costs

    @property
    def engine_config(self) -> EngineConfig:
        """The engine of a host, with lengths in units. Prompts have one token."""
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
            resumes=r.resumes,
        )


def unit_tokens(config: Config) -> int:
    """Returns the tokens to sample as one: a part of a decode call or whole calls, so that a
    response has at most MOST_UNITS."""
    k = config.rollout.decode_steps
    least = math.ceil(config.rollout.max_response_tokens / MOST_UNITS)
    return next((d for d in range(least, k + 1) if k % d == 0), math.ceil(least / k) * k)


class Rollout(NamedTuple):
    """One step's simulated rollout."""

    seconds: float  # until the last host knows that the batch is full
    idle_H: np.ndarray  # share of them in which the host's device had no work
    wait_H: np.ndarray  # seconds between the device's last call and the end
    batch: list[int]  # numbers of the prompts kept
    tried: int  # prompts whose outcomes were needed
    claimed: int  # prompts
    slots_busy: float  # share of the slots' seconds in which they held a sequence
    tokens: int  # tokens sampled, to the unit
    tokens_resumed: int  # tokens of earlier steps that came back, stale ones included
    tokens_lost: int  # of prompts that went back to the data, of stale groups, or after the cut
    tokens_carried: int  # tokens of unfinished groups that the next step resumes
    tokens_cached: int  # largest number in one host's cache
    rate: float  # estimated informative rate at the start
    response_tokens: float  # mean length in the batch, to the unit
    staleness: int  # rollout steps since the batch's oldest token was sampled


def trained_prompts(config: Config, one: Rollout) -> int:
    """Returns the prompts that a step trains on: none of a short batch that is skipped."""
    is_short = len(one.batch) < config.train.prompts_per_step
    return 0 if is_short and config.dynamic_sampling.exhausted != "train" else len(one.batch)


class OneWorkQueue(WorkQueue):
    """The work queue of all hosts; notes that there is a new report."""

    news = False

    def report(self, number: int, kept: bool, call: int = 0) -> None:
        super().report(number, kept, call)
        self.news = True


class Host:
    """One host during one rollout: a collector over a virtual engine and virtual workers."""

    def __init__(self, setting: Setting, prompts: PromptQueue, workload: Workload, step: int):
        self.clock, self.prompts = Clock(), prompts
        unit, engine_config = setting.unit_tokens, setting.engine_config

        def group(number: int) -> Group:
            lengths_G, correct_G = workload(step, number)
            units_G = np.clip(np.rint(lengths_G / unit), 1, engine_config.max_response_tokens)
            return Group(units_G.astype(int), correct_G)

        prompt, page = setting.prompt_tokens, setting.config.rollout.page_tokens
        self.engine = VirtualEngine(
            engine_config, self.clock, setting.costs, group, prompt / unit, page / unit
        )
        self.pool = VirtualPool(self.clock, setting.config.reward.workers, setting.costs.reward)
        engine: Any = self.engine
        pool: Any = self.pool
        settings = GenerationSettings(setting.config.rollout.group_size)
        self.collector = RolloutCollector(engine, pool, RUBRICS, detokenize, settings)
        self.turns = self.collector.run(prompts, jax.random.key(0), step=step)


def play(hosts: list[Host], queue: OneWorkQueue) -> None:
    """Moves the host whose clock is behind, until all are done."""
    wake_H, idle_H = np.zeros(len(hosts)), np.zeros(len(hosts), bool)
    left = len(hosts)
    while left:
        i = int(wake_H.argmin())
        at = float(wake_H[i])
        assert at < math.inf, "every host waits for another"
        host = hosts[i]
        host.clock.wait(at)
        turn = next(host.turns, None)
        idle_H[i] = turn is not None and turn.idle
        if turn is None:
            wake_H[i], left = math.inf, left - 1
        elif turn.idle:
            own = min(host.pool.pending, default=math.inf)
            wake_H[i] = max(host.clock.now + IDLE_SECONDS, own)
        else:
            wake_H[i] = host.clock.now
        if queue.news:
            queue.news = False
            for j in np.flatnonzero(idle_H).tolist():  # a report may give them work
                wake_H[j] = min(wake_H[j], max(hosts[j].clock.now + IDLE_SECONDS, at))


def rollout(
    setting: Setting,
    workload: Workload,
    *,
    hosts: int,
    step: int,
    state: DynamicSamplingState,
    position: int = 0,
) -> tuple[Rollout, DynamicSamplingState]:
    """Returns one step's rollout, and the state after it.

    Args:
        state: at its start: the estimated informative rate, and what is carried.
        position: in the data, of the first prompt. Where none are carried every step has prompts of
            its own.
    """
    config, queue = setting.config, OneWorkQueue()
    d, carries = config.dynamic_sampling, config.rollout.carries
    num = d.max_prompts + carries * carry.max_started(config, state.informative_rate)
    problems = [Problem(position + i, "", (position + i,), "", "") for i in range(num)]
    each = []
    for i in range(hosts):
        source = ProblemList(problems)
        prompts = open_queue(config, state, source, step=step, share=(i, hosts))
        prompts.work_queue = queue
        each.append(Host(setting, prompts, workload, step))
    play(each, queue)
    seconds = max(host.clock.now for host in each)
    length = seconds or 1.0  # a batch of carried groups alone may take no time
    device_H, busy_H = (
        np.array([getattr(host.clock, name) for host in each]) for name in ("device", "busy")
    )
    tried = each[0].prompts.num_resolved
    batch = [i for i in range(tried) if queue.outcomes[i].kept]
    units = sum(host.engine.units for host in each)
    groups = {n: group for host in each for n, group in host.prompts.groups.items()}
    if carries:
        unfinished = {n: r for host in each for n, r in host.prompts.unfinished.items()}
        claimed = len(groups.keys() | unfinished.keys())
        stale = config.rollout.max_staleness
        fresh, _ = carry.without_stale(state.carried, step=step, max_staleness=stale)
        carried = carry.next_carried(fresh, problems, unfinished, num_tried=tried, step=step)
        lost = sum(host.collector.stats.discarded for host in each)
        lost += _units(state.carried) - _units(fresh)
    else:
        carried, claimed = (), queue.claimed
        lost = units - sum(int(each[0].engine.group(i).lengths_G.sum()) for i in range(tried))
    cached = max(host.engine.cached_units for host in each)
    responses = [response for n in batch for response in groups[n].responses]
    ages = [step - r.versions.min() for r in responses if r.versions is not None]
    lengths = [len(r.tokens) for r in responses]
    one = Rollout(
        seconds,
        1 - (busy_H - np.maximum(0.0, device_H - seconds)) / length,
        seconds - np.minimum(device_H, seconds),
        batch,
        tried,
        claimed,
        sum(host.engine.slot_seconds(seconds) for host in each) / (length * hosts * setting.slots),
        units * setting.unit_tokens,
        _units(state.carried) * setting.unit_tokens,
        lost * setting.unit_tokens,
        _units(carried) * setting.unit_tokens,
        math.ceil(cached * setting.unit_tokens),
        state.informative_rate,
        float(np.mean(lengths or [0])) * setting.unit_tokens,
        max(map(int, ages), default=0),
    )
    rate = next_rate(state.informative_rate, len(batch), tried)
    return one, DynamicSamplingState(rate, carried)


def _units(groups: Sequence[carry.CarriedGroup]) -> int:
    """Returns the units that carried groups have sampled."""
    return sum(len(response.tokens) for group in groups for _, response in group.responses)


def rollouts(setting: Setting, workload: Workload, *, hosts: int, steps: int) -> list[Rollout]:
    """Returns the first steps of a run. The first begins with a new run's informative rate, the
    others with the estimate that a run has and, where it carries responses, with these."""
    found, state, position = [], DynamicSamplingState(), 0
    carries = setting.config.rollout.carries
    # Carried prompts keep their responses from step to step.
    of = (lambda _, number: workload(0, number)) if carries else workload
    for step in range(steps):
        one, state = rollout(setting, of, hosts=hosts, step=step, state=state, position=position)
        position += carries * one.tried
        found.append(one)
    return found
