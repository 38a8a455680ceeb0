"""Findings as a table of text, as a page, and as the document of all chips."""

import html
import json
import textwrap
from collections.abc import Sequence
from pathlib import Path

from dapo_jax.tools.check.findings import FILE, Finding, Store

MARKER = "<!-- Below: python launch/check.py --document -->"
MARKDOWN_WIDTH = 120
COLOURS = {"ok": "#1a7f37", "slow": "#9a6700", "wrong": "#cf222e", "not run": "#57606a"}
STYLE = (
    "body{font:14px sans-serif;max-width:70em;margin:2em auto}td,th{text-align:left;"
    "padding:.3em .8em;border-bottom:1px solid #ddd;vertical-align:top}pre{white-space:pre-wrap}"
)


def everything(store: Store) -> list[Finding]:
    """Returns the findings, and for each planned check without one that it was not run."""
    found = list(store.findings)
    for part, names in store.planned.items():
        missing = [name for name in names if store.find(part, name) is None]
        found += [Finding(part, name, "not run", "no time was left", {}, 0.0) for name in missing]
    order = list(store.planned)
    return sorted(found, key=lambda f: order.index(f.part) if f.part in order else len(order))


def counts(store: Store) -> str:
    """Returns how many checks have each verdict."""
    verdicts = [finding.verdict for finding in everything(store)]
    return ", ".join(f"{verdicts.count(v)} {v}" for v in COLOURS if v in verdicts)


def write(store: Store) -> Path:
    """Writes check.html next to check.json and returns its path."""
    file = store.file.with_suffix(".html")
    machine = ", ".join(f"{name} {value}" for name, value in (store.machine or {}).items())
    rows = "".join(map(_row, everything(store)))
    file.write_text(
        f"<!doctype html><meta charset='utf-8'><title>Check</title><style>{STYLE}</style>"
        f"<h1>Check of {html.escape((store.machine or {}).get('kind', 'this machine'))}</h1>"
        f"<p>{html.escape(machine)}</p><p>{html.escape(counts(store))}</p>"
        "<table><tr><th>part<th>check<th>verdict<th>what was found<th>seconds</tr>"
        f"{rows}</table>\n"
    )
    return file


def _row(f: Finding) -> str:
    figures = html.escape(json.dumps(f.figures, indent=1)) if f.figures else ""
    details = (
        f"<details><summary>figures</summary><pre>{figures}</pre></details>" if figures else ""
    )
    part, name, reason = map(html.escape, (f.part, f.name, f.reason))
    verdict = f"<b style='color:{COLOURS[f.verdict]}'>{f.verdict}</b>"
    return f"<tr><td>{part}<td>{name}<td>{verdict}<td>{reason}{details}<td>{f.seconds:.1f}</tr>"


def write_document(file: Path, checks: Path) -> None:
    """Writes what follows the marker in docs/accelerators.md: the findings of each directory in
    `checks`, which are named after their machines."""
    text = file.read_text()
    above = text[: text.index(MARKER) + len(MARKER)]
    file.write_text(f"{above}\n\n{document(sorted(checks.iterdir()))}")


def document(directories: Sequence[Path]) -> str:
    """Returns a section for each directory with a check.json."""
    return "\n".join(_section(place) for place in directories if (place / FILE).is_file())


def _section(directory: Path) -> str:
    store = Store(directory)
    machine = store.machine or {}
    of = ", ".join(f"{name} {value}" for name, value in machine.items() if name != "kind")
    lines = [f"## {directory.name}", "", f"{machine.get('kind')}, {of}. {counts(store)}.", ""]
    lines += ["| part | check | verdict | seconds |", "|---|---|---|---|"]
    found = everything(store)
    lines += [f"| {f.part} | {f.name} | {f.verdict} | {f.seconds:.0f} |" for f in found]
    for f in found:
        text = f"- {f.part}, {f.name}: {f.reason}"
        lines += ["", *textwrap.wrap(text, MARKDOWN_WIDTH, subsequent_indent="  ")]
    return "\n".join([*lines, ""])
