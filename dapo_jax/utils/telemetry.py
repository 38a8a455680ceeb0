"""Telemetry: one object for progress display, timers, watchdog and stop requests.

The training loop and the collector hold it. No result depends on it.
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
        watchdog: receives every sign of movement.
        stop: raises StopRequested where a stop was requested.
    """

    def __init__(
        self,
        progress: Progress | None = None,
        watchdog: Watchdog = UNWATCHED,
        stop: Callable[[], None] = lambda: None,
    ):
        self.progress = progress or Progress(0, quiet=True)
        self.watchdog, self.check_stop = watchdog, stop
        self.say = self.progress.say
        self.seconds: dict[str, float] = {}  # by timer, since they were taken last

    def without_stop(self) -> "Telemetry":
        """Returns a telemetry without stop requests, for work that cannot be repeated."""
        return Telemetry(self.progress, self.watchdog)

    def phase(self, text: str) -> None:
        """Shows the phase that begins now; the watchdog names it in a silence."""
        self.watchdog.moved(text)
        self.progress.doing(text)

    def moved(self) -> None:
        """Reports movement: something was computed, read or received."""
        self.watchdog.moved()

    def waiting_for(self, what: str) -> None:
        """Names the event that is awaited from now on."""
        self.watchdog.waiting_for(what)

    @contextlib.contextmanager
    def timer(self, name: str) -> Iterator[None]:
        """Adds the seconds of the block to a timer."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.add_seconds(name, time.monotonic() - start)

    def add_seconds(self, name: str, seconds: float) -> None:
        """Adds seconds to a timer."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def take_seconds(self) -> dict[str, float]:
        """Returns the seconds of every timer and resets them."""
        taken, self.seconds = self.seconds, {}
        return taken


SILENT = Telemetry()  # for callers that show nothing
