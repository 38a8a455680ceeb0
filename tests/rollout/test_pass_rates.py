"""Pass rates of training problems: what is recorded, and which problems are passed over."""

import json
from types import SimpleNamespace

import pytest

from dapo_jax.data.stream import ProblemStream
from dapo_jax.rollout import pass_rates
from dapo_jax.rollout.pass_rates import PassRate
from dapo_jax.setup import RunComponents
from dapo_jax.types import Problem, RunError, UserError
from tests.support.helpers import make_group, tiny_config
from tests.support.runs import metrics_of, run_here

PROBLEMS = [Problem(id, f"p{id}", (1,), "", "a") for id in range(10)]


def test_every_group_is_a_visit():
    first = pass_rates.with_groups({}, [make_group([True, False, False], id=3)])
    more = make_group([True, True], id=3), make_group([False], id=7)
    both = pass_rates.with_groups(first, more)
    assert first == {3: (PassRate(0, 1, 3),)}, "the earlier pass rates are as they were"
    assert both == {3: (PassRate(0, 1, 3), PassRate(0, 2, 2)), 7: (PassRate(0, 0, 1),)}
    assert pass_rates.from_json(json.loads(json.dumps(pass_rates.to_json(both)))) == both


def test_responses_without_a_verdict_do_not_count():
    group = make_group([True, False, True])
    failed = tuple(v._replace(note="timeout") for v in group.verdicts)
    invalid = tuple(r._replace(finish_reason="invalid") for r in group.responses)
    cut = tuple(r._replace(finish_reason="length") for r in group.responses)
    mixed = group._replace(verdicts=(failed[0], *group.verdicts[1:]), responses=cut)
    assert pass_rates.pass_rate_of(mixed) == PassRate(0, 1, 2), "a truncated response counts"
    assert pass_rates.pass_rate_of(group._replace(verdicts=failed)) is None
    assert pass_rates.with_groups({}, [group._replace(responses=invalid)]) == {}


@pytest.mark.parametrize(
    ("band", "expected"),
    [((0.0, 0.9), {4}), ((0.2, 0.8), {0, 3, 4}), ((0.0, 1.0), {4}), ((0.25, 0.75), {0, 3, 4})],
)
def test_the_latest_visit_decides(band, expected):
    correct = {0: [4, 0], 1: [0, 1], 2: [0, 2], 3: [4, 0], 4: [0, 4]}
    rates = {id: tuple(PassRate(i, n, 4) for i, n in enumerate(ns)) for id, ns in correct.items()}
    assert pass_rates.outside(rates, band) == expected


def test_the_stream_passes_over_problems_and_keeps_its_order():
    whole, part = ProblemStream(PROBLEMS, 5).take(40), ProblemStream(PROBLEMS, 5)
    view = part.without({1, 4, 9})
    wanted = [problem for problem in whole if problem.id not in {1, 4, 9}]
    taken = view.take(9)
    assert taken == wanted[:9]
    position = part.get_state()
    assert view.get_state() == position, "the two share their position"
    taken = view.take(5)
    part.set_state(position)
    assert part.without({1, 4, 9}).take(5) == taken == wanted[9:14]


def transcripts(path, correct, note="", invalid=False):
    sample = lambda correct: {"correct": correct, "note": note, "invalid": invalid}
    lines = [
        {"prompt": prompt, "samples": [sample(c) for c in of_prompt]}
        for prompt, of_prompt in correct.items()
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_pass_rates_measured_before_the_run(tmp_path):
    file = transcripts(tmp_path / "a.jsonl", {"p2": [True, False], "p7": [False], "other": [True]})
    assert pass_rates.measured(file, PROBLEMS, "f") == {2: ((-1, 1, 2),), 7: ((-1, 0, 1),)}
    for path, message in (
        (transcripts(tmp_path / "b.jsonl", {"other": [True]}), "has none of the 10 prompts"),
        (transcripts(tmp_path / "c.jsonl", {"p1": [True]}, note="timeout"), "has none of"),
        (transcripts(tmp_path / "d.jsonl", {"p1": [False]}, invalid=True), "has none of"),
        (str(tmp_path / "missing"), "cannot be read"),
        (str(tmp_path), "cannot be read"),
    ):
        with pytest.raises(UserError, match=rf"config\.data\.train\.a\.pass_rates.*{message}"):
            pass_rates.measured(path, PROBLEMS, "config.data.train.a.pass_rates")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data__pass_rate_band": (0.5, 0.5)}, r"pass_rate_band must be \(low, high\)"),
        ({"data__pass_rate_band": (0.0, 1.5)}, r"pass_rate_band\[1\] must be in \(0, 1\]"),
        ({"data__train__sums__pass_rates": "f"}, "pass_rates is not read when"),
        ({"data__heldout__sums__pass_rates": "f"}, "pass_rates is not read when"),
    ],
)
def test_mistakes_in_the_config(changes, message):
    with pytest.raises(UserError, match=message):
        tiny_config(**changes)


RUN = {
    "data__train__sums__num_problems": 12,
    "data__pass_rate_band": (0.0, 0.25),
    "dynamic_sampling__enabled": False,
    "train__num_steps": 5,
    "evaluation__every_steps": 5,
}


def visits_of(workdir):
    lines = (workdir / "pass_rates.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.slow
def test_a_run_passes_over_solved_problems_and_resumes(tmp_path, home):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_here(whole, home, **RUN)
    run_here(parts, home, **RUN | {"train__num_steps": 2})
    run_here(parts, home, **RUN)
    assert visits_of(parts) == visits_of(whole)
    retired, rates = set(), {}
    for line, numbers in zip(visits_of(whole), metrics_of(whole)[1:]):
        assert len(line["visits"]) == 4
        for problem, *_ in line["visits"]:
            assert problem not in retired, f"step {line['step']}"
        for problem, _, correct, responses in line["visits"]:
            rates[problem] = correct / responses
        retired = {problem for problem, rate in rates.items() if rate >= 0.25}
        assert numbers["sampling/problems_outside_band"] == len(retired)
    with pytest.raises(RunError, match=r"of the 12 problems .* config\.data\.pass_rate_band"):
        run_here(tmp_path / "ends", home, **RUN | {"data__pass_rate_band": (0.1, 1.0)})
    assert retired and line["visits"][0][1] == 1, "no second epoch: nothing was passed over"


def test_a_band_that_leaves_fewer_problems_than_a_batch_ends_the_run():
    problems = [Problem(i, "", (i,), "", "s") for i in range(6)]
    config = tiny_config(data__pass_rate_band=(0.1, 0.9))  # batches of 4

    def left(number):
        outside = lambda _: frozenset(range(number))
        run = SimpleNamespace(
            config=config, stream=ProblemStream(problems, 0), outside_band=outside
        )
        return {problem.id for problem in RunComponents.problems_in_band(run, None).take(12)}

    assert left(0) == set(range(6)) and left(2) == {2, 3, 4, 5}
    with pytest.raises(RunError, match=r"3 of the 6 problems .* fill no batch of .*\(4\)"):
        left(3)
