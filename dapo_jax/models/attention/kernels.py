"""The choice of the program that attends in training, and kernels for packed rows.

TPU: splash attention (Pallas), which skips blocks of keys that no query sees. GPU: cuDNN's, which
skips them too; before Hopper flash attention (Pallas, Triton), which does not. Elsewhere: XLA.

A kernel is a program of one device: on a mesh each device attends with its own rows and heads, to
keys and values of whole rows.
"""

import functools
import os
import warnings
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, Shaped

from dapo_jax.config import ModelConfig
from dapo_jax.models.attention import cudnn, zigzag
from dapo_jax.models.decoder import NO_WINDOW
from dapo_jax.models.sharding import HeadLayout
from dapo_jax.types import UserError
from dapo_jax.utils.precision import LANES

# By platform as JAX calls it; on NVIDIA GPUs before Hopper flash.
KERNELS = {"tpu": "splash", "gpu": "cudnn", "cuda": "cudnn", "rocm": "flash"}
# Tokens of a block of queries and of keys, at most, where `ModelConfig.kernel_blocks` has no other.
# Not tuned, see docs/update.md.
SPLASH_BLOCK, FLASH_BLOCK = 512, 128
# The flag with which runs on GPUs repeat bit for bit, see docs/pods.md.
DETERMINISTIC = "--xla_gpu_deterministic_ops=true"
KEPT = "attention"  # the name of what `ModelConfig.remat` may keep of attention


class Choice(NamedTuple):
    """The program that attends, and its settings."""

    kernel: Literal["xla", "splash", "cudnn", "flash"]
    platform: str = "cpu"  # of the devices; on "cpu" a kernel is interpreted
    window: int | None = None  # positions that sliding layers see
    every_layer: bool = False  # slides
    layout: HeadLayout | None = None  # on a mesh of several devices
    refused: str | None = None  # why "auto" is XLA's attention on a platform that has a kernel
    blocks: tuple[tuple[str, int], ...] = ()  # see `ModelConfig.kernel_blocks`

    @property
    def context(self) -> int:
        """The number of devices that the tokens of a row lie over."""
        return 1 if self.layout is None else self.layout.context


def choose(
    config: ModelConfig, layout: HeadLayout | None, *, share_prompts: bool = False
) -> Choice:
    """Resolves `config.model.attention`: "auto" is the platform's kernel if it takes the model.

    Args:
        layout: of rows and heads; None: on the one device of the default platform.
        share_prompts: `config.train.share_prompts`.

    Raises:
        UserError: the named kernel is another platform's or does not take the model, or
            config.mesh.context needs heads and kv_heads on one axis.
    """
    device = jax.local_devices()[0] if layout is None else layout.mesh.devices.flat[0]
    platform = device.platform
    if layout is not None and layout.mesh.size == 1:
        layout = None
    context = 1 if layout is None else layout.context
    unaligned = None
    if layout is not None and layout.heads != layout.kv_heads:
        unaligned = (
            "needs config.mesh.rules to send heads and kv_heads to one mesh axis; they go to "
            f"{layout.heads!r} and {layout.kv_heads!r}"
        )
    if context > 1 and unaligned:
        raise UserError(f"config.mesh.context ({context}) {unaligned}.")
    wanted, there = config.attention, _of_device(device)
    kernel: Any = there[0] if wanted == "auto" else wanted
    if kernel not in ("xla", *there):
        raise UserError(
            f"config.model.attention {wanted!r} is a kernel for other devices; these are "
            f"{platform!r}. Set it to 'auto'."
        )
    window, sliding = config.sliding_window or (None, ())
    refused = refusal(
        config, kernel, context=context, unaligned=unaligned, share_prompts=share_prompts
    )
    if refused is not None and wanted != "auto":
        raise UserError(
            f"config.model.attention {wanted!r} {refused}. Set it to 'auto' or 'xla', which "
            "computes the scores of a part of the queries at a time."
        )
    every_layer = len(sliding) == config.num_layers
    if refused is not None:
        return Choice("xla", platform, window, every_layer, layout, f"{kernel} {refused}")
    blocks = config.kernel_blocks
    return Choice(kernel, platform, window, every_layer, layout, blocks=blocks)


