"""Memory of this process, as the kernel counts it."""

import threading
import time
from pathlib import Path


def resident_bytes(kind: str = "RssAnon") -> int:
    """Resident memory: RssAnon leaves out pages of mapped files, which the kernel can drop."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {kind}")


class PeakMemory:
    """While active, looks every 2 ms; then `peak_bytes` is the most that was resident."""

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
