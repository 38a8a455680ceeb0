"""The update: a pure function of state and packed rows, compiled once.

Gradients of all micro-batches of a mini-batch are summed, then divided once by the denominator of
the whole mini-batch (`algorithms.aggregation`), so the gradient does not depend on how the batch
is cut into micro-batches, packed into rows or laid over devices. `training.critic` and
`training.supervised` make their updates of the same parts.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from dapo_jax.algorithms import kl, losses, surrogate
from dapo_jax.config import Config, MeshConfig, ModelConfig, OptimizerConfig
from dapo_jax.models import decoder, log_probs, lora
from dapo_jax.models.sharding import (
    head_layout,
    param_shardings,
    replicated,
    row_sharding,
    to_mesh,
)
from dapo_jax.training import packing
from dapo_jax.training.optimizer import make_optimizer
from dapo_jax.types import Array, Rows
from dapo_jax.utils.precision import sum_dtype

TokenStatistic = Literal["log_prob", "entropy", "collision"]  # of `log_probs.TokenStatistics`
MicroBatches = tuple[Rows, np.int32]  # rows [A, B, T] on the devices, micro-batches used


class TrainState(NamedTuple):
    """Parameters with their optimiser, policy or critic."""

    params: Any  # the trained ones: decoder.Params or CriticParams
    moments: Any  # optax state, float32 whatever the parameters are
    updates: Array  # int32, optimiser steps taken
    skipped: Array  # int32, updates in a row that were skipped for a non-finite gradient
    frozen: Any = None  # the base model's parameters where adapters alone are trained

    @property
    def all_params(self) -> Any:
        """All parameters of the model."""
        return lora.join(self.params, self.frozen)

    @property
    def saved(self) -> "TrainState":
        """The state as a checkpoint holds it: without the frozen parameters, the base's."""
        return self._replace(frozen=None)


class Sums(NamedTuple):
    """Sums over trained tokens and micro-batches; the host divides."""

    tokens: jax.Array
    loss: jax.Array  # weighted numerator of the mini-batch's loss
    entropy: jax.Array
    token_prob: jax.Array
    clip_high: jax.Array
    clip_low: jax.Array
    clip_dual: jax.Array
    clip_high_prob: jax.Array  # probability of the tokens that each bound clipped
    clip_low_prob: jax.Array
    clip_dual_prob: jax.Array
    kl_old: jax.Array  # k3 estimate of KL(old || current); old is the denominator of the ratio
    kl_ref: jax.Array
    mismatch: jax.Array  # |log-prob - old log-prob| of tokens that are not stale
    mismatch_tokens: jax.Array


class Extremes(NamedTuple):
    """Largest values over trained tokens (ratio_min as its negative)."""

    ratio_max: jax.Array
    minus_ratio_min: jax.Array
    mismatch_max: jax.Array


class UpdateMetrics(NamedTuple):
    sums: Sums
    extremes: Extremes
    grad_norm: jax.Array
    skipped: jax.Array  # int32, see TrainState


def new_state(optimizer: OptimizerConfig, params: Any) -> TrainState:
    """Returns the state before the first update, with all of `params` trained; jittable."""
    moments = make_optimizer(optimizer).init(optax.tree.cast(params, jnp.float32))
    # Two arrays, not one twice: the state is donated, and a buffer can be donated once.
    zero = lambda: jnp.zeros((), jnp.int32)
    return TrainState(params, moments, zero(), zero())


def init_state(config: Config, params: decoder.Params) -> TrainState:
    """Returns the state of the policy before its first update; jittable."""
    return model_state(config.optimizer, params)


def model_state(optimizer: OptimizerConfig, params: decoder.Params) -> TrainState:
    """Returns the state of a model before its first update: its adapters alone are trained where it
    has any, else all parameters; jittable."""
    trained, frozen = lora.split(params)
    return new_state(optimizer, trained)._replace(frozen=frozen)


def state_shardings(config: Config, mesh: Mesh) -> TrainState:
    """Returns the shardings of the policy's state."""
    return model_state_shardings(config.model, config.mesh, config.optimizer, mesh)


def model_state_shardings(
    model: ModelConfig, mesh_config: MeshConfig, optimizer: OptimizerConfig, mesh: Mesh
) -> TrainState:
    """Returns the shardings of `model_state`."""
    trained_at, frozen_at = lora.split(param_shardings(model, mesh_config, mesh))
    shapes, _ = lora.split(decoder.param_shapes(model))
    return shardings_of(optimizer, shapes, trained_at, mesh)._replace(frozen=frozen_at)


