"""Says what a run is waiting for when nothing has moved for a while.

A hung device, a lost host or a stuck scorer shows as silence: the main thread sits in a call that
does not come back. A thread beside it needs nothing of the main thread but what that has said
before it went to wait. It says so, and where it is told to it ends the process in the end, so that
what started the run can start it again.

Silence is not yet a fault: another process may be slow, or a scorer. A main thread that waits for
those asks again and again, and is well. One that does not even ask, for many times as long as it
ever has in a step before, hangs.
"""

import math
import os
import sys
import threading
import time
from collections.abc import Callable

from dapo_jax.progress import duration

LOOKS_A_SILENCE = 8  # how often the thread looks within the silence that it tells of
LONGEST_LOOK_SECONDS = 5.0
LEAST_HANG_SECONDS = 40.0  # one that hangs is to be told of within a minute, but no pause is


class Watchdog:
    """Tells of silence once it has lasted `seconds`, and each time that it has doubled; gives up
    when it has lasted `most`, or the main thread hangs.

    A context manager: the thread lives within it. To be made by the main thread.

    Args:
        seconds: of silence before the first line; 0: it never says anything.
        say: prints a line; called from the thread.
        clock: seconds that pass.
        most: seconds of silence; 0: it never gives up for it.
        hang_factor: the main thread hangs when it has neither moved nor asked for so many times the
            longest that it ever took for it in a whole step, the first step apart, in which
            programs are compiled, and for LEAST_HANG_SECONDS; 0: it never does.
        give_up: is told why; called from the thread.

    `limited` says whether to give up now: not while what is slow is outside the run, such as
    weights that are fetched or storage.
    """

    def __init__(
        self,
        seconds: float,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        most: float = 0.0,
        hang_factor: float = 0.0,
        give_up: Callable[[str], None] = lambda _: None,
    ):
        self.seconds, self.say, self.clock = seconds or math.inf, say, clock
        self.most, self.hang_factor, self.give_up = most or math.inf, hang_factor, give_up
        self.what, self.limited = "the run to begin", False
        self._since, self._due = clock(), self.seconds
        self._alive, self._longest, self._steps = clock(), 0.0, 0
        self._main = threading.get_ident()
        # Of the same thread again: a signal may interrupt `moved` and have something to say.
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        if self._shortest < math.inf:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def waiting_for(self, what: str) -> None:
        """Takes what is being waited for from now on. The silence goes on, but the main thread is
        well."""
        with self._lock:
            self.lives()
            self.what = what

    def lives(self) -> None:
        """The main thread asks for what it waits for."""
        with self._lock:
            now = self.clock()
            if self.limited and self._steps:
                self._longest = max(self._longest, now - self._alive)
            self._alive = now

    def moved(self, what: str | None = None) -> None:
        """Ends the silence.

        Args:
            what: is being waited for from now on; None: the same as before.
        """
        with self._lock:
            self.lives()
            self._since, self._due = self._alive, self.seconds
            if what is not None:
                self.what = what

    def step_done(self) -> None:
        """Ends a step: how long the next one may be still is measured by those before."""
        with self._lock:
            self.lives()
            self._steps += 1

    def look(self) -> None:
        """Says what is being waited for if the silence has lasted long enough."""
        with self._lock:
            now = self.clock()
            silence, still, what = now - self._since, now - self._alive, self.what
            due = silence >= self._due
            while self._due <= silence:
                self._due *= 2
        if self.limited and still >= self._hang_seconds():
            self.give_up(
                f"the main thread has been in {self._place()} for {duration(still)}, where nothing "
                f"in a step before took longer than {duration(self._longest)}; waiting for {what}"
            )
            return
        text = f"nothing has moved for {duration(silence)}; waiting for {what}"
        if self.limited and silence >= self.most:
            self.give_up(text)
        elif due:
            self.say(f"  {text}")

    @property
    def _shortest(self) -> float:
        hang = LEAST_HANG_SECONDS if self.hang_factor else math.inf
        return min(self.seconds, self.most, hang)

    def _hang_seconds(self) -> float:
        if not self.hang_factor or self._steps < 2:
            return math.inf
        return max(LEAST_HANG_SECONDS, self.hang_factor * self._longest)

    def _place(self) -> str:
        """Where the main thread is: the innermost line of this package, or of all."""
        frame = innermost = sys._current_frames()[self._main]
        here = os.path.dirname(__file__) + os.sep
        while frame is not None and not frame.f_code.co_filename.startswith(here):
            frame = frame.f_back
        frame = frame or innermost
        file = frame.f_code.co_filename.removeprefix(here)
        return f"{frame.f_code.co_name} ({file}:{frame.f_lineno})"

    def _watch(self) -> None:
        while not self._over.wait(min(self._shortest / LOOKS_A_SILENCE, LONGEST_LOOK_SECONDS)):
            self.look()


UNWATCHED = Watchdog(0.0, lambda _: None)  # for callers who watch nothing; its thread never runs
