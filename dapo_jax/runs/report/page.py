"""The page of one run or several: plots, before and after in figures and responses."""

import contextlib
import errno
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dapo_jax.rewards.reflection import find_reflection
from dapo_jax.runs.report import diagnosis, html
from dapo_jax.runs.report.data import Method, Run, by_method, load_runs, pass_rates
from dapo_jax.runs.report.paper_curves import Curve
from dapo_jax.runs.report.plots import heat_map, plot
from dapo_jax.types import UserError
from dapo_jax.utils.progress import duration

EXAMPLES = 4  # responses shown of the first and of the last step
TRANSCRIPTS = 5  # held-out problems shown with a response before, halfway and after
REFLECTIONS = 3  # responses shown that check or go back
ENDS = {
    "stop": "ended by itself",
    "length": "cut at the limit",
    "repetition": "ended for repetition",
    "invalid": "invalid",
}
ABOUT = """One point per rollout step. Held-out accuracy has a band: its 95 % interval over the
choice of problems. Entropy, probability and clipping are means over trained tokens."""
ABOUT_SEEDS = """Runs that differ in their seed alone are one line: their mean at the steps that all
have done. Their band is the 95 % bootstrap interval over seeds, too narrow where these are few."""
ABOUT_TRANSCRIPTS = """The first sample of each problem, not a chosen one; problems whose verdict
changed stand first."""
ABOUT_REFLECTION = """By a list of phrases, docs/metrics.md; of the responses that
log.rollouts_per_step keeps."""
ABOUT_PASS_RATES = """{problems:,} problems were tried at least once; white: not in this epoch.
Where config.data.train names pass rates from before the run, column 1 has these."""
ABOUT_PAPER = """Grey: the curves of the DAPO paper (arXiv:2503.14476), of a model with 32 billion
parameters and of AIME 2024; compare their shape, not their height. The paper counts updates, 16 of
them to a rollout step, on the axis above each plot. Where that axis has a scale of its own, the
paper's training is stretched over the width of the run's."""