def refusal(
    config: ModelConfig,
    kernel: str,
    *,
    context: int,
    unaligned: str | None,
    share_prompts: bool,
) -> str | None:
    """Returns why a kernel does not take the model; None: it does.

    Args:
        context: devices that the tokens of a row lie over.
        unaligned: why heads and keys lie differently; None: they do not.
    """
    on_gpu = kernel in ("cudnn", "flash")
    reasons: dict[Any, Any] = {
        "knows a token by one segment, which config.train.share_prompts needs two of": (
            kernel != "xla" and share_prompts
        ),
        unaligned: kernel != "xla" and unaligned,
        f"needs whole rows; got config.mesh.context {context}": on_gpu and context > 1,
        "does not take config.model.sliding_window": on_gpu and config.sliding_window,
        f"takes config.model.compute_dtype 'bfloat16' only; got {config.compute_dtype!r}": (
            on_gpu and config.compute_dtype != "bfloat16"
        ),
        f"takes a config.model.head_dim from 16 to 256; got {config.head_dim}": (
            on_gpu and not 16 <= config.head_dim <= 256
        ),
        f"takes a multiple of 8 as config.model.head_dim; got {config.head_dim}": (
            kernel == "cudnn" and config.head_dim % 8 != 0
        ),
    }
    return next((f"{reason}" for reason, holds in reasons.items() if holds), None)


def _of_device(device: Any) -> tuple[str, ...]:
    """The kernels that run on a device, the one to prefer first."""
    kernel = KERNELS.get(device.platform, "xla")
    if kernel != "cudnn":
        return (kernel,)
    if float(getattr(device, "compute_capability", 0.0)) < cudnn.LEAST_CAPABILITY:
        return ("flash",)
    # Where sums must have one order, cuDNN's backward pass holds the scores of whole rows.
    if DETERMINISTIC in os.environ.get("XLA_FLAGS", "").split():
        return "flash", "cudnn"
    return "cudnn", "flash"


def attend(
    choice: Choice,
    segments_BT: Int[Array, "B T"],
    q_BTNH: Float[Array, "B T N H"],
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K H"],
    window: Array | int | None,
) -> Float[Array, "B T N H"]:
    """Returns causal attention within segments by the kernel of `choice`.

    Args:
        window: of this layer: `choice.window` or NO_WINDOW; None: no layer slides.
    """
    window = jnp.asarray(NO_WINDOW if window is None else window, jnp.int32)
    layout, of_heads = choice.layout, 1
    if layout is not None and layout.heads is not None:
        of_heads = layout.mesh.shape[layout.heads]
    T, N = q_BTNH.shape[1], q_BTNH.shape[2] // of_heads
    # The arrays of a kernel are data too: each device has those of its own queries.
    kernels = _splash_kernels(choice, T, N) if choice.kernel == "splash" else ()
    program = {"splash": _splash, "cudnn": _cudnn, "flash": _flash}[choice.kernel]
    local = functools.partial(program, choice)
    if layout is not None:
        by_queries = NamedSharding(layout.mesh, PartitionSpec(None, "context"))
        parts = tuple(kernel.manual_sharding_spec(by_queries) for kernel in kernels)
        local = on_each_device(local, layout, parts)
    return local(kernels, window, segments_BT, q_BTNH, k_BTKH, v_BTKH)


def on_each_device(
    local: Callable[..., jax.Array], layout: HeadLayout, kernels_at: Any
) -> Callable[..., jax.Array]:
    """Maps (kernels, window, arrays of rows [B, T], q, k, v) -> attended values over devices."""
    at = PartitionSpec(*layout.rows, layout.heads)
    return jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(kernels_at, PartitionSpec(), layout.rows, at, at, at),
        out_specs=at,
        check_vma=False,
    )


def _padded(x: jax.Array, axis: int, multiple: int) -> jax.Array:
    """Pads an axis with zeros to a multiple."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, widths)


def whole_rows(x_BTX: Shaped[Array, "B T *X"], parts: int) -> jax.Array:
    """Gathers whole rows in their own order from this device's part of their tokens."""
    if parts == 1:
        return x_BTX
    return zigzag.to_rows(jax.lax.all_gather(x_BTX, "context", axis=1, tiled=True), parts)


OF_QUERIES = ("q", "q_dkv", "q_dq")
OF_KEYS = ("kv", "kv_compute", "kv_dkv", "kv_dkv_compute", "kv_dq")


