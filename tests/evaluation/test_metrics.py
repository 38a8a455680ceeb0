"""Metrics of the held-out problems: of all, and of each source."""

from types import SimpleNamespace

import numpy as np

from dapo_jax.evaluation.metrics import evaluate, statistics
from dapo_jax.rewards.types import Rubric
from dapo_jax.types import Group, Problem, Response, Verdict
from dapo_jax.utils.telemetry import SILENT
from tests.evaluation.test_votes import StubPool

RESPONSE = Response(np.zeros(3, np.int32), np.zeros(3, np.float32), "stop", "")
INVALID = RESPONSE._replace(finish_reason="invalid")
CUT = Response(np.zeros(9, np.int32), np.zeros(9, np.float32), "length", "")


def group(id, source, *right, last=RESPONSE):
    verdicts = tuple(Verdict(r, float(r), "7" if r else "8") for r in right)
    return Group(Problem(id, "", (1,), "7", source), (RESPONSE, last), verdicts, 0)


def metrics(groups):
    return evaluated(groups)[0]


def evaluated(groups):
    rubric = Rubric((("math_dapo", 1.0),), 1.0, -1.0)
    collector = SimpleNamespace(
        rubrics=dict.fromkeys("ab", rubric),
        pool=StubPool(None),
        collect=lambda *_: groups,
        telemetry=SILENT,
    )
    return evaluate(collector, [group.problem for group in groups], None)


def test_lengths_faults_and_the_interval_around_the_accuracy():
    groups = [group(0, "a", True, True), group(1, "a", True, False)]
    groups.append(group(2, "a", False, False, last=CUT))
    fault = groups[0].verdicts[0]._replace(correct=False, note="timeout")
    groups[0] = groups[0]._replace(verdicts=(fault, groups[0].verdicts[1]))
    found, attempts = evaluated(groups)
    assert (found["eval/length_mean"], found["eval/truncated_share"]) == (4.0, 1 / 6)
    assert found["eval/interval_low"] < found["eval/avg@2"] == 1 / 3 < found["eval/interval_high"]
    assert statistics(attempts, None)["faults"] == 1


def test_each_of_several_sources_has_the_metrics_that_it_has_alone():
    a = [group(0, "a", True, True), group(1, "a", True, False)]
    b = [group(2, "b", False, False, last=INVALID)]
    found = metrics(a + b)
    assert (found["eval/avg@2"], found["eval/invalid"]) == (0.5, 1)
    assert (found["eval/a/avg@2"], found["eval/b/avg@2"]) == (0.75, 0.0)
    assert (found["eval/a/invalid"], found["eval/b/invalid"]) == (0, 1)
    for source, own in (("a", a), ("b", b)):
        alone = {name.replace("eval/", f"eval/{source}/"): x for name, x in metrics(own).items()}
        assert alone.items() <= found.items()
