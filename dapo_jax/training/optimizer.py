"""AdamW: its learning rate, its step, and the dtype and sharding of its two moments.

The step is optax's, in float32. Moments may be kept in bfloat16, rounded stochastically.
"""

import math
from typing import Any, cast

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
        keep_moments_as(
            optax.scale_by_adam(config.beta1, config.beta2, config.eps), config.moments_dtype
        ),
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


def keep_moments_as(adam: optax.GradientTransformation, dtype: str) -> optax.GradientTransformation:
    """Returns `adam` with both moments kept in `dtype` between its steps.

    A step computes in float32 and moves the parameters by moments that are not yet rounded.
    Rounding to bfloat16 is stochastic: with beta2 = 0.999 a second moment changes by a thousandth
    of itself in a step, and rounding to nearest would never change it (docs/update.md).
    """

    def init(params: Any) -> Any:
        return _cast(adam.init(params), dtype)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        changes, new = cast(Any, adam.update(updates, _cast(state, "float32"), params))
        if dtype == "bfloat16":
            # The key is the number of steps, so a resumed run rounds as one that never stopped.
            leaves, structure = jax.tree.flatten((new.mu, new.nu))
            keys = jax.random.split(jax.random.fold_in(jax.random.key(0), new.count), len(leaves))
            rounded = [round_stochastically(x, key) for x, key in zip(leaves, keys, strict=True)]
            mu, nu = jax.tree.unflatten(structure, rounded)
            new = new._replace(mu=mu, nu=nu)
        return changes, new

    return optax.GradientTransformation(init, update)


def round_stochastically(x: jax.Array, key: jax.Array) -> jax.Array:
    """Rounds float32 to bfloat16 stochastically: to a neighbour, so that the mean over keys is x.

    A bfloat16 is the upper half of a float32: a random number is added to the lower half, and the
    lower half is cut off.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    random = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    upper = (bits + random) >> 16
    rounded = jax.lax.bitcast_convert_type(upper.astype(jnp.uint16), jnp.bfloat16)
    # The carry would turn some nans into other numbers.
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))


def _cast(state: Any, dtype: str) -> Any:
    """Returns a state of Adam with its moments in this dtype."""
    converted = lambda tree: jax.tree.map(lambda x: x.astype(jnp.dtype(dtype)), tree)
    return state._replace(mu=converted(state.mu), nu=converted(state.nu))


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
