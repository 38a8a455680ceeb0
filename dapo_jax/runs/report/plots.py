"""The plots of the page, in the manner of the DAPO paper's figures 2, 3 and 7.

One run is drawn in colours by series. Several are drawn in colours by run, told above the plots,
and in dashes and markers by series, told in each. The paper's curves are grey.

The paper counts gradient updates, a run of ours rollout steps. Where the runs make as many updates
per rollout step as each other and at least a quarter of the paper's, both are drawn to one scale.
Otherwise the paper's curve is stretched over the width of the run, and its axis, above, says so.
"""

import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from dapo_jax.runs.report.data import Run
from dapo_jax.runs.report.paper_curves import Curve, Paper

COLOURS = ("#1b6ca8", "#d1495b", "#3a7d44", "#8d6a9f", "#c17c1e")
MORE_COLOURS = ("#1f9e9e", "#5b4636", "#e377c2", "#7f8f1f", "#23235b")
DASHES = ("-", "--", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # as many as have no factor in common with DASHES
INK, GREY = "#222222", "#777777"
PAPER_STYLES = (("#777777", "--"), ("#555555", "-."), ("#a5a5a5", "--"))
SOURCE_CHARACTERS = 20
LEGEND_INSIDE = 4  # entries; a longer legend is put below its plot
LEGEND_BELOW = {
    "loc": "upper left", "bbox_to_anchor": (-0.05, -0.17), "ncols": 2, "columnspacing": 1.0,
    "fontsize": 7,
}  # fmt: skip
NOISY_POINTS = 200  # of a curve too dense for dashes
COMPARABLE = 4.0  # scales that differ by no more than this are drawn as one

PERCENT, NUMBER = 100.0, 1.0


class Panel(NamedTuple):
    title: str
    unit: float  # PERCENT or NUMBER
    series: tuple[tuple[str, str], ...]  # (metric, label)


PANELS = (
    Panel("held-out accuracy, %", PERCENT, (
        ("eval/avg@k", "avg@k"), ("eval/cons@k", "cons@k"), ("eval/pass@k", "pass@k"))),
    Panel("training accuracy, %", PERCENT, (
        ("accuracy/sampled", "all that was sampled"), ("accuracy/trained", "after the filter"))),
    Panel("reward of the trained responses, mean", NUMBER, (("reward/mean", "reward"),)),
    Panel("response length, tokens", NUMBER, (("length/mean", "mean"), ("length/max", "longest"))),
    Panel("entropy, nats per token", NUMBER, (("policy/entropy", "entropy"),)),
    Panel("probability of the sampled token, mean", NUMBER, (
        ("policy/token_prob", "probability"),)),
    Panel("clipped tokens, %", PERCENT, (
        ("policy/clip_high_share", "above 1 + clip_high"),
        ("policy/clip_low_share", "below 1 - clip_low"))),
    Panel("sampled prompts without signal, %", PERCENT, (
        ("share/all_right", "all right"), ("share/all_wrong", "all wrong"))),
    Panel("responses cut at the limit, %", PERCENT, (
        ("length/truncated_share", "while training"), ("eval/truncated_share", "held-out"))),
)  # fmt: skip


def plot(runs: Sequence[Run], headlines: Sequence[str], paper: Paper | None = None) -> bytes:
    """The plots as a PNG. `headlines`: what is written of each run above them."""
    image = io.BytesIO()
    draw(runs, headlines, paper).savefig(image, format="png", dpi=110)
    return image.getvalue()


def draw(runs: Sequence[Run], headlines: Sequence[str], paper: Paper | None = None) -> Figure:
    """The plots as a figure. Arguments as of `plot`."""
    curves = paper.curves if paper else ()
    figure = Figure(figsize=(13.5, 11.5 if curves else 9.5), layout="constrained")
    FigureCanvasAgg(figure)
    updates = common_updates(runs, curves)
    for axis, panel in zip(figure.subplots(3, 3).ravel(), PANELS):
        series = _series(panel, runs)
        handles = _draw_runs(axis, panel.unit, series, runs)
        beside = [curve for curve in curves if curve.metric in dict(panel.series)]
        if beside:
            handles += _draw_paper(axis, panel, beside, runs, updates)
        axis.set_title(panel.title, fontsize=11, loc="left")
        axis.set_xlabel("rollout step", fontsize=9)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=9)
        if handles:
            below = len(handles) > LEGEND_INSIDE
            axis.legend(
                handles=handles,
                handlelength=3,
                framealpha=0.75,
                edgecolor="none",
                **(LEGEND_BELOW if below else {"fontsize": 8}),
            )
    if len(runs) == 1:
        figure.suptitle(_plain(headlines[0]), fontsize=13)
    else:
        figure.legend(
            handles=[
                Line2D([], [], color=colour, linewidth=3, label=_plain(headline))
                for colour, headline in zip(_colours(len(runs)), headlines)
            ],
            loc="outside upper center",
            ncols=1 if len(runs) <= 4 else 2,
            fontsize=12 if len(runs) <= 4 else 9,
            frameon=False,
        )
    return figure


def common_updates(runs: Sequence[Run], curves: Sequence[Curve]) -> float | None:
    """Updates per rollout step of the runs, if they can be drawn to one scale with the paper."""
    steps = [run.steps[-1]["step"] for run in runs]
    updates = [sum(value for _, value in run.values("optimizer/updates")) for run in runs]
    rates = [u / max(1, s) for u, s in zip(updates, steps)]
    if not curves or min(rates) <= 0 or max(rates) > 1.01 * min(rates):
        return None
    return rates[0] if max(updates) * COMPARABLE >= max(_end(curve) for curve in curves) else None


