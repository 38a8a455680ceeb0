"""Metrics of a step's rollout; docs/metrics.md says what each means."""

from collections.abc import Mapping, Sequence

import numpy as np

from dapo_jax.rewards.reflection import find_reflection
from dapo_jax.rollout.dynamic_sampling import Batch
from dapo_jax.rollout.scheduler import RolloutStats
from dapo_jax.types import Attempts, Group, Response, RunError

MOST_EXTRA = 1e30  # of a scorer's own numbers
MOST_SEARCHED = 512  # responses of a step that are searched for reflection
MAX_FAULTS = 0.05  # share of a step's responses without a verdict that needs no warning


def sampling_metrics(
    batch: Batch, *, ends_repetition: bool = False, ends_thinking: bool = False
) -> dict[str, float]:
    """Returns what was sampled and what the filter kept.

    Args:
        ends_repetition: whether responses that repeat themselves are ended.
        ends_thinking: whether thinking that has not ended by itself is ended.
    """
    sampled, kept = batch.sampled, batch.groups
    metrics: dict[str, float] = {
        "sampling/prompts_tried": len(sampled),
        "sampling/prompts_kept": len(kept),
        "sampling/prompts_all_right": sum(g.num_correct == len(g.responses) for g in sampled),
        "sampling/prompts_all_wrong": sum(g.num_correct == 0 for g in sampled),
        "perf/prompts_returned": batch.num_returned,
        "sampling/scorer_faults": sum(v.failed for g in sampled for v in g.verdicts),
        **_accuracy_by_source(sampled),
        **_scorer_extras(sampled),
    }
    if sampled:
        responses = [response for group in sampled for response in group.responses]
        lengths = np.array([len(response.tokens) for response in responses])
        metrics |= {
            "accuracy/sampled": _accuracy(sampled),
            "length/mean": float(lengths.mean()),
            "length/max": float(lengths.max()),
            "length/truncated_share": _share_ended(responses, "length"),
            "rollout/invalid": sum(response.invalid for response in responses),
            "reflection/share": _reflection_share(responses),
        }
        if ends_repetition:
            metrics["rollout/ended_repetition"] = _share_ended(responses, "repetition")
        if ends_thinking:
            ended = [not response.sampled.all() for response in responses]
            metrics["rollout/ended_thinking"] = float(np.mean(ended))
    if kept:
        metrics["accuracy/trained"] = _accuracy(kept)
    return metrics


def rollout_metrics(
    stats: RolloutStats, seconds: Mapping[str, float], num_replicas: int
) -> dict[str, float]:
    """Returns throughput and use of the slots; `stats` are of all replicas, `seconds` by
    phase, of the process that generated longest."""
    rollout_seconds = max(seconds["rollout"], 1e-9)
    both_seconds = rollout_seconds + seconds["reward"]
    numbers: dict[str, float] = {
        "perf/tokens_per_second": stats.tokens / rollout_seconds,
        "perf/idle_share": min(1.0, stats.idle_seconds / (num_replicas * both_seconds)),
        "perf/preempted": stats.preempted,
    }
    if stats.discarded:
        numbers["perf/tokens_discarded"] = stats.discarded
    if stats.slots_offered:
        numbers["perf/slot_occupancy"] = stats.busy_slots / stats.slots_offered
    if stats.could_sample:
        numbers["perf/slot_utilisation"] = stats.sampled / stats.could_sample
    return numbers


def carry_metrics(batch: Batch, step: int) -> dict[str, float]:
    """Returns how many tokens earlier steps sampled, and how old they are."""
    responses = [response for group in batch.sampled for response in group.responses]
    staleness = [step - r.versions for r in responses if r.versions is not None]  # by token
    stale_tokens = sum(int((s > 0).sum()) for s in staleness)
    return {
        "carry/tokens_resumed": stale_tokens,
        "carry/share": stale_tokens / max(1, sum(len(r.tokens) for r in responses)),
        "carry/responses_finished": sum(bool((s > 0).all()) for s in staleness),
        "carry/staleness_max": max((int(s.max()) for s in staleness), default=0),
        "carry/stale_responses": batch.num_stale,
        "carry/tokens_kept": batch.carried_tokens,
    }


def _reflection_share(responses: Sequence[Response]) -> float:
    """Returns the share of responses with reflection, of some of them: the search in a long text
    takes 10 ms, in which the devices wait."""
    some = responses[:: -(-len(responses) // MOST_SEARCHED)]
    return float(np.mean([find_reflection(response.text) is not None for response in some]))


def _share_ended(responses: Sequence[Response], reason: str) -> float:
    return float(np.mean([response.finish_reason == reason for response in responses]))


def _accuracy(groups: Sequence[Group]) -> float:
    return float(np.mean([v.correct for g in groups for v in g.verdicts]))


def _accuracy_by_source(groups: Sequence[Group]) -> dict[str, float]:
    by_source: dict[str, list[Group]] = {}
    for group in groups:
        by_source.setdefault(group.problem.source, []).append(group)
    if len(by_source) < 2:
        return {}
    return {f"accuracy/sampled/{name}": _accuracy(by_source[name]) for name in sorted(by_source)}


def _scorer_extras(groups: Sequence[Group]) -> dict[str, float]:
    """Returns means of the scorers' extra numbers below MOST_EXTRA, over the responses with one."""
    found: dict[str, list[float]] = {}
    for verdict in (verdict for group in groups for verdict in group.verdicts):
        for name, value in (verdict.extra or {}).items():
            # The scorer's numbers are of any size: their mean must not end the run.
            if isinstance(value, (int, float)) and abs(value) < MOST_EXTRA:
                found.setdefault(name, []).append(float(value))
    return {f"scorer/{name}": float(np.mean(values)) for name, values in sorted(found.items())}


def check_finite(sampled: Sequence[Group]) -> None:
    """Raises RunError where all responses of a step ended with logits that are not finite."""
    responses = [response for group in sampled for response in group.responses]
    if responses and all(response.invalid for response in responses):
        raise RunError(
            f"the logits of all {len(responses)} responses were not finite. The checkpoints before "
            "this step are intact. A lower config.optimizer.learning_rate, or float32 in "
            "config.model.compute_dtype, is the usual remedy."
        )


def scorer_faults(groups: Sequence[Group | Attempts]) -> str:
    """Returns a warning about responses that no scorer could judge; "" where they are few.

    Raises:
        RunError: no response has a verdict.
    """
    verdicts = [verdict for group in groups for verdict in group.verdicts]
    faults = [verdict.note for verdict in verdicts if verdict.failed]
    if len(faults) < max(1, MAX_FAULTS * len(verdicts)):
        return ""
    what = f"{len(faults)} of {len(verdicts)} responses could not be scored, such as: {faults[0]}"
    if len(faults) == len(verdicts):
        raise RunError(
            f"{what}. Look at the scorer (config.reward.scorer, or that of a source in "
            "config.data), and at config.reward.timeout_seconds."
        )
    return what
