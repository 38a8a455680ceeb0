"""Dynamic sampling: keep sampling until the batch holds only prompts with 0 < correct < G.

Source: DAPO, arXiv:2503.14476, section 3.2 and the constraint of eq. 11. The filter looks at raw
correctness, never at the shaped reward, which lets all-wrong groups of unequal length through.
Groups are accepted in prompt order, never in completion order: taking whoever finishes first would
favour short answers and depend on timing.

`stream_batch` scores groups while others are being drawn and stops when the batch is full; prompts
begun beyond it go back to the data, and what was drawn for them is lost, or kept for the next step
(see `partial_rollouts`). `sample_batch` samples in rounds, and keeps or drops what a round finds
beyond the batch. Neither depends on the order in which responses end, but for what is drawn that
the next step goes on with.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from dapo_jax import partial_rollouts, prefilter
from dapo_jax.board import Board
from dapo_jax.config import DynamicSamplingConfig
from dapo_jax.partial_rollouts import Begun
from dapo_jax.prefilter import PrefilterState, Sieve
from dapo_jax.teams import ALONE, Team
from dapo_jax.types import (
    Group,
    Problem,
    Response,
    response_from_json,
    response_to_json,
    verdict_from_json,
)

# Weight of a step's share of informative prompts in the running estimate that sizes rounds.
NEW_WEIGHT = 0.5


class SamplingState(NamedTuple):
    """What dynamic sampling remembers from step to step; part of the checkpoint."""

    carried: tuple[Group, ...] = ()  # informative groups that the last batch had no room for
    kept_share: float = 1.0  # running estimate of the share of prompts that are informative
    prefilter: PrefilterState | None = None  # None: no prompt is left out
    begun: tuple[Begun, ...] = ()  # what was drawn beyond the batches, with partial_rollouts


class Batch(NamedTuple):
    """The groups of one rollout step, and how they were come by."""

    groups: list[Group]  # trained on, in prompt order
    sampled: list[Group]  # every group sampled in this step, before the filter
    rounds: int
    carried_in: int
    surplus: int  # informative groups that found no room
    returned: int = 0  # prompts begun that went back to the data
    skipped: int = 0  # prompts left out by the prefilter, among and before those sampled
    too_old: int = 0  # samples begun in earlier steps that were drawn afresh
    tokens_kept: int = 0  # of the responses that the next step goes on with


def sample_batch(
    config: DynamicSamplingConfig,
    state: SamplingState,
    *,
    num_prompts: int,
    seed: int,
    take: Callable[[int], list[Problem]],
    sample: Callable[[Sequence[Problem]], list[Group]],
) -> tuple[Batch, SamplingState]:
    """A batch of `num_prompts` informative groups, or fewer when the rounds run out.

    Args:
        num_prompts: groups wanted. With dynamic sampling off, exactly these many prompts are
            sampled and all of them kept.
        seed: of the prefilter's choices.
        take: gives the next prompts of the data.
        sample: draws and scores the group of each prompt, in order.
    """
    if not config.enabled:  # and no prefilter either: see config_checks
        groups = sample(take(num_prompts))
        return Batch(groups, groups, 1, 0, 0), state
    accepted = list(state.carried)
    carried_in, rounds = len(accepted), 0
    sampled: list[Group] = []
    sieve = Sieve(prefilter.GRESO, state.prefilter, seed, take)
    while len(accepted) < num_prompts and rounds < config.max_rounds:
        missing = num_prompts - len(accepted)
        share = state.kept_share
        if sampled:  # this step's own share is the better guide once there is one
            share = sum(group.informative for group in sampled) / len(sampled)
        size = round_size(missing, share, config.max_round_prompts)
        groups = sample(sieve.take(size))
        sampled += groups
        accepted += [group for group in groups if group.informative]
        rounds += 1
    informative = sum(group.informative for group in sampled)
    share = next_share(state.kept_share, informative, len(sampled))
    surplus = accepted[num_prompts:]
    carried = tuple(surplus) if config.surplus == "carry" else ()
    batch = Batch(
        accepted[:num_prompts], sampled, rounds, carried_in, len(surplus),
        skipped=len(sieve.skipped),
    )  # fmt: skip
    after = prefilter.next_state(prefilter.GRESO, state.prefilter, sampled, sieve.skipped)
    return batch, SamplingState(carried, share, after)


class Stream:
    """What one process knows of a stream of groups, some of which others draw.

    Prompts have numbers in the order of the data. Whoever claims one draws it, so that what is
    drawn depends on no process; only informative or not is told to the others.

    Args:
        share: of the prompts that are informative, as far as is known; `config.keep_slots_full`
            counts on none.
        begun: responses of earlier steps to go on with.
        team: that this process draws with.
    """

    def __init__(
        self,
        config: DynamicSamplingConfig,
        share: float,
        num_prompts: int,
        board: Board,
        begun: Sequence[Begun] = (),
        team: Team = ALONE,
    ):
        self.team = team
        self.num_prompts, self.board = num_prompts, board
        self.share = 0.0 if config.keep_slots_full else share
        self.begun = partial_rollouts.by_visit(begun)
        self.most = config.max_rounds * config.max_round_prompts  # prompts begun
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
        there are no more."""
        self.look()
        board = self.board
        if board.begun >= self.most:
            return self.most
        # Of those whose turn has not come some are known already.
        later = [informative for i, informative in board.verdicts.items() if i >= self.decided]
        unknown = board.begun - self.decided - len(later)
        expected = self.accepted + sum(later) + unknown * max(self.share, 1 / self.most)
        return None if expected >= self.num_prompts else board.claim()

    def see(self, number: int, take: Callable[[int], list[Problem]]) -> None:
        """Looks at the data as far as the prompt of this number."""
        if number >= len(self.every):
            self.every += take(number + 1 - len(self.every))

    def scored(self, index: int, group: Group) -> None:
        """Takes the group of a prompt that this process draws, by its place in `taken`."""
        number = self.numbers[index]
        self.groups[number] = group
        self.board.tell(number, group.informative)
        self._decide()

    def look(self) -> None:
        """Takes in what other processes have found."""
        self.board.look()
        self._decide()

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
    team: Team = ALONE,
) -> tuple[Batch, SamplingState]:
    """A batch of `num_prompts` informative groups, the first of the data in their order; or fewer
    when max_rounds x max_round_prompts prompts have been tried.

    Args:
        step: the rollout step.
        seed: of the prefilter's choices.
        take: gives the next prompts of the data.
        position: of the data; go_back: returns there.
        draw: draws and scores groups of the prompts that the iterator gives, and hands them to the
            stream, until that is over; tells it what was drawn if that is to be kept.
        team: that this process draws with. The batch is the same in every process.
    """
    before = position()
    sieve = lambda: Sieve(prefilter.GRESO, state.prefilter, seed, take)
    begun, too_old = partial_rollouts.not_stale(
        state.begun, step=step, max_staleness=config.max_staleness
    )
    them, sieved = team.them, sieve()
    board = them.board()
    stream = Stream(config, state.kept_share, num_prompts, board, begun, team)
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
    kept = [group for group in sampled if group.informative]
    after = prefilter.next_state(prefilter.GRESO, state.prefilter, sampled, again.skipped)
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
    batch = Batch(kept, sampled, 1, 0, 0, returned, len(again.skipped), too_old, tokens_kept)
    return batch, SamplingState((), share, after, begun)


