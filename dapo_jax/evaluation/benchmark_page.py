"""A benchmark's table of figures, and its page, which shows each problem with its samples."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dapo_jax.runs.report import html
from dapo_jax.runs.report.plots import COLOURS, label_axis, new_figure, to_png
from dapo_jax.types import Attempt, Attempts

TITLES = {
    "length_mean": "mean length, tokens",
    "truncated_share": "cut at the limit",
    "unparsed_share": "no answer found",
    "invalid": "invalid",
    "faults": "scorer faults",
}
PAGE_CHARACTERS = 20_000_000  # of all samples; a browser has to hold the page


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the figures of several benchmarks as text, one column each."""
    rows = [["", *results], *_rows(results)]
    first, *widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(
        "  ".join([title.ljust(first), *map(str.rjust, cells, widths)]) for title, *cells in rows
    )


def _rows(results: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Returns for each figure its title and a cell of each benchmark."""
    figures = dict.fromkeys(name for of in results.values() for name in of)
    return [
        [TITLES.get(name, name), *(_cell(name, of.get(name)) for of in results.values())]
        for name in figures
    ]


def _cell(name: str, figure: Any) -> str:
    if figure is None:
        return "-"
    if isinstance(figure, dict):
        low, high = figure["interval"]
        return f"{100 * figure['value']:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"
    if name.endswith("_share"):
        return f"{100 * figure:.1f} %"
    return f"{figure:,}" if isinstance(figure, int) else f"{figure:,.1f}"


def write_page(
    file: Path,
    name: str,
    groups: Sequence[Attempts],
    figures: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> None:
    """Writes the self-contained page of a benchmark.

    Args:
        groups: the problems with their samples, in order.
        figures: see `metrics.statistics`.
        settings: what the samples depend on.
    """
    most = PAGE_CHARACTERS // max(1, sum(len(group.attempts) for group in groups))
    text = html.page(
        name,
        [name],
        html.table(_rows({name: figures})),
        html.note(
            "In brackets: 95 % bootstrap interval over problems. cons@k: majority vote over equal "
            "answers, a tie shared between the answers in it. pass@k: unbiased estimate."
        ),
        html.image(_curve(figures), "pass@k"),
        html.heading("Problems"),
        html.note("The bar is the share of correct samples. Click to open."),
        *(_problem(group, most) for group in groups),
        html.heading("Settings"),
        html.pre(json.dumps(settings, indent=1)),
    )
    file.write_text(text, encoding="utf-8")


def _problem(group: Attempts, most_characters: int) -> str:
    correct, n = sum(verdict.correct for verdict in group.verdicts), len(group.attempts)
    samples = (
        _sample(number, attempt, most_characters)
        for number, attempt in enumerate(group.attempts, 1)
    )
    summary = f"{group.problem.id}: {correct} of {n} correct, answer {group.problem.answer}"
    return html.details(summary, html.pre(group.problem.prompt), *samples, bar=correct / n)


def _sample(number: int, attempt: Attempt, most_characters: int) -> str:
    verdict, text = attempt.verdict, attempt.text
    kind = "right" if verdict.correct else "wrong"
    answer = "no answer found" if verdict.extracted is None else f"answered {verdict.extracted}"
    notes = [f"{number}: {kind}", answer, f"{attempt.length:,} tokens"]
    notes += ["cut at the limit"] * attempt.truncated + ["invalid"] * attempt.invalid
    notes += [verdict.note] if verdict.note else []
    left_out = len(text) - most_characters
    if left_out > 0:
        text = f"[{left_out:,} characters left out]\n{text[left_out:]}"
    return html.details(", ".join(notes), html.pre(text), kind=kind)


def _curve(figures: Mapping[str, Any]) -> bytes:
    """Returns a plot of pass@k over k with its interval, as a PNG."""
    points = [
        (int(name.removeprefix("pass@")), 100 * of["value"], *(100 * x for x in of["interval"]))
        for name, of in figures.items()
        if name.startswith("pass@")
    ]
    ks, values, lows, highs = zip(*sorted(points))
    figure = new_figure(6, 3.6)
    axis = figure.subplots()
    axis.fill_between(ks, lows, highs, color=COLOURS[0], alpha=0.15, linewidth=0)
    axis.plot(ks, values, color=COLOURS[0], marker="o", markersize=4)
    axis.set_xscale("log", base=2)
    axis.set_xticks(ks, map(str, ks))
    axis.minorticks_off()
    axis.set_ylim(0, 100)
    label_axis(axis, "pass@k, %", "k")
    return to_png(figure)
