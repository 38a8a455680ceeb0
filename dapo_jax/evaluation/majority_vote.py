"""Equal answers to a problem, for the majority vote of cons@k."""

from collections.abc import Callable, Mapping, Sequence

from dapo_jax.rewards.pool import RewardPool
from dapo_jax.rewards.scorers import EQUIVALENCES, SCORERS
from dapo_jax.rewards.types import Rubric, Task
from dapo_jax.types import Attempts

REPORTING = SCORERS.keys() - {"answer_format"}  # scorers that report the answers that they read


def equivalences(rubrics: Mapping[str, Rubric]) -> set[str]:
    """Returns the scorers that `votes` calls in addition to those of the rubrics."""
    first = {rubric.scorers[0][0] for rubric in rubrics.values()}
    return {EQUIVALENCES[name] for name in first if name in EQUIVALENCES}


def votes(
    groups: Sequence[Attempts],
    rubrics: Mapping[str, Rubric],
    pool: RewardPool,
    moved: Callable[[], None] = lambda: None,
) -> list[list[str | None]] | None:
    """Returns the answer that each response of each group votes for, equal answers as one text.

    Answers with equal texts are equal. Different texts may be equal too with math_verify: correct
    answers equal the reference and so each other, and wrong ones are compared in pairs where they
    can decide the vote. Returns None if a scorer does not report the answers that it reads.

    Args:
        moved: called as comparisons arrive.
    """
    verdicts = [verdict for group in groups for verdict in group.verdicts]
    if any(verdict.correct and verdict.extracted is None for verdict in verdicts):
        return None
    named = {rubric.scorers[0][0] for rubric in rubrics.values()}
    if not named & REPORTING and all(verdict.extracted is None for verdict in verdicts):
        return None
    same = [{v.extracted: v.extracted for v in group.verdicts} for group in groups]
    pairs: list[tuple[int, str, str]] = []
    tasks: list[Task] = []
    for q, group in enumerate(groups):
        scorer = EQUIVALENCES.get(rubrics[group.problem.source].scorers[0][0])
        if scorer is None:
            continue
        right = [v.extracted for v in group.verdicts if v.correct]
        wrong = [v.extracted for v in group.verdicts if not v.correct and v.extracted is not None]
        same[q] |= dict.fromkeys(right, right[0] if right else None)
        texts = list(dict.fromkeys(wrong))
        # Without a right answer the credit is 0 whichever wins. Fewer wrong ones lose anyway.
        if not right or len(wrong) < len(right):
            continue
        for i, ours in enumerate(texts):
            for theirs in texts[:i]:
                pairs.append((q, ours, theirs))
                tasks.append(Task((scorer,), ours, theirs))
    for (q, ours, theirs), scored in zip(pairs, pool.score(tasks, moved)):
        if not isinstance(scored.scores, str) and scored.scores[0].correct:
            old, new = same[q][ours], same[q][theirs]
            same[q] = {text: new if vote == old else vote for text, vote in same[q].items()}
    return [[same[q][v.extracted] for v in group.verdicts] for q, group in enumerate(groups)]
