"""The device mesh and the layout of arrays on it.

Axes: `data` (replicated parameters), `fsdp` (parameters split, gathered on use), `context` (tokens
of a row split; parameters as over fsdp), `tensor` (heads and feed-forward split). Rows of a batch
lie over data and fsdp together. The table `config.mesh.rules` maps logical axes of parameters to
mesh axes.

Rollouts run on a mesh of the same devices in the same order, whose axes are data and tensor: each
shard of data is an inference replica, of one process or of whole processes.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dapo_jax.config import Config, MeshConfig, ModelConfig
from dapo_jax.models.decoder import init_params, param_axes, param_shapes
from dapo_jax.types import UserError

AXES = ("data", "fsdp", "context", "tensor")
BATCH_AXES = ("data", "fsdp")
AXIS_TYPES = (AxisType.Auto,) * len(AXES)


def mesh_shape(config: MeshConfig, num_devices: int) -> tuple[int, ...]:
    """Returns the sizes of the AXES on `num_devices` devices, -1 filled in.

    Raises:
        UserError: the sizes do not multiply to the number of devices.
    """
    sizes = [getattr(config, axis) for axis in AXES]
    given = math.prod(size for size in sizes if size != -1)
    if -1 in sizes and num_devices % given == 0:
        sizes[sizes.index(-1)] = num_devices // given
    if math.prod(sizes) != num_devices:
        text = ", ".join(f"{name}={size}" for name, size in zip(AXES, sizes))
        number = jax.process_count()
        of = f" of {number} processes" if number > 1 else ""
        raise UserError(
            f"config.mesh ({text}) does not fit {num_devices} device(s){of}: the sizes must "
            f"multiply to {num_devices}. Set one axis to -1 to take the rest, or start on "
            f"{abs(math.prod(sizes))} devices."
        )
    return tuple(sizes)


def fitting(model: ModelConfig, num_devices: int) -> MeshConfig:
    """Returns a layout that always divides the model, for programs without a config."""
    tensor = math.gcd(num_devices, model.num_kv_heads, model.intermediate_size, model.vocab_size)
    fsdp = math.gcd(num_devices // tensor, model.hidden_size)
    return MeshConfig(data=num_devices // tensor // fsdp, fsdp=fsdp, tensor=tensor)


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """Returns the mesh over the given devices (default: all), in an order that fits replicas."""
    devices = jax.devices() if devices is None else devices
    shape = mesh_shape(config, len(devices))
    replica = config.rollout_tensor or shape[-1]
    numbers = list(Counter(device.process_index for device in devices).values())
    if replica > 1 and len(numbers) > 1 and replicas_fit(replica, numbers):
        # JAX's own order follows the links between the chips, across processes too.
        by_process = sorted(devices, key=lambda device: (device.process_index, device.id))
        return _mesh(np.array(by_process).reshape(shape))
    return jax.make_mesh(shape, AXES, axis_types=AXIS_TYPES, devices=devices)


def replicas_fit(size: int, devices_of_processes: Sequence[int]) -> bool:
    """Returns whether replicas of `size` devices lie in one process each, or in whole processes."""
    in_one = not any(devices % size for devices in devices_of_processes)
    alike = len(set(devices_of_processes)) == 1
    return in_one or (alike and size % devices_of_processes[0] == 0)


def _mesh(devices: np.ndarray) -> Mesh:
    return Mesh(devices, AXES, axis_types=AXIS_TYPES)


def axes_of(entry: Any) -> tuple[str, ...]:
    """Returns the mesh axes of an entry of a `PartitionSpec`."""
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)


def parts_of(entry: Any, axis_sizes: Mapping[str, int]) -> int:
    """Returns the number of parts that an entry of a `PartitionSpec` splits an axis into."""
    return math.prod(axis_sizes[axis] for axis in axes_of(entry))


def _is_axes(node: Any) -> bool:
    return isinstance(node, tuple)


def param_specs(model: ModelConfig, mesh: MeshConfig) -> Any:
    """Returns the pytree of `PartitionSpec` of the parameters under `mesh.rules`.

    Axes that the rules send to fsdp lie over context and fsdp together.

    Raises:
        UserError: a logical axis has no rule, or two axes of one array land on one mesh axis.
    """
    rules = dict(mesh.rules)

    def spec(path: Any, axes: tuple[str | None, ...]) -> PartitionSpec:
        name = jax.tree_util.keystr(path)
        for axis in axes:
            if axis is not None and axis not in rules:
                raise UserError(
                    f"config.mesh.rules has no rule for the logical axis {axis!r} of parameter "
                    f"{name}; add ({axis!r}, None) to leave it whole."
                )
        mesh_axes = [rules[axis] if axis is not None else None for axis in axes]
        used = [axis for axis in mesh_axes if axis is not None]
        if len(used) != len(set(used)):
            raise UserError(
                f"config.mesh.rules sends two axes of parameter {name} {axes} to one mesh axis "
                f"({mesh_axes}); give them different mesh axes or None."
            )
        # The order in which the decoder has tokens: gradients come out in their parts.
        both = "fsdp" if mesh.context == 1 else ("context", "fsdp")
        return PartitionSpec(*(both if axis == "fsdp" else axis for axis in mesh_axes))

    return jax.tree_util.tree_map_with_path(spec, param_axes(model), is_leaf=_is_axes)


def check_divides(
    model: ModelConfig,
    config: MeshConfig,
    axis_sizes: Mapping[str, int],
    fields: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Raises UserError unless mesh axes divide the axes that `mesh.rules` lays over them.

    Args:
        fields: fields of config.mesh that the sizes come from, where not named as the axis.
    """
    axes = jax.tree.leaves(param_axes(model), is_leaf=_is_axes)
    specs = jax.tree.leaves(param_specs(model, config))
    shapes = jax.tree_util.tree_leaves_with_path(param_shapes(model))
    for (path, shape), spec, names in zip(shapes, specs, axes, strict=True):
        for size, axis, name in zip(shape.shape, spec, names):
            parts = parts_of(axis, axis_sizes)
            if size % parts == 0:
                continue
            divisor = max(n for n in range(1, parts) if size % n == 0)
            product = " x ".join(f"config.mesh.{fields.get(each, each)}" for each in axes_of(axis))
            raise UserError(
                f"{product} ({parts}) does not divide the axis {name!r} ({size}) of parameter "
                f"{jax.tree_util.keystr(path)}, which config.mesh.rules lays over it. Choose a "
                f"divisor of {size}, such as {divisor}, or send {name!r} to None."
            )


