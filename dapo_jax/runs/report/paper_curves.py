"""The curves of the DAPO paper (arXiv:2503.14476), from CSV files: those in `paper/` here, or a
user's own. The committed ones are the paths of the paper's vector figures, scaled by the ticks.

A file has the columns `series`, `step` (gradient updates, of which the paper makes 16 per rollout
step) and one of values. Figures 3a (the mean probability of the tokens that are clipped, not their
share) and 4 to 6 (ablations) have no panel on the page of plots and are not read.
"""

import csv
import math
from pathlib import Path
from typing import NamedTuple

from dapo_jax.types import UserError


class Curve(NamedTuple):
    metric: str  # of ours, beside which it is drawn
    label: str
    points: tuple[tuple[float, float], ...]  # (update, value in the unit of our metric)


class Paper(NamedTuple):
    curves: tuple[Curve, ...]
    missing: tuple[str, ...]  # files that the folder lacks


class Source(NamedTuple):
    file: str
    figure: str
    column: str
    metric: str
    unit: float = 1.0  # of the column, in units of the metric
    series: str | None = None  # the only one that is taken; None: all


CURVES = Path(__file__).parent / "paper"
SOURCES = (
    Source("fig1_aime24_pct.csv", "1", "aime24_pct", "eval/avg@k", 0.01, "DAPO avg@32"),
    Source("fig2a_aime_avg32.csv", "2a", "aime_avg32", "eval/avg@k"),
    Source("fig3b_frac_prompts_acc1.csv", "3b", "frac_prompts_acc1", "share/all_right"),
    Source("fig7a_mean_resp_len.csv", "7a", "mean_resp_len", "length/mean"),
    Source("fig7b_reward.csv", "7b", "reward", "reward/mean"),
    Source("fig7c_entropy.csv", "7c", "entropy", "policy/entropy"),
    Source("fig7d_mean_prob.csv", "7d", "mean_prob", "policy/token_prob"),
)


def load_paper(folder: Path) -> Paper:
    """The curves of the files that the folder has.

    Raises:
        UserError: there is no such folder, it has none of the files, or one of them is malformed.
    """
    if not folder.is_dir():
        raise UserError(f"--paper={folder}: no such folder.")
    found = [source for source in SOURCES if (folder / source.file).exists()]
    if not found:
        names = ", ".join(source.file for source in SOURCES)
        raise UserError(f"--paper={folder} has none of the files of the paper's curves: {names}.")
    missing = tuple(source.file for source in SOURCES if source not in found)
    return Paper(tuple(curve for source in found for curve in _curves(folder, source)), missing)


def _curves(folder: Path, source: Source) -> list[Curve]:
    path = folder / source.file
    series: dict[str, list[tuple[float, float]]] = {}
    needed = ("series", "step", source.column)
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            columns = list(reader.fieldnames or ())
            for name in needed:
                if name not in columns:
                    raise UserError(
                        f"{path}, line 1: no column {name!r}. The columns {', '.join(needed)} are "
                        f"needed, there are: {', '.join(columns) or 'none'}."
                    )
            for row in reader:
                where = f"{path}, line {reader.line_num}"
                # DictReader fills a short row with None and puts what is too much under None.
                if None in row or None in row.values():
                    raise UserError(f"{where}: not as many cells as the {len(columns)} columns.")
                update, value = (_number(row[name], where, name) for name in needed[1:])
                series.setdefault(row["series"], []).append((update, value * source.unit))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}).") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} is not a CSV file in UTF-8 ({error}).") from error
    if source.series is not None:
        series = {name: points for name, points in series.items() if name == source.series}
    if not series:
        wanted = "rows" if source.series is None else f"rows of the series {source.series!r}"
        raise UserError(f"{path} has no {wanted}; leave the file out or complete it.")
    return [
        Curve(source.metric, f"paper, figure {source.figure}: {name}", tuple(sorted(points)))
        for name, points in series.items()
    ]


def _number(text: str, where: str, column: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"{where}: {column} is {text!r}, it has to be a number.")
    return number
