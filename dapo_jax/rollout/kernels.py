"""Attention over pages by JAX's own kernels, and which program a run takes.

On TPU: ragged paged attention (Pallas), whose pages hold keys and values in turn. On GPU: paged
attention (Pallas, Triton); it has not been run on one.
"""

import warnings
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from dapo_jax.config import ModelConfig
from dapo_jax.models.decoder import NO_WINDOW
from dapo_jax.types import UserError

Kernel = Literal["xla", "tpu", "gpu"]
PLATFORMS = {"tpu": "tpu", "gpu": "gpu", "cuda": "gpu", "rocm": "gpu"}
# Of the TPU's kernel; of the GPU's. Not tuned, see docs/rollout.md.
TPU_KEYS_PER_BLOCK, TPU_BLOCK_BYTES, TPU_HEAD_DIM = 1024, 4 * 2**20, 128
GPU_KEYS_PER_BLOCK, GPU_SPLITS = 128, 8
_WHOLE = PartitionSpec()


def choose(
    wanted: str,
    platform: str,
    c: ModelConfig,
    *,
    page_tokens: int,
    heads_parts: int = 1,
) -> Kernel:
    """What `config.rollout.kernel` means on a platform: "auto" is the platform's kernel where that
    takes the model, else XLA.

    Args:
        platform: of the devices, as JAX calls it.
        heads_parts: devices that the heads of a sequence lie over.

    Raises:
        UserError: the kernel that is asked for is another platform's, or does not take the model.
    """
    if wanted == "xla":
        return "xla"
    kernel = PLATFORMS.get(platform, "xla") if wanted == "auto" else wanted
    if wanted != "auto" and PLATFORMS.get(platform) != wanted:
        raise UserError(
            f"config.rollout.kernel {wanted!r} needs a {wanted}; the devices are {platform!r}. Set "
            "it to 'auto'."
        )
    refused = _refusal(kernel, c, page_tokens, heads_parts)
    if refused is None:
        return kernel  # pyright: ignore[reportReturnType]
    if wanted != "auto":
        raise UserError(
            f"config.rollout.kernel {wanted!r} {refused}. Set config.rollout.kernel to 'auto' or "
            "'xla', which gathers the pages."
        )
    return "xla"


def fallback(
    wanted: str,
    platform: str,
    c: ModelConfig,
    *,
    page_tokens: int,
    heads_parts: int = 1,
) -> str | None:
    """Why `choose`, with the same arguments, falls back to XLA on a platform that has a kernel; or
    None."""
    kernel = PLATFORMS.get(platform, "xla")
    refused = _refusal(kernel, c, page_tokens, heads_parts)
    return f"the {kernel} kernel {refused}" if wanted == "auto" and refused else None


def _refusal(kernel: str, c: ModelConfig, page_tokens: int, heads_parts: int) -> str | None:
    """Why a kernel does not take a model, or None."""
    if kernel != "xla" and c.sliding_layers:
        return "does not take config.model.sliding_layers: windows that differ by layer"
    if kernel == "tpu":
        if c.num_kv_heads % heads_parts:
            return None  # the mesh is refused for it
        heads, kv_heads = c.num_heads // heads_parts, c.num_kv_heads // heads_parts
        if (refused := _tpu_refusal(c, kv_heads)) is not None:
            return refused
        if page_tokens > (most := keys_per_block(heads, kv_heads, c.compute_dtype)):
            return f"takes a config.rollout.page_tokens of {most} at most; got {page_tokens}"
    if kernel == "gpu":
        power = lambda n: n & (n - 1) == 0
        if c.compute_dtype != "bfloat16":
            dtype = c.compute_dtype
            return f"takes config.model.compute_dtype 'bfloat16' only; got {dtype!r}"
        if not (16 <= c.head_dim <= 256 and power(c.head_dim)):
            return f"takes a config.model.head_dim of 16, 32, 64, 128 or 256; got {c.head_dim}"
        if not (16 <= page_tokens and power(page_tokens)):
            return f"takes a power of two from 16 as config.rollout.page_tokens; got {page_tokens}"
    return None


