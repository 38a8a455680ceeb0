"""Precision of matrix products and sums, and the order in which XLA's CPU backend reads memory.

On CPU a product that reads an operand against its order takes twice as long as one that does not.
Compilers for TPU and GPU choose the order themselves, and nothing changes there.
"""

from typing import Any

import jax
import jax.numpy as jnp

LANES = 128  # columns of a tile of a TPU's memory; its rows are a multiple of them


def multiply_in(dtype: str, platform: str) -> None:
    """Sets the precision of this process: accelerators multiply in float32 if `dtype` is float32.

    Their default rounds factors to bfloat16 (TPU, 8 significant bits) or TF32 (GPU, 11 bits).

    Args:
        dtype: `config.model.compute_dtype`.
        platform: of the devices, as JAX calls it. CPUs always multiply in float32.
    """
    if dtype == "float32" and platform != "cpu":
        jax.config.update("jax_default_matmul_precision", "highest")


def sum_dtype(x: jax.Array) -> Any:
    """Returns the dtype of sums over x or over its products: float64 if x has it, else float32."""
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32


def at_least_float32(x: jax.Array) -> jax.Array:
    """Returns x in float32, or in float64 if it has that."""
    return x.astype(sum_dtype(x))


def written_out(x: jax.Array) -> jax.Array:
    """Returns x, computed once on CPU: XLA would repeat an exp in each sum that reads it."""
    return jax.lax.platform_dependent(x, cpu=jax.lax.optimization_barrier, default=lambda x: x)


def columns_first(x: jax.Array) -> jax.Array:
    """Returns the matrix, on CPU transposed in memory, for products that read it by columns."""
    return written_out(x.T).T
