"""AdamW and its learning rate."""

import math

import optax

from dapo_jax.config import OptimizerConfig


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Returns AdamW with global-norm clipping at a learning rate of 1; `step.optimizer_step` scales
    its changes.

    Weight decay applies to every parameter, as in torch's AdamW, which verl uses.
    """
    return optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.scale_by_adam(*config.betas, config.eps),
        optax.add_decayed_weights(config.weight_decay),
        optax.scale(-1.0),
    )


def learning_rate(config: OptimizerConfig, step: int, num_steps: int) -> float:
    """Returns the rate of rollout step `step`, from 1 to num_steps: linear warm-up, step /
    warmup_steps of the rate, then constant, or a half cosine down to `final_rate_share`."""
    if step <= config.warmup_steps or config.final_rate_share is None:
        return config.learning_rate * min(1.0, step / max(1, config.warmup_steps))
    done = (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * done))
    share = config.final_rate_share + (1.0 - config.final_rate_share) * cosine
    return config.learning_rate * share
