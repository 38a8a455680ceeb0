"""Which program attends in training, and JAX's own kernels for packed rows.

On TPU: splash attention (Pallas); it passes over blocks of keys that no query sees. On GPU: flash
attention (Pallas, Triton), because it takes segment ids: cuDNN's, as `jax.nn` offers it, takes
lengths only, and so one sequence a row. It has not been run on one. Elsewhere XLA, see
`dapo_jax.attention`.

A kernel is a program of one device: on a mesh each device attends with its own rows and heads.
"""

import functools
import warnings
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from dapo_jax.config import ModelConfig
from dapo_jax.model import NO_WINDOW
from dapo_jax.products import LANES
from dapo_jax.sharding import HeadLayout
from dapo_jax.types import UserError

KERNELS = {"tpu": "splash", "gpu": "flash", "cuda": "flash", "rocm": "flash"}
# Tokens of a block of queries and of keys, at most. Not tuned, see docs/update.md.
SPLASH_BLOCK, FLASH_BLOCK = 512, 128
KEPT = "attention"  # the name of what `ModelConfig.remat` may keep of attention


class Choice(NamedTuple):
    """Who attends, and to what."""

    kernel: Literal["xla", "splash", "flash"]
    platform: str = "cpu"  # of the devices; on "cpu" a kernel is interpreted
    window: int | None = None  # positions that sliding layers see
    every_layer: bool = False  # slides
    layout: HeadLayout | None = None  # on a mesh of several devices


def choose(config: ModelConfig, layout: HeadLayout | None) -> Choice:
    """What `config.model.attention` means: "auto" is the kernel of the platform where that takes
    the model, else XLA.

    Args:
        layout: where rows and heads lie; None: on the one device of the default platform.

    Raises:
        UserError: the kernel that is asked for is another platform's, or does not take the model.
    """
    platform = jax.default_backend() if layout is None else layout.mesh.devices.flat[0].platform
    if layout is not None and layout.mesh.size == 1:
        layout = None
    wanted, of_platform = config.attention, KERNELS.get(platform, "xla")
    kernel = of_platform if wanted == "auto" else wanted
    if kernel not in ("xla", of_platform):
        raise UserError(
            f"config.model.attention {wanted!r} is a kernel for another platform; the devices are "
            f"{platform!r}. Set it to 'auto'."
        )
    refused = _refusal(kernel, config, layout)
    if refused is not None and wanted != "auto":
        raise UserError(
            f"config.model.attention {wanted!r} {refused}. Set it to 'auto' or 'xla', which "
            "computes the scores of a part of the queries at a time."
        )
    every_layer = len(config.sliding_layers) == config.num_layers
    window = config.sliding_window if config.sliding_layers else None
    taken: Any = "xla" if refused else kernel
    return Choice(taken, platform, window, every_layer, layout)


def _refusal(kernel: str, config: ModelConfig, layout: HeadLayout | None) -> str | None:
    """Why a kernel does not take a model, or None."""
    if kernel == "xla":
        return None
    if layout is not None and layout.heads != layout.kv_heads:
        return (
            "needs config.mesh.rules to send heads and kv_heads to one mesh axis; they go to "
            f"{layout.heads!r} and {layout.kv_heads!r}"
        )
    if kernel == "flash":
        if config.sliding_layers:
            return "does not take config.model.sliding_layers"
        if config.compute_dtype != "bfloat16":
            return f"takes config.model.compute_dtype 'bfloat16' only; got {config.compute_dtype!r}"
        if not 16 <= config.head_dim <= 256:
            return f"takes a config.model.head_dim from 16 to 256; got {config.head_dim}"
    return None


def attend(
    choice: Choice,
    segments_BT: jax.Array,
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    window: jax.Array | int | None,
) -> jax.Array:
    """Causal attention within segments by the kernel of `choice`, as [B, T, N, H].

    Args:
        window: of this layer: that of `choice` or NO_WINDOW; None: no layer slides.
    """
    local = {"splash": _splash, "flash": _flash}[choice.kernel]
    local = functools.partial(local, choice)
    window = jnp.asarray(NO_WINDOW if window is None else window, jnp.int32)
    if choice.layout is not None:
        rows, heads = choice.layout.rows[0], choice.layout.heads
        at = PartitionSpec(rows, None, heads)
        local = jax.shard_map(
            local,
            mesh=choice.layout.mesh,
            in_specs=(PartitionSpec(), PartitionSpec(rows), at, at, at),
            out_specs=at,
            check_vma=False,
        )
    return local(window, segments_BT, q_BTNH, k_BTKH, v_BTKH)


def _filled(x: jax.Array, axis: int, multiple: int) -> jax.Array:
    """x with zeros at the end of an axis, up to a multiple."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, widths)


def _splash(
    choice: Choice,
    window: jax.Array,
    segments_BT: jax.Array,
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
) -> jax.Array:
    """Splash attention over the rows and heads of one device.

    Rows are filled up with padding to whole blocks; heads with zeros, which change neither scores
    nor values.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as library

    _, T, N, H = q_BTNH.shape
    whole = SPLASH_BLOCK if T >= SPLASH_BLOCK else LANES
    segments_BT = _filled(segments_BT, 1, whole)
    fill = lambda x: _filled(_filled(x, 1, whole), 3, LANES).swapaxes(1, 2)
    q_BNTH, k_BKTH, v_BKTH = map(fill, ((q_BTNH * H**-0.5).astype(q_BTNH.dtype), k_BTKH, v_BTKH))
    full = segments_BT.shape[1]
    block = min(SPLASH_BLOCK, full)
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    blocks: dict[str, Any] = {f"block_{name}": block for name in names}
    sizes = library.BlockSizes(**blocks)

    def attention(seen: int | None) -> jax.Array:
        shape = (full, full)
        mask = (
            library.CausalMask(shape)
            if seen is None
            else library.LocalMask(shape, (seen - 1, 0), 0)
        )
        kernel: Any = library.make_splash_mha_single_device(
            library.MultiHeadMask([mask] * N),
            block_sizes=sizes,
            # What its backward pass reads: log sum exp, and the attended values.
            residual_checkpoint_name=KEPT,
            interpret=choice.platform == "cpu",
        )
        segments = library.SegmentIds(segments_BT, segments_BT)
        return jax.vmap(kernel)(q_BNTH, k_BKTH, v_BKTH, segments)

    if choice.window is None or choice.every_layer:
        out_BNTH = attention(choice.window)
    else:  # which layers slide is data to the scan over layers
        out_BNTH = jax.lax.cond(
            window < NO_WINDOW, lambda: attention(choice.window), lambda: attention(None)
        )
    return out_BNTH[:, :, :T, :H].swapaxes(1, 2)


def _flash(
    choice: Choice,
    window: jax.Array,
    segments_BT: jax.Array,
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
) -> jax.Array:
    """Flash attention over the rows and heads of one device; no layer slides.

    The kernel has no grouped queries: keys and values are repeated for each query head.
    """
    with warnings.catch_warnings():  # jax 0.12 says that the kernel is deprecated
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu.attention import mha

    _, T, N, H = q_BTNH.shape
    fill = lambda x: _filled(x, 1, FLASH_BLOCK)
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
