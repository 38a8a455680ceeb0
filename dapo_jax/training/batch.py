"""From scored groups to the columns of a batch: shaped rewards, advantages, corrections.

All of it is NumPy on the host. `training.learner` calls it: rewards and advantages once for the
whole batch of a rollout step, corrections for each of its mini-batches.
"""

import bisect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dapo_jax.algorithms import advantages, covariance, entropy, importance_correction, losses
from dapo_jax.algorithms.overlong import soft_overlong_punishment
from dapo_jax.config import Config, ObjectiveConfig
from dapo_jax.types import Group, Response, Rows, RunError, Samples, Verdict

BLOCK_TOKENS = 64  # decoded at once to find the tokens of steps
CONTEXT_TOKENS = 8  # decoded before a block, since one character may be several tokens


class TokenColumns(NamedTuple):
    """Columns of a batch or of one of its mini-batches: a value for each response token [M].

    None: not computed yet, or not read by the objective.
    """

    mask_M: np.ndarray  # bool, the token is trained
    log_prob_old_M: np.ndarray  # under the policy that anchors the ratio
    staleness_M: np.ndarray | None = None  # rollout steps since the token was sampled
    recomputed_M: np.ndarray | None = None  # log-probs before the first update
    log_prob_ref_M: np.ndarray | None = None  # under the reference
    entropy_M: np.ndarray | None = None  # before the first update, nats
    energy_M: np.ndarray | None = None  # see `advantages.token_energy`
    value_old_M: np.ndarray | None = None  # of the critic, before its update
    advantage_M: np.ndarray | None = None
    return_M: np.ndarray | None = None  # target of the critic
    correction_M: np.ndarray | None = None  # weight of the policy term
    selected_M: np.ndarray | None = None  # bool, Clip-Cov or KL-Cov acts on the token
    weight_M: np.ndarray | None = None  # numerator of its weight in the loss

    def part(self, tokens: slice | np.ndarray) -> "TokenColumns":
        """Returns the columns of some of the tokens."""
        return TokenColumns._make(None if x_M is None else x_M[tokens] for x_M in self)

    def of_rows(self) -> dict[str, np.ndarray]:
        """Returns those columns that `Rows` has, by its fields."""
        named = {name.removesuffix("M") + "BT": x_M for name, x_M in self._asdict().items()}
        return {name: x for name, x in named.items() if x is not None and name in Rows._fields}


def reward_components(config: Config, group: Group) -> np.ndarray:
    """Returns the components of the reward of each response, float64 [G, C]: one for each scorer,
    0 where a source has fewer, and the soft overlong punishment (DAPO eq. 13)."""
    punishment_G = soft_overlong_punishment(
        np.array([len(response.tokens) for response in group.responses]),
        max_response_tokens=config.rollout.max_response_tokens,
        buffer_tokens=config.reward.overlong_buffer_tokens,
        penalty=config.reward.overlong_penalty,
    )
    components_GC = np.zeros((len(group.responses), config.num_scorers + 1))
    for components_C, verdict in zip(components_GC, group.verdicts):
        rewards = verdict.rewards or (verdict.reward,)
        components_C[: len(rewards)] = rewards
    components_GC[:, -1] = punishment_G
    return components_GC


def shaped_rewards(config: Config, group: Group) -> np.ndarray:
    """Returns the shaped reward of each response, the sum of its components, float64 [G]."""
    return reward_components(config, group).sum(axis=1)


