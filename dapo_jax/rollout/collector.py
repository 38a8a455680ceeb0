"""Rollout collector: generates and scores the groups of prompts, and yields them in prompt order.

The training loop, evaluation, benchmarks and the simulator call it. Responses are scored by the
reward workers while others are still being generated. Whoever has enough closes the iterator, which
cancels the work in flight.
"""

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax

from dapo_jax.distributed.replica import ALONE, Replica
from dapo_jax.distributed.work_queue import POLL_SECONDS
from dapo_jax.rewards.async_scoring import GroupScoring
from dapo_jax.rewards.pool import RewardPool
from dapo_jax.rewards.types import Rubric
from dapo_jax.rollout.admission import GenerationRequest
from dapo_jax.rollout.engine import DecoderEngine
from dapo_jax.rollout.prompt_queue import Outcome, PromptQueue
from dapo_jax.rollout.scheduler import GenerationLoop, RolloutStats
from dapo_jax.types import Detokenize, Group, Problem
from dapo_jax.utils.telemetry import SILENT, Telemetry

IDLE_SECONDS = 0.002  # between two polls with nothing to generate


class Turn(NamedTuple):
    """One iteration of the collector: at most one engine call."""

    generating: bool  # False: everything is generated, outcomes are awaited
    groups: list[tuple[int, Group]]  # completed in this process: (number of the prompt, group)
    outcomes: list[Outcome]  # resolved, in prompt order
    idle: bool  # nothing happened in this iteration


class RolloutCollector:
    """Generates the groups of prompts with an engine, and scores them with a reward pool.

    Args:
        rubrics: by source of a problem.
        request: what to generate for each prompt.
        replica: the processes that share the engine. All make the same engine calls in the same
            order; the leader takes the decisions that depend on time and broadcasts them.
    """

    def __init__(
        self,
        engine: DecoderEngine,
        pool: RewardPool,
        rubrics: Mapping[str, Rubric],
        detokenize: Detokenize,
        request: GenerationRequest,
        *,
        replica: Replica = ALONE,
        telemetry: Telemetry = SILENT,
    ):
        self.engine, self.pool, self.rubrics = engine, pool, rubrics
        self.detokenize, self.request = detokenize, request
        self.replica, self.telemetry = replica, telemetry
        self.stats = RolloutStats()  # of all its loops; of a replica's leader only
        # Seconds of generating, and of waiting for verdicts after everything was generated.
        self.seconds = {"rollout": 0.0, "reward": 0.0}

    def groups(
        self,
        prompts: PromptQueue,
        key: jax.Array,
        *,
        step: int = 0,
    ) -> Generator[Outcome, None, None]:
        """Yields the outcome of every prompt, in prompt order, until the queue is done.

        The groups themselves are with the queue: see `PromptQueue.commit`.

        Args:
            key: of the rollout step.
            step: rollout step whose parameters generate.

        Raises:
            StopRequested: a stop was requested, in this process or in another of the replica.
        """
        # A replica of several processes polls less often: each poll is a broadcast.
        idle_seconds = IDLE_SECONDS if self.replica.size == 1 else POLL_SECONDS
        start = time.monotonic()
        for turn in self.turns(prompts, key, step=step):
            now = time.monotonic()
            self.seconds["rollout" if turn.generating else "reward"] += now - start
            start = now
            yield from turn.outcomes
            if turn.idle:
                time.sleep(idle_seconds)
                self.stats += RolloutStats(idle_seconds=idle_seconds)

    def collect(self, problems: Sequence[Problem], key: jax.Array, *, step: int = 0) -> list[Group]:
        """Returns the group of every problem, in order, in every process of the run."""
        group = self.replica.process_group
        prompts = PromptQueue.of_list(problems, group)
        with group.stop_together(self.telemetry.waiting_for):
            outcomes = list(self.groups(prompts, key, step=step))
        return prompts.commit(len(outcomes))

    def take_stats(self) -> tuple[RolloutStats, dict[str, float]]:
        """Returns the stats of all processes together and this process's seconds, and resets both.
        Every process must call it."""
        each = self.replica.process_group.all_gather(tuple(self.stats), self.telemetry.waiting_for)
        stats = sum(map(RolloutStats._make, each), RolloutStats())
        seconds, self.seconds = self.seconds, {"rollout": 0.0, "reward": 0.0}
        self.stats = RolloutStats()
        return stats, seconds

    def turns(
        self,
        prompts: PromptQueue,
        key: jax.Array,
        *,
        step: int = 0,
    ) -> Iterator[Turn]:
        """Yields after each engine call, and again and again while others are waited for."""
        numbers: list[int] = []  # of the prompts that this process generates, in the loop's order
        scoring = GroupScoring(
            self.pool, self.rubrics, self.request.num_samples, step, self.telemetry
        )
        loop = GenerationLoop(
            self.engine,
            self._claimed(prompts, numbers),
            self.detokenize,
            key,
            self.request,
            self.telemetry,
            step=step,
            begun=prompts.begun,
        )
        leader, generation, heard = self.replica.is_leader, loop.turns(), 0
        try:
            while not prompts.done:
                generated = next(generation, None)
                if leader and generated is not None:
                    ended = ((numbers[e.prompt], e.sample, e.response) for e in generated.ended)
                    scoring.submit([(n, prompts.problem(n), g, r) for n, g, r in ended])
                groups = list(scoring.completed()) if leader else []
                for number, group in groups:
                    prompts.report(number, group)
                outcomes, news = self.replica.broadcast(
                    lambda: self._resolved(prompts), self.telemetry.waiting_for
                )
                if not leader:
                    outcomes = [Outcome(*outcome) for outcome in outcomes]
                    prompts.follow(outcomes)
                if news != heard:  # a process with nothing to generate waits while others do
                    heard = news
                    self.telemetry.moved()
                if generated is None:
                    self.telemetry.waiting_for(f"the verdict on prompt {prompts.num_resolved}")
                waits = generated is None or generated.idle
                idle = waits and not groups and not outcomes
                yield Turn(generated is not None, groups, outcomes, idle)
        finally:
            if leader:
                self.stats += loop.stats
                if prompts.begun is not None:
                    prompts.unfinished |= dict(zip(numbers, loop.unfinished()))

    def _resolved(self, prompts: PromptQueue) -> tuple[list[Outcome], int]:
        self.telemetry.check_stop()
        return prompts.resolved(), prompts.news

    def _claimed(self, prompts: PromptQueue, numbers: list[int]) -> Iterator[Problem | None]:
        """Yields the prompts that this replica generates; None while those claimed should do."""
        while (number := self.replica.broadcast(prompts.claim)) is None or (
            number < prompts.max_prompts
        ):
            if number is None:
                yield None
                continue
            numbers.append(number)
            yield prompts.problem(number)
