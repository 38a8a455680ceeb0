"""From scored groups to what a batch is trained on: rewards, advantages, weights in the loss.

All of it is NumPy on the host. Rewards and advantages are made once for the whole batch of a
rollout step; weights in the loss for each of its mini-batches.
"""

import bisect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dapo_jax.algorithms import advantages, covariance, importance_correction
from dapo_jax.algorithms.surrogate import MAX_K3, MAX_LOG_RATIO
from dapo_jax.config import Config
from dapo_jax.rewards.types import soft_overlong_punishment
from dapo_jax.types import Group, Response, RunError, Samples, Verdict

BLOCK_TOKENS = 64  # decoded at once where steps are looked for
# Decoded before a block: a character of four bytes may be as many tokens.
CONTEXT_TOKENS = 8


def reward_components(config: Config, group: Group) -> np.ndarray:
    """The reward by each scorer and the soft overlong punishment of each response, float64
    [G, K + 1]. A source with fewer scorers than another has zeros in the place of the rest."""
    punishment_G = soft_overlong_punishment(
        np.array([len(response.tokens) for response in group.responses]),
        max_response_tokens=config.rollout.max_response_tokens,
        buffer_tokens=config.reward.overlong_buffer_tokens,
        penalty=config.reward.overlong_penalty,
    )
    components_GK = np.zeros((len(group.responses), config.num_scorers + 1))
    for components_C, verdict in zip(components_GK, group.verdicts):
        rewards = verdict.rewards or (verdict.reward,)
        components_C[: len(rewards)] = rewards
    components_GK[:, -1] = punishment_G
    return components_GK


def shaped_rewards(config: Config, group: Group) -> np.ndarray:
    """Sum of the reward's components of each response, float64 [G]."""
    return reward_components(config, group).sum(axis=1)


def make_samples(
    config: Config,
    groups: Sequence[Group],
    step: int,
    detokenize: Callable[[list[np.ndarray]], list[str]],
) -> Samples:
    """Every response of the groups, in their order.

    Args:
        detokenize: for process supervision, which finds the tokens of steps named in characters.

    Raises:
        RunError: process supervision without a step in any response.
    """
    o = config.objective
    responses = [(q, group, r) for q, group in enumerate(groups) for r in group.responses]
    verdicts = [verdict for group in groups for verdict in group.verdicts]
    # A response whose logits were not finite, or that no scorer could judge, says nothing of its
    # prompt.
    valid_R = np.array(
        [not (r.invalid or v.failed) for (_, _, r), v in zip(responses, verdicts)], bool
    )
    overlong_R = np.array([r.truncated for _, _, r in responses], bool) & o.overlong_filter
    joined = lambda arrays, dtype: np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype)
    components = [reward_components(config, group) for group in groups]
    steps: tuple[Any, ...] = ((),) * len(responses)
    if o.advantage == "grpo-process":
        steps = tuple(
            _steps_in_tokens(r, verdict, detokenize)
            for (_, _, r), verdict in zip(responses, verdicts)
        )
        if responses and not (any(steps) or o.advantage_args["outcome_as_step"]):
            raise RunError(
                f"step {step}: no response has a step, and config.objective.advantage "
                "'grpo-process' is of the rewards of steps. Give config.reward.scorer one that "
                "returns steps (docs/objective.md), or set config.objective.advantage_args."
                "outcome_as_step to True."
            )
    return Samples(
        prompts=tuple(group.problem.prompt_tokens for _, group, _ in responses),
        tokens_M=joined([r.tokens for _, _, r in responses], np.int32),
        log_prob_M=joined([r.log_probs for _, _, r in responses], np.float32),
        lengths_R=np.array([len(r.tokens) for _, _, r in responses], int),
        groups_R=np.array([q for q, _, _ in responses], int),
        lag_M=step - joined([_versions(group, r) for _, group, r in responses], int),
        trained_R=valid_R & ~overlong_R,
        counted_R=valid_R & (~overlong_R | o.overlong_in_baseline),
        rewards_RC=np.concatenate([np.zeros((0, config.num_scorers + 1)), *components]),
        steps=steps,
    )


