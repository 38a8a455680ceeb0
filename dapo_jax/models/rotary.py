"""Angles of rotary position embeddings, and how they are stretched over longer texts."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from dapo_jax.utils.fields import FrozenDict


def rotary_angles(
    positions_BT: jax.Array, head_dim: int, theta: float, scaling: FrozenDict[Any] | None
) -> tuple[jax.Array, jax.Array]:
    """(sin, cos), each float32 [B, T, 1, head_dim / 2], of position times frequency.

        frequency_i = theta^(-2i / head_dim)

    Source: RoFormer, arXiv:2104.09864, section 3.2.2. With `scaling` the frequencies are changed,
    and by yarn sin and cos are multiplied by its attention factor.
    """
    frequency_H = theta ** -(jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    factor = 1.0
    if scaling is not None:
        frequency_H, factor = scaled(frequency_H, head_dim, theta, scaling)
    angle_BTH = positions_BT.astype(jnp.float32)[..., None] * frequency_H[None, None]
    return factor * jnp.sin(angle_BTH)[:, :, None], factor * jnp.cos(angle_BTH)[:, :, None]


def scaled(
    frequency_H: jax.Array, head_dim: int, theta: float, scaling: FrozenDict[Any]
) -> tuple[jax.Array, float]:
    """(frequencies, attention factor) as `scaling` wants them."""
    if scaling["rope_type"] == "linear":
        return frequency_H / scaling["factor"], 1.0
    if scaling["rope_type"] == "llama3":
        return _llama3(frequency_H, scaling), 1.0
    return _yarn(frequency_H, head_dim, theta, scaling)


def _llama3(frequency_H: jax.Array, s: FrozenDict[Any]) -> jax.Array:
    """Frequencies of waves longer than the text of the first training are divided, those of short
    waves kept, and between them it passes over smoothly. Source: Llama 3.1's own code."""
    low, high = s["low_freq_factor"], s["high_freq_factor"]
    original = s["original_max_position_embeddings"]
    waves_H = original * frequency_H / (2 * math.pi)  # in the original length
    share_H = (waves_H - low) / (high - low)
    share_H = jnp.clip(share_H, 0.0, 1.0)
    return (1 - share_H) * frequency_H / s["factor"] + share_H * frequency_H


def _yarn(
    frequency_H: jax.Array, head_dim: int, theta: float, s: FrozenDict[Any]
) -> tuple[jax.Array, float]:
    """Source: YaRN, arXiv:2309.00071, eqs. 17 to 22, with the dimensions at which it turns rounded
    as in its reference implementation."""
    positions = s["original_max_position_embeddings"]

    def dimension(rotations: float) -> float:
        """Whose wave turns so often within the original length."""
        length = positions / (rotations * 2 * math.pi)
        return head_dim * math.log(length) / (2 * math.log(theta))

    low, high = dimension(s["beta_fast"]), dimension(s["beta_slow"])
    if s["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high += 0.001 if low == high else 0.0
    index_H = jnp.arange(head_dim // 2, dtype=jnp.float32)
    divided_H = jnp.clip((index_H - low) / (high - low), 0.0, 1.0)
    frequency_H = divided_H * frequency_H / s["factor"] + (1 - divided_H) * frequency_H
    factor = s["attention_factor"]
    if factor is None:
        factor = 0.1 * math.log(s["factor"]) + 1.0 if s["factor"] > 1 else 1.0
    return frequency_H, factor
