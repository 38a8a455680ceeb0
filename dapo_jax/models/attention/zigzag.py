"""The order of the tokens of a row that lies over several devices.

A query sees the keys before it: of devices that have one stretch of a row each, attention would be
the more work for a device the later its stretch. So each of C devices has two of 2 C chunks, one as
far from the beginning as the other from the end: chunks 0 and 2 C - 1, 1 and 2 C - 2, and so on.
"""

import jax
import jax.numpy as jnp
import numpy as np


def order(tokens: int, parts: int) -> np.ndarray:
    """Where in the row the tokens are that devices have, one device after another [T]."""
    if parts == 1:
        return np.arange(tokens)
    early, late = np.arange(tokens).reshape(2, parts, -1)
    return np.stack([early, late[::-1]], 1).reshape(-1)


def to_devices(x_BT: jax.Array, parts: int) -> jax.Array:
    """Rows [B, T, ...] in the order of devices from rows in their own.

    Args:
        parts: C; twice as many must divide T. With one nothing changes.
    """
    if parts == 1:
        return x_BT
    B, _, *rest = x_BT.shape
    halves = x_BT.reshape(B, 2, parts, -1, *rest)
    return jnp.stack([halves[:, 0], halves[:, 1, ::-1]], 2).reshape(x_BT.shape)


def to_rows(x_BT: jax.Array, parts: int) -> jax.Array:
    """The other way round."""
    if parts == 1:
        return x_BT
    B, _, *rest = x_BT.shape
    pairs = x_BT.reshape(B, parts, 2, -1, *rest)
    return jnp.stack([pairs[:, :, 0], pairs[:, ::-1, 1]], 1).reshape(x_BT.shape)
