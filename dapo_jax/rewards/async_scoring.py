"""Asynchronous scoring: reward workers score responses as they end; groups come back complete."""

from collections.abc import Iterator, Mapping, Sequence

from dapo_jax.rewards.pool import Pending, RewardPool
from dapo_jax.rewards.types import Rubric, Task, verdict
from dapo_jax.types import Group, Problem, Response, Verdict
from dapo_jax.utils.telemetry import SILENT, Telemetry

RESPONSES_PER_TASK = 32  # a task costs the decoding loop time


class GroupScoring:
    """Scores responses, in any order, and assembles their groups.

    Args:
        rubrics: by source of a problem.
        group_size: responses to each prompt.
        step: rollout step of the groups.
    """

    def __init__(
        self,
        pool: RewardPool,
        rubrics: Mapping[str, Rubric],
        group_size: int,
        step: int,
        telemetry: Telemetry = SILENT,
    ):
        self.pool, self.rubrics, self.telemetry = pool, rubrics, telemetry
        self.group_size, self.step = group_size, step
        self.num_submitted = self.num_scored = 0  # responses
        self.problems: dict[int, Problem] = {}  # by number of the prompt
        self.responses: dict[int, dict[int, Response]] = {}
        self.verdicts: dict[int, dict[int, Verdict]] = {}
        self.waiting: list[tuple[int, int, Response]] = []
        self.pending: list[tuple[list[tuple[int, int]], Pending]] = []

    def submit(self, ended: Sequence[tuple[int, Problem, int, Response]]) -> None:
        """Submits finished responses: (number of the prompt, problem, sample, response)."""
        for number, problem, sample, response in ended:
            self.problems[number] = problem
            self.responses.setdefault(number, {})[sample] = response
            self.waiting.append((number, sample, response))
        self.num_submitted += len(ended)
        if len(self.waiting) >= RESPONSES_PER_TASK:
            self._send()

    @property
    def is_awaited(self) -> bool:
        """Returns whether a verdict is missing."""
        return self.num_scored < self.num_submitted

    def completed(self) -> Iterator[tuple[int, Group]]:
        """Yields each group whose last verdict has arrived, with the number of its prompt."""
        if self.waiting:
            self._send()
        if self.pending:
            self.telemetry.waiting_for(
                f"reward workers: {self.num_scored} of {self.num_submitted} verdicts there, "
                f"{len(self.problems)} prompts"
            )
        left = []
        for places, pending in self.pending:
            if not self.pool.ready(pending):
                left.append((places, pending))
                continue
            for (number, sample), scored in zip(places, self.pool.collect(pending)):
                rubric = self.rubrics[self.problems[number].source]
                self.verdicts.setdefault(number, {})[sample] = verdict(rubric, scored.scores)
            self.num_scored += len(places)
            self.telemetry.moved()
        self.pending = left
        done = [n for n, verdicts in self.verdicts.items() if len(verdicts) == self.group_size]
        for number in done:
            responses, verdicts = self.responses.pop(number), self.verdicts.pop(number)
            in_order = lambda by_sample: tuple(by_sample[g] for g in range(self.group_size))
            group = (self.problems[number], in_order(responses), in_order(verdicts), self.step)
            yield number, Group(*group)

    def _send(self) -> None:
        places = [(number, sample) for number, sample, _ in self.waiting]
        tasks = [self._task(self.problems[n], response) for n, _, response in self.waiting]
        self.pending.append((places, self.pool.submit(tasks)))
        self.waiting = []

    def _task(self, problem: Problem, response: Response) -> Task:
        names = self.rubrics[problem.source].names
        token_ids = tuple(response.tokens.tolist())
        return Task(names, response.text, problem.answer, token_ids, problem.metadata)
