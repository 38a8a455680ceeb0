"""Dynamic sampling: keep sampling until the batch holds only prompts with 0 < correct < G.

Source: DAPO, arXiv:2503.14476, section 3.2 and the constraint of eq. 11. The filter looks at raw
correctness, never at the shaped reward, which lets all-wrong groups of unequal length through. It
looks at the responses that are trained: see `Group.is_informative`.

Groups are accepted in prompt order, never in completion order: taking whoever finishes first would
favour short answers and depend on timing. `stream_batch` scores groups while others are generated
and stops when the batch is full. Prompts begun beyond it go back to the data; their responses are
lost, or kept for the next step (see `partial_rollouts`). With dynamic sampling off every group is
kept, in the same way.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from dapo_jax import partial_rollouts, prefilter
from dapo_jax.board import Board
from dapo_jax.config import DynamicSamplingConfig
from dapo_jax.partial_rollouts import Begun
from dapo_jax.prefilter import PrefilterState, Sieve
from dapo_jax.teams import ALONE, Team
from dapo_jax.types import Group, Problem, Response

# Weight of a step's share of informative prompts in the running estimate of later steps.
NEW_WEIGHT = 0.5
# Within a step the estimate of earlier steps weighs as much as so many of its own verdicts: few
# enough that a step which differs from it soon goes by itself, enough that the first verdicts,
# which are those of short responses, do not decide alone.
PRIOR_VERDICTS = 16


class SamplingState(NamedTuple):
    """What dynamic sampling remembers from step to step; part of the checkpoint."""

    # Running estimate of the share of prompts that are informative. A new run knows nothing of it.
    kept_share: float = 0.5
    prefilter: PrefilterState | None = None  # None: no prompt is left out
    begun: tuple[Begun, ...] = ()  # what was drawn beyond the batches, with partial_rollouts


class Batch(NamedTuple):
    """The groups of one rollout step, and what was sampled to get them."""

    groups: list[Group]  # trained on, in prompt order
    sampled: list[Group]  # every group sampled in this step, before the filter
    returned: int = 0  # prompts begun that went back to the data
    skipped: int = 0  # prompts left out by the prefilter, among and before those sampled
    too_old: int = 0  # samples begun in earlier steps that were drawn afresh
    tokens_kept: int = 0  # of the responses that the next step goes on with


class Stream:
    """What one process knows of a stream of groups, some of which others draw.

    Prompts have numbers in the order of the data. Whoever claims one draws it, so that what is
    drawn depends on no process; only informative or not is told to the others.

    Args:
        share: of the prompts that are informative, as earlier steps have it.
        overlong_filter: whether truncated responses are left out of the loss.
        begun: responses of earlier steps to go on with.
        team: that this process draws with.
    """

    def __init__(
        self,
        config: DynamicSamplingConfig,
        share: float,
        num_prompts: int,
        board: Board,
        *,
        overlong_filter: bool = False,
        begun: Sequence[Begun] = (),
        team: Team = ALONE,
    ):
        self.team = team
        self.num_prompts, self.board = num_prompts, board
        self.keep_all, self.overlong_filter = not config.enabled, overlong_filter
        self.prior = share
        self.begun = partial_rollouts.by_visit(begun)
        # Prompts begun at most.
        self.most = config.max_rounds * config.max_round_prompts if config.enabled else num_prompts
        self.every: list[Problem] = []  # by number, as far as this process has looked
        self.numbers: list[int] = []  # of the prompts that this team draws,
        self.taken: list[Problem] = []  # and their problems
        self.drawn: list[dict[int, Response]] = []  # of each of those, by sample; told at the end
        self.groups: dict[int, Group] = {}  # by number
        self.decided = 0  # the verdicts on the first so many prompts are known
        self.accepted = 0  # informative ones among those

    def problems(self, take: Callable[[int], list[Problem]]) -> Iterator[Problem | None]:
        """The prompts to begin with, as many as should be needed; None while those begun should
        do."""
        while (number := self.team.told(self.claim)) is None or number < self.most:
            if number is None:
                yield None
                continue
            self.see(number, take)
            self.numbers.append(number)
            self.taken.append(self.every[number])
            yield self.taken[-1]

    def claim(self) -> int | None:
        """The number of the prompt to begin with; None: those begun should do; `most` or beyond:
        there are no more.

        What is claimed and when depends on timing; which groups are accepted does not.
        """
        self.look()
        board = self.board
        if board.begun >= self.most:
            return self.most
        # Of those whose turn has not come some are known already.
        later = [kept for i, kept in board.verdicts.items() if i >= self.decided]
        unknown = board.begun - self.decided - len(later)
        expected = self.accepted + sum(later) + unknown * self.share
        return None if expected >= self.num_prompts else board.claim()

    @property
    def share(self) -> float:
        """The share of prompts that are kept, as this step's verdicts so far and the earlier steps
        have it:

            (kept + PRIOR_VERDICTS prior) / (known + PRIOR_VERDICTS)
        """
        if self.keep_all:
            return 1.0
        verdicts = self.board.verdicts
        share = (sum(verdicts.values()) + PRIOR_VERDICTS * self.prior) / (
            len(verdicts) + PRIOR_VERDICTS
        )
        return max(share, 1 / self.most)

    def keeps(self, group: Group) -> bool:
        """Whether the group goes into a batch."""
        return self.keep_all or group.is_informative(overlong_filter=self.overlong_filter)

    def see(self, number: int, take: Callable[[int], list[Problem]]) -> None:
        """Looks at the data as far as the prompt of this number."""
        if number >= len(self.every):
            self.every += take(number + 1 - len(self.every))

    def scored(self, index: int, group: Group) -> None:
        """Takes the group of a prompt that this process draws, by its place in `taken`."""
        number = self.numbers[index]
        self.groups[number] = group
        self.board.tell(number, self.keeps(group))
        self._decide()

    def look(self) -> None:
        """Takes in what other processes have found."""
        self.board.look()
        self._decide()

    @property
    def news(self) -> int:
        """Grows with every prompt that any process begins, and with every verdict."""
        return self.board.begun + len(self.board.verdicts)

    def _decide(self) -> None:
        while self.decided in self.board.verdicts and not self.full:
            self.accepted += self.board.verdicts[self.decided]
            self.decided += 1

    @property
    def full(self) -> bool:
        """Whether the batch is."""
        return self.accepted >= self.num_prompts

    @property
    def over(self) -> bool:
        """Whether nothing is left to draw or to wait for."""
        return self.full or self.decided >= self.most


def stream_batch(
    config: DynamicSamplingConfig,
    state: SamplingState,
    *,
    num_prompts: int,
    step: int,
    seed: int,
    take: Callable[[int], list[Problem]],
    position: Callable[[], Any],
    go_back: Callable[[Any], None],
    draw: Callable[[Stream, Iterator[Problem | None]], None],
    overlong_filter: bool = False,
    team: Team = ALONE,
) -> tuple[Batch, SamplingState]:
    """A batch of `num_prompts` informative groups, the first of the data in their order; or fewer
    when max_rounds x max_round_prompts prompts have been tried. With dynamic sampling off it is
    the next `num_prompts` groups, whatever they are.

    Args:
        step: the rollout step.
        seed: of the prefilter's choices.
        take: gives the next prompts of the data.
        position: of the data; go_back: returns there.
        draw: draws and scores groups of the prompts that the iterator gives, and hands them to the
            stream, until that is over; tells it what was drawn if that is to be kept.
        overlong_filter: whether truncated responses are left out of the loss.
        team: that this process draws with. The batch is the same in every process.
    """
    before = position()
    sieve = lambda: Sieve(config.prefilter, state.prefilter, seed, take)
    begun, too_old = partial_rollouts.not_stale(
        state.begun, step=step, max_staleness=config.max_staleness
    )
    them, sieved = team.them, sieve()
    board = them.board()
    stream = Stream(
        config, state.kept_share, num_prompts, board,
        overlong_filter=overlong_filter, begun=begun, team=team,
    )  # fmt: skip
    draw(stream, stream.problems(sieved.take))
    drawn = dict(zip(stream.numbers, stream.drawn))
    for groups, responses in them.share((_until(stream.decided, stream.groups), drawn)):
        stream.groups |= groups
        drawn |= responses
    sampled = [stream.groups[i] for i in range(stream.decided)]
    returned = board.begun - len(sampled)
    if them.first:
        board.clear()
    stream.see(max(drawn, default=-1), sieved.take)
    # Once more as far as the batch goes: what was left out beyond it does not count.
    go_back(before)
    again = sieve()
    again.take(len(sampled))
    kept = [group for group in sampled if stream.keeps(group)]
    after = prefilter.next_state(
        config.prefilter, state.prefilter, sampled, again.skipped, overlong_filter=overlong_filter
    )
    share = next_share(state.kept_share, len(kept), len(sampled))
    if config.partial_rollouts:
        begun = partial_rollouts.next_begun(
            begun,
            stream.every,
            [drawn.get(i, {}) for i in range(len(stream.every))],
            decided=stream.decided,
            step=step,
        )
    tokens_kept = sum(len(r.tokens) for b in begun for _, r in b.responses)
    batch = Batch(kept, sampled, returned, len(again.skipped), too_old, tokens_kept)
    return batch, SamplingState(share, after, begun)


def _until(decided: int, groups: dict[int, Group]) -> dict[int, Group]:
    return {number: group for number, group in groups.items() if number < decided}


def next_share(before: float, informative: int, sampled: int) -> float:
    """The running estimate of the share of prompts that are informative, after a step."""
    if not sampled:
        return before
    return NEW_WEIGHT * (informative / sampled) + (1 - NEW_WEIGHT) * before


def state_to_json(state: SamplingState) -> dict[str, Any]:
    """The state as JSON values; arrays as base64 of their bytes, so that nothing is rounded."""
    return {
        "kept_share": state.kept_share,
        "prefilter": prefilter.state_to_json(state.prefilter),
        "begun": partial_rollouts.to_json(state.begun),
    }


def state_from_json(values: dict[str, Any]) -> SamplingState:
    """The inverse of `state_to_json`."""
    return SamplingState(
        values["kept_share"],
        prefilter.state_from_json(values["prefilter"]),
        partial_rollouts.from_json(values["begun"]),
    )
