"""Rollout collector: generates and scores the groups of prompts, and yields them in prompt order.

The training loop, evaluation, benchmarks and the simulator call it. Reward workers score responses
while others are still being generated. The iterator ends with the prompt queue, and cancels the
work in flight.
"""

import contextlib
import functools
import time
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax

from dapo_jax.distributed import POLL_SECONDS
from dapo_jax.distributed.replica import ALONE, Replica
from dapo_jax.rewards.async_scoring import GroupScoring
from dapo_jax.rewards.pool import RewardPool
from dapo_jax.rewards.types import Rubric
from dapo_jax.rollout.admission import GenerationSettings
from dapo_jax.rollout.engine import DecoderEngine
from dapo_jax.rollout.prompt_queue import NO_PROMPT, Outcome, PromptQueue
from dapo_jax.rollout.scheduler import GenerationLoop, RolloutStats
from dapo_jax.types import Detokenize, Group, Problem, StopRequested
from dapo_jax.utils.telemetry import SILENT, Telemetry

IDLE_SECONDS = 0.002  # between two polls with nothing to generate


class CollectorOutput(NamedTuple):
    """One iteration of the collector: at most one engine call."""

    generating: bool  # False: verdicts are awaited, and nothing can be generated meanwhile
    groups: list[tuple[int, Group]]  # completed in this process: (number of the prompt, group)
    outcomes: list[Outcome]  # resolved, in prompt order
    idle: bool  # nothing happened in this iteration


