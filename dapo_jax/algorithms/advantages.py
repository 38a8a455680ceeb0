"""Advantages: pure NumPy functions of a batch's rewards, float64.

Two kinds. An outcome advantage is one number per response, from its reward and its group's; every
token of the response gets it. A token advantage differs from token to token. `ADVANTAGES` names the
fields of `Outcomes` that a function reads, and the arguments that `config.objective.advantage_args`
sets: everything after `*`. All of it happens on the host, once for the whole batch of a rollout
step, so that no advantage depends on how the batch is cut into mini-batches.

Where a group's mean is the baseline, a lone response and a group of equal rewards have advantage 0;
the reference gives a lone response its raw reward in most of them. Where the batch is whitened
afterwards, that 0 moves with the others.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int, Real

from dapo_jax.utils.fields import Argument, Positive, Share, UpTo1

EPSILON = 1e-6  # keeps the division finite when all rewards are equal, as in the reference
WHITEN_EPSILON = 1e-8  # the same for whole batches


class Outcomes(NamedTuple):
    """R responses with M trained tokens in all. A response may have no trained token and still be
    in its group's baseline."""

    rewards_R: np.ndarray  # shaped reward, its KL penalty included
    components_RC: np.ndarray  # its components, without the KL penalty
    groups_R: np.ndarray  # int, which prompt
    lengths_R: np.ndarray  # int, trained tokens of each response; they sum to M
    drawn_R: np.ndarray  # int, all its tokens
    token_rewards_M: np.ndarray  # the reward as it falls due: KL per token, the rest at the end
    steps: tuple[tuple[tuple[int, float], ...], ...] = ()  # (tokens up to its end, reward) of each
    baselines_R: np.ndarray | None = None  # reward of the greedy response to the same prompt
    values_M: np.ndarray | None = None  # critic's value before each token


class Advantages(NamedTuple):
    advantage_M: np.ndarray  # float64, of every trained token
    return_M: np.ndarray | None  # float64, what a critic is to predict; None without one


