"""ReMax on the tiny task (arXiv:2310.10505): REINFORCE, the greedy response as baseline.

Everything that is not set below is as in configs/tiny_grpo.py.

Command:   python launch/train.py --config=configs/tiny_remax.py --workdir=runs/tiny_remax
Hardware:  2 CPU cores, 1 GB of memory
Time:      3 min 50 s beside other work; 2.5 minutes more for the base model
Result:    held-out avg@32 from 26.5 % to 100.0 % (seed 0); training accuracy at temperature 1,
           last 5 steps: 86.1 %
"""

import ml_collections

from configs import tiny_grpo


def get_config() -> ml_collections.ConfigDict:
    """One response per prompt and one greedy one that it is measured by."""
    config = tiny_grpo.get_config()
    config.objective.loss = "policy-gradient"
    config.objective.clip_low = None
    config.objective.clip_high = None
    config.objective.clip_dual = None
    config.objective.aggregation = "seq-mean-token-sum"
    config.objective.advantage = "remax"
    config.objective.normalise_std = None
    config.objective.std_ddof = None
    config.objective.kl_coefficient = 0.0
    config.objective.kl_estimator = None
    config.objective.reward_kl_coefficient = 0.01  # ours
    config.objective.reward_kl_estimator = "k1"
    config.rollout.group_size = 1
    config.train.prompts_per_step = 256
    config.train.prompts_per_update = 256  # on policy
    config.optimizer.learning_rate = 5e-4  # ours: an eighth of the updates
    return config
