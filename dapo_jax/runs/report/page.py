"""A run, or several, on one page: the plots, a table of before and after, and what the model wrote.
Reads the run directories only, also while the runs go on."""

import base64
import errno
import html
import json
from collections.abc import Sequence
from pathlib import Path

from dapo_jax.runs.report.data import Run, load_runs
from dapo_jax.runs.report.paper_curves import Paper
from dapo_jax.runs.report.plots import plot
from dapo_jax.types import UserError
from dapo_jax.utils.progress import duration

EXAMPLES = 4  # responses shown of the first and of the last step


def write_report(
    directory: Path, *, beside: Sequence[Path] = (), paper: Paper | None = None
) -> Path:
    """Writes report.png and the self-contained report.html into the run directory.

    Args:
        directory: the run.
        beside: other runs, drawn into the same plots and given a table of their own.
        paper: the DAPO paper's curves, drawn into the same plots.

    Returns:
        Path of the page.

    Raises:
        UserError: one of the directories holds no run, or the first cannot be written to.
    """
    runs = load_runs([directory, *beside])
    headlines = [_headline(run, timed=len(runs) == 1) for run in runs]
    png = plot(runs, headlines, paper)
    page = directory / "report.html"
    try:
        (directory / "report.png").write_bytes(png)
        page.write_text(_page(runs, headlines, png, paper))
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        raise UserError(
            f"{error.filename} cannot be written ({error.strerror}). Put first a run whose "
            "directory you may write to."
        ) from error
    return page


def _headline(run: Run, *, timed: bool) -> str:
    line = f"{run.name}: "
    values = [value for _, value in run.values("eval/avg@k")]
    if values:
        line += f"held-out accuracy {100 * values[0]:.1f} % to {100 * values[-1]:.1f} % in "
    line += f"{run.steps[-1]['step']} steps"
    if run.summary is None:
        line += " (still running)"
    elif timed:  # not beside others: one run makes the base, the next reuses it
        line += f" ({duration(run.summary['seconds'])})"
    return line


def _rows(run: Run) -> list[tuple[str, str, str]]:
    """(what, before, after) of the table. Before is the base model, or the first step."""
    k = run.num_samples
    rows = [
        (f"held-out avg@{k}", "eval/avg@k", "{:.1%}"),
        *((f"held-out avg@{k}, {s}", f"eval/{s}/avg@k", "{:.1%}") for s in run.sources()),
        (f"held-out cons@{k}", "eval/cons@k", "{:.1%}"),
        (f"held-out pass@{k}", "eval/pass@k", "{:.1%}"),
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
        values = [value for _, value in run.values(metric)]
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


OF_THE_PAPER = """
Grey: the curves of the DAPO paper (arXiv:2503.14476), whose model has 32 billion parameters and
whose held-out problems are AIME 2024; beside another model and other problems they compare in
shape, not in height. The paper counts updates, 16 of them to a rollout step. Their axis is above
each plot; where it says that it has a scale of its own, the paper's training is stretched over the
width of the run's."""


def _page(runs: Sequence[Run], headlines: Sequence[str], png: bytes, paper: Paper | None) -> str:
    image = base64.b64encode(png).decode()
    tables = []
    for run in runs:
        body = "".join(
            f"<tr><td>{html.escape(title)}</td><td>{before}</td><td>{after}</td></tr>"
            for title, before, after in _rows(run)
        )
        tables.append(
            f"<h2>{html.escape(run.name)}: before and after</h2><table>"
            f"<tr><th></th><th>before</th><th>after</th></tr>{body}</table>"
        )
    first = runs[0]
    frozen = html.escape(json.dumps(first.frozen, indent=1))
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(first.name)}</title>"
        f"<style>{STYLE}</style>"
        f"<h1>{'<br>'.join(html.escape(line) for line in headlines)}</h1>"
        "<p>One point per rollout step; held-out accuracy where it was measured, its band the 95 % "
        "interval over the choice of problems. Entropy, probability and clipping are means over "
        "trained tokens."
        f"{OF_THE_PAPER if paper else ''}</p>"
        f'<img alt="plots of the run" src="data:image/png;base64,{image}">{"".join(tables)}'
        f"<h2>What the model writes</h2>{_examples(first)}"
        f"<h2>Config</h2><details><summary>fields, versions, command</summary><pre>{frozen}</pre>"
        "</details></html>\n"
    )
