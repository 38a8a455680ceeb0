"""Corrections for rollouts against loops over responses, and what must hold for all of them."""

import functools
import math
from typing import get_args

import numpy as np
import pytest

from dapo_jax.algorithms import importance_correction
from dapo_jax.config import CorrectionConfig, Statistic

LENGTHS = np.array([0, 5, 1, 7, 0, 0, 3, 12, 2, 0])
DRIFT = np.array([0, 0.05, -0.15, -0.18, 0, 0, -0.3, 0.04, 0.25, 0])  # of log pi in a response
ADVANTAGE = np.array([-9, -1, 1.2, -1.2, 9, 9, -0.9, 0.8, -0.7, -9])
STATISTICS = get_args(Statistic)
IMPORTANCE = [
    dict(level=level, cap=cap, floor=floor)
    for level in ("token", "sequence")
    for cap, floor in ((1.2, None), (1.2, 0.8), (50.0, None), (50.0, 0.02))
]


settings = functools.partial(CorrectionConfig, policy="old")


def make_log_probs(seed=0):
    """log-probs under pi and mu, advantages: one for each token of `LENGTHS`."""
    rng = np.random.default_rng(seed)
    mu = -rng.exponential(1.0, LENGTHS.sum())
    pi = mu + np.repeat(DRIFT, LENGTHS) + 0.12 * rng.standard_normal(len(mu))
    return pi, mu, np.repeat(ADVANTAGE, LENGTHS)


def by_response(x_M):
    """Lists of the tokens of each response."""
    x = iter(np.asarray(x_M, np.float64).tolist())
    return [[next(x) for _ in range(n)] for n in LENGTHS]


def importance_by_hand(log_ratios, level, cap, floor):
    weights, kept = [], []
    for response in log_ratios:
        for own in response:
            rho = math.exp(own)
            if level == "sequence":
                rho = math.prod(math.exp(x) for x in response)
            inside = floor is None or floor <= rho <= cap
            weights.append(min(rho, cap) if inside else 0.0)
            kept.append(inside)
    return weights, kept


def normalised_by_hand(weights, level):
    if level == "token":
        mean = sum(weights) / len(weights)
    else:
        means = [sum(response) / len(response) for response in by_response(weights) if response]
        mean = sum(means) / len(means)
    return [w / mean for w in weights]


def statistic_by_hand(log_ratios, statistic):
    """The statistic of each token: k1 as mu/pi of the token, of the whole response, or its
    geometric mean; k2 and k3 in nats."""
    reduction, _, divergence = statistic.rpartition("-")
    out = []
    for response in log_ratios:
        if divergence == "k1":
            ratios = [math.exp(-x) for x in response]
            product = math.prod(ratios)
            whole = {"seq-sum": product, "seq-mean": product ** (1 / max(1, len(ratios)))}
            out += ratios if reduction == "token" else [whole[reduction]] * len(response)
            continue
        values = [x * x / 2 if divergence == "k2" else math.exp(x) - 1 - x for x in response]
        if reduction == "token" or not response:
            out += values
        elif reduction == "seq-max":
            out += [max(values)] * len(values)
        else:
            of_one = sum(values) / (len(values) if reduction == "seq-mean" else 1)
            out += [of_one] * len(values)
    return out


def bounds_for(statistic, values):
    """(floor, cap) between the values, so that a few are outside on either side."""
    x = sorted(set(values))
    cap = (x[-1] * x[-2]) ** 0.5
    return ((x[0] * x[1]) ** 0.5 if statistic.endswith("k1") else None), cap


def masking_by_hand(log_ratios, advantages, delta):
    kept = []
    for response, A in zip(log_ratios, advantages):
        away = response and sum(-x for x in response) / len(response) > delta
        kept += [not (away and sum(A) / len(A) < 0)] * len(response)
    return kept


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("p", IMPORTANCE, ids=str)
def test_importance_weights(p, seed):
    pi, mu, _ = make_log_probs(seed)
    got = importance_correction.importance_weights(pi - mu, LENGTHS, **p)
    weights, kept = importance_by_hand(by_response(pi - mu), **p)
    np.testing.assert_allclose(got.weight_M, weights, rtol=1e-12)
    assert got.kept_M.dtype == bool and got.kept_M.tolist() == kept
    if p["cap"] < 2:  # the tight bounds do act
        assert (p["cap"] in weights) if p["floor"] is None else {True, False} == set(kept)
    normal = importance_correction.normalised(got.weight_M, LENGTHS, level=p["level"])
    np.testing.assert_allclose(normal, normalised_by_hand(weights, p["level"]), rtol=1e-12)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("statistic", STATISTICS)
