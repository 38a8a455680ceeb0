"""Weights of Hugging Face checkpoints: safetensors in, straight into sharded arrays, and out.

`launch/` loads base models and exports checkpoints here. Each process reads the slices that its own
devices hold, one layer at a time, so that the host never holds more than one tensor's slices.
"""

import errno
import functools
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import save_file

from dapo_jax.config import ModelConfig, hf_config
from dapo_jax.models import decoder, int8, lora
from dapo_jax.types import UserError
from dapo_jax.utils import hf_hub
from dapo_jax.utils.progress import duration

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
REPORT_EVERY_SECONDS = 10.0
MAX_SHARD_BYTES = 5 * 2**30
READ_BYTES = 4 * 2**20
# The dtypes of weights by their names in safetensors' headers.
DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
# Present in some checkpoints; the config determines them.
COMPUTED = ("rotary_emb.inv_freq", "masked_bias", "attn.bias")


class Tensor(NamedTuple):
    """One of our arrays, or a layer of it, as a checkpoint stores it."""

    name: str  # with {i} for the number of the layer
    shape: tuple[int, ...]  # in the checkpoint
    order: tuple[int, ...]  # the checkpoint's axes in the order of ours
    axes: tuple[int, ...]  # our axis that each axis of the checkpoint begins with, for the sharding


def tensors(c: ModelConfig) -> dict[str, Tensor]:
    """Returns the source of each of our arrays by its name; those of layers as `layers.name`."""
    D, F, V = c.hidden_size, c.intermediate_size, c.vocab_size
    N, K, H = c.num_heads, c.num_kv_heads, c.head_dim

    def linear(name: str, out: int, into: int, ours: tuple[int, int] = (1, 0)) -> Tensor:
        # A linear layer is [out, in] there and in, out here; `ours` are our axes of (out, in).
        return Tensor(f"model.layers.{{i}}.{name}.weight", (out, into), (1, 0), ours)

    def vector(name: str, size: int) -> Tensor:
        return Tensor(f"model.layers.{{i}}.{name}", (size,), (0,), (0,))

    found = {
        "embed": Tensor(EMBEDDING, (V, D), (0, 1), (0, 1)),
        "final_norm": Tensor("model.norm.weight", (D,), (0,), (0,)),
        "layers.attention_norm": vector("input_layernorm.weight", D),
        "layers.mlp_norm": vector("post_attention_layernorm.weight", D),
        "layers.q": linear("self_attn.q_proj", N * H, D),
        "layers.k": linear("self_attn.k_proj", K * H, D),
        "layers.v": linear("self_attn.v_proj", K * H, D),
        "layers.o": linear("self_attn.o_proj", D, N * H, (2, 0)),
        "layers.gate": linear("mlp.gate_proj", F, D),
        "layers.up": linear("mlp.up_proj", F, D),
        "layers.down": linear("mlp.down_proj", D, F),
    }
    if c.qkv_bias:
        for name, size in (("q", N * H), ("k", K * H), ("v", K * H)):
            found[f"layers.{name}_bias"] = vector(f"self_attn.{name}_proj.bias", size)
    if c.qk_norm:
        for name in ("q", "k"):
            found[f"layers.{name}_norm"] = vector(f"self_attn.{name}_norm.weight", H)
    if not c.tie_embeddings:
        found["unembed"] = Tensor(HEAD, (V, D), (0, 1), (0, 1))
    return found


def each_tensor(
    sources: Mapping[str, Tensor], num_layers: int
) -> Iterator[tuple[str, int | None, Tensor]]:
    """Yields (our name, layer, tensor) of each tensor of the checkpoint."""
    for ours, tensor in sources.items():
        if not ours.startswith("layers."):
            yield ours, None, tensor
            continue
        for i in range(num_layers):
            yield ours, i, tensor._replace(name=tensor.name.format(i=i))


def expected_shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every tensor that a checkpoint of the model must hold."""
    return shapes_of(tensors(c), c.num_layers)


def shapes_of(sources: Mapping[str, Tensor], num_layers: int) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every tensor of a checkpoint, by its name there."""
    return {tensor.name: tensor.shape for _, _, tensor in each_tensor(sources, num_layers)}


def check_tensors(c: ModelConfig, found: Mapping[str, tuple[int, ...]], place: Any) -> None:
    """Raises UserError as `check_shapes`, for the checkpoint of a whole model."""
    ignored = {name for name in found if name.endswith(COMPUTED)}
    # A tied checkpoint may hold its one matrix under both names.
    ignored |= {HEAD} if c.tie_embeddings else set()
    check_shapes(expected_shapes(c), found, place, ignored)


