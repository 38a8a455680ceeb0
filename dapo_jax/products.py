"""Matrix products in the order in which XLA's CPU backend reads memory; elsewhere nothing changes.

There a product that reads an operand against its order runs at about half the rate of one that
does not, and more than the time of a transposition is lost (docs/log.md). The compilers for TPU
and GPU choose the order themselves.
"""

import jax

LANES = 128  # columns of a tile of a TPU's memory; of its rows, a multiple


def written_out(x: jax.Array) -> jax.Array:
    """x, on CPU computed once: XLA there computes an exp again in each of the sums that read it."""
    return jax.lax.platform_dependent(x, cpu=jax.lax.optimization_barrier, default=lambda x: x)


def columns_first(x: jax.Array) -> jax.Array:
    """The same matrix, on CPU transposed in memory: products that have to read an operand against
    its order take twice as long there as the transposition and a product in order."""
    return written_out(x.T).T