def _until(decided: int, groups: dict[int, Group]) -> dict[int, Group]:
    return {number: group for number, group in groups.items() if number < decided}


def next_share(before: float, informative: int, sampled: int) -> float:
    """The running estimate of the share of prompts that are informative, after a step."""
    if not sampled:
        return before
    return NEW_WEIGHT * (informative / sampled) + (1 - NEW_WEIGHT) * before


def round_size(missing: int, kept_share: float, most: int) -> int:
    """Prompts to sample so that about `missing` of them are informative, at most `most`."""
    return min(most, math.ceil(missing / max(kept_share, 1 / most)))


def state_to_json(state: SamplingState) -> dict[str, Any]:
    """The state as JSON values; arrays as base64 of their bytes, so that nothing is rounded."""
    return {
        "kept_share": state.kept_share,
        "carried": [_group_to_json(g) for g in state.carried],
        "prefilter": prefilter.state_to_json(state.prefilter),
        "begun": partial_rollouts.to_json(state.begun),
    }


def state_from_json(values: dict[str, Any]) -> SamplingState:
    """The inverse of `state_to_json`."""
    return SamplingState(
        tuple(_group_from_json(group) for group in values["carried"]),
        values["kept_share"],
        prefilter.state_from_json(values["prefilter"]),
        partial_rollouts.from_json(values.get("begun", ())),  # older checkpoints have none
    )


def _group_to_json(group: Group) -> dict[str, Any]:
    return {
        "problem": group.problem._asdict(),
        "responses": [response_to_json(response) for response in group.responses],
        "verdicts": [verdict._asdict() for verdict in group.verdicts],
        "step": group.step,
    }


def _group_from_json(values: dict[str, Any]) -> Group:
    problem = values["problem"] | {"prompt_tokens": tuple(values["problem"]["prompt_tokens"])}
    return Group(
        Problem(**problem),
        tuple(response_from_json(r) for r in values["responses"]),
        tuple(verdict_from_json(v) for v in values["verdicts"]),
        values["step"],
    )
