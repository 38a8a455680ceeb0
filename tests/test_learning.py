"""A small run learns: accuracy, held-out too, and reward rise well beyond noise."""

import json

import numpy as np
import pytest

from tests.runs import metrics_of, run

LEARNING = {
    "model__width": 64,
    "model__ff_width": 128,
    "model__head_dim": 16,
    "data__train__sums__num_terms": (3,),
    "data__train__sums__num_problems": 200,
    "data__heldout__sums__num_terms": (3,),
    "data__heldout__sums__num_problems": 16,
    "pretrain__num_terms": (3,),
    "pretrain__num_steps": 800,
    "pretrain__rows_per_step": 12,
    "pretrain__row_tokens": 64,
    "pretrain__warmup_steps": 20,
    "pretrain__learning_rate": 5e-3,
    "pretrain__share_guess": 0.7,
    "pretrain__share_ramble": 0.2,
    "pretrain__share_slip": 0.0,
    "rollout__group_size": 8,
    "rollout__slots": 64,
    "rollout__max_response_tokens": 40,
    "dynamic_sampling__max_round_prompts": 32,
    "dynamic_sampling__max_rounds": 4,
    "train__prompts_per_step": 16,
    "train__prompts_per_update": 4,
    "train__num_steps": 24,
    "optimizer__learning_rate": 5e-4,
    "evaluation__every_steps": 24,
    "evaluation__num_samples": 8,
    "checkpoint__every_steps": 24,
}


@pytest.mark.slow
def test_reward_and_accuracy_rise(tmp_path):
    run(tmp_path / "run", tmp_path, optimise=True, **LEARNING)
    steps = metrics_of(tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    early = np.mean([numbers["accuracy/sampled"] for numbers in steps[1:4]])
    late = np.mean([numbers["accuracy/sampled"] for numbers in steps[-3:]])
    assert late > early + 0.25, (early, late)
    assert summary["final_accuracy"] > summary["base_accuracy"] + 0.25, summary
    rewards = [numbers["reward/mean"] for numbers in steps[1:]]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.3, rewards