def test_rejection_by_divergence(statistic, seed):
    pi, mu, _ = make_log_probs(seed)
    values = statistic_by_hand(by_response(pi - mu), statistic)
    floor, cap = bounds_for(statistic, values)
    got = importance_correction.kept_by_divergence(
        pi - mu, LENGTHS, statistic=statistic, floor=floor, cap=cap
    )
    expected = [(floor is None or x >= floor) and x <= cap for x in values]
    assert got.dtype == bool and got.tolist() == expected
    sides = {x > cap for x in values}, {floor is not None and x < floor for x in values}
    assert sides == ({True, False}, {floor is not None, False})


@pytest.mark.parametrize("delta", [0.0, 0.05, 0.1])
@pytest.mark.parametrize("seed", range(2))
def test_off_policy_sequence_masking(seed, delta):
    pi, mu, A = make_log_probs(seed)
    A = A + 0.8 * np.random.default_rng(seed).standard_normal(len(A))  # their mean decides
    got = importance_correction.kept_by_sequence_masking(pi - mu, A, LENGTHS, delta=delta)
    expected = masking_by_hand(by_response(pi - mu), by_response(A), delta)
    assert got.dtype == bool and got.tolist() == expected and set(expected) == {True, False}


@pytest.mark.parametrize("advantage, drift, kept", [
    (-1.0, -0.6, False), (1.0, -0.6, True), (0.0, -0.6, True), (-1.0, 0.6, True),
    (-1.0, -0.5, True),  # at delta itself
])  # fmt: skip
def test_only_a_bad_response_that_the_policy_has_left_is_masked(advantage, drift, kept):
    """mu / pi = exp(0.6) on average: pi has become less likely to write it."""
    log_ratio, A = np.array([2 * drift, 0.0, 0.0]), np.array([advantage - 3, advantage + 3, -9])
    got = importance_correction.kept_by_sequence_masking(log_ratio, A, np.array([2, 1]), delta=0.5)
    assert got.tolist() == [kept, kept, True]


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("delta", [None, 0.0, 0.02])
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("cap, floor", [(1.2, None), (1.2, 0.8)])
def test_all_corrections_together(level, cap, floor, normalise, delta):
    pi, mu, A = (x.astype(np.float32) for x in make_log_probs())
    log_ratios = by_response(pi.astype(np.float64) - mu.astype(np.float64))
    rules, alone = [], []
    for statistic in ("token-k1", "seq-mean-k3"):
        values = statistic_by_hand(log_ratios, statistic)
        bounds = bounds_for(statistic, values)
        rules.append((statistic, *bounds))
        alone.append([(bounds[0] or -math.inf) <= x <= bounds[1] for x in values])
    masked = () if delta is None else (("sequence-mask", None, delta),)
    weights, kept = importance_by_hand(log_ratios, level, cap, floor)
    alone.append(kept)
    alone.append(masking_by_hand(log_ratios, by_response(A), math.inf if delta is None else delta))
    got = importance_correction.correct(
        settings(
            importance=("normalised-" * normalise + level, floor, cap),
            reject=(*rules, *masked),
        ),
        pi,
        mu,
        A,
        LENGTHS,
    )
    # float32 log-probs lose nothing on their way into the difference.
    expected = normalised_by_hand(weights, level) if normalise else weights
    np.testing.assert_allclose(got.weight_M, expected, rtol=1e-12)
    assert got.weight_M.dtype == np.float64
    assert got.kept_M.tolist() == [all(of_token) for of_token in zip(*alone)]


