"""The policy losses against loops written from their papers, and what must hold for all of them."""

import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.algorithms.losses import COVARIANCE_LOSSES, LOSSES, response_mean
from dapo_jax.config import Config
from dapo_jax.types import UserError
from tests.support.helpers import tiny_dict

BOUNDS = {"clip_low": 0.2, "clip_high": 0.28}
SETTINGS = {
    "ppo-clip": BOUNDS | {"clip_dual": 3.0},
    "gspo": {"clip_low": 0.05, "clip_high": 0.08},
    "gspo-token": {"clip_low": 0.05, "clip_high": 0.08},
    "gmpo": {"clip_low": 0.4, "clip_high": 0.3},
    "cispo": BOUNDS,
    "sapo": {"tau_positive": 1.0, "tau_negative": 1.05},
    "dppo-tv": {"clip_low": 0.1, "clip_high": 0.15, "ratio_cap": 2.0},
    "dppo-kl": {"clip_low": 0.02, "clip_high": 0.03, "ratio_cap": 2.0},
    "policy-gradient": {},
    "dro": {"dro_beta": 0.3},
    "clip-cov": BOUNDS,
    "kl-cov": {"cov_kl_coefficient": 0.7},
}
# What the choice of tokens reads besides.
SELECTION = {
    "clip-cov": {"cov_share": 0.1, "cov_low": 0.01, "cov_high": 5.0},
    "kl-cov": {"cov_share": 0.1},
}


def make_rows(seed=0, rows=3, length=24, *, by_token=False):
    """log-probs, old log-probs, advantages, mask, segments: several responses to a row."""
    rng = np.random.default_rng(seed)
    shape = (rows, length)
    old = -rng.exponential(1.0, shape)
    logp = np.minimum(old + 0.4 * rng.standard_normal(shape), -1e-3)
    segments = np.sort(rng.integers(0, 4, shape), axis=1)[:, ::-1]  # 3 3 2 1 1 0 0: padding last
    mask = (segments > 0) & (rng.random(shape) < 0.8)
    per_response = rng.standard_normal((rows, 5))
    advantage = np.take_along_axis(per_response, segments, axis=1)
    if by_token:  # as an estimator per token makes them
        advantage = advantage + rng.standard_normal(shape)
    return [x.astype(np.float32) for x in (logp, old, advantage)] + [
        mask,
        segments.astype(np.int32),
    ]


def selected_like(mask):
    """Every third column: the tokens that Clip-Cov and KL-Cov act on in these tests."""
    return np.broadcast_to(np.arange(mask.shape[1]) % 3 == 0, mask.shape)


def apply(name, *rows):
    """The policy loss of that name on log-probs, old log-probs, advantages, mask, segments."""
    chosen = [selected_like(rows[3])] if name in COVARIANCE_LOSSES else []
    return LOSSES[name].function(*map(jnp.asarray, [*rows, *chosen]), **SETTINGS[name])


