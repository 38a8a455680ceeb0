"""The machine under check, and the models whose shapes fit it."""

import importlib.metadata
import math
from typing import Any, NamedTuple

from dapo_jax.config import ModelConfig
from dapo_jax.tools.bench.shapes import bench_model
from dapo_jax.tools.check.findings import Result, Store
from dapo_jax.tools.plan import chips, estimate

PACKAGES = ("jax", "jaxlib", "flax", "libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin")
# Layers, hidden size, query heads, key-value heads, intermediate size, vocabulary: Qwen2.5's, and a
# small one for CPUs.
MODELS = {
    "small": (4, 256, 4, 2, 1024, 512),
    "0.5B": (24, 896, 14, 2, 4864, 151_936),
    "1.5B": (28, 1536, 12, 2, 8960, 151_936),
    "7B": (28, 3584, 28, 4, 18_944, 152_064),
}
DECODING_BYTES, TRAINING_BYTES = 2, 16  # of a parameter: bfloat16; float32 with gradient, moments
FILLED = 0.6  # share of the memory for these; the rest is for caches and activations


class Machine(NamedTuple):
    """The local devices."""

    platform: str
    kind: str
    devices: int
    memory_bytes: int | None  # of one device
    chip: chips.Chip
    versions: dict[str, str]

    @property
    def is_cpu(self) -> bool:
        return self.platform == "cpu"

    @property
    def dtype(self) -> str:
        """The dtype that runs of this platform compute in."""
        return "float32" if self.is_cpu else "bfloat16"

    def identity(self) -> dict[str, Any]:
        """Returns kind, number and versions of the devices: other values begin another check."""
        return {"kind": self.kind, "devices": self.devices, **self.versions}

    def models(self, bytes_per_parameter: int) -> dict[str, tuple]:
        """Returns the shapes, as `bench_model` takes them, whose parameters fit."""
        if self.is_cpu:
            return {"small": (*MODELS["small"], self.dtype)}
        memory = (self.memory_bytes or 0) * self.devices * FILLED
        shapes = {name: (*shape, self.dtype) for name, shape in MODELS.items() if name != "small"}
        return {
            name: shape
            for name, shape in shapes.items()
            if bytes_per_parameter * num_parameters(bench_model(shape)) <= memory
        }

    def rates(self, store: Store) -> tuple[float | None, float | None]:
        """Returns (operations, bytes) per second of all devices: the stated rates of a known chip,
        else what the part `device` has measured."""
        if self.chip.flops is not None:
            return self.chip.flops * self.devices, (self.chip.memory_rate or 0) * self.devices
        flops = store.figure("device", f"products, {self.dtype}", "flops")
        if self.is_cpu:  # its caches hold the small model, and virtual devices share its cores
            return flops, math.inf
        rate = store.figure("device", "memory", "bytes_per_second")
        if flops is None or rate is None:
            return None, None
        return flops * self.devices, rate * self.devices


def this_machine() -> Machine:
    """Returns the machine that this process runs on; opens its devices."""
    target = chips.target(chips.LOCAL)
    first = target.devices[0]
    installed = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    versions = {name: installed[name] for name in PACKAGES if name in installed}
    if first.platform != "cpu":
        versions["runtime"] = first.client.platform_version.split("\n")[0]
    return Machine(
        first.platform,
        first.device_kind,
        len(target.devices),
        target.hbm_bytes,
        target.chip,
        versions,
    )


def num_parameters(c: ModelConfig) -> int:
    """Returns the number of elements of a model's matrices, a tied embedding once."""
    m = estimate.matrices(c)
    return m.layers + m.head * (1 if c.tie_embeddings else 2)


def judged(
    share: float, least: float, machine: Machine, text: str, figures: dict[str, Any]
) -> Result:
    """Returns the result of a share of what the chip allows; CPUs are not judged."""
    if machine.is_cpu:
        return Result("ok", f"{text}; speed is not judged on CPUs", figures)
    verdict = "ok" if share >= least else "slow"
    return Result(verdict, f"{text}; wanted {100 * least:.0f} %", figures)