def _end(curve: Curve) -> float:
    return curve.points[-1][0]


def _series(panel: Panel, runs: Sequence[Run]) -> list[tuple[str, str]]:
    """(metric, label) of what the runs have of a panel, with a line for each held-out source."""
    ks = {run.num_samples for run in runs}
    at_k = f"@{min(ks)}" if len(ks) == 1 else "@k"  # k differs: the headlines tell
    series = [(metric, label.replace("@k", at_k)) for metric, label in panel.series]
    if panel.series[0][0] == "eval/avg@k":
        sources = dict.fromkeys(source for run in runs for source in run.sources())
        series += [
            (f"eval/{source}/avg@k", f"avg{at_k}, {name}")
            for source, name in zip(sources, _short_names(list(sources)))
        ]
    return [pair for pair in series if any(run.values(pair[0]) for run in runs)]


def _draw_runs(
    axis: Any, unit: float, series: Sequence[tuple[str, str]], runs: Sequence[Run]
) -> list[Line2D]:
    """Draws the runs of one panel, and returns the entries of its legend."""
    several = len(runs) > 1
    colours = _colours(len(runs) if several else len(series))
    handles = []
    for s, (metric, label) in enumerate(series):
        style: dict[str, Any] = {"linewidth": 1.6, "markersize": 3, "marker": "o"}
        if several:
            style |= {"linestyle": DASHES[s % len(DASHES)], "marker": MARKERS[s % len(MARKERS)]}
        for r, run in enumerate(runs):
            points = run.values(metric)
            if not points:
                continue
            steps, values = zip(*points)
            style["color"] = colours[r if several else s]
            line = {"marker": None} if len(points) > 60 else {}
            axis.plot(steps, [unit * value for value in values], **style | line)
            if metric == "eval/avg@k":
                _band(axis, run, style["color"])
        if not several or len(series) > 1:
            style |= {"color": INK} if several else {}
            handles.append(Line2D([], [], label=_plain(label), **style))
    return handles


def _band(axis: Any, run: Run, colour: str) -> None:
    """The interval of held-out accuracy over the choice of problems."""
    low, high = dict(run.values("eval/interval_low")), dict(run.values("eval/interval_high"))
    steps = sorted(low.keys() & high.keys())
    if steps:
        bounds = ([PERCENT * bound[step] for step in steps] for bound in (low, high))
        axis.fill_between(steps, *bounds, color=colour, alpha=0.15, linewidth=0)


def _draw_paper(
    axis: Any, panel: Panel, curves: Sequence[Curve], runs: Sequence[Run], updates: float | None
) -> list[Line2D]:
    """Draws the paper's curves in the units of the panel's axes, with axes of their own that tell
    the true numbers above and, for lengths of another magnitude, on the right."""
    if updates is None:
        width = max(run.steps[-1]["step"] for run in runs)
        steps_per_update = max(1, width) / max(map(_end, curves))
        title = "updates of the paper, on a scale of their own"
    else:
        steps_per_update = 1 / updates
        title = "updates, of the run and of the paper"
    _second_axis(axis.secondary_xaxis, "top", steps_per_update).set_xlabel(
        title, fontsize=8, color=GREY
    )
    height = 1.0
    if panel.series[0][0] == "length/mean":
        height = _height(panel, curves, runs)
        if height != 1:
            _second_axis(axis.secondary_yaxis, "right", height).set_ylabel(
                "tokens of the paper, on a scale of their own", fontsize=8, color=GREY
            )
    handles = []
    for c, curve in enumerate(curves):
        colour, dashes = PAPER_STYLES[c % len(PAPER_STYLES)]
        noisy = len(curve.points) > NOISY_POINTS
        handles += axis.plot(
            [steps_per_update * update for update, _ in curve.points],
            [height * panel.unit * value for _, value in curve.points],
            color=colour,
            linestyle="-" if noisy else dashes,
            linewidth=0.8 if noisy else 1.3,
            zorder=1.5,  # below the runs
            label=_plain(curve.label),
        )
    return handles


def _height(panel: Panel, curves: Sequence[Curve], runs: Sequence[Run]) -> float:
    """What the paper's lengths are multiplied with to be as high as the runs'; 1 if they can be
    drawn to one scale."""
    theirs = max(value for curve in curves for _, value in curve.points)
    values = [v for run in runs for metric, _ in panel.series for _, v in run.values(metric)]
    ours = max(values, default=theirs)
    if min(ours, theirs) <= 0 or max(ours, theirs) <= COMPARABLE * min(ours, theirs):
        return 1.0
    return ours / theirs


def _second_axis(make: Any, side: str, factor: float) -> Any:
    """An axis on the other side whose numbers, times the factor, are those of the first."""
    second = make(side, functions=(lambda x: x / factor, lambda x: x * factor))
    second.tick_params(labelsize=8, colors=GREY)
    second.spines[side].set_color(GREY)
    return second


def _colours(number: int) -> list[Any]:
    chosen = COLOURS + MORE_COLOURS
    if number <= len(chosen):
        return list(chosen[:number])
    return list(matplotlib.colormaps["turbo"](np.linspace(0.05, 0.95, number)))


def _short_names(sources: Sequence[str]) -> list[str]:
    """The last part of a hub id or path, where that tells the sources apart, and its end where it
    is long. The table below the plots has the full names."""
    names = [source.rsplit("/", 1)[-1] for source in sources]
    names = names if len(set(names)) == len(names) else list(sources)
    return [n if len(n) <= SOURCE_CHARACTERS else "…" + n[1 - SOURCE_CHARACTERS :] for n in names]


def _plain(text: str) -> str:
    """Text that matplotlib takes for itself and not for a formula."""
    return text.replace("$", r"\$")
