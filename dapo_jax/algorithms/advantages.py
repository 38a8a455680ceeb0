"""Advantages: pure NumPy functions of the rewards of a batch, float64.

An outcome advantage is one number per response, which every token of it gets; a token advantage
differs from token to token. `estimate` runs once for the whole batch of a rollout step, so that no
advantage depends on how the batch is split into mini-batches.

Deviation: in estimators that compare the responses of a group, a lone response and a group of
equal rewards have advantage 0 (before whitening); in most of them verl gives a lone response its
raw reward.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, Real

from dapo_jax.types import RunError
from dapo_jax.utils.fields import Argument, Positive, Share, UpTo1

EPSILON = 1e-6  # added to standard deviations of rewards, as in verl
WHITEN_EPSILON = 1e-8  # added to the variance in `whiten`
BASELINE_EPSILON = 1e-8  # added to sums of weights, which are 0 where all tokens were certain


class Outcomes(NamedTuple):
    """R responses with M trained tokens in all; one without any still counts in the baseline."""

    rewards_R: np.ndarray  # shaped reward, KL penalty included
    components_RC: np.ndarray  # its components, without the KL penalty
    groups_R: np.ndarray  # int, the prompt of each response
    lengths_R: np.ndarray  # int, trained tokens of each response; they sum to M
    total_lengths_R: np.ndarray  # int, all tokens of each response
    token_rewards_M: np.ndarray  # reward per token: KL where it arises, the rest at the end
    steps: tuple[tuple[tuple[int, float], ...], ...] = ()  # (tokens up to its end, reward) of each
    baselines_R: np.ndarray | None = None  # reward of the greedy response to the same prompt
    values_M: np.ndarray | None = None  # critic's value before each token
    energy_M: np.ndarray | None = None  # see `token_energy`


class Advantages(NamedTuple):
    advantage_M: np.ndarray  # float64, of every trained token
    return_M: np.ndarray | None  # float64, what a critic is to predict; None without one


def group_advantages(
    rewards_G: Real[np.ndarray, " G"], *, normalise_std: bool, std_ddof: int
) -> Float[np.ndarray, " G"]:
    """Returns the advantages of one group: rewards less their mean, over their deviation [G].

        A_i = (R_i - mean(R)) / (std(R) + 1e-6)

    Source: DAPO, arXiv:2503.14476, eq. 9.

    Args:
        rewards_G: rewards of one group.
        normalise_std: False leaves out the division (Dr. GRPO, arXiv:2503.20783).
        std_ddof: 0, or 1 as the reference implementation (torch.std); the paper names none.
    """
    rewards_G = np.asarray(rewards_G, np.float64)
    if len(rewards_G) < 2 or not np.ptp(rewards_G):
        return np.zeros(len(rewards_G))
    centred_G = rewards_G - rewards_G.mean()
    if normalise_std:
        centred_G = centred_G / (rewards_G.std(ddof=std_ddof) + EPSILON)
    return centred_G


def grpo(
    rewards_R: Float[np.ndarray, " R"],
    groups_R: Int[np.ndarray, " R"],
    *,
    normalise_std: bool,
    std_ddof: int,
) -> Float[np.ndarray, " R"]:
    """Returns `group_advantages` of each group [R]. Source: GRPO, arXiv:2402.03300, sec. 4.1.2."""
    one = lambda r_G: group_advantages(r_G, normalise_std=normalise_std, std_ddof=std_ddof)
    return _by_group(one, groups_R, rewards_R)


def rloo(
    rewards_R: Float[np.ndarray, " R"], groups_R: Int[np.ndarray, " R"]
) -> Float[np.ndarray, " R"]:
    """Returns rewards less the mean reward of the other responses of the group [R].

        A_i = R_i - mean of R_j over j != i

    Source: RLOO, arXiv:2402.14740.
    """

    def one(r_G: np.ndarray) -> np.ndarray:
        G = len(r_G)
        return (r_G - r_G.mean()) * (G / (G - 1)) if np.ptp(r_G) else np.zeros(G)

    return _by_group(one, groups_R, rewards_R)


def opo(
    rewards_R: Float[np.ndarray, " R"],
    groups_R: Int[np.ndarray, " R"],
    total_lengths_R: Int[np.ndarray, " R"],
) -> Float[np.ndarray, " R"]:
    """Returns rewards less the mean reward of the group, weighted by length [R].

        A_i = R_i - sum_j n_j R_j / sum_j n_j,   n_j all tokens of response j

    Source: OPO, arXiv:2505.23585.
    """

    def one(r_G: np.ndarray, n_G: np.ndarray) -> np.ndarray:
        if len(r_G) < 2 or not n_G.sum():
            return np.zeros(len(r_G))
        return r_G - (n_G * r_G).sum() / n_G.sum()

    return _by_group(one, groups_R, rewards_R, total_lengths_R)


def remax(
    rewards_R: Float[np.ndarray, " R"], baselines_R: Float[np.ndarray, " R"]
) -> Float[np.ndarray, " R"]:
    """Returns rewards less the reward of the greedy response to the same prompt [R].

    Source: ReMax, arXiv:2310.10505, algorithm 1.
    """
    return rewards_R - baselines_R


def pass_at_k(
    rewards_R: Float[np.ndarray, " R"],
    groups_R: Int[np.ndarray, " R"],
    *,
    normalise_std: bool,
    std_ddof: int,
) -> Float[np.ndarray, " R"]:
    """Returns the lead of a group's best response over the second best; 0 for the others [R].

    `normalise_std` divides the lead by the group's standard deviation.

    Source: arXiv:2503.19595, its leave-one-out form for k = G, as verl implements it.
    """

    def one(r_G: np.ndarray) -> np.ndarray:
        out_G = np.zeros(len(r_G))
        if len(r_G) > 1 and np.ptp(r_G):
            second, best = np.sort(r_G)[-2:]
            scale = r_G.std(ddof=std_ddof) + EPSILON if normalise_std else 1.0
            out_G[r_G.argmax()] = (best - second) / scale
        return out_G

    return _by_group(one, groups_R, rewards_R)


def gpg(
    rewards_R: Float[np.ndarray, " R"], groups_R: Int[np.ndarray, " R"], *, gpg_norm: float
) -> Float[np.ndarray, " R"]:
    """Returns rewards less their group's mean, over the share of rewards that are not 0 [R].

        A_i = alpha (R_i - mean(R)) / gpg_norm,   alpha = responses / responses of reward not 0

    Source: GPG, arXiv:2504.02546, with alpha as verl counts it, for rewards of 0 and 1. The paper
    leaves out groups without a gradient.
    """
    alpha = len(rewards_R) / max(1, np.count_nonzero(rewards_R))
    return alpha * _centred(rewards_R, groups_R) / gpg_norm


def lite_ppo(
    rewards_R: Float[np.ndarray, " R"],
    groups_R: Int[np.ndarray, " R"],
    *,
    std_ddof: int,
    std_of: str,
) -> Float[np.ndarray, " R"]:
    """Returns rewards less their group's mean, over a deviation of the whole batch [R].

        A_i = (R_i - mean of its group) / (std + 1e-6)

    Source: with the std of all "rewards", Lite PPO in "Tricks or Traps", arXiv:2508.08221,
    aggregation token-mean; with the std of the numerators, "advantages", ScaleRL,
    arXiv:2510.13786, section 4, and Magistral, arXiv:2506.10910, section 2.1.
    """
    advantage_R = _centred(rewards_R, groups_R)
    of_batch_R = advantage_R if std_of == "advantages" else rewards_R
    scale = of_batch_R.std(ddof=std_ddof) if len(rewards_R) > 1 else 0.0
    return advantage_R / (scale + EPSILON)


def maxrl(
    rewards_R: Float[np.ndarray, " R"], groups_R: Int[np.ndarray, " R"]
) -> Float[np.ndarray, " R"]:
    """Returns rewards less their group's mean, over that mean: the gradient of log pass rate [R].

        A_i = (R_i - mean(R)) / mean(R),   rewards of 0 or more

    Source: MaxRL, arXiv:2602.02710. A group of mean 0 gets 0.

    Raises:
        RunError: a reward is below 0.
    """
    if (rewards_R < 0).any():
        raise RunError(
            f"config.objective.advantage is 'maxrl', and a reward is {rewards_R.min():g}: its mean "
            "is a pass rate and needs rewards of 0 or more. Look at the scorer that gave it, and "
            "at its weight."
        )

    def one(r_G: np.ndarray) -> np.ndarray:
        mean = r_G.mean()
        return (r_G - mean) / mean if mean > 0 and np.ptp(r_G) else np.zeros(len(r_G))

    return _by_group(one, groups_R, rewards_R)


def gdpo(
    components_RC: Float[np.ndarray, "R C"],
    groups_R: Int[np.ndarray, " R"],
    lengths_R: Int[np.ndarray, " R"],
    *,
    component_weights: tuple[float, ...],
    normalise_std: bool,
    std_ddof: int,
) -> Float[np.ndarray, " R"]:
    """Returns the weighted sum of each component's `grpo`, whitened over the batch's tokens [R].

        A = whiten(sum_k w_k A_k),   A_k the advantages of component k

    Source: GDPO, arXiv:2601.05242; whitening over tokens as verl does.

    Raises:
        ValueError: not one weight per component.
    """
    if len(component_weights) != components_RC.shape[1]:
        raise ValueError(
            f"{len(component_weights)} weights for {components_RC.shape[1]} reward components"
        )
    total_R = sum(
        w * grpo(r_R, groups_R, normalise_std=normalise_std, std_ddof=std_ddof)
        for w, r_R in zip(component_weights, components_RC.T)
    )
    return whiten(np.asarray(total_R), lengths_R)


def reinforce_plus_plus_baseline(
    rewards_R: Float[np.ndarray, " R"],
    groups_R: Int[np.ndarray, " R"],
    lengths_R: Int[np.ndarray, " R"],
) -> Float[np.ndarray, " R"]:
    """Returns rewards less their group's mean, whitened over the tokens of the batch [R].

    Source: REINFORCE++ with baseline, arXiv:2501.03262.
    """
    return whiten(_centred(rewards_R, groups_R), lengths_R)


def reinforce_plus_plus(
    token_rewards_M: Float[np.ndarray, " M"], lengths_R: Int[np.ndarray, " R"], *, gamma: float
) -> Float[np.ndarray, " M"]:
    """Discounted rewards to go, whitened over the tokens of the batch [M].

        G_t = r_t + gamma G_{t+1},   A = (G - mean(G)) / std(G)

    Source: REINFORCE++, arXiv:2501.03262; KL per token in r as `reward_kl_coefficient` says.
    """
    return whiten(_to_go(token_rewards_M, lengths_R, gamma))


def process_grpo(
    steps: tuple[tuple[tuple[int, float], ...], ...],
    rewards_R: Float[np.ndarray, " R"],
    groups_R: Int[np.ndarray, " R"],
    lengths_R: Int[np.ndarray, " R"],
    *,
    normalise_std: bool,
    std_ddof: int,
    outcome_as_step: bool,
) -> Float[np.ndarray, " M"]:
    """GRPO with process supervision [M].

        r~ = (r - mean(all step rewards of the group)) / (std + 1e-6)
        A_t = sum over steps j of the response with end(j) >= t of r~_j

    Source: GRPO, arXiv:2402.03300, section 4.1.3.

    Args:
        steps: (tokens up to the end of the step, reward) of each step, per response.
        rewards_R: outcome rewards; read only with `outcome_as_step`.
        outcome_as_step: the outcome reward is one more step, which ends with the response (not in
            the paper).
    """
    if outcome_as_step:
        steps = tuple((*s, (n, r)) for s, n, r in zip(steps, lengths_R, rewards_R, strict=True))
    ends = [[end for end, _ in s] for s in steps]
    count_R = np.array([len(s) for s in steps], int)
    flat_S = np.array([reward for s in steps for _, reward in s], np.float64)
    normalised_S = grpo(
        flat_S, np.repeat(groups_R, count_R), normalise_std=normalise_std, std_ddof=std_ddof
    )
    out = []
    for end, reward_S, n in zip(ends, np.split(normalised_S, np.cumsum(count_R)[:-1]), lengths_R):
        step_reward_n = np.zeros(n)  # sum of the normalised rewards of steps that end here
        if n:
            np.add.at(step_reward_n, np.clip(np.array(end, int) - 1, 0, n - 1), reward_S)
        out.append(np.cumsum(step_reward_n[::-1])[::-1])
    return np.concatenate(out) if out else np.zeros(0)


def gae(
    token_rewards_M: Float[np.ndarray, " M"],
    values_M: Float[np.ndarray, " M"],
    lengths_R: Int[np.ndarray, " R"],
    *,
    gamma: float,
    gae_lambda: float,
) -> tuple[Float[np.ndarray, " M"], Float[np.ndarray, " M"]]:
    """Returns (advantages, returns) of each token [M]; `estimate` whitens the advantages.

        delta_t = r_t + gamma V_{t+1} - V_t,   A_t = delta_t + gamma gae_lambda A_{t+1}
        return_t = A_t + V_t

    V after the last token is 0.

    Source: GAE, arXiv:1506.02438, eq. 16.
    """
    next_M = np.append(values_M[1:], 0.0)
    if len(next_M):
        next_M[np.cumsum(lengths_R) - 1] = 0.0
    delta_M = token_rewards_M + gamma * next_M - values_M
    advantage_M = _to_go(delta_M, lengths_R, gamma * gae_lambda)
    return advantage_M, advantage_M + values_M


def token_energy(
    log_prob_M: Float[np.ndarray, " M"], collision_M: Float[np.ndarray, " M"]
) -> Float[np.ndarray, " M"]:
    """Returns the squared norm of the gradient of each token's log-prob w.r.t. its logits [M].

        w = 1 - 2 pi + sum over the vocabulary of pi^2

    Source: as `optimal_token_baseline`.

    Args:
        collision_M: the sum of the squares, see `log_probs.TokenStatistics`.
    """
    energy_M = 1.0 - 2.0 * np.exp(log_prob_M.astype(np.float64)) + collision_M
    # Of a sure token it is 0 to rounding; negative weights would put a baseline beyond all rewards.
    return np.maximum(energy_M, 0.0)


def optimal_token_baseline(
    token_rewards_M: Float[np.ndarray, " M"],
    groups_R: Int[np.ndarray, " R"],
    lengths_R: Int[np.ndarray, " R"],
    energy_M: Float[np.ndarray, " M"],
    *,
    zero_tail: bool,
) -> Float[np.ndarray, " M"]:
    """Rewards to go less the baseline of least variance at their position in the group [M].

        A_it = G_it - sum_j G_jt W_jt / (sum_j W_jt + 1e-8),   W_jt = sum over s <= t of w_js

    The sums are over the responses j of the group that have a token t. Source: Optimal Token
    Baseline, arXiv:2602.07078.

    Args:
        energy_M: w, see `token_energy`.
        zero_tail: no baseline where a single response of the group is still going: it would be
            that response's own reward. As in the reference implementation.
    """
    mask_RT = np.arange(int(lengths_R.max(initial=0))) < lengths_R[:, None]
    returns_RT, energy_RT = np.zeros(mask_RT.shape), np.zeros(mask_RT.shape)
    returns_RT[mask_RT], energy_RT[mask_RT] = _to_go(token_rewards_M, lengths_R, 1.0), energy_M
    out_RT = np.zeros(mask_RT.shape)
    for group in np.unique(groups_R[lengths_R > 0]):
        at = (groups_R == group) & (lengths_R > 0)
        if at.sum() > 1:
            baseline_GT = optimal_baselines(
                returns_RT[at], energy_RT[at], mask_RT[at], zero_tail=zero_tail
            )
            out_RT[at] = returns_RT[at] - baseline_GT
    return out_RT[mask_RT]


def optimal_baselines(
    returns_GT: Float[np.ndarray, "G T"],
    energy_GT: Float[np.ndarray, "G T"],
    mask_GT: Bool[np.ndarray, "G T"],
    *,
    zero_tail: bool,
) -> Float[np.ndarray, "G T"]:
    """Returns the baseline of each token of one group, see `optimal_token_baseline`. Values outside
    the mask have no meaning.

    Args:
        mask_GT: True on the tokens that count. `zero_tail` counts them from the start of a row.
    """
    weights_GT = np.cumsum(energy_GT * mask_GT, axis=1) * mask_GT
    baseline_T = (returns_GT * weights_GT).sum(0) / (weights_GT.sum(0) + BASELINE_EPSILON)
    baseline_GT = np.tile(baseline_T, (len(mask_GT), 1))
    second, longest = np.sort(mask_GT.sum(axis=1))[-2:]
    if zero_tail and longest > second:
        baseline_GT[mask_GT.sum(axis=1).argmax(), second:] = 0.0
    return baseline_GT


def whiten(
    x: Float[np.ndarray, " n"], counts: Int[np.ndarray, " n"] | None = None
) -> Float[np.ndarray, " n"]:
    """Returns x shifted and scaled to mean 0 and variance 1, entries counted `counts` times.

        (x - mean) / sqrt(var + 1e-8),   var with ddof 1

    Fewer than two counted entries are whitened to 0.
    """
    counts = np.ones(len(x)) if counts is None else counts.astype(np.float64)
    n = counts.sum()
    if n < 2:
        return np.zeros(len(x))
    mean = (counts * x).sum() / n
    variance = (counts * (x - mean) ** 2).sum() / (n - 1)
    return (x - mean) / np.sqrt(variance + WHITEN_EPSILON)


class Advantage(NamedTuple):
    """An estimator by its name in `config.objective.advantage`, with what it reads and takes."""

    function: Callable[..., Any]
    reads: tuple[str, ...]  # fields of `Outcomes`, in the order of the function's arguments
    arguments: Mapping[str, Argument] = {}  # the keys of config.objective.advantage_args
    per_token: bool = False  # [M]; else one number per response, [R]


STD = {"normalise_std": Argument(bool, True), "std_ddof": Argument(Literal[0, 1], 1)}
GROUPS = ("rewards_R", "groups_R")
# By the name in `config.objective.advantage`.
ADVANTAGES = {
    "grpo": Advantage(grpo, GROUPS, STD),
    "rloo": Advantage(rloo, GROUPS),
    "opo": Advantage(opo, (*GROUPS, "total_lengths_R")),
    "remax": Advantage(remax, ("rewards_R", "baselines_R")),
    "pass-at-k": Advantage(pass_at_k, GROUPS, STD),
    "gpg": Advantage(gpg, GROUPS, {"gpg_norm": Argument(Positive, 1.0)}),
    "lite-ppo": Advantage(
        lite_ppo,
        GROUPS,
        {
            "std_ddof": STD["std_ddof"],
            "std_of": Argument(Literal["rewards", "advantages"], "rewards"),
        },
    ),
    "maxrl": Advantage(maxrl, GROUPS),
    "gdpo": Advantage(
        gdpo,
        ("components_RC", "groups_R", "lengths_R"),
        {"component_weights": Argument(tuple[float, ...]), **STD},
    ),
    "reinforce++-baseline": Advantage(reinforce_plus_plus_baseline, (*GROUPS, "lengths_R")),
    "reinforce++": Advantage(
        reinforce_plus_plus,
        ("token_rewards_M", "lengths_R"),
        {"gamma": Argument(UpTo1, 1.0)},
        per_token=True,
    ),
    "grpo-process": Advantage(
        process_grpo,
        ("steps", *GROUPS, "lengths_R"),
        {**STD, "outcome_as_step": Argument(bool, False)},
        per_token=True,
    ),
    "optimal-token-baseline": Advantage(
        optimal_token_baseline,
        ("token_rewards_M", "groups_R", "lengths_R", "energy_M"),
        {"zero_tail": Argument(bool, True)},
        per_token=True,
    ),
    "gae": Advantage(
        gae,
        ("token_rewards_M", "values_M", "lengths_R"),
        {"gamma": Argument(UpTo1, 1.0), "gae_lambda": Argument(Share, 1.0)},
        per_token=True,
    ),
}


def estimate(name: str, outcomes: Outcomes, arguments: Mapping[str, Any]) -> Advantages:
    """Returns the advantages of every trained token by the estimator of that name.

    Args:
        arguments: the estimator's, by the names of its keyword-only arguments.
    """
    chosen = ADVANTAGES[name]
    data = (getattr(outcomes, field) for field in chosen.reads)
    result = chosen.function(*data, **arguments)
    if "values_M" in chosen.reads:  # a critic is trained to predict its returns
        advantage_M, return_M = result
        return Advantages(whiten(advantage_M), return_M)
    return Advantages(result if chosen.per_token else np.repeat(result, outcomes.lengths_R), None)


def _by_group(
    function: Callable[..., np.ndarray], groups_R: np.ndarray, *columns_R: np.ndarray
) -> np.ndarray:
    """Applies the function to each group's entries and puts the results in their places."""
    out_R = np.zeros(len(groups_R))
    for group in np.unique(groups_R):
        at_R = groups_R == group
        out_R[at_R] = function(*(np.asarray(x_R, np.float64)[at_R] for x_R in columns_R))
    return out_R


def _centred(rewards_R: np.ndarray, groups_R: np.ndarray) -> np.ndarray:
    return grpo(rewards_R, groups_R, normalise_std=False, std_ddof=0)


def _to_go(x_M: np.ndarray, lengths_R: np.ndarray, decay: float) -> np.ndarray:
    """y_t = x_t + decay y_{t+1} within each response."""
    from scipy.signal import lfilter  # here: most runs need none of it, and it loads for seconds

    out = [
        lfilter([1.0], [1.0, -decay], x_n[::-1])[::-1] if len(x_n) else x_n
        for x_n in np.split(x_M, np.cumsum(lengths_R)[:-1])
    ]
    return np.concatenate(out) if out else np.zeros(0)
