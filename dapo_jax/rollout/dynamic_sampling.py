"""Dynamic sampling: keep sampling until the batch holds only prompts with 0 < correct < G.

Source: DAPO, arXiv:2503.14476, section 3.2 and the constraint of eq. 11. The filter looks at raw
correctness of the responses that are trained, never at the shaped reward, which lets all-wrong
groups of unequal length through. Groups are accepted in prompt order, never in completion order:
accepting whichever finishes first favours short answers and depends on timing. Prompts claimed
beyond the batch go back to the data. With dynamic sampling off every group is kept.
"""

from collections.abc import Generator
from typing import Any, NamedTuple

from dapo_jax.config import Config
from dapo_jax.distributed.process_group import ALONE, ProcessGroup
from dapo_jax.rollout import partial_rollouts, prompt_filter
from dapo_jax.rollout.partial_rollouts import Begun
from dapo_jax.rollout.prompt_filter import PrefilterState, PromptFilter
from dapo_jax.rollout.prompt_queue import Outcome, PromptQueue, PromptSource
from dapo_jax.types import Group

# Weight of a step's informative rate in the running estimate of later steps.
NEW_WEIGHT = 0.5
# Within a step the estimate of earlier steps weighs as much as this many of its own outcomes: few
# enough to follow a step that differs, enough that the first outcomes, which are of short
# responses, do not decide alone.
PRIOR_OUTCOMES = 16


class SamplingState(NamedTuple):
    """What dynamic sampling remembers from step to step; part of the checkpoint."""

    # Running estimate of the share of prompts that are informative. A new run knows nothing of it.
    informative_rate: float = 0.5
    prefilter: PrefilterState | None = None  # None: no prompt is left out
    begun: tuple[Begun, ...] = ()  # unfinished responses, with partial_rollouts


class Taken(NamedTuple):
    """Which prompts of a step make the batch."""

    num_tried: int  # prompts, from the first of the step
    kept: list[int]  # numbers of the prompts whose groups are trained on


class Batch(NamedTuple):
    """The groups of one rollout step, with sampling statistics."""

    groups: list[Group]  # trained on, in prompt order
    sampled: list[Group]  # every group sampled in this step, before the filter
    returned: int = 0  # prompts claimed that went back to the data
    skipped: int = 0  # prompts left out by the prompt filter, among and before those sampled
    too_old: int = 0  # partial responses discarded for their staleness
    tokens_kept: int = 0  # tokens of partial responses that the next step resumes


def open_queue(
    config: Config,
    state: SamplingState,
    source: PromptSource,
    *,
    step: int,
    group: ProcessGroup = ALONE,
) -> PromptQueue:
    """Returns the prompt queue of a rollout step; every process must ask for it.

    Args:
        source: of problems, at the position after the step before.
    """
    d, num_prompts = config.dynamic_sampling, config.train.prompts_per_step
    overlong_filter = config.objective.overlong_filter
    begun = None
    if d.partial_rollouts:
        young, _ = partial_rollouts.not_stale(state.begun, step=step, max_staleness=d.max_staleness)
        begun = partial_rollouts.by_visit(young)
    if not d.enabled:
        return PromptQueue(source, num_prompts=num_prompts, max_prompts=num_prompts, group=group)
    return PromptQueue(
        source,
        num_prompts=num_prompts,
        max_prompts=d.max_prompts,
        keeps=lambda found: found.is_informative(overlong_filter=overlong_filter),
        rate=state.informative_rate,
        rate_weight=PRIOR_OUTCOMES,
        prompt_filter=PromptFilter(prompt_filter.GRESO, state.prefilter, config.seed),
        begun=begun,
        group=group,
    )


def take_informative(outcomes: Generator[Outcome, None, None], num_prompts: int) -> Taken:
    """Takes outcomes, in prompt order, until `num_prompts` groups are kept or none are left.

    Args:
        outcomes: see `RolloutCollector.groups`. Closing it cancels the work in flight.
    """
    num_tried, kept = 0, []
    for outcome in outcomes:
        num_tried += 1
        if outcome.kept:
            kept.append(outcome.number)
        if len(kept) == num_prompts:
            break
    outcomes.close()
    return Taken(num_tried, kept)


def commit(
    config: Config, state: SamplingState, prompts: PromptQueue, taken: Taken, step: int
) -> tuple[Batch, SamplingState]:
    """Moves the data past the prompts tried; returns the batch and the state after the step.

    Every process must call it, and all get the same.
    """
    d = config.dynamic_sampling
    sampled = prompts.commit(taken.num_tried)
    kept = [sampled[number] for number in taken.kept]
    rate = next_rate(state.informative_rate, len(kept), len(sampled)) if d.enabled else 0.5
    begun, too_old = (), 0
    if prompts.begun is not None:
        young, too_old = partial_rollouts.not_stale(
            state.begun, step=step, max_staleness=d.max_staleness
        )
        seen = prompts.problems
        begun = partial_rollouts.next_begun(
            young,
            seen,
            [prompts.unfinished.get(number, {}) for number in range(len(seen))],
            decided=taken.num_tried,
            step=step,
        )
    tokens_kept = sum(len(r.tokens) for b in begun for _, r in b.responses)
    skipped = prompts.filter.skipped
    after = prompt_filter.next_state(
        prompt_filter.GRESO,
        state.prefilter,
        sampled,
        skipped,
        overlong_filter=config.objective.overlong_filter,
    )
    batch = Batch(kept, sampled, prompts.num_returned, len(skipped), too_old, tokens_kept)
    return batch, SamplingState(rate, after, begun)


def next_rate(before: float, informative: int, sampled: int) -> float:
    """Returns the running estimate of the informative rate after a step."""
    if not sampled:
        return before
    return NEW_WEIGHT * (informative / sampled) + (1 - NEW_WEIGHT) * before


def state_to_json(state: SamplingState) -> dict[str, Any]:
    """Returns the state as JSON values; arrays as base64 of their bytes, so that nothing is
    rounded."""
    return {
        "informative_rate": state.informative_rate,
        "prefilter": prompt_filter.state_to_json(state.prefilter),
        "begun": partial_rollouts.to_json(state.begun),
    }


def state_from_json(values: dict[str, Any]) -> SamplingState:
    """The inverse of `state_to_json`."""
    return SamplingState(
        values["informative_rate"],
        prompt_filter.state_from_json(values["prefilter"]),
        partial_rollouts.from_json(values["begun"]),
    )
