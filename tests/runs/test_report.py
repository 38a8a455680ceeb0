"""The page of plots, from run directories written here. See also test_paper_curves.py."""

import errno
import json
import re
import struct

import pytest

from dapo_jax.runs.report import page as report
from dapo_jax.runs.report import paper_curves, plots
from dapo_jax.runs.report.data import load_runs
from dapo_jax.types import UserError
from tests.config.test_command_line import call, load_launcher
from tests.conftest import ROOT
from tests.support.helpers import tiny_config

launcher = load_launcher("report")


def write_run(directory, *, steps=6, summary=True, k=4, sources=(), updates=8):
    directory.mkdir(parents=True)
    config = tiny_config(evaluation__num_samples=k).to_dict()
    frozen = {"config": config, "versions": {"python": "3"}, "command": "train <now>"}
    (directory / "config.json").write_text(json.dumps(frozen))
    lines = []
    for step in range(steps + 1):
        numbers = {"step": step, "time/step": 1.0}
        if step:
            numbers |= {
                "reward/mean": -1 + 0.3 * step,
                "accuracy/sampled": 0.1 * step,
                "accuracy/trained": 0.12 * step,
                "length/mean": 10.0 + step,
                "length/max": 40.0,
                "length/truncated_share": 0.1,
                "policy/entropy": 1 / step,
                "policy/token_prob": 0.9,
                "sampling/prompts_tried": 8,
                "sampling/prompts_all_right": step,
                "sampling/prompts_all_wrong": 0,
                "optimizer/updates": updates,
            }
        if step % 2 == 0:
            numbers |= {f"eval/avg@{k}": 0.25 + 0.1 * step, f"eval/pass@{k}": 0.9}
            numbers |= {"eval/interval_low": 0.2, "eval/interval_high": 0.9}
            numbers |= {f"eval/{s}/avg@{k}": 0.1 * (1 + i) for i, s in enumerate(sources)}
        lines.append(json.dumps(numbers))
    (directory / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (directory / "rollouts").mkdir()
    for step in (1, steps):
        record = {
            "prompt": f"prompt {step} <b>\n", "response": "Answer: 7", "answer": "8",
            "correct": False, "reward": -2.0, "length": 3, "finish_reason": "length",
        }  # fmt: skip
        (directory / "rollouts" / f"step_{step:06d}.jsonl").write_text(json.dumps(record) + "\n")
    if summary:
        (directory / "summary.json").write_text(json.dumps({"seconds": 200.0}))
    return directory


@pytest.fixture
def without_plots(monkeypatch):
    """For tests of the words on the page: drawing takes a second."""
    monkeypatch.setattr(report, "plot", lambda *_: b"")


def draw(places, paper=None):
    """{title: axis} of the plots."""
    runs = load_runs(places)
    loaded = paper_curves.load_paper(paper) if paper else None
    axes = plots.draw(runs, [run.name for run in runs], loaded).axes
    return {axis.get_title(loc="left"): axis for axis in axes}


def legend(axis):
    return [text.get_text() for text in axis.get_legend().get_texts()] if axis.get_legend() else []


ACCURACY, ENTROPY = "held-out accuracy, %", "entropy, nats per token"


def test_the_page_says_what_happened(tmp_path):
    page = report.write_report(write_run(tmp_path / "run")).read_text()
    assert "held-out accuracy 25.0 % to 85.0 % in 6 steps (3 min 20 s)" in page
    assert "<tr><td>held-out avg@4</td><td>25.0%</td><td>85.0%</td></tr>" in page
    assert "prompt 1 &lt;b&gt;" in page and "wrong, 8 is right, cut at the limit" in page
    assert "data:image/png;base64," in page and "http" not in page.split("base64,")[0]
    png = (tmp_path / "run" / "report.png").read_bytes()
    width, height = struct.unpack(">II", png[16:24])
    assert png[:4] == b"\x89PNG" and width > 1000 and height > 700


def test_every_plotted_metric_is_one_that_runs_log():
    documented = (ROOT / "docs" / "metrics.md").read_text()
    plotted = {metric for panel in plots.PANELS for metric, _ in panel.series}
    for metric in plotted:
        if not metric.startswith("share/"):  # made from the counts of sampling/prompts_...
            assert f"`{metric}`" in documented, metric
    assert {source.metric for source in paper_curves.SOURCES} <= plotted


def test_while_the_run_goes_on_and_a_line_is_half_written(tmp_path, without_plots):
    run = write_run(tmp_path / "run", summary=False)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "rew')
    assert "still running" in report.write_report(run).read_text()


def test_two_runs_beside_each_other(tmp_path):
    runs = [write_run(tmp_path / name) for name in ("dapo", "grpo")]
    page = report.write_report(runs[0], beside=runs[1:]).read_text()
    assert "dapo: before and after" in page and "grpo: before and after" in page
    assert not (runs[1] / "report.html").exists()


def test_several_runs_are_told_apart_by_colour_and_their_series_by_dashes(tmp_path):
    runs = [write_run(tmp_path / place / "same") for place in ("a", "b", "c", "d", "e", "f")]
    assert [run.name for run in load_runs(runs)] == [f"{place}/same" for place in "abcdef"]
    axis = draw(runs)[ACCURACY]
    assert legend(axis) == ["avg@4", "pass@4"]
    looks = {(line.get_color(), line.get_linestyle()) for line in axis.get_lines()}
    assert len(looks) == 12 and len({dashes for _, dashes in looks}) == 2
    above = axis.figure.legends[0]
    assert [text.get_text() for text in above.get_texts()] == [f"{p}/same" for p in "abcdef"]
    assert len({line.get_color() for line in above.get_lines()}) == 6
    assert not legend(draw(runs)[ENTROPY]), "one series: the title says it"


def test_a_run_with_another_number_of_samples_is_drawn_too(tmp_path, without_plots):
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", k=32)]
    axis = draw(runs)[ACCURACY]
    assert legend(axis) == ["avg@k", "pass@k"] and len(axis.get_lines()) == 4
    assert "held-out avg@32</td>" in report.write_report(runs[0], beside=runs[1:]).read_text()


def test_a_line_for_each_held_out_source(tmp_path, without_plots):
    sources = ["aime24", "hub/name", "data/cost_$5_and_more_than_$9.jsonl"]
    run = write_run(tmp_path / "run", sources=sources)
    axis = draw([run])[ACCURACY]
    ends = ["aime24", "name", r"…_more_than_\$9.jsonl"]
    assert legend(axis) == ["avg@4", "pass@4", *(f"avg@4, {end}" for end in ends)]
    assert len({line.get_color() for line in axis.get_lines()}) == 5
    assert [line.get_ydata()[0] for line in axis.get_lines()[2:]] == pytest.approx([10, 20, 30])
    page = report.write_report(run).read_text()
    for source in sources:
        assert f"<td>held-out avg@4, {source}</td>" in page


def test_sources_of_one_name_in_different_places_keep_their_places(tmp_path):
    run = write_run(tmp_path / "run", sources=["a/test", "b/test"])
    assert legend(draw([run])[ACCURACY])[2:] == ["avg@4, a/test", "avg@4, b/test"]


def test_a_run_given_twice(tmp_path):
    run = write_run(tmp_path / "run")
    with pytest.raises(UserError, match="run is given twice"):
        report.write_report(run, beside=[tmp_path / "." / "run"])


def test_flags_of_the_program(capsys, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(report, "write_report", lambda *a, **kw: asked.append((a, kw)) or "PAGE")
    monkeypatch.chdir(tmp_path)
    for compare in (["--compare", "b", "c"], ["--compare=b", "c"], ["--compare=b", "--compare=c"]):
        status, out, _ = call(capsys, "--workdir", "a", *compare, main=launcher)
        assert status == 0 and out == "PAGE\n"
        beside = [tmp_path / "b", tmp_path / "c"]
        assert asked.pop() == ((tmp_path / "a",), {"beside": beside, "paper": None})
    status, out, _ = call(capsys, "--help", main=launcher)
    assert status == 0 and "--compare" in out and not asked


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "--workdir is needed"),
        (["runs/tiny"], "'runs/tiny' is not a flag. Flags: --workdir=DIR, --compare"),
        (["--workdir=a", "--papers=x"], "'--papers=x' is not a flag"),
        (["--workdir="], "--workdir: a directory is needed"),
        (["--workdir=a", "--compare"], "--compare: expected at least one argument. Flags:"),
        (["--workdir=none"], "none holds no run.*Give the --workdir of a run"),
        (["--workdir=a", "--paper=none"], "none: no such folder"),
    ],
)
def test_mistakes_on_the_command_line(capsys, tmp_path, monkeypatch, arguments, message):
    write_run(tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    status, out, err = call(capsys, *arguments, main=launcher)
    assert status == 2 and not out
    assert err.startswith("error: ") and re.search(message, err), err


def test_a_directory_that_may_not_be_written_to(capsys, tmp_path, monkeypatch):
    run = write_run(tmp_path / "run")

    def refuse(self, *_):
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr("pathlib.Path.write_bytes", refuse)
    status, _, err = call(capsys, "--workdir", run, main=launcher)
    assert status == 2 and "report.png cannot be written (Permission denied)" in err


@pytest.mark.parametrize("left", ["config.json", "metrics.jsonl"])
def test_a_directory_without_a_run(tmp_path, left):
    run = write_run(tmp_path / "run")
    (run / left).unlink()
    with pytest.raises(UserError, match=f"holds no run: .*{left}"):
        report.write_report(run)


def test_a_run_without_steps(tmp_path):
    run = write_run(tmp_path / "run")
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="no step is done yet"):
        report.write_report(run)


@pytest.mark.parametrize(
    "file, text", [("config.json", "{}"), ("config.json", "{"), ("metrics.jsonl", "{]}\n")]
)
def test_a_damaged_file_is_named(tmp_path, file, text):
    run = write_run(tmp_path / "run")
    (run / file).write_text(text)
    with pytest.raises(UserError, match=f"{file} is not as launch/train.py writes it"):
        report.write_report(run)