def group_advantages(
    rewards_G: Real[np.ndarray, " G"], *, normalise_std: bool, std_ddof: int
) -> Float[np.ndarray, " G"]:
    """A_i = (R_i - mean(R)) / (std(R) + 1e-6), [G].

    Source: DAPO, arXiv:2503.14476, eq. 9. The paper does not say which standard deviation:
    `std_ddof` 1 is the reference implementation's (torch.std).

    Args:
        rewards_G: rewards of one group.
        normalise_std: False leaves out the division (Dr. GRPO, arXiv:2503.20783).
        std_ddof: 0 or 1.
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
    """`group_advantages` of each group [R]: GRPO (arXiv:2402.03300, section 4.1.2), DAPO; Dr. GRPO
    without the division."""
    return _by_group(
        lambda r_G: group_advantages(r_G, normalise_std=normalise_std, std_ddof=std_ddof),
        groups_R,
        rewards_R,
    )


def rloo(
    rewards_R: Float[np.ndarray, " R"], groups_R: Int[np.ndarray, " R"]
) -> Float[np.ndarray, " R"]:
    """A_i = R_i - mean of the others' rewards [R].

    Source: RLOO, arXiv:2402.14740.
    """

    def leave_one_out(r_G: np.ndarray) -> np.ndarray:
        G = len(r_G)
        return (r_G - r_G.mean()) * (G / (G - 1)) if np.ptp(r_G) else np.zeros(G)

    return _by_group(leave_one_out, groups_R, rewards_R)


def opo(
    rewards_R: Float[np.ndarray, " R"],
    groups_R: Int[np.ndarray, " R"],
    drawn_R: Int[np.ndarray, " R"],
) -> Float[np.ndarray, " R"]:
    """A_i = R_i - sum_j n_j R_j / sum_j n_j, the baseline of least variance when gradients grow
    with length [R]; n_j all tokens of a response, also of one that counts and is not trained.

    Source: OPO, arXiv:2505.23585.
    """

    def one(r_G: np.ndarray, n_G: np.ndarray) -> np.ndarray:
        if len(r_G) < 2 or not n_G.sum():
            return np.zeros(len(r_G))
        return r_G - (n_G * r_G).sum() / n_G.sum()

    return _by_group(one, groups_R, rewards_R, drawn_R)


def remax(
    rewards_R: Float[np.ndarray, " R"], baselines_R: Float[np.ndarray, " R"]
) -> Float[np.ndarray, " R"]:
    """A_i = R_i - reward of the greedy response to the same prompt [R].

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
    """The best response of a group gets its lead over the second, the others 0 [R]; with
    `normalise_std` over the group's standard deviation. Of equal bests the lead is 0.

    Source: arXiv:2503.19595, as the reference implements it: its leave-one-out form for k = G.
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
    """A_i = alpha (R_i - mean(R)) / gpg_norm [R], alpha = responses / responses of reward not 0.

    Source: GPG, arXiv:2504.02546, with alpha as the reference counts it: for rewards of 0 and 1.
    Where wrong answers earn -1, alpha is 1. The paper leaves out the groups without a gradient.
    """
    alpha = len(rewards_R) / max(1, np.count_nonzero(rewards_R))
    return alpha * _centred(rewards_R, groups_R) / gpg_norm


def lite_ppo(
    rewards_R: Float[np.ndarray, " R"], groups_R: Int[np.ndarray, " R"], *, std_ddof: int
) -> Float[np.ndarray, " R"]:
    """A_i = (R_i - mean of its group) / (std of the whole batch's rewards + 1e-6) [R].

    Source: Lite PPO in "Tricks or Traps", arXiv:2508.08221; aggregation token-mean.
    """
    scale = rewards_R.std(ddof=std_ddof) if len(rewards_R) > 1 else 0.0
    return _centred(rewards_R, groups_R) / (scale + EPSILON)


def maxrl(
    rewards_R: Float[np.ndarray, " R"], groups_R: Int[np.ndarray, " R"]
) -> Float[np.ndarray, " R"]:
    """A_i = (R_i - mean(R)) / mean(R) for rewards from 0 up: the gradient of log pass rate [R].

    Source: MaxRL, arXiv:2602.02710. A group of mean 0 gets 0.

    Raises:
        ValueError: a reward below 0, for which the mean says nothing of the pass rate.
    """
    if (rewards_R < 0).any():
        raise ValueError(
            "maxrl needs rewards of 0 or more: set config.reward.incorrect to 0, and "
            "config.reward.overlong_buffer_tokens and overlong_penalty to 0"
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
    """sum_k w_k A_k, each component normalised in its group by itself, then whitened over the
    tokens of the batch [R].

    Source: GDPO, arXiv:2601.05242; whitening over tokens as the reference does it.

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
    """R_i - mean of its group, whitened over the tokens of the batch [R].

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
    """GRPO with process supervision [M]: sum of the normalised rewards of the steps that end at or
    after the token.

        r~ = (r - mean(all step rewards of the group)) / (std + 1e-6)
        A_t = sum over steps j of the response with end(j) >= t of r~_j

    Tokens after the last step, and responses without steps, have advantage 0.

    Source: GRPO, arXiv:2402.03300, section 4.1.3.

    Args:
        steps: (tokens up to the end of the step, reward) of each step, per response.
        rewards_R: outcome rewards; read only with `outcome_as_step`.
        outcome_as_step: the outcome reward is one more step of every response, which ends with it.
            Not in the paper. Without other steps this is GRPO.
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
        due_n = np.zeros(n)  # normalised reward that falls due at each token
        if n:
            np.add.at(due_n, np.clip(np.array(end, int) - 1, 0, n - 1), reward_S)
        out.append(np.cumsum(due_n[::-1])[::-1])
    return np.concatenate(out) if out else np.zeros(0)


def gae(
    token_rewards_M: Float[np.ndarray, " M"],
    values_M: Float[np.ndarray, " M"],
    lengths_R: Int[np.ndarray, " R"],
    *,
    gamma: float,
    gae_lambda: float,
) -> tuple[Float[np.ndarray, " M"], Float[np.ndarray, " M"]]:
    """(advantages, returns) of each token [M]; `estimate` whitens the advantages.

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


def whiten(
    x: Float[np.ndarray, " n"], counts: Int[np.ndarray, " n"] | None = None
) -> Float[np.ndarray, " n"]:
    """(x - mean) / sqrt(var + 1e-8), var with ddof 1, each entry counted `counts` times.

    0 where fewer than two are counted.
    """
    counts = np.ones(len(x)) if counts is None else counts.astype(np.float64)
    n = counts.sum()
    if n < 2:
        return np.zeros(len(x))
    mean = (counts * x).sum() / n
    variance = (counts * (x - mean) ** 2).sum() / (n - 1)
    return (x - mean) / np.sqrt(variance + WHITEN_EPSILON)


class Advantage(NamedTuple):
    """An advantage and what a config may set of it."""

    function: Callable[..., Any]
    reads: tuple[str, ...]  # fields of `Outcomes`, in the function's order
    arguments: Mapping[str, Argument] = {}  # config.objective.advantage_args
    per_token: bool = False  # [M]; else one number per response, [R]


STD = {"normalise_std": Argument(bool, True), "std_ddof": Argument(Literal[0, 1], 1)}
GROUPS = ("rewards_R", "groups_R")
# By the name in `config.objective.advantage`.
ADVANTAGES = {
    "grpo": Advantage(grpo, GROUPS, STD),
    "rloo": Advantage(rloo, GROUPS),
    "opo": Advantage(opo, (*GROUPS, "drawn_R")),
    "remax": Advantage(remax, ("rewards_R", "baselines_R")),
    "pass-at-k": Advantage(pass_at_k, GROUPS, STD),
    "gpg": Advantage(gpg, GROUPS, {"gpg_norm": Argument(Positive, 1.0)}),
    "lite-ppo": Advantage(lite_ppo, GROUPS, {"std_ddof": STD["std_ddof"]}),
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
    "gae": Advantage(
        gae,
        ("token_rewards_M", "values_M", "lengths_R"),
        {"gamma": Argument(UpTo1, 1.0), "gae_lambda": Argument(Share, 1.0)},
        per_token=True,
    ),
}


def estimate(name: str, outcomes: Outcomes, arguments: Mapping[str, Any]) -> Advantages:
    """Advantages of every trained token by the estimator of that name.

    Args:
        arguments: the estimator's, by the names of its keyword-only arguments.
    """
    chosen = ADVANTAGES[name]
    data = (getattr(outcomes, field) for field in chosen.reads)
    result = chosen.function(*data, **arguments)
    if name == "gae":
        advantage_M, return_M = result
        return Advantages(whiten(advantage_M), return_M)
    return Advantages(result if chosen.per_token else np.repeat(result, outcomes.lengths_R), None)


def _by_group(
    function: Callable[..., np.ndarray], groups_R: np.ndarray, *columns_R: np.ndarray
) -> np.ndarray:
    """The function of each group's entries, put back in their places."""
    out_R = np.zeros(len(groups_R))
    for group in np.unique(groups_R):
        at_R = groups_R == group
        out_R[at_R] = function(*(np.asarray(x_R, np.float64)[at_R] for x_R in columns_R))
    return out_R


def _centred(rewards_R: np.ndarray, groups_R: np.ndarray) -> np.ndarray:
    return grpo(rewards_R, groups_R, normalise_std=False, std_ddof=0)


def _to_go(x_M: np.ndarray, lengths_R: np.ndarray, decay: float) -> np.ndarray:
    """y_t = x_t + decay y_{t+1} within each response."""
    from scipy.signal import (
        lfilter,  # here: it takes seconds to load, and most runs need none of it
    )

    out = [
        lfilter([1.0], [1.0, -decay], x_n[::-1])[::-1] if len(x_n) else x_n
        for x_n in np.split(x_M, np.cumsum(lengths_R)[:-1])
    ]
    return np.concatenate(out) if out else np.zeros(0)
