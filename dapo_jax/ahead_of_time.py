"""Programs of a run compiled for TPUs that are not there: what launch/plan.py does.

libtpu compiles for a topology on any machine. What it reports of memory and operations is fact;
what is derived from it says so.
"""

import os
import time
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import topologies

from dapo_jax import model
from dapo_jax.config import Config
from dapo_jax.rollout.engine import DecoderEngine
from dapo_jax.rollout.paged import page_bytes
from dapo_jax.rollout.programs import rollout_dtypes
from dapo_jax.rollout.sampling import Mode
from dapo_jax.rollout.spec import EngineSpec
from dapo_jax.sharding import make_mesh
from dapo_jax.trainer import engine_spec
from dapo_jax.types import UserError

GIB = 2**30
# By the kind that a device says it is: its usual name, and GiB of memory as its maker states them.
CHIPS = {
    "TPU v4": ("v4", 32),
    "TPU v5": ("v5p", 95),
    "TPU v5 lite": ("v5e", 16),
    "TPU v6 lite": ("v6e", 32),
}
TOPOLOGIES = ("v4:2x2x2", "v5e:2x4", "v5e:8x8", "v5p:2x2x2", "v5p:2x2x4", "v5p:4x4x4", "v6e:8x8")
PROGRAMS = ("decode", "prefill")


def plan(
    config: Config, topology: str, programs: tuple[str, ...], say: Callable[[str], None]
) -> dict[str, Any]:
    """What the compiler says of the programs, per device.

    Args:
        topology: as libtpu names it, such as "v5p:4x4x4".
        programs: of PROGRAMS.
        say: told what is being compiled.

    Returns:
        `fits`, `hbm_bytes`, `chip`, `devices`, `mesh`, `programs` with argument_bytes, temp_bytes,
        peak_bytes, flops, bytes_accessed and compile_seconds of each, and `slots_that_fit`.

    Raises:
        UserError: there is no libtpu, no such topology, or the mesh does not fit it.
    """
    devices = _devices(topology)
    kind = devices[0].device_kind
    if kind not in CHIPS:
        raise UserError(f"--topology={topology}: the memory of a {kind!r} is not known here.")
    chip, gib = CHIPS[kind]
    mesh = make_mesh(config.mesh, devices)
    spec = engine_spec(config, mesh, config.data.max_prompt_tokens, stop_tokens=(0,))
    found = {}
    for program in programs:
        say(f"compiling {program} for {len(devices)} {chip}")
        found[program] = _compiled(spec, mesh, program)
    hbm = gib * GIB
    result: dict[str, Any] = {
        "fits": all(numbers["peak_bytes"] <= hbm for numbers in found.values()),
        "hbm_bytes": hbm,
        "chip": chip,
        "devices": len(devices),
        "mesh": dict(mesh.shape),
        "slots": spec.slots,
        "tokens_per_slot": spec.max_tokens,
        "programs": found,
    }
    if "decode" in found:
        result["slots_that_fit"] = _slots_that_fit(spec, mesh, found["decode"], hbm)
    return result


def describe(result: dict[str, Any]) -> str:
    """The result as text."""
    size = lambda number: f"{number / GIB:9.2f} GiB"
    shape = " x ".join(f"{name} {n}" for name, n in result["mesh"].items())
    lines = [
        f"{result['devices']} {result['chip']}, mesh {shape}; per device, as compiled:",
        "",
        f"{'program':10}{'arguments':>14}{'temporary':>14}{'peak':>14}{'of ' + size(result['hbm_bytes']).strip():>15}{'GFLOP':>10}{'compiled in':>13}",  # noqa: E501
    ]
    for name, n in result["programs"].items():
        share = 100 * n["peak_bytes"] / result["hbm_bytes"]
        lines.append(
            f"{name:10}{size(n['argument_bytes']):>14}{size(n['temp_bytes']):>14}"
            f"{size(n['peak_bytes']):>14}{share:13.0f} %{n['flops'] / 1e9:10.1f}"
            f"{n['compile_seconds']:11.0f} s"
        )
    lines.append("")
    if "slots_that_fit" in result:
        lines.append(
            f"derived: {result['slots_that_fit']:,} slots of {result['tokens_per_slot']:,} tokens "
            f"fit beside the parameters (the config has {result['slots']:,})"
        )
    lines.append("it fits" if result["fits"] else "it does not fit: " + _remedy(result))
    return "\n".join(lines)


def _remedy(result: dict[str, Any]) -> str:
    worst = max(result["programs"].values(), key=lambda n: n["peak_bytes"])
    over = worst["peak_bytes"] - result["hbm_bytes"]
    return (
        f"{over / GIB:.2f} GiB too much. Fewer config.rollout.slots or a config.rollout.cache_gib "
        "make the KV cache smaller, a larger config.mesh.tensor the parameters."
    )


def _devices(topology: str) -> Any:
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # or libtpu asks the cloud who it is
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    except Exception as error:  # libtpu's own, of several kinds
        raise UserError(
            f"--topology={topology} cannot be compiled for: {str(error).splitlines()[0]}. It needs "
            f"libtpu (pip install libtpu) and a topology such as {', '.join(TOPOLOGIES)}."
        ) from error


def _compiled(spec: EngineSpec, mesh: jax.sharding.Mesh, program: str) -> dict[str, Any]:
    engine = DecoderEngine(spec, mesh)
    shapes = jax.eval_shape(
        lambda params: rollout_dtypes(params, spec.model.compute_dtype),
        model.param_shapes(spec.model),
    )
    lowered = engine.lower(shapes, program, Mode())
    begun = time.monotonic()
    compiled = lowered.compile()
    seconds = time.monotonic() - begun
    memory, costs = compiled.memory_analysis(), compiled.cost_analysis()
    arguments, temporary = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    new = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return {
        "argument_bytes": arguments,
        "temp_bytes": temporary,
        "peak_bytes": arguments + temporary + new,
        "flops": float(costs.get("flops", 0.0)),
        "bytes_accessed": float(costs.get("bytes accessed", 0.0)),
        "compile_seconds": round(seconds, 1),
    }


def _slots_that_fit(
    spec: EngineSpec, mesh: jax.sharding.Mesh, decode: dict[str, Any], hbm: int
) -> int:
    """Slots over all devices whose pages at full length fit where the pool now is."""
    kv_axis = dict(spec.layout.rules)["kv_heads"]
    page = page_bytes(spec.model, spec.pool_layout) // (mesh.shape[kv_axis] if kv_axis else 1)
    free = hbm - decode["peak_bytes"] + spec.shard_pages * page
    return int(free // (spec.table_pages * page)) * spec.shards