def with_shardings(shapes: Any, shardings: Any) -> Any:
    """Returns the shapes and dtypes of arrays that lie as `shardings` says."""
    of = lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)
    return jax.tree.map(of, shapes, shardings)


def param_shardings(model: ModelConfig, config: MeshConfig, mesh: Mesh) -> Any:
    """Returns the pytree of `NamedSharding` of the parameters.

    Raises:
        UserError: an axis of a parameter is not divisible by the mesh axis it lies on.
    """
    check_divides(model, config, mesh.shape)
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), param_specs(model, config))


def initial_params(model: ModelConfig, config: MeshConfig, mesh: Mesh, seed: int) -> Any:
    """Returns `decoder.init_params`, made in their shards; raises as `param_shardings`."""
    # As data: a key is an array of one device, which other processes do not have.
    data = np.asarray(jax.random.key_data(jax.random.key(seed)))
    make = lambda data: init_params(model, jax.random.wrap_key_data(data))
    return jax.jit(make, out_shardings=param_shardings(model, config, mesh))(data)


class HeadLayout(NamedTuple):
    """The layout on a mesh of the inputs of log-probs and attention."""

    mesh: Mesh
    rows: PartitionSpec  # of arrays [B, T]
    unembed: PartitionSpec  # of the unembedding [V, D]
    heads: str | None = None  # mesh axis of the query heads
    kv_heads: str | None = None

    @property
    def row_axes(self) -> tuple[str, ...]:
        """The mesh axes that tokens are split over."""
        return tuple(axis for entry in self.rows for axis in axes_of(entry))

    @property
    def context(self) -> int:
        """The number of devices that the tokens of a row lie over."""
        return self.mesh.shape["context"]


def head_layout(model: ModelConfig, config: MeshConfig, mesh: Mesh) -> HeadLayout:
    """Returns the layout of rows, unembedding and heads under `mesh.rules`."""
    spec = param_specs(model, config)["embed" if model.tie_embeddings else "unembed"]
    rules = dict(config.rules)
    # Matrices over an axis of the rows are gathered on use: a device has all heads of its rows.
    of = lambda axis: None if axis in BATCH_AXES else axis
    heads, kv_heads = of(rules.get("heads")), of(rules.get("kv_heads"))
    return HeadLayout(mesh, row_sharding(mesh).spec, spec, heads, kv_heads)


