"""Equal answers of the majority vote, against a plain clustering."""

import random

import numpy as np
import pytest

from dapo_jax.evaluation.estimators import cons_at_k
from dapo_jax.evaluation.majority_vote import equivalences, votes
from dapo_jax.rewards.pool import RewardPool, Scored
from dapo_jax.rewards.types import Rubric, Score
from dapo_jax.types import Group, Problem, Response, Verdict

RUBRICS = {
    "verified": Rubric((("math_verify", 1.0), ("answer_format", 0.1)), 1.0, -1.0),
    "by text": Rubric((("math_dapo", 1.0), ("math_verify", 0.5)), 1.0, -1.0),
}


class StubPool(RewardPool):
    """Scores two texts as equal if `equal` does; remembers the pairs."""

    def __init__(self, equal):
        self.equal, self.asked = equal, []

    def score(self, tasks, moved=lambda: None):
        for task in tasks:
            assert task.scorers == ("dapo_jax.rewards.scorers:equivalent_by_math_verify",)
        self.asked += [(task.text, task.answer) for task in tasks]
        return [Scored(self.verdict(task.text, task.answer), 0.0) for task in tasks]

    def verdict(self, ours, theirs):
        return (Score(self.equal(ours, theirs)),)


def group_of(answers, source="verified"):
    """A group of responses with these (extracted answer, correct)."""
    response = Response(np.zeros(1, np.int32), np.zeros(1, np.float32), "stop", "")
    verdicts = tuple(Verdict(right, float(right), extracted) for extracted, right in answers)
    problem = Problem(0, "", (1,), "7", source)
    return Group(problem, (response,) * len(answers), verdicts, 0)


def credit(groups, answers):
    """Returns the credit of the vote on each problem."""
    right = [[[v.correct for v in group.verdicts]] for group in groups]
    return [float(cons_at_k([a], r)[0]) for a, r in zip(answers, right, strict=True)]


def test_the_equivalence_of_the_first_scorer_is_needed():
    assert equivalences(RUBRICS) == {"dapo_jax.rewards.scorers:equivalent_by_math_verify"}
    assert equivalences({"by text": RUBRICS["by text"]}) == set()


def test_wrong_answers_that_are_equal_vote_together():
    """With math-verify itself."""
    half, other = ["1/2", "0.5", "\\frac12"], ["\\sqrt{4}", "2"]
    groups = [
        group_of([*((text, False) for text in half), ("7", True), ("7.0", True)]),
        group_of([*((text, False) for text in other), ("7", True), ("7.0", True), ("8", False)]),
        group_of([("7", True), (None, False), ("1/2", False), (None, False), ("0.4", False)]),
        group_of([("7", True), ("(1,2)", False), ("(2,1)", False)]),
        group_of([(None, False), (None, False)]),
    ]
    with RewardPool(equivalences(RUBRICS), workers=1, timeout_seconds=60.0) as pool:
        found = votes(groups, RUBRICS, pool)
    assert found is not None
    assert [len({*answers} - {None}) for answers in found] == [2, 3, 3, 3, 0]
    assert len({*found[0][:3]}) == 1 and found[0][3] == found[0][4] != found[0][0]
    assert found[2][1] is found[2][3] is None, "no answer is no vote"
    # Three halves outvote two sevens, two twos tie with them and share the credit; None abstains.
    assert credit(groups, found) == pytest.approx([0, 1 / 2, 1 / 3, 1 / 3, 0])
    by_text = [[v.extracted for v in group.verdicts] for group in groups]
    assert credit(groups, by_text) == pytest.approx([2 / 5, 2 / 5, 1 / 3, 1 / 3, 0])


def test_answers_of_other_scorers_are_equal_if_their_texts_are():
    groups = [group_of([("1/2", False), ("0.5", False), ("7", True), (None, False)], "by text")]
    pool = StubPool(lambda ours, theirs: True)
    assert votes(groups, RUBRICS, pool) == [["1/2", "0.5", "7", None]]
    assert not pool.asked


def test_a_scorer_that_does_not_report_the_answer_has_no_votes():
    groups = [group_of([("7", True), ("8", False)]), group_of([("7", True), (None, True)])]
    pool = StubPool(lambda ours, theirs: True)
    assert votes(groups, RUBRICS, pool) is None and not pool.asked
    assert votes(groups[:1], RUBRICS, pool) == [["7", "8"]]
    assert votes([group_of([(None, False)])], RUBRICS, pool) == [[None]]
    # Of one's own scorer it is not known before a response is right.
    own = {"verified": Rubric((("mine.py:equal", 1.0),), 1.0, -1.0)}
    assert votes([group_of([(None, False)])], own, pool) is None
    assert votes([group_of([("8", False), (None, False)])], own, pool) == [["8", None]]