def shardings_of(
    optimizer: OptimizerConfig, param_shapes: Any, params_at: Any, mesh: Mesh
) -> TrainState:
    """Returns the shardings of a state: moments as their parameters, counters replicated."""
    everywhere, adam = replicated(mesh), make_optimizer(optimizer)
    moments_at = optax.tree_map_params(
        adam,
        lambda _, param_at: param_at,
        jax.eval_shape(adam.init, param_shapes),
        params_at,
        transform_non_params=lambda _: everywhere,
    )
    return TrainState(params_at, moments_at, everywhere, everywhere)


def loss_and_sums(
    config: Config,
    params: decoder.Params,
    rows: Rows,
    mesh: Mesh | None = None,
    entropy_coefficient: Array | None = None,
) -> tuple[jax.Array, tuple[Sums, Extremes]]:
    """Returns the numerator of the loss of one micro-batch, with statistics.

        sum_t w_t (-c_t J_t + kl_coefficient KL_t - entropy_coefficient H_t)

    J is the objective of `algorithms.losses`, c the importance correction, w the weight of the
    aggregation.

    Args:
        mesh: of the parameters and rows; None: one device.
        entropy_coefficient: None: the config's.
    """
    o, mask_BT = config.objective, rows.mask_BT
    statistics = log_probs.row_statistics(
        config.model,
        params,
        rows,
        temperature=config.rollout.temperature,
        layout=None if mesh is None else head_layout(config.model, config.mesh, mesh),
        share_prompts=config.train.share_prompts,
    )
    log_prob_BT, entropy_BT = statistics.log_prob_BT, statistics.entropy_BT
    method = losses.LOSSES[o.loss]
    chosen = (rows.selected_BT,) if method.selects else ()
    terms = method.function(
        log_prob_BT,
        rows.log_prob_old_BT,
        rows.advantage_BT,
        mask_BT,
        rows.segments_BT,
        *chosen,
        **method.keywords(o),
    )
    loss_BT = -rows.correction_BT * terms.objective_BT
    kl_ref_BT = jnp.zeros_like(loss_BT)
    if o.kl_coefficient > 0:
        kl_ref_BT = kl.kl_estimate(
            log_prob_BT, rows.log_prob_ref_BT, mask_BT, estimator=o.kl_estimator
        )
    loss_BT = loss_BT + o.kl_coefficient * kl_ref_BT
    if entropy_coefficient is None and o.entropy_coefficient > 0:
        entropy_coefficient = o.entropy_coefficient
    if entropy_coefficient is not None:
        loss_BT = loss_BT - entropy_coefficient * jnp.where(mask_BT, entropy_BT, 0.0)
    loss = jnp.sum(rows.weight_BT * loss_BT)
    measured = _sums_and_extremes(rows, statistics, terms, loss, kl_ref_BT)
    return loss, jax.lax.stop_gradient(measured)


def _sums_and_extremes(
    rows: Rows,
    statistics: log_probs.TokenStatistics,
    terms: surrogate.Surrogate,
    loss: jax.Array,
    kl_ref_BT: jax.Array,
) -> tuple[Sums, Extremes]:
    """Returns the statistics of one micro-batch, in float32."""
    mask_BT, log_prob_BT = rows.mask_BT, statistics.log_prob_BT
    prob_BT = jnp.exp(log_prob_BT)
    dual_BT = terms.clipped_dual_BT
    if dual_BT is None:
        dual_BT = jnp.zeros_like(mask_BT)
    fresh_BT = mask_BT & (rows.staleness_BT == 0)
    mismatch_BT = jnp.where(fresh_BT, jnp.abs(log_prob_BT - rows.log_prob_old_BT), 0.0)
    count = lambda x_BT: jnp.sum(jnp.where(mask_BT, x_BT.astype(jnp.float32), 0.0))
    sums = Sums(
        tokens=count(mask_BT),
        loss=loss,
        entropy=count(statistics.entropy_BT),
        token_prob=count(prob_BT),
        clip_high=count(terms.clipped_high_BT),
        clip_low=count(terms.clipped_low_BT),
        clip_dual=count(dual_BT),
        clip_high_prob=count(jnp.where(terms.clipped_high_BT, prob_BT, 0.0)),
        clip_low_prob=count(jnp.where(terms.clipped_low_BT, prob_BT, 0.0)),
        clip_dual_prob=count(jnp.where(dual_BT, prob_BT, 0.0)),
        # In this order: the old policy sampled the tokens.
        kl_old=count(kl.kl_estimate(rows.log_prob_old_BT, log_prob_BT, mask_BT, estimator="k3")),
        kl_ref=count(kl_ref_BT),
        mismatch=jnp.sum(mismatch_BT),
        mismatch_tokens=jnp.sum(fresh_BT, dtype=jnp.float32),
    )
    extremes = Extremes(
        ratio_max=jnp.max(jnp.where(mask_BT, terms.ratio_BT, -jnp.inf)),
        minus_ratio_min=jnp.max(jnp.where(mask_BT, -terms.ratio_BT, -jnp.inf)),
        mismatch_max=jnp.max(mismatch_BT),
    )
    return jax.tree.map(lambda x: x.astype(jnp.float32), (sums, extremes))


