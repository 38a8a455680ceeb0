"""The tokens of top entropy, against loops written from arXiv:2506.01939 and against TRL."""

import json
import math
from fractions import Fraction
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.algorithms.aggregation import aggregate
from dapo_jax.algorithms.entropy import select_top_entropy
from dapo_jax.models.log_probs import TokenStatistics
from dapo_jax.training import packing, step
from dapo_jax.training.batch import finished_columns
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
    columns = {
        "mask_BT": np.ones(M, bool),
        "log_prob_old_BT": joined("old"),
        "log_prob_ref_BT": joined("reference"),
        "advantage_BT": np.repeat(case["advantage"], lengths_R),
        "entropy_M": joined("entropy"),
    }
    mine = finished_columns(
        config, columns, lengths_R, joined("old"), current_M=None, priority_M=np.zeros(M)
    )
    assert mine["correction_BT"].tolist() == np.concatenate(case["selected"]).tolist()
    assert mine["mask_BT"].all() and "entropy_M" not in mine
    weights = aggregate(
        lengths_R, np.arange(R), aggregation=config.objective.aggregation, max_response_tokens=32
    )
    mine["weight_BT"] = np.repeat(weights.numerator_R, lengths_R)
    packed = packing.pack([(1,)] * R, np.zeros(M, np.int32), lengths_R, 64)
    rows = jax.tree.map(jnp.asarray, packing.fill(packed, **mine))
    log_prob_BT = packing.fill(packed, log_prob_old_BT=joined("log_prob")).log_prob_old_BT

    def loss(log_prob_BT):
        found = TokenStatistics(log_prob_BT, jnp.zeros_like(log_prob_BT))
        monkeypatch.setattr(step.log_probs, "row_statistics", lambda *_, **__: found)
        return step.loss_and_sums(config, {}, rows)[0] / weights.denominator

    value, gradient_BT = jax.value_and_grad(loss)(jnp.asarray(log_prob_BT))
    np.testing.assert_allclose(value, case["loss"], rtol=2e-6, atol=1e-7)
    gradient_M = packing.take_columns(packed, np.asarray(gradient_BT))
    np.testing.assert_allclose(gradient_M, joined("gradient"), rtol=2e-5, atol=2e-7)