def test_each_rule_is_enough_to_reject():
    """And without importance sampling the weight is 1, whatever the ratio."""
    pi, mu, A = make_log_probs()
    for statistic in STATISTICS:
        floor = 1.0 if statistic.endswith("k1") else None
        got = importance_correction.correct(
            settings(reject=((statistic, floor, 1.0),)), pi, mu, A, LENGTHS
        )
        own = importance_correction.kept_by_divergence(
            pi - mu, LENGTHS, statistic=statistic, floor=floor, cap=1.0
        )
        assert got.weight_M.tolist() == [1.0] * len(pi) and got.kept_M.tolist() == own.tolist()
    rule = ("sequence-mask", None, 0.0)
    got = importance_correction.correct(settings(reject=(rule,)), pi, mu, A, LENGTHS)
    own = importance_correction.kept_by_sequence_masking(pi - mu, A, LENGTHS, delta=0.0)
    assert got.kept_M.tolist() == own.tolist() and not own.all()


EVERYTHING = dict(
    reject=(
        *((s, 1.0, 1.0) if s.endswith("k1") else (s, None, 0.0) for s in STATISTICS),
        ("sequence-mask", None, 0.0),
    )
)


@pytest.mark.parametrize("level", [None, "token", "sequence"])
@pytest.mark.parametrize("cap, floor", [(1.0, None), (1.0, 1.0), (5.0, 0.2)])
@pytest.mark.parametrize("normalise", [False, True])
def test_on_policy_nothing_is_touched(level, cap, floor, normalise):
    """To the last bit, and with the tightest bounds there are: what is at a bound stays."""
    pi, _, A = make_log_probs()
    importance = level and ("normalised-" * normalise + level, floor, cap)
    chosen = dict(importance=importance) | EVERYTHING
    got = importance_correction.correct(settings(**chosen), pi, pi, A, LENGTHS)
    assert got.weight_M.tolist() == [1.0] * len(pi)
    assert got.kept_M.tolist() == [True] * len(pi)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("log_ratio", [-0.5, 0.25])
def test_importance_at_its_bounds_stays_and_beyond_them_goes(level, log_ratio):
    rho, lengths = float(np.exp(log_ratio)), np.array([0, 1])
    for floor, cap, kept in (
        (rho, 2 * rho, True),
        (rho / 2, rho, True),
        (np.nextafter(rho, np.inf), 2 * rho, False),
        (rho / 2, np.nextafter(rho, 0.0), False),
    ):
        got = importance_correction.importance_weights(
            np.array([log_ratio]), lengths, level=level, cap=cap, floor=floor
        )
        assert got.kept_M.tolist() == [kept] and got.weight_M.tolist() == [rho if kept else 0.0]


@pytest.mark.parametrize("statistic", STATISTICS)
def test_divergence_at_its_bounds_stays_and_beyond_them_goes(statistic):
    """Responses of two tokens, whose sums and means are exact."""
    size = 2.0 if "seq-sum" in statistic else 1.0
    divergence = statistic[-2:]
    # (log-ratios, what their k1 is as a ratio, or their k2 or k3); k3 of 0 is the only exact one.
    for log_ratios, value in {
        "k1": [(-np.log([4.0, 4.0]), 4.0**size), (np.log([4.0, 4.0]), 0.25**size)],
        "k2": [([2.0, -2.0], 2.0 * size)],
        "k3": [([0.0, 0.0], 0.0)],
    }[divergence]:
        less, more = value - 1e-12, value + 1e-12
        cases = [(0.01, value, True), (0.01, less, False), (value, 99.0, True), (more, 99.0, False)]
        for floor, cap, kept in cases if divergence == "k1" else cases[:2]:
            got = importance_correction.kept_by_divergence(
                np.array(log_ratios),
                np.array([2]),
                statistic=statistic,
                floor=floor if divergence == "k1" else None,
                cap=cap,
            )
            assert got.tolist() == [kept, kept]


@pytest.mark.parametrize("log_ratio", [1e4, -1e4])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("floor", [None, 0.5])
def test_huge_log_ratios_stay_finite(log_ratio, level, floor):
    pi, mu, A = make_log_probs()
    mu = pi - log_ratio
    for prefix in ("", "normalised-"):
        chosen = dict(importance=(prefix + level, floor, 2.0)) | EVERYTHING
        got = importance_correction.correct(settings(**chosen), pi, mu, A, LENGTHS)
        assert np.isfinite(got.weight_M).all() and not got.kept_M.any()


