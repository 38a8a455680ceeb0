"""Memory of this process, as the kernel counts it, and of its devices, as they count it."""

import threading
import time
from pathlib import Path
from typing import Any

import jax

from dapo_jax.rollout.memory_budget import peak_bytes


def resident_bytes(kind: str = "RssAnon") -> int:
    """Returns resident memory. RssAnon excludes mapped files, which the kernel can drop."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {kind}")


def peaks() -> dict[str, Any]:
    """Returns the largest resident memory so far and the largest on any device, in MB; None where
    devices do not report it, as CPUs."""
    on_devices = peak_bytes(jax.local_devices())
    return {
        "peak_rss_mb": round(resident_bytes("VmHWM") / 1e6, 1),
        "peak_device_mb": None if on_devices is None else round(on_devices / 1e6, 1),
    }


class PeakMemory:
    """Samples the resident memory every 2 ms while active; `peak_bytes` is the largest."""

    def __enter__(self) -> "PeakMemory":
        self.peak_bytes = self.first_bytes = resident_bytes()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.is_set():
            self.peak_bytes = max(self.peak_bytes, resident_bytes())
            time.sleep(0.002)
