"""A small run learns: accuracy, held-out too, and reward rise well beyond noise."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.models import decoder
from dapo_jax.rollout.collector import RolloutCollector
from dapo_jax.training.learner import Learner
from tests.conftest import ROOT
from tests.support.helpers import tiny_config
from tests.support.runs import metrics_of, run, run_here

LEARNING = {
    "model__hidden_size": 64,
    "model__intermediate_size": 128,
    "model__head_dim": 16,
    "data__train__sums__levels": (3,),
    "data__train__sums__num_problems": 200,
    "data__heldout__sums__levels": (3,),
    "data__heldout__sums__num_problems": 16,
    "pretrain__num_steps": 800,
    "pretrain__rows_per_step": 12,
    "rollout__group_size": 8,
    "rollout__slots": 64,
    "rollout__max_response_tokens": 40,
    "dynamic_sampling__max_prompts": 128,
    "train__prompts_per_step": 16,
    "train__prompts_per_update": 4,
    "train__num_steps": 24,
    "optimizer__learning_rate": 5e-4,
    "evaluation__every_steps": 24,
    "evaluation__num_samples": 8,
    "checkpoint__every_steps": 24,
}

# launch/train.py with a base model from texts that are shorter, and right where they derive.
PROGRAM = f"""
import runpy, sys
sys.path.insert(0, {str(ROOT)!r})
from dapo_jax.data import arithmetic
from dapo_jax.training import pretrain

if __name__ == "__main__":
    arithmetic.SHARE_GUESS, arithmetic.SHARE_RAMBLE, arithmetic.SHARE_SLIP = 0.7, 0.2, 0.0
    pretrain.LEARNING_RATE = 5e-3
    runpy.run_path({str(ROOT / "launch" / "train.py")!r}, run_name="__main__")
"""


@pytest.mark.slow
def test_reward_and_accuracy_rise(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    run(tmp_path / "run", tmp_path, optimise=True, program=program, **LEARNING)
    steps = metrics_of(tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    early = np.mean([numbers["accuracy/sampled"] for numbers in steps[1:4]])
    late = np.mean([numbers["accuracy/sampled"] for numbers in steps[-3:]])
    assert late > early + 0.25, (early, late)
    assert summary["final_accuracy"] > summary["base_accuracy"] + 0.25, summary
    rewards = [numbers["reward/mean"] for numbers in steps[1:]]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.3, rewards


@pytest.mark.slow
def test_the_update_does_not_hold_the_rollouts_copy(tmp_path, home, monkeypatch):
    """The copy is the only thing in bfloat16 that is as large as the embedding."""
    config = tiny_config(
        model__compute_dtype="bfloat16",
        pretrain__num_steps=2,
        train__num_steps=1,
        reward__scorer=f"{ROOT / 'tests' / 'support' / 'scorers.py'}:even",
    )
    shape = decoder.param_shapes(config.model)["embed"].shape
    copies = lambda: sum((x.shape, x.dtype) == (shape, jnp.bfloat16) for x in jax.live_arrays())
    groups, train_on, seen = RolloutCollector.outcomes, Learner.train_on, []

    def generating(*arguments, **more):
        if more["step"]:  # not an evaluation
            seen.append(copies())
        return groups(*arguments, **more)

    def training(*arguments, **more):
        seen.append(copies())
        return train_on(*arguments, **more)

    monkeypatch.setattr(RolloutCollector, "outcomes", generating)
    monkeypatch.setattr(Learner, "train_on", training)
    run_here(tmp_path / "run", home, config=config)
    assert seen == [1, 0]
