"""What a person sees of a benchmark: the table of figures, and a page on which each problem can be
opened with its samples."""

import base64
import html
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from dapo_jax.types import Attempt, Attempts

TITLES = {
    "length_mean": "mean length, tokens",
    "truncated_share": "cut at the limit",
    "unparsed_share": "no answer found",
    "invalid": "broken off",
    "faults": "scorer faults",
}
PAGE_CHARACTERS = 20_000_000  # of samples, spread over them; a browser has to hold the page


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The figures of several benchmarks as text, one column each. See `evaluate.statistics`."""
    return "\n".join(
        "  ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(row))
        for row in _aligned([["", *results], *_rows(results)])
    )


def _aligned(rows: Sequence[Sequence[str]]) -> list[list[tuple[str, int]]]:
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [list(zip(row, widths)) for row in rows]


def _rows(results: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """A title and a cell of each benchmark, for every figure that one of them has."""
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


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72em; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; } img { max-width: 36em; width: 100%; }
td { padding: .15em 1.6em .15em 0; border-bottom: 1px solid #ddd; }
td + td { text-align: right; font-variant-numeric: tabular-nums; }
pre { background: #f5f5f3; padding: .6em; margin: .4em 0 .8em; white-space: pre-wrap;
      overflow-wrap: anywhere; }
summary { cursor: pointer; padding: .15em 0; } details details { margin-left: 1.5em; }
.bar { display: inline-block; width: 8em; height: .7em; background: #e6e3dd; margin-right: .7em; }
.bar i { display: block; height: 100%; background: #3a7d44; }
.right { color: #2f6b38; } .wrong { color: #a33; }
"""


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
        figures: see `evaluate.statistics`.
        settings: what the samples depend on.
    """
    most = PAGE_CHARACTERS // max(1, sum(len(group.attempts) for group in groups))
    rows = "".join(
        f"<tr><td>{html.escape(title)}</td><td>{html.escape(cell)}</td></tr>"
        for title, cell in _rows({name: figures})
    )
    curve = base64.b64encode(_curve(figures)).decode()
    body = "".join(_problem(group, most) for group in groups)
    text = (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(name)}</title>"
        f"<style>{STYLE}</style><h1>{html.escape(name)}</h1><table>{rows}</table>"
        "<p>In brackets: 95 % bootstrap interval over problems. cons@k: majority vote over equal "
        "answers, a tie shared between the answers in it. pass@k: unbiased estimate.</p>"
        f'<img alt="pass@k" src="data:image/png;base64,{curve}">'
        "<h2>Problems</h2><p>The bar is the share of correct samples. Click to open.</p>"
        f"{body}<h2>Settings</h2><pre>{html.escape(json.dumps(settings, indent=1))}</pre></html>\n"
    )
    # Lone surrogates come out of decoders; a page cannot hold them.
    file.write_text(text.encode("utf-8", "replace").decode(), encoding="utf-8")


def _problem(group: Attempts, most_characters: int) -> str:
    right = sum(verdict.correct for verdict in group.verdicts)
    share = 100 * right / len(group.attempts)
    samples = "".join(
        _sample(number, attempt, most_characters)
        for number, attempt in enumerate(group.attempts, 1)
    )
    return (
        f'<details><summary><span class=bar><i style="width:{share:.0f}%"></i></span>'
        f"{group.problem.id}: {right} of {len(group.attempts)} correct, "
        f"answer {html.escape(group.problem.answer)}</summary>"
        f"<pre>{html.escape(group.problem.prompt)}</pre>{samples}</details>"
    )


def _sample(number: int, attempt: Attempt, most_characters: int) -> str:
    verdict = attempt.verdict
    said = "no answer found" if verdict.extracted is None else f"answered {verdict.extracted}"
    notes = [said, f"{attempt.length:,} tokens"]
    notes += ["cut at the limit"] * attempt.truncated + ["broken off"] * attempt.invalid
    notes += [verdict.note] if verdict.note else []
    text = attempt.text
    if len(text) > most_characters:
        left_out = len(text) - most_characters
        text = f"[{left_out:,} characters left out]\n{text[left_out:]}"
    kind = "right" if verdict.correct else "wrong"
    return (
        f"<details><summary class={kind}>{number}: {kind}, "
        f"{html.escape(', '.join(notes))}</summary><pre>{html.escape(text)}</pre></details>"
    )


def _curve(figures: Mapping[str, Any]) -> bytes:
    """pass@k over k with its interval, as a PNG."""
    points = [
        (int(name.removeprefix("pass@")), 100 * of["value"], *(100 * x for x in of["interval"]))
        for name, of in figures.items()
        if name.startswith("pass@")
    ]
    ks, values, lows, highs = zip(*sorted(points))
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    axis.fill_between(ks, lows, highs, color="#1b6ca8", alpha=0.15, linewidth=0)
    axis.plot(ks, values, color="#1b6ca8", marker="o", markersize=4)
    axis.set_xscale("log", base=2)
    axis.set_xticks(ks, map(str, ks))
    axis.minorticks_off()
    axis.set_ylim(0, 100)
    axis.set_title("pass@k, %", loc="left", fontsize=11)
    axis.set_xlabel("k")
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=110)
    return image.getvalue()
