"""Low-rank adapters (LoRA, arXiv:2106.09685) of every linear layer of the decoder.

A layer computes x W + (alpha / rank) (x A) B. W is frozen in the compute dtype, or in int8; A and
B, of `config.model.lora_rank` columns and rows, are trained. Training and rollouts run the same
decoder with the same arrays, and nothing is merged during a run: the policy that samples is the one
that trains.

The parameters of such a model are one tree with two parts: `split` and `join`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dapo_jax.config import MeshConfig, ModelConfig, hf_config
from dapo_jax.models import decoder, int8
from dapo_jax.models.sharding import param_shardings


def split(params: decoder.Params) -> tuple[decoder.Params, decoder.Params | None]:
    """Returns (trained, frozen) parameters, or a tree like theirs; without adapters all are
    trained, and frozen is None."""
    layers = params["layers"]
    trained = {name: x for name, x in layers.items() if decoder.is_adapter(name)}
    if not trained:
        return params, None
    rest = {name: x for name, x in layers.items() if name not in trained}
    return {"layers": trained}, params | {"layers": rest}


def join(trained: decoder.Params, frozen: decoder.Params | None) -> decoder.Params:
    """Returns the whole tree; the inverse of `split`."""
    if frozen is None:
        return trained
    return frozen | {"layers": frozen["layers"] | trained["layers"]}


def switched_off(trained: decoder.Params) -> decoder.Params:
    """Returns adapters that change nothing: with them the model is its base. Jittable."""
    return jax.tree.map(jnp.zeros_like, trained)


def base_of(c: ModelConfig) -> ModelConfig:
    """Returns the model without adapters, its parameters in the dtypes in which they are frozen.

    Raises:
        UserError: `c.path` holds adapters of peft that name no base model.
    """
    path = None if c.path is None else hf_config.base_path(c.path)
    default = ModelConfig.__dataclass_fields__["lora_alpha"].default
    dtype = "int8" if c.param_dtype == "int8" else c.compute_dtype
    changes = {"lora_rank": 0, "lora_alpha": default, "param_dtype": dtype}
    return dataclasses.replace(c, path=path, **changes)


def attached(
    c: ModelConfig, config: MeshConfig, mesh: Mesh, base: decoder.Params, seed: int
) -> decoder.Params:
    """Returns the base with new adapters, which change nothing yet: A is random and B is 0.

    Args:
        base: parameters of `base_of(c)`, in these or floating dtypes; their memory is taken over.
        seed: of A.
    """
    trained_at, frozen_at = split(param_shardings(c, config, mesh))
    like = split(decoder.param_shapes(c))[1]

    def freeze(params: decoder.Params) -> decoder.Params:
        layers = params["layers"]
        if c.param_dtype == "int8" and int8.scale_name("q") not in layers:
            params = params | {"layers": int8.quantized_layers(layers)}
        return jax.tree.map(lambda x, like: x.astype(like.dtype), params, like)

    frozen = jax.jit(freeze, out_shardings=frozen_at, donate_argnums=0)(base)
    # As data: a key is an array of one device, which other processes do not have.
    data = np.asarray(jax.random.key_data(jax.random.key(seed)))
    make = lambda data: split(decoder.init_params(c, jax.random.wrap_key_data(data)))[0]
    return join(jax.jit(make, out_shardings=trained_at)(data), frozen)


@functools.partial(jax.jit, static_argnums=(0, 2))
def merged(c: ModelConfig, layers: decoder.Params, name: str) -> jax.Array:
    """Returns a matrix of stacked layers with its adapter in it, float32: W + (alpha / rank) A B.

    Args:
        layers: the matrix of this name, its adapter and, of int8, its scales.
    """
    own = {n: layers[n] for n in (name, int8.scale_name(name)) if n in layers}
    a, b = (layers[f"{name}_lora_{part}"] for part in "ab")
    product = jax.vmap(lambda a, b: jnp.tensordot(a, b, 1))(a, b)
    w = int8.plain_layers(own)[name].astype(jnp.float32)
    return w + (c.lora_alpha / c.lora_rank) * product
