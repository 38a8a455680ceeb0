"""Memory that a run holds on a device, by the shapes of its arrays alone.

Setup and launch/plan.py choose the size of an inference replica by it. Temporaries of the programs,
activations above all, are known to a compiler only: launch/plan.py.
"""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from dapo_jax.config import Config
from dapo_jax.models import decoder, lora
from dapo_jax.models.sharding import (
    AXES,
    bytes_per_device,
    check_divides,
    mesh_shape,
    param_specs,
    parts_of,
    replicas_fit,
    rollout_shape,
)
from dapo_jax.rollout.engine_config import make_engine_config
from dapo_jax.rollout.programs import rollout_dtypes, rollout_layout, unrolls
from dapo_jax.types import UserError

GIB = 2**30
HELD_SHARE = 0.9  # of the memory, for what is held in rollouts; the rest is for temporaries


class Held(NamedTuple):
    """Bytes of a device by what they hold; entries of 0 are left out."""

    always: dict[str, int]
    rollout: dict[str, int]  # in addition during rollouts
    update: dict[str, int]  # in addition during updates, without activations

    @property
    def rollout_bytes(self) -> int:
        return sum(self.always.values()) + sum(self.rollout.values())

    @property
    def update_bytes(self) -> int:
        return sum(self.always.values()) + sum(self.update.values())


def held(
    config: Config, sizes: Mapping[str, int], *, training: bool = True, platform: str = "tpu"
) -> Held:
    """Returns what a run holds on a mesh of these axis sizes.

    Args:
        training: False: the run evaluates only.
        platform: of the devices; see `programs.unrolls`.

    Raises:
        UserError: the KV cache of `config.rollout.cache_gib` does not hold one sequence.
    """
    shapes, specs = decoder.param_shapes(config.model), param_specs(config.model, config.mesh)
    (shapes, frozen), (specs, frozen_specs) = lora.split(shapes), lora.split(specs)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), shapes)
    parameters = bytes_per_device(shapes, specs, sizes)
    gradients = bytes_per_device(like, specs, sizes)  # as large as each of the two moments
    copy, cache = rollout_copy_and_cache(config, sizes, platform)
    always, update = {"parameters": parameters}, {}
    always["frozen parameters"] = bytes_per_device(frozen, frozen_specs, sizes)
    if training:
        always["optimiser state"] = 2 * gradients
        always["reference"] = parameters * config.objective.reads_reference
        always["critic with optimiser"] = (parameters + 2 * gradients) * (config.critic is not None)
        update["gradients"] = gradients
    rollout = {"rollout copy of the parameters": copy, "KV cache": cache}
    nonzero = lambda parts: {name: size for name, size in parts.items() if size}
    return Held(nonzero(always), nonzero(rollout), update)


def rollout_copy_and_cache(
    config: Config, sizes: Mapping[str, int], platform: str = "tpu"
) -> tuple[int, int]:
    """Returns the bytes of the rollout copy of the parameters, without arrays that are the
    trainer's own, and those of the KV cache."""
    c = config.model
    rollout_sizes = rollout_shape(sizes, config.mesh.rollout_tensor)
    parts = lambda spec, sizes: [parts_of(entry, sizes) for entry in spec]

    def size(
        x: jax.ShapeDtypeStruct, trained: jax.ShapeDtypeStruct, to: PartitionSpec, at: PartitionSpec
    ) -> int:
        is_shared = x.dtype == trained.dtype and parts(to, rollout_sizes) == parts(at, sizes)
        return 0 if is_shared else bytes_per_device(x, to, rollout_sizes)

    shapes: Any = decoder.param_shapes(c)
    copy = jax.eval_shape(functools.partial(rollout_dtypes, c), shapes)
    specs = param_specs(c, rollout_layout(config.mesh)), param_specs(c, config.mesh)
    copy_bytes = sum(jax.tree.leaves(jax.tree.map(size, copy, shapes, *specs)))
    if unrolls(platform, c):  # decoding holds the layers once more
        copy_bytes += bytes_per_device(copy["layers"], specs[0]["layers"], rollout_sizes)
    # The pages of every kernel take the same bytes; whether it takes the model is checked later.
    plain = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, kernel="xla"))
    prompt = config.data.max_prompt_tokens
    engine_config = make_engine_config(plain, rollout_sizes, prompt, stop_tokens=(), platform="cpu")
    return copy_bytes, engine_config.pages_bytes(engine_config.shard_pages)


