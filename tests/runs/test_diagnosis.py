"""Faults that the metrics of a run show: one run on each side of every threshold."""

import re
from pathlib import Path

import pytest

import dapo_jax
from dapo_jax.runs.report import diagnosis
from dapo_jax.runs.report.data import Run
from dapo_jax.runs.report.paper_curves import Curve
from tests.conftest import ROOT
from tests.runs.test_report import write_run

HEALTHY = {
    "policy/entropy": (0.5, 0.3),
    "accuracy/sampled": (0.2, 0.6),
    "length/truncated_share": (0.3, 0.05),
    "share/all_right": (0.0, 0.3),
    "share/all_wrong": (0.5, 0.2),
    "policy/clip_high_share": (0.01, 0.01),
    "policy/clip_low_share": (0.01, 0.01),
    "rollout/log_prob_mismatch_mean": (0.01, 0.012),
    "optimizer/skipped_updates": (0.0, 0.0),
    "sampling/prompts_tried": (20.0, 20.0),
    "sampling/scorer_faults": (0.0, 0.0),
}
HELDOUT = ((0.2, 0.15, 0.25), (0.5, 0.45, 0.55), (0.6, 0.55, 0.65))  # value, interval


def run_of(*, heldout=HELDOUT, steps=20, advantage="grpo", filtered=False, stages=(), **values):
    """A run of groups of 8 whose metrics change in the middle, evaluated at its start, middle and
    end. A name has __ for a slash."""
    metrics = HEALTHY | {name.replace("__", "/"): pair for name, pair in values.items()}
    lines = [{"step": 0}]
    for step in range(1, steps + 1):
        lines.append({name: pair[step > steps // 2] for name, pair in metrics.items()})
        lines[-1]["step"] = step
    for step, (value, low, high) in zip((0, steps // 2, steps), heldout):
        lines[step] |= {"eval/avg@k": value, "eval/interval_low": low, "eval/interval_high": high}
    config = {"rollout": {"group_size": 8}, "checkpoint": {"directory": None}, "stages": stages}
    config |= {"objective": {"advantage": advantage}, "dynamic_sampling": {"enabled": filtered}}
    frozen = {"config": config}
    return Run("a_run", Path("a_run"), 4, frozen, lines, None)


def names(run):
    return [found.name for found in diagnosis.diagnose(run)]


FAULTS = {
    "entropy collapsed": (
        dict(policy__entropy=(0.5, 0.09), accuracy__sampled=(0.2, 0.55)),
        dict(policy__entropy=(0.5, 0.11), accuracy__sampled=(0.2, 0.55)),
    ),
    "entropy exploded": (
        dict(policy__entropy=(0.5, 1.1), accuracy__sampled=(0.2, 0.25)),
        dict(policy__entropy=(0.5, 0.9), accuracy__sampled=(0.2, 0.25)),
    ),
    "responses run into the limit": (
        dict(length__truncated_share=(0.1, 0.11)),
        dict(length__truncated_share=(0.1, 0.09)),
    ),
    "training reward apart from held-out accuracy": (
        dict(accuracy__sampled=(0.2, 0.7), heldout=((0.2, 0.1, 0.3), (0.3, 0.2, 0.4))),
        dict(accuracy__sampled=(0.2, 0.5), heldout=((0.2, 0.1, 0.3), (0.3, 0.2, 0.4))),
    ),
    "held-out accuracy fell": (
        dict(heldout=((0.2, 0.1, 0.3), (0.6, 0.5, 0.7), (0.4, 0.35, 0.49))),
        dict(heldout=((0.2, 0.1, 0.3), (0.6, 0.5, 0.7), (0.4, 0.35, 0.51))),
    ),
    "nothing is learned": (
        dict(accuracy__sampled=(0.2, 0.21), heldout=((0.2, 0.1, 0.3), (0.3, 0.25, 0.4))),
        dict(accuracy__sampled=(0.2, 0.23), heldout=((0.2, 0.1, 0.3), (0.3, 0.25, 0.4))),
    ),
    "few prompts are informative": (
        dict(share__all_right=(0.0, 0.7), share__all_wrong=(0.5, 0.11)),
        dict(share__all_right=(0.0, 0.7), share__all_wrong=(0.5, 0.09)),
    ),
    "many tokens are clipped": (
        dict(policy__clip_high_share=(0.0, 0.2), policy__clip_low_share=(0.0, 0.11)),
        dict(policy__clip_high_share=(0.0, 0.2), policy__clip_low_share=(0.0, 0.09)),
    ),
    "rollout and trainer disagree": (
        dict(rollout__log_prob_mismatch_mean=(0.01, 0.06)),
        dict(rollout__log_prob_mismatch_mean=(0.06, 0.04)),
    ),
    "updates were skipped": (
        dict(optimizer__skipped_updates=(1.0, 0.0)),
        dict(optimizer__skipped_updates=(0.0, 0.0)),
    ),
    "the scorer fails": (
        dict(sampling__scorer_faults=(4.0, 0.0)),  # 40 of 3,200 responses
        dict(sampling__scorer_faults=(3.0, 0.0)),
    ),
}


def test_nothing_is_found_in_a_healthy_run():
    assert names(run_of()) == []
    assert "none of the 11 faults" in diagnosis.in_words(run_of())[0]
    assert len(diagnosis.CHECKS) == len(FAULTS)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_beyond_its_threshold_alone(name):
    sick, healthy = FAULTS[name]
    assert names(run_of(**sick)) == [name]
    assert names(run_of(**healthy)) == []


def test_certainty_and_cutting_are_no_faults_of_what_goes_well():
    """A policy that is right may be sure of it; a share that was halved is on its way down."""
    assert names(run_of(policy__entropy=(0.5, 0.01), accuracy__sampled=(0.2, 0.65))) == []
    assert names(run_of(length__truncated_share=(0.8, 0.35))) == []


def test_the_best_step_is_advised_where_it_has_a_checkpoint(tmp_path):
    sick, _ = FAULTS["held-out accuracy fell"]
    run = run_of(**sick)._replace(directory=tmp_path)
    best = max(run.steps, key=lambda numbers: numbers.get("eval/avg@k", 0.0))["step"]
    (tmp_path / "checkpoints" / str(best + 1)).mkdir(parents=True)
    advice = lambda: diagnosis.diagnose(run)[0].remedy
    assert best > 0 and "checkpoint" not in advice()
    (tmp_path / "checkpoints" / str(best)).mkdir()
    assert advice().startswith(f"the checkpoint of step {best}; ")


def test_problems_without_a_signal_are_too_easy_or_too_hard():
    easy = run_of(share__all_right=(0.0, 0.8), share__all_wrong=(0.5, 0.1))
    hard = run_of(share__all_right=(0.0, 0.1), share__all_wrong=(0.65, 0.8))
    worse = run_of(share__all_right=(0.0, 0.1), share__all_wrong=(0.55, 0.8))
    runs = (easy, hard, worse)
    remedies = [diagnosis.diagnose(run)[0].remedy.split(" problems")[0] for run in runs]
    assert remedies[:2] == ["harder", "easier"] and "learning_rate" in remedies[2]


@pytest.mark.parametrize("advantage", ["gae", "reinforce++", "remax"])
def test_prompts_all_right_or_all_wrong_are_no_fault_where_the_group_is_no_baseline(advantage):
    """Groups of one response are nothing else."""
    shares = {"share__all_right": (0.2, 0.6), "share__all_wrong": (0.8, 0.4)}
    assert names(run_of(**shares)) == ["few prompts are informative"]
    assert names(run_of(**shares, advantage=advantage)) == []
    by_stage = [[3, {"objective.advantage": advantage}]]
    assert names(run_of(**shares, stages=by_stage)) == []
    # Dynamic sampling leaves them out all the same.
    filtered = run_of(**shares, advantage=advantage, filtered=True)
    assert names(filtered) == ["few prompts are informative"]


@pytest.mark.parametrize("accuracy, wanted", [(0.1, "easier"), (0.9, "harder")])
def test_what_is_not_learned_is_too_hard_or_too_easy(accuracy, wanted):
    same = ((0.5, 0.4, 0.6), (0.5, 0.4, 0.6))
    (found,) = diagnosis.diagnose(run_of(accuracy__sampled=(accuracy, accuracy), heldout=same))
    assert found.name == "nothing is learned" and f"{wanted} problems" in found.remedy


@pytest.mark.parametrize("steps, judged", [(4, False), (5, True)])
def test_a_short_run_is_not_judged(steps, judged):
    run = run_of(steps=steps, optimizer__skipped_updates=(1.0, 1.0))
    assert (names(run) != []) == judged
    assert ("too few" in diagnosis.in_words(run)[0]) == (not judged)


@pytest.mark.parametrize("steps, wanted", [(4, (1, 4)), (20, (2.5, 18.5)), (100, (5.5, 95.5))])
def test_a_change_is_between_the_means_of_a_fifth_of_the_steps_and_of_ten_at_most(steps, wanted):
    lines = [{"step": step, "x": float(step)} for step in range(1, steps + 1)]
    assert diagnosis.change(run_of()._replace(steps=lines), "x") == wanted


@pytest.mark.parametrize(
    "first, last, trend",
    [
        (1.0, 1.2, "rises"),
        (1.0, 0.8, "falls"),
        (1.0, 1.05, "stays"),
        (-1.0, -0.8, "rises"),
        (0.0, 0.1, "rises"),
        (0.1, 0.0, "falls"),
        (0.0, 0.0, "stays"),
    ],
)
def test_a_trend_is_a_change_of_a_tenth_of_the_larger(first, last, trend):
    assert diagnosis.Change(first, last).trend == trend


def test_without_a_metric_its_checks_find_nothing():
    run = run_of()
    bare = run._replace(steps=[{"step": numbers["step"]} for numbers in run.steps])
    assert names(bare) == []


def test_trends_beside_the_papers():
    rising, falling = ((0.0, 1.0), (1.0, 2.0)), ((0.0, 2.0), (1.0, 1.0))
    curves = [
        Curve("policy/entropy", "paper, figure 7c: DAPO", rising),
        Curve("accuracy/sampled", "paper, figure 0: DAPO", rising),
        Curve("policy/clip_high_share", "paper, figure 0: DAPO", falling),
        Curve("share/all_right", "paper, figure 3b: baseline", rising),
        Curve("length/mean", "paper, figure 7a: DAPO", rising),
    ]
    lines = diagnosis.in_words(run_of(), curves)[1:]
    assert [line.split(": ")[1].split(", from")[0] for line in lines] == [
        "unlike the paper, policy/entropy falls",
        "like the paper, accuracy/sampled rises",
        "unlike the paper, policy/clip_high_share stays",
    ]
    assert "from 0.5 to 0.3" in lines[0] and "figure 7c: DAPO: rises, from 1 to 2" in lines[0]


def test_every_fault_and_threshold_is_documented():
    text = (ROOT / "docs" / "diagnose.md").read_text()
    headings = [line[3:].lower() for line in text.splitlines() if line.startswith("## ")]
    assert [name for name in FAULTS if name not in headings] == []
    stated = dict(re.findall(r"`([A-Z_]+)` = ([\d.]+)", text))
    thresholds = {k: v for k, v in vars(diagnosis).items() if k.isupper() and k != "CHECKS"}
    assert {name: float(value) for name, value in stated.items()} == thresholds


def test_words_on_the_page_and_from_python(tmp_path):
    """This run is cut at the limit as often at its end as at its start."""
    run = write_run(tmp_path / "run")
    (line,) = dapo_jax.diagnose(run)
    assert line.startswith("run: RESPONSES RUN INTO THE LIMIT. ") and "10.0% to 10.0%" in line
    assert line in dapo_jax.report(run).read_text()
    assert len(dapo_jax.diagnose(run, paper=True)) > 1
