"""Telemetry: what a run shows, times and watches while it works, in one object.

The training loop and the collector hold it. It prints lines and the current phase, adds up seconds
by phase, feeds the watchdog, and raises where a stop was requested. Nothing that is computed
depends on it.
"""

import contextlib
import time
from collections.abc import Callable, Iterator

from dapo_jax.utils.progress import Progress
from dapo_jax.utils.watchdog import UNWATCHED, Watchdog


class Telemetry:
    """Progress display, timers, watchdog and stop requests.

    Args:
        progress: prints; None: nothing is shown.
        watchdog: is fed with every sign of movement.
        stop: raises StopRequested where a stop was requested.
    """

    def __init__(
        self,
        progress: Progress | None = None,
        watchdog: Watchdog = UNWATCHED,
        stop: Callable[[], None] = lambda: None,
    ):
        self.progress = progress or Progress(0, 0, quiet=True)
        self.watchdog, self.check_stop = watchdog, stop
        self.seconds: dict[str, float] = {}  # by timer, since they were taken last

    def without_stop(self) -> "Telemetry":
        """Returns a telemetry that shows and watches the same, and has no stop requests: for work
        that cannot be repeated after an update."""
        return Telemetry(self.progress, self.watchdog)

    def say(self, text: str) -> None:
        """Prints a line."""
        self.progress.say(text)

    def phase(self, text: str) -> None:
        """Shows the phase that begins now; it is awaited from now on."""
        self.watchdog.moved(text)
        self.progress.doing(text)

    def moved(self) -> None:
        """Reports movement: something was computed, read or received."""
        self.watchdog.moved()

    def waiting_for(self, what: str) -> None:
        """Names what is awaited from now on."""
        self.watchdog.waiting_for(what)

    @contextlib.contextmanager
    def timer(self, name: str) -> Iterator[None]:
        """Adds the seconds spent within to `seconds[name]`."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.add_seconds(name, time.monotonic() - start)

    def add_seconds(self, name: str, seconds: float) -> None:
        """Adds seconds to a timer."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def take_seconds(self) -> dict[str, float]:
        """Returns the seconds of every timer, and begins anew."""
        taken, self.seconds = self.seconds, {}
        return taken


SILENT = Telemetry()  # for callers that show nothing
