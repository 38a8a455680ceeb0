"""GRPO with its KL term (arXiv:2402.03300) on the task and budget of tiny_dapo: the baseline.

Not quite the naive GRPO of the DAPO paper's Table 1, whose published scripts have no KL: that is
--config.objective.kl_coefficient=0 --config.objective.kl_estimator=None
--config.objective.clip_dual=None. The dual clip of tiny_dapo stays on here.

Everything that is not set below is as in configs/tiny_dapo.py, base model included.

Command:   python launch/train.py --config=configs/tiny_grpo.py --workdir=runs/tiny_grpo
Hardware:  2 CPU cores, 1 GB of memory
Time:      4.5 minutes; 2 where tiny_dapo has made the base model
Result:    held-out avg@32 from 28-30 % to 99-100 % (seeds 0, 1, 2), as DAPO; training accuracy at
           temperature 1 stays behind DAPO's, 89-90 % against 92-94 %
"""

import ml_collections

from configs import tiny_dapo


def get_config() -> ml_collections.ConfigDict:
    """tiny_dapo with its four techniques off, and GRPO's KL term on."""
    config = tiny_dapo.get_config()
    config.objective.clip_high = config.objective.clip_low  # one bound for both sides
    config.objective.aggregation = "seq-mean-token-mean"  # every response weighs the same
    config.objective.kl_coefficient = 0.04  # GRPO, arXiv:2402.03300, section 4.2
    config.objective.kl_estimator = "k3"
    config.dynamic_sampling.enabled = False
    config.reward.overlong_buffer_tokens = 0
    config.reward.overlong_penalty = 0.0
    return config