def device_bytes(devices: Sequence[Any]) -> int | None:
    """Returns the memory that programs may use of a device; None where it is not reported, as on
    CPUs."""
    return (devices[0].memory_stats() or {}).get("bytes_limit")


def peak_bytes(devices: Sequence[Any]) -> int | None:
    """Returns the most that any of these devices has held so far; None where it is not
    reported."""
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in devices]
    return max((peak for peak in peaks if peak is not None), default=None)


def with_replica_size(
    config: Config,
    devices: Sequence[Any],
    memory_bytes: int | None,
    say: Callable[[str], None],
    *,
    training: bool = True,
    refuse: bool = True,
) -> Config:
    """Returns the config with the fewest devices to an inference replica that hold its rollouts:
    `mesh.tensor` or more. A config that sets `mesh.rollout_tensor` is returned as it is.

    Args:
        memory_bytes: of a device; None: not known, and the config is returned as it is.
        say: gets a line where more than `mesh.tensor` are needed.
        training: see `held`.
        refuse: False: where no number holds it, the one that comes closest is taken.

    Raises:
        UserError: no number holds it; or the mesh does not fit the devices.
    """
    if config.mesh.rollout_tensor is not None or memory_bytes is None:
        return config
    sizes: dict[str, int] = dict(zip(AXES, mesh_shape(config.mesh, len(devices))))
    tensor, by_process = sizes["tensor"], Counter(device.process_index for device in devices)
    budgets: dict[int, Held] = {}  # by number of devices
    error: UserError | None = None
    for number in range(tensor, len(devices) + 1):
        if number > tensor and not _is_possible(config, sizes, number, list(by_process.values())):
            continue
        try:
            found = held(
                _with_rollout_tensor(config, number),
                sizes,
                training=training,
                platform=devices[0].platform,
            )
        except UserError as refused:  # a cache that does not hold one sequence of so many heads
            error = refused
            continue
        budgets[number] = found
        if found.rollout_bytes <= HELD_SHARE * memory_bytes:
            break
    if not budgets:
        assert error is not None
        raise error
    best = min(budgets, key=lambda number: budgets[number].rollout_bytes)
    found = budgets[best]
    needed = f"{size_text(found.rollout_bytes)} of {size_text(memory_bytes)}"
    if found.rollout_bytes > memory_bytes and refuse:
        parts = (found.always | found.rollout).items()
        raise UserError(
            "config.rollout: each device of an inference replica of "
            f"{best} would hold {', '.join(f'{name} {size_text(size)}' for name, size in parts)}: "
            f"{needed}. Set config.rollout.cache_gib or fewer config.rollout.slots, or take more "
            "devices."
        )
    if best == tensor:
        return config
    say(
        f"{best} devices form an inference replica, and each holds {needed}; with {tensor} "
        "(config.mesh.tensor) it would not fit"
    )
    return _with_rollout_tensor(config, best)


def _is_possible(
    config: Config, sizes: Mapping[str, int], number: int, by_process: Sequence[int]
) -> bool:
    """Returns whether so many devices can form a replica: processes, heads and slots divide."""
    devices, r = math.prod(sizes.values()), config.rollout
    if devices % number or not replicas_fit(number, by_process):
        return False
    if r.slots % (devices // number) or r.prefill_prompts % (devices // number):
        return False
    try:
        check_divides(config.model, config.mesh, {**sizes, "tensor": number})
    except UserError:
        return False
    return True


def _with_rollout_tensor(config: Config, number: int) -> Config:
    return dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, rollout_tensor=number))


def size_text(num_bytes: int) -> str:
    """Returns a size in GiB, or in MiB where it is small."""
    if num_bytes >= GIB / 10:
        return f"{num_bytes / GIB:.2f} GiB"
    return f"{num_bytes / 2**20:.2f} MiB"
