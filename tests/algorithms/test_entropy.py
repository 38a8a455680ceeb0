"""Top entropies and the adaptive coefficient, against loops from arXiv:2506.01939 and 2505.22312;
the first against TRL too."""

import json
import math
from fractions import Fraction
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.algorithms.aggregation import aggregate
from dapo_jax.algorithms.entropy import (
    adapted_entropy_coefficient,
    applied_entropy_coefficient,
    select_top_entropy,
)
from dapo_jax.models.log_probs import TokenStatistics
from dapo_jax.training import packing, step
from dapo_jax.training.batch import TokenColumns, with_corrections
from tests.support.helpers import tiny_config

TRL = json.loads((Path(__file__).parents[1] / "goldens" / "trl_entropy.json").read_text())
AGGREGATIONS = {
    "dapo": "token-mean",
    "grpo": "seq-mean-token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
}


def selected_by_hand(entropy, rho):
    """1[H_t >= tau], tau the interpolated (1 - rho) quantile, without rounding."""
    ordered, rank = sorted(map(Fraction, entropy)), (1 - Fraction(rho)) * (len(entropy) - 1)
    below, above = math.floor(rank), math.ceil(rank)
    tau = ordered[below] + (rank - below) * (ordered[above] - ordered[below])
    return [H >= tau for H in entropy]


@pytest.mark.parametrize("rho", ["0.2", "0.5", "0.29", "0.95", "1e-6", "1"])
@pytest.mark.parametrize("M", [1, 2, 5, 21, 101, 1000])
@pytest.mark.parametrize("digits", [8, 1])
def test_tokens_at_or_above_the_quantile_are_selected(rho, M, digits):
    entropy = np.round(np.random.default_rng(M).exponential(1.0, M), digits).astype(np.float32)
    got = select_top_entropy(entropy, top_share=float(rho))
    assert got.tolist() == selected_by_hand(entropy.tolist(), rho)


@pytest.mark.parametrize("first", [0.0, 0.02])
@pytest.mark.parametrize("seed", range(3))
def test_the_coefficient_of_the_bonus_follows_the_entropy(first, seed):
    """alpha_k = c_k 1[e_k <= tgt]; c up where e_k < tgt, else down, not below 0."""
    target, change = 0.2, 0.005
    entropies = np.abs(np.random.default_rng(seed).normal(0.2, 0.1, 40).cumsum() / np.arange(1, 41))
    entropies += 0.05 * np.sin(np.arange(40))  # so that it crosses the target both ways
    below = [e < target for e in entropies]
    assert any(below) and not all(below)
    by_hand, c = [], first
    for e in entropies:
        alpha = 0.0
        if e <= target:
            alpha = c
        if e < target:
            following = c + change
        else:
            following = c - change
            if following < 0:
                following = 0.0
        by_hand.append((alpha, following))
        c = following
    found, c = [], first
    for e in map(float, entropies):
        alpha = applied_entropy_coefficient(c, e, target=target)
        c = adapted_entropy_coefficient(c, e, target=target, step=change)
        found.append((alpha, c))
    np.testing.assert_allclose(found, by_hand, rtol=0, atol=1e-12)
    assert min(c for _, c in found) >= 0
    assert applied_entropy_coefficient(0.3, target, target=target) == 0.3, "the target itself"
    lowered = adapted_entropy_coefficient(0.3, target, target=target, step=0.1)
    assert lowered == pytest.approx(0.2)


@pytest.mark.parametrize("case", TRL["cases"])
def test_tokens_and_loss_are_those_of_trl(case, monkeypatch):
    """Value and gradient: the mask is on the policy's term alone, denominators are of all tokens,
    and the KL is of all tokens."""
    settings = TRL["settings"]
    config = tiny_config(
        objective__top_entropy_share=case["share"],
        objective__aggregation=AGGREGATIONS[case["loss_type"]],
        objective__kl_coefficient=settings["beta"],
        objective__kl_estimator="k3",
        **{f"objective__{name}": settings[name] for name in ("clip_low", "clip_high", "clip_dual")},
    )
    assert config.rollout.max_response_tokens == 32, "TRL's divisor of dr_grpo"
    joined = lambda name: np.concatenate(case[name]).astype(np.float32)
    lengths_R = np.array([len(entropies) for entropies in case["entropy"]])
    R, M = len(lengths_R), int(lengths_R.sum())
    columns = TokenColumns(
        mask_M=np.ones(M, bool),
        log_prob_old_M=joined("old"),
        log_prob_ref_M=joined("reference"),
        advantage_M=np.repeat(case["advantage"], lengths_R),
        entropy_M=joined("entropy"),
    )
    mine = with_corrections(
        config, columns, lengths_R, joined("old"), current_M=None, priority_M=np.zeros(M)
    )
    assert mine.correction_M.tolist() == np.concatenate(case["selected"]).tolist()
    assert mine.mask_M.all()
    weights = aggregate(
        lengths_R, np.arange(R), aggregation=config.objective.aggregation, max_response_tokens=32
    )
    mine = mine._replace(weight_M=np.repeat(weights.numerator_R, lengths_R))
    packed = packing.pack([(1,)] * R, np.zeros(M, np.int32), lengths_R, 64)
    rows = jax.tree.map(jnp.asarray, packing.fill(packed, **mine.of_rows()))
    log_prob_BT = packing.fill(packed, log_prob_old_BT=joined("log_prob")).log_prob_old_BT

    def loss(log_prob_BT):
        found = TokenStatistics(log_prob_BT, jnp.zeros_like(log_prob_BT))
        monkeypatch.setattr(step.log_probs, "row_statistics", lambda *_, **__: found)
        return step.loss_and_sums(config, {}, rows)[0] / weights.denominator

    value, gradient_BT = jax.value_and_grad(loss)(jnp.asarray(log_prob_BT))
    np.testing.assert_allclose(value, case["loss"], rtol=2e-6, atol=1e-7)
    gradient_M = packing.take_columns(packed, np.asarray(gradient_BT))
    np.testing.assert_allclose(gradient_M, joined("gradient"), rtol=2e-5, atol=2e-7)
