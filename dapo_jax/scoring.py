"""Scoring while decoding goes on: responses go to the workers as they end."""

from collections.abc import Callable, Mapping, Sequence

from dapo_jax.reward import Rubric, Task, verdict
from dapo_jax.reward_pool import Pending, RewardPool
from dapo_jax.types import Group, Problem, Response, Verdict
from dapo_jax.watchdog import UNWATCHED, Watchdog

# Responses end a few at a time; handed over so, each would cost the decoding loop a task.
HANDED_OVER_TOGETHER = 32


class Scoring:
    """The scores of one call of `scheduler.generate`.

    Args:
        problems: of that call.
        rubrics: of each source that a problem is from.
        watch: is told what is waited for.
    """

    def __init__(
        self,
        pool: RewardPool,
        problems: Sequence[Problem],
        rubrics: Mapping[str, Rubric],
        watch: Watchdog = UNWATCHED,
    ):
        self.pool, self.problems, self.rubrics, self.watch = pool, problems, rubrics, watch
        self.submitted, self.told = 0, 0  # responses
        self.prompts: set[int] = set()  # that they answer
        self.waiting: list[tuple[int, int, Response]] = []
        self.pending: list[tuple[list[tuple[int, int]], Pending]] = []

    def submit(self, ended: Sequence[tuple[int, int, Response]]) -> None:
        """Takes responses that have ended: (problem, sample, response) of each."""
        self.waiting += ended
        self.submitted += len(ended)
        self.prompts.update(problem for problem, _, _ in ended)
        if len(self.waiting) >= HANDED_OVER_TOGETHER:
            self._hand_over()

    def _hand_over(self) -> None:
        places = [(problem, sample) for problem, sample, _ in self.waiting]
        tasks = [self._task(problem, response) for problem, _, response in self.waiting]
        self.pending.append((places, self.pool.submit(tasks)))
        self.waiting = []

    def _task(self, index: int, response: Response) -> Task:
        problem = self.problems[index]
        scorers = self.rubrics[problem.source].names
        token_ids = tuple(response.tokens.tolist())
        return Task(scorers, response.text, problem.answer, token_ids, problem.metadata)

    def verdicts(self, *, wait: bool = True) -> dict[tuple[int, int], Verdict]:
        """The verdict on each (problem, sample) that was not told before.

        Args:
            wait: for those that are not there yet; else they are left for another call.
        """
        if self.waiting:
            self._hand_over()
        found, left = {}, []
        for places, pending in self.pending:
            self.watch.waiting_for(
                f"reward workers: {self.told} of {self.submitted} verdicts there, "
                f"{len(self.prompts)} prompts"
            )
            if not wait and not self.pool.ready(pending):
                left.append((places, pending))
                continue
            for (problem, sample), scored in zip(places, self.pool.collect(pending)):
                rubric = self.rubrics[self.problems[problem].source]
                found[problem, sample] = verdict(rubric, scored.scores)
            self.told += len(places)
            self.watch.moved()
        self.pending = left
        return found

    def groups(self, responses_QG: Sequence[Sequence[Response]], step: int) -> list[Group]:
        """The group of each problem, in order."""
        found = self.verdicts()
        return [
            Group(
                problem,
                tuple(responses),
                tuple(found[q, g] for g in range(len(responses))),
                step,
            )
            for q, (problem, responses) in enumerate(zip(self.problems, responses_QG))
        ]


class Grouping:
    """Puts responses and verdicts, in whatever order they come, together to groups.

    Args:
        problems: numbered as the responses say; may grow.
        told: called with each problem's number and its group when that is complete.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        group_size: int,
        step: int,
        told: Callable[[int, Group], None],
    ):
        self.problems, self.group_size, self.step, self.told = problems, group_size, step, told
        self.drawn: dict[int, dict[int, Response]] = {}
        self.scored: dict[int, dict[int, Verdict]] = {}

    def responses(self, news: Sequence[tuple[int, int, Response]]) -> None:
        """Takes responses, before their verdicts."""
        for problem, sample, response in news:
            self.drawn.setdefault(problem, {})[sample] = response

    def verdicts(self, news: Mapping[tuple[int, int], Verdict]) -> None:
        """Takes verdicts, and tells of the groups that they complete."""
        for (problem, sample), found in news.items():
            of_problem = self.scored.setdefault(problem, {})
            of_problem[sample] = found
            if len(of_problem) == self.group_size:
                responses = self.drawn.pop(problem)
                group = Group(
                    self.problems[problem],
                    tuple(responses[g] for g in range(self.group_size)),
                    tuple(of_problem[g] for g in range(self.group_size)),
                    self.step,
                )
                self.told(problem, group)