def check_batch_shapes(config: Config, axis_sizes: Mapping[str, int]) -> None:
    """Raises UserError unless rows, their tokens, slots and prompts split evenly over the mesh."""
    rows, context = parts_of(BATCH_AXES, axis_sizes), axis_sizes["context"]
    of_rows = rows, "config.mesh.data x config.mesh.fsdp"
    of_slots = of_rows
    if context > 1:
        of_slots = rows * context, f"{of_rows[1]} x config.mesh.context"
    replica = config.mesh.rollout_tensor
    if replica is not None:
        devices = math.prod(axis_sizes.values())
        if devices % replica:
            raise UserError(
                f"config.mesh.rollout_tensor ({replica}) must divide the devices ({devices})."
            )
        of_slots = devices // replica, f"the devices ({devices}) / config.mesh.rollout_tensor"
        sizes, fields = {**axis_sizes, "tensor": replica}, {"tensor": "rollout_tensor"}
        check_divides(config.model, config.mesh, sizes, fields)
    r = config.rollout
    check_row_shapes(config.train.rows_per_micro_batch, config.train.row_tokens, axis_sizes)
    check_multiples(
        ("rollout.slots", r.slots, of_slots),
        ("rollout.prefill_prompts", r.prefill_prompts, of_slots),
    )


def check_row_shapes(
    rows_per_micro_batch: int, row_tokens: int, axis_sizes: Mapping[str, int]
) -> None:
    """Raises UserError unless packed rows and their tokens split evenly over the mesh."""
    rows, context = parts_of(BATCH_AXES, axis_sizes), axis_sizes["context"]
    of_rows = rows, "config.mesh.data x config.mesh.fsdp"
    # See `zigzag`.
    of_tokens = (2 * context, "2 x config.mesh.context") if context > 1 else (1, "")
    check_multiples(
        ("train.rows_per_micro_batch", rows_per_micro_batch, of_rows),
        ("train.row_tokens", row_tokens, of_tokens),
    )


def check_multiples(*entries: tuple[str, int, tuple[int, str]]) -> None:
    """Raises UserError unless each (field, value) is a multiple of its (number, its name)."""
    for field, value, (shards, product) in entries:
        if value % shards:
            raise UserError(
                f"config.{field} ({value}) must be a multiple of {product} = {shards}; nearest: "
                f"{value + shards - value % shards}."
            )


