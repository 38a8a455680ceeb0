"""The paper's curves on the page of plots, from files written here."""

import numpy as np
import pytest

from dapo_jax.runs.report import page as report
from dapo_jax.runs.report import paper_curves
from dapo_jax.types import UserError
from tests.config.test_command_line import call
from tests.runs.test_report import ACCURACY, ENTROPY, draw, launcher, legend, write_run

LENGTH = "response length, tokens"


def write_paper(folder, *, end=160, leave_out=()):
    """Files with the names and columns of the real ones, and numbers of no one's."""
    folder.mkdir()
    for source in paper_curves.SOURCES:
        names = {"1": ["DAPO pass@32", "DAPO avg@32"], "2a": ["w/ A", "w/o A"]}
        lines = [f"series,step,{source.column}"]
        for s, name in enumerate(names.get(source.figure, ["DAPO"])):
            # Out of order, so that a curve is a line only if it is sorted.
            lines += [f"{name},{step},{(s + 1) * step / end}" for step in (end, 0.0, end / 2)]
        if source.file not in leave_out:
            (folder / source.file).write_text("\n".join(lines) + "\n")
    return folder


def lines(axis, label):
    return [line.get_xydata() for line in axis.get_lines() if line.get_label() == label]


def test_the_papers_curves_are_in_their_panels(tmp_path):
    run, paper = write_run(tmp_path / "run"), write_paper(tmp_path / "paper")
    found = {
        title: [label for label in legend(axis) if label.startswith("paper, ")]
        for title, axis in draw([run], paper).items()
    }
    assert {title: labels for title, labels in found.items() if labels} == {
        ACCURACY: [
            "paper, figure 1: DAPO avg@32", "paper, figure 2a: w/ A", "paper, figure 2a: w/o A"
        ],
        "reward of the trained responses, mean": ["paper, figure 7b: DAPO"],
        LENGTH: ["paper, figure 7a: DAPO"],
        ENTROPY: ["paper, figure 7c: DAPO"],
        "probability of the sampled token, mean": ["paper, figure 7d: DAPO"],
        "sampled prompts without signal, %": ["paper, figure 3b: DAPO"],
    }  # fmt: skip


def test_the_page_says_what_is_grey_if_anything_is(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "plot", lambda *_: b"")  # drawing takes a second
    run, paper = write_run(tmp_path / "run"), write_paper(tmp_path / "paper")
    page = report.write_report(run, paper=paper_curves.load_paper(paper)).read_text()
    assert "curves of the DAPO paper" in page
    assert "DAPO paper" not in report.write_report(run).read_text()


def test_accuracies_of_the_paper_become_percent(tmp_path):
    run, paper = write_run(tmp_path / "run"), write_paper(tmp_path / "paper")
    axis = draw([run], paper)[ACCURACY]
    (figure_1,) = lines(axis, "paper, figure 1: DAPO avg@32")  # is in percent already
    (figure_2a,) = lines(axis, "paper, figure 2a: w/ A")  # is a share
    np.testing.assert_allclose(figure_1[:, 1], [0, 1, 2])
    np.testing.assert_allclose(figure_2a[:, 1], [0, 50, 100])


def second_axes(axis):
    """Of an axis: {label: number there where the first axis has 1}."""
    there = {}
    for child in axis.child_axes:
        there[child.get_xlabel() or child.get_ylabel()] = child._functions[0](1.0)
    return there


def test_a_short_run_beside_a_long_paper_fills_its_plot(tmp_path):
    """6 rollout steps of 8 updates beside 4800: the paper's curve over the width of the run, with
    an axis that tells its updates."""
    run, paper = write_run(tmp_path / "run"), write_paper(tmp_path / "paper", end=4800)
    axis = draw([run], paper)[ENTROPY]
    (curve,) = lines(axis, "paper, figure 7c: DAPO")
    np.testing.assert_allclose(curve[:, 0], [0, 3, 6])
    assert second_axes(axis) == {"updates of the paper, on a scale of their own": 800}
    axis = draw([run, write_run(tmp_path / "long", steps=10)], paper)[ENTROPY]
    np.testing.assert_allclose(lines(axis, "paper, figure 7c: DAPO")[0][-1, 0], 10)


def test_a_run_of_the_papers_length_has_its_scale(tmp_path):
    run, paper = write_run(tmp_path / "run"), write_paper(tmp_path / "paper", end=160)
    axis = draw([run], paper)[ENTROPY]
    (curve,) = lines(axis, "paper, figure 7c: DAPO")
    np.testing.assert_allclose(curve[:, 0], [0, 10, 20])  # 8 updates a step
    assert second_axes(axis) == {"updates, of the run and of the paper": 8}
    other = write_run(tmp_path / "other", updates=16)  # no scale fits both runs
    axis = draw([run, other], paper)[ENTROPY]
    np.testing.assert_allclose(lines(axis, "paper, figure 7c: DAPO")[0][:, 0], [0, 3, 6])