def reward_kl(log_prob_M: np.ndarray, log_prob_ref_M: np.ndarray, *, estimator: str) -> np.ndarray:
    """Estimates of KL(policy || reference) for the reward, nats per token, float64 [M].

    The values of `objective.kl_estimate`, in NumPy: M differs from step to step, and each M would
    be one more program for XLA to compile.

    Args:
        log_prob_M: under the policy that sampled, float32.
        log_prob_ref_M: under the reference.
        estimator: k1, abs, k2 or k3.
    """
    d_M = (log_prob_M - log_prob_ref_M).astype(np.float64)
    if estimator == "k1":
        return d_M
    if estimator == "abs":
        return np.abs(d_M)
    if estimator == "k2":
        return 0.5 * d_M**2
    assert estimator == "k3", estimator
    bounded_M = np.clip(d_M, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return np.clip(np.expm1(-bounded_M) + bounded_M, -MAX_K3, MAX_K3)


def estimate_advantages(
    config: Config,
    samples: Samples,
    *,
    kl_penalty_M: np.ndarray | None = None,
    values_M: np.ndarray | None = None,
    baselines_R: np.ndarray | None = None,
) -> advantages.Advantages:
    """Advantages, and returns where there is a critic, of every token of the batch [M]; 0 for
    tokens that are not trained.

    Args:
        kl_penalty_M: coefficient times KL estimate of each token, taken from its reward.
        values_M: the critic's value before each token.
        baselines_R: reward of the greedy response to the same prompt.
    """
    trained_M = np.repeat(samples.trained_R, samples.lengths_R)
    counted_R = samples.counted_R
    # What is left out of the baseline is not trained either: it has no token here.
    lengths_R = np.where(samples.trained_R, samples.lengths_R, 0)[counted_R]
    components_RC = samples.rewards_RC[counted_R]
    rewards_R = components_RC.sum(axis=1)
    token_rewards_M = np.zeros(int(trained_M.sum()))
    token_rewards_M[np.cumsum(lengths_R)[lengths_R > 0] - 1] = rewards_R[lengths_R > 0]
    if kl_penalty_M is not None:
        penalty_R = np.bincount(samples.response_M, weights=kl_penalty_M, minlength=len(counted_R))
        rewards_R = rewards_R - penalty_R[counted_R]
        token_rewards_M = token_rewards_M - kl_penalty_M[trained_M]
    outcomes = advantages.Outcomes(
        rewards_R=rewards_R,
        components_RC=components_RC,
        groups_R=samples.groups_R[counted_R],
        lengths_R=lengths_R,
        total_lengths_R=samples.lengths_R[counted_R],
        token_rewards_M=token_rewards_M,
        steps=tuple(s for s, counted in zip(samples.steps, counted_R) if counted),
        baselines_R=None if baselines_R is None else baselines_R[counted_R],
        values_M=None if values_M is None else values_M[trained_M].astype(np.float64),
    )
    o = config.objective
    result = advantages.estimate(o.advantage, outcomes, o.advantage_args)

    def everywhere(x_n: np.ndarray) -> np.ndarray:
        out_M = np.zeros(len(trained_M))
        out_M[trained_M] = x_n
        return out_M

    return advantages.Advantages(
        everywhere(result.advantage_M),
        None if result.return_M is None else everywhere(result.return_M),
    )


def finished_columns(
    config: Config,
    columns: Mapping[str, np.ndarray],
    lengths_R: np.ndarray,
    log_prob_rollout_M: np.ndarray,
    *,
    current_M: np.ndarray | None,
    priority_M: np.ndarray,
) -> dict[str, np.ndarray]:
    """The columns of a mini-batch with its corrections and its choice of tokens.

    Adds `correction_BT` and `selected_BT`; tokens that a correction rejects leave `mask_BT`.

    Args:
        columns: of the mini-batch's tokens [M], by the names of `Rows`.
        lengths_R: tokens of each response.
        log_prob_rollout_M: under the distribution sampled from.
        current_M: log-probs at the parameters of the coming gradient, where something needs them.
        priority_M: random numbers for Clip-Cov's choice, see `covariance.select_clip_cov`.
    """
    o, settings = config.objective, config.correction
    mask_M = columns["mask_BT"]
    out = dict(columns)
    out["correction_BT"] = mask_M.astype(np.float64)
    if settings is not None:
        compared_M = columns["log_prob_old_BT"] if settings.policy == "old" else current_M
        assert compared_M is not None
        correction = importance_correction.correct(
            settings,
            compared_M[mask_M],
            log_prob_rollout_M[mask_M],
            columns["advantage_BT"][mask_M],
            kept_lengths(mask_M, lengths_R),
        )
        out["correction_BT"][mask_M] = correction.weight_M
        out["mask_BT"] = mask_M.copy()
        out["mask_BT"][mask_M] = correction.kept_M
        mask_M = out["mask_BT"]
    if o.loss in ("kl-cov", "clip-cov") and mask_M.any():
        assert current_M is not None
        selected_M = np.zeros(len(mask_M), bool)
        taken, args = lambda x_M: x_M[mask_M], o.loss_args
        if o.loss == "kl-cov":
            selected_M[mask_M] = covariance.select_kl_cov(
                taken(current_M), taken(columns["advantage_BT"]), cov_share=args["cov_share"]
            )
        else:
            assert o.clip_low is not None and o.clip_high is not None
            selected_M[mask_M] = covariance.select_clip_cov(
                taken(current_M),
                taken(columns["log_prob_old_BT"]),
                taken(columns["advantage_BT"]),
                taken(priority_M),
                **args,
                clip_low=o.clip_low,
                clip_high=o.clip_high,
            )
        out["selected_BT"] = selected_M
    return out


def kept_lengths(mask_M: np.ndarray, lengths_R: np.ndarray) -> np.ndarray:
    """How many tokens of each response the mask keeps [R]."""
    responses_M = np.repeat(np.arange(len(lengths_R)), lengths_R)
    return np.bincount(responses_M[mask_M], minlength=len(lengths_R))


def adapted_kl_coefficient(
    coefficient: float, kl: float, *, target: float, horizon: int, num_responses: int
) -> float:
    """The coefficient of the KL in the reward after a step whose KL was `kl`.

        coefficient (1 + clip(kl / target - 1, -0.2, 0.2) num_responses / horizon)

    Source: Ziegler et al., arXiv:1909.08593, section 2.2. `kl` is in nats per token, as in the
    reference; in the paper it is of a whole response.
    """
    error = float(np.clip(kl / target - 1.0, -0.2, 0.2))
    return coefficient * (1.0 + error * num_responses / horizon)


def _versions(group: Group, response: Response) -> np.ndarray:
    """The rollout step whose parameters drew each token."""
    if response.versions is not None:
        return response.versions
    return np.full(len(response.tokens), group.step)


def _steps_in_tokens(
    response: Response, verdict: Verdict, detokenize: Callable[[list[np.ndarray]], list[str]]
) -> tuple[tuple[int, float], ...]:
    """(tokens up to the end of the step, reward) of each step that the scorer named by the
    characters up to its end. A step that ends with the text ends with the response.

    The response is decoded once, in blocks; then the one block in which a step ends is searched.
    """
    tokens = response.tokens
    if not (verdict.steps and len(tokens)):
        return tuple((1, reward) for _, reward in verdict.steps)
    starts = range(0, len(tokens), BLOCK_TOKENS)
    firsts = [max(0, start - CONTEXT_TOKENS) for start in starts]
    before, whole = (
        [len(text) for text in detokenize([tokens[i:j] for i, j in zip(firsts, ends)])]
        for ends in (starts, [start + BLOCK_TOKENS for start in starts])
    )
    # Characters up to the beginning of each block, and of the response.
    offsets = np.cumsum([0, *(b - a for a, b in zip(before, whole))]).tolist()

    def place(end: int) -> int:
        if end >= offsets[-1]:  # with what follows the text: the end-of-sequence token
            return len(tokens)
        if end <= 0:
            return 1
        block = bisect.bisect_left(offsets, end) - 1
        first, start = firsts[block], starts[block]
        characters = lambda n: (
            offsets[block] - before[block] + len(detokenize([tokens[first:n]])[0])
        )
        counts = range(start, min(start + BLOCK_TOKENS, len(tokens)) + 1)
        return start + bisect.bisect_left(counts, end, key=characters)

    return tuple((place(end), reward) for end, reward in verdict.steps)
