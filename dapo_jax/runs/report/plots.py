"""The plots of a run's page, after the DAPO paper's figures 2, 3 and 7; matplotlib is used here.

One method has a colour for each series. Several methods have a colour each, named above the plots,
and dashes and markers for each series. The paper's curves are grey. The paper counts updates: its
curves have the runs' scale where these make equally many updates per rollout step, and at least a
quarter of the paper's in all. Otherwise they are stretched over the width of the runs.
"""

import io
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator

from dapo_jax.runs.report.data import Method
from dapo_jax.runs.report.paper_curves import Curve

COLOURS = ("#1b6ca8", "#d1495b", "#3a7d44", "#8d6a9f", "#c17c1e")
DASHES = ("-", "--", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # their number has no factor in common with DASHES
INK, GREY = "#222222", "#777777"
PAPER_STYLES = (("#777777", "--"), ("#555555", "-."), ("#a5a5a5", "--"))
SOURCE_CHARACTERS = 20
COLUMNS = 4  # panels in a row; the upper row has the remainder
LEGEND_INSIDE = 4  # entries; a longer legend is put below its plot
HEAT_MAP_LINES = 400  # several problems share a line where there are more
COMPARABLE = 4.0  # scales that differ by no more than this are drawn as one
PERCENT, NUMBER = 100.0, 1.0


class Panel(NamedTuple):
    title: str
    unit: float  # PERCENT or NUMBER
    series: tuple[tuple[str, str], ...]  # (metric, label)
    x: str = "step"
    x_label: str = "rollout step"


ACCURACY = (("eval/avg@k", "avg@k"), ("eval/cons@k", "cons@k"), ("eval/pass@k", "pass@k"))
TRAINING = (
    ("accuracy/sampled", "all sampled responses"),
    ("accuracy/trained", "after the filter"),
)
CLIPPED = (
    ("policy/clip_high_share", "above 1 + clip_high"),
    ("policy/clip_low_share", "below 1 - clip_low"),
)
CLIPPED_PROBABILITY = (
    ("policy/clip_high_prob", "above 1 + clip_high"),
    ("policy/clip_low_prob", "below 1 - clip_low"),
    ("policy/clip_dual_prob", "above clip_dual"),
)
WITHOUT_SIGNAL = (("share/all_right", "all right"), ("share/all_wrong", "all wrong"))
TRUNCATED = (
    ("length/truncated_share", "while training"),
    ("eval/truncated_share", "held-out"),
    ("rollout/ended_repetition", "ended for repetition, while training"),
    ("rollout/ended_thinking", "thinking ended by force, while training"),
)
LENGTH = (("length/mean", "mean"), ("length/max", "longest"))
PROBABILITY = (("policy/token_prob", "probability"),)
AGE = Panel(
    "age of the trained tokens, rollout steps",
    NUMBER,
    (("batch/staleness_mean", "mean"), ("batch/staleness_max", "oldest")),
)
REFLECTION = Panel(
    "responses that check or go back, %", PERCENT, (("reflection/share", "reflection"),)
)
PROBABILITY_OF_CLIPPED = Panel("probability of clipped tokens, mean", NUMBER, CLIPPED_PROBABILITY)
PANELS = (
    Panel("held-out accuracy, %", PERCENT, ACCURACY),
    Panel(
        "held-out accuracy by tokens sampled, %", PERCENT, ACCURACY[:1], "tokens", "tokens sampled"
    ),
    AGE,  # where any token is older than its step
    Panel("training accuracy, %", PERCENT, TRAINING),
    Panel("reward of trained responses, mean", NUMBER, (("reward/mean", "reward"),)),
    Panel("response length, tokens", NUMBER, LENGTH),
    Panel("entropy, nats per token", NUMBER, (("policy/entropy", "entropy"),)),
    Panel("probability of sampled tokens, mean", NUMBER, PROBABILITY),
    Panel("clipped tokens, %", PERCENT, CLIPPED),
    PROBABILITY_OF_CLIPPED,  # where a bound clipped any
    REFLECTION,  # where any response does
    Panel("sampled prompts without signal, %", PERCENT, WITHOUT_SIGNAL),
    Panel("responses cut at the limit, %", PERCENT, TRUNCATED),
)


def new_figure(width: float, height: float) -> Figure:
    """Returns an empty figure of this size in inches, which needs no display."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def label_axis(axis: Any, title: str, x_label: str) -> None:
    """Gives an axis its title, label, grid and frame."""
    axis.set_title(title, fontsize=11, loc="left")
    axis.set_xlabel(x_label, fontsize=9)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=9)


def to_png(figure: Figure) -> bytes:
    """Returns the figure as a PNG."""
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=110)
    return image.getvalue()


def plot(methods: Sequence[Method], headlines: Sequence[str], paper: Sequence[Curve] = ()) -> bytes:
    """Returns the plots as a PNG, with the headline of each method above them."""
    return to_png(draw(methods, headlines, paper))


def heat_map(rates: np.ndarray) -> bytes:
    """Returns a heat map of pass rates by problem and epoch as a PNG.

    The problems that were hardest when first tried are on top.

    Args:
        rates: float [problems, epochs], NaN where a problem was not tried; each was at least once.
    """
    first = rates[np.arange(len(rates)), np.isfinite(rates).argmax(axis=1)]
    order = np.lexsort((np.nanmean(rates, axis=1), first))
    lines = min(len(order), HEAT_MAP_LINES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # NaN where no problem of a line was tried
        means = [np.nanmean(rates[part], axis=0) for part in np.array_split(order, lines)]
    figure = new_figure(7.5, 4.5)
    axis = figure.subplots()
    image = axis.imshow(
        PERCENT * np.array(means),
        aspect="auto",
        interpolation="nearest",
        cmap="viridis",
        vmin=0,
        vmax=PERCENT,
        extent=(0.5, rates.shape[1] + 0.5, len(rates), 0),
    )
    label_axis(axis, "pass rate of each problem, %", "epoch")
    axis.grid(visible=False)
    axis.set_ylabel("problems, the hardest at first on top", fontsize=9)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(image, ax=axis)
    return to_png(figure)


def draw(
    methods: Sequence[Method], headlines: Sequence[str], curves: Sequence[Curve] = ()
) -> Figure:
    """Returns the plots as a figure. Arguments: see `plot`."""
    panels = _panels(methods)
    rows = -(-len(panels) // COLUMNS)
    figure = new_figure(15.5, (11.5 if curves else 9.5) * rows / 3)
    updates = common_updates(methods, curves)
    for panel, axis in _axes(figure, panels, rows):
        series = _series(panel, methods)
        handles = _draw_methods(axis, panel, series, methods)
        by_step = panel.x == "step"
        of_panel = [c for c in curves if by_step and c.metric in dict(panel.series)]
        if of_panel:
            handles += _draw_paper(axis, panel, of_panel, methods, updates)
        label_axis(axis, panel.title, panel.x_label)
        if by_step:
            axis.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        else:
            axis.xaxis.set_major_formatter(EngFormatter())
        below = {"loc": "upper left", "bbox_to_anchor": (-0.05, -0.17), "ncols": 2, "fontsize": 7}
        if handles:
            place = below if len(handles) > LEGEND_INSIDE else {"fontsize": 8}
            axis.legend(handles=handles, handlelength=3, edgecolor="none", framealpha=0.6, **place)
    if len(methods) == 1:
        figure.suptitle(plain(headlines[0]), fontsize=13)
    else:
        figure.legend(
            handles=[
                Line2D([], [], color=colour, linewidth=3, label=plain(headline))
                for colour, headline in zip(_colours(len(methods)), headlines)
            ],
            loc="outside upper center",
            ncols=1 if len(methods) <= 4 else 2,
            frameon=False,
        )
    return figure


def _panels(methods: Sequence[Method]) -> list[Panel]:
    """Returns the panels that the methods have."""
    metrics = lambda panel: [metric for metric, _ in panel.series]
    has_values = lambda panel: any(
        p.value for metric in metrics(panel) for method in methods for p in method.points(metric)
    )
    return [
        p
        for p in PANELS
        if (p.x == "step" or any(method.has("eval/avg@k", p.x) for method in methods))
        and (p not in (AGE, PROBABILITY_OF_CLIPPED, REFLECTION) or has_values(p))
    ]


def _axes(figure: Figure, panels: Sequence[Panel], rows: int) -> Iterator[tuple[Panel, Any]]:
    """Yields the panels with their axes: rows of four, below a row of the remainder."""
    top = len(panels) - (rows - 1) * COLUMNS
    grid = figure.add_gridspec(rows, top * COLUMNS)
    for i, panel in enumerate(panels):
        row, column, width = (0, i, COLUMNS) if i < top else (*divmod(i - top, COLUMNS), top)
        row += i >= top
        yield panel, figure.add_subplot(grid[row, column * width : (column + 1) * width])


def common_updates(methods: Sequence[Method], curves: Sequence[Curve]) -> float | None:
    """Returns updates per rollout step, if methods and paper can have one scale; else None."""
    steps = [method.last_step for method in methods]
    updates = [sum(p.value for p in method.points("optimizer/updates")) for method in methods]
    rates = [u / max(1, s) for u, s in zip(updates, steps)]
    if not curves or min(rates) <= 0 or max(rates) > 1.01 * min(rates):
        return None
    return rates[0] if max(updates) * COMPARABLE >= _end(curves) else None


def _end(curves: Sequence[Curve]) -> float:
    return max(curve.points[-1][0] for curve in curves)


def _series(panel: Panel, methods: Sequence[Method]) -> list[tuple[str, str]]:
    """Returns (metric, label) of each series that a method has, one for each held-out source."""
    ks = {method.num_samples for method in methods}
    at_k = f"@{min(ks)}" if len(ks) == 1 else "@k"
    series = [(metric, label.replace("@k", at_k)) for metric, label in panel.series]
    if panel.series is ACCURACY:
        sources = dict.fromkeys(source for method in methods for source in method.sources())
        series += [
            (f"eval/{source}/avg@k", f"avg{at_k}, {name}")
            for source, name in zip(sources, _short_names(list(sources)))
        ]
    return [pair for pair in series if any(method.has(pair[0]) for method in methods)]


def _draw_methods(
    axis: Any, panel: Panel, series: Sequence[tuple[str, str]], methods: Sequence[Method]
) -> list[Line2D]:
    """Draws the methods into one panel, with their intervals; returns the entries of its legend."""
    several = len(methods) > 1
    colours = _colours(len(methods) if several else len(series))
    handles = []
    for s, (metric, label) in enumerate(series):
        style: dict[str, Any] = {"linewidth": 1.6, "markersize": 3, "marker": "o"}
        if several:
            style |= {"linestyle": DASHES[s % len(DASHES)], "marker": MARKERS[s % len(MARKERS)]}
        for m, method in enumerate(methods):
            points = method.points(metric, panel.x)
            if not points:
                continue
            style["color"] = colours[m if several else s]
            line = {"marker": None} if len(points) > 60 else {}
            xs, values = [p.x for p in points], [panel.unit * p.value for p in points]
            axis.plot(xs, values, **style | line)
            bounds = [(p.x, *p.interval) for p in points if p.interval]
            if bounds:
                xs, low, high = np.array(bounds).T
                low, high = panel.unit * low, panel.unit * high
                axis.fill_between(xs, low, high, color=style["color"], alpha=0.15, linewidth=0)
        if not several or len(series) > 1:
            style |= {"color": INK} if several else {}
            handles.append(Line2D([], [], label=plain(label), **style))
    return handles


def _draw_paper(
    axis: Any,
    panel: Panel,
    curves: Sequence[Curve],
    methods: Sequence[Method],
    updates: float | None,
) -> list[Line2D]:
    """Draws the paper's curves with an axis for their updates and, for lengths of another
    magnitude, one for their tokens; returns the entries of the legend."""
    if updates is None:
        width = max(method.last_step for method in methods)
        steps_per_update = max(1, width) / _end(curves)
        title = "updates of the paper, on a scale of their own"
    else:
        steps_per_update = 1 / updates
        title = "updates, of the run and of the paper"
    _second_axis(axis.secondary_xaxis, "top", steps_per_update).set_xlabel(
        title, fontsize=8, color=GREY
    )
    height = 1.0
    if panel.series[0][0] == "length/mean":
        height = _height(panel, curves, methods)
        if height != 1:
            _second_axis(axis.secondary_yaxis, "right", height).set_ylabel(
                "tokens of the paper, on a scale of their own", fontsize=8, color=GREY
            )
    handles = []
    for c, curve in enumerate(curves):
        colour, dashes = PAPER_STYLES[c % len(PAPER_STYLES)]
        handles += axis.plot(
            [steps_per_update * update for update, _ in curve.points],
            [height * panel.unit * value for _, value in curve.points],
            color=colour,
            linestyle=dashes,
            linewidth=1.1,
            zorder=1.5,  # below the methods
            label=plain(curve.label),
        )
    return handles


def _height(panel: Panel, curves: Sequence[Curve], methods: Sequence[Method]) -> float:
    """Returns the factor that makes the paper's lengths as high as ours; 1 for one scale."""
    theirs = max(value for curve in curves for _, value in curve.points)
    points = [p for method in methods for metric, _ in panel.series for p in method.points(metric)]
    ours = max((point.value for point in points), default=theirs)
    if min(ours, theirs) <= 0 or max(ours, theirs) <= COMPARABLE * min(ours, theirs):
        return 1.0
    return ours / theirs


def _second_axis(make: Any, side: str, factor: float) -> Any:
    """Returns an axis on the other side; its numbers times the factor are those of the first."""
    second = make(side, functions=(lambda x: x / factor, lambda x: x * factor))
    second.tick_params(labelsize=8, colors=GREY)
    second.spines[side].set_color(GREY)
    return second


def _colours(number: int) -> list[Any]:
    if number <= len(COLOURS):
        return list(COLOURS[:number])
    return list(matplotlib.colormaps["turbo"](np.linspace(0.05, 0.95, number)))


def _short_names(sources: Sequence[str]) -> list[str]:
    """Returns the last part of each hub id or path, or its end, where these differ."""
    names = [source.rsplit("/", 1)[-1] for source in sources]
    names = names if len(set(names)) == len(names) else list(sources)
    return [n if len(n) <= SOURCE_CHARACTERS else "…" + n[1 - SOURCE_CHARACTERS :] for n in names]


def plain(text: str) -> str:
    """Returns text that matplotlib does not take for a formula."""
    return text.replace("$", r"\$")
