"""The page of plots, from a run directory written here."""

import json
import struct

import pytest

from dapo_jax import report
from dapo_jax.types import UserError
from tests.helpers import tiny_dict


def write_run(directory, *, steps=6, summary=True):
    directory.mkdir()
    frozen = {"config": tiny_dict(), "versions": {"python": "3"}, "command": "train <now>"}
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
            }
        if step % 2 == 0:
            numbers |= {"eval/avg@4": 0.25 + 0.1 * step, "eval/pass@4": 0.9}
            numbers |= {"eval/interval_low": 0.2, "eval/interval_high": 0.9}
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
    from tests.conftest import ROOT

    documented = (ROOT / "docs" / "metrics.md").read_text()
    for panel in report.panels(4):
        for metric, _ in panel.series:
            if not metric.startswith("share/"):  # made by the report itself
                assert f"`{metric.replace('@4', '@k')}`" in documented, metric


def test_while_the_run_goes_on_and_a_line_is_half_written(tmp_path):
    run = write_run(tmp_path / "run", summary=False)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "rew')
    assert "still running" in report.write_report(run).read_text()


def test_two_runs_beside_each_other(tmp_path):
    runs = [write_run(tmp_path / name) for name in ("dapo", "grpo")]
    page = report.write_report(runs[0], beside=runs[1:]).read_text()
    assert "dapo: before and after" in page and "grpo: before and after" in page
    assert not (runs[1] / "report.html").exists()


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
