"""From scored groups to training samples: shaped rewards, advantages and weights in the loss."""

from collections.abc import Sequence

import numpy as np

from dapo_jax.advantage import group_advantages
from dapo_jax.batching import Sample
from dapo_jax.config import Config
from dapo_jax.objective import loss_weights
from dapo_jax.reward import soft_overlong_punishment
from dapo_jax.types import Group


def shaped_rewards(config: Config, group: Group) -> np.ndarray:
    """The scorer's reward plus the soft overlong punishment of each response, float64 [G]."""
    punishment_G = soft_overlong_punishment(
        np.array([len(response.tokens) for response in group.responses]),
        max_response_tokens=config.rollout.max_response_tokens,
        buffer_tokens=config.reward.overlong_buffer_tokens,
        penalty=config.reward.overlong_penalty,
    )
    return np.array([verdict.reward for verdict in group.verdicts]) + punishment_G


def training_samples(config: Config, groups: Sequence[Group], step: int) -> list[Sample]:
    """Every response of a mini-batch with its advantage and its weight in the loss."""
    o = config.objective
    trained = [
        (q, response)
        for q, group in enumerate(groups)
        for response in group.responses
        if not (o.overlong_filter and response.truncated)
    ]
    weights = iter(
        loss_weights(
            [len(response.tokens) for _, response in trained],
            [q for q, _ in trained],
            aggregation=o.aggregation,
            max_response_tokens=config.rollout.max_response_tokens,
        )
    )
    samples = []
    for group in groups:
        is_trained_G = [not (o.overlong_filter and r.truncated) for r in group.responses]
        in_baseline_G = [trained or o.overlong_in_baseline for trained in is_trained_G]
        advantages = np.zeros(len(group.responses), np.float32)
        advantages[in_baseline_G] = group_advantages(
            shaped_rewards(config, group)[in_baseline_G],
            normalise_std=o.normalise_std,
            ddof=o.std_ddof,
        )
        for response, advantage, is_trained in zip(group.responses, advantages, is_trained_G):
            samples.append(
                Sample(
                    group.problem.prompt_tokens,
                    response.tokens,
                    next(weights) if is_trained else 0.0,
                    is_trained,
                    response.log_probs,
                    float(advantage),
                    step - group.step,
                )
            )
    return samples
