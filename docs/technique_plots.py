"""Draws what DAPO's four techniques do to the gradient: python docs/technique_plots.py

Writes one PNG per technique into docs/techniques, or into the directory given by --output, and
prints the numbers that docs/techniques.md quotes. They come from the functions that training runs.
For dynamic sampling alone, curves and numbers are a formula; the dots are groups put through the
function, and the last number says how far from the formula they lie.
"""

import argparse
import functools
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image
from scipy.special import betaln

from dapo_jax.algorithms.advantages import group_advantages
from dapo_jax.algorithms.aggregation import aggregate
from dapo_jax.algorithms.overlong import soft_overlong_punishment
from dapo_jax.algorithms.surrogate import surrogate
from dapo_jax.runs.report.plots import COLOURS

BLUE, RED, GREEN, PURPLE, OCHRE = COLOURS
GREY = "#777777"

CLIP_LOW = 0.2
CLIP_HIGHS = ((0.2, BLUE), (0.28, RED))

MAX_RESPONSE_TOKENS, BUFFER_TOKENS = 20_480, 4_096
GROUP_SIZE = 16
MEDIAN_TOKENS = (600, 1_800, 5_000, 12_000)  # of the responses to each prompt
LENGTH_SPREAD = 0.5  # standard deviation of log length within a prompt
AGGREGATIONS = (
    ("token-mean", BLUE),
    ("token-mean-per-group", GREEN),
    ("seq-mean-token-mean", RED),
    ("seq-mean-token-sum-norm", GREY),
    ("seq-mean-token-sum", PURPLE),
    ("token-sum", OCHRE),
)

GROUP_SIZES = ((4, BLUE), (8, RED), (16, GREEN), (32, PURPLE))
SIMULATED_GROUPS = 2_000  # for each dot

advantages = functools.partial(group_advantages, normalise_std=True, std_ddof=1)


class Number(NamedTuple):
    """A line of the printed table."""

    what: str
    value: float
    form: str  # of the value, as str.format takes it


@functools.partial(jax.jit, static_argnames="clip_high")
def clip_gradient(log_prob_BT: jax.Array, log_old_BT: jax.Array, *, clip_high: float) -> jax.Array:
    """d J / d log pi of tokens with advantage 1, [B, T]."""

    def total(log_prob_BT: jax.Array) -> jax.Array:
        one_BT = jnp.ones_like(log_old_BT)
        return surrogate(
            log_prob_BT, log_old_BT, one_BT, one_BT > 0, clip_low=CLIP_LOW, clip_high=clip_high
        ).objective_BT.sum()

    return jax.grad(total)(log_prob_BT)


def largest_trained(old_T: np.ndarray, *, clip_high: float) -> np.ndarray:
    """Largest probability at which a token of advantage 1 and old probability `old_T` still gets a
    gradient [T]; 1 where it gets one at every larger probability."""
    log_old_BT = jnp.asarray(np.log(old_T)[None], jnp.float32)

    def trained(new_T: np.ndarray) -> np.ndarray:
        log_prob_BT = jnp.asarray(np.log(new_T)[None], jnp.float32)
        return np.asarray(clip_gradient(log_prob_BT, log_old_BT, clip_high=clip_high))[0] != 0

    low_T, high_T = old_T, np.ones_like(old_T)
    unbounded_T = trained(high_T)
    for _ in range(32):
        middle_T = (low_T + high_T) / 2
        trained_T = trained(middle_T)
        low_T, high_T = np.where(trained_T, middle_T, low_T), np.where(trained_T, high_T, middle_T)
    return np.where(unbounded_T, 1.0, low_T)


def steps_to_half(old_T: np.ndarray, *, clip_high: float) -> np.ndarray:
    """Rollout steps until probability 1/2, if each ends where the gradient does [T]."""
    steps_T = np.zeros(len(old_T), int)
    while (old_T < 0.5).any():
        steps_T += old_T < 0.5
        old_T = largest_trained(old_T, clip_high=clip_high)
    return steps_T


