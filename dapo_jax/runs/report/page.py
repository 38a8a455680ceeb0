"""The page of one run or several: plots, a table of before and after, and sampled responses."""

import errno
import json
from collections.abc import Sequence
from pathlib import Path

from dapo_jax.runs.report import html
from dapo_jax.runs.report.data import Run, load_runs
from dapo_jax.runs.report.paper_curves import Curve
from dapo_jax.runs.report.plots import plot
from dapo_jax.types import UserError
from dapo_jax.utils.progress import duration

EXAMPLES = 4  # responses shown of the first and of the last step
ABOUT = """One point per rollout step. Held-out accuracy has a band: its 95 % interval over the
choice of problems. Entropy, probability and clipping are means over trained tokens."""
ABOUT_PAPER = """Grey: the curves of the DAPO paper (arXiv:2503.14476), of a model with 32 billion
parameters and of AIME 2024; compare their shape, not their height. The paper counts updates, 16 of
them to a rollout step, on the axis above each plot. Where that axis has a scale of its own, the
paper's training is stretched over the width of the run's."""


def write_report(
    directory: Path, *, others: Sequence[Path] = (), paper: Sequence[Curve] = ()
) -> Path:
    """Writes report.png and the self-contained report.html into the run directory.

    Reads the run directories only, also while the runs continue.

    Args:
        directory: the run.
        others: other runs, drawn into the same plots, each with a table of its own.
        paper: the DAPO paper's curves, drawn into the same plots.

    Returns:
        Path of the page.

    Raises:
        UserError: one of the directories holds no run, or the first cannot be written to.
    """
    runs = load_runs([directory, *others])
    headlines = [_headline(run, timed=len(runs) == 1) for run in runs]
    png = plot(runs, headlines, paper)
    header = ("", "before", "after")
    page = html.page(
        runs[0].name,
        headlines,
        html.note(f"{ABOUT} {ABOUT_PAPER if paper else ''}"),
        html.image(png, "plots of the run"),
        *(
            html.heading(f"{run.name}: before and after") + html.table(_rows(run), header)
            for run in runs
        ),
        html.heading("Sampled responses"),
        *_examples(runs[0]),
        html.heading("Config"),
        html.details("fields, versions, command", html.pre(json.dumps(runs[0].frozen, indent=1))),
    )
    file = directory / "report.html"
    try:
        (directory / "report.png").write_bytes(png)
        file.write_text(page)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        raise UserError(
            f"{error.filename} cannot be written ({error.strerror}). Put first a run whose "
            "directory you may write to."
        ) from error
    return file


def _headline(run: Run, *, timed: bool) -> str:
    line = f"{run.name}: "
    values = [value for _, value in run.values("eval/avg@k")]
    if values:
        line += f"held-out accuracy {100 * values[0]:.1f} % to {100 * values[-1]:.1f} % in "
    line += f"{run.steps[-1]['step']} steps"
    if run.summary is None:
        line += " (still running)"
    elif timed:  # alone: of several runs one makes the base, the next reuses it
        line += f" ({duration(run.summary['seconds'])})"
    return line


def _rows(run: Run) -> list[tuple[str, str, str]]:
    """Returns (title, before, after) of the table. Before is the base model, or the first step."""
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


def _examples(run: Run) -> list[str]:
    """Returns responses of the first and of the last step, as HTML."""
    files = sorted((run.directory / "rollouts").glob("step_*.jsonl"))
    parts = []
    for file in [files[0], files[-1]] if len(files) > 1 else files:
        records = [json.loads(line) for line in file.read_text().splitlines()]
        parts.append(html.heading(f"step {int(file.stem.removeprefix('step_'))}", level=3))
        for record in records[:: max(1, len(records) // EXAMPLES)][:EXAMPLES]:
            verdict = "correct" if record["correct"] else f"wrong, {record['answer']} is right"
            if record["finish_reason"] == "length":
                verdict += ", cut at the limit"
            about = f"{verdict}; {record['length']} tokens, reward {record['reward']:+.2f}"
            parts += [html.pre(record["response"], bold=record["prompt"]), html.note(about)]
    return parts
