"""The update: a pure function of state and rows, compiled once.

Gradients of all micro-batches of a mini-batch are summed before anything is divided: every token's
weight in the loss was fixed from the whole mini-batch when the rows were made
(`dapo_jax.objective.loss_weights`), so the gradient does not depend on how the batch was cut into
micro-batches, packed into rows or laid over devices.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from dapo_jax import log_probs, model, objective, policy_losses
from dapo_jax.config import Config, OptimizerConfig
from dapo_jax.sharding import batch_sharding, param_shardings, replicated
from dapo_jax.types import Array, Rows


class TrainState(NamedTuple):
    """What an update changes."""

    params: model.Params
    moments: Any  # optax state
    updates: Array  # int32, optimiser steps taken
    skipped: Array  # int32, updates in a row that were skipped for a non-finite gradient


class Sums(NamedTuple):
    """Statistics of trained tokens, added up over micro-batches; the host divides."""

    tokens: jax.Array
    loss: jax.Array  # already weighted: the loss of the mini-batch
    entropy: jax.Array
    token_prob: jax.Array
    clip_high: jax.Array
    clip_low: jax.Array
    kl_old: jax.Array  # k3 estimate against the policy that anchors the ratio
    kl_ref: jax.Array
    gap: jax.Array  # |log-prob here - log-prob from the rollout| where lag is 0
    gap_tokens: jax.Array


class Extremes(NamedTuple):
    """Largest values over trained tokens (ratio_min as its negative)."""

    ratio_max: jax.Array
    minus_ratio_min: jax.Array
    gap_max: jax.Array


class UpdateMetrics(NamedTuple):
    sums: Sums
    extremes: Extremes
    grad_norm: jax.Array
    skipped: jax.Array  # int32, see TrainState


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """AdamW with global-norm clipping at a learning rate of 1; the update scales by the rate.

    Weight decay applies to every parameter, as torch's AdamW does in the reference.
    """
    return optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.scale_by_adam(config.beta1, config.beta2, config.eps),
        optax.add_decayed_weights(config.weight_decay),
        optax.scale(-1.0),
    )


def learning_rate(config: OptimizerConfig, step: int) -> float:
    """The rate of rollout step `step` (from 1): linear warm-up from 1/n, then constant."""
    return config.learning_rate * min(1.0, step / max(1, config.warmup_steps))


def init_state(config: Config, params: model.Params) -> TrainState:
    """The state before the first update; jittable."""
    # Two arrays, not one twice: the state is donated, and a buffer can be donated once.
    zero = lambda: jnp.zeros((), jnp.int32)
    return TrainState(params, make_optimizer(config.optimizer).init(params), zero(), zero())


def state_shardings(config: Config, mesh: Mesh) -> TrainState:
    """Where the state lies: optimiser moments beside their parameters, scalars everywhere."""
    params = param_shardings(config.model, config.mesh, mesh)
    shapes = jax.eval_shape(functools.partial(init_state, config), model.param_shapes(config.model))
    moments = optax.tree_map_params(
        make_optimizer(config.optimizer),
        lambda _, sharding: sharding,
        shapes.moments,
        params,
        transform_non_params=lambda _: replicated(mesh),
    )
    return TrainState(params, moments, replicated(mesh), replicated(mesh))


def loss_and_sums(
    config: Config, params: model.Params, rows: Rows
) -> tuple[jax.Array, tuple[Sums, Extremes]]:
    """Loss of one micro-batch, its tokens weighted by their share in the whole mini-batch."""
    o, mask_BT = config.objective, rows.mask_BT
    log_prob_BT, entropy_BT = log_probs.row_log_probs(
        config.model, params, rows, temperature=config.rollout.temperature
    )
    terms = policy_losses.LOSSES[o.loss](
        log_prob_BT,
        rows.log_prob_old_BT,
        rows.advantage_BT,
        mask_BT,
        rows.segments_BT,
        **o.loss_parameters,
    )
    loss_BT = -terms.objective_BT
    kl_ref_BT = jnp.zeros_like(loss_BT)
    if o.kl_coefficient > 0:
        kl_ref_BT = objective.kl_estimate(
            log_prob_BT, rows.log_prob_ref_BT, mask_BT, estimator=o.kl_estimator
        )
        loss_BT = loss_BT + o.kl_coefficient * kl_ref_BT
    loss = jnp.sum(rows.weight_BT * loss_BT)

    fresh_BT = mask_BT & (rows.lag_BT == 0)
    gap_BT = jnp.where(fresh_BT, jnp.abs(log_prob_BT - rows.log_prob_old_BT), 0.0)
    count = lambda x_BT: jnp.sum(jnp.where(mask_BT, x_BT.astype(jnp.float32), 0.0))
    sums = Sums(
        tokens=count(mask_BT),
        loss=loss,
        entropy=count(entropy_BT),
        token_prob=count(jnp.exp(log_prob_BT)),
        clip_high=count(terms.clipped_high_BT),
        clip_low=count(terms.clipped_low_BT),
        kl_old=count(
            objective.kl_estimate(log_prob_BT, rows.log_prob_old_BT, mask_BT, estimator="k3")
        ),
        kl_ref=count(kl_ref_BT),
        gap=jnp.sum(gap_BT),
        gap_tokens=jnp.sum(fresh_BT, dtype=jnp.float32),
    )
    extremes = Extremes(
        ratio_max=jnp.max(jnp.where(mask_BT, terms.ratio_BT, -jnp.inf)),
        minus_ratio_min=jnp.max(jnp.where(mask_BT, -terms.ratio_BT, -jnp.inf)),
        gap_max=jnp.max(gap_BT),
    )
    return loss, jax.lax.stop_gradient((sums, extremes))


def gradient(
    config: Config, params: model.Params, rows_MBT: Rows, num_micro_batches: Array
) -> tuple[model.Params, Sums, Extremes]:
    """Gradient of the mini-batch loss and its statistics, micro-batch by micro-batch.

    Args:
        rows_MBT: micro-batches [M, B, T]; those from `num_micro_batches` on are not computed, so
            that one program serves every amount of data.
    """
    value_and_grad = jax.value_and_grad(
        functools.partial(loss_and_sums, config), argnums=0, has_aux=True
    )

    def add(m: jax.Array, carry: Any) -> Any:
        grads, sums, extremes = carry
        rows = Rows(*(jax.lax.dynamic_index_in_dim(x, m, keepdims=False) for x in rows_MBT))
        (_, (more_sums, more_extremes)), more_grads = value_and_grad(params, rows)
        return (
            jax.tree.map(lambda a, b: a + b.astype(jnp.float32), grads, more_grads),
            jax.tree.map(jnp.add, sums, more_sums),
            jax.tree.map(jnp.maximum, extremes, more_extremes),
        )

    grads = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    sums = Sums(*(jnp.zeros((), jnp.float32) for _ in Sums._fields))
    extremes = Extremes(*(jnp.full((), -jnp.inf, jnp.float32) for _ in Extremes._fields))
    return jax.lax.fori_loop(0, num_micro_batches, add, (grads, sums, extremes))


def update(
    config: Config,
    state: TrainState,
    rows_MBT: Rows,
    num_micro_batches: Array,
    learning_rate: Array,
) -> tuple[TrainState, UpdateMetrics]:
    """One optimiser step on one mini-batch. A non-finite gradient only counts itself."""
    grads, sums, extremes = gradient(config, state.params, rows_MBT, num_micro_batches)
    grad_norm = optax.tree.norm(grads)
    changes, moments = make_optimizer(config.optimizer).update(grads, state.moments, state.params)
    params = jax.tree.map(
        lambda p, u: (p + learning_rate * u).astype(p.dtype), state.params, changes
    )
    finite = jnp.isfinite(grad_norm) & jnp.isfinite(sums.loss)
    taken = TrainState(params, moments, state.updates + 1, jnp.zeros_like(state.skipped))
    left = state._replace(skipped=state.skipped + 1)
    state = jax.tree.map(lambda new, old: jnp.where(finite, new, old), taken, left)
    return state, UpdateMetrics(sums, extremes, grad_norm, state.skipped)


def compile_update(config: Config, mesh: Mesh) -> Callable[..., tuple[TrainState, UpdateMetrics]]:
    """`update` jitted for the mesh; the state is donated."""
    state, rows = state_shardings(config, mesh), batch_sharding(mesh, batch_dim=1)
    return jax.jit(
        functools.partial(update, config),
        in_shardings=(state, rows, replicated(mesh), replicated(mesh)),
        out_shardings=(state, replicated(mesh)),
        donate_argnums=0,
    )


def compile_scoring(config: Config, mesh: Mesh) -> Callable[[model.Params, Rows, Array], jax.Array]:
    """(params, rows [M, B, T], micro-batches used) -> log-probs [M, B, T], jitted for the mesh.

    Serves old log-probs when they are recomputed, and the reference of the KL term.
    """

    def score(params: model.Params, rows_MBT: Rows, num_micro_batches: Array) -> jax.Array:
        def one(m: jax.Array, out_MBT: jax.Array) -> jax.Array:
            rows = Rows(*(jax.lax.dynamic_index_in_dim(x, m, keepdims=False) for x in rows_MBT))
            log_prob_BT, _ = log_probs.row_log_probs(
                config.model, params, rows, temperature=config.rollout.temperature
            )
            return out_MBT.at[m].set(log_prob_BT)

        zeros_MBT = jnp.zeros(rows_MBT.tokens_BT.shape, jnp.float32)
        return jax.lax.fori_loop(0, num_micro_batches, one, zeros_MBT)

    rows = batch_sharding(mesh, batch_dim=1)
    params = param_shardings(config.model, config.mesh, mesh)
    return jax.jit(score, in_shardings=(params, rows, replicated(mesh)), out_shardings=rows)
