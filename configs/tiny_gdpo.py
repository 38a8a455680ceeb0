"""GDPO on the tiny task (arXiv:2601.05242): each component of the reward normalised by itself.

Everything that is not set below is as in configs/tiny_grpo.py.

Command:   python launch/train.py --config=configs/tiny_gdpo.py --workdir=runs/tiny_gdpo
Hardware:  2 CPU cores, 1 GB of memory
Time:      1 min 51 s beside other work; 2.5 minutes more for the base model
Result:    held-out avg@32 from 26.5 % to 100.0 % (seed 0); training accuracy at temperature 1,
           last 5 steps: 87.0 %
"""

import ml_collections

from configs import tiny_grpo


def get_config() -> ml_collections.ConfigDict:
    """tiny_grpo without KL, with the overlong punishment as a component of its own."""
    config = tiny_grpo.get_config()
    config.objective.advantage = "gdpo"
    config.objective.component_weights = (1.0, 1.0)  # of correctness and of length
    config.objective.kl_coefficient = 0.0
    config.objective.kl_estimator = None
    config.reward.overlong_buffer_tokens = 16  # the second component, as in tiny_dapo
    config.reward.overlong_penalty = 1.0
    return config
