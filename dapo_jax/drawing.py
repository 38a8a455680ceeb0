"""The groups of one rollout step: drawn by the engine, scored by the workers as responses end."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from dapo_jax.board import LOOK_SECONDS
from dapo_jax.dynamic_sampling import Stream
from dapo_jax.partial_rollouts import Partial
from dapo_jax.progress import Progress
from dapo_jax.reward_pool import RewardPool
from dapo_jax.rollout import scheduler
from dapo_jax.rollout.programs import Loaded
from dapo_jax.rollout.sampling import SamplingParams
from dapo_jax.scoring import Grouping, Scoring
from dapo_jax.trainer import Trainer
from dapo_jax.types import Group, Problem, Response
from dapo_jax.watchdog import UNWATCHED, Watchdog


class Drawing:
    """What is drawn with the parameters of one step, and what it took.

    Args:
        trainer: its engine, team, detokenize, train_rubrics and config are read.
        params: in the engine's layout.
        key: of the step.
        check_stop: called again and again; raises to abandon.
        watch: is told what is waited for.
    """

    def __init__(
        self,
        trainer: Trainer,
        pool: RewardPool,
        params: Loaded,
        *,
        key: jax.Array,
        step: int,
        progress: Progress,
        check_stop: Callable[[], None],
        watch: Watchdog = UNWATCHED,
    ):
        self.team, self.them = trainer.team, trainer.team.them
        self.trainer, self.pool, self.params, self.key, self.step = trainer, pool, params, key, step
        self.progress, self.check_stop, self.watch = progress, check_stop, watch
        self.stats = scheduler.RolloutStats()
        self.news = 0  # of this step, as far as it was heard
        self.clock = {"rollout": 0.0, "reward": 0.0}  # seconds

    def greedy(self, problems: Sequence[Problem], sampling: SamplingParams) -> list[Group]:
        """A group of one for each problem, sampled as `sampling` says; each team does a share."""
        self.progress.doing(f"step {self.step}: greedy baselines of {len(problems)} prompts")
        mine = self.team.deal(list(problems))

        def draw() -> list[Group]:
            start = time.monotonic()
            scoring = Scoring(self.pool, mine, self.trainer.train_rubrics, self.watch)
            finished = scoring.submit if self.team.first else scheduler.IGNORE
            responses_QG, stats = self._generate(
                mine, finished=finished, num_samples=1, sampling=sampling
            )
            self._count("rollout", start, stats)
            start = time.monotonic()
            groups = scoring.groups(responses_QG, self.step) if self.team.first else []
            self._count("reward", start)
            return groups

        return self.team.collect(self.them.all_or_none(draw, self.watch.waiting_for))

    def draw(self, stream: Stream, problems: Iterator[Problem | None]) -> None:
        """Groups for a stream until it is over, see `dynamic_sampling.stream_batch`."""
        self.progress.doing(f"step {self.step}: sampling")
        self.them.all_or_none(lambda: self._draw(stream, problems), self.watch.waiting_for)

    def _draw(self, stream: Stream, problems: Iterator[Problem | None]) -> None:
        start = time.monotonic()
        trainer, rollout = self.trainer, self.trainer.config.rollout
        scoring = Scoring(self.pool, stream.taken, trainer.train_rubrics, self.watch)
        grouping = Grouping(stream.taken, rollout.group_size, self.step, stream.scored)

        def ended(news: list[tuple[int, int, Response]]) -> None:
            grouping.responses(news)
            scoring.submit(news)

        def full() -> tuple[bool, int]:
            grouping.verdicts(scoring.verdicts(wait=False))
            stream.look()
            return stream.full, stream.news

        first, partial = self.team.first, None
        if trainer.config.dynamic_sampling.partial_rollouts:
            left = stream.drawn.extend if first else lambda _: None
            partial = Partial(self.step, stream.begun, left)
        _, stats = self._generate(
            problems,
            finished=ended if first else scheduler.IGNORE,
            enough=full,
            partial=partial,
        )
        self._count("rollout", start, stats)
        start = time.monotonic()
        if first and not stream.full:
            grouping.verdicts(scoring.verdicts())
        while not stream.over:  # what is missing is drawn by other processes
            self.watch.waiting_for(f"the verdict on prompt {stream.decided} of another process")
            self.check_stop()
            time.sleep(LOOK_SECONDS)
            stream.look()
            self._heard(stream.news)
        self._count("reward", start)

    def _generate(
        self,
        problems: Iterable[Problem | None],
        enough: Callable[[], tuple[bool, int]] = lambda: (False, 0),
        **changes: Any,
    ) -> tuple[list[list[Response]], scheduler.RolloutStats]:
        """`scheduler.generate` as the run draws, with what one way of drawing has of its own.

        Args:
            enough: whether enough is drawn, and the news so far: see `Stream.news`.
        """
        trainer, rollout = self.trainer, self.trainer.config.rollout
        told = self.team.enough(enough, self.check_stop, self.watch.waiting_for)

        def enough_or_news() -> bool:
            over, news = told()
            self._heard(news)
            return over

        common: dict[str, Any] = {
            "num_samples": rollout.group_size,
            "key": self.key,
            "stop_strings": rollout.stop_strings,
            "enough": enough_or_news,
            # A team that has nothing to draw does not ask all the time: all are told each time.
            "idle_seconds": scheduler.IDLE_SECONDS if self.team.size == 1 else LOOK_SECONDS,
            "watch": self.watch,
        }
        return scheduler.generate(
            trainer.engine, self.params, problems, trainer.detokenize, **common | changes
        )

    def _heard(self, news: int) -> None:
        """Ends the silence where there is news: a process that has nothing left to draw waits for
        as long as others draw."""
        if news != self.news:
            self.news = news
            self.watch.moved()

    def stats_of_all(self) -> scheduler.RolloutStats:
        """The stats of all processes together; every process must ask."""
        each = self.them.agree(tuple(self.stats), self.watch.waiting_for)
        return sum(map(scheduler.RolloutStats._make, each), scheduler.RolloutStats())

    def _count(self, phase: str, start: float, stats: scheduler.RolloutStats | None = None) -> None:
        self.clock[phase] += time.monotonic() - start
        if stats is not None and self.team.first:
            self.stats += stats