def clip_higher(figure: Figure) -> list[Number]:
    """What the upper bound of the clip leaves a token, by its old probability."""
    left, right = figure.subplots(1, 2)
    old_T = np.linspace(0.001, 1.0, 1000)
    small_T = np.geomspace(1e-4, 0.1, 301)
    numbers, floor_T = [], old_T
    for clip_high, colour in CLIP_HIGHS:
        name = f"clip_high {clip_high:.2f}"
        bound_T = largest_trained(old_T, clip_high=clip_high)
        left.fill_between(old_T, floor_T, bound_T, color=colour, alpha=0.25, linewidth=0)
        left.plot(old_T, bound_T, color=colour, label=f"bound, {name}")
        floor_T = bound_T
        for t in (9, 899):
            what = f"{name}: largest probability with a gradient, from {old_T[t]:.2f}"
            numbers.append(Number(what, bound_T[t], "{:.4f}"))
        free = old_T[bound_T == 1.0].min()
        numbers.append(Number(f"{name}: never clipped from an old probability of", free, "{:.3f}"))
        steps_T = steps_to_half(small_T, clip_high=clip_high)
        right.plot(small_T, steps_T, color=colour, label=name, drawstyle="steps-post")
        for t in (100, 200):
            old, steps = small_T[t], int(steps_T[t])
            numbers.append(Number(f"{name}: rollout steps from {old:.3f} to 1/2", steps, "{:d}"))
            right.plot(old, steps, "o", color=colour, markersize=5)
            above = dict(xytext=(6, 4), textcoords="offset points")
            right.annotate(str(steps), (old, steps), color=colour, **above)
    left.plot(old_T, old_T, color=GREY, linestyle=":", label="unchanged")
    bounds = [f"{n.value:.4f}" for n in numbers if n.what.endswith("from 0.01")]
    arrow = dict(fontsize=9, arrowprops=dict(arrowstyle="->"))
    left.annotate(f"0.01 may rise to {' or '.join(bounds)}", (0.01, 0.0128), (0.36, 0.05), **arrow)
    left.annotate("0.9 may rise to 1", (0.9, 0.99), (0.7, 0.4), **arrow)
    left.text(0.1, 0.5, "clipped:\nno gradient", fontsize=9, color=GREY)
    left.set(xlim=(0, 1), ylim=(0, 1.01))
    right.set(xscale="log", ylim=(0, 50))
    _finish(left, "How far up a token with A > 0 is pushed", "old probability", "new probability")
    title = "Rollout steps to probability 1/2, each to its bound"
    _finish(right, title, "old probability", "rollout steps")
    return numbers


def token_level_loss(figure: Figure) -> list[Number]:
    """What a token and a response weigh in the loss, by the response's length."""
    left, right = figure.subplots(1, 2)
    groups_R = np.repeat(np.arange(len(MEDIAN_TOKENS)), GROUP_SIZE)
    medians_R = np.repeat(MEDIAN_TOKENS, GROUP_SIZE)
    log_R = np.random.default_rng(0).normal(np.log(medians_R), LENGTH_SPREAD)
    order_R = log_R.argsort()  # lines are drawn from left to right
    lengths_R = np.clip(np.rint(np.exp(log_R)), 1, MAX_RESPONSE_TOKENS)[order_R].astype(int)
    numbers = [
        Number("responses", len(lengths_R), "{:d}"),
        Number("trained tokens", int(lengths_R.sum()), "{:,d}"),
        Number("tokens of the shortest response", int(lengths_R[0]), "{:,d}"),
        Number("tokens of the longest response", int(lengths_R[-1]), "{:,d}"),
    ]
    off_scale = []
    for name, colour in AGGREGATIONS:
        numerator_R, denominator = aggregate(
            lengths_R, groups_R[order_R], aggregation=name, max_response_tokens=MAX_RESPONSE_TOKENS
        )
        weight_R = numerator_R / denominator
        share_R = 100 * weight_R * lengths_R / (weight_R @ lengths_R)
        constant = not np.ptp(weight_R)
        line = dict(linewidth=1.8) if constant else dict(linestyle="", marker="o", markersize=3.5)
        if weight_R[0] < 1e-3:
            left.plot(lengths_R, weight_R, color=colour, label=name, **line)
        else:
            off_scale.append(f"{name}: {weight_R[0]:.3g}")
        for whose, r in (("any response", 0),) if constant else (("shortest", 0), ("longest", -1)):
            numbers.append(Number(f"{name}: weight of a token, {whose}", weight_R[r], "{:.3g}"))
        numbers.append(Number(f"{name}: share of the longest response", share_R[-1], "{:.2f} %"))
        if name == "token-mean" or not constant:
            label = "token-mean, and the three sums" if constant else name
            right.plot(lengths_R, share_R, color=colour, label=label, **line)
    left.text(200, 3.6e-7, f"off scale: {', '.join(off_scale)}", fontsize=8)
    left.set(xscale="log", yscale="log", ylim=(3e-7, 1.1e-4))
    right.set(xscale="log", yscale="log")
    _finish(left, "Weight of one token", "response length, tokens", "weight in the loss")
    _finish(right, "Share of one response", "response length, tokens", "% of all token weights")
    return numbers


