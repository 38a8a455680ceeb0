"""Memory of this process, as the kernel counts it, and of its devices, as they count it."""

from pathlib import Path
from typing import Any

import jax

from dapo_jax.rollout.memory_budget import peak_bytes


def peaks() -> dict[str, Any]:
    """Returns the largest resident memory so far and the largest on any device, in MB; None where
    devices do not report it, as CPUs."""
    status = Path("/proc/self/status").read_text()
    (kilobytes,) = (int(x.split()[1]) for x in status.splitlines() if x.startswith("VmHWM:"))
    on_devices = peak_bytes(jax.local_devices())
    return {
        "peak_rss_mb": round(kilobytes * 1024 / 1e6, 1),
        "peak_device_mb": None if on_devices is None else round(on_devices / 1e6, 1),
    }
