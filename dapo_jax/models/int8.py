"""Matrices of stacked layers in int8, with a float32 scale for each output channel.

    W is about values * scale, where the largest weight of a channel has the value 127 or -127.

They are frozen, under adapters: `config.model.param_dtype` "int8". `decoder` multiplies by the
scales after the product: no matrix is made in another dtype, and the integers are exact in
bfloat16. (qwix 0.1.8 was tried: its product of floats and int8 makes the matrix of floats first.)
"""

from typing import Any

import jax
import jax.numpy as jnp

# The matrices of a layer, with the number of their input axes; each may have an adapter.
INPUT_AXES = {"q": 1, "k": 1, "v": 1, "o": 2, "gate": 1, "up": 1, "down": 1}


def scale_name(name: str) -> str:
    """Returns the name of the scales of a matrix."""
    return f"{name}_scale"


def is_scale(name: str) -> bool:
    """Returns whether a parameter of a layer is the scales of a matrix."""
    return name.endswith("_scale")


def quantized(w: jax.Array, name: str) -> tuple[jax.Array, jax.Array]:
    """Returns the values [layers, *in, *out] and scales [layers, *out] of the matrix of this name.

    Args:
        w: of all layers, in any dtype.
    """
    w, axes = w.astype(jnp.float32), tuple(range(1, 1 + INPUT_AXES[name]))
    largest = jnp.max(jnp.abs(w), axes, keepdims=True)
    scale = jnp.where(largest > 0, largest / 127, 1.0)
    return jnp.round(w / scale).astype(jnp.int8), scale.squeeze(axes)


def quantized_layers(layers: dict[str, Any]) -> dict[str, Any]:
    """Returns the parameters of stacked layers, their matrices as values and scales."""
    pairs = {name: quantized(layers[name], name) for name in INPUT_AXES}
    scales = {scale_name(name): scale for name, (_, scale) in pairs.items()}
    return layers | {name: values for name, (values, _) in pairs.items()} | scales


def plain_layers(layers: dict[str, Any]) -> dict[str, Any]:
    """Returns the parameters of stacked layers with float32 matrices in the place of int8."""

    def plain(name: str) -> jax.Array:
        w = layers[name]
        if (scale := layers.get(scale_name(name))) is None:
            return w
        axes = tuple(range(1, 1 + INPUT_AXES[name]))
        return w.astype(jnp.float32) * jnp.expand_dims(scale, axes)

    return {name: plain(name) for name in layers if not is_scale(name)}