def check_shapes(
    wanted: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[int, ...]],
    place: Any,
    ignored: Set[str] = frozenset(),
) -> None:
    """Checks that every tensor is used and every parameter filled.

    Args:
        wanted, found: shapes by name.
        ignored: names that may be found besides.

    Raises:
        UserError: lists missing and surplus tensors and those of another shape.
    """
    problems = {
        "missing": sorted(wanted.keys() - found.keys()),
        "not known": sorted(found.keys() - wanted.keys() - ignored),
        "of another shape": [
            f"{name} ({list(found[name])}, {list(shape)} is wanted)"
            for name, shape in wanted.items()
            if name in found and tuple(found[name]) != shape
        ],
    }
    listed = [
        f"{len(names)} {kind}: {', '.join(names[:6])}{', ...' if len(names) > 6 else ''}"
        for kind, names in problems.items()
        if names
    ]
    if listed:
        raise UserError(
            f"config.model.path: {place} does not hold the tensors of its config: "
            f"{'; '.join(listed)}. Check that the download is complete and the config its own."
        )


class Stored(NamedTuple):
    """The bytes of a tensor in a safetensors file."""

    file: Path
    offset: int
    dtype: str  # by its name in the header
    shape: tuple[int, ...]


def _index(directory: Path) -> dict[str, str] | None:
    """Returns the file of each tensor by its name; None where there is no index."""
    index = directory / INDEX
    if not index.exists():
        return None
    try:
        return dict(json.loads(index.read_text())["weight_map"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"config.model.path: {index} cannot be read: {error}.") from error


def _stored_tensors(directory: Path) -> dict[str, Stored]:
    """Returns every tensor of a checkpoint by its name, from the index and the files' headers."""
    file_of = _index(directory)
    if file_of is None:
        if (directory / SINGLE).exists():
            return header(directory / SINGLE)
        raise UserError(
            f"config.model.path: {directory} has neither {INDEX} nor {SINGLE}: there are no "
            "weights in it (only safetensors are read)."
        )
    headers = {file: header(directory / file) for file in dict.fromkeys(file_of.values())}
    for name, file in file_of.items():
        if name not in headers[file]:
            raise UserError(
                f"config.model.path: {directory / file} lacks {name}, which {INDEX} puts there. "
                "Fetch both again."
            )
    return {name: headers[file][name] for name, file in file_of.items()}


def header(file: Path) -> dict[str, Stored]:
    """Returns the tensors of one file; the library checks the header and the file's length.

    Raises:
        UserError: the file is missing or damaged.
    """
    try:
        with safetensors.safe_open(file, "np"):
            pass
        with open(file, "rb") as opened:
            start = 8 + int.from_bytes(opened.read(8), "little")
            entries = json.loads(opened.read(start - 8))
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(
            f"config.model.path: the shard {file} is missing, cut short or damaged: {error}. "
            "Fetch it again."
        ) from error
    entries.pop("__metadata__", None)
    return {
        name: Stored(file, start + e["data_offsets"][0], e["dtype"], tuple(e["shape"]))
        for name, e in entries.items()
    }


def _read(name: str, stored: Stored, index: tuple[slice, ...]) -> np.ndarray:
    """Reads a slice of a tensor of one or two axes, at most about READ_BYTES at a time.

    The library's own slices hold Python's lock as long as the storage takes, which would stop the
    heartbeat of this process; `np.fromfile` releases it.
    """
    if stored.dtype not in DTYPES:
        raise UserError(
            f"config.model.path: {name} in {stored.file} has dtype {stored.dtype}; known are "
            f"{', '.join(DTYPES)}."
        )
    dtype, rest = np.dtype(DTYPES[stored.dtype]), stored.shape[1:]
    width = math.prod(rest)
    first, last, _ = index[0].indices(stored.shape[0])
    rows = max(1, READ_BYTES // (width * dtype.itemsize))
    columns = [len(range(*part.indices(n))) for part, n in zip(index[1:], rest)]
    out = np.empty((last - first, *columns), dtype)
    with open(stored.file, "rb", buffering=0) as file:
        file.seek(stored.offset + first * width * dtype.itemsize)
        for start in range(first, last, rows):
            count = min(rows, last - start) * width
            piece = np.fromfile(file, dtype, count)
            if len(piece) < count:
                raise OSError(errno.EIO, "the file has become shorter", str(stored.file))
            piece = piece.reshape(-1, *rest)[(slice(None), *index[1:])]
            out[start - first : start - first + len(piece)] = piece
    return out


def load(
    c: ModelConfig,
    shardings: decoder.Params,
    *,
    say: Callable[[str], None] = lambda _: None,
    check_stop: Callable[[], None] = lambda: None,
) -> decoder.Params:
    """Loads the checkpoint of `c.path` in `c.param_dtype`, laid out as asked.

    Args:
        shardings: of every parameter, see `sharding.param_shardings`.
        say: prints progress.
        check_stop: raises where the program is to stop.

    Raises:
        UserError: config.json, index or files do not fit the model or cannot be read.
    """
    assert c.path is not None
    hf_config.check(c)
    # A repository may hold the same weights in other formats, too.
    shards = set((_index(hf_hub.model_directory(c.path, [INDEX])) or {}).values())
    directory = hf_hub.model_directory(c.path, [INDEX, *sorted(shards or {SINGLE})])
    stored, begun = _stored_tensors(directory), time.monotonic()
    check_tensors(c, {name: tensor.shape for name, tensor in stored.items()}, directory)
    if c.tie_embeddings and HEAD in stored:
        _check_tied(stored, directory)
    shapes = decoder.param_shapes(c)
    params = read_arrays(tensors(c), stored, shapes, shardings, say=say, check_stop=check_stop)
    # An old buffer that is not read may have another dtype.
    num_bytes = sum(file.stat().st_size for file in {tensor.file for tensor in stored.values()})
    say(f"{c.path}: {num_bytes / 1e9:.1f} GB in {duration(time.monotonic() - begun)}")
    return params


def _check_tied(stored: Mapping[str, Stored], place: Any) -> None:
    """Raises UserError unless the unembedding of a tied model is its embedding."""
    shape = stored[EMBEDDING].shape
    same, rows = stored[HEAD].shape == shape, max(1, READ_BYTES // (4 * shape[1]))
    for first in range(0, shape[0], rows):
        index = slice(first, first + rows), slice(None)
        read = lambda name, index=index: _read(name, stored[name], index)
        same = same and np.array_equal(read(EMBEDDING), read(HEAD))
    if not same:
        raise UserError(
            f"config.model.path: {place} holds a {HEAD} that differs from {EMBEDDING}, and its "
            "config.json has tie_word_embeddings true. Set that to false there."
        )


def read_arrays(
    sources: Mapping[str, Tensor],
    stored: Mapping[str, Stored],
    shapes: decoder.Params,
    shardings: decoder.Params,
    *,
    say: Callable[[str], None] = lambda _: None,
    check_stop: Callable[[], None] = lambda: None,
) -> decoder.Params:
    """Returns the arrays of these shapes, read from files; each device reads the slices it needs.

    Args:
        sources: by our names.
        stored: by their names in the files.
    """
    of_layers: decoder.Params = shapes["layers"]
    total, done = sum(math.prod(x.shape) for x in jax.tree.leaves(shapes)), 0
    begun = reported = time.monotonic()

    def on_devices(tensor: Tensor, name: str, ours: NamedSharding) -> jax.Array:
        """Returns a tensor in the shape of its file, each device with the slice it needs."""
        nonlocal done, reported
        check_stop()
        parts = [*ours.spec[1 if "{i}" in tensor.name else 0 :], *[None] * 8]
        sharding = NamedSharding(ours.mesh, PartitionSpec(*(parts[i] for i in tensor.axes)))
        read: Any = functools.partial(_read, name, stored[name])
        value = jax.make_array_from_callback(tensor.shape, sharding, read)
        done += math.prod(tensor.shape)
        now = time.monotonic()
        if now - reported > REPORT_EVERY_SECONDS:
            reported, left = now, duration((now - begun) * (total - done) / done)
            say(f"  {100 * done / total:.0f} % of the weights read, about {left} left")
        return value

    def one(name: str, like: jax.ShapeDtypeStruct, ours: NamedSharding) -> jax.Array:
        tensor = sources[name]
        value = on_devices(tensor, tensor.name, ours)
        return _to_ours(tensor.order, like.shape, like.dtype, ours)(value)

    def stack(name: str) -> decoder.Params:
        """Returns a matrix of all layers, in int8 with its scale. Layer by layer, so that there is
        never more than one in the dtype of the file."""
        tensor, at = sources[f"layers.{name}"], shardings["layers"]
        names = tuple(n for n in (name, int8.scale_name(name)) if n in of_layers)
        like, where = (tuple((n, x[n]) for n in names) for x in (of_layers, at))
        empty, put = _stacking(tensor.order, like, where)
        layers = empty()
        for i in range(len(of_layers[name])):
            layer = on_devices(tensor, tensor.name.format(i=i), at[name])
            layers = put(layers, layer, np.int32(i))
            # Or the host would read ahead, and hold layers that the devices have not taken yet.
            jax.block_until_ready(layers)
        return layers

    params: decoder.Params = {
        n: one(n, x, shardings[n]) for n, x in shapes.items() if n != "layers"
    }
    params["layers"] = {}
    for name in of_layers:
        if not int8.is_scale(name):
            params["layers"] |= stack(name)
    return jax.block_until_ready(params)


# The programs are kept: a second checkpoint of the same shapes compiles nothing.
@functools.cache
def _to_ours(order: tuple[int, ...], shape: tuple[int, ...], dtype: Any, at: NamedSharding) -> Any:
    """Returns the program that turns a tensor of a file into our array."""
    ours = lambda x: jnp.transpose(x, order).reshape(shape).astype(dtype)
    return jax.jit(ours, out_shardings=at)


@functools.cache
def _stacking(
    order: tuple[int, ...],
    like: tuple[tuple[str, jax.ShapeDtypeStruct], ...],
    at: tuple[tuple[str, NamedSharding], ...],
) -> tuple[Any, Any]:
    """Returns the programs that make an empty stack of layers and put one into it.

    Args:
        like: name and shape of the stack; where it is in int8, of its scale, too.
        at: where they lie.
    """
    (name, matrix), is_int8 = like[0], len(like) == 2

    def put(stack: decoder.Params, layer: jax.Array, i: jax.Array) -> decoder.Params:
        ours = jnp.transpose(layer, order).reshape(matrix.shape[1:])
        if is_int8:
            values, scale = int8.quantized(ours[None], name)
            parts = {name: values[0], int8.scale_name(name): scale[0]}
        else:
            parts = {name: ours.astype(matrix.dtype)}
        into = jax.lax.dynamic_update_index_in_dim
        return {n: into(stack[n], part, i, 0) for n, part in parts.items()}

    empty = lambda: {n: jnp.zeros(x.shape, x.dtype) for n, x in like}
    return (
        jax.jit(empty, out_shardings=dict(at)),
        jax.jit(put, donate_argnums=0, out_shardings=dict(at)),
    )


def save(c: ModelConfig, params: decoder.Params, directory: Path, dtype: str) -> None:
    """Writes the parameters as safetensors, in shards of at most 5 GB with their index. Adapters
    are merged layer by layer, so that the device holds no second copy of the model.

    Args:
        dtype: of the tensors in the files: "float32" or "bfloat16".
    """
    shards: list[list[tuple[str, int | None, Tensor]]] = [[]]
    size, total, item = 0, 0, jnp.dtype(dtype).itemsize
    for each in each_tensor(tensors(c), c.num_layers):
        num_bytes = math.prod(each[2].shape) * item
        if shards[-1] and size + num_bytes > MAX_SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(each)
        size, total = size + num_bytes, total + num_bytes
    num = len(shards)
    names = [f"model-{n:05d}-of-{num:05d}.safetensors" for n in range(1, num + 1)]
    names = names if num > 1 else [SINGLE]

    def plain(ours: str, layer: int | None) -> jax.Array:
        name = ours.removeprefix("layers.")
        if layer is None or not c.lora_rank or name not in int8.INPUT_AXES:
            return array_of(params, ours, layer)
        parts = {n: x for n, x in params["layers"].items() if n == name or n.startswith(f"{name}_")}
        return lora.merged(c, {n: x[layer : layer + 1] for n, x in parts.items()}, name)[0]

    for file, shard in zip(names, shards):
        write_arrays(plain, shard, directory / file, dtype)
    if num > 1:
        weight_map = {t.name: file for file, shard in zip(names, shards) for _, _, t in shard}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def array_of(params: decoder.Params, ours: str, layer: int | None) -> jax.Array:
    """Returns one of our arrays, or a layer of it; see `each_tensor`."""
    if layer is None:
        return params[ours]
    return params["layers"][ours.removeprefix("layers.")][layer]


def write_arrays(
    array: Callable[[str, int | None], jax.Array],
    shard: Iterable[tuple[str, int | None, Tensor]],
    file: Path,
    dtype: str,
) -> None:
    """Writes arrays into one file of safetensors.

    Args:
        array: returns an array by our name and layer.
        shard: (our name, layer, tensor) of each array, see `each_tensor`.
    """
    values = {}
    for ours, layer, tensor in shard:
        value = np.asarray(jax.device_get(array(ours, layer)))
        value = value.reshape([tensor.shape[axis] for axis in tensor.order])
        value = value.transpose(np.argsort(tensor.order)).astype(jnp.dtype(dtype))
        values[tensor.name] = np.ascontiguousarray(value)
    temporary = file.with_name(f".{file.name}.tmp")
    save_file(values, temporary, metadata={"format": "pt"})
    temporary.chmod(0o644)  # or only its owner could read it
    os.replace(temporary, file)
