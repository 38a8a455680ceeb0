"""Matrix products: their precision, and the order in which they read memory on CPU.

With XLA's CPU backend a product that reads an operand against its order runs at about half the rate
of one that does not, and more than the time of a transposition is lost (docs/log.md). The compilers
for TPU and GPU choose the order themselves: there nothing changes.
"""

from typing import Any

import jax
import jax.numpy as jnp

LANES = 128  # columns of a tile of a TPU's memory; of its rows, a multiple


def multiply_in(dtype: str, platform: str) -> None:
    """From now on this process multiplies float32 matrices in float32 on accelerators, if `dtype`
    is float32. Their default is bfloat16 (TPU) or TF32 (GPU), with 8 and 11 significant bits of 24.

    Args:
        dtype: `config.model.compute_dtype`.
        platform: of the devices, as JAX calls it. CPUs multiply in float32 anyway.
    """
    if dtype == "float32" and platform != "cpu":
        jax.config.update("jax_default_matmul_precision", "highest")


def sum_dtype(x: jax.Array) -> Any:
    """Of sums over x or over its products: float32, whatever smaller x is, or float64 as x is."""
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32


def at_least_float32(x: jax.Array) -> jax.Array:
    """x in float32, or in float64 where it is."""
    return x.astype(sum_dtype(x))


def written_out(x: jax.Array) -> jax.Array:
    """x, on CPU computed once: XLA there computes an exp again in each of the sums that read it."""
    return jax.lax.platform_dependent(x, cpu=jax.lax.optimization_barrier, default=lambda x: x)


def columns_first(x: jax.Array) -> jax.Array:
    """The same matrix, on CPU transposed in memory: products that have to read an operand against
    its order take twice as long there as the transposition and a product in order."""
    return written_out(x.T).T