def summed_gradient(
    loss: Callable[[Any, Rows], tuple[jax.Array, Any]],
    zero: Any,
    join: Callable[[Any, Any], Any],
    params: Any,
    rows_ABT: Rows,
    num_micro_batches: Array,
) -> tuple[Any, Any]:
    """Returns (gradient, joined statistics) of a loss summed over micro-batches.

    Args:
        loss: (params, rows [B, T]) -> (scalar, statistics).
        zero: the statistics of no micro-batch.
        join: adds the statistics of a micro-batch to those before it.
        rows_ABT: micro-batches [A, B, T]; only the first `num_micro_batches` are computed, so one
            program serves every amount of data.
    """
    value_and_grad = jax.value_and_grad(loss, has_aux=True)

    def add(a: jax.Array, carry: Any) -> Any:
        grads, statistics = carry
        (_, more), more_grads = value_and_grad(params, _micro_batch(rows_ABT, a))
        grads = jax.tree.map(lambda a, b: a + b.astype(a.dtype), grads, more_grads)
        return grads, join(statistics, more)

    grads = jax.tree.map(lambda p: jnp.zeros(p.shape, sum_dtype(p)), params)
    return jax.lax.fori_loop(0, num_micro_batches, add, (grads, zero))


def gradient(
    config: Config,
    params: decoder.Params,
    rows_ABT: Rows,
    num_micro_batches: Array,
    denominator: Array,
    mesh: Mesh | None = None,
    frozen: decoder.Params | None = None,
    entropy_coefficient: Array | None = None,
) -> tuple[decoder.Params, Sums, Extremes]:
    """Returns the gradient of the mini-batch loss with respect to `params`, and its statistics.

    Args:
        rows_ABT, num_micro_batches: see `summed_gradient`.
        denominator: of the mini-batch, see `algorithms.aggregation`.
        mesh, entropy_coefficient: see `loss_and_sums`.
        frozen: the other parameters of the model, see `models.lora`.
    """
    zero = (
        Sums(*(jnp.zeros((), jnp.float32) for _ in Sums._fields)),
        Extremes(*(jnp.full((), -jnp.inf, jnp.float32) for _ in Extremes._fields)),
    )

    def join(a: tuple[Sums, Extremes], b: tuple[Sums, Extremes]) -> tuple[Sums, Extremes]:
        return jax.tree.map(jnp.add, a[0], b[0]), jax.tree.map(jnp.maximum, a[1], b[1])

    grads, (sums, extremes) = summed_gradient(
        lambda params, rows: loss_and_sums(
            config, lora.join(params, frozen), rows, mesh, entropy_coefficient
        ),
        zero,
        join,
        params,
        rows_ABT,
        num_micro_batches,
    )
    grads = jax.tree.map(lambda g: g / denominator, grads)
    return grads, sums._replace(loss=sums.loss / denominator), extremes


def optimizer_step(
    config: OptimizerConfig, state: TrainState, grads: Any, loss: Array, learning_rate: Array
) -> tuple[TrainState, jax.Array]:
    """Returns (state after one AdamW step, gradient norm). A step whose loss or gradient is not
    finite is skipped and counted."""
    grad_norm = optax.tree.norm(grads)
    finite = jnp.isfinite(grad_norm) & jnp.isfinite(loss)
    changes, moments = make_optimizer(config).update(grads, state.moments, state.params)
    moved = lambda p, change: (p + learning_rate * change).astype(p.dtype)
    params = jax.tree.map(moved, state.params, changes)
    keep = lambda new, old: jnp.where(finite, new, old)
    params, moments = jax.tree.map(keep, (params, moments), (state.params, state.moments))
    updates = state.updates + finite.astype(jnp.int32)
    skipped = jnp.where(finite, 0, state.skipped + 1)
    return TrainState(params, moments, updates, skipped, state.frozen), grad_norm


def update(
    config: Config,
    state: TrainState,
    rows_ABT: Rows,
    num_micro_batches: Array,
    denominator: Array,
    learning_rate: Array,
    entropy_coefficient: Array | None = None,
    *,
    mesh: Mesh | None = None,
) -> tuple[TrainState, UpdateMetrics]:
    """Returns the state after one optimiser step on one mini-batch; arguments as `gradient`."""
    grads, sums, extremes = gradient(
        config,
        state.params,
        rows_ABT,
        num_micro_batches,
        denominator,
        mesh,
        state.frozen,
        entropy_coefficient,
    )
    state, grad_norm = optimizer_step(config.optimizer, state, grads, sums.loss, learning_rate)
    return state, UpdateMetrics(sums, extremes, grad_norm, state.skipped)