def row_sharding(mesh: Mesh, batch_dim: int = 0) -> NamedSharding:
    """Returns the sharding of rows [..., B, T]: B over data and fsdp, T over context.

    Args:
        batch_dim: the dimension of B.
    """
    return NamedSharding(mesh, PartitionSpec(*[None] * batch_dim, BATCH_AXES, "context"))


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of an array that is whole on every device."""
    return NamedSharding(mesh, PartitionSpec())


def rollout_shape(sizes: Mapping[str, int], replica: int | None) -> Mapping[str, int]:
    """Returns the sizes of `rollout_mesh` on a mesh of these sizes; raises as it does."""
    number, devices = replica or sizes["tensor"], math.prod(sizes.values())
    if sizes["context"] == 1 and sizes["tensor"] == number:
        return sizes
    if devices % number:
        raise UserError(
            f"config.mesh.rollout_tensor ({number}) must divide the number of devices "
            f"({devices}): the devices of an inference replica."
        )
    return dict(zip(AXES, (devices // number, 1, 1, number)))


def rollout_mesh(mesh: Mesh, replica: int | None) -> Mesh:
    """Returns the mesh of rollouts: that of training if it fits, else the same devices reshaped.

    Args:
        replica: config.mesh.rollout_tensor, devices of an inference replica.

    Raises:
        UserError: a replica is not a part of the devices.
    """
    sizes = mesh.shape
    shape = rollout_shape(sizes, replica)
    return mesh if shape is sizes else _mesh(mesh.devices.reshape(tuple(shape.values())))


def own_mesh(mesh: Mesh) -> Mesh:
    """Returns the replicas of a rollout's mesh that this process has, or the one it is part of.

    Raises:
        UserError: a replica has some devices of this process and some of others.
    """
    if not mesh.is_multi_process:
        return mesh
    tensor, me = mesh.shape["tensor"], jax.process_index()
    processes = np.vectorize(lambda device: device.process_index)(mesh.devices).reshape(-1, tensor)
    own = (processes == me).any(axis=1)
    members = np.unique(processes[own])
    if len(members) > 1 and np.isin(processes, members).sum() > tensor:
        raise UserError(
            f"config.mesh.rollout_tensor or, without it, config.mesh.tensor ({tensor}) must divide "
            f"the devices of a process ({jax.local_device_count()}) or be a multiple of them, and "
            "all processes must have as many: an inference replica lies in one process or in whole "
            "processes."
        )
    return _mesh(mesh.devices.reshape(-1, tensor)[own].reshape(-1, 1, 1, tensor))


def num_processes(mesh: Mesh) -> int:
    """Returns the number of processes that have devices of the mesh."""
    return len({device.process_index for device in mesh.devices.flat})


def reshard_steps(model: ModelConfig, config: MeshConfig, mesh: Mesh, replica: int) -> list[Any]:
    """Returns the layouts of parameters on their way from training to replicas of another size.

    XLA's own partitioner gathers a whole matrix to turn a split of its width into one of its heads.
    So each device first gives the others of its shard their heads of its part of the width, and
    the shards exchange those. None stands for a parameter that needs no step.
    """
    data, fsdp, context, tensor = mesh.devices.shape
    devices = fsdp * context * tensor
    if replica == tensor or devices % replica:
        return []
    shape = data, devices // replica, replica
    via = Mesh(mesh.devices.reshape(shape), ("data", "shard", "part"))
    specs, shapes = param_specs(model, config), param_shapes(model)

    def step(**axes: Any) -> Any:
        def one(spec: PartitionSpec, x: jax.ShapeDtypeStruct) -> NamedSharding | None:
            split = {axis: size for axis, size in zip(spec, x.shape) if axis is not None}
            if split.keys() != {"fsdp", "tensor"} or split["fsdp"] % devices:
                return None
            entries = [None if axis is None else axes.get(axis) for axis in spec]
            return NamedSharding(via, PartitionSpec(*entries))

        return jax.tree.map(one, specs, shapes)

    return [step(fsdp=("shard", "part")), step(fsdp="shard", tensor="part")]


def to_mesh(arrays: Any, sharding: NamedSharding) -> Any:
    """Puts host arrays, which all processes have, where the sharding says."""
    put = lambda x: jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])
    return jax.tree.map(put, arrays)


def to_host(x: jax.Array) -> np.ndarray:
    """Returns the whole array, whichever process has its parts."""
    if x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def own_part(arrays: Any, shardings: Any) -> Any:
    """Returns arrays that are whole in this process on its own mesh, without a copy.

    Args:
        shardings: on that mesh.
    """

    def own(x: jax.Array, sharding: NamedSharding) -> jax.Array:
        parts = {shard.device: shard.data for shard in x.addressable_shards}
        devices = sharding.addressable_devices_indices_map(x.shape)
        return jax.make_array_from_single_device_arrays(
            x.shape, sharding, [parts[device] for device in devices]
        )

    return jax.tree.map(own, arrays, shardings)


def copied_bytes(arrays: Any, of: Any) -> int:
    """Returns the bytes on this process's devices of arrays that are copies.

    Args:
        of: the originals; an array of the same dtype and layout is the original itself.
    """

    def size(x: jax.Array, y: jax.Array) -> int:
        # By device: of several processes each has arrays of its own mesh.
        own, others = (a.sharding.addressable_devices_indices_map(a.shape) for a in (x, y))
        if x.dtype == y.dtype and all(others.get(d) == index for d, index in own.items()):
            return 0
        return local_bytes(x)

    return sum(jax.tree.leaves(jax.tree.map(size, arrays, of)))


def local_bytes(arrays: Any) -> int:
    """Returns the bytes of arrays on this process's devices."""

    def size(x: jax.Array) -> int:
        shard = math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        return len(x.sharding.addressable_devices) * shard

    return sum(map(size, jax.tree.leaves(arrays)))


def bytes_per_device(shapes: Any, specs: Any, axis_sizes: Mapping[str, int]) -> int:
    """Returns the bytes that one device holds of arrays of these shapes under these specs."""

    def size(shape: jax.ShapeDtypeStruct, spec: PartitionSpec) -> int:
        parts = math.prod(parts_of(entry, axis_sizes) for entry in spec)
        return math.ceil(np.prod(shape.shape, dtype=np.int64) / parts) * shape.dtype.itemsize

    return sum(jax.tree.leaves(jax.tree.map(size, shapes, specs)))
