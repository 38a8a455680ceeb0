"""Zig-zag order: load-balanced context parallelism, for rows whose tokens lie over C devices.

A query sees the keys before it, so the device with the end of a row would have the most work. So
each device has two of 2 C chunks: 0 and 2 C - 1, 1 and 2 C - 2, and so on.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped


def order(tokens: int, parts: int) -> np.ndarray:
    """Returns the index in the row of each token [T], one device after another."""
    if parts == 1:
        return np.arange(tokens)
    early, late = np.arange(tokens).reshape(2, parts, -1)
    return np.stack([early, late[::-1]], 1).reshape(-1)


def to_zigzag(x_BTX: Shaped[Array, "B T *X"], parts: int) -> Shaped[Array, "B T *X"]:
    """Puts rows into zig-zag order.

    Args:
        parts: C; twice as many must divide T. With one nothing changes.
    """
    if parts == 1:
        return x_BTX
    B, _, *rest = x_BTX.shape
    halves = x_BTX.reshape(B, 2, parts, -1, *rest)
    return jnp.stack([halves[:, 0], halves[:, 1, ::-1]], 2).reshape(x_BTX.shape)


def to_rows(x_BTX: Shaped[Array, "B T *X"], parts: int) -> Shaped[Array, "B T *X"]:
    """Puts rows back into their own order, the inverse of `to_zigzag`."""
    if parts == 1:
        return x_BTX
    B, _, *rest = x_BTX.shape
    pairs = x_BTX.reshape(B, parts, 2, -1, *rest)
    return jnp.stack([pairs[:, :, 0], pairs[:, ::-1, 1]], 1).reshape(x_BTX.shape)
