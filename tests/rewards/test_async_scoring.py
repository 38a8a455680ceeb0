"""Responses are scored while others are generated, and assembled to groups."""

import numpy as np

from dapo_jax.rewards.async_scoring import RESPONSES_PER_TASK, GroupScoring
from dapo_jax.rewards.pool import Pending, RewardPool, Scored
from dapo_jax.rewards.types import Rubric, Score
from dapo_jax.types import Problem, Response


def response(text, tokens=(0,)):
    values = np.zeros(len(tokens), np.float32)
    return Response(np.array(tokens, np.int32), values, "stop", text)


def groups_of(scoring, number):
    """So many groups, by the numbers of their prompts."""
    found = {}
    while len(found) < number:
        found |= dict(scoring.completed())
    return found


def test_verdicts_find_their_places_in_any_order_of_ending():
    problems = {n: Problem(i, "", (1,), str(i), "test") for n, i in ((3, 5), (8, 6))}
    rubrics = {"test": Rubric((("tests.support.scorers:treacherous", 1.0),), 1.0, -1.0)}
    with RewardPool(rubrics["test"].names, workers=2, timeout_seconds=5.0) as pool:
        scoring = GroupScoring(pool, rubrics, 2, 7)
        responses = {3: [response("5"), response("raise")], 8: [response("5"), response("6")]}
        for places in ([(8, 1)], [(3, 1), (8, 0)], [(3, 0)]):
            scoring.submit([(n, problems[n], g, responses[n][g]) for n, g in places])
        groups = groups_of(scoring, 2)
    assert [v.correct for v in groups[3].verdicts] == [True, False]
    assert [v.correct for v in groups[8].verdicts] == [False, True]
    assert groups[3].verdicts[1].note.startswith("error: ZeroDivisionError")
    assert groups[3].problem.id == 5 and groups[8].problem.id == 6 and groups[3].step == 7
    assert groups[8].responses == tuple(responses[8])
    assert not list(scoring.completed()), "each group once"


def test_every_source_has_its_own_rubric():
    """Scorers, weights and rewards are those of the problem's source, and all that is known of a
    response reaches them."""
    lists, plain = "tests.support.scorers:of_lists", "tests.support.scorers:plain"
    rubrics = {
        "a": Rubric(((plain, 1.0),), 1.0, -1.0),
        "b": Rubric(((lists, 1.0), (plain, 2.0)), 10.0, 0.0),
    }
    problems = [
        Problem(0, "", (1,), "7", "a", metadata={"level": 1}),
        Problem(1, "", (1,), "8", "b", metadata={"level": 2}),
        Problem(2, "", (1,), "7", "b"),
    ]
    with RewardPool([lists, plain], workers=1, timeout_seconds=5.0) as pool:
        scoring = GroupScoring(pool, rubrics, 1, 1)
        scoring.submit([(q, p, 0, response("7", (3, 4, 5))) for q, p in enumerate(problems)])
        groups = groups_of(scoring, 3)
    verdicts = [groups[q].verdicts[0] for q in range(3)]
    assert [v.correct for v in verdicts] == [True, False, True]
    assert [v.reward for v in verdicts] == [1.0, 0.5 + 2 * 0.0, 0.5 + 2 * 10.0]
    assert [v.extra for v in verdicts] == [
        None,
        {"token_ids": [3, 4, 5], "metadata": {"level": 2}},
        {"token_ids": [3, 4, 5], "metadata": None},
    ]


class StubPool(RewardPool):
    """Scores at once what it is handed."""

    def __init__(self):
        self.handed = []

    def submit(self, tasks):
        self.handed.append(len(tasks))
        return Pending(list(tasks), {}, [])

    def ready(self, pending):
        return True

    def collect(self, pending):
        return [Scored((Score(task.text == task.answer),), 0.0) for task in pending.tasks]


def test_responses_are_handed_over_many_at_a_time():
    pool, many = StubPool(), RESPONSES_PER_TASK
    rubrics = {"a": Rubric((("x", 1.0),), 1.0, 0.0)}
    scoring = GroupScoring(pool, rubrics, 2 * many + 3, 1)
    problem = Problem(0, "", (1,), "7", "a")
    for sample in range(2 * many + 3):
        scoring.submit([(0, problem, sample, response("7" if sample % 3 else "8"))])
        assert sum(pool.handed) == (sample + 1) // many * many
    ((number, group),) = scoring.completed()
    assert pool.handed == [many, many, 3] and number == 0
    assert [v.correct for v in group.verdicts] == [bool(i % 3) for i in range(2 * many + 3)]
