"""Attention over pages by kernels, and the choice of the program for a run.

On TPU: JAX's ragged paged attention (Pallas), whose pages hold keys and values in turn. On GPU:
`gpu_kernel`.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from dapo_jax.config import ModelConfig
from dapo_jax.models.decoder import NO_WINDOW
from dapo_jax.rollout import gpu_kernel
from dapo_jax.types import UserError

Kernel = Literal["xla", "tpu", "gpu"]
PLATFORMS: dict[str, Kernel] = {"tpu": "tpu", "gpu": "gpu", "cuda": "gpu", "rocm": "gpu"}
# Of the TPU's kernel, where `ModelConfig.kernel_blocks` has no other. Not tuned: docs/rollout.md.
TPU_KEYS_PER_BLOCK, TPU_BLOCK_BYTES, TPU_HEAD_DIM = 1024, 4 * 2**20, 128


def choose(
    wanted: str, platform: str, c: ModelConfig, *, page_tokens: int, heads_parts: int = 1
) -> tuple[Kernel, str | None]:
    """Returns the kernel that `config.rollout.kernel` means on a platform.

    "auto" is the platform's kernel where that takes the model, else XLA; the second result says why
    a platform's kernel is passed over.

    Args:
        platform: of the devices, as JAX calls it.
        heads_parts: devices that the heads of a sequence lie over.

    Raises:
        UserError: the kernel asked for by name is another platform's, or does not take the model.
    """
    own = PLATFORMS.get(platform, "xla")
    if wanted == "xla":
        return "xla", None
    if wanted not in ("auto", own):
        raise UserError(
            f"config.rollout.kernel {wanted!r} needs a {wanted}; the devices are {platform!r}. Set "
            "it to 'auto'."
        )
    refused = _refusal(own, c, page_tokens, heads_parts)
    if refused is None:
        return own, None
    if wanted != "auto":
        raise UserError(
            f"config.rollout.kernel {wanted!r} {refused}. Set config.rollout.kernel to 'auto' or "
            "'xla', which gathers the pages."
        )
    return "xla", f"the {own} kernel {refused}"


def _refusal(kernel: Kernel, c: ModelConfig, page_tokens: int, heads_parts: int) -> str | None:
    """Why a kernel does not take a model, or None."""
    if kernel == "xla":
        return None
    if c.sliding_window:
        return "does not take config.model.sliding_window: windows that differ by layer"
    if kernel == "tpu":
        return _tpu_refusal(c, page_tokens, heads_parts)
    power = lambda n: n & (n - 1) == 0
    if c.compute_dtype != "bfloat16":
        return f"takes config.model.compute_dtype 'bfloat16' only; got {c.compute_dtype!r}"
    if not (16 <= c.head_dim <= 256 and power(c.head_dim)):
        return f"takes a config.model.head_dim of 16, 32, 64, 128 or 256; got {c.head_dim}"
    if not (16 <= page_tokens and power(page_tokens)):
        return f"takes a power of two from 16 as config.rollout.page_tokens; got {page_tokens}"
    return None


def _tpu_refusal(c: ModelConfig, page_tokens: int, heads_parts: int) -> str | None:
    """The limits of the kernel's `get_min_heads_per_blk`, and of what libtpu 0.0.52 compiles."""
    if c.num_kv_heads % heads_parts:
        return None  # the mesh is refused for it
    heads, kv_heads = c.num_heads // heads_parts, c.num_kv_heads // heads_parts
    if c.head_dim != TPU_HEAD_DIM:
        return f"takes a config.model.head_dim of {TPU_HEAD_DIM} only; got {c.head_dim}"
    if kv_heads not in (1, 2, 4) and kv_heads % 8:
        return (
            "takes 1, 2, 4 or a multiple of 8 of config.model.num_kv_heads on a device; got "
            f"{kv_heads}"
        )
    # Its blocks of four query heads cannot be cut from more.
    if c.compute_dtype == "float32" and heads == kv_heads > 4:
        return (
            "takes no more than 4 config.model.num_kv_heads on a device where "
            "config.model.compute_dtype is 'float32' and each has one query head; got "
            f"{kv_heads}"
        )
    most = keys_per_block(heads, kv_heads, c.compute_dtype, c.kernel_blocks)
    if page_tokens > most:
        return f"takes a config.rollout.page_tokens of {most} at most; got {page_tokens}"
    return None


