"""A run on one page: plots in the manner of the DAPO paper's figures 2, 3 and 7, a table of before
and after, and what the model wrote. Reads the run directory only, also while the run goes on."""

import base64
import html
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from dapo_jax.progress import duration
from dapo_jax.types import UserError

COLOURS = ("#1b6ca8", "#d1495b", "#3a7d44", "#8d6a9f", "#c17c1e")
DASHES = ("-", "--", ":")
EXAMPLES = 4  # responses shown of the first and of the last step

PERCENT, NUMBER = 100.0, 1.0


class Panel(NamedTuple):
    title: str
    unit: float  # PERCENT or NUMBER
    series: tuple[tuple[str, str], ...]  # (metric, label)


class Run(NamedTuple):
    name: str
    directory: Path
    config: dict[str, Any]
    frozen: dict[str, Any]
    steps: list[dict[str, Any]]  # one per line of metrics.jsonl
    summary: dict[str, Any] | None  # None while the run goes on


def panels(num_samples: int) -> tuple[Panel, ...]:
    """What is plotted, in reading order."""
    k = num_samples
    return (
        Panel("held-out accuracy, %", PERCENT, (
            (f"eval/avg@{k}", f"avg@{k}"), (f"eval/cons@{k}", f"cons@{k}"),
            (f"eval/pass@{k}", f"pass@{k}"))),
        Panel("training accuracy, %", PERCENT, (
            ("accuracy/sampled", "all that was sampled"),
            ("accuracy/trained", "after the filter"))),
        Panel("reward of the trained responses, mean", NUMBER, (("reward/mean", "reward"),)),
        Panel("response length, tokens", NUMBER, (
            ("length/mean", "mean"), ("length/max", "longest"))),
        Panel("entropy, nats per token", NUMBER, (("policy/entropy", "entropy"),)),
        Panel("probability of the sampled token, mean", NUMBER, (
            ("policy/token_prob", "probability"),)),
        Panel("clipped tokens, %", PERCENT, (
            ("policy/clip_high_share", "above 1 + clip_high"),
            ("policy/clip_low_share", "below 1 - clip_low"))),
        Panel("sampled prompts without signal, %", PERCENT, (
            ("share/all_right", "all right"), ("share/all_wrong", "all wrong"))),
        Panel("responses cut at the limit, %", PERCENT, (
            ("length/truncated_share", "while training"),
            ("eval/truncated_share", "held-out"))),
    )  # fmt: skip


def load_run(directory: Path) -> Run:
    """What a run directory says of its run.

    Raises:
        UserError: there is no run in it, or no step of it is done.
    """
    try:
        frozen = json.loads((directory / "config.json").read_text())
        lines = (directory / "metrics.jsonl").read_text().splitlines()
    except OSError as error:
        raise UserError(
            f"{directory} holds no run: {error.filename} cannot be read ({error.strerror})."
        ) from error
    steps = [json.loads(line) for line in lines if line.endswith("}")]
    if not steps:
        raise UserError(f"{directory}: no step is done yet; there is nothing to plot.")
    for numbers in steps:
        tried = numbers.get("sampling/prompts_tried", 0)
        if tried:
            numbers["share/all_right"] = numbers["sampling/prompts_all_right"] / tried
            numbers["share/all_wrong"] = numbers["sampling/prompts_all_wrong"] / tried
    summary = directory / "summary.json"
    return Run(
        directory.name,
        directory,
        frozen["config"],
        frozen,
        steps,
        json.loads(summary.read_text()) if summary.exists() else None,
    )


def write_report(directory: Path, *, beside: Sequence[Path] = ()) -> Path:
    """Writes report.png and the self-contained report.html into the run directory.

    Args:
        directory: the run.
        beside: other runs, drawn into the same plots and given a column of the table.

    Returns:
        Path of the page.

    Raises:
        UserError: one of the directories holds no run.
    """
    runs = [load_run(place) for place in (directory, *beside)]
    png = plot(runs)
    (directory / "report.png").write_bytes(png)
    page = directory / "report.html"
    page.write_text(_page(runs, png))
    return page


def plot(runs: Sequence[Run]) -> bytes:
    """The plots as a PNG: one run in colours by series, several in colours by run."""
    figure = Figure(figsize=(13.5, 9.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(3, 3).ravel()
    for axis, panel in zip(axes, panels(runs[0].config["evaluation"]["num_samples"])):
        for r, run in enumerate(runs):
            for s, (metric, label) in enumerate(panel.series):
                points = [(n["step"], n[metric] * panel.unit) for n in run.steps if metric in n]
                if not points:
                    continue
                several = len(runs) > 1
                axis.plot(
                    *zip(*points),
                    color=COLOURS[(r if several else s) % len(COLOURS)],
                    linestyle=DASHES[s % len(DASHES)] if several else "-",
                    marker="o" if len(points) < 60 else None,
                    markersize=3,
                    linewidth=1.6,
                    label=f"{run.name}: {label}" if several else label,
                )
            if panel.series[0][0].startswith("eval/avg@"):
                _band(axis, run, COLOURS[r % len(COLOURS)])
        axis.set_title(panel.title, fontsize=11, loc="left")
        axis.set_xlabel("rollout step", fontsize=9)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=9)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8, frameon=False)
    figure.suptitle(_headline(runs), fontsize=13)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=110)
    return image.getvalue()