def make_samples(
    config: Config,
    groups: Sequence[Group],
    step: int,
    detokenize: Callable[[list[np.ndarray]], list[str]],
) -> Samples:
    """Returns the responses of the groups as columns, in their order.

    Args:
        detokenize: for process supervision, whose scorers name steps by characters.

    Raises:
        RunError: process supervision, and no response has a step.
    """
    o = config.objective
    responses = [(q, group, r) for q, group in enumerate(groups) for r in group.responses]
    verdicts = [verdict for group in groups for verdict in group.verdicts]
    # Invalid or unscored responses are neither trained nor counted in the baseline of their group.
    valid_R = np.array(
        [not (r.invalid or v.failed) for (_, _, r), v in zip(responses, verdicts)], bool
    )
    overlong_R = np.array([r.truncated for _, _, r in responses], bool) & o.overlong_filter
    joined = lambda arrays, dtype: np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype)
    components = [reward_components(config, group) for group in groups]
    steps: tuple[Any, ...] = ((),) * len(responses)
    if o.reads("steps"):
        steps = tuple(
            _steps_in_tokens(r, verdict, detokenize)
            for (_, _, r), verdict in zip(responses, verdicts)
        )
        if responses and not (any(steps) or o.advantage_args.get("outcome_as_step")):
            raise RunError(
                f"step {step}: no response has a step, and config.objective.advantage is "
                f"{o.advantage!r}. Set config.reward.scorer to one that returns steps "
                "(docs/objective.md), or config.objective.advantage_args.outcome_as_step to True."
            )
    return Samples(
        prompts=tuple(group.problem.prompt_tokens for _, group, _ in responses),
        tokens_M=joined([r.tokens for _, _, r in responses], np.int32),
        log_prob_M=joined([r.log_probs for _, _, r in responses], np.float32),
        lengths_R=np.array([len(r.tokens) for _, _, r in responses], int),
        groups_R=np.array([q for q, _, _ in responses], int),
        staleness_M=step - joined([_versions(group, r) for _, group, r in responses], int),
        trained_R=valid_R & ~overlong_R,
        counted_R=valid_R & (~overlong_R | o.overlong_in_baseline),
        rewards_RC=np.concatenate([np.zeros((0, config.num_scorers + 1)), *components]),
        steps=steps,
    )


def estimate_advantages(
    config: Config,
    samples: Samples,
    *,
    kl_penalty_M: np.ndarray | None = None,
    values_M: np.ndarray | None = None,
    baselines_R: np.ndarray | None = None,
    energy_M: np.ndarray | None = None,
) -> advantages.Advantages:
    """Returns advantages, and returns where there is a critic, of every token of the batch [M]; 0
    for tokens that are not trained.

    Given tokens are no actions: an estimator goes from each sampled token to the next sampled one,
    and a discount counts these.

    Args:
        kl_penalty_M: coefficient times KL estimate of each token, subtracted from its reward.
        values_M: the critic's value before each token.
        baselines_R: reward of the greedy response to the same prompt.
        energy_M: see `advantages.token_energy`.
    """
    trained_M, sampled_M = samples.trained_M, samples.sampled_M
    counted_R = samples.counted_R
    # A response outside the baseline is not trained either, and has no token here.
    lengths_R = kept_lengths(trained_M, samples.lengths_R)[counted_R]
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
        total_lengths_R=kept_lengths(sampled_M, samples.lengths_R)[counted_R],
        token_rewards_M=token_rewards_M,
        steps=tuple(s for s, counted in zip(samples.steps, counted_R) if counted),
        baselines_R=None if baselines_R is None else baselines_R[counted_R],
        values_M=None if values_M is None else values_M[trained_M].astype(np.float64),
        energy_M=None if energy_M is None else energy_M[trained_M],
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