def test_only_answers_that_can_decide_the_vote_are_compared():
    pool = StubPool(lambda ours, theirs: True)
    many = [("7", True)] * 3
    assert votes([group_of([*many, ("1", False), ("2", False)])], RUBRICS, pool) is not None
    assert pool.asked == []
    tied = group_of([*many, ("1", False), ("2", False), ("2", False), (None, False)])
    found = votes([tied], RUBRICS, pool)
    assert found is not None and pool.asked == [("2", "1")], "each pair of texts once"
    assert credit([tied], found) == [1 / 2]


def test_a_comparison_without_a_verdict_joins_nothing():
    class Faulty(StubPool):
        def verdict(self, ours, theirs):
            return "timeout"

    groups = [group_of([("1", False), ("2", False)])]
    assert votes(groups, RUBRICS, Faulty(None)) == [["1", "2"]]


def clusters(group, equal):
    """Returns the cluster of each response, from every pair, until nothing changes.

    Responses belong together if their texts are equal, if both are correct, or if both are wrong
    and equal, directly or through others.
    """
    verdicts = group.verdicts
    found = list(range(len(verdicts)))
    changed = True
    while changed:
        changed = False
        for i, a in enumerate(verdicts):
            for j, b in enumerate(verdicts):
                if a.extracted is None or b.extracted is None or found[i] <= found[j]:
                    continue
                wrong = not a.correct and not b.correct
                pair = equal(a.extracted, b.extracted) or equal(b.extracted, a.extracted)
                if a.extracted == b.extracted or (a.correct and b.correct) or (wrong and pair):
                    found[i], changed = found[j], True
    return [None if v.extracted is None else str(c) for v, c in zip(verdicts, found)]


def partition(answers):
    return [[a == b and a is not None for a in answers] for b in answers]


@pytest.mark.parametrize("seed", range(4))
def test_votes_are_those_of_a_plain_clustering(seed):
    """On random small groups; the relation need not be transitive, nor say the same both ways."""
    rng = random.Random(seed)
    compared = joined = 0
    for _ in range(250):
        texts = "abcdef"[: rng.randrange(1, 7)]
        pairs = {(a, b) for a in texts for b in texts if a < b and rng.random() < 0.3}

        def equal(ours, theirs, pairs=pairs):
            return (min(ours, theirs), max(ours, theirs)) in pairs

        answers = [rng.choice([None, *texts, *"xyz"]) for _ in range(rng.randrange(1, 9))]
        # x and y are right, z is now and then, as where a scorer reads more than the answer.
        right = [t in ("x", "y") or (t == "z" and rng.random() < 0.5) for t in answers]
        group = group_of(list(zip(answers, right)))
        pool = StubPool(equal)
        found = votes([group], RUBRICS, pool)
        wanted = clusters(group, equal)
        assert found is not None
        # Where comparing was not worth it the clusters are finer, and the vote is the same.
        assert credit([group], found) == pytest.approx(credit([group], [wanted])), group.verdicts
        if pool.asked or not pairs:
            assert partition(found[0]) == partition(wanted), (group.verdicts, pairs)
            compared += 1
            joined += partition(found[0]) != partition(answers)
    assert compared > 80 and joined > 20


def test_wrong_answers_alone_are_not_compared():
    """The usual case of a base model: no vote of theirs is worth anything."""
    pool = StubPool(lambda ours, theirs: True)
    groups = [group_of([(str(i), False) for i in range(32)])]
    found = votes(groups, RUBRICS, pool)
    assert pool.asked == [] and credit(groups, found) == [0.0]


def test_comparisons_that_arrive_are_movement():
    moved = []
    groups = [group_of([("7", True), *((f"\\sqrt{{{i}}}", False) for i in range(6))])]
    with RewardPool(equivalences(RUBRICS), workers=1, timeout_seconds=60.0) as pool:
        votes(groups, RUBRICS, pool, lambda: moved.append(1))
    assert len(moved) > 1


def test_groups_do_not_mix():
    """Several groups in one call, of several sources, are what each is alone."""
    equal = lambda ours, theirs: {ours, theirs} == {"1", "one"}
    groups = [
        group_of([("1", False), ("one", False), ("2", False), ("7", True)]),
        group_of([("1", False), ("one", False)], "by text"),
        group_of([("2", False), ("1", True), ("3", False), ("one", True)]),
        group_of([("one", False), ("3", False), ("1", False), ("7", True)]),
    ]
    together = votes(groups, RUBRICS, StubPool(equal))
    assert together is not None
    for group, found in zip(groups, together):
        assert [found] == votes([group], RUBRICS, StubPool(equal))
    assert [len(set(answers)) for answers in together] == [3, 2, 3, 3]