def write_report(
    directory: Path, *, others: Sequence[Path] = (), paper: Sequence[Curve] = ()
) -> Path:
    """Writes report.png and the self-contained report.html into the run directory.

    The runs may still train: none of their own files is changed.

    Args:
        directory: the run.
        others: other runs, drawn into the same plots, each with a table of its own. Runs that
            differ in their seed alone are drawn as one.
        paper: the DAPO paper's curves, drawn into the same plots.

    Returns:
        Path of the page.

    Raises:
        UserError: one of the directories holds no run, or the first cannot be written to.
    """
    runs = load_runs([directory, *others])
    methods = by_method(runs)
    headlines = [_headline(method, timed=len(runs) == 1) for method in methods]
    png = plot(methods, headlines, paper)
    about = [ABOUT] + [ABOUT_SEEDS] * (len(methods) < len(runs)) + [ABOUT_PAPER] * bool(paper)
    header = ("", "before", "after")
    page = html.page(
        methods[0].name,
        headlines,
        html.note(" ".join(about)),
        html.image(png, "plots of the run"),
        *(
            html.heading(f"{_title(method)}: before and after") + html.table(_rows(method), header)
            for method in methods
        ),
        html.heading("Diagnosis"),
        *(html.paragraph(line) for run in runs for line in diagnosis.in_words(run, paper)),
        *_pass_rates(runs[0]),
        *_transcripts(runs[0]),
        *_reflections(runs[0]),
        html.heading("Sampled responses in training"),
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


def _title(method: Method) -> str:
    seeds = len(method.runs)
    return method.name if seeds == 1 else f"{method.name}, {seeds} seeds"


def _headline(method: Method, *, timed: bool) -> str:
    line = f"{_title(method)}: "
    points = method.points("eval/avg@k")
    if points:
        first, last = 100 * points[0].value, 100 * points[-1].value
        line += f"held-out accuracy {first:.1f} % to {last:.1f} % in "
    line += f"{method.last_step} steps"
    summary = method.runs[0].summary
    if any(run.summary is None for run in method.runs):
        line += " (still running)"
    elif timed and summary:  # alone: of several runs one makes the base, the next reuses it
        line += f" ({duration(summary['seconds'])})"
    return line


def _rows(method: Method) -> list[tuple[str, str, str]]:
    """Returns (title, before, after) of the table. Before is the base model, or the first step.
    Several seeds have their interval."""
    k, seeds = method.num_samples, len(method.runs)
    rows = [
        (f"held-out avg@{k}", "eval/avg@k", "{:.1%}"),
        *((f"held-out avg@{k}, {s}", f"eval/{s}/avg@k", "{:.1%}") for s in method.sources()),
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
        points = method.points(metric)
        cells = [form.format(point.value) for point in points]
        if seeds > 1:
            of = [[form.format(bound) for bound in point.interval or ()] for point in points]
            cells = [f"{cell} [{', '.join(bounds)}]" for cell, bounds in zip(cells, of)]
        if cells:
            table.append((title, cells[0], cells[-1]))
    return table


def _pass_rates(run: Run) -> list[str]:
    """Returns the heat map of pass rates as HTML, where a problem was tried twice."""
    rates = pass_rates(run)
    if not (np.isfinite(rates).sum(axis=1) > 1).any():
        return []
    picture = html.image(heat_map(rates), "pass rate of each problem by epoch")
    about = ABOUT_PASS_RATES.format(problems=len(rates))
    return [html.heading("Difficulty of the training problems"), html.note(about), picture]


def _transcripts(run: Run) -> list[str]:
    """Returns responses of the first evaluation, one in the middle and the last side by side, as
    HTML."""
    files = sorted((run.directory / "heldout").glob("step_*.jsonl"))
    every = [records for records in map(_records, files) if records]
    if len(every) < 2:
        return []
    of_step = [every[i] for i in dict.fromkeys((0, len(every) // 2, len(every) - 1))]
    problems = sorted(zip(*of_step), key=lambda of: of[0]["correct"] == of[-1]["correct"])
    parts = [html.heading(f"{run.name}: the same held-out problems, before and after")]
    parts.append(html.note(ABOUT_TRANSCRIPTS))
    k, steps = run.num_samples, [records[0]["step"] for records in of_step]
    header = [f"after step {step}" if step else "base model" for step in steps]
    for of_problem in problems[:TRANSCRIPTS]:
        cells = [
            html.pre(record["response"])
            + html.note(
                f"{_verdict(record)}; {record['length']} tokens; "
                f"{record['accuracy'] * k:.0f} of {k} samples correct",
                kind="right" if record["correct"] else "wrong",
            )
            for record in of_problem
        ]
        parts += [html.pre("", bold=of_problem[0]["prompt"]), html.columns(header, cells)]
    return parts


def _reflections(run: Run) -> list[str]:
    """Returns the first sampled responses with a phrase of reflection, as HTML."""
    parts = [html.heading("The first responses that check or go back"), html.note(ABOUT_REFLECTION)]
    for file in sorted((run.directory / "rollouts").glob("step_*.jsonl")):
        for record in _records(file):
            if (phrase := find_reflection(record["response"])) is None:
                continue
            about = f"step {_step(file)}: {phrase[0]!r}; {_verdict(record)}"
            parts += [html.pre(record["response"], bold=record["prompt"]), html.note(about)]
            if len(parts) >= 2 + 2 * REFLECTIONS:
                return parts
    return parts if len(parts) > 2 else []


def _examples(run: Run) -> list[str]:
    """Returns responses of the first and of the last step, as HTML."""
    files = sorted((run.directory / "rollouts").glob("step_*.jsonl"))
    parts = []
    for file in [files[0], files[-1]] if len(files) > 1 else files:
        records = _records(file)
        parts.append(html.heading(f"step {_step(file)}", level=3))
        for record in records[:: max(1, len(records) // EXAMPLES)][:EXAMPLES]:
            about = f"{_verdict(record)}; {record['length']} tokens, reward {record['reward']:+.2f}"
            parts += [html.pre(record["response"], bold=record["prompt"]), html.note(about)]
    return parts


def _step(file: Path) -> int:
    return int(file.stem.removeprefix("step_"))


def _records(file: Path) -> list[dict[str, Any]]:
    """Returns the records of a file, without a line that a kill left half written."""
    records = []
    for line in file.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            records.append(json.loads(line))
    return records


def _verdict(record: dict[str, Any]) -> str:
    verdict = "correct" if record["correct"] else f"wrong, {record['answer']} is right"
    if record.get("note"):  # the scorer failed: it may be either
        verdict = f"no verdict ({record['note']}), {record['answer']} is right"
    return f"{verdict}, {ENDS[record['finish_reason']]}"
