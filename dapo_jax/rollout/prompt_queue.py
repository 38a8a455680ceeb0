"""Prompt queue: the prompts of one rollout step, claimed in data order, committed at its end.

Every process of a run has one over the same data, and all share one work queue. A process claims a
prompt, generates and scores its group, and reports whether it is kept. `commit` exchanges the
groups themselves.

Invariant: which prompts are kept depends on their order in the data alone, never on which process
generated a group or when it was done.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from dapo_jax.distributed import ALONE, ProcessGroup, WorkQueue
from dapo_jax.rollout.partial_rollouts import PartialResponses
from dapo_jax.types import Group, Problem, Response


class PromptSource(Protocol):
    """An ordered source of problems with a position: `data.ProblemStream`, `ProblemList`."""

    def take(self, n: int) -> list[Problem]: ...
    def get_state(self) -> Any: ...
    def set_state(self, state: Any) -> None: ...


class ProblemList:
    """A fixed list of problems as a source."""

    def __init__(self, problems: Sequence[Problem]):
        self.problems, self.position = list(problems), 0

    def take(self, n: int) -> list[Problem]:
        first, self.position = self.position, self.position + n
        return self.problems[first : self.position]

    def get_state(self) -> int:
        return self.position

    def set_state(self, state: int) -> None:
        self.position = state


class Outcome(NamedTuple):
    """A prompt whose group is scored, in this process or another."""

    number: int  # of the prompt, in data order, from 0 in each step
    kept: bool  # for dynamic sampling: whether the group is informative


class PromptQueue:
    """The prompts of one rollout step.

    Args:
        source: of problems; its position moves in `commit` only.
        num_prompts: groups to keep.
        max_prompts: prompts that may be claimed.
        keeps: whether a group is kept.
        rate: prior share of prompts whose groups are kept. Claims stop while the prompts claimed
            should fill the batch.
        rate_weight: number of outcomes that the prior counts for, against those of this step.
        partial: responses of earlier steps to resume. None: unfinished ones are not kept either.
        group: the processes of the run.
    """

    def __init__(
        self,
        source: PromptSource,
        *,
        num_prompts: int,
        max_prompts: int,
        keeps: Callable[[Group], bool] = lambda _: True,
        rate: float = 1.0,
        rate_weight: float = 1.0,
        partial: PartialResponses | None = None,
        group: ProcessGroup = ALONE,
    ):
        self.source, self.num_prompts, self.max_prompts = source, num_prompts, max_prompts
        self.keeps, self.rate, self.rate_weight = keeps, rate, rate_weight
        self.partial, self.group = partial, group
        self.work_queue: WorkQueue = group.work_queue()
        self.groups: dict[int, Group] = {}  # reported by this process, by number
        self.unfinished: dict[int, Mapping[int, Response]] = {}  # responses at the end, by number
        self.num_returned = 0  # prompts claimed that returned to the data; known after `commit`
        self.num_resolved = 0  # prompts whose outcomes are known, without a gap
        self.num_kept = 0
        self._first_state = source.get_state()
        self.problems: list[Problem] = []  # read so far, by number
        self._after: list[Any] = []  # position of the source after each of them

    @classmethod
    def of_list(cls, problems: Sequence[Problem], group: ProcessGroup = ALONE) -> "PromptQueue":
        """A queue of these problems, all of them kept."""
        num = len(problems)
        return cls(ProblemList(problems), num_prompts=num, max_prompts=num, group=group)

    @property
    def full(self) -> bool:
        """Whether the batch is full."""
        return self.num_kept >= self.num_prompts

    @property
    def done(self) -> bool:
        """Whether nothing is left to generate or to await."""
        return self.full or self.num_resolved >= self.max_prompts

    def claim(self) -> int | None:
        """Returns the number of a prompt that the caller must generate. None: those claimed should
        do. `max_prompts` or more: no prompt is left."""
        queue = self.work_queue
        queue.poll()
        if queue.claimed >= self.max_prompts:
            return self.max_prompts
        kept, known = sum(queue.outcomes.values()), len(queue.outcomes)  # in any order
        expected = kept + (queue.claimed - known) * max(self.expected_rate, 1 / self.max_prompts)
        return None if expected >= self.num_prompts else queue.claim()

    @property
    def expected_rate(self) -> float:
        """Share of prompts whose groups will be kept, by the prior and this step's outcomes:

        (kept + rate_weight rate) / (known + rate_weight)
        """
        outcomes = self.work_queue.outcomes
        kept, known = sum(outcomes.values()), len(outcomes)
        return (kept + self.rate_weight * self.rate) / max(1.0, known + self.rate_weight)

    def problem(self, number: int) -> Problem:
        """Returns the problem of a prompt."""
        while number >= len(self.problems):
            (problem,) = self.source.take(1)
            self.problems.append(problem)
            self._after.append(self.source.get_state())
        return self.problems[number]

    def report(self, number: int, group: Group) -> None:
        """Takes the scored group of a prompt that this process claimed."""
        self.groups[number] = group
        self.work_queue.report(number, self.keeps(group))

    def resolved(self) -> list[Outcome]:
        """Returns the outcomes that were not returned before, in prompt order, up to the one that
        fills the batch."""
        self.work_queue.poll()
        found = []
        while self.num_resolved in self.work_queue.outcomes and not self.full:
            kept = self.work_queue.outcomes[self.num_resolved]
            found.append(Outcome(self.num_resolved, kept))
            self.num_resolved += 1
            self.num_kept += kept
        return found

    @property
    def progress(self) -> int:
        """Number of claims and outcomes so far, of all processes."""
        return self.work_queue.claimed + len(self.work_queue.outcomes)

    def follow(self, outcomes: Sequence[Outcome]) -> None:
        """Takes outcomes that the leader of the replica resolved."""
        self.num_resolved += len(outcomes)
        self.num_kept += sum(outcome.kept for outcome in outcomes)

    def commit(self, num_tried: int) -> list[Group]:
        """Moves the data past the first `num_tried` prompts, and returns their groups in prompt
        order, from all processes. Every process must call it."""
        mine = {number: g for number, g in self.groups.items() if number < num_tried}
        for groups, unfinished in self.group.all_gather_objects((mine, self.unfinished)):
            self.groups |= groups
            self.unfinished |= unfinished
        self.num_returned = self.work_queue.claimed - num_tried
        if self.group.is_primary:
            self.work_queue.reset()
        last = max([num_tried - 1, *self.unfinished])
        if last >= 0:
            self.problem(last)
        self.source.set_state(self._after[num_tried - 1] if num_tried else self._first_state)
        return [self.groups[number] for number in range(num_tried)]