def with_corrections(
    config: Config,
    columns: TokenColumns,
    lengths_R: np.ndarray,
    log_prob_rollout_M: np.ndarray,
    *,
    current_M: np.ndarray | None,
    priority_M: np.ndarray,
) -> TokenColumns:
    """Returns the columns of a mini-batch with `correction_M` and `selected_M`.

    Tokens that a correction rejects leave `mask_M`, those below the top entropies only their policy
    term, by a correction of 0.

    Args:
        columns: of the mini-batch's tokens, advantages included.
        lengths_R: tokens of each response.
        log_prob_rollout_M: under the distribution sampled from.
        current_M: log-probs at the parameters of the next gradient, where the loss or the
            correction needs them.
        priority_M: random numbers, see `covariance.select_clip_cov`.
    """
    o, settings = config.objective, config.correction
    mask_M, advantage_M = columns.mask_M, columns.advantage_M
    assert advantage_M is not None
    correction_M, selected_M = mask_M.astype(np.float64), None
    if settings is not None:
        is_old = settings.policy != "current"
        compared_M = columns.recomputed_M if is_old else current_M
        numerator_M = compared_M
        if is_old and o.loss != "policy-gradient":
            # The loss already has the ratio of a stale token to the policy that sampled it, whose
            # log-prob is therefore the numerator too: weight 1.
            numerator_M = columns.log_prob_old_M
        assert compared_M is not None and numerator_M is not None
        correction = importance_correction.correct(
            settings,
            compared_M[mask_M],
            log_prob_rollout_M[mask_M],
            advantage_M[mask_M],
            kept_lengths(mask_M, lengths_R),
            numerator_M=numerator_M[mask_M],
        )
        correction_M[mask_M] = correction.weight_M
        kept_M = mask_M.copy()
        kept_M[mask_M] = correction.kept_M
        mask_M = kept_M
    if o.top_entropy_share < 1 and mask_M.any():
        assert columns.entropy_M is not None
        correction_M[mask_M] *= entropy.select_top_entropy(
            columns.entropy_M[mask_M], top_share=o.top_entropy_share
        )
    if o.loss in losses.COVARIANCE_LOSSES and mask_M.any():
        assert current_M is not None
        given = current_M, columns.log_prob_old_M, advantage_M, priority_M
        selected_M = np.zeros(len(mask_M), bool)
        selected_M[mask_M] = _select_by_covariance(o, *(x_M[mask_M] for x_M in given))
    return columns._replace(mask_M=mask_M, correction_M=correction_M, selected_M=selected_M)


def _select_by_covariance(
    o: ObjectiveConfig,
    current_M: np.ndarray,
    log_prob_old_M: np.ndarray,
    advantage_M: np.ndarray,
    priority_M: np.ndarray,
) -> np.ndarray:
    """Returns which of the trained tokens kl-cov or clip-cov selects."""
    if o.loss == "kl-cov":
        share = o.loss_args["cov_share"]
        return covariance.select_kl_cov(current_M, advantage_M, cov_share=share)
    assert o.clip_low is not None and o.clip_high is not None
    return covariance.select_clip_cov(
        current_M,
        log_prob_old_M,
        advantage_M,
        priority_M,
        **o.loss_args,
        clip_low=o.clip_low,
        clip_high=o.clip_high,
    )


def kept_lengths(mask_M: np.ndarray, lengths_R: np.ndarray) -> np.ndarray:
    """Returns how many tokens of each response the mask keeps [R]."""
    responses_M = np.repeat(np.arange(len(lengths_R)), lengths_R)
    return np.bincount(responses_M[mask_M], minlength=len(lengths_R))


def _versions(group: Group, response: Response) -> np.ndarray:
    """Returns the rollout step whose parameters sampled each token."""
    if response.versions is not None:
        return response.versions
    return np.full(len(response.tokens), group.step)


def _steps_in_tokens(
    response: Response, verdict: Verdict, detokenize: Callable[[list[np.ndarray]], list[str]]
) -> tuple[tuple[int, float], ...]:
    """Returns (sampled tokens up to the end of the step, reward) of each step. Scorers name a step
    by the characters up to its end; a step that ends with the text ends with the response.

    The response is decoded once, in blocks; then the block in which a step ends is searched.
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
    # Characters before each block, and in the whole response.
    offsets = np.cumsum([0, *(b - a for a, b in zip(before, whole))]).tolist()

    def place(end: int) -> int:
        if end >= offsets[-1]:  # the end-of-sequence token, which has no text, belongs to it
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

    sampled = response.sampled
    return tuple((int(sampled[: place(end)].sum()), reward) for end, reward in verdict.steps)
