"""Published methods on the task and budget of configs/tiny_dapo.py, each in the lines that differ.

Command:   python launch/train.py --config=configs/tiny.py:METHOD
Hardware:  2 CPU cores, 1 GB of memory
Time:      1 min 46 s to 3 min 50 s; 2.5 minutes more for the base model, which later runs reuse
Result:    held-out avg@32 from 26-28 % to 94-100 % after 30 steps (seed 0); docs/log.md has the
           training accuracy of each method

METHOD is the name of a function below or in configs/recipes.py, with `-` or `_`.
"""

import inspect

from ml_collections import ConfigDict

from configs import recipes, tiny_dapo
from dapo_jax.types import UserError


def grpo(c: ConfigDict) -> None:
    """GRPO with its KL term (arXiv:2402.03300, section 4.2) and the dual clip: the baseline.

    The naive GRPO of the DAPO paper's Table 1 has neither in the published scripts:
    --config.objective.kl_coefficient=0
    --config.objective.clip_dual=None.
    """
    c.objective.clip_high = c.objective.clip_low  # one bound for both sides
    c.objective.aggregation = "seq-mean-token-mean"  # every response weighs the same
    c.objective.kl_coefficient = 0.04
    c.dynamic_sampling.enabled = False
    c.reward.update(overlong_buffer_tokens=0, overlong_penalty=0.0)


def grpo_process(c: ConfigDict) -> None:
    """GRPO with process supervision (arXiv:2402.03300, section 4.1.3): a reward for every line."""
    grpo(c)
    c.reward.scorer = "dapo_jax.data.arithmetic:score_steps"
    c.objective.update(advantage="grpo-process", advantage_args=dict(outcome_as_step=False))


def dr_grpo(c: ConfigDict) -> None:
    """Dr. GRPO (arXiv:2503.20783, section 3): divided by neither deviation nor length."""
    _grpo_without_kl(c)
    c.objective.aggregation = "seq-mean-token-sum-norm"
    c.objective.advantage_args = dict(normalise_std=False)


def gspo(c: ConfigDict) -> None:
    """GSPO (arXiv:2507.18071), the bounds of its section 5.1: the ratio of whole responses."""
    _grpo_without_kl(c)
    c.objective.update(loss="gspo", clip_low=3e-4, clip_high=4e-4)


def gmpo(c: ConfigDict) -> None:
    """GMPO (arXiv:2507.20673), the paper's bounds: the geometric mean of token ratios."""
    _grpo_without_kl(c)
    c.objective.update(loss="gmpo", clip_low=0.4, clip_high=0.4)  # of the log-ratio


def sapo(c: ConfigDict) -> None:
    """SAPO (arXiv:2511.20347), the temperatures of the paper: a smooth gate instead of bounds."""
    _grpo_without_kl(c)
    c.objective.update(loss="sapo", clip_low=None, clip_high=None)
    c.objective.loss_args = dict(tau_positive=1.0, tau_negative=1.05)


def dppo(c: ConfigDict) -> None:
    """DPPO (arXiv:2602.04879): masks tokens by total variation, not by ratio. The bounds of
    |pi - pi_old| are ours, the cap is the reference implementation's."""
    _grpo_without_kl(c)
    c.objective.update(loss="dppo-tv", clip_low=0.15, clip_high=0.15)
    c.objective.loss_args = dict(ratio_cap=20.0)


def cispo(c: ConfigDict) -> None:
    """CISPO (MiniMax-M1, arXiv:2506.13585): clipped weights on DAPO's sampling and length penalty.
    The paper leaves the lower bound open and does not print the upper one."""
    c.objective.update(loss="cispo", clip_low=1.0, clip_high=0.28, clip_dual=None)
    c.objective.aggregation = "token-mean-per-group"  # eq. 4 divides by the tokens of a group


def clip_cov(c: ConfigDict) -> None:
    """Clip-Cov (arXiv:2505.22617, section 4) in place of Clip-Higher; the paper's values."""
    c.objective.update(loss="clip-cov", clip_high=c.objective.clip_low, clip_dual=None)
    c.objective.loss_args = dict(cov_share=2e-4, cov_low=1.0, cov_high=5.0)


def kl_cov(c: ConfigDict) -> None:
    """KL-Cov (arXiv:2505.22617, section 4) in place of every clip; k is the paper's for 7B."""
    c.objective.update(loss="kl-cov", clip_low=None, clip_high=None, clip_dual=None)
    c.objective.loss_args = dict(cov_share=2e-3, cov_kl_coefficient=1.0)


def top_entropy(c: ConfigDict) -> None:
    """Beyond the 80/20 rule (arXiv:2506.01939): DAPO on the fifth of the tokens of highest entropy;
    the paper's share."""
    c.objective.top_entropy_share = 0.2


def adaptive_entropy(c: ConfigDict) -> None:
    """The adaptive entropy control of Skywork-OR1 (arXiv:2505.22312) on DAPO: an entropy bonus
    below a target, its coefficient moving from 0; the paper's target and step."""
    c.objective.entropy_adaptation = (0.2, 0.005)


