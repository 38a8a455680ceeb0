"""Watchdog: reports what a run is waiting for when nothing moves, and ends the run after a limit.

A hung device, a lost host or a stuck scorer blocks the main thread in a call that never returns. A
second thread watches the time since the last movement: a token, a verdict, a phase of the loop, or
news of another process.
"""

import math
import threading
import time
from collections.abc import Callable

from dapo_jax.utils.progress import duration, written_in_time

WATCHDOG_SECONDS = 120.0  # of silence before a run says what it waits for
LOOKS_A_SILENCE = 8  # how often the thread looks before the first line
LONGEST_LOOK_SECONDS = 5.0


class Watchdog:
    """Reports a silence after `seconds` and each time that it has doubled; gives up after `most`.

    A context manager: the thread lives within it. It gives up only while `limited` is set: loading
    weights and writing checkpoints may be slow for reasons outside the run.

    Args:
        seconds: of silence before the first line; 0: no lines.
        say: prints a line; called from the thread.
        clock: returns seconds.
        most: seconds of silence before giving up; 0: never.
        give_up: receives the reason; called from the thread.
    """

    def __init__(
        self,
        seconds: float,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        most: float = 0.0,
        give_up: Callable[[str], None] = lambda _: None,
    ):
        self.seconds, self.say, self.clock = seconds or math.inf, say, clock
        self.most, self.give_up = most or math.inf, give_up
        self.what, self.limited = "the run to begin", False
        self._since, self._due = clock(), self.seconds
        # Reentrant: a signal handler may interrupt `moved` and say something itself.
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        if min(self.seconds, self.most) < math.inf:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def waiting_for(self, what: str) -> None:
        """Names the awaited event. The silence continues."""
        self.what = what

    def moved(self, phase: str | None = None) -> None:
        """Ends the silence; `phase`, if given, is awaited from now on."""
        with self._lock:
            self._since, self._due = self.clock(), self.seconds
            self.what = self.what if phase is None else phase

    def moving(self, then: Callable[[], None]) -> Callable[[], None]:
        """Returns a callback for loaders of weights: it ends the silence, then calls `then`."""

        def call() -> None:
            self.moved()
            then()

        return call

    def look(self) -> None:
        """Reports a silence that has lasted long enough."""
        with self._lock:
            silence = self.clock() - self._since
            due = silence >= self._due
            while self._due <= silence:
                self._due *= 2
        text = f"nothing has moved for {duration(silence)}; waiting for {self.what}"
        if self.limited and silence >= self.most:
            self.give_up(text)
        elif due:
            written_in_time(lambda: self.say(f"  {text}"))

    def _watch(self) -> None:
        pause = min(min(self.seconds, self.most) / LOOKS_A_SILENCE, LONGEST_LOOK_SECONDS)
        while not self._over.wait(pause):
            self.look()


UNWATCHED = Watchdog(0.0, lambda _: None)  # never starts its thread
