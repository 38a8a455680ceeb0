"""The devices that programs are compiled for, and what they are stated to do.

Rates are a chip's peak as its maker states it: bfloat16 products, main memory, and what the chip
can receive from others of its slice (half of what Google calls bidirectional bandwidth). Memory is
not what the maker states (v4 32 GiB, v5e 16, v5p 95, v6e 32), but what the compiler lets a program
have, beside what it reserves: the figure that libtpu refuses programs with.

`products_share` is the share of the peak that a program bound by products is expected to reach.
Published for training: 0.71 of the peak for a 32B on v5p-128 and 0.50 for a 70B on v6e-256
(MaxText's README), 0.38 to 0.43 for a 405B on H100 (Llama 3, arXiv:2407.21783, table 4). These come
from tuned runs. v5p is planned with 0.55; 0.5 stands where nothing is published.
"""

import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from dapo_jax.rollout import memory_budget
from dapo_jax.types import UserError

GIB = memory_budget.GIB
LOCAL = "local"


class Chip(NamedTuple):
    """Per chip; None where it is not known."""

    name: str
    gib: float | None  # of main memory, that programs may have
    flops: float | None  # per second
    memory_rate: float | None  # bytes per second
    link_rate: float | None  # bytes per second
    source: str
    platform: str = "tpu"
    products_share: float = 0.5  # of `flops` that products are expected to reach


# By the kind that a device says it is.
CHIPS = {
    "TPU v4": Chip("v4", 30.75, 275e12, 1.228e12, 300e9, "docs.cloud.google.com/tpu/docs/v4"),
    "TPU v5": Chip(
        "v5p", 95.73, 459e12, 2.765e12, 600e9, "docs.cloud.google.com/tpu/docs/v5p", "tpu", 0.55
    ),
    "TPU v5 lite": Chip(
        "v5e", 15.75, 197e12, 0.819e12, 200e9, "docs.cloud.google.com/tpu/docs/v5e"
    ),
    "TPU v6 lite": Chip(
        "v6e", 31.24, 918e12, 1.638e12, 400e9, "docs.cloud.google.com/tpu/docs/v6e"
    ),
    "NVIDIA H200": Chip(
        "H200", None, 989e12, 4.8e12, 450e9, "nvidia.com/en-us/data-center/h200", "gpu", 0.4
    ),
    "NVIDIA H100 80GB HBM3": Chip(
        "H100", None, 989e12, 3.35e12, 450e9, "nvidia.com/en-us/data-center/h100", "gpu", 0.4
    ),
}
# libtpu knows more shapes; these are each maker's usual ones.
TOPOLOGIES = (
    "v4:2x2x1", "v4:2x2x2", "v4:2x2x4", "v4:4x4x4", "v4:4x4x8",
    "v5e:1x1", "v5e:2x2", "v5e:2x4", "v5e:4x4", "v5e:4x8", "v5e:8x8", "v5e:8x16", "v5e:16x16",
    "v5p:2x2x1", "v5p:2x2x2", "v5p:2x2x4", "v5p:2x4x4", "v5p:4x4x4", "v5p:4x4x8", "v5p:4x8x8",
    "v5p:8x8x8",
    "v6e:1x1", "v6e:2x2", "v6e:2x4", "v6e:4x4", "v6e:4x8", "v6e:8x8", "v6e:8x16", "v6e:16x16",
)  # fmt: skip


class Target(NamedTuple):
    """What is compiled for."""

    devices: Sequence[Any]
    chip: Chip  # as one device has it
    hbm_bytes: int | None  # of one device


def target(topology: str) -> Target:
    """The devices of a topology, such as "v5p:4x4x4"; or, for "local", those that there are.

    Raises:
        UserError: there is no libtpu or no such topology, or its chip is not known here.
    """
    if topology == LOCAL:
        devices = jax.devices()
        kind = devices[0].device_kind
        chip = CHIPS.get(kind, Chip(kind, None, None, None, None, "not known", devices[0].platform))
        return Target(devices, chip, _local_bytes(devices))
    devices = _devices(topology)
    kind = devices[0].device_kind
    if kind not in CHIPS:
        raise UserError(
            f"--topology={topology}: memory and rates of a {kind!r} are not known here. Known are "
            f"{', '.join(TOPOLOGIES)}, and local."
        )
    chip = CHIPS[kind]
    assert chip.gib is not None
    return Target(devices, chip, int(chip.gib * GIB))


def _devices(topology: str) -> Any:
    shape = re.fullmatch(r"(v4|v5e|v5p|v6e):(\d+(?:x\d+){1,2})", topology)
    known = f"Known are {', '.join(TOPOLOGIES)}, and local for the devices of this machine."
    if shape is None:
        raise UserError(
            f"--topology={topology} is not known. {known} Other shapes of these chips may do."
        )
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # or libtpu asks the cloud who it is
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # compiling opens no device
    if not os.environ.get("JAX_PLATFORMS"):
        # Shapes are traced on CPU: looking for a TPU that is not there takes libtpu minutes.
        jax.config.update("jax_platforms", "cpu")
    # A program of a v4 runs on both cores of a chip as one device, which libtpu has to be told.
    more: dict[str, Any] = {"chip_config_name": "megacore"} if shape[1] == "v4" else {}
    chips = math.prod(map(int, shape[2].split("x")))
    if chips == 1:  # libtpu 0.0.42 would have four chips to a host
        more["chips_per_host_bounds"] = (1, 1, 1)
    try:
        devices = topologies.get_topology_desc(
            platform="tpu", topology_name=topology, **more
        ).devices
    except Exception as error:  # libtpu's own, of several kinds
        raise UserError(
            f"--topology={topology} cannot be compiled for: {str(error).splitlines()[0]}. It needs "
            f"libtpu (uv sync --extra tpu) and a shape that there is. {known}"
        ) from error
    assert len(devices) == chips, "a device is a chip"
    return devices


def _local_bytes(devices: Sequence[Any]) -> int | None:
    """Memory of one of the devices; virtual devices of a CPU share the machine's."""
    said = memory_budget.device_bytes(devices)
    if said is not None:
        return said
    meminfo = Path("/proc/meminfo")
    if devices[0].platform != "cpu" or not meminfo.is_file():
        return None
    total = re.search(r"MemTotal:\s+(\d+) kB", meminfo.read_text())
    return int(total[1]) * 1024 // len(devices) if total else None
