"""Which of the answers to a problem are the same, for the majority vote of cons@k."""

from collections.abc import Mapping, Sequence

from dapo_jax.reward import Rubric, Task
from dapo_jax.reward_pool import RewardPool
from dapo_jax.scorers import EQUIVALENCES
from dapo_jax.types import Attempts


def equivalences(rubrics: Mapping[str, Rubric]) -> set[str]:
    """The scorers that `votes` asks for, beside those of the rubrics."""
    first = {rubric.scorers[0][0] for rubric in rubrics.values()}
    return {EQUIVALENCES[name] for name in first if name in EQUIVALENCES}


def votes(
    groups: Sequence[Attempts], rubrics: Mapping[str, Rubric], pool: RewardPool
) -> list[list[str | None]] | None:
    """The answer that each response votes for, for each group; equal answers as one text. None
    where a scorer does not tell the answers that it reads.

    Answers are equal if their texts are. With a scorer whose answers may differ as texts and be
    equal (math_verify), correct ones are equal to the reference and so to each other, and wrong
    ones are compared in pairs, as far as they can decide the vote.
    """
    said = [verdict for group in groups for verdict in group.verdicts]
    if any(verdict.correct and verdict.extracted is None for verdict in said):
        return None
    answers = [[verdict.extracted for verdict in group.verdicts] for group in groups]
    pairs: list[tuple[int, str, str]] = []
    tasks: list[Task] = []
    for q, group in enumerate(groups):
        scorer = EQUIVALENCES.get(rubrics[group.problem.source].scorers[0][0])
        if scorer is None:
            continue
        right = [v.extracted for v in group.verdicts if v.correct]
        wrong = [v.extracted for v in group.verdicts if not v.correct and v.extracted is not None]
        if right:
            answers[q] = [right[0] if v.correct else v.extracted for v in group.verdicts]
        texts = list(dict.fromkeys(wrong))
        if len(wrong) < len(right):  # even together they lose
            continue
        for i, ours in enumerate(texts):
            for theirs in texts[:i]:
                pairs.append((q, ours, theirs))
                tasks.append(Task((scorer,), ours, theirs))
    for (q, ours, theirs), scored in zip(pairs, pool.score(tasks)):
        if not isinstance(scored.scores, str) and scored.scores[0].correct:
            answers[q] = _joined(answers[q], ours, theirs, groups[q])
    return answers


def _joined(
    answers_K: list[str | None], ours: str, theirs: str, group: Attempts
) -> list[str | None]:
    """The votes for `ours` and for `theirs` as votes for one answer."""
    named = {verdict.extracted: vote for verdict, vote in zip(group.verdicts, answers_K)}
    return [named[theirs] if vote == named[ours] else vote for vote in answers_K]