def _band(axis: Any, run: Run, colour: str) -> None:
    """The interval of held-out accuracy over the choice of problems."""
    points = [
        (n["step"], 100 * n["eval/interval_low"], 100 * n["eval/interval_high"])
        for n in run.steps
        if "eval/interval_low" in n
    ]
    if points:
        axis.fill_between(*zip(*points), color=colour, alpha=0.15, linewidth=0)


def _accuracies(run: Run) -> tuple[float, float]:
    """Held-out avg@k, the first and the last."""
    name = f"eval/avg@{run.config['evaluation']['num_samples']}"
    values = [numbers[name] for numbers in run.steps if name in numbers]
    return values[0], values[-1]


def _headline(runs: Sequence[Run]) -> str:
    parts = []
    for run in runs:
        first, last = _accuracies(run)
        steps = run.steps[-1]["step"]
        line = (
            f"{run.name}: held-out accuracy {100 * first:.1f} % to {100 * last:.1f} % "
            f"in {steps} steps"
        )
        if run.summary is None:
            line += " (still running)"
        elif len(runs) == 1:  # not beside others: one run makes the base, the next reuses it
            line += f" ({duration(run.summary['seconds'])})"
        parts.append(line)
    return "\n".join(parts)


def _rows(run: Run) -> list[tuple[str, str, str]]:
    """(what, before, after) of the table. Before is the base model, or the first step."""
    k = run.config["evaluation"]["num_samples"]
    rows = [
        (f"held-out avg@{k}", f"eval/avg@{k}", "{:.1%}"),
        (f"held-out cons@{k}", f"eval/cons@{k}", "{:.1%}"),
        (f"held-out pass@{k}", f"eval/pass@{k}", "{:.1%}"),
        ("held-out length, tokens", "eval/length_mean", "{:.1f}"),
        ("held-out cut at the limit", "eval/truncated_share", "{:.1%}"),
        ("accuracy while sampling", "accuracy/sampled", "{:.1%}"),
        ("entropy, nats per token", "policy/entropy", "{:.3f}"),
        ("probability of the sampled token", "policy/token_prob", "{:.3f}"),
        ("prompts all right", "share/all_right", "{:.1%}"),
        ("prompts all wrong", "share/all_wrong", "{:.1%}"),
    ]
    table = []
    for title, metric, form in rows:
        values = [numbers[metric] for numbers in run.steps if metric in numbers]
        if values:
            table.append((title, form.format(values[0]), form.format(values[-1])))
    return table


def _examples(run: Run) -> str:
    """Responses of the first and of the last step, as HTML."""
    files = sorted((run.directory / "rollouts").glob("step_*.jsonl"))
    parts = []
    for file in [files[0], files[-1]] if len(files) > 1 else files:
        records = [json.loads(line) for line in file.read_text().splitlines()]
        parts.append(f"<h3>step {int(file.stem.removeprefix('step_'))}</h3>")
        for record in records[:: max(1, len(records) // EXAMPLES)][:EXAMPLES]:
            verdict = "correct" if record["correct"] else f"wrong, {record['answer']} is right"
            if record["finish_reason"] == "length":
                verdict += ", cut at the limit"
            parts.append(
                f"<pre><b>{html.escape(record['prompt'])}</b>{html.escape(record['response'])}</pre>"
                f"<p class=verdict>{html.escape(verdict)}; {record['length']} tokens, reward "
                f"{record['reward']:+.2f}</p>"
            )
    return "".join(parts)


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72em; margin: 2em auto; padding: 0 1em; }
img { width: 100%; } table { border-collapse: collapse; }
td, th { padding: .2em 1.2em .2em 0; text-align: right; border-bottom: 1px solid #ddd; }
td:first-child, th:first-child { text-align: left; }
pre { background: #f5f5f3; padding: .6em; margin: .8em 0 0; white-space: pre-wrap; }
.verdict { margin: 0; color: #666; font-size: 13px; }
"""


def _page(runs: Sequence[Run], png: bytes) -> str:
    image = base64.b64encode(png).decode()
    tables = []
    for run in runs:
        body = "".join(f"<tr><td>{t}</td><td>{a}</td><td>{b}</td></tr>" for t, a, b in _rows(run))
        tables.append(
            f"<h2>{html.escape(run.name)}: before and after</h2><table>"
            f"<tr><th></th><th>before</th><th>after</th></tr>{body}</table>"
        )
    first = runs[0]
    frozen = html.escape(json.dumps(first.frozen, indent=1))
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(first.name)}</title>"
        f"<style>{STYLE}</style>"
        f"<h1>{'<br>'.join(html.escape(line) for line in _headline(runs).splitlines())}</h1>"
        "<p>One point per rollout step; held-out accuracy where it was measured, its band the 95 % "
        "interval over the choice of problems. Entropy, probability and clipping are means over "
        "trained tokens.</p>"
        f'<img alt="plots of the run" src="data:image/png;base64,{image}">{"".join(tables)}'
        f"<h2>What the model writes</h2>{_examples(first)}"
        f"<h2>Config</h2><details><summary>fields, versions, command</summary><pre>{frozen}</pre>"
        "</details></html>\n"
    )
