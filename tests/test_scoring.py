"""Responses are scored while others are drawn, and their verdicts find their places."""

import numpy as np

from dapo_jax.reward import Rubric
from dapo_jax.reward_pool import RewardPool
from dapo_jax.scoring import Scoring
from dapo_jax.types import Problem, Response


def response(text):
    return Response(np.zeros(1, np.int32), np.zeros(1, np.float32), "stop", text)


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
