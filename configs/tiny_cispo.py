"""CISPO on the tiny task (MiniMax-M1, arXiv:2506.13585).

Everything that is not set below is as in configs/tiny_dapo.py.

Command:   python launch/train.py --config=configs/tiny_cispo.py --workdir=runs/tiny_cispo
Hardware:  2 CPU cores, 1 GB of memory
Time:      2 min 28 s beside other work; 2.5 minutes more for the base model
Result:    held-out avg@32 from 26.5 % to 100.0 % (seed 0); training accuracy at temperature 1,
           last 5 steps: 90.9 %
"""

import ml_collections

from configs import tiny_dapo


def get_config() -> ml_collections.ConfigDict:
    """tiny_dapo, whose dynamic sampling and length penalty CISPO shares, with clipped weights."""
    config = tiny_dapo.get_config()
    config.objective.loss = "cispo"
    config.objective.clip_low = 1.0  # the paper leaves the lower bound open
    config.objective.clip_high = 0.28  # ours: the paper tunes it and does not print it
    config.objective.clip_dual = None
    config.objective.aggregation = "token-mean-per-group"  # eq. 4 divides by the tokens of a group
    return config
