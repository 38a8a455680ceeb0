"""Weights of Hugging Face checkpoints: safetensors in, straight into sharded arrays, and out.

A tensor is read slice by slice: each process reads what its own devices hold. Our layers lie
stacked in one array, so a layer at a time is read, put on the devices in the layout of the file and
written into its place there; what the host holds at any moment is at most one tensor's slices.
"""

import errno
import functools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
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
from dapo_jax.models import decoder
from dapo_jax.types import UserError
from dapo_jax.utils import hf_hub
from dapo_jax.utils.progress import duration

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
REPORT_EVERY_SECONDS = 10.0
MAX_SHARD_BYTES = 5 * 2**30
READ_BYTES = 4 * 2**20
# The dtypes of weights by their names in safetensors' headers.
DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
}
# Present in some checkpoints and a function of the config.
COMPUTED = ("rotary_emb.inv_freq", "masked_bias", "attn.bias")


class Tensor(NamedTuple):
    """How one of our arrays, or a layer of it, lies in a checkpoint."""

    name: str  # with {i} for the number of the layer
    shape: tuple[int, ...]  # there
    order: tuple[int, ...]  # axes there, in the order in which they are ours
    axes: tuple[int, ...]  # which of our axes each axis there begins with, for the sharding


def tensors(c: ModelConfig) -> dict[str, Tensor]:
    """Where each of our arrays comes from, by its name; those of layers as `layers.name`."""
    D, N, K, H, F, V = (
        c.hidden_size,
        c.num_heads,
        c.num_kv_heads,
        c.head_dim,
        c.intermediate_size,
        c.vocab_size,
    )
    layer, attention, mlp = "model.layers.{i}.", "self_attn.", "mlp."

    def linear(name: str, out: int, into: int, ours: tuple[int, int]) -> Tensor:
        # A linear layer is [out, in] there and in, out here; `ours` are our axes of (out, in).
        return Tensor(f"{layer}{name}.weight", (out, into), (1, 0), ours)

    def vector(name: str, size: int) -> Tensor:
        return Tensor(f"{layer}{name}", (size,), (0,), (0,))

    found = {
        "embed": Tensor("model.embed_tokens.weight", (V, D), (0, 1), (0, 1)),
        "final_norm": Tensor("model.norm.weight", (D,), (0,), (0,)),
        "layers.attention_norm": vector("input_layernorm.weight", D),
        "layers.mlp_norm": vector("post_attention_layernorm.weight", D),
        "layers.q": linear(f"{attention}q_proj", N * H, D, (1, 0)),
        "layers.k": linear(f"{attention}k_proj", K * H, D, (1, 0)),
        "layers.v": linear(f"{attention}v_proj", K * H, D, (1, 0)),
        "layers.o": linear(f"{attention}o_proj", D, N * H, (2, 0)),
        "layers.gate": linear(f"{mlp}gate_proj", F, D, (1, 0)),
        "layers.up": linear(f"{mlp}up_proj", F, D, (1, 0)),
        "layers.down": linear(f"{mlp}down_proj", D, F, (1, 0)),
    }
    if c.qkv_bias:
        for name, size in (("q", N * H), ("k", K * H), ("v", K * H)):
            found[f"layers.{name}_bias"] = vector(f"{attention}{name}_proj.bias", size)
    if c.qk_norm:
        for name in ("q", "k"):
            found[f"layers.{name}_norm"] = vector(f"{attention}{name}_norm.weight", H)
    if not c.tie_embeddings:
        found["unembed"] = Tensor("lm_head.weight", (V, D), (0, 1), (0, 1))
    return found