def _tpu_refusal(c: ModelConfig, kv_heads: int) -> str | None:
    """The same for the heads of a model, so many of which are a device's: what the kernel's
    `get_min_heads_per_blk` asks for, and what libtpu 0.0.52 compiles."""
    if c.head_dim != TPU_HEAD_DIM:
        return f"takes a config.model.head_dim of {TPU_HEAD_DIM} only; got {c.head_dim}"
    if kv_heads not in (1, 2, 4) and kv_heads % 8:
        return (
            "takes 1, 2, 4 or a multiple of 8 of config.model.num_kv_heads on a device; got "
            f"{kv_heads}"
        )
    # In blocks of four query heads, that the compiler cannot cut from more.
    if c.compute_dtype == "float32" and c.num_heads == c.num_kv_heads and kv_heads > 4:
        return (
            "takes no more than 4 config.model.num_kv_heads on a device where "
            "config.model.compute_dtype is 'float32' and each has one query head; got "
            f"{kv_heads}"
        )
    return None


def keys_per_block(heads: int, kv_heads: int, dtype: Any) -> int:
    """Tokens whose keys and values the TPU's kernel holds at once, for so many heads of a device: a
    power of two for which its two buffers have 4 MiB. The compiler lets a kernel have 16 MiB of
    vector memory on v4 and v5, with all else that is in it."""
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel

    dtype = jnp.dtype(dtype)
    _, of_block = kernel.get_min_heads_per_blk(heads, 2 * kv_heads, dtype, dtype)
    most = TPU_BLOCK_BYTES // (2 * of_block * TPU_HEAD_DIM * dtype.itemsize)
    return min(TPU_KEYS_PER_BLOCK, 1 << (most.bit_length() - 1))


def tpu_attention(
    q_BNH: jax.Array,
    pages: jax.Array,
    table_BP: jax.Array,
    lengths_B: jax.Array,
    window: jax.Array | int | None,
    heads_axis: str | None,
) -> jax.Array:
    """A query a sequence over the first `lengths_B` tokens of its pages [pages, page, 2 K, H], of
    which it sees the last `window`; the heads of each device by themselves."""
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    assert window is None or isinstance(window, int), "the kernel's window is static"
    B, _, H = q_BNH.shape
    page_tokens = pages.shape[1]

    def local(q: jax.Array, pages: jax.Array, lengths: jax.Array, table: jax.Array) -> jax.Array:
        block = keys_per_block(q.shape[1], pages.shape[2] // 2, pages.dtype)
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
            num_queries_per_block=1,
        )

    if heads_axis is not None:
        heads = PartitionSpec(None, heads_axis)
        local = jax.shard_map(
            local,
            in_specs=(heads, PartitionSpec(None, None, heads_axis), _WHOLE, _WHOLE),
            out_specs=heads,
            axis_names={heads_axis},
            check_vma=False,
        )
    return local(q_BNH, pages, lengths_B, table_BP)


def gpu_attention(
    q_BNH: jax.Array,
    pages: tuple[jax.Array, ...],
    table_BP: jax.Array,
    lengths_B: jax.Array,
    heads_axis: str | None,
) -> jax.Array:
    """A query a sequence over the first `lengths_B` tokens of its pages: keys and values
    [pages, K, page, H] each.

    To the kernel every kv head is a sequence of its own, whose pages are those of one head: so the
    pool is handed over as it lies. On CPUs it is interpreted."""
    with warnings.catch_warnings():  # jax 0.12 says that the kernel is deprecated
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    B, _, H = q_BNH.shape
    A, P = pages[0].shape[2], table_BP.shape[1]
    block = min(max(1, GPU_KEYS_PER_BLOCK // A), 1 << (P - 1).bit_length())
    splits = min(GPU_SPLITS, -(-P // block))
    # Every split has as many whole blocks; lengths keep what the table is filled up with unseen.
    table_BP = jnp.pad(table_BP, ((0, 0), (0, -P % (splits * block))))

    def local(q: jax.Array, table: jax.Array, lengths: jax.Array, *pages: jax.Array) -> jax.Array:
        K = pages[0].shape[1]
        own = table[:, None] * K + jnp.arange(K, dtype=table.dtype)[None, :, None]
        k, v = (x.reshape(1, -1, *x.shape[2:]) for x in pages)
        out = paged_attention(
            (q * H**-0.5).astype(q.dtype).reshape(B * K, -1, H),
            k,
            v,
            own.reshape(B * K, -1),
            jnp.repeat(lengths, K),
            pages_per_compute_block=block,
            k_splits=splits,
            interpret=jax.default_backend() == "cpu",
        )
        return out.reshape(q.shape)

    if heads_axis is not None:
        heads = PartitionSpec(None, heads_axis)
        local = jax.shard_map(
            local,
            in_specs=(heads, _WHOLE, _WHOLE, *[heads] * len(pages)),
            out_specs=heads,
            axis_names={heads_axis},
            check_vma=False,
        )
    return local(q_BNH, table_BP, lengths_B, *pages)
