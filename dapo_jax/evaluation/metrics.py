"""Evaluation metrics: k scored samples of every problem, and the figures reported of them."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from dapo_jax.evaluation import estimators
from dapo_jax.evaluation.majority_vote import votes
from dapo_jax.rollout.collector import RolloutCollector
from dapo_jax.types import Attempt, Attempts, Group, Problem
from dapo_jax.utils.bootstrap import bootstrap_interval

RESAMPLES = 2000  # of the problems, for each interval


def evaluate(
    collector: RolloutCollector, problems: Sequence[Problem], key: jax.Array
) -> tuple[dict[str, float], list[Attempts]]:
    """Returns the metrics `eval/...` of the engine's weights over all problems, and the responses.

    Several sources also have metrics `eval/<source>/...` each. The processes of the run generate a
    share each, and all return the same.
    """
    compare = functools.partial(
        votes, rubrics=collector.rubrics, pool=collector.pool, moved=collector.telemetry.moved
    )
    groups = [attempts_of(group) for group in collector.collect(problems, key)]
    metrics = _metrics(groups, compare(groups), "eval")
    sources = dict.fromkeys(problem.source for problem in problems)
    for source in sources if len(sources) > 1 else ():
        of_source = [group for group in groups if group.problem.source == source]
        metrics |= _metrics(of_source, compare(of_source), f"eval/{source}")
    return metrics, groups


def attempts_of(group: Group) -> Attempts:
    """Returns the parts of a group that an evaluation keeps."""
    return Attempts(
        group.problem,
        tuple(
            Attempt(r.text, len(r.tokens), r.truncated, verdict, r.invalid)
            for r, verdict in zip(group.responses, group.verdicts, strict=True)
        ),
    )


def _metrics(
    groups: Sequence[Attempts], answers_QK: Sequence[Sequence[str | None]] | None, prefix: str
) -> dict[str, float]:
    n = len(groups[0].attempts)
    figures = statistics(groups, answers_QK, ks=[n])
    low, high = figures[f"avg@{n}"]["interval"]
    wanted = (f"avg@{n}", f"pass@{n}", f"cons@{n}")
    return {
        **{f"{prefix}/{name}": figures[name]["value"] for name in wanted if name in figures},
        f"{prefix}/interval_low": low,
        f"{prefix}/interval_high": high,
        f"{prefix}/length_mean": figures["length_mean"],
        f"{prefix}/truncated_share": figures["truncated_share"],
        f"{prefix}/invalid": figures["invalid"],
    }


def statistics(
    groups: Sequence[Attempts],
    answers_QK: Sequence[Sequence[str | None]] | None,
    *,
    ks: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Returns the figures that are reported for n responses to each problem.

    avg@n, cons@n and pass@k are dicts of "value" and "interval", the 95 % bootstrap interval over
    problems. Over responses: mean length in tokens, the truncated share, the share without an
    answer that the scorer found, and the numbers of invalid responses and of scorer faults.

    Args:
        groups: n responses each.
        answers_QK: see `votes`; None: no cons@n and no share of unparsed responses.
        ks: of pass@k; None: 1, 2, 4, ... and n.
    """
    n = len(groups[0].attempts)
    correct_QK = np.array([[v.correct for v in group.verdicts] for group in groups], bool)
    per_problem = {f"avg@{n}": estimators.avg_at_k(correct_QK)}
    if answers_QK is not None:
        per_problem[f"cons@{n}"] = estimators.cons_at_k(answers_QK, correct_QK)
    for k in estimators.powers_up_to(n) if ks is None else ks:
        per_problem[f"pass@{k}"] = estimators.pass_at_k(correct_QK, k)
    attempts = [attempt for group in groups for attempt in group.attempts]
    figures: dict[str, Any] = {
        name: {
            "value": float(values_Q.mean()),
            "interval": list(bootstrap_interval(values_Q, resamples=RESAMPLES)),
        }
        for name, values_Q in per_problem.items()
    }
    figures["length_mean"] = float(np.mean([a.length for a in attempts]))
    figures["truncated_share"] = float(np.mean([a.truncated for a in attempts]))
    if answers_QK is not None:
        figures["unparsed_share"] = float(np.mean([a.verdict.extracted is None for a in attempts]))
    figures["invalid"] = sum(a.invalid for a in attempts)
    figures["faults"] = sum(bool(a.verdict.note) for a in attempts)
    return figures