def expected_shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that a checkpoint of the model must hold."""
    shapes = {}
    for ours, tensor in tensors(c).items():
        for i in range(c.num_layers if ours.startswith("layers.") else 1):
            shapes[tensor.name.format(i=i)] = tensor.shape
    return shapes


def check_tensors(c: ModelConfig, found: Mapping[str, tuple[int, ...]], place: Any) -> None:
    """Every tensor must be used and every parameter filled.

    Args:
        found: shape of each tensor of the checkpoint.

    Raises:
        UserError: lists what is missing, surplus or of another shape.
    """
    wanted = expected_shapes(c)
    ignored = {n for n in found if n.endswith(COMPUTED)}
    # A tied checkpoint may hold its one matrix under both names.
    ignored |= {"lm_head.weight"} if c.tie_embeddings else set()
    problems = {
        "missing": sorted(wanted.keys() - found.keys()),
        "not known": sorted(found.keys() - wanted.keys() - ignored),
        "of another shape": [
            f"{name} ({list(found[name])}, {list(shape)} is wanted)"
            for name, shape in wanted.items()
            if name in found and tuple(found[name]) != shape
        ],
    }
    told = [
        f"{len(names)} {what}: {', '.join(names[:6])}{', ...' if len(names) > 6 else ''}"
        for what, names in problems.items()
        if names
    ]
    if told:
        raise UserError(
            f"config.model.path: {place} does not hold the tensors of its config.json: "
            + "; ".join(told)
            + ". Is the download complete, and config.json its own?"
        )


class _Tensor(NamedTuple):
    """Where the bytes of a tensor lie."""

    file: str
    offset: int
    dtype: np.dtype
    shape: tuple[int, ...]


class _Files:
    """The safetensors files of a directory.

    The library checks their headers. The bytes are read here: its slices hold Python's lock for as
    long as the storage takes, and then no heartbeat of this process goes out.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self.opened: dict[str, Any] = {}
        index = directory / INDEX
        if index.exists():
            try:
                self.file_of = dict(json.loads(index.read_text())["weight_map"])
            except (OSError, ValueError, LookupError, TypeError) as error:
                raise UserError(f"config.model.path: {index} cannot be read: {error}.") from error
        elif (directory / SINGLE).exists():
            self.file_of = dict.fromkeys(self._open(SINGLE).keys(), SINGLE)
        else:
            raise UserError(
                f"config.model.path: {directory} has neither {INDEX} nor {SINGLE}: there are no "
                "weights in it (only safetensors are read)."
            )

    def _open(self, file: str) -> Any:
        if file not in self.opened:
            place = self.directory / file
            try:
                self.opened[file] = safetensors.safe_open(place, "np").__enter__()
            except (OSError, safetensors.SafetensorError) as error:
                raise UserError(
                    f"config.model.path: the shard {place} is missing, cut short or damaged: "
                    f"{error}. Fetch it again."
                ) from error
        return self.opened[file]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every tensor."""
        found = {}
        for name, file in self.file_of.items():
            opened = self._open(file)
            if name not in opened.keys():
                raise UserError(
                    f"config.model.path: {self.directory / file} lacks {name}, which {INDEX} puts "
                    "there. Fetch both again."
                )
            found[name] = tuple(opened.get_slice(name).get_shape())
        return found

    @functools.cached_property
    def tensors(self) -> dict[str, _Tensor]:
        """Every tensor by its name, from the headers."""
        found = {}
        for file in dict.fromkeys(self.file_of.values()):
            with open(self.directory / file, "rb") as opened:
                length = int.from_bytes(opened.read(8), "little")
                header = json.loads(opened.read(length))
            for name, entry in header.items():
                if name != "__metadata__":
                    if entry["dtype"] not in DTYPES:
                        raise UserError(
                            f"config.model.path: {name} in {self.directory / file} has dtype "
                            f"{entry['dtype']}; known are {', '.join(DTYPES)}."
                        )
                    start = 8 + length + entry["data_offsets"][0]
                    dtype = np.dtype(DTYPES[entry["dtype"]])
                    found[name] = _Tensor(file, start, dtype, tuple(entry["shape"]))
        return found

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """A slice of a tensor of one or two axes, in reads of at most READ_BYTES that release
        Python's lock."""
        tensor = self.tensors[name]
        first, last, _ = index[0].indices(tensor.shape[0])
        row = tensor.dtype.itemsize * int(np.prod(tensor.shape[1:]))
        rest = [len(range(*part.indices(n))) for part, n in zip(index[1:], tensor.shape[1:])]
        out = np.empty((last - first, *rest), tensor.dtype)
        rows = max(1, READ_BYTES // row)
        with open(self.directory / tensor.file, "rb", buffering=0) as file:
            for start in range(first, last, rows):
                stop = min(last, start + rows)
                piece = np.empty((stop - start, *tensor.shape[1:]), tensor.dtype)
                _fill(file, tensor.offset + start * row, piece)
                out[start - first : stop - first] = piece[(slice(None), *index[1:])]
        return out


def _fill(file: Any, offset: int, piece: np.ndarray) -> None:
    """Fills an array from a file. Raises OSError where the file ends before."""
    left = piece.reshape(-1).view(np.uint8).data
    file.seek(offset)
    while left:
        count = file.readinto(left[:READ_BYTES])
        if not count:
            raise OSError(errno.EIO, "the file has become shorter", file.name)
        left = left[count:]


def load(
    c: ModelConfig,
    shardings: decoder.Params,
    *,
    say: Callable[[str], None] = lambda _: None,
    check_stop: Callable[[], None] = lambda: None,
) -> decoder.Params:
    """The parameters of the checkpoint of `c.path`, in `c.param_dtype`, laid out as asked.

    Args:
        shardings: of every parameter, see `sharding.param_shardings`.

    Raises:
        UserError: config.json, index or files do not fit the model or cannot be read.
    """
    assert c.path is not None
    hf_config.check(c)
    directory = hf_hub.model_directory(c.path, ["*.json", "*.safetensors"])
    files = _Files(directory)
    check_tensors(c, files.shapes(), directory)
    shapes, table = decoder.param_shapes(c), tensors(c)
    loader = _Loader(c, files, say, check_stop)
    params: decoder.Params = {
        name: loader.one(table[name], shape, shardings[name])
        for name, shape in shapes.items()
        if name != "layers"
    }
    params["layers"] = {
        name: loader.stack(table[f"layers.{name}"], shape, shardings["layers"][name])
        for name, shape in shapes["layers"].items()
    }
    jax.block_until_ready(params)
    say(f"{c.path}: {loader.bytes / 1e9:.1f} GB in {duration(time.monotonic() - loader.begun)}")
    return params


class _Loader:
    def __init__(
        self,
        c: ModelConfig,
        files: _Files,
        say: Callable[[str], None],
        check_stop: Callable[[], None],
    ):
        self.c, self.files, self.say, self.check_stop = c, files, say, check_stop
        self.bytes = 0  # read so far
        self.begun = self.reported = time.monotonic()
        wanted = [tensor.shape for tensor in _every(c)]
        self.total = sum(int(np.prod(shape)) for shape in wanted)
        self.done = 0

    def one(self, tensor: Tensor, like: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.Array:
        """An array that is one tensor."""
        there = self._there(tensor, tensor.name, sharding, 0)
        return _as_ours(tensor.order, like.shape, like.dtype, sharding)(there)

    def stack(
        self, tensor: Tensor, like: jax.ShapeDtypeStruct, sharding: NamedSharding
    ) -> jax.Array:
        """An array of all layers, of which each is a tensor."""
        empty, put = _stacking(tensor.order, like.shape, like.dtype, sharding)
        stack = empty()
        for i in range(self.c.num_layers):
            layer = self._there(tensor, tensor.name.format(i=i), sharding, 1)
            stack = put(stack, layer, np.int32(i))
            # Or the host would read ahead, and hold what the devices have not taken yet.
            jax.block_until_ready(stack)
        return stack

    def _there(self, tensor: Tensor, name: str, ours: NamedSharding, skip: int) -> jax.Array:
        """The tensor on the devices, in the shape it has in the file.

        Args:
            ours: the sharding of the array that it is for.
            skip: axes of that array that the tensor lacks: 1 for the layers.
        """
        self.check_stop()
        parts = [*ours.spec, *[None] * 8]
        spec = PartitionSpec(*(parts[axis + skip] for axis in tensor.axes))

        def read(index: Any) -> np.ndarray:
            value = self.files.read(name, index)
            self.bytes += value.nbytes
            return value

        sharding = NamedSharding(ours.mesh, spec)
        there = jax.make_array_from_callback(tensor.shape, sharding, read)
        self.done += int(np.prod(tensor.shape))
        now = time.monotonic()
        if now - self.reported > REPORT_EVERY_SECONDS:
            self.reported = now
            left = (now - self.begun) * (self.total - self.done) / self.done
            self.say(f"  {100 * self.done / self.total:.0f} % of the weights read, about "
                     f"{duration(left)} left")  # fmt: skip
        return there


# The programs are kept, so that a second checkpoint of the same shapes compiles nothing.
@functools.cache
def _as_ours(order: tuple[int, ...], shape: tuple[int, ...], dtype: Any, to: NamedSharding) -> Any:
    """The program that turns a tensor as it is in the file into ours."""
    ours = lambda x: jnp.transpose(x, order).reshape(shape).astype(dtype)
    return jax.jit(ours, out_shardings=to)


@functools.cache
def _stacking(
    order: tuple[int, ...], shape: tuple[int, ...], dtype: Any, to: NamedSharding
) -> tuple[Any, Any]:
    """The programs that make an empty stack of layers, and put one into it."""

    def put(stack: jax.Array, layer: jax.Array, i: jax.Array) -> jax.Array:
        ours = jnp.transpose(layer, order).reshape(shape[1:]).astype(dtype)
        return jax.lax.dynamic_update_index_in_dim(stack, ours, i, 0)

    return (
        jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=to),
        jax.jit(put, donate_argnums=0, out_shardings=to),
    )


def _every(c: ModelConfig) -> Iterator[Tensor]:
    """Each tensor of the checkpoint."""
    for name, tensor in tensors(c).items():
        for i in range(c.num_layers if name.startswith("layers.") else 1):
            yield tensor._replace(name=tensor.name.format(i=i))


def save(c: ModelConfig, params: decoder.Params, directory: Path, dtype: str) -> None:
    """Writes the parameters as safetensors, in shards of at most 5 GB with their index.

    Args:
        dtype: of the tensors in the files: "float32" or "bfloat16".
    """
    shards: list[list[Tensor]] = [[]]
    size, item = 0, jnp.dtype(dtype).itemsize
    for tensor in _every(c):
        num_bytes = int(np.prod(tensor.shape)) * item
        if shards[-1] and size + num_bytes > MAX_SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += num_bytes
    names = [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    names = [SINGLE] if len(shards) == 1 else names
    ours = {tensor.name: name for name, tensor in tensors(c).items()}
    for file, shard in zip(names, shards):
        values = {}
        for tensor in shard:
            pattern = _pattern(tensor.name)
            value = _array(params, ours[pattern], _layer(tensor.name))
            back = np.argsort(tensor.order)
            values[tensor.name] = np.ascontiguousarray(
                _merged(value, tensor).transpose(back).astype(jnp.dtype(dtype))
            )
        temporary = directory / f".{file}.tmp"
        save_file(values, temporary, metadata={"format": "pt"})
        temporary.chmod(0o644)  # or only its owner could read it
        os.replace(temporary, directory / file)
    if len(names) > 1:
        total = sum(int(np.prod(t.shape)) for t in _every(c)) * item
        index = {
            "metadata": {"total_size": total},
            "weight_map": {t.name: f for f, shard in zip(names, shards) for t in shard},
        }
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _pattern(name: str) -> str:
    parts = name.split(".")
    return ".".join("{i}" if part.isdigit() else part for part in parts)


def _layer(name: str) -> int | None:
    return next((int(part) for part in name.split(".") if part.isdigit()), None)


def _array(params: decoder.Params, name: str, layer: int | None) -> np.ndarray:
    if layer is None:
        return np.asarray(jax.device_get(params[name]))
    return np.asarray(jax.device_get(params["layers"][name.removeprefix("layers.")][layer]))


def _merged(value: np.ndarray, tensor: Tensor) -> np.ndarray:
    """Our axes joined to the two of a matrix there, in our order."""
    return value.reshape(tuple(tensor.shape[axis] for axis in tensor.order))
