"""The supervised loss and its update: the negative log-prob of response tokens, in packed rows.

`dapo_jax.tools.sft` fine-tunes with it, and `dapo_jax.training.pretrain` fits the tiny base model.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dapo_jax.config import MeshConfig, ModelConfig, OptimizerConfig
from dapo_jax.models import decoder, lora
from dapo_jax.models.log_probs import row_statistics
from dapo_jax.models.sharding import HeadLayout, head_layout
from dapo_jax.training import step as train_step
from dapo_jax.training.step import TrainState
from dapo_jax.types import Array, Rows


class SupervisedMetrics(NamedTuple):
    """Statistics of one update."""

    loss: jax.Array  # nats per response token, before the update
    grad_norm: jax.Array
    skipped: jax.Array  # int32, see TrainState


def supervised_loss(
    model: ModelConfig,
    params: decoder.Params,
    rows: Rows,
    denominator: Array,
    layout: HeadLayout | None = None,
) -> jax.Array:
    """Returns the part of the mini-batch's loss that one micro-batch [B, T] adds.

        L = -1/N sum_bt m_bt log p_bt

    Args:
        params: all parameters of the model, whichever of them are trained.
        rows: their mask is m, the response tokens.
        denominator: N, the response tokens of the whole mini-batch. So the sum over micro-batches
            and its gradient do not depend on the cut.
        layout: of the rows on a mesh; None: one device.
    """
    statistics = row_statistics(model, params, rows, temperature=1.0, layout=layout)
    total = -jnp.sum(jnp.where(rows.mask_BT, statistics.log_prob_BT, 0.0))
    return total / denominator


def gradient(
    model: ModelConfig,
    trained: Any,
    rows_ABT: Rows,
    num_micro_batches: Array,
    denominator: Array,
    layout: HeadLayout | None = None,
    frozen: decoder.Params | None = None,
) -> tuple[Any, jax.Array]:
    """Returns (gradient, loss) of a mini-batch.

    Args:
        trained: the parameters that are trained.
        rows_ABT, num_micro_batches: see `step.summed_gradient`.
        denominator, layout: see `supervised_loss`.
        frozen: the other parameters of the model, see `models.lora`.
    """

    def loss(trained: Any, rows: Rows) -> tuple[jax.Array, jax.Array]:
        params = lora.join(trained, frozen)
        value = supervised_loss(model, params, rows, denominator, layout)
        return value, jax.lax.stop_gradient(value)

    zero = jnp.zeros((), jnp.float32)
    return train_step.summed_gradient(loss, zero, jnp.add, trained, rows_ABT, num_micro_batches)


def update(
    model: ModelConfig,
    optimizer: OptimizerConfig,
    state: TrainState,
    rows_ABT: Rows,
    num_micro_batches: Array,
    denominator: Array,
    learning_rate: Array,
    *,
    layout: HeadLayout | None = None,
) -> tuple[TrainState, SupervisedMetrics]:
    """Returns the state after one optimiser step on one mini-batch; arguments as `gradient`."""
    grads, loss = gradient(
        model, state.params, rows_ABT, num_micro_batches, denominator, layout, state.frozen
    )
    state, grad_norm = train_step.optimizer_step(optimizer, state, grads, loss, learning_rate)
    return state, SupervisedMetrics(loss, grad_norm, state.skipped)


def jitted_update(
    model: ModelConfig, mesh_config: MeshConfig, optimizer: OptimizerConfig, mesh: Mesh
) -> Callable[..., tuple[TrainState, SupervisedMetrics]]:
    """Returns `update` jitted for the mesh; the state is donated."""
    layout = head_layout(model, mesh_config, mesh)
    state_at = train_step.model_state_shardings(model, mesh_config, optimizer, mesh)
    return train_step.jit_with_shardings(
        functools.partial(update, model, optimizer, layout=layout), state_at, mesh
    )
