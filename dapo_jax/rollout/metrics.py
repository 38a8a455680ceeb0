"""The numbers of a step's rollout: what was sampled, what the filter kept, how fast it went.

docs/metrics.md says what each means.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from dapo_jax.rollout.dynamic_sampling import Batch
from dapo_jax.rollout.prompt_filter import PrefilterState
from dapo_jax.rollout.scheduler import RolloutStats
from dapo_jax.types import Group, RunError

TOLD_FAULTS = 0.05  # share of a step's responses that scorers may fail on before it is told


def sampling_metrics(batch: Batch) -> dict[str, float]:
    """What was sampled and what the filter kept. Means over sampled responses unless named so."""
    sampled, kept = batch.sampled, batch.groups
    metrics: dict[str, float] = {
        "sampling/prompts_tried": len(sampled),
        "sampling/prompts_kept": len(kept),
        "sampling/prompts_all_right": sum(g.num_correct == len(g.responses) for g in sampled),
        "sampling/prompts_all_wrong": sum(g.num_correct == 0 for g in sampled),
        "perf/prompts_returned": batch.returned,
        "sampling/scorer_faults": sum(v.failed for g in sampled for v in g.verdicts),
        **_of_sources(sampled),
        **_extras(sampled),
    }
    if sampled:
        lengths = np.array([len(r.tokens) for g in sampled for r in g.responses])
        metrics |= {
            "accuracy/sampled": _accuracy(sampled),
            "length/mean": float(lengths.mean()),
            "length/max": float(lengths.max()),
            "length/truncated_share": float(
                np.mean([r.truncated for g in sampled for r in g.responses])
            ),
        }
    if kept:
        metrics["accuracy/trained"] = _accuracy(kept)
    return metrics


def rollout_metrics(
    stats: RolloutStats, seconds: Mapping[str, float], num_replicas: int
) -> dict[str, float]:
    """Returns throughput and use of the slots.

    Args:
        stats: of all replicas together.
        seconds: of this process, by phase.
    """
    rollout_seconds = max(seconds["rollout"], 1e-9)
    numbers: dict[str, float] = {
        "perf/tokens_per_second": stats.tokens / rollout_seconds,
        "perf/idle_share": min(1.0, stats.idle_seconds / (num_replicas * rollout_seconds)),
        "rollout/preempted": stats.preempted,
        "rollout/invalid": stats.invalid,
    }
    if stats.slots_offered:
        numbers["perf/slot_occupancy"] = stats.busy_slots / stats.slots_offered
    if stats.could_sample:
        numbers["perf/slot_utilisation"] = stats.sampled / stats.could_sample
    return numbers


def partial_metrics(batch: Batch, step: int) -> dict[str, float]:
    """How much of what was sampled was begun in earlier steps, and how old it is."""
    responses = [response for group in batch.sampled for response in group.responses]
    lags = [step - r.versions for r in responses if r.versions is not None]
    continued = sum(int((lag > 0).sum()) for lag in lags)
    return {
        "partial/tokens_continued": continued,
        "partial/share": continued / max(1, sum(len(r.tokens) for r in responses)),
        "partial/responses_finished": sum(bool((lag > 0).all()) for lag in lags),
        "partial/staleness_max": max((int(lag.max()) for lag in lags), default=0),
        "partial/samples_too_old": batch.too_old,
        "perf/partial_tokens_kept": batch.tokens_kept,
    }


def prefilter_metrics(batch: Batch, state: PrefilterState) -> dict[str, float]:
    """What was left out before sampling, and with which probabilities.

    Args:
        state: before the step.
    """
    return {
        "prefilter/prompts_skipped": batch.skipped,
        "prefilter/skipped_share": batch.skipped / max(1, batch.skipped + len(batch.sampled)),
        "prefilter/p_easy": state.p_easy,
        "prefilter/p_hard": state.p_hard,
    }


def _accuracy(groups: Sequence[Group]) -> float:
    return float(np.mean([v.correct for g in groups for v in g.verdicts]))


def _of_sources(groups: Sequence[Group]) -> dict[str, float]:
    """Accuracy by source, where there are several."""
    sources = sorted({group.problem.source for group in groups})
    return {
        f"accuracy/sampled/{name}": _accuracy([g for g in groups if g.problem.source == name])
        for name in (sources if len(sources) > 1 else ())
    }


def _extras(groups: Sequence[Group]) -> dict[str, float]:
    """Means of the numbers that scorers give besides, over the responses that have them."""
    found: dict[str, list[float]] = {}
    for group in groups:
        for verdict in group.verdicts:
            for name, value in (verdict.extra or {}).items():
                if isinstance(value, (int, float)):
                    found.setdefault(name, []).append(float(value))
    return {f"scorer/{name}": float(np.mean(values)) for name, values in sorted(found.items())}


def check_finite(sampled: Sequence[Group]) -> None:
    """Checks that some response of a step ended with finite logits.

    Raises:
        RunError: none did: the parameters are not finite, and nothing can be trained on.
    """
    responses = [response for group in sampled for response in group.responses]
    if responses and all(response.invalid for response in responses):
        raise RunError(
            f"the logits of all {len(responses)} responses were not finite. The checkpoints before "
            "this step are intact. A lower config.optimizer.learning_rate, or float32 in "
            "config.model.compute_dtype, is the usual remedy."
        )


def scorer_faults(sampled: Sequence[Group]) -> str:
    """What to tell of responses that no scorer could judge; "" where they are few.

    Raises:
        RunError: there is no other: the scorer fails, and not the model.
    """
    verdicts = [verdict for group in sampled for verdict in group.verdicts]
    faults = [verdict.note for verdict in verdicts if verdict.failed]
    if len(faults) < max(1, TOLD_FAULTS * len(verdicts)):
        return ""
    what = f"{len(faults)} of {len(verdicts)} responses could not be scored, such as: {faults[0]}"
    if len(faults) == len(verdicts):
        raise RunError(
            f"{what}. Look at the scorer (config.reward.scorer, or that of a source in "
            "config.data), and at config.reward.timeout_seconds."
        )
    return what
