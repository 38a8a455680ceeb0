"""DPPO on the tiny task (arXiv:2602.04879): a bound on the divergence, not on the ratio.

Everything that is not set below is as in configs/tiny_grpo.py.

Command:   python launch/train.py --config=configs/tiny_dppo.py --workdir=runs/tiny_dppo
Hardware:  2 CPU cores, 1 GB of memory
Time:      1 min 46 s beside other work; 2.5 minutes more for the base model
Result:    held-out avg@32 from 26.5 % to 100.0 % (seed 0); training accuracy at temperature 1,
           last 5 steps: 89.5 %
"""

import ml_collections

from configs import tiny_grpo


def get_config() -> ml_collections.ConfigDict:
    """tiny_grpo without KL, tokens left out by total variation."""
    config = tiny_grpo.get_config()
    config.objective.loss = "dppo-tv"
    config.objective.clip_low = 0.15  # bounds of |pi - pi_old|; ours
    config.objective.clip_high = 0.15
    config.objective.clip_dual = None
    config.objective.ratio_cap = 20.0  # as the reference implementation
    config.objective.kl_coefficient = 0.0
    config.objective.kl_estimator = None
    return config
