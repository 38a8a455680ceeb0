"""Dynamic sampling: keep sampling until the batch holds only prompts with 0 < correct < G.

Source: DAPO, arXiv:2503.14476, section 3.2 and the constraint of eq. 11. The filter reads the raw
correctness of trained responses: a shaped reward would let all-wrong groups of unequal length
through. Groups are accepted in prompt order, never in completion order, which would favour short
answers and depend on timing. Prompts claimed beyond the batch return to the data. With dynamic
sampling off, every group is kept.
"""

from collections.abc import Iterable
from types import MappingProxyType
from typing import Any, NamedTuple

from dapo_jax.config import Config
from dapo_jax.distributed import ALONE, ProcessGroup
from dapo_jax.rollout import carry
from dapo_jax.rollout.carry import CarriedGroup
from dapo_jax.rollout.pass_rates import PassRates, from_json, to_json, with_groups
from dapo_jax.rollout.prompt_queue import CarryQueue, Outcome, PromptQueue, PromptSource
from dapo_jax.types import Group

# Weight of a step's informative rate in the running estimate of later steps.
NEW_WEIGHT = 0.5
# Within a step the estimate of earlier steps counts for this many outcomes: few enough to follow a
# step that differs, enough that the first outcomes, those of short responses, do not decide alone.
PRIOR_OUTCOMES = 16


class DynamicSamplingState(NamedTuple):
    """The state of dynamic sampling between steps, part of the checkpoint."""

    informative_rate: float = 0.5  # running estimate of the share of informative prompts
    carried: tuple[CarriedGroup, ...] = ()  # unfinished responses
    pass_rates: PassRates = MappingProxyType({})  # of the problems tried so far


class KeptPrompts(NamedTuple):
    """The prompts of a step that make the batch."""

    num_tried: int  # prompts, from the first of the step
    kept: list[int]  # numbers of the prompts whose groups are trained on


class Batch(NamedTuple):
    """The groups of one rollout step, with sampling statistics."""

    groups: list[Group]  # trained on, in prompt order
    sampled: list[Group]  # every group sampled in this step, before the filter
    num_returned: int = 0  # prompts claimed that returned to the data
    num_stale: int = 0  # carried responses discarded for the staleness of their group
    carried_tokens: int = 0  # tokens of responses that the next step resumes


def open_queue(
    config: Config,
    state: DynamicSamplingState,
    source: PromptSource,
    *,
    step: int,
    share: tuple[int, int] = (0, 1),
    group: ProcessGroup = ALONE,
) -> PromptQueue:
    """Returns the prompt queue of a rollout step; every process must ask for it.

    Args:
        source: of problems, at the position after the step before.
        share: index of this process's replica, and the number of replicas.
    """
    d, num_prompts = config.dynamic_sampling, config.train.prompts_per_step
    overlong_filter = config.objective.overlong_filter
    max_prompts = d.max_prompts if d.enabled else num_prompts
    keeps = lambda found: not d.enabled or found.is_informative(overlong_filter=overlong_filter)
    if config.rollout.carries:
        return CarryQueue(
            source,
            num_prompts=num_prompts,
            max_prompts=max_prompts,
            keeps=keeps,
            carried=carry.by_visit(_to_resume(config, state, step)[0]),
            ahead=carry.max_started(config, state.informative_rate),
            cut_delay_calls=carry.CUT_DELAY_CALLS,
            share=share,
            group=group,
        )
    if not d.enabled:
        return PromptQueue(source, num_prompts=num_prompts, max_prompts=max_prompts, group=group)
    return PromptQueue(
        source,
        num_prompts=num_prompts,
        max_prompts=max_prompts,
        keeps=keeps,
        rate=state.informative_rate,
        rate_weight=PRIOR_OUTCOMES,
        group=group,
    )


def _to_resume(
    config: Config, state: DynamicSamplingState, step: int
) -> tuple[tuple[CarriedGroup, ...], int]:
    return carry.without_stale(state.carried, step=step, max_staleness=config.rollout.max_staleness)


def take_kept(outcomes: Iterable[Outcome]) -> KeptPrompts:
    """Takes the outcomes of a step, in prompt order, and returns the prompts of its batch.

    Args:
        outcomes: see `RolloutCollector.outcomes`. They end where the batch is full.
    """
    tried = list(outcomes)
    return KeptPrompts(len(tried), [outcome.number for outcome in tried if outcome.kept])


def commit(
    config: Config, state: DynamicSamplingState, prompts: PromptQueue, taken: KeptPrompts, step: int
) -> tuple[Batch, DynamicSamplingState]:
    """Moves the data past the prompts tried; returns the batch and the state after the step.

    Every process must call it, and all get the same.
    """
    d = config.dynamic_sampling
    sampled = prompts.commit(taken.num_tried)
    kept = [sampled[number] for number in taken.kept]
    rate = next_rate(state.informative_rate, len(kept), len(sampled)) if d.enabled else 0.5
    carried, num_stale, num_returned = (), 0, prompts.num_returned
    if config.rollout.carries:
        fresh, num_stale = _to_resume(config, state, step)
        carried = carry.next_carried(
            fresh, prompts.problems, prompts.unfinished, num_tried=taken.num_tried, step=step
        )
        num_returned = len(carried)  # those claimed after the cut depend on time
    carried_tokens = sum(len(r.tokens) for group in carried for _, r in group.responses)
    batch = Batch(kept, sampled, num_returned, num_stale, carried_tokens)
    rates = with_groups(state.pass_rates, sampled)
    return batch, DynamicSamplingState(rate, carried, rates)


def next_rate(before: float, informative: int, sampled: int) -> float:
    """Returns the running estimate of the informative rate after a step."""
    if not sampled:
        return before
    return NEW_WEIGHT * (informative / sampled) + (1 - NEW_WEIGHT) * before


def state_to_json(state: DynamicSamplingState) -> dict[str, Any]:
    """Returns the state as JSON values; nothing is rounded."""
    return {
        "informative_rate": state.informative_rate,
        "carried": carry.to_json(state.carried),
        "pass_rates": to_json(state.pass_rates),
    }


def state_from_json(values: dict[str, Any]) -> DynamicSamplingState:
    """The inverse of `state_to_json`."""
    return DynamicSamplingState(
        values["informative_rate"],
        carry.from_json(values["carried"]),
        from_json(values["pass_rates"]),
    )