def keys_per_block(
    heads: int, kv_heads: int, dtype: Any, blocks: tuple[tuple[str, int], ...] = ()
) -> int:
    """Returns the tokens whose keys and values the TPU's kernel holds at once: a power of two.

    By default its two buffers have 4 MiB. The compiler lets a kernel have 16 MiB of vector memory
    on v4 and v5, with everything else in it.

    Args:
        heads: query heads of a device.
        blocks: see `ModelConfig.kernel_blocks`.
    """
    if "paged_kv" in dict(blocks):
        return dict(blocks)["paged_kv"]
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel

    dtype = jnp.dtype(dtype)
    _, of_block = kernel.get_min_heads_per_blk(heads, 2 * kv_heads, dtype, dtype)
    most = TPU_BLOCK_BYTES // (2 * of_block * TPU_HEAD_DIM * dtype.itemsize)
    return min(TPU_KEYS_PER_BLOCK, 1 << (most.bit_length() - 1))


def tpu_attention(
    q_BNH: jax.Array,
    pages: jax.Array,
    table_BJ: jax.Array,
    lengths_B: jax.Array,
    window: jax.Array | int | None,
    heads_axis: str | None,
    blocks: tuple[tuple[str, int], ...] = (),
) -> jax.Array:
    """Attends with one query a sequence to the first `lengths_B` tokens of its pages.

    Args:
        pages: keys and values in turn, [pages, page, 2 K, H].
        window: how many of the last tokens a query sees; None: all.
        heads_axis: mesh axis that the heads lie over.
        blocks: see `ModelConfig.kernel_blocks`.
    """
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    assert window is None or isinstance(window, int), "the kernel's window is static"
    B, _, H = q_BNH.shape
    page_tokens = pages.shape[1]

    def local(q: jax.Array, table: jax.Array, lengths: jax.Array, pages: jax.Array) -> jax.Array:
        block = keys_per_block(q.shape[1], pages.shape[2] // 2, pages.dtype, blocks)
        return ragged_paged_attention(
            q,
            pages,
            lengths,
            table,
            jnp.arange(B + 1, dtype=jnp.int32),
            jnp.full(1, B, jnp.int32),
            sm_scale=H**-0.5,
            sliding_window=None if window in (None, NO_WINDOW) else window,
            # Given, because the kernel would look them up by the device that this process has.
            num_kv_pages_per_block=min(table.shape[1], block // page_tokens),
            # The kernel computes all queries of a block with the keys of each sequence in it.
            num_queries_per_block=min(B, dict(blocks).get("paged_queries", 1)),
        )

    return _over_heads(local, heads_axis, 2)(q_BNH, table_BJ, lengths_B, pages)


def gpu_attention(
    q_BNH: jax.Array,
    pages: tuple[jax.Array, ...],
    table_BJ: jax.Array,
    lengths_B: jax.Array,
    heads_axis: str | None,
) -> jax.Array:
    """Attends as `tpu_attention` does, without windows; interpreted on CPUs.

    Args:
        pages: keys and values, [pages, K, page, H] each.
    """
    B, _, H = q_BNH.shape
    interpret = jax.default_backend() == "cpu"

    def local(q: jax.Array, table: jax.Array, lengths: jax.Array, *pages: jax.Array) -> jax.Array:
        k_pages, v_pages = pages
        q_BKGH = q.reshape(B, k_pages.shape[1], -1, H)
        out_BKGH = gpu_kernel.paged_attention(
            q_BKGH, k_pages, v_pages, table, lengths, interpret=interpret
        )
        return out_BKGH.reshape(q.shape)

    return _over_heads(local, heads_axis, 1)(q_BNH, table_BJ, lengths_B, *pages)


def _over_heads(local: Any, heads_axis: str | None, pages_axis: int) -> Any:
    """`local` on each device's heads; arguments: queries, table, lengths, and arrays of pages whose
    heads are axis `pages_axis`."""
    if heads_axis is None:
        return local
    heads, pages = (PartitionSpec(*[None] * i, heads_axis) for i in (1, pages_axis))
    whole = PartitionSpec()

    def program(*arguments: jax.Array) -> jax.Array:
        specs = (heads, whole, whole, *[pages] * (len(arguments) - 3))
        return jax.shard_map(
            local, in_specs=specs, out_specs=heads, axis_names={heads_axis}, check_vma=False
        )(*arguments)

    return program
