"""Scoring while decoding goes on: responses go to the workers as they end."""

from collections.abc import Sequence

from dapo_jax.reward_pool import Pending, RewardPool
from dapo_jax.types import Group, Problem, Response, Verdict

# Responses end a few at a time; handed over so, each would cost the decoding loop a task.
HANDED_OVER_TOGETHER = 32


class Scoring:
    """The scores of one call of `scheduler.generate`."""

    def __init__(self, pool: RewardPool, problems: Sequence[Problem]):
        self.pool, self.problems = pool, problems
        self.waiting: list[tuple[int, int, Response]] = []
        self.pending: list[tuple[list[tuple[int, int]], Pending]] = []

    def submit(self, ended: Sequence[tuple[int, int, Response]]) -> None:
        """Takes responses that have ended: (problem, sample, response) of each."""
        self.waiting += ended
        if len(self.waiting) >= HANDED_OVER_TOGETHER:
            self._hand_over()

    def _hand_over(self) -> None:
        places = [(problem, sample) for problem, sample, _ in self.waiting]
        texts = [response.text for _, _, response in self.waiting]
        answers = [self.problems[problem].answer for problem, _ in places]
        self.pending.append((places, self.pool.submit(texts, answers)))
        self.waiting = []

    def verdicts(self) -> dict[tuple[int, int], Verdict]:
        """The verdict on each (problem, sample); waits for those that are not there yet."""
        self._hand_over()
        found = {}
        for places, pending in self.pending:
            found |= dict(zip(places, self.pool.collect(pending)))
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
