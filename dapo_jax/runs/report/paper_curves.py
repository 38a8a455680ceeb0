"""The curves of the DAPO paper (arXiv:2503.14476), from the CSV files in `paper/`.

They are the paths of the paper's vector figures, scaled by the ticks. A file has the columns
`series`, `step` (gradient updates, 16 per rollout step) and one of values. Figures 4 to 6 have no
panel on the page of plots.
"""

import csv
from pathlib import Path
from typing import NamedTuple


class Curve(NamedTuple):
    """A curve of the paper in the unit of our metric."""

    metric: str
    label: str
    points: tuple[tuple[float, float], ...]  # (update, value)


CURVES = Path(__file__).parent / "paper"
PERCENT = {"aime24_pct": 0.01}  # columns in percent; the others have the unit of the metric
SOURCES = (  # figure, file, metric
    ("1", "fig1_aime24_pct.csv", "eval/avg@k"),
    ("2a", "fig2a_aime_avg32.csv", "eval/avg@k"),
    ("3a", "fig3a_mean_up_clipped_prob.csv", "policy/clip_high_prob"),
    ("3b", "fig3b_frac_prompts_acc1.csv", "share/all_right"),
    ("7a", "fig7a_mean_resp_len.csv", "length/mean"),
    ("7b", "fig7b_reward.csv", "reward/mean"),
    ("7c", "fig7c_entropy.csv", "policy/entropy"),
    ("7d", "fig7d_mean_prob.csv", "policy/token_prob"),
)
LEFT_OUT = {"DAPO cons@32", "DAPO pass@32"}  # of figure 1, which has no such panel


def load_paper() -> list[Curve]:
    """Returns the paper's curves, ordered by figure."""
    curves = []
    for figure, name, metric in SOURCES:
        with (CURVES / name).open(newline="", encoding="utf-8") as file:
            (*_, column), *records = csv.reader(file)
        series: dict[str, list[tuple[float, float]]] = {}
        for label, update, value in records:
            point = float(update), PERCENT.get(column, 1.0) * float(value)
            series.setdefault(label, []).append(point)
        for label in series.keys() - LEFT_OUT:
            points = tuple(sorted(series[label]))
            curves.append(Curve(metric, f"paper, figure {figure}: {label}", points))
    return sorted(curves, key=lambda curve: curve.label)
