"""Traces of a function: the operations of the devices, from JAX's profiler."""

import collections
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

# On CPUs the events of these names contain or wait for others.
AROUND = ("ThunkExecutor", "end: ", "SlinkyThreadPool", "while", "call", "conditional")


class Trace(NamedTuple):
    """A traced call."""

    seconds: float
    busy_seconds: float  # in which at least one operation ran, the mean over devices
    # (name, seconds, times), the mean over devices; the longest first
    operations: list[tuple[str, float, int]]

    @property
    def idle_share(self) -> float:
        return 1 - min(1.0, self.busy_seconds / self.seconds)

    def longest(self, num: int) -> list[dict[str, Any]]:
        """Returns the operations that took longest together."""
        return [
            {"name": name, "seconds": round(seconds, 5), "times": times}
            for name, seconds, times in self.operations[:num]
        ]


def traced(run: Callable[[], Any]) -> Trace:
    """Calls `run` under the profiler."""
    with tempfile.TemporaryDirectory() as place:
        jax.profiler.start_trace(place)
        start = time.perf_counter()
        try:
            run()
            seconds = time.perf_counter() - start
        finally:
            jax.profiler.stop_trace()
        (file,) = Path(place).rglob("*.xplane.pb")
        events = list(_events(file))
    total: dict[str, float] = collections.defaultdict(float)
    times: collections.Counter[str] = collections.Counter()
    spans: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)
    for device, name, begun, duration in events:
        total[name] += duration
        times[name] += 1
        spans[device].append((begun, begun + duration))
    devices = max(1, len(spans))
    busy = sum(map(_union, spans.values())) / devices
    longest = [
        (name, ns / 1e9 / devices, round(times[name] / devices))
        for name, ns in sorted(total.items(), key=lambda item: -item[1])
    ]
    return Trace(seconds, busy / 1e9, longest)


def _events(file: Path) -> Iterator[tuple[str, str, float, float]]:
    """Yields (device, name, start, duration) of operations, in nanoseconds."""
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        on_device = plane.name.startswith("/device:")
        for line in plane.lines:
            if on_device and not (line.name == "XLA Ops" or line.name.startswith("Stream")):
                continue
            if not on_device and not line.name.startswith("tf_XLA"):
                continue
            for event in line.events:
                if not on_device and event.name.startswith(AROUND):
                    continue
                name = event.name.split(".")[0].lstrip("%")
                yield plane.name, name, event.start_ns, event.duration_ns


def _union(spans: list[tuple[float, float]]) -> float:
    """Returns the length of the union of intervals."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