class RolloutCollector:
    """Generates the groups of prompts with an engine, and scores them with a reward pool.

    Args:
        rubrics: by source of a problem.
        settings: what to generate for each prompt.
        replica: the processes that share the engine. All make the same engine calls in the same
            order; the leader takes the decisions that depend on time and broadcasts them.
    """

    def __init__(
        self,
        engine: DecoderEngine,
        pool: RewardPool,
        rubrics: Mapping[str, Rubric],
        detokenize: Detokenize,
        settings: GenerationSettings,
        *,
        replica: Replica = ALONE,
        telemetry: Telemetry = SILENT,
    ):
        self.engine, self.pool, self.rubrics = engine, pool, rubrics
        self.detokenize, self.settings = detokenize, settings
        self.replica, self.telemetry = replica, telemetry
        self.stats = RolloutStats()  # of all its loops; of a replica's leader only
        # Seconds of generating, and of waiting for verdicts with nothing to generate.
        self.seconds = {"rollout": 0.0, "reward": 0.0}

    def outcomes(
        self, prompts: PromptQueue, key: jax.Array, *, step: int = 0
    ) -> Generator[Outcome, None, None]:
        """Yields the outcome of every prompt, in prompt order, until the queue is done.

        The queue keeps the groups themselves: see `PromptQueue.commit`.

        Args:
            key: of the rollout step.
            step: rollout step whose parameters generate.

        Raises:
            StopRequested: a stop was requested, in this process or in another of the replica.
        """
        # A replica of several processes polls less often: each poll is a broadcast.
        idle_seconds = IDLE_SECONDS if self.replica.size == 1 else POLL_SECONDS
        start = time.monotonic()
        for output in self.run(prompts, key, step=step):
            now = time.monotonic()
            self.seconds["rollout" if output.generating else "reward"] += now - start
            start = now
            yield from output.outcomes
            if output.idle:
                time.sleep(idle_seconds)
                if self.replica.is_leader:
                    self.stats += RolloutStats(idle_seconds=idle_seconds)

    def collect(self, problems: Sequence[Problem], key: jax.Array, *, step: int = 0) -> list[Group]:
        """Returns the group of every problem, in order, in every process of the run."""
        group = self.replica.process_group
        prompts = PromptQueue.of_list(problems, group)
        with group.stop_together(self.telemetry.waiting_for):
            outcomes = list(self.outcomes(prompts, key, step=step))
        return prompts.commit(len(outcomes))

    def take_stats(self) -> tuple[RolloutStats, dict[str, float]]:
        """Returns the stats of all processes together and the seconds of the one that generated
        longest, and resets both. Every process must call it."""
        own = tuple(self.stats), self.seconds
        each = self.replica.process_group.all_gather(own, self.telemetry.waiting_for)
        self.stats, self.seconds = RolloutStats(), {"rollout": 0.0, "reward": 0.0}
        stats = sum((RolloutStats._make(stats) for stats, _ in each), RolloutStats())
        return stats, max((seconds for _, seconds in each), key=lambda one: one["rollout"])

    def run(
        self, prompts: PromptQueue, key: jax.Array, *, step: int = 0
    ) -> Iterator[CollectorOutput]:
        """Yields after each engine call, and repeatedly while other processes are awaited."""
        numbers: list[int] = []  # of the prompts that this process generates, in the loop's order
        calls: dict[int, int] = defaultdict(int)  # decode call of a prompt's last token so far
        scoring = GroupScoring(
            self.pool, self.rubrics, self.settings.num_samples, step, self.telemetry
        )
        loop = GenerationLoop(
            self.engine,
            self._claimed(prompts, numbers),
            self.detokenize,
            key,
            self.settings,
            self.telemetry,
            step=step,
            carried=prompts.carried,
        )
        leader, generation, progress = self.replica.is_leader, loop.run(), 0
        try:
            while not prompts.done:
                generated = next(generation, None)
                groups: list[tuple[int, Group]] = []
                if leader:
                    finished = generated.finished if generated else []
                    for f in finished:
                        calls[numbers[f.prompt]] = max(calls[numbers[f.prompt]], f.call)
                    named = ((numbers[f.prompt], f.sample, f.response) for f in finished)
                    scoring.submit([(n, prompts.problem(n), s, r) for n, s, r in named])
                    groups = list(scoring.completed())
                else:
                    # A signal to this process is reported: the leader stops all in the same call.
                    with contextlib.suppress(StopRequested):
                        self.telemetry.check_stop()
                for number, group in groups:
                    prompts.report(number, group, calls[number])
                before = progress
                waits = generated is None or generated.idle
                resolved = functools.partial(self._resolved, prompts, waits=waits)
                outcomes, progress, after = self.replica.broadcast(
                    resolved, self.telemetry.waiting_for
                )
                if not leader:
                    outcomes = [Outcome(*outcome) for outcome in outcomes]
                    prompts.follow(outcomes)
                if progress != before:  # of other processes too: waiting for them is no silence
                    self.telemetry.moved()
                if generated is None:
                    self.telemetry.waiting_for(f"the verdict on prompt {prompts.num_resolved}")
                if after is not None:
                    loop.skip_to(after)
                if prompts.done and prompts.cut is not None:
                    while loop.num_calls < prompts.cut and not next(generation).idle:
                        pass
                    # By all members of the replica: it may call the device.
                    unfinished = loop.unfinished(prompts.cut)
                    if leader:
                        prompts.unfinished = dict(zip(numbers, unfinished))
                idle = waits and not groups and not outcomes and after is None
                generating = generated is not None and not (waits and scoring.is_awaited)
                yield CollectorOutput(generating, groups, outcomes, idle)
        finally:
            if leader:
                self.pool.give_up()
                self.stats += loop.stats

    def _resolved(
        self, prompts: PromptQueue, *, waits: bool
    ) -> tuple[list[Outcome], int, int | None]:
        """Returns the new outcomes, the progress of all processes and, where more prompts may
        begin, the decode call after which they do."""
        self.telemetry.check_stop()
        outcomes, after = prompts.resolved(), None
        if waits and not prompts.done:
            after = prompts.extend()
        return outcomes, prompts.progress, after

    def _claimed(self, prompts: PromptQueue, numbers: list[int]) -> Iterator[Problem | None]:
        """Yields the prompts that this replica generates; None while those claimed should do."""
        while (number := self.replica.broadcast(prompts.claim)) != NO_PROMPT:
            if number is None:
                yield None
                continue
            numbers.append(number)
            yield prompts.problem(number)
