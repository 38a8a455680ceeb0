"""Accuracy against compute: curves of known parameters, with noise and cut short."""

import json

import numpy as np
import pytest

import dapo_jax
from dapo_jax.runs.report import scaling
from dapo_jax.runs.report.data import by_method, load_runs
from dapo_jax.types import UserError
from tests.runs.test_report import write_run

BASE, A, MIDPOINT, B = 0.1, 0.8, 3000.0, 1.5


def true_value(compute):
    """Equation 1 of the ScaleRL paper, by hand."""
    return BASE + (A - BASE) * compute**B / (compute**B + MIDPOINT**B)


def write_curve(directory, *, seed=0, steps=30, tokens_per_step=1000, noise=0.0, gain=0.0):
    """A run with an evaluation after each step."""
    run, generator = write_run(directory, seed=seed), np.random.default_rng(seed)
    lines = [{"step": 0, "eval/avg@4": BASE, "time/step": 5.0}]
    for step in range(1, steps + 1):
        value = true_value(tokens_per_step * step) + gain + noise * generator.normal()
        counts = {"sampling/prompts_tried": 1, "length/mean": tokens_per_step / 4}
        counts |= {"sampling/prompts_all_right": 0, "sampling/prompts_all_wrong": 0}
        times = {"time/step": 12.0, "time/evaluation": 2.0}
        lines.append({"step": step, "eval/avg@4": value} | counts | times)
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def fit(*runs, unit="tokens"):
    (method,) = by_method(load_runs(runs))
    return scaling.fit_method(method, unit)


@pytest.fixture
def group_size(monkeypatch):
    """Tokens of a step are its mean length times its responses: groups of 4."""
    from tests.runs import test_report

    whole = test_report.tiny_config
    monkeypatch.setattr(test_report, "tiny_config", lambda **kw: whole(rollout__group_size=4, **kw))


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch, group_size):
    monkeypatch.setattr(scaling, "RESAMPLES", 40)


def test_exact_points_give_their_curve(tmp_path):
    found = fit(write_curve(tmp_path / "run"))
    assert found.curve == pytest.approx((BASE, A, MIDPOINT, B), rel=1e-3)
    assert not found.undetermined
    assert found.at(60_000.0)[0] == pytest.approx(true_value(60_000.0), abs=1e-3)


def test_compute_in_seconds_leaves_evaluations_out(tmp_path):
    """Ten seconds of training for each thousand tokens."""
    found = fit(write_curve(tmp_path / "run"), unit="seconds")
    assert found.curve.midpoint == pytest.approx(MIDPOINT / 100, rel=1e-3)


@pytest.mark.parametrize("seeds", [(0,), (1, 2, 3, 4, 5)])
def test_intervals_hold_the_truth_and_exclude_others(tmp_path, seeds):
    runs = [write_curve(tmp_path / f"run_{s}", seed=s, noise=0.01) for s in seeds]
    found = fit(*runs)
    low, high = found.interval("asymptote")
    assert low < A < high and high - low < 0.06
    low, high = found.interval("midpoint")
    assert low < MIDPOINT < high and high / low < 1.5


def test_three_fitted_parameters_widen_the_residuals_of_one_run(tmp_path, monkeypatch):
    """Four evaluations leave one of them free: the deviation is twice that of the residuals."""
    real, fitted = scaling.fit_curve, []

    def fit_curve(base, points, **start):
        fitted.append(points)
        return real(base, points, **start)

    monkeypatch.setattr(scaling, "fit_curve", fit_curve)
    found = fit(write_curve(tmp_path / "run", steps=4, noise=0.01))
    expected = found.curve(found.points[:, 0])
    residuals = found.points[:, 1] - expected
    for points in fitted[1:]:
        apart = np.abs((points[:, 1] - expected)[:, None] - 2 * residuals[None])
        assert apart.min(axis=1).max() < 1e-9


def test_seeds_that_differ_widen_the_interval(tmp_path):
    """Exact points of each run, but runs that end 10 points apart."""
    gains = zip((1, 2, 3), (-0.05, 0.0, 0.05))
    runs = [write_curve(tmp_path / f"run_{s}", seed=s, gain=g) for s, g in gains]
    low, high = fit(*runs).interval("asymptote")
    assert low == pytest.approx(A - 0.05, abs=0.02) and high == pytest.approx(A + 0.05, abs=0.02)


def test_the_beginning_of_a_curve_does_not_determine_its_end(tmp_path):
    run = write_curve(tmp_path / "run", steps=10, tokens_per_step=100, noise=0.005)
    found = fit(run)
    assert found.undetermined
    assert "warning: run: the runs do not determine A" in scaling.in_words(found)[-1]


def test_a_run_that_learns_nothing_determines_nothing(tmp_path):
    run = write_curve(tmp_path / "run", gain=-0.7, noise=0.01)
    assert fit(run).undetermined == "accuracy does not rise"


@pytest.mark.parametrize("steps", [3, 4])
def test_a_curve_needs_evaluations(tmp_path, steps):
    run = write_curve(tmp_path / "run", steps=steps)
    if steps < 4:
        with pytest.raises(UserError, match=r"3 evaluations .* config.evaluation.every_steps"):
            fit(run)
    else:
        fit(run)


def test_a_curve_needs_its_base_model(tmp_path):
    """The run was resumed in a new directory, which has the lines of later steps alone."""
    run = write_curve(tmp_path / "run")
    file = tmp_path / "run" / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[1:]))
    with pytest.raises(UserError, match=r"no evaluation of its base model .* of the first one's"):
        fit(run)


def test_a_unit_that_is_none(tmp_path):
    with pytest.raises(UserError, match="compute must be one of tokens, seconds; got 'hours'"):
        dapo_jax.fit_curves(write_curve(tmp_path / "run"), compute="hours")


def test_words_and_a_figure(tmp_path):
    run = write_curve(tmp_path / "run")
    lines = dapo_jax.fit_curves(run)
    assert lines[0].startswith("run: R0 = 10.0%, A = 80.0% (") and "3,000 tokens" in lines[0]
    assert lines[1].startswith("run: expected after 60,000 tokens sampled, 2 times the runs': 79.")
    assert (run / "fit.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("name, shown", [("_old", "_old"), ("cost_$5_and_$9", r"cost_\$5_and_\$9")])
def test_every_name_of_a_run_is_in_the_legend(tmp_path, monkeypatch, name, shown):
    """Matplotlib leaves out names that begin with an underscore, and reads dollars as a formula."""
    figures, to_png = [], scaling.to_png
    monkeypatch.setattr(scaling, "to_png", lambda figure: figures.append(figure) or to_png(figure))
    dapo_jax.fit_curves(write_curve(tmp_path / name))
    (text,) = figures[0].axes[0].get_legend().get_texts()
    assert text.get_text() == shown
