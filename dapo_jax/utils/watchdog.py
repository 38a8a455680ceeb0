"""Says what a run is waiting for when nothing has moved for a while, and ends it in the end.

A hung device, a lost host or a stuck scorer shows as silence: the main thread sits in a call that
does not come back. A thread beside it needs nothing of the main thread but what that has said
before it went to wait. It says so, and after a limit ends the process, so that what started the run
can start it again.

Movement is a token, a verdict, a phase of the loop, or news of the step from another process. So
waiting for others is no silence as long as they get on.
"""

import math
import threading
import time
from collections.abc import Callable

from dapo_jax.utils.progress import duration

WATCHDOG_SECONDS = 120.0  # of silence before a run says what it waits for
LOOKS_A_SILENCE = 8  # how often the thread looks within the silence that it tells of
LONGEST_LOOK_SECONDS = 5.0


class Watchdog:
    """Tells of silence once it has lasted `seconds`, and each time that it has doubled; gives up
    when it has lasted `most`.

    A context manager: the thread lives within it.

    Args:
        seconds: of silence before the first line; 0: it never says anything.
        say: prints a line; called from the thread.
        clock: seconds that pass.
        most: seconds of silence; 0: it never gives up.
        give_up: is told why; called from the thread.

    `limited` says whether to give up now: not while what is slow is outside the run, such as
    weights that are fetched, or checkpoints.
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
        """Takes what is being waited for from now on. The silence goes on."""
        self.what = what

    def moved(self, what: str | None = None) -> None:
        """Ends the silence.

        Args:
            what: the phase that begins, which is waited for from now on; None: it is the same.
        """
        with self._lock:
            self._since, self._due = self.clock(), self.seconds
            if what is not None:
                self.what = what

    def moving(self, then: Callable[[], None]) -> Callable[[], None]:
        """A call that ends the silence and then does something: to be given to what loads a model,
        in the place of that."""

        def call() -> None:
            self.moved()
            then()

        return call

    def look(self) -> None:
        """Says what is being waited for if the silence has lasted long enough."""
        with self._lock:
            silence = self.clock() - self._since
            due = silence >= self._due
            while self._due <= silence:
                self._due *= 2
        text = f"nothing has moved for {duration(silence)}; waiting for {self.what}"
        if self.limited and silence >= self.most:
            self.give_up(text)
        elif due:
            self.say(f"  {text}")

    @property
    def _shortest(self) -> float:
        return min(self.seconds, self.most)

    def _watch(self) -> None:
        while not self._over.wait(min(self._shortest / LOOKS_A_SILENCE, LONGEST_LOOK_SECONDS)):
            self.look()


UNWATCHED = Watchdog(0.0, lambda _: None)  # for callers who watch nothing; its thread never runs