def jitted_update(config: Config, mesh: Mesh) -> Callable[..., tuple[TrainState, UpdateMetrics]]:
    """Returns `update` jitted for the mesh, with all six arguments after the config; the state is
    donated."""
    return jit_with_shardings(
        functools.partial(update, config, mesh=mesh),
        state_shardings(config, mesh),
        mesh,
        num_scalars=4,
    )


def jit_with_shardings(
    function: Callable[..., tuple[TrainState, Any]],
    state: TrainState,
    mesh: Mesh,
    *,
    num_scalars: int = 3,
) -> Callable[..., tuple[TrainState, Any]]:
    """Returns an update jitted for the mesh, its state donated.

    Args:
        function: (state, rows, micro-batches used, denominator, learning rate) -> (state, metrics).
        state: its shardings.
        num_scalars: arguments after the rows.
    """
    rows, everywhere = row_sharding(mesh, batch_dim=1), replicated(mesh)
    return jax.jit(
        function,
        in_shardings=(state, rows, *[everywhere] * num_scalars),
        out_shardings=(state, everywhere),
        donate_argnums=0,
    )


def jitted_statistic(
    config: Config, mesh: Mesh, *, statistic: TokenStatistic = "log_prob"
) -> Callable[[decoder.Params, Rows, Array], jax.Array]:
    """Returns (params, rows [A, B, T], micro-batches used) -> log-probs [A, B, T], or another
    statistic of `log_probs.TokenStatistics`, jitted for the mesh."""
    temperature, share_prompts = config.rollout.temperature, config.train.share_prompts
    return jitted_log_probs(
        config.model,
        config.mesh,
        mesh,
        temperature=temperature,
        share_prompts=share_prompts,
        statistic=statistic,
    )


def jitted_log_probs(
    model: ModelConfig,
    mesh_config: MeshConfig,
    mesh: Mesh,
    *,
    temperature: float,
    share_prompts: bool,
    statistic: TokenStatistic = "log_prob",
) -> Callable[[decoder.Params, Rows, Array], jax.Array]:
    """Returns `jitted_statistic`'s program, for programs without the config of a run."""
    layout = head_layout(model, mesh_config, mesh)

    def of_rows(params: decoder.Params, rows: Rows) -> jax.Array:
        found = log_probs.row_statistics(
            model,
            params,
            rows,
            temperature=temperature,
            layout=layout,
            share_prompts=share_prompts,
            collision=statistic == "collision",
        )
        return getattr(found, f"{statistic}_BT")

    return jitted_map(of_rows, param_shardings(model, mesh_config, mesh), mesh)


def micro_batches_on(
    mesh: Mesh, rows: Rows, *, rows_per_micro_batch: int, num_micro_batches: int
) -> MicroBatches:
    """Returns packed rows [rows, T] as `num_micro_batches` micro-batches on the mesh."""
    B = rows_per_micro_batch
    stacked = packing.to_micro_batches(
        rows, rows_per_micro_batch=B, num_micro_batches=num_micro_batches
    )
    used = packing.used_micro_batches(len(rows.tokens_BT), B)
    return to_mesh(stacked, row_sharding(mesh, batch_dim=1)), np.int32(used)


def jitted_map(
    function: Callable[[Any, Rows], jax.Array], param_at: Any, mesh: Mesh
) -> Callable[[Any, Rows, Array], jax.Array]:
    """Returns (params, rows [A, B, T], micro-batches used) -> `function` of each micro-batch
    [A, B, T], jitted for the mesh."""

    def every(params: Any, rows_ABT: Rows, num_micro_batches: Array) -> jax.Array:
        def one(a: jax.Array, out_ABT: jax.Array) -> jax.Array:
            return out_ABT.at[a].set(function(params, _micro_batch(rows_ABT, a)))

        zeros_ABT = jnp.zeros(rows_ABT.tokens_BT.shape, jnp.float32)
        return jax.lax.fori_loop(0, num_micro_batches, one, zeros_ABT)

    rows = row_sharding(mesh, batch_dim=1)
    return jax.jit(every, in_shardings=(param_at, rows, replicated(mesh)), out_shardings=rows)


def _micro_batch(rows_ABT: Rows, a: jax.Array) -> Rows:
    return Rows(*(jax.lax.dynamic_index_in_dim(x, a, keepdims=False) for x in rows_ABT))
