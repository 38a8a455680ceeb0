"""Devices to compile for: the local ones or those of a TPU topology, with their stated rates.

Rates are a chip's peak as its maker states it: bfloat16 products, main memory, and what it receives
from others of its slice (half of Google's bidirectional bandwidth). Memory is what libtpu lets a
program have, which is less than the maker states. docs/plan.md has the sources of the shares.
"""

import contextlib
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from dapo_jax.rollout import memory_budget
from dapo_jax.types import UserError, error_line

GIB = memory_budget.GIB
LOCAL = "local"


class Chip(NamedTuple):
    """Figures of one chip; None where they are not known."""

    name: str
    gib: float | None  # GiB of main memory that programs may have
    flops: float | None  # operations per second
    memory_rate: float | None  # bytes per second
    link_rate: float | None  # bytes per second
    source: str
    platform: str = "tpu"
    products_share: float = 0.5  # share of `flops` that matrix products are expected to reach
    memory_share: float = 0.47  # share of `memory_rate` that decoding is expected to reach


TPU, NVIDIA = "docs.cloud.google.com/tpu/docs/", "nvidia.com/en-us/data-center/"
# By `device_kind`.
CHIPS = {
    "TPU v4": Chip("v4", 30.75, 275e12, 1.228e12, 300e9, f"{TPU}v4"),
    "TPU v5": Chip("v5p", 95.73, 459e12, 2.765e12, 600e9, f"{TPU}v5p", products_share=0.55),
    "TPU v5 lite": Chip("v5e", 15.75, 197e12, 0.819e12, 200e9, f"{TPU}v5e"),
    "TPU v6 lite": Chip("v6e", 31.24, 918e12, 1.638e12, 400e9, f"{TPU}v6e"),
    "NVIDIA H200": Chip("H200", None, 989e12, 4.8e12, 450e9, f"{NVIDIA}h200", "gpu", 0.4),
    "NVIDIA H100 80GB HBM3": Chip(
        "H100", None, 989e12, 3.35e12, 450e9, f"{NVIDIA}h100", "gpu", 0.4
    ),
}
KNOWN = (
    "Known are such as v4:2x2x1, v5e:1x1, v5e:4x4, v5p:2x2x2, v5p:4x4x4, v6e:8x8, and local for "
    "the devices of this machine."
)


class Target(NamedTuple):
    """Devices to compile for."""

    devices: Sequence[Any]
    chip: Chip  # figures of one device
    hbm_bytes: int | None  # memory of one device


def named(name: str) -> Chip:
    """Returns the chip that --chip names."""
    known = {chip.name: chip for chip in CHIPS.values()}
    if name not in known:
        raise UserError(f"--chip must be one of {', '.join(known)}; got {name!r}.")
    return known[name]


def with_profile(chip: Chip, file: str | Path) -> Chip:
    """Returns the chip with the shares of its rates that launch/check.py has measured on one.

    Args:
        file: check.json. Of several models or rows in it the last that was planned counts, which is
            the largest.

    Raises:
        UserError: the file is not one of a check, is of another chip, or lacks the measurements.
    """
    try:
        content = json.loads(Path(file).read_text())
        kind, planned = content["machine"]["kind"], content["planned"]
        of_name = {(f["part"], f["name"]): f["figures"] for f in content["findings"]}
        order = [(part, name) for part, names in planned.items() for name in names]
        figures = [of_name[place] for place in order if place in of_name]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"--profile={file} is no check.json of launch/check.py: {error}."
        ) from error
    if kind not in CHIPS:
        known = ", ".join(CHIPS)
        raise UserError(
            f"--profile={file} is of {kind!r}, whose rates are not known; those of {known} are."
        )
    if CHIPS[kind].name != chip.name:
        raise UserError(f"--profile={file} is of {kind!r}; the plan is for a {chip.name}.")
    shares = {}
    for name in ("products_share", "memory_share"):
        measured = [of[name] for of in figures if name in of]
        if not measured:
            raise UserError(
                f"--profile={file} has no {name}: run the parts rollout and update of "
                "launch/check.py."
            )
        shares[name] = measured[-1]
    return chip._replace(**shares)


def target(topology: str) -> Target:
    """Returns the devices of a topology such as "v5p:4x4x4", or for "local" those of this machine.

    Raises:
        UserError: no libtpu or no such topology.
    """
    if topology == LOCAL:
        devices = jax.devices()
        kind = devices[0].device_kind
        chip = CHIPS.get(kind, Chip(kind, None, None, None, None, "not known", devices[0].platform))
        return Target(devices, chip, _local_bytes(devices))
    devices = _devices(topology)
    chip = CHIPS[devices[0].device_kind]
    assert chip.gib is not None
    return Target(devices, chip, int(chip.gib * GIB))


def _devices(topology: str) -> Any:
    # libtpu takes any grid of any chip; slices of a v5e or v6e are flat, others are not.
    others = r"x\d+" if topology.startswith(("v5e", "v6e")) else r"x\d+x\d+"
    shape = re.fullmatch(rf"(v4|v5e|v5p|v6e):(\d+{others})", topology)
    if shape is None:
        raise UserError(f"--topology={topology} is not known. {KNOWN}")

    if not os.environ.get("JAX_PLATFORMS"):
        # Shapes are traced on CPU: libtpu searches minutes for a TPU that is missing.
        jax.config.update("jax_platforms", "cpu")
    # A program of a v4 runs on both cores of a chip as one device.
    options: dict[str, Any] = {"chip_config_name": "megacore"} if shape[1] == "v4" else {}
    chips = math.prod(map(int, shape[2].split("x")))
    if chips == 1:  # libtpu 0.0.42 assumes four chips to a host
        options["chips_per_host_bounds"] = (1, 1, 1)
    try:
        with _environment():
            devices = topologies.get_topology_desc(
                platform="tpu", topology_name=topology, **options
            ).devices
    except Exception as error:  # libtpu's own, of several kinds
        raise UserError(
            f"--topology={topology} cannot be compiled for: {error_line(error)}. It needs "
            f"libtpu (uv sync --extra tpu) and an existing shape. {KNOWN}"
        ) from error
    assert len(devices) == chips, "a device is a chip"
    return devices


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Variables for libtpu. A program that starts later must not take them for its own host's."""
    wanted = {
        "TPU_SKIP_MDS_QUERY": "1",  # or libtpu asks the cloud who it is
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # compiling opens no device
        # Or libtpu prints errors about the host that it is not on. No program depends on these.
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    }
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _local_bytes(devices: Sequence[Any]) -> int | None:
    """Returns the memory of one device; virtual devices of a CPU share the machine's."""
    stated = memory_budget.device_bytes(devices)
    meminfo = Path("/proc/meminfo")
    if stated is not None or devices[0].platform != "cpu" or not meminfo.is_file():
        return stated
    total = re.search(r"MemTotal:\s+(\d+) kB", meminfo.read_text())
    return int(total[1]) * 1024 // len(devices) if total else None