def splash_sizes(
    tokens: int, names: tuple[str, ...], blocks: tuple[tuple[str, int], ...]
) -> tuple[int, dict[str, int]]:
    """Returns tokens padded to whole blocks, and the tokens of each named block.

    Sizes are powers of two: padded to the largest that is not longer than the tokens, there are
    whole blocks of each smaller one, and one block of each larger one.

    Args:
        names: `OF_QUERIES` or `OF_KEYS`.
        blocks: see `ModelConfig.kernel_blocks`.
    """
    given = {name.removeprefix("splash_"): size for name, size in blocks}
    sizes = {name: given.get(name, SPLASH_BLOCK) for name in names}
    for name in sizes.keys() - given.keys():
        whole = sizes.get(name.removesuffix("_compute"), SPLASH_BLOCK)
        sizes[name] = min(sizes[name], whole)  # what is computed at once is a part of a block
    whole = max((size for size in sizes.values() if size <= tokens), default=LANES)
    full = tokens + -tokens % whole
    return full, {name: min(size, full) for name, size in sizes.items()}


def _splash_kernels(choice: Choice, T: int, heads: int) -> tuple[Any, ...]:
    """Returns the kernels of layers that do not slide and of layers that do, if there are any.

    Args:
        T: tokens of a row.
        heads: of a device.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as library

    C = choice.context
    full, of_queries = splash_sizes(T // C, OF_QUERIES, choice.blocks)
    full_kv, of_keys = splash_sizes(T, OF_KEYS, choice.blocks)
    blocks: dict[str, Any] = {
        f"block_{name}": size for name, size in (of_queries | of_keys).items()
    }
    # The position in the row of each device's queries; padding is where its last query is.
    order_CX = zigzag.order(T, C).reshape(C, -1)
    order_CX = np.pad(order_CX, ((0, 0), (0, full - T // C)), mode="edge")

    def kernel(seen: int | None) -> Any:
        shape = C * full, full_kv
        mask = (
            library.CausalMask(shape)
            if seen is None
            else library.LocalMask(shape, (seen - 1, 0), 0)
        )
        mask.q_sequence = order_CX.reshape(-1).astype(np.int32)
        return library.make_splash_mha(
            library.MultiHeadMask([mask] * heads),
            block_sizes=library.BlockSizes(**blocks),
            head_shards=1,
            q_seq_shards=C,
            # What its backward pass reads: log sum exp, and the attended values.
            residual_checkpoint_name=KEPT,
            interpret=choice.platform == "cpu",
        )

    if choice.window is None or choice.every_layer:
        return (kernel(choice.window),)
    return kernel(None), kernel(choice.window)


def _splash(
    choice: Choice,
    kernels: tuple[Any, ...],
    window: jax.Array,
    segments_BT: jax.Array,
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
) -> jax.Array:
    """Splash attention over the rows, heads and queries of one device.

    Tokens are padded to whole blocks, heads with zeros, which change neither scores nor values.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as library

    _, T, _, H = q_BTNH.shape
    arrays = segments_BT, k_BTKH, v_BTKH
    segments_BS, k_BSKH, v_BSKH = (whole_rows(x, choice.context) for x in arrays)
    full, _ = splash_sizes(T, OF_QUERIES, choice.blocks)
    full_kv, _ = splash_sizes(segments_BS.shape[1], OF_KEYS, choice.blocks)
    of_queries_BT, of_keys_BS = _padded(segments_BT, 1, full), _padded(segments_BS, 1, full_kv)
    if choice.blocks:
        # Blocks of another size may skip padding in the forward pass and meet it in the backward
        # pass, whose weights would be infinite: padded queries see no padded key.
        of_keys_BS = jnp.where(of_keys_BS > 0, of_keys_BS, -1)
    segments = library.SegmentIds(of_queries_BT, of_keys_BS)
    fill = lambda x, full: _padded(_padded(x, 1, full), 3, LANES).swapaxes(1, 2)
    q_BNTH = fill((q_BTNH * H**-0.5).astype(q_BTNH.dtype), full)
    k_BKSH, v_BKSH = fill(k_BSKH, full_kv), fill(v_BSKH, full_kv)

    def by(kernel: Any) -> jax.Array:
        row = lambda q, k, v, segments: _within_segments(kernel, segments)(q, k, v, segments)
        return jax.vmap(row)(q_BNTH, k_BKSH, v_BKSH, segments)

    if len(kernels) == 1:
        out_BNTH = by(kernels[0])
    else:  # which layers slide is data to the scan over layers
        whole, sliding = kernels
        out_BNTH = jax.lax.cond(window < NO_WINDOW, lambda: by(sliding), lambda: by(whole))
    return out_BNTH[:, :, :T, :H].swapaxes(1, 2)


