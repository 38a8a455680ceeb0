"""Parts of self-contained HTML pages, for the page of a run and the page of a benchmark.

Arguments are text and are escaped here, unless they are named `*_html`.
"""

import base64
import html
from collections.abc import Sequence

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72em; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; } img { max-width: 100%; }
td, th { padding: .2em 1.4em .2em 0; text-align: right; border-bottom: 1px solid #ddd;
         font-variant-numeric: tabular-nums; }
td:first-child, th:first-child { text-align: left; }
pre { background: #f5f5f3; padding: .6em; margin: .6em 0 .2em; white-space: pre-wrap;
      overflow-wrap: anywhere; }
summary { cursor: pointer; padding: .15em 0; } details details { margin-left: 1.5em; }
.bar { display: inline-block; width: 8em; height: .7em; background: #e6e3dd; margin-right: .7em; }
.bar i { display: block; height: 100%; background: #3a7d44; }
.note { margin: 0; color: #666; font-size: 13px; }
.pair { width: 100%; table-layout: fixed; margin-bottom: 1.5em; }
.pair td, .pair th { text-align: left; vertical-align: top; }
.right { color: #2f6b38; } .wrong { color: #a33; }
"""


def page(title: str, headlines: Sequence[str], *parts_html: str) -> str:
    """Returns a whole page."""
    text = (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title>"
        f"<style>{STYLE}</style><h1>{'<br>'.join(map(html.escape, headlines))}</h1>"
        f"{''.join(parts_html)}</html>\n"
    )
    # Decoders yield lone surrogates, which a page cannot hold.
    return text.encode("utf-8", "replace").decode()


def heading(text: str, level: int = 2) -> str:
    """Returns a heading."""
    return f"<h{level}>{html.escape(text)}</h{level}>"


def table(rows: Sequence[Sequence[str]], header: Sequence[str] = ()) -> str:
    """Returns a table whose first column holds titles and the others figures."""
    line = lambda cells, tag: (
        f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"
    )
    head = line(header, "th") if header else ""
    return f"<table>{head}{''.join(line(row, 'td') for row in rows)}</table>"


def columns(header: Sequence[str], cells_html: Sequence[str]) -> str:
    """Returns parts side by side, in columns of equal width."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    cells = "".join(f"<td>{cell}</td>" for cell in cells_html)
    return f"<table class=pair><tr>{head}</tr><tr>{cells}</tr></table>"


def image(png: bytes, alt: str) -> str:
    """Returns an image whose data is part of the page."""
    return f'<img alt="{alt}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'


def pre(text: str, *, bold: str = "") -> str:
    """Returns text as it is, after a part in bold."""
    return f"<pre>{f'<b>{html.escape(bold)}</b>' if bold else ''}{html.escape(text)}</pre>"


def paragraph(text: str) -> str:
    """Returns a paragraph."""
    return f"<p>{html.escape(text)}</p>"


def note(text: str, *, kind: str = "") -> str:
    """Returns a paragraph in small type, of a class of the style."""
    return f'<p class="note {kind}">{html.escape(text)}</p>'


def details(summary: str, *parts_html: str, kind: str = "", bar: float | None = None) -> str:
    """Returns parts that open with a click on their summary.

    Args:
        kind: a class of the style.
        bar: a share from 0 to 1, shown before the summary.
    """
    style = "" if bar is None else f'style="width:{100 * bar:.0f}%"'
    bar_html = style and f"<span class=bar><i {style}></i></span>"
    title = f'<summary class="{kind}">{bar_html}{html.escape(summary)}</summary>'
    return f"<details>{title}{''.join(parts_html)}</details>"