def by_hand(name, logp, old, advantage, selected, **p):
    """Objectives of the tokens of one response, from the papers' formulas."""
    n, out = len(logp), []
    ratios = [math.exp(a - b) for a, b in zip(logp, old)]
    mean_A = sum(advantage) / max(1, n)
    clip = lambda x, low, high: max(low, min(high, x))
    for t in range(n):
        r, A = ratios[t], advantage[t]
        if name == "ppo-clip":
            J = min(r * A, clip(r, 1 - p["clip_low"], 1 + p["clip_high"]) * A)
            J = max(J, p["clip_dual"] * A) if A < 0 else J
        elif name in ("gspo", "gspo-token"):
            s = math.exp(sum(a - b for a, b in zip(logp, old)) / n)
            A = mean_A if name == "gspo" else A
            J = min(s * A, clip(s, 1 - p["clip_low"], 1 + p["clip_high"]) * A)
        elif name == "gmpo":
            total = 0.0
            for a, b, own in zip(logp, old, advantage):
                x, bounded = a - b, clip(a - b, -p["clip_low"], p["clip_high"])
                total += min(x, bounded) if own > 0 else max(x, bounded)
            J = mean_A * math.exp(total / n)
        elif name == "cispo":
            J = clip(r, 1 - p["clip_low"], 1 + p["clip_high"]) * A * logp[t]
        elif name == "sapo":
            tau = p["tau_positive"] if A > 0 else p["tau_negative"]
            J = 4 / tau / (1 + math.exp(-tau * (r - 1))) * A
        elif name.startswith("dppo"):
            new_p, old_p = math.exp(logp[t]), math.exp(old[t])
            if name == "dppo-tv":
                D = abs(new_p - old_p)
            else:
                rest = math.log((1 - old_p) / (1 - new_p))
                D = old_p * math.log(old_p / new_p) + (1 - old_p) * rest
            wrong_way = (A > 0 and new_p > old_p and D > p["clip_high"]) or (
                A <= 0 and new_p < old_p and D > p["clip_low"]
            )
            J = 0.0 if wrong_way else min(r, p["ratio_cap"]) * A * logp[t]
        elif name == "policy-gradient":
            J = A * logp[t]
        elif name == "clip-cov":
            J = min(r * A, clip(r, 1 - p["clip_low"], 1 + p["clip_high"]) * A)
            J = 0.0 if selected[t] else J
        elif name == "kl-cov":
            J = r * A - (p["cov_kl_coefficient"] * abs(logp[t] - old[t]) if selected[t] else 0.0)
        else:
            J = A * logp[t] - p["dro_beta"] / 2 * (logp[t] - old[t]) ** 2
        out.append(J)
    return out


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", LOSSES)
def test_objective_is_the_papers(name, seed):
    rows = make_rows(seed, by_token=seed == 1)
    got = apply(name, *rows)
    logp, old, advantage, mask, segments = rows
    selected = selected_like(mask)
    expected = np.zeros(mask.shape)
    for row in range(len(mask)):
        for segment in range(1, segments.max() + 1):
            at = mask[row] & (segments[row] == segment)
            one = [x[row, at].astype(np.float64).tolist() for x in (logp, old, advantage)]
            expected[row, at] = by_hand(name, *one, selected[row, at], **SETTINGS[name])
    np.testing.assert_allclose(got.objective_BT, expected, rtol=2e-5, atol=1e-6)
    ratio = np.asarray(got.ratio_BT)
    assert (ratio[~mask] == 1).all()
    if not name.startswith("gspo"):
        np.testing.assert_allclose(ratio[mask], np.exp(logp - old)[mask], rtol=1e-5)


def beyond_by_hand(name, logp, old, A, mean, p):
    """Returns (beyond the upper bound, beyond the lower bound) of one token, from the papers;
    `mean` is the mean log-ratio of its response."""
    if name.startswith("dppo"):
        new_p, old_p = math.exp(logp), math.exp(old)
        D = abs(new_p - old_p)
        if name == "dppo-kl":
            D = old_p * (old - logp) + (1 - old_p) * math.log((1 - old_p) / (1 - new_p))
        up, down = new_p > old_p and D > p["clip_high"], new_p < old_p and D > p["clip_low"]
        return A > 0 and up, A <= 0 and down
    if name == "gmpo":
        return A > 0 and logp - old > p["clip_high"], A < 0 and logp - old < -p["clip_low"]
    ratio = math.exp(mean if name.startswith("gspo") else logp - old)
    above, below = ratio > 1 + p["clip_high"], ratio < 1 - p["clip_low"]
    return (above, below) if name == "cispo" else (A > 0 and above, A < 0 and below)


@pytest.mark.parametrize("name", LOSSES)
def test_clipped_tokens_are_those_beyond_the_bounds(name):
    rows = make_rows()
    logp, old, advantage, mask, segments = rows
    got, p = apply(name, *rows), SETTINGS[name]
    expected = np.zeros((2, *mask.shape), bool)
    if "clip_low" in p:
        for row, t in np.argwhere(mask):
            at = mask[row] & (segments[row] == segments[row, t])
            mean = float((logp - old)[row, at].mean())
            one = (float(x[row, t]) for x in (logp, old, advantage))
            expected[:, row, t] = beyond_by_hand(name, *one, mean, p)
        assert expected.any(axis=(1, 2)).all(), "both bounds are met"
    np.testing.assert_array_equal([got.clipped_high_BT, got.clipped_low_BT], expected)


def summed(name, rows):
    weights = jnp.linspace(0.5, 1.5, rows[0].size).reshape(rows[0].shape)
    return lambda logp: jnp.sum(weights * apply(name, logp, *rows[1:]).objective_BT)