@pytest.mark.parametrize("log_ratio", [1e4, -1e4])
def test_mismatch_of_broken_log_probs_is_finite(log_ratio):
    """In a batch with a response that is as it should be."""
    mu = np.array([-1.0, -1.0, -0.5]) - max(log_ratio, 0.0) * np.array([1, 1, 0])
    pi = np.array([-1.0, -1.0, -0.5]) + min(log_ratio, 0.0) * np.array([1, 1, 0])
    got = importance_correction.mismatch(pi, mu, np.array([2, 1]))
    assert np.isfinite(list(got.values())).all()


def test_log_ratios_are_bounded_by_20():
    """Importance: the product over a response. Divergence: every token by itself."""
    log_ratio, lengths = np.array([1e4, -5.0, -1e4, 0.5]), np.array([2, 1, 1])
    weight = lambda level: (
        importance_correction.importance_weights(log_ratio, lengths, level=level, cap=1e12).weight_M
    )
    np.testing.assert_allclose(weight("token"), np.exp([20, -5, -20, 0.5]))
    np.testing.assert_allclose(weight("sequence"), np.exp([20, 20, -20, 0.5]))
    for statistic, at in (
        ("seq-sum-k1", [15, 15, 20, 0.5]),
        ("token-k2", [200, 12.5, 200, 0.125]),
        ("seq-sum-k2", [212.5, 212.5, 200, 0.125]),
        ("token-k3", np.exp([20, -5, -20, 0.5]) - 1 - np.array([20, -5, -20, 0.5])),
    ):
        for share, kept in ((1 + 1e-9, True), (1 - 1e-9, False)):
            for i, value in enumerate(at):
                k1 = statistic.endswith("k1")
                cap = math.exp(value * share) if k1 else value * share
                got = importance_correction.kept_by_divergence(
                    np.array([-1, -1, 1, -1]) * log_ratio if k1 else log_ratio,
                    lengths,
                    statistic=statistic,
                    floor=1e-30 if k1 else None,
                    cap=cap,
                )
                assert got[i] == kept


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
@pytest.mark.parametrize(
    "level", [None, "token", "sequence", "normalised-token", "normalised-sequence"]
)
def test_no_tokens(lengths, level):
    none, lengths = np.zeros(0), np.array(lengths, int)
    chosen = dict(importance=level and (level, 0.5, 2.0)) | EVERYTHING
    got = importance_correction.correct(settings(**chosen), none, none, none, lengths)
    assert got.weight_M.shape == got.kept_M.shape == (0,) and got.kept_M.dtype == bool
    assert importance_correction.mismatch(none, none, lengths) == {}


def test_weights_that_are_all_masked_are_not_divided_by_nothing():
    got = importance_correction.normalised(np.zeros(3), np.array([0, 3]), level="token")
    assert got.tolist() == [0.0] * 3


@pytest.mark.parametrize("seed", range(2))
def test_mismatch(seed):
    pi, mu, _ = make_log_probs(seed)
    rho = [math.exp(a - b) for a, b in zip(pi, mu)]
    mean = lambda xs: sum(xs) / len(xs)
    ppl = lambda x_M: mean([math.exp(-mean(x)) for x in by_response(x_M) if x])
    gaps = [abs(math.exp(a) - math.exp(b)) for a, b in zip(pi, mu)]
    expected = {
        "kl": mean([b - a for a, b in zip(pi, mu)]),
        "k3_kl": mean([r - 1 - math.log(r) for r in rho]),
        "training_ppl": ppl(pi),
        "rollout_ppl": ppl(mu),
        "chi2_token": mean([r**2 for r in rho]) - 1,
        "chi2_seq": mean([math.exp(sum(x)) ** 2 for x in by_response(pi - mu) if x]) - 1,
        "prob_gap_mean": mean(gaps),
        "prob_gap_max": max(gaps),
    }
    got = importance_correction.mismatch(pi, mu, LENGTHS)
    assert got == {name: pytest.approx(value, rel=1e-10) for name, value in expected.items()}
    short = [x.astype(np.float32) for x in (pi, mu)]
    exact = [x.astype(np.float64) for x in short]
    assert importance_correction.mismatch(*short, LENGTHS) == importance_correction.mismatch(
        *exact, LENGTHS
    )
    same = importance_correction.mismatch(pi, pi, LENGTHS)
    assert same["training_ppl"] == same["rollout_ppl"] > 1
    assert not any(value for name, value in same.items() if "ppl" not in name)