def overlong(figure: Figure) -> list[Number]:
    """Reward and advantage of one response of growing length."""
    left, right = figure.subplots(1, 2)
    lengths_N = np.arange(14_000, MAX_RESPONSE_TOKENS + 1)
    punishment_N = soft_overlong_punishment(
        lengths_N, max_response_tokens=MAX_RESPONSE_TOKENS, buffer_tokens=BUFFER_TOKENS, penalty=1.0
    )
    numbers = []
    for outcome, base, colour in (("right", 1.0, BLUE), ("wrong", -1.0, RED)):
        reward_N = base + punishment_N
        left.plot(lengths_N, reward_N, color=colour, label=f"{outcome} answer")
        for length in (18_432, 20_480):
            what = f"reward of a {outcome} answer of {length:,} tokens"
            numbers.append(Number(what, float(reward_N[length - lengths_N[0]]), "{:+.2f}"))
        for num_right, style in ((4, "--"), (12, "-")):
            others_right = num_right - (base > 0)
            others = [1.0] * others_right + [-1.0] * (GROUP_SIZE - 1 - others_right)
            groups_NG = [np.array([reward, *others]) for reward in reward_N]
            advantage_N = np.array([advantages(rewards_G)[0] for rewards_G in groups_NG])
            group = f"{outcome}, {num_right} of {GROUP_SIZE} right"
            right.plot(lengths_N, advantage_N, color=colour, linestyle=style)
            right.text(14_050, advantage_N[0] + 0.1, group, fontsize=8, color=colour)
            numbers.append(Number(f"advantage, {group}: short", advantage_N[0], "{:+.2f}"))
            numbers.append(Number(f"advantage, {group}: at the limit", advantage_N[-1], "{:+.2f}"))
            if base > 0 > advantage_N[-1]:
                turn = int(lengths_N[advantage_N < 0][0])
                numbers.append(Number(f"advantage, {group}: below 0 from tokens", turn, "{:,d}"))
    begin, end = MAX_RESPONSE_TOKENS - BUFFER_TOKENS, MAX_RESPONSE_TOKENS
    for axis in (left, right):
        axis.axvspan(begin, end, facecolor="#f2f1ec", edgecolor="#c5c2b4", label="buffer")
        axis.axvline(end, color="black", linewidth=3, label="cut: masked by overlong_filter")
        axis.axhline(0, color=GREY, linewidth=0.8)
        axis.set(xlim=(14_000, end + 60), xticks=[14_336, begin, 18_432, end])
    left.set(ylim=(-2.2, 2.2))
    right.set(ylim=(-2.6, 2.8))
    _finish(left, "Reward", "response length, tokens", "reward")
    _finish(right, "Advantage of one response of 16", "response length, tokens", "advantage")
    return numbers


def silent_share(rates_N: np.ndarray, G: int, generator: np.random.Generator) -> float:
    """Share of groups of G responses without any advantage, one group sampled at each pass rate."""
    right_NG = generator.random((len(rates_N), G)) < rates_N[:, None]
    return float(np.mean([not advantages(r_G).any() for r_G in np.where(right_NG, 1.0, -1.0)]))


