"""Held-out accuracy against compute as a saturating curve, with intervals and an extrapolation.

    R(C) = R0 + (A - R0) / (1 + (C_mid / C)^B)

R0 is the base model's accuracy, A the asymptote, C_mid the compute at half of the gain, B the
steepness. Source: ScaleRL, arXiv:2510.13786, eq. 1. The paper fits after the first 1.5k GPU hours;
here every evaluation counts, and R0 is measured, not fitted.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import least_squares

from dapo_jax.runs.report.data import Method
from dapo_jax.runs.report.plots import COLOURS, PERCENT, label_axis, new_figure, plain, to_png
from dapo_jax.types import UserError

COMPUTE = {"tokens": "tokens sampled", "seconds": "seconds of training"}
MIN_EVALUATIONS = 4  # after the base model: one more than there are parameters
RESAMPLES = 200
SMALL = 0.02  # a smaller gain within the runs is none
WIDE = 0.1  # an interval of A beyond it leaves A undetermined
B_BOUNDS = (0.2, 20.0)
AHEAD = (2.0, 4.0)  # times the compute of the runs, at which the curve is extrapolated


class Curve(NamedTuple):
    """Parameters of R(C)."""

    base: float  # R0
    asymptote: float  # A
    midpoint: float  # C_mid
    steepness: float  # B

    def __call__(self, compute: Any) -> Any:
        return self.base + (self.asymptote - self.base) / (
            1 + (self.midpoint / compute) ** self.steepness
        )


class Fit(NamedTuple):
    """The curve of a method, and those of its resampled evaluations."""

    name: str
    unit: str  # a key of COMPUTE
    points: np.ndarray  # [evaluations of all runs, 2]: compute, accuracy
    curve: Curve
    resampled: list[Curve]

    def interval(self, name: str) -> tuple[float, float]:
        """Returns the 95 % interval of a parameter."""
        return _interval([getattr(curve, name) for curve in self.resampled])

    def at(self, compute: float) -> tuple[float, tuple[float, float]]:
        """Returns the accuracy at a compute and its 95 % interval."""
        return self.curve(compute), _interval([curve(compute) for curve in self.resampled])

    @property
    def undetermined(self) -> str:
        """Returns why the data do not determine the asymptote; "" where they do."""
        low, high = self.interval("asymptote")
        largest = self.points[:, 0].max()
        if self.curve(largest) - self.curve.base < SMALL:
            return "accuracy does not rise"
        if high - low > WIDE:
            return f"its interval is wider than {100 * WIDE:.0f} points"
        if self.interval("midpoint")[1] > largest:
            return "half of the gain may lie beyond the runs"
        return ""


def fit_method(method: Method, unit: str) -> Fit:
    """Returns the fitted curve of a method.

    Several runs are resampled as wholes, one run by the residuals of its evaluations.

    Args:
        unit: a key of COMPUTE.

    Raises:
        UserError: no such unit; a run has no evaluation of its base model, or too few after it.
    """
    if unit not in COMPUTE:
        raise UserError(f"compute must be one of {', '.join(COMPUTE)}; got {unit!r}.")
    runs = [_evaluations(run.steps, unit) for run in method.runs]
    for run, (base, points) in zip(method.runs, runs):
        if base is None:
            raise UserError(
                f"{run.directory} has no evaluation of its base model (step 0 in metrics.jsonl). "
                "Where a run was resumed in a new directory, put the lines of the first one's "
                "metrics.jsonl before those there."
            )
        if len(points) < MIN_EVALUATIONS:
            raise UserError(
                f"{run.directory} has {len(points)} evaluations after the base model's; a curve "
                f"needs {MIN_EVALUATIONS}. Train with a smaller config.evaluation.every_steps."
            )
    generator = np.random.default_rng(0)
    whole = fit_curve(*_together(runs))
    resampled = []
    for _ in range(RESAMPLES):
        if len(runs) > 1:
            chosen = [runs[i] for i in generator.integers(len(runs), size=len(runs))]
            base, points = _together(chosen)
        else:
            base, points = _together(runs)
            expected = whole(points[:, 0])
            residuals = generator.choice(points[:, 1] - expected, len(points))
            # Three fitted parameters make residuals too small.
            residuals *= np.sqrt(len(points) / (len(points) - 3))
            points = np.stack([points[:, 0], expected + residuals], axis=1)
        resampled.append(fit_curve(base, points, start=whole))
    return Fit(method.name, unit, _together(runs)[1], whole, resampled)


def fit_curve(base: float, points: np.ndarray, *, start: Curve | None = None) -> Curve:
    """Returns the curve with the least squares.

    Args:
        base: accuracy without compute, R0.
        points: [n, 2], compute above 0 and accuracy from 0 to 1.
        start: where the search begins, besides a grid without it.
    """
    compute, accuracy = points.T
    logs = np.log(compute)
    bounds = np.array(
        [(min(base, 1.0), 1.0 + 1e-9), (logs.min() - 5, logs.max() + 5), np.log(B_BOUNDS)]
    ).T
    curve = lambda theta: Curve(base, theta[0], float(np.exp(theta[1])), float(np.exp(theta[2])))
    if start is None:
        begins = [(0.9, mid, b) for mid in np.quantile(logs, (0.1, 0.5, 0.9)) for b in (0.0, 1.0)]
    else:
        begins = [(start.asymptote, np.log(start.midpoint), np.log(start.steepness))]
        begins += [(0.9, logs.max(), 0.0)]
    found = [
        least_squares(
            lambda theta: curve(theta)(compute) - accuracy,
            np.clip(begin, bounds[0] + 1e-9, bounds[1] - 1e-9),
            bounds=bounds,
        )
        for begin in begins
    ]
    return curve(min(found, key=lambda result: result.cost).x)


def in_words(fit: Fit) -> list[str]:
    """Returns the fit and its extrapolation as sentences."""
    percent, count, number = "{:.1%}".format, "{:,.0f}".format, "{:.2f}".format
    bounds = lambda interval, form: " to ".join(map(form, interval))
    curve, interval, unit = fit.curve, fit.interval, COMPUTE[fit.unit]
    lines = [
        f"{fit.name}: R0 = {percent(curve.base)}, "
        f"A = {percent(curve.asymptote)} ({bounds(interval('asymptote'), percent)}), "
        f"C_mid = {count(curve.midpoint)} {unit} ({bounds(interval('midpoint'), count)}), "
        f"B = {number(curve.steepness)} ({bounds(interval('steepness'), number)})"
    ]
    for times in AHEAD:
        compute = times * fit.points[:, 0].max()
        value, of_value = fit.at(compute)
        lines.append(
            f"{fit.name}: expected after {count(compute)} {unit}, {times:.0f} times the runs': "
            f"{percent(value)} ({bounds(of_value, percent)})"
        )
    if fit.undetermined:
        lines.append(f"warning: {fit.name}: the runs do not determine A: {fit.undetermined}.")
    return lines


def plot(fits: Sequence[Fit]) -> bytes:
    """Returns the evaluations and curves of methods as a PNG, up to twice the compute."""
    figure = new_figure(8, 5)
    axis = figure.add_subplot()
    lines = []
    for fit, colour in zip(fits, COLOURS * (1 + len(fits) // len(COLOURS))):
        compute, accuracy = fit.points.T
        x = np.geomspace(compute.min(), 2 * compute.max(), 200)
        curves = np.stack([curve(x) for curve in fit.resampled])
        low, high = np.quantile(curves, (0.025, 0.975), axis=0)
        axis.plot(compute, PERCENT * accuracy, "o", markersize=3, color=colour, alpha=0.5)
        lines += axis.plot(x, PERCENT * fit.curve(x), color=colour, label=plain(fit.name))
        axis.fill_between(x, PERCENT * low, PERCENT * high, color=colour, alpha=0.15, linewidth=0)
        axis.axvline(compute.max(), color=colour, linestyle=":", linewidth=1)
    axis.set_xscale("log")
    title = "held-out accuracy, %; dotted: the end of the runs"
    label_axis(axis, title, COMPUTE[fits[0].unit])
    # Without handles a legend leaves out names that begin with an underscore.
    axis.legend(handles=lines, fontsize=9, edgecolor="none")
    return to_png(figure)


def _evaluations(steps: Sequence[dict[str, Any]], unit: str) -> tuple[float | None, np.ndarray]:
    """Returns the base model's accuracy, and compute and accuracy of each later evaluation."""
    base, points, seconds = None, [], 0.0
    for numbers in steps:
        if numbers["step"] > 0:
            seconds += numbers["time/step"] - numbers.get("time/evaluation", 0.0)
        if "eval/avg@k" not in numbers:
            continue
        if numbers["step"] == 0:
            base = numbers["eval/avg@k"]
        else:
            compute = numbers["tokens"] if unit == "tokens" else seconds
            points.append((compute, numbers["eval/avg@k"]))
    return base, np.array(points, np.float64).reshape(-1, 2)


def _together(runs: Sequence[tuple[float | None, np.ndarray]]) -> tuple[float, np.ndarray]:
    """Returns the mean accuracy of the base models, and the evaluations of all runs."""
    bases = [base for base, _ in runs if base is not None]
    return float(np.mean(bases)), np.concatenate([points for _, points in runs])


def _interval(values: Sequence[float]) -> tuple[float, float]:
    low, high = np.quantile(values, (0.025, 0.975))
    return float(low), float(high)