def test_only_lengths_of_another_magnitude_have_a_scale_of_their_own(tmp_path):
    run, paper = write_run(tmp_path / "run"), write_paper(tmp_path / "paper")
    file = paper / "fig7a_mean_resp_len.csv"
    file.write_text("series,step,mean_resp_len\nDAPO,0,500\nDAPO,160,4000\n")
    axis = draw([run], paper)[LENGTH]
    (curve,) = lines(axis, "paper, figure 7a: DAPO")
    np.testing.assert_allclose(curve[:, 1], [5, 40])  # the longest response of the run is 40
    assert second_axes(axis)["tokens of the paper, on a scale of their own"] == 100
    file.write_text("series,step,mean_resp_len\nDAPO,0,50\nDAPO,160,150\n")
    axis = draw([run], paper)[LENGTH]
    np.testing.assert_allclose(lines(axis, "paper, figure 7a: DAPO")[0][:, 1], [50, 150])
    assert len(second_axes(axis)) == 1


def test_the_paper_beside_a_run_of_which_only_the_base_is_done(tmp_path):
    run, paper = write_run(tmp_path / "run", steps=1), write_paper(tmp_path / "paper")
    first = (run / "metrics.jsonl").read_text().splitlines()[0]
    (run / "metrics.jsonl").write_text(first + "\n")
    assert report.write_report(run, paper=paper_curves.load_paper(paper)).exists()


def test_files_that_the_folder_lacks_are_named(capsys, tmp_path):
    run = write_run(tmp_path / "run")
    paper = write_paper(tmp_path / "paper", leave_out=["fig7b_reward.csv"])
    status, out, _ = call(capsys, f"--workdir={run}", "--paper", paper, main=launcher)
    assert status == 0 and len(out.splitlines()) == 2
    assert "has no fig7b_reward.csv: its curve is left out" in out
    with pytest.raises(UserError, match="no such folder"):
        paper_curves.load_paper(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="none of the files.*fig1_aime24_pct.csv.*fig7d_mean"):
        paper_curves.load_paper(tmp_path / "empty")


@pytest.mark.parametrize(
    "text, message",
    [
        ("series,step\nDAPO,1\n", r"entropy.csv, line 1: no column 'entropy'.*series, step"),
        ("", "line 1: no column 'series'.*there are: none"),
        ("series,step,entropy\nDAPO,1,2\nDAPO,2,much\n", "line 3: entropy is 'much'"),
        ("series,step,entropy\nDAPO,,2\n", "line 2: step is ''"),
        ("series,step,entropy\nDAPO,1,nan\n", "line 2: entropy is 'nan'"),
        ("series,step,entropy\nDAPO,1\n", "line 2: not as many cells as the 3 columns"),
        ("series,step,entropy\nDAPO,1,0,5\n", "line 2: not as many cells"),
        ("series,step,entropy\n", "has no rows"),
        ("series,step,entropy\nD\xc4PO,1,2\n", "not a CSV file in UTF-8"),
    ],
)
def test_a_malformed_file_is_named_with_its_line(tmp_path, text, message):
    paper = write_paper(tmp_path / "paper")
    (paper / "fig7c_entropy.csv").write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match=message):
        paper_curves.load_paper(paper)


def test_a_figure_1_without_the_papers_run(tmp_path):
    paper = write_paper(tmp_path / "paper")
    (paper / "fig1_aime24_pct.csv").write_text("series,step,aime24_pct\nother,1,2\n")
    with pytest.raises(UserError, match="no rows of the series 'DAPO avg@32'"):
        paper_curves.load_paper(paper)


def test_the_real_curves(tmp_path):
    paper = paper_curves.load_paper(paper_curves.CURVES)
    assert not paper.missing and len(paper.curves) == 8
    last = {curve.label: curve.points[-1] for curve in paper.curves}
    # The paper's headline: 50 % with DAPO at the end of figure 1.
    assert last["paper, figure 1: DAPO avg@32"][1] == pytest.approx(0.5, abs=0.02)
    assert all(0 <= p <= 1 for c in paper.curves if "7d" in c.label for _, p in c.points)
    assert report.write_report(write_run(tmp_path / "run"), paper=paper).exists()


@pytest.mark.parametrize("arguments", [["--paper"], ["--paper", "--compare={other}"]])
def test_without_a_folder_the_papers_own_curves_are_drawn(capsys, monkeypatch, tmp_path, arguments):
    drawn = []
    monkeypatch.setattr(report, "plot", lambda runs, headlines, paper: drawn.append(paper) or b"")
    run = write_run(tmp_path / "run")
    other = write_run(tmp_path / "other")
    arguments = [argument.format(other=other) for argument in arguments]
    status, _, _ = call(capsys, f"--workdir={run}", *arguments, main=launcher)
    assert status == 0 and drawn == [paper_curves.load_paper(paper_curves.CURVES)]