def _within_segments(kernel: Any, segments: Any) -> Any:
    """Returns the kernel of one row, without blocks where no query has a key of its segment.

    Two arrays say which blocks splash attention computes and which it fetches meanwhile. The
    library makes them from the mask, the same for every row; here each row has its own.

    Args:
        segments: of queries [T] (the part of this device) and of keys [S] (the whole row).
    """
    sizes = kernel.kwargs["block_sizes"]
    forward = sizes.block_q, sizes.block_kv
    by_queries = sizes.block_q_dq, sizes.block_kv_dq
    by_keys = sizes.block_q_dkv, sizes.block_kv_dkv
    if {forward, by_queries, by_keys} == {(len(segments.q), len(segments.kv))}:
        return kernel

    def bounds(segments_T: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
        blocks = segments_T.reshape(-1, block)
        none = jnp.iinfo(blocks.dtype).max  # padding; a block of nothing else meets no other
        return jnp.where(blocks > 0, blocks, none).min(axis=1), blocks.max(axis=1)

    @functools.cache  # mostly all three have the same blocks
    def near(block_q: int, block_kv: int) -> jax.Array:
        least_Q, largest_Q = bounds(segments.q, block_q)
        least_K, largest_K = bounds(segments.kv, block_kv)
        return (least_Q[:, None] <= largest_K[None]) & (least_K[None] <= largest_Q[:, None])

    def fewer(
        info: Any, near: jax.Array, turned: Callable[[jax.Array], jax.Array], *, forward: bool
    ) -> Any:
        # `turned`: the kernel goes along the second axis for each index of the first.
        mask, blocks = turned(info.block_mask[0]), turned(info.data_next[0]).astype(jnp.int32)
        could, n = mask > 0, near.shape[1]
        if (mask.size + 1) * n > jnp.iinfo(jnp.int32).max:
            raise UserError(
                f"splash attention cannot number {mask.shape[0]} x {n} blocks of a packed row in "
                "int32. Set config.model.attention='xla', or a smaller config.train.row_tokens."
            )
        # No gathers here: libtpu 0.0.50 offloads them to SparseCore, and fails to lower them.
        is_block = blocks[:, :, None] == jnp.arange(n, dtype=jnp.int32)[None, None]
        runs = could & (near[:, None] & is_block).any(axis=2)
        if forward:  # a query without a block would divide by zero: padding has its first
            runs |= could & ~runs.any(axis=1, keepdims=True) & (jnp.cumsum(could, axis=1) == 1)
        # A skipped block names the next that runs, which is fetched meanwhile. Place and name are
        # one number, so that the least place brings its name along.
        place = jnp.arange(mask.size, dtype=jnp.int32).reshape(mask.shape)
        none = mask.size * n + blocks[0, 0]
        packed = jnp.where(runs, place * n + blocks, none).reshape(-1)
        named = (jax.lax.cummin(packed, reverse=True) % n).reshape(mask.shape)
        named = named.astype(info.data_next.dtype)
        return info._replace(
            block_mask=turned(jnp.where(runs, mask, 0))[None], data_next=turned(named)[None]
        )

    as_is, transposed = lambda x: x, lambda x: x.T
    return type(kernel)(
        fewer(kernel.fwd_mask_info, near(*forward), as_is, forward=True),
        fewer(kernel.dq_mask_info, near(*by_queries), as_is, forward=False),
        fewer(kernel.dkv_mask_info, near(*by_keys).T, transposed, forward=False),
        **kernel.kwargs,
    )


def _cudnn(
    choice: Choice,
    kernels: tuple[Any, ...],
    window: jax.Array,
    segments_BT: jax.Array,
    *arrays: jax.Array,
) -> jax.Array:
    """cuDNN's attention over the rows and heads of one device."""
    return checkpoint_name(cudnn.attend(segments_BT, *arrays), KEPT)


def _flash(
    choice: Choice,
    kernels: tuple[Any, ...],
    window: jax.Array,
    segments_BT: jax.Array,
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
) -> jax.Array:
    """Flash attention over the rows and heads of one device; keys repeat for each query head."""
    with warnings.catch_warnings():  # jax 0.12 says that the kernel is deprecated
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu.attention import mha

    _, T, N, H = q_BTNH.shape
    fill = lambda x: _padded(x, 1, FLASH_BLOCK)
    each = lambda x: fill(jnp.repeat(x, N // x.shape[2], axis=2))
    out_BTNH: Any = mha(
        fill(q_BTNH),
        each(k_BTKH),
        each(v_BTKH),
        fill(segments_BT),
        sm_scale=H**-0.5,
        causal=True,
        interpret=choice.platform == "cpu",
    )
    return checkpoint_name(out_BTNH[:, :T], KEPT)