def silent_at(rate: Any, G: int) -> Any:
    """Probability that G responses of pass rate p are all right or all wrong: p^G + (1 - p)^G."""
    return rate**G + (1 - rate) ** G


def silent_around(mean: Any, G: int) -> Any:
    """The same where pass rates are spread as Beta(m, 1 - m), whose mean is m.

    E p^G = B(m + G, 1 - m) / B(m, 1 - m), and the same for 1 - p with 1 - m.
    """
    moment = lambda m: np.exp(betaln(m + G, 1 - m) - betaln(m, 1 - m))
    return moment(mean) + moment(1 - mean)


def dynamic_sampling(figure: Figure) -> list[Number]:
    """How many prompts have a gradient, by pass rate. Dots are sampled groups, curves exact."""
    left, right = figure.subplots(1, 2)
    generator = np.random.default_rng(0)
    rates_P, dots_P = np.linspace(0.001, 0.999, 999), np.array([0.1, 0.25, 0.5, 0.75, 0.9])
    N = SIMULATED_GROUPS
    numbers, distances = [], []
    for G, colour in GROUP_SIZES:
        sampled_P = [silent_share(np.full(N, p), G, generator) for p in dots_P]
        spread_P = [silent_share(generator.beta(m, 1 - m, N), G, generator) for m in dots_P]
        distances += [sampled_P - silent_at(dots_P, G), spread_P - silent_around(dots_P, G)]
        left.plot(rates_P, 100 * silent_at(rates_P, G), color=colour, label=f"G = {G}")
        left.plot(dots_P, 100 * np.array(sampled_P), "o", color=colour, markersize=4)
        right.plot(rates_P, 100 - 100 * silent_around(rates_P, G), color=colour, label=f"G = {G}")
        right.plot(dots_P, 100 - 100 * np.array(spread_P), "o", color=colour, markersize=4)
        silent = 100 * silent_at(0.9, G)
        numbers.append(
            Number(f"G = {G}: groups without gradient, pass rate 0.9", silent, "{:.1f} %")
        )
        for rate in (0.5, 0.9):
            teach = 100 - 100 * silent_around(rate, G)
            what = f"G = {G}: prompts that teach, mean pass rate {rate}"
            numbers.append(Number(what, teach, "{:.1f} %"))
    distance = 100 * float(np.abs(distances).max())
    numbers.append(Number("largest distance of a dot from its curve", distance, "{:.1f} %"))
    for axis in (left, right):
        axis.set(xlim=(0, 1), ylim=(0, 102))
    _finish(left, "Groups without gradient", "pass rate p of the prompt", "% of groups")
    title = "Prompts that teach, pass rates from Beta(m, 1 − m)"
    _finish(right, title, "mean pass rate m of the prompts", "% of prompts")
    return numbers


def _finish(axis: Any, title: str, x: str, y: str) -> None:
    axis.set_title(title, fontsize=11, loc="left")
    axis.set_xlabel(x, fontsize=9)
    axis.set_ylabel(y, fontsize=9)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=9)
    axis.legend(fontsize=8, frameon=False)


def main(argv: list[str]) -> dict[str, dict[str, float]]:
    """The numbers of each technique, after its plot is written and they are printed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "techniques")
    output = parser.parse_args(argv).output
    output.mkdir(parents=True, exist_ok=True)
    values = {}
    for draw in (clip_higher, token_level_loss, overlong, dynamic_sampling):
        name = draw.__name__
        figure = Figure(figsize=(10, 4), dpi=100, layout="constrained")
        canvas = FigureCanvasAgg(figure)
        numbers = draw(figure)
        canvas.draw()
        # A palette halves the file.
        image = Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3])
        image.quantize(64).save(output / f"{name}.png", optimize=True)
        print(name)
        for number in numbers:
            print(f"  {number.what:<66} {number.form.format(number.value):>10}")
        values[name] = {number.what: number.value for number in numbers}
    return values


if __name__ == "__main__":
    main(sys.argv[1:])
