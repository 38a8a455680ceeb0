"""cuDNN's attention to packed rows, forward and backward, on NVIDIA GPUs from Hopper on.

`jax.nn.dot_product_attention` calls the same function of JAX, but hands no segments to it.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

LEAST_CAPABILITY = 9.0  # of the GPU; older ones take no packed rows


def most_segments(row_tokens: int) -> int:
    """Returns how many sequences a packed row may hold, on every platform.

    cuDNN wants a bound and computes as for a batch of so many rows: time and memory of its backward
    pass grow with it (docs/update.md). Rows of 16,384 tokens and more are full all the same if
    sequences have 512 tokens on average.
    """
    return max(32, row_tokens // 512)


def places(segments_BT: Int[Array, "B T"], most: int) -> tuple[jax.Array, jax.Array]:
    """Returns the first token [B, most + 1] and the tokens [B, most] of each segment; -1: none.

    Args:
        segments_BT: 1, 2, ... in order, and 0 for padding at the end of a row.
    """
    numbers = jnp.arange(1, most + 1, dtype=jnp.int32)
    own_BMT = segments_BT[:, None] == numbers[None, :, None]
    length_BM = jnp.sum(own_BMT, axis=2, dtype=jnp.int32)
    first_BM = jnp.argmax(own_BMT, axis=2).astype(jnp.int32)
    there_BM = length_BM > 0
    first_BM = jnp.where(there_BM, first_BM, -1)
    end_B1 = jnp.full((len(segments_BT), 1), -1, jnp.int32)
    return jnp.concatenate([first_BM, end_B1], axis=1), jnp.where(there_BM, length_BM, -1)


def attend(
    segments_BT: Int[Array, "B T"],
    q_BTNH: Float[Array, "B T N H"],
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K H"],
) -> Float[Array, "B T N H"]:
    """Returns causal attention within segments; of padding 0, and so are its gradients.

    A row of more than `most_segments` has NaN for all values.
    """
    from jax._src.cudnn import fused_attention_stablehlo as library

    T, H = q_BTNH.shape[1], q_BTNH.shape[3]
    most = most_segments(T)
    first, length = places(segments_BT, most)
    # cuDNN leaves what belongs to no segment as it finds it, in values and in gradients.
    real = (segments_BT > 0)[:, :, None, None]
    only = lambda x: jnp.where(real, x, 0)
    out_BTNH = library.dot_product_attention(
        only(q_BTNH),
        only(k_BTKH),
        only(v_BTKH),
        q_seqlen=length,
        kv_seqlen=length,
        q_offsets=first,
        kv_offsets=first,
        scale=H**-0.5,
        mask_type=library.MaskType.PADDING_CAUSAL,
    )
    fits = jnp.max(segments_BT, axis=1) <= most
    return jnp.where(fits[:, None, None, None], only(out_BTNH), jnp.nan)