@pytest.mark.parametrize(
    "name",
    ["ppo-clip", "gspo", "gmpo", "sapo", "policy-gradient", "dro", "clip-cov", "kl-cov"],
)
def test_gradient_is_the_slope(name):
    """Where nothing is stopped, the gradient is what finite differences say."""
    with jax.enable_x64(True):
        rows = [x.astype(np.float64) if x.dtype == np.float32 else x for x in make_rows()]
        f, logp = jax.jit(summed(name, rows)), rows[0]
        got, h = jax.grad(f)(jnp.asarray(logp)), 1e-6
        for row, t in np.ndindex(*logp.shape):
            bump = np.zeros_like(logp)
            bump[row, t] = h
            slope = (f(jnp.asarray(logp + bump)) - f(jnp.asarray(logp - bump))) / (2 * h)
            np.testing.assert_allclose(got[row, t], slope, atol=1e-7)


@pytest.mark.parametrize("name", ["cispo", "dppo-tv", "dppo-kl"])
def test_a_stopped_weight_gives_its_token_that_gradient(name):
    """J = sg(w) A log pi: the gradient is w A, which is J / log pi."""
    rows = make_rows()
    f = lambda logp: jnp.sum(apply(name, logp, *rows[1:]).objective_BT)
    objective = apply(name, *rows).objective_BT
    np.testing.assert_allclose(jax.grad(f)(rows[0]), objective / rows[0], rtol=1e-4, atol=1e-7)


