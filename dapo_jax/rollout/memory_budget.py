"""What a run holds of a device's memory, by the shapes of its arrays alone.

What the programs need beside it, activations above all, only a compiler knows: launch/plan.py. Not
counted is what CPUs alone have, which do not say their memory: the layers once more, for decoding.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from dapo_jax.config import Config
from dapo_jax.models import decoder
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
from dapo_jax.rollout.programs import rollout_dtypes, rollout_layout
from dapo_jax.rollout.spec import engine_spec
from dapo_jax.types import UserError

GIB = 2**30
# Of the memory, for what is held while responses are drawn; the rest is for temporaries.
SHARE_HELD = 0.9


class Held(NamedTuple):
    """Bytes of a device, by what they are of; what is 0 is left out."""

    always: dict[str, int]
    drawing: dict[str, int]  # beside that, while responses are drawn
    updating: dict[str, int]  # beside that, while the policy is updated; without activations

    @property
    def drawing_bytes(self) -> int:
        return sum(self.always.values()) + sum(self.drawing.values())

    @property
    def updating_bytes(self) -> int:
        return sum(self.always.values()) + sum(self.updating.values())


def held(config: Config, sizes: Mapping[str, int], *, training: bool = True) -> Held:
    """What a run holds on a mesh of these sizes.

    Args:
        training: False: it evaluates only.

    Raises:
        UserError: the KV cache of `config.rollout.cache_gib` does not hold one sequence.
    """
    c = config.model
    shapes, specs = decoder.param_shapes(c), param_specs(c, config.mesh)
    of_device = lambda tree: bytes_per_device(tree, specs, sizes)
    like = lambda dtype: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), shapes)
    parameters = of_device(shapes)
    moments = 2 * of_device(like(jnp.dtype(config.optimizer.moments_dtype)))
    copy, cache = rollout_bytes(config, sizes)
    always, updating = {"parameters": parameters}, {}
    if training:
        o = config.objective
        always["optimiser state"] = moments
        always["reference"] = parameters * bool(o.kl_coefficient or o.reward_kl_coefficient)
        always["critic with optimiser"] = (parameters + moments) * (config.critic is not None)
        updating["gradients"] = of_device(like(jnp.float32))
    drawing = {"parameters as drawn from": copy, "KV cache": cache}
    there = lambda parts: {name: size for name, size in parts.items() if size}
    return Held(there(always), there(drawing), updating)


def rollout_bytes(config: Config, sizes: Mapping[str, int]) -> tuple[int, int]:
    """(the copy of the parameters that responses are drawn from, 0 where it is the trainer's own;
    the KV cache), of a device.

    Raises:
        UserError: as `held`.
    """
    c = config.model
    drawn_on = rollout_shape(sizes, config.mesh.rollout_tensor)
    layout = rollout_layout(config.mesh)
    parts_each = lambda spec, over: [parts_of(entry, over) for entry in spec]
    shapes: Any = decoder.param_shapes(c)
    rolled = jax.eval_shape(lambda p: rollout_dtypes(p, jnp.dtype(c.compute_dtype)), shapes)

    def size(
        x: jax.ShapeDtypeStruct, of: jax.ShapeDtypeStruct, spec: PartitionSpec, at: PartitionSpec
    ) -> int:
        parts, before = parts_each(spec, drawn_on), parts_each(at, sizes)
        same = x.dtype == of.dtype and parts == before  # the trainer's own array
        return 0 if same else bytes_per_device(x, spec, drawn_on)

    specs = param_specs(c, layout), param_specs(c, config.mesh)
    copy = sum(jax.tree.leaves(jax.tree.map(size, rolled, shapes, *specs)))
    # Every kernel keeps as many bytes a token, and those that refuse a model refuse it elsewhere.
    plain = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, kernel="xla"))
    prompt = config.data.max_prompt_tokens
    spec = engine_spec(plain, drawn_on, prompt, stop_tokens=(), platform="cpu")
    return copy, spec.pages_bytes(spec.shard_pages)


def device_bytes(devices: Sequence[Any]) -> int | None:
    """Memory that programs may have of a device; None where it does not say, as CPUs."""
    return (devices[0].memory_stats() or {}).get("bytes_limit")


def peak_bytes(devices: Sequence[Any]) -> int | None:
    """The most that any of these devices has held so far; None where they do not say."""
    said = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in devices]
    return max((size for size in said if size is not None), default=None)


def with_teams(
    config: Config,
    devices: Sequence[Any],
    memory_bytes: int | None,
    say: Callable[[str], None],
    *,
    training: bool = True,
    refuse: bool = True,
) -> Config:
    """The config with the fewest devices that draw responses together, from `mesh.tensor` on, whose
    memory holds what a run holds while it draws; as it is, where it says how many, or where the
    memory is not known.

    Args:
        say: told where more than `mesh.tensor` are needed.
        training: see `held`.
        refuse: False: where no number holds it, with the one that does best.

    Raises:
        UserError: no number holds it; or the mesh does not fit the devices.
    """
    if config.mesh.rollout_tensor is not None or memory_bytes is None:
        return config
    sizes: dict[str, int] = dict(zip(AXES, mesh_shape(config.mesh, len(devices))))
    of_processes = list(Counter(device.process_index for device in devices).values())
    needs: dict[int, Held] = {}
    refused: UserError | None = None
    for number in range(sizes["tensor"], len(devices) + 1):
        if number > sizes["tensor"] and not _possible(config, sizes, number, of_processes):
            continue
        try:
            needs[number] = held(_together(config, number), sizes, training=training)
        except UserError as error:  # a cache that does not hold one sequence of so many heads
            refused = error
            continue
        if needs[number].drawing_bytes <= SHARE_HELD * memory_bytes:
            break
    if not needs:
        assert refused is not None
        raise refused
    best = min(needs, key=lambda number: needs[number].drawing_bytes)
    found = needs[best]
    if found.drawing_bytes > memory_bytes and refuse:
        parts = (
            f"{name} {size_text(size)}" for name, size in (found.always | found.drawing).items()
        )
        raise UserError(
            f"config.rollout: while responses are drawn by {best} device(s) together, each holds "
            f"{', '.join(parts)}: {size_text(found.drawing_bytes)} of the "
            f"{size_text(memory_bytes)} that it has. Set config.rollout.cache_gib or fewer "
            "config.rollout.slots, or take more devices."
        )
    tensor = sizes["tensor"]
    if best == tensor:
        return config
    alone = f"config.rollout.cache_gib does not hold one sequence of {tensor}"
    if tensor in needs:
        alone = f"each of {tensor} (config.mesh.tensor) would hold " + size_text(
            needs[tensor].drawing_bytes
        )
    say(
        f"{best} devices draw responses together: {alone}; so each holds "
        f"{size_text(found.drawing_bytes)} of {size_text(memory_bytes)}"
    )
    return _together(config, best)


def _possible(
    config: Config, sizes: Mapping[str, int], number: int, of_processes: Sequence[int]
) -> bool:
    """Whether so many devices can draw together: of processes, of heads, and with slots and prompts
    of a prefill that divide among the rest."""
    devices, r = math.prod(sizes.values()), config.rollout
    if devices % number or not replicas_fit(number, of_processes):
        return False
    if r.slots % (devices // number) or r.prefill_prompts % (devices // number):
        return False
    try:
        check_divides(config.model, config.mesh, {**sizes, "tensor": number})
    except UserError:
        return False
    return True


def size_text(num_bytes: int) -> str:
    """In GiB, or what is small in MiB."""
    if num_bytes >= GIB / 10:
        return f"{num_bytes / GIB:.2f} GiB"
    return f"{num_bytes / 2**20:.2f} MiB"


def _together(config: Config, number: int) -> Config:
    return dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, rollout_tensor=number))