def lite_ppo(c: ConfigDict) -> None:
    """Lite PPO (arXiv:2508.08221): the group's mean, the batch's deviation, the token mean."""
    _grpo_without_kl(c)
    c.objective.update(advantage="lite-ppo", aggregation="token-mean")


def maxrl(c: ConfigDict) -> None:
    """MaxRL (arXiv:2602.02710): advantages over the mean of rewards of 0 and 1, the pass rate."""
    _grpo_without_kl(c)
    c.reward.incorrect = 0.0
    c.objective.advantage = "maxrl"


def gdpo(c: ConfigDict) -> None:
    """GDPO (arXiv:2601.05242): correctness and length, each normalised by itself."""
    _grpo_without_kl(c)
    c.objective.clip_dual = 10.0
    c.objective.update(advantage="gdpo", advantage_args=dict(component_weights=(1.0, 1.0)))
    c.reward.update(overlong_buffer_tokens=16, overlong_penalty=1.0)  # the second component


def reinforce_plus_plus(c: ConfigDict) -> None:
    """REINFORCE++ (arXiv:2501.03262): one response per prompt, advantages whitened over the batch,
    KL per token in the reward (coefficient ours)."""
    _grpo_without_kl(c)
    c.objective.update(advantage="reinforce++", aggregation="token-mean")
    c.objective.update(reward_kl_coefficient=0.001, kl_estimator="k1")
    c.rollout.group_size = 1  # the batch is the baseline: as many prompts as responses
    c.train.update(prompts_per_step=256, prompts_per_update=32)


def gpg(c: ConfigDict) -> None:
    """GPG (arXiv:2504.02546): the policy gradient alone."""
    _on_policy(c)
    c.reward.incorrect = 0.0
    c.objective.update(advantage="gpg", aggregation="token-mean")


def opo(c: ConfigDict) -> None:
    """OPO (arXiv:2505.23585): on policy, with the baseline of least variance."""
    _on_policy(c)
    c.objective.update(advantage="opo", aggregation="token-mean")


def otb(c: ConfigDict) -> None:
    """Optimal Token Baseline (arXiv:2602.07078): the baseline of least variance of each token."""
    _on_policy(c)
    c.objective.update(advantage="optimal-token-baseline", aggregation="token-mean")


def rloo(c: ConfigDict) -> None:
    """RLOO (arXiv:2402.14740): the other responses as baseline, KL in the reward (factor ours)."""
    _on_policy(c)
    c.objective.update(advantage="rloo", aggregation="seq-mean-token-sum")  # a response: one action
    c.objective.update(reward_kl_coefficient=0.03, kl_estimator="k1")


def remax(c: ConfigDict) -> None:
    """ReMax (arXiv:2310.10505): the greedy response as baseline, KL in the reward (factor ours)."""
    c.train.prompts_per_step = 256
    _on_policy(c)
    c.objective.update(advantage="remax", aggregation="seq-mean-token-sum")
    c.objective.update(reward_kl_coefficient=0.01, kl_estimator="k1")
    c.rollout.group_size = 1


def ppo(c: ConfigDict) -> None:
    """PPO (arXiv:1707.06347, eq. 7: one bound, 0.2) as RLHF runs it (arXiv:2203.02155): a critic,
    GAE without discount, KL in the reward."""
    c.objective.update(clip_high=c.objective.clip_low, clip_dual=None, advantage="gae")
    c.objective.update(reward_kl_coefficient=0.001, kl_estimator="k1")
    c.critic = dict(learning_rate=3e-4, value_clip=0.5, head_start_steps=2)
    c.dynamic_sampling.enabled = False  # a critic learns from groups of any outcome
    c.reward.update(overlong_buffer_tokens=0, overlong_penalty=0.0)


def _grpo_without_kl(c: ConfigDict) -> None:
    grpo(c)
    c.objective.update(kl_coefficient=0.0, clip_dual=None)


def _on_policy(c: ConfigDict) -> None:
    """One update per rollout step, without ratio or clip; the rate is ours."""
    _grpo_without_kl(c)
    c.objective.update(loss="policy-gradient", clip_low=None, clip_high=None)
    c.train.prompts_per_update = c.train.prompts_per_step
    c.optimizer.learning_rate = 5e-4


# The public functions above.
METHODS = {
    name: change
    for name, change in list(globals().items())
    if inspect.isfunction(change) and not name.startswith("_")
}


def get_config(method: str = "", others: tuple[str, ...] = ()) -> ConfigDict:
    """Returns configs/tiny_dapo.py with the changes of a method; an error names others too."""
    every = METHODS | {name: run.method for name, run in recipes.RUNS.items()}
    change = every.get(method.replace("-", "_"))
    if change is None:
        names = ", ".join((*others, *every))
        raise UserError(f"--config=FILE:METHOD: the method {method!r} is not one of {names}.")
    config = tiny_dapo.get_config()
    change(config)
    return config
