"""Rotary position embeddings, and how they are stretched over longer texts."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dapo_jax.utils.fields import FrozenDict
from dapo_jax.utils.precision import at_least_float32

Angles = tuple[jax.Array, jax.Array]


def rotary_angles(
    positions_BT: Int[Array, "B T"],
    head_dim: int,
    theta: float,
    scaling: FrozenDict[Any] | None,
) -> tuple[Float[Array, "B T 1 _"], Float[Array, "B T 1 _"]]:
    """Returns (sin, cos) of position times frequency, each float32 [B, T, 1, head_dim / 2].

        frequency_i = theta^(-2i / head_dim)

    Source: RoFormer, arXiv:2104.09864, section 3.2.2. `scaling` changes the frequencies; yarn also
    multiplies sin and cos by its attention factor.
    """
    frequency_H = theta ** -(jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    factor = 1.0
    if scaling is not None and scaling["rope_type"] == "linear":
        frequency_H = frequency_H / scaling["factor"]
    elif scaling is not None and scaling["rope_type"] == "llama3":
        frequency_H = _llama3(frequency_H, scaling)
    elif scaling is not None:
        frequency_H, factor = _yarn(frequency_H, head_dim, theta, scaling)
    angle_BTH = positions_BT.astype(jnp.float32)[..., None] * frequency_H[None, None]
    return factor * jnp.sin(angle_BTH)[:, :, None], factor * jnp.cos(angle_BTH)[:, :, None]


def rotate(x_BTNH: Float[Array, "B T N H"], sin_cos: Angles) -> Float[Array, "B T N H"]:
    """Rotates queries or keys by their angles; halves are paired as in Qwen2 and Llama."""
    a, b = jnp.split(at_least_float32(x_BTNH), 2, axis=-1)
    sin, cos = (angle.astype(a.dtype) for angle in sin_cos)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTNH.dtype)


def _llama3(frequency_H: jax.Array, s: FrozenDict[Any]) -> jax.Array:
    """Divides low frequencies, keeps high ones and interpolates between. Source: Llama 3.1."""
    waves_H = (
        s["original_max_position_embeddings"] * frequency_H / (2 * math.pi)
    )  # in the original length
    share_H = (waves_H - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"])
    share_H = jnp.clip(share_H, 0.0, 1.0)
    return (1 - share_H) * frequency_H / s["factor"] + share_H * frequency_H


def _yarn(
    frequency_H: jax.Array, head_dim: int, theta: float, s: FrozenDict[Any]
) -> tuple[jax.Array, float]:
    """Source: YaRN, arXiv:2309.00071, eqs. 17 to 22, rounded as its reference implementation."""
    positions = s["original_max_position_embeddings"]

    def dimension(rotations: float) -> float:
        """Returns the dimension that makes so many turns within the original length."""
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
