"""AdamW: its learning rate, its step, and its two moments. Step and moments are float32."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from dapo_jax.config import OptimizerConfig


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Returns AdamW with global-norm clipping at a learning rate of 1; `step` scales by the rate.

    Weight decay applies to every parameter, as torch's AdamW does in the reference.
    """
    return optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.scale_by_adam(config.beta1, config.beta2, config.eps),
        optax.add_decayed_weights(config.weight_decay),
        optax.scale(-1.0),
    )


def learning_rate(config: OptimizerConfig, step: int, num_steps: int) -> float:
    """Returns the rate of rollout step `step`, from 1 to num_steps: linear warm-up from 1/n, then
    constant, or a half cosine down to `final_rate_share`."""
    if step <= config.warmup_steps or config.final_rate_share is None:
        return config.learning_rate * min(1.0, step / max(1, config.warmup_steps))
    done = (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * done))
    share = config.final_rate_share + (1.0 - config.final_rate_share) * cosine
    return config.learning_rate * share


def moment_shardings(
    config: OptimizerConfig, param_shapes: Any, params_at: Any, everywhere: NamedSharding
) -> Any:
    """Returns shardings of the optimiser's state: moments as their parameters, counters replicated.

    Args:
        param_shapes, params_at: shapes and shardings of the parameters.
        everywhere: the replicated sharding.
    """
    optimizer = make_optimizer(config)
    return optax.tree_map_params(
        optimizer,
        lambda _, param_at: param_at,
        jax.eval_shape(optimizer.init, param_shapes),
        params_at,
        transform_non_params=lambda _: everywhere,
    )


def step(
    config: OptimizerConfig, params: Any, moments: Any, grads: Any, learning_rate: Any, finite: Any
) -> tuple[Any, Any]:
    """Returns (parameters, moments) after a step; unchanged where not `finite`."""
    changes, new = make_optimizer(config).update(grads, moments, params)
    moved = jax.tree.map(lambda p, u: (p + learning_rate * u).astype(p.dtype), params, changes)
    keep = lambda new, old: jnp.where(finite, new, old)
    return jax.tree.map(keep, (moved, new), (params, moments))
