"""The critic of PPO: a value model of the policy's architecture, fitted to returns.

The value at position t is the expected return from the token at t on. A linear head, which starts
at 0, reads it from the hidden state that predicts that token. The decoder starts as a copy of the
base model.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dapo_jax.algorithms.surrogate import clamp, masked
from dapo_jax.config import Config, OptimizerConfig
from dapo_jax.models import decoder, log_probs
from dapo_jax.models.attention import zigzag
from dapo_jax.models.sharding import head_layout, param_shardings, replicated
from dapo_jax.training.step import (
    TrainState,
    jit_with_shardings,
    jitted_map,
    new_state,
    optimizer_step,
    shardings_of,
    summed_gradient,
)
from dapo_jax.types import Array, Rows


class CriticParams(NamedTuple):
    """Parameters of the critic, or a tree of the same structure."""

    decoder: Any  # decoder.Params
    head_D: Any


class CriticSums(NamedTuple):
    """Sums over trained tokens and micro-batches."""

    tokens: jax.Array
    loss: jax.Array  # weighted numerator of the mini-batch's loss
    clipped: jax.Array


class CriticMetrics(NamedTuple):
    sums: CriticSums
    grad_norm: jax.Array
    skipped: jax.Array  # int32, see TrainState


def value_loss(
    value_BT: jax.Array,
    value_old_BT: jax.Array,
    return_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    value_clip: float,
) -> tuple[jax.Array, jax.Array]:
    """Returns (loss of each token, whether the clipped side is the larger), 0 outside the mask.

        L_t = max((V_t - R_t)^2, (clip(V_t, V_old - c, V_old + c) - R_t)^2) / 2

    Source: PPO2 of OpenAI baselines, as described in Engstrom et al., arXiv:2005.12729.
    """
    arrays = value_BT, value_old_BT, return_BT
    value_BT, value_old_BT, return_BT = (masked(x_BT, mask_BT) for x_BT in arrays)
    moved_BT = clamp(value_BT - value_old_BT, -value_clip, value_clip)
    plain_BT = (value_BT - return_BT) ** 2
    clipped_BT = (value_old_BT + moved_BT - return_BT) ** 2
    # Within the clip both sides differ by rounding only.
    beyond_BT = jnp.abs(value_BT - value_old_BT) > value_clip
    worse_BT = beyond_BT & (clipped_BT > plain_BT)
    return 0.5 * jnp.where(worse_BT, clipped_BT, plain_BT), worse_BT


def row_values(
    config: Config, params: CriticParams, rows: Rows, mesh: Mesh | None = None
) -> jax.Array:
    """Returns the value at each token, float32 [B, T]; 0 for the first of a row.

    Args:
        mesh: of the parameters and rows; None: one device.
    """
    layout = None if mesh is None else head_layout(config.model, config.mesh, mesh)
    hidden_BTD = log_probs.row_hidden(
        config.model, params.decoder, rows, layout, share_prompts=config.train.share_prompts
    )
    value_BT = jnp.einsum(
        "BTD,D->BT",
        hidden_BTD,
        params.head_D.astype(hidden_BTD.dtype),
        preferred_element_type=jnp.float32,
    )
    value_BT = zigzag.to_rows(value_BT, 1 if layout is None else layout.context)
    return log_probs.to_own_token(value_BT)


def optimizer_config(config: Config) -> OptimizerConfig:
    """Returns the policy's optimiser config with the critic's rate and no warm-up."""
    assert config.critic is not None
    return dataclasses.replace(
        config.optimizer,
        learning_rate=config.critic.learning_rate,
        warmup_steps=0,
    )


def init_state(config: Config, params: decoder.Params) -> TrainState:
    """Returns the critic before its first update, from the base model's parameters; jittable."""
    head_D = jnp.zeros(config.model.hidden_size, jnp.dtype(config.model.param_dtype))
    critic = CriticParams(jax.tree.map(jnp.copy, params), head_D)
    return new_state(optimizer_config(config), critic)


def state_shardings(config: Config, mesh: Mesh) -> TrainState:
    """Returns the shardings of the state: the decoder as the policy's, the head replicated."""
    params_at = CriticParams(param_shardings(config.model, config.mesh, mesh), replicated(mesh))
    shapes = jax.eval_shape(
        functools.partial(init_state, config), decoder.param_shapes(config.model)
    ).params
    return shardings_of(optimizer_config(config), shapes, params_at, mesh)


def update(
    config: Config,
    state: TrainState,
    rows_ABT: Rows,
    num_micro_batches: Array,
    denominator: Array,
    learning_rate: Array,
    *,
    mesh: Mesh | None = None,
) -> tuple[TrainState, CriticMetrics]:
    """Returns the critic after one optimiser step on one mini-batch; arguments as `step.update`."""
    assert config.critic is not None
    value_clip = config.critic.value_clip

    def loss(params: CriticParams, rows: Rows) -> tuple[jax.Array, CriticSums]:
        loss_BT, worse_BT = value_loss(
            row_values(config, params, rows, mesh),
            rows.value_old_BT,
            rows.return_BT,
            rows.mask_BT,
            value_clip=value_clip,
        )
        value = jnp.sum(rows.weight_BT * loss_BT)
        count = lambda x_BT: jnp.sum(x_BT, dtype=jnp.float32)
        sums = CriticSums(count(rows.mask_BT), value, count(worse_BT))
        return value, jax.lax.stop_gradient(sums)

    zero = CriticSums(*(jnp.zeros((), jnp.float32) for _ in CriticSums._fields))
    join = functools.partial(jax.tree.map, jnp.add)
    grads, sums = summed_gradient(loss, zero, join, state.params, rows_ABT, num_micro_batches)
    grads = jax.tree.map(lambda g: g / denominator, grads)
    sums = sums._replace(loss=sums.loss / denominator)
    state, grad_norm = optimizer_step(
        optimizer_config(config), state, grads, sums.loss, learning_rate
    )
    return state, CriticMetrics(sums, grad_norm, state.skipped)


def jitted_update(config: Config, mesh: Mesh) -> Callable[..., tuple[TrainState, CriticMetrics]]:
    """Returns `update` jitted for the mesh; the state is donated."""
    return jit_with_shardings(
        functools.partial(update, config, mesh=mesh), state_shardings(config, mesh), mesh
    )


def jitted_values(config: Config, mesh: Mesh) -> Callable[[Any, Rows, Array], jax.Array]:
    """Returns (params, rows [A, B, T], micro-batches used) -> values [A, B, T], jitted."""
    at = CriticParams(param_shardings(config.model, config.mesh, mesh), replicated(mesh))
    return jitted_map(functools.partial(row_values, config, mesh=mesh), at, mesh)
