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
from dapo_jax.rollout.carry import CarriedResponses
from dapo_jax.types import Group, Problem, Response

NO_PROMPT = -1  # nothing is left to claim


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
    call: int = 0  # decode call that sampled the last token of the group


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
        group: the processes of the run.
    """

    carried: CarriedResponses | None = None  # of earlier steps; None: none are kept either

    def __init__(
        self,
        source: PromptSource,
        *,
        num_prompts: int,
        max_prompts: int,
        keeps: Callable[[Group], bool] = lambda _: True,
        rate: float = 1.0,
        rate_weight: float = 1.0,
        group: ProcessGroup = ALONE,
    ):
        self.source, self.num_prompts, self.max_prompts = source, num_prompts, max_prompts
        self.keeps, self.rate, self.rate_weight, self.group = keeps, rate, rate_weight, group
        self.work_queue: WorkQueue = group.work_queue()
        self.groups: dict[int, Group] = {}  # reported by this process, by number
        self.unfinished: dict[int, Mapping[int, Response]] = {}  # responses at the end, by number
        self.num_returned = 0  # prompts claimed that returned to the data; known after `commit`
        self.num_resolved = 0  # prompts whose outcomes are known, without a gap
        self.num_kept = 0
        self.last_call = 0  # decode call that sampled the last token of these prompts
        self.limit = max_prompts  # prompts that may begin so far
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
        """Returns whether the batch is full."""
        return self.num_kept >= self.num_prompts

    @property
    def done(self) -> bool:
        """Returns whether nothing is left to generate or to await."""
        return self.full or self.num_resolved >= self.max_prompts

    def claim(self) -> int | None:
        """Returns the number of a prompt that the caller must generate. None: those claimed should
        do. NO_PROMPT: none is left."""
        queue = self.work_queue
        queue.poll()
        if queue.claimed >= self.max_prompts:
            return NO_PROMPT
        unknown = queue.claimed - len(queue.outcomes)
        expected = queue.num_kept + unknown * max(self.expected_rate, 1 / self.max_prompts)
        if expected >= self.num_prompts:
            return None
        number = queue.claim()
        return number if number < self.max_prompts else NO_PROMPT  # another process was faster

    @property
    def expected_rate(self) -> float:
        """Share of prompts whose groups will be kept, by the prior and this step's outcomes:

        (kept + rate_weight rate) / (known + rate_weight)
        """
        kept, known = self.work_queue.num_kept, len(self.work_queue.outcomes)
        return (kept + self.rate_weight * self.rate) / (known + self.rate_weight)

    def problem(self, number: int) -> Problem:
        """Returns the problem of a prompt."""
        while number >= len(self.problems):
            (problem,) = self.source.take(1)
            self.problems.append(problem)
            self._after.append(self.source.get_state())
        return self.problems[number]

    def report(self, number: int, group: Group, call: int = 0) -> None:
        """Takes the scored group of a prompt that this process claimed, and the number of the
        decode call that sampled its last token."""
        self.groups[number] = group
        self.work_queue.report(number, self.keeps(group), call)

    def resolved(self) -> list[Outcome]:
        """Returns the outcomes that were not returned before, in prompt order, up to the one that
        ends the step."""
        self.work_queue.poll()
        found, outcomes = [], self.work_queue.outcomes
        # A prompt from the limit on has begun on another engine: this one must begin its own there
        # too before the step is done, or what is carried depends on which of them was faster.
        while self.num_resolved in outcomes and self.num_resolved < self.limit and not self.done:
            outcome = Outcome(self.num_resolved, *outcomes[self.num_resolved])
            found.append(outcome)
            self._take(outcome)
        return found

    def extend(self) -> int | None:
        """Lets more prompts begin where the queue holds them back, see `CarryQueue`."""
        return None

    @property
    def cut(self) -> int | None:
        """The last decode call whose tokens count; None: unfinished responses are not kept."""
        return None

    @property
    def progress(self) -> int:
        """Number of claims and outcomes so far, of all processes."""
        return self.work_queue.claimed + len(self.work_queue.outcomes)

    def follow(self, outcomes: Sequence[Outcome]) -> None:
        """Takes outcomes that the leader of the replica resolved."""
        for outcome in outcomes:
            self._take(outcome)

    def _take(self, outcome: Outcome) -> None:
        self.num_resolved += 1
        self.num_kept += outcome.kept
        self.last_call = max(self.last_call, outcome.call)

    def commit(self, num_tried: int) -> list[Group]:
        """Moves the data past the first `num_tried` prompts, and returns their groups in prompt
        order, from all processes. Every process must call it."""
        mine = {number: g for number, g in self.groups.items() if number < num_tried}
        begun = {number: r for number, r in self.unfinished.items() if number >= num_tried}
        for groups, unfinished in self.group.all_gather_objects((mine, begun)):
            self.groups |= groups
            self.unfinished |= unfinished
        # A process that has not seen the last claim claims one more, which is no prompt.
        self.num_returned = min(self.work_queue.claimed, self.max_prompts) - num_tried
        if self.group.is_primary:
            self.work_queue.reset()
        last = max([num_tried - 1, *self.unfinished])
        if last >= 0:
            self.problem(last)
        self.source.set_state(self._after[num_tried - 1] if num_tried else self._first_state)
        return [self.groups[number] for number in range(num_tried)]


class CarryQueue(PromptQueue):
    """The prompts of a rollout step whose unfinished responses are carried, see `carry`.

    Invariant: the prompts that a replica begins, and their order, depend on the data alone: every
    `count`-th prompt is its own, up to a limit that verdicts move only when nothing is left to do.

    Args:
        carried: responses of earlier steps to resume.
        ahead: prompts that may be begun, see `carry.max_started`.
        cut_delay_calls: decode calls whose tokens count after the batch is full.
        share: index of this replica, and the number of replicas.
    """

    def __init__(
        self,
        source: PromptSource,
        *,
        num_prompts: int,
        max_prompts: int,
        keeps: Callable[[Group], bool],
        carried: CarriedResponses,
        ahead: int,
        cut_delay_calls: int,
        share: tuple[int, int] = (0, 1),
        group: ProcessGroup = ALONE,
    ):
        super().__init__(
            source, num_prompts=num_prompts, max_prompts=max_prompts, keeps=keeps, group=group
        )
        self.carried, self.ahead, self.cut_delay_calls = carried, ahead, cut_delay_calls
        self.index, self.count = share
        self.limit, self.num_own = ahead, 0

    def claim(self) -> int | None:
        number = self.index + self.count * self.num_own
        if number >= self.limit:
            return None
        self.num_own += 1
        self.work_queue.claimed = number + 1
        return number

    def extend(self) -> int | None:
        """Lets more prompts begin, once all that could are scored and the batch is not full.

        Returns:
            The last decode call of those, after which the others begin on every engine; None: not
            yet.
        """
        outcomes = self.work_queue.outcomes
        if not all(number in outcomes for number in range(self.limit)):
            return None
        last = max(outcomes[number].call for number in range(self.limit))
        self.limit += self.ahead
        return last

    @property
    def cut(self) -> int:
        """The last decode call whose tokens count, known once the step is done."""
        return self.last_call + self.cut_delay_calls
