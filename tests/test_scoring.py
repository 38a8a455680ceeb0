"""Responses are scored while others are drawn, and their verdicts find their places."""

import numpy as np

from dapo_jax.reward import Rubric, Score
from dapo_jax.reward_pool import Pending, RewardPool, Scored
from dapo_jax.scoring import HANDED_OVER_TOGETHER, Scoring
from dapo_jax.types import Problem, Response


def response(text, tokens=(0,)):
    values = np.zeros(len(tokens), np.float32)
    return Response(np.array(tokens, np.int32), values, "stop", text)


def test_verdicts_find_their_places_in_any_order_of_ending():
    problems = [Problem(i, "", (1,), str(i), "test") for i in (5, 6)]
    rubrics = {"test": Rubric((("tests.scorers:treacherous", 1.0),), 1.0, -1.0)}
    with RewardPool(rubrics["test"].names, workers=2, timeout_seconds=5.0) as pool:
        scoring = Scoring(pool, problems, rubrics)
        drawn = [[response("5"), response("raise")], [response("5"), response("6")]]
        scoring.submit([(1, 1, drawn[1][1])])
        scoring.submit([(0, 1, drawn[0][1]), (1, 0, drawn[1][0])])
        scoring.submit([(0, 0, drawn[0][0])])
        groups = scoring.groups(drawn, 3)
    assert [[v.correct for v in group.verdicts] for group in groups] == [
        [True, False],
        [False, True],
    ]
    assert groups[0].verdicts[1].note.startswith("error: ZeroDivisionError")
    assert [group.problem.id for group in groups] == [5, 6] and groups[0].step == 3
    assert groups[1].responses == tuple(drawn[1])


def test_every_source_has_its_own_rubric():
    """Scorers, weights and rewards are those of the problem's source, and all that is known of a
    response reaches them."""
    lists, plain = "tests.scorers:of_lists", "tests.scorers:plain"
    rubrics = {
        "a": Rubric(((plain, 1.0),), 1.0, -1.0),
        "b": Rubric(((lists, 1.0), (plain, 2.0)), 10.0, 0.0),
    }
    problems = [
        Problem(0, "", (1,), "7", "a", metadata={"level": 1}),
        Problem(1, "", (1,), "8", "b", metadata={"level": 2}),
        Problem(2, "", (1,), "7", "b"),
    ]
    drawn = [[response("7", (3, 4, 5))] for _ in problems]
    with RewardPool([lists, plain], workers=1, timeout_seconds=5.0) as pool:
        scoring = Scoring(pool, problems, rubrics)
        scoring.submit([(q, 0, responses[0]) for q, responses in enumerate(drawn)])
        verdicts = [group.verdicts[0] for group in scoring.groups(drawn, 1)]
    assert [v.correct for v in verdicts] == [True, False, True]
    assert [v.reward for v in verdicts] == [1.0, 0.5 + 2 * 0.0, 0.5 + 2 * 10.0]
    assert [v.extra for v in verdicts] == [
        None,
        {"token_ids": [3, 4, 5], "metadata": {"level": 2}},
        {"token_ids": [3, 4, 5], "metadata": None},
    ]


class StubPool(RewardPool):
    """Says what it is handed."""

    def __init__(self):
        self.handed = []

    def submit(self, tasks):
        self.handed.append(len(tasks))
        return Pending(list(tasks), {}, [])

    def collect(self, pending):
        return [Scored((Score(task.text == task.answer),), 0.0) for task in pending.tasks]


def test_responses_are_handed_over_many_at_a_time():
    pool, many = StubPool(), HANDED_OVER_TOGETHER
    scoring = Scoring(
        pool, [Problem(0, "", (1,), "7", "a")], {"a": Rubric((("x", 1.0),), 1.0, 0.0)}
    )
    for sample in range(2 * many + 3):
        scoring.submit([(0, sample, response("7" if sample % 3 else "8"))])
        assert sum(pool.handed) == (sample + 1) // many * many
    scoring.submit([])
    verdicts = scoring.verdicts()
    assert pool.handed == [many, many, 3]
    assert [verdicts[0, sample].correct for sample in range(2 * many + 3)] == [
        bool(sample % 3) for sample in range(2 * many + 3)
    ]
