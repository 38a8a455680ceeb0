"""The page of plots: run directories that the tests write, and the paper's curves."""

import errno
import json
import re
import struct

import numpy as np
import pytest

import dapo_jax
from dapo_jax.runs.report import data, plots
from dapo_jax.runs.report import page as report
from dapo_jax.runs.report.data import by_method, load_runs, responses_sampled
from dapo_jax.runs.report.paper_curves import SOURCES, Curve, load_paper
from dapo_jax.types import UserError
from tests.config.test_command_line import call, load_launcher
from tests.conftest import ROOT
from tests.support.helpers import tiny_config

launcher = load_launcher("report")


def write_run(directory, *, steps=6, summary=True, k=4, sources=(), updates=8, seed=0):
    directory.mkdir(parents=True)
    config = tiny_config(evaluation__num_samples=k, seed=seed).to_dict()
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
                "policy/clip_high_share": 0.01,
                "policy/clip_high_prob": 0.1,
                "sampling/prompts_tried": 8,
                "sampling/prompts_all_right": step,
                "sampling/prompts_all_wrong": 0,
                "optimizer/updates": updates,
            }
        if step % 2 == 0:
            numbers |= {f"eval/avg@{k}": 0.25 + 0.1 * step + 0.01 * seed, f"eval/pass@{k}": 0.9}
            numbers |= {"eval/interval_low": 0.2, "eval/interval_high": 0.9}
            numbers |= {f"eval/{s}/avg@{k}": 0.1 * (1 + i) for i, s in enumerate(sources)}
        lines.append(json.dumps(numbers))
    (directory / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (directory / "rollouts").mkdir()
    (directory / "heldout").mkdir()
    for step in (0, steps):
        records = [
            {"step": step, "prompt": f"problem {i}\n", "response": f"<{step}>", "answer": "8"}
            | {"correct": i < 2 or (i == 7 and step > 0), "accuracy": 0.5, "length": 3}
            | {"finish_reason": "stop"}
            for i in range(8)
        ]
        text = "".join(json.dumps(record) + "\n" for record in records)
        (directory / "heldout" / f"step_{step:06d}.jsonl").write_text(text)
    for step, reason in ((1, "length"), (steps, "repetition")):
        record = {"prompt": f"prompt {step} <b>\n", "response": "Answer: 7", "answer": "8"}
        record |= {"correct": False, "reward": -2.0, "length": 3, "finish_reason": reason}
        (directory / "rollouts" / f"step_{step:06d}.jsonl").write_text(json.dumps(record) + "\n")
    if summary:
        (directory / "summary.json").write_text(json.dumps({"seconds": 200.0}))
    return directory


@pytest.fixture
def without_plots(monkeypatch):
    """Drawing takes a second, and some tests read words alone."""
    monkeypatch.setattr(report, "plot", lambda *_: b"")


def draw(places, paper=()):
    """{title: axis} of the plots."""
    methods = by_method(load_runs(places))
    axes = plots.draw(methods, [method.name for method in methods], paper).axes
    return {axis.get_title(loc="left"): axis for axis in axes}


def legend(axis):
    return [text.get_text() for text in axis.get_legend().get_texts()] if axis.get_legend() else []


ACCURACY, ENTROPY = "held-out accuracy, %", "entropy, nats per token"
BY_TOKENS = "held-out accuracy by tokens sampled, %"
LENGTH = "response length, tokens"


def test_the_page_of_a_run(tmp_path):
    page = report.write_report(write_run(tmp_path / "run")).read_text()
    assert "held-out accuracy 25.0 % to 85.0 % in 6 steps (3 min 20 s)" in page
    assert "<tr><td>held-out avg@4</td><td>25.0%</td><td>85.0%</td></tr>" in page
    assert "prompt 1 &lt;b&gt;" in page and "wrong, 8 is right, cut at the limit" in page
    assert "wrong, 8 is right, ended for repetition" in page
    assert "data:image/png;base64," in page and "http" not in page.split("base64,")[0]
    assert "DAPO paper" not in page
    png = (tmp_path / "run" / "report.png").read_bytes()
    width, height = struct.unpack(">II", png[16:24])
    assert png[:4] == b"\x89PNG" and width > 1000 and height > 700


def test_held_out_responses_before_and_after(tmp_path, without_plots):
    """The problem whose verdict changed stands first."""
    page = report.write_report(write_run(tmp_path / "run")).read_text()
    *_, shown = page.partition("run: the same held-out problems")
    shown, *_ = shown.partition("Sampled responses")
    assert re.findall("<b>problem (.)", shown) == ["7", "0", "1", "2", "3"]
    assert "<th>base model</th><th>after step 6</th>" in shown
    before, after = re.findall("<td>(.*?)</td>", shown, re.DOTALL)[:2]
    assert "&lt;0&gt;" in before and "wrong, 8 is right, ended by itself; 3 tokens" in before
    assert "&lt;6&gt;" in after and "correct, ended by itself; 3 tokens; 2 of 4" in after


def test_a_response_that_no_scorer_judged_is_not_called_wrong(tmp_path, without_plots):
    run = write_run(tmp_path / "run")
    for name in ("heldout", "rollouts"):
        *_, file = sorted((run / name).glob("step_*.jsonl"))
        lines = [json.loads(line) | {"note": "timeout"} for line in file.read_text().splitlines()]
        wrong = [line | {"correct": False} for line in lines]
        file.write_text("".join(json.dumps(line) + "\n" for line in wrong))
    page = report.write_report(run).read_text()
    assert page.count("no verdict (timeout), 8 is right, ended by itself") == 5
    assert "no verdict (timeout), 8 is right, ended for repetition" in page
    assert page.count("wrong, 8 is right") == 3 + 1  # before, where scorers worked


def test_seeds_of_a_method_are_one_line_with_an_interval(tmp_path, without_plots):
    places = [write_run(tmp_path / "dapo" / f"seed_{seed}", seed=seed) for seed in range(3)]
    places.append(write_run(tmp_path / "dapo" / "seed_3", seed=3, steps=4, summary=False))
    places.insert(1, write_run(tmp_path / "long", k=8, updates=16))
    axes = draw(places)
    by_step, by_tokens = (axes[title].get_lines()[0] for title in (ACCURACY, BY_TOKENS))
    np.testing.assert_allclose(by_step.get_xydata(), [[0, 26.5], [2, 46.5], [4, 66.5]])
    # 8 prompts of 4 responses with a mean of 11, 12, 13 and 14 tokens at the first four steps.
    np.testing.assert_allclose(by_tokens.get_xdata(), [0, 32 * 23, 32 * 50])
    np.testing.assert_allclose(by_tokens.get_ydata(), by_step.get_ydata())
    band = axes[ACCURACY].collections[0].get_paths()[0].vertices
    assert band[:, 1].min() == pytest.approx(25.25, abs=0.3)  # of 25, 26, 27 and 28
    assert len(axes[ENTROPY].get_lines()) == 2
    page = report.write_report(places[0], others=places[1:]).read_text()
    assert "dapo, 4 seeds: held-out accuracy 26.5 % to 66.5 % in 4 steps (still running)" in page
    assert "held-out avg@4</td><td>26.5% [25" in page and "held-out avg@8</td><td>25.0%<" in page


def test_responses_are_counted_by_the_group_size_of_their_stage():
    config = {
        "rollout": {"group_size": 4},
        "stages": [[3, {"rollout.group_size": 8}], [4, {"objective.clip_high": 0.4}]],
    }
    of = lambda step: responses_sampled({"step": step, "sampling/prompts_tried": 10}, config)
    assert [of(step) for step in range(1, 6)] == [40, 40, 80, 80, 80]
    assert responses_sampled({"step": 0}, config) == 0


def test_runs_without_counts_have_no_panel_of_tokens(tmp_path):
    run = write_run(tmp_path / "run")
    assert BY_TOKENS in draw([run])
    (run / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text().splitlines()[0] + "\n")
    assert len(axes := draw([run])) == 9 and BY_TOKENS not in axes


@pytest.mark.parametrize("age", [0, 2])
def test_the_age_of_tokens_is_plotted_where_responses_were_carried(tmp_path, age):
    run = write_run(tmp_path / "run")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    ages = {"batch/staleness_max": age, "batch/staleness_mean": age / 2}
    text = "".join(json.dumps(line | ages) + "\n" for line in lines)
    (run / "metrics.jsonl").write_text(text)
    axes = draw([run])
    assert (plots.AGE.title in axes) == (age > 0) and len(axes) == 11 + (age > 0)


@pytest.mark.parametrize("share", [0.0, 0.2])
def test_reflection_is_plotted_where_there_is_any(tmp_path, share):
    run = write_run(tmp_path / "run")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    text = "".join(json.dumps(line | {"reflection/share": share}) + "\n" for line in lines)
    (run / "metrics.jsonl").write_text(text)
    assert (plots.REFLECTION.title in draw([run])) == (share > 0)


def test_titles_and_legends_cover_nothing_and_are_whole(tmp_path):
    """A run on a large model has the paper's curves, carried responses, reflection, sources."""
    run = write_run(tmp_path / "run", sources=["aime24", "aime25", "olympiad_bench"])
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    several = {"batch/staleness_max": 2, "batch/staleness_mean": 1.5, "reflection/share": 0.1}
    for panels, more in ((11, {}), (13, several)):
        text = "".join(json.dumps(line | more) + "\n" for line in lines)
        (run / "metrics.jsonl").write_text(text)
        figure = plots.draw(by_method(load_runs([run])), ["run"], load_paper())
        figure.canvas.draw()
        assert len(figure.axes) == panels
        words = {}
        for axis in figure.axes:
            words[axis.get_title(loc="left")] = axis._left_title
            if (below := axis.get_legend()) and len(below.get_texts()) > plots.LEGEND_INSIDE:
                words[f"legend of {axis.get_title(loc='left')}"] = below
        boxes = {title: text.get_window_extent() for title, text in words.items()}
        for title, box in boxes.items():
            assert box.x1 <= figure.bbox.x1, title
            others = [*(b for b in boxes.values() if b is not box), *(a.bbox for a in figure.axes)]
            assert not box.count_overlaps(others), title


def test_pass_rates_are_shown_once_problems_come_back(tmp_path, without_plots, monkeypatch):
    seen = []
    monkeypatch.setattr(report, "heat_map", lambda rates: seen.append(rates) or b"")
    run = write_run(tmp_path / "run")
    assert data.pass_rates(load_runs([run])[0]).shape == (0, 0)
    visits = [[[7, 0, 1, 4], [3, 0, 4, 4]], [[5, 0, 0, 4]], [[7, 1, 3, 4], [3, 2, 2, 4]]]
    lines = [json.dumps({"step": n, "visits": v}) for n, v in enumerate(visits, start=1)]
    for complete in (2, 3):
        text = "\n".join([*lines[:complete], lines[0][:20]])  # the last line is being written
        (run / "pass_rates.jsonl").write_text(text)
        page = report.write_report(run).read_text()
        assert ("Difficulty of the training problems" in page) == (complete == 3)
    assert "3 problems were tried" in page
    expected = [[1, np.nan, 0.5], [0, np.nan, np.nan], [0.25, 0.75, np.nan]]  # of 3, 5, 7
    np.testing.assert_array_equal(seen, [expected])


def test_the_heat_map_orders_problems_by_their_first_pass_rate(monkeypatch):
    figures = []
    monkeypatch.setattr(plots, "to_png", lambda figure: figures.append(figure) or b"")
    rates = np.array([[1, np.nan, 0.5], [np.nan, 0, 1], [0.25, 0.75, np.nan]])
    plots.heat_map(rates)
    image = figures[0].axes[0].get_images()[0].get_array()
    np.testing.assert_array_equal(image.filled(np.nan), 100 * rates[[1, 2, 0]])
    monkeypatch.setattr(plots, "HEAT_MAP_LINES", 2)  # a line of the picture is several problems
    plots.heat_map(rates)
    image = figures[1].axes[0].get_images()[0].get_array()
    np.testing.assert_array_equal(image.filled(np.nan), [[25, 37.5, 100], [100, np.nan, 50]])


def test_the_first_responses_that_check_or_go_back(tmp_path, without_plots):
    run = write_run(tmp_path / "run")
    assert "check or go back" not in report.write_report(run).read_text()
    for step in range(2, 6):
        record = json.loads((run / "rollouts" / "step_000001.jsonl").read_text())
        records = [record, record | {"response": f"Wait, {step} is wrong. Answer: 7"}]
        text = "".join(json.dumps(record) + "\n" for record in records)
        (run / "rollouts" / f"step_{step:06d}.jsonl").write_text(text)
    page = report.write_report(run).read_text()
    found = page.partition("check or go back</h2>")[2].partition("Sampled responses")[0]
    assert re.findall(r"Wait, (\d) is wrong", found) == ["2", "3", "4"]
    assert "step 2: &#x27;Wait,&#x27;; wrong, 8 is right" in found


def test_held_out_responses_before_halfway_and_after(tmp_path, without_plots):
    run = write_run(tmp_path / "run")
    for step in (2, 4, 5):
        text = (run / "heldout" / "step_000000.jsonl").read_text()
        records = [json.loads(line) | {"step": step} for line in text.splitlines()]
        text = "".join(json.dumps(record) + "\n" for record in records)
        (run / "heldout" / f"step_{step:06d}.jsonl").write_text(text)
    page = report.write_report(run).read_text()
    assert "<th>base model</th><th>after step 4</th><th>after step 6</th>" in page


def test_a_run_that_is_given_twice_counts_once(tmp_path):
    runs = [write_run(tmp_path / name) for name in "ab"]
    found = load_runs([runs[0], *runs, tmp_path / "b" / ".." / "a"])
    assert [run.directory for run in found] == runs


def test_every_plotted_metric_is_one_that_runs_log():
    documented = (ROOT / "docs" / "metrics.md").read_text()
    plotted = {metric for panel in plots.PANELS for metric, _ in panel.series}
    for metric in plotted:
        if not metric.startswith("share/"):  # made from the counts of sampling/prompts_...
            assert f"`{metric}`" in documented, metric
    assert {metric for *_, metric in SOURCES} <= plotted


def test_while_the_run_continues_and_a_line_is_half_written(tmp_path, without_plots):
    run = write_run(tmp_path / "run", summary=False)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "rew')
    assert "still running" in report.write_report(run).read_text()


def test_a_file_of_responses_is_half_written(tmp_path, without_plots):
    """As after a power failure, or where it is being copied."""
    run = write_run(tmp_path / "run")
    texts = {}
    for name in ("rollouts", "heldout"):
        *_, last = sorted((run / name).glob("step_*.jsonl"))
        texts[name] = last.read_text()
        last.write_text(texts[name][:-20])
    assert "</html>" in report.write_report(run).read_text()
    for name in ("rollouts", "heldout"):
        *_, last = sorted((run / name).glob("step_*.jsonl"))
        last.write_text("")
    assert "</html>" in report.write_report(run).read_text()


def test_several_runs_have_colours_and_their_series_dashes(tmp_path):
    runs = [write_run(tmp_path / place / "same") for place in ("a", "b", "c", "d", "e", "f")]
    assert [run.name for run in load_runs(runs)] == [f"{place}/same" for place in "abcdef"]
    axes = draw(runs)
    axis = axes[ACCURACY]
    assert legend(axis) == ["avg@4", "pass@4"]
    looks = {(str(line.get_color()), line.get_linestyle()) for line in axis.get_lines()}
    assert len(looks) == 12 and len({dashes for _, dashes in looks}) == 2
    above = axis.figure.legends[0]
    assert [text.get_text() for text in above.get_texts()] == [f"{p}/same" for p in "abcdef"]
    assert len({str(line.get_color()) for line in above.get_lines()}) == 6
    assert not legend(axes[ENTROPY]), "one series: the title says it"


def test_runs_with_another_number_of_samples_are_compared(tmp_path, without_plots):
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", k=32)]
    axis = draw(runs)[ACCURACY]
    assert legend(axis) == ["avg@k", "pass@k"] and len(axis.get_lines()) == 4
    page = report.write_report(runs[0], others=runs[1:]).read_text()
    assert "a: before and after" in page and "b: before and after" in page
    assert "held-out avg@32</td>" in page and not (runs[1] / "report.html").exists()


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
    run = write_run(tmp_path / "other", sources=["a/test", "b/test"])
    assert legend(draw([run])[ACCURACY])[2:] == ["avg@4, a/test", "avg@4, b/test"]


def test_flags_of_the_program(capsys, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(report, "write_report", lambda *a, **kw: asked.append((a, kw)) or "PAGE")
    monkeypatch.chdir(tmp_path)
    for compare in (["--compare", "b", "c"], ["--compare=b", "c"], ["--compare=b", "--compare=c"]):
        status, out, _ = call(capsys, "--workdir", "a", "--paper", *compare, main=launcher)
        assert status == 0 and out == "PAGE\n"
        others = [tmp_path / "b", tmp_path / "c"]
        assert asked.pop() == ((tmp_path / "a",), {"others": others, "paper": load_paper()})
    status, out, _ = call(capsys, "--help", main=launcher)
    assert status == 0 and "--compare" in out and not asked
    monkeypatch.setattr(dapo_jax, "diagnose", lambda *a, **kw: asked.append((a, kw)) or ["WORDS"])
    monkeypatch.setattr(dapo_jax, "fit_curves", lambda *a, **kw: asked.append((a, kw)) or ["FIT"])
    flags = ("--workdir", "a", "--compare", "b", "--paper", "--diagnose", "--fit=seconds")
    status, out, _ = call(capsys, *flags, main=launcher)
    assert status == 0 and out == f"WORDS\nFIT\n{tmp_path / 'a' / 'fit.png'}\nPAGE\n"
    runs = (tmp_path / "a", [tmp_path / "b"])
    assert asked[1:] == [(runs, {"paper": True}), (runs, {"compute": "seconds"})]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "--workdir is needed"),
        (["runs/tiny"], "'runs/tiny' is not a flag. Flags: --workdir=DIR, --compare"),
        (["--workdir=a", "--papers"], "'--papers' is not a flag"),
        (["--workdir="], "--workdir: a directory is needed"),
        (["--workdir=a", "--compare"], "--compare: expected at least one argument. Flags:"),
        (["--workdir=none"], "none holds no run.* --workdir"),
        (["--workdir=a", "--fit=hours"], "--fit: invalid choice: 'hours'.*tokens.*seconds"),
    ],
)
def test_mistakes_on_the_command_line(capsys, tmp_path, monkeypatch, arguments, message):
    write_run(tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    status, out, err = call(capsys, *arguments, main=launcher)
    assert status == 2 and not out
    assert err.startswith("error: ") and re.search(message, err), err


def test_a_directory_that_may_not_be_written_to(tmp_path, monkeypatch, without_plots):
    def refuse(self, *_):
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr("pathlib.Path.write_bytes", refuse)
    with pytest.raises(UserError, match=r"report.png cannot be written \(Permission denied\)"):
        report.write_report(write_run(tmp_path / "run"))


@pytest.mark.parametrize(
    "file, text, message",
    [
        ("config.json", None, "holds no run: .*config.json"),
        ("metrics.jsonl", None, "holds no run: .*metrics.jsonl"),
        ("metrics.jsonl", "", "no step is done yet"),
        ("config.json", "{}", "config.json is not as launch/train.py writes it"),
        ("config.json", "{", "config.json is not as"),
        ("config.json", '{"config": {}}', r"^\S+ is a run of launch/sft.py, which has no page"),
        ("metrics.jsonl", "{]}\n", "metrics.jsonl is not as"),
    ],
)
def test_a_directory_without_a_whole_run(tmp_path, file, text, message):
    run = write_run(tmp_path / "run")
    (run / file).unlink()
    if text is not None:
        (run / file).write_text(text)
    with pytest.raises(UserError, match=message):
        load_runs([run])


def curve(metric="policy/entropy", values=(0.0, 1.0, 2.0), end=160):
    """A curve of the paper with three points up to an update."""
    return Curve(metric, f"paper, {metric}", tuple(zip((0, end / 2, end), values)))


def points(axis, metric="policy/entropy"):
    """The points of the paper's curve."""
    (line,) = (line for line in axis.get_lines() if line.get_label() == f"paper, {metric}")
    return line.get_xydata()


def second_axes(axis):
    """{label: number on the second axis at 1 of the first}."""
    return {
        child.get_xlabel() or child.get_ylabel(): child._functions[0](1.0)
        for child in axis.child_axes
    }


def test_the_papers_own_curves(tmp_path):
    paper = load_paper()
    assert len(paper) == 9
    last = {curve.label: curve.points[-1] for curve in paper}
    # The paper's headline: 50 % with DAPO at the end of figure 1.
    assert last["paper, figure 1: DAPO avg@32"][1] == pytest.approx(0.5, abs=0.02)
    assert all(0 <= p <= 1 for c in paper if "7d" in c.label for _, p in c.points)
    run = write_run(tmp_path / "run")
    axes = draw([run], paper)
    found = [label for axis in axes.values() for label in legend(axis) if "paper, " in label]
    assert sorted(found) == sorted(last) and "paper, figure 7c: DAPO" in legend(axes[ENTROPY])
    page = report.write_report(run, paper=paper).read_text()
    assert "curves of the DAPO paper" in page


def test_a_short_run_next_to_a_long_paper_fills_its_plot(tmp_path):
    """6 rollout steps of 8 updates, 4800 updates of the paper: its curve is as wide as the run."""
    run, paper = write_run(tmp_path / "run"), [curve("eval/avg@k", (0, 0.1, 0.5), 4800)]
    axis = draw([run], paper)[ACCURACY]
    np.testing.assert_allclose(points(axis, "eval/avg@k"), [[0, 0], [3, 10], [6, 50]])
    assert second_axes(axis) == {"updates of the paper, on a scale of their own": 800}
    axis = draw([run, write_run(tmp_path / "long", steps=10)], paper)[ACCURACY]
    np.testing.assert_allclose(points(axis, "eval/avg@k")[-1, 0], 10)
    # A run whose base alone is evaluated.
    (run / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text().splitlines()[0] + "\n")
    assert points(draw([run], paper)[ACCURACY], "eval/avg@k")[-1, 0] == 1


def test_a_run_of_the_papers_length_has_its_scale(tmp_path):
    run = write_run(tmp_path / "run")
    axis = draw([run], [curve()])[ENTROPY]
    np.testing.assert_allclose(points(axis)[:, 0], [0, 10, 20])  # 8 updates a step
    assert second_axes(axis) == {"updates, of the run and of the paper": 8}
    other = write_run(tmp_path / "other", updates=16)  # no scale fits both runs
    np.testing.assert_allclose(points(draw([run, other], [curve()])[ENTROPY])[:, 0], [0, 3, 6])


def test_only_lengths_of_another_magnitude_have_a_scale_of_their_own(tmp_path):
    run, metric = write_run(tmp_path / "run"), "length/mean"
    axis = draw([run], [curve(metric, (500, 1000, 4000))])[LENGTH]
    # The longest response of the run is 40.
    np.testing.assert_allclose(points(axis, metric)[:, 1], [5, 10, 40])
    assert second_axes(axis)["tokens of the paper, on a scale of their own"] == 100
    axis = draw([run], [curve(metric, (50, 100, 150))])[LENGTH]
    np.testing.assert_allclose(points(axis, metric)[:, 1], [50, 100, 150])
    assert len(second_axes(axis)) == 1