def test_gspo_token_form_has_the_tokens_own_gradient():
    """With one advantage per response both forms have the same gradient, GSPO section 4.3."""
    rows = make_rows()
    mask, segments = rows[3:]
    count = np.zeros(mask.shape)
    for row, t in np.ndindex(*mask.shape):
        count[row, t] = max(1, (mask[row] & (segments[row] == segments[row, t])).sum())
    weight = jnp.asarray(1 / count, jnp.float32)  # seq-mean-token-mean

    def gradient(name):
        f = lambda logp: jnp.sum(weight * apply(name, logp, *rows[1:]).objective_BT)
        return jax.grad(f)(jnp.asarray(rows[0]))

    np.testing.assert_allclose(gradient("gspo"), gradient("gspo-token"), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("value", [-np.inf, np.inf, np.nan, 1e4])
@pytest.mark.parametrize("name", LOSSES)
def test_nothing_under_the_mask_matters(name, value):
    rows = make_rows()
    clean = summed(name, rows)(jnp.asarray(rows[0]))
    spoilt = [np.where(rows[3], x, value).astype(np.float32) for x in rows[:3]] + rows[3:]
    total, gradient = jax.value_and_grad(summed(name, spoilt))(jnp.asarray(spoilt[0]))
    np.testing.assert_array_equal(total, clean)
    assert np.isfinite(gradient).all() and not np.asarray(gradient)[~rows[3]].any()


@pytest.mark.parametrize("log_ratio", [1e4, -1e4])
@pytest.mark.parametrize("name", LOSSES)
def test_huge_log_ratios_stay_finite(name, log_ratio):
    rows = make_rows()
    rows[1] = (rows[0] - log_ratio).astype(np.float32)
    total, gradient = jax.value_and_grad(summed(name, rows))(jnp.asarray(rows[0]))
    assert np.isfinite(total) and np.isfinite(gradient).all()


@pytest.mark.parametrize("name", LOSSES)
def test_bfloat16_inputs_are_computed_in_float32(name):
    rows = make_rows()
    short = [jnp.asarray(x, jnp.bfloat16) for x in rows[:3]]
    exact = [x.astype(jnp.float32) for x in short]
    a = apply(name, *short, *rows[3:]).objective_BT
    b = apply(name, *exact, *rows[3:]).objective_BT
    assert a.dtype == jnp.float32
    np.testing.assert_array_equal(a, b)
    # The gradient is the float32 one, rounded once: to the 8 bits of bfloat16.
    total = lambda x: jnp.sum(apply(name, x, *short[1:], *rows[3:]).objective_BT)
    low, high = jax.grad(total)(short[0]), jax.grad(total)(exact[0])
    assert low.dtype == jnp.bfloat16
    np.testing.assert_allclose(low.astype(jnp.float32), high, rtol=2**-8, atol=1e-30)


@pytest.mark.parametrize("name", LOSSES)
def test_responses_sharing_a_row_do_not_meet(name):
    """Packed side by side, and each in a row of its own."""
    logp, old, advantage, mask, segments = make_rows(rows=1)
    packed = apply(name, logp, old, advantage, mask, segments)
    for segment in range(1, 4):
        own = segments == segment
        alone = apply(name, logp, old, advantage, mask & own, own.astype(np.int32))
        at = mask & own
        np.testing.assert_allclose(
            np.asarray(packed.objective_BT)[at], np.asarray(alone.objective_BT)[at], rtol=1e-5
        )


@pytest.mark.parametrize("side", ["low", "high"])
@pytest.mark.parametrize("name", ["ppo-clip", "gspo", "gspo-token", "clip-cov", "gmpo"])
def test_at_the_very_bound_the_gradient_passes_and_beyond_it_does_not(name, side):
    """A ratio (gmpo: its logarithm) that equals its bound to the last bit is not clipped yet."""
    bound = SETTINGS[name][f"clip_{side}"]
    outward = 1 if side == "high" else -1
    x = outward * bound if name == "gmpo" else math.log1p(outward * bound)
    with jax.enable_x64(True):
        # The logarithm that the library's own exp sends to the bound, or the nearest inside it.
        met = 1 + outward * bound
        candidates = [x]
        for _ in range(64):
            candidates += [np.nextafter(candidates[-1], -outward * np.inf)]
        if name != "gmpo":
            exact = [c for c in candidates if float(jnp.exp(jnp.float64(c))) == met]
            inside = [c for c in candidates if outward * (float(jnp.exp(jnp.float64(c))) - met) < 0]
            x = (exact or inside)[0]
        A = np.full((1, 1), float(outward))
        mask, segments, old = np.ones((1, 1), bool), np.ones((1, 1), np.int32), np.zeros((1, 1))
        settings = {k: v for k, v in SETTINGS[name].items() if k != "clip_dual"}
        chosen = [np.zeros((1, 1), bool)] if name == "clip-cov" else []
        total = lambda logp: jnp.sum(
            LOSSES[name]
            .function(logp, *map(jnp.asarray, (old, A, mask, segments, *chosen)), **settings)
            .objective_BT
        )
        np.testing.assert_allclose(
            jax.grad(total)(jnp.full((1, 1), x)), outward * np.exp(x), rtol=1e-12
        )
        beyond = jnp.full((1, 1), x + outward * 1e-9)
        assert not jax.grad(total)(beyond).any()


def configured(name, **others):
    """Overrides of `tiny_config` for a policy loss with the settings of these tests."""
    settings = SETTINGS[name] | SELECTION.get(name, {}) | others
    clips = ("clip_low", "clip_high", "clip_dual")
    fields = {"loss": name} | {clip: settings.pop(clip, None) for clip in clips}
    return {f"objective__{k}": v for k, v in (fields | {"loss_args": settings}).items()}


def test_the_table_says_what_each_loss_reads():
    assert LOSSES.keys() == SETTINGS.keys()
    for name, loss in LOSSES.items():
        signature = inspect.signature(loss.function).parameters
        fixed = getattr(loss.function, "keywords", {})
        read = {p for p, v in signature.items() if v.kind is v.KEYWORD_ONLY} - set(fixed)
        assert {*loss.clips, *loss.arguments} - set(loss.selects) == read
        assert set(loss.selects) == set(SELECTION.get(name, ()))


def test_an_argument_that_is_not_read_missing_or_out_of_range_is_an_error():
    for changes, message in (
        (configured("gspo", clip_dual=3.0), r"objective\.clip_dual is not read when .* 'gspo'"),
        (configured("gspo", clip_low=None), r"objective\.clip_low is needed when .* 'gspo'"),
        (configured("gspo", ratio_cap=2.0), r"ratio_cap is not a field of the loss 'gspo'.* none"),
        (configured("dro", dro_beta=-1.0), r"loss_args\.dro_beta must be greater than 0; got -1"),
        (configured("dro") | {"objective__loss_args": {}}, r"loss_args\.dro_beta is missing and"),
        (configured("clip-cov", cov_low=9.0), r"cov_low \(9\.0\) must be below cov_high \(5\.0\)"),
        (configured("clip-cov", cov_share=2.0), r"cov_share must be in \(0, 1\]; got 2\.0"),
        ({"objective__loss": "nosuch"}, r"objective\.loss must be one of ppo-clip.*got 'nosuch'"),
    ):
        with pytest.raises(UserError, match=message):
            Config.from_dict(tiny_dict(**changes))


def test_tokens_of_a_bfloat16_response_are_counted_in_float32():
    """Counted in bfloat16, 600 are 256."""
    ones_BT = jnp.ones((1, 600), jnp.bfloat16)
    mean_BT = response_mean(ones_BT, ones_BT > 0, jnp.ones((1, 600), jnp.int32))
    np.testing.assert_array_equal(mean_BT, 1.0)
