"""Says what a run is waiting for when nothing has moved for a while.

A hung device, a lost host or a stuck scorer shows as silence: the main thread sits in a call that
does not come back. A thread beside it needs nothing of the main thread but what that has said
before it went to wait. It says so, and where it is told to it ends the process in the end, so that
what started the run can start it again.

Silence is not yet a fault: another process may be slow, or a scorer. A main thread that waits for
those asks again and again, and is well. So is one that compiles. One that does neither, for many
times as long as it ever has in the same phase of the steps before, hangs.
"""

import contextlib
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NamedTuple

from dapo_jax import compilations
from dapo_jax.progress import duration

LOOKS_A_SILENCE = 8  # how often the thread looks within the silence that it tells of
LONGEST_LOOK_SECONDS = 5.0
LEAST_HANG_SECONDS = 40.0  # one that hangs is to be told of within a minute, but no pause is
STEPS_TO_LEARN = 3  # in which a phase is measured


class Sign(NamedTuple):
    """What a main thread does, as the watchdogs of other processes are told it."""

    phase: int = 0  # how many phases it has begun; those of a run are the same in all processes
    compiling: bool = False
    at: str = "its beginning"  # where it is and what it waits for
    loading: bool = False  # reads weights or a checkpoint, and may give no signs for a while


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
            longest that it ever took for it in this phase (whatever the numbers in its name), which
            has been measured in STEPS_TO_LEARN steps, and for LEAST_HANG_SECONDS; 0: it never does.
        others_compile: whether another process compiles, so that this one may have to wait for it.
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
        hang_factor: float = 0.0,
        others_compile: Callable[[], bool] = lambda: False,
        give_up: Callable[[str], None] = lambda _: None,
    ):
        self.seconds, self.say, self.clock = seconds or math.inf, say, clock
        self.most, self.hang_factor = most or math.inf, hang_factor
        self.others_compile, self.give_up = others_compile, give_up
        self.what, self.limited, self._loading = "the run to begin", False, False
        self._since, self._due = clock(), self.seconds
        self._alive = clock()
        self._phase, self._name, self._measured = 0, "", True
        # By phase: the longest without a sign, in how many steps it was, and whether in this one.
        self._longest: dict[str, float] = {}
        self._steps: dict[str, int] = {}
        self._seen: set[str] = set()
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

    def lives(self) -> None:
        """The main thread asks for what it waits for."""
        with self._lock:
            now = self.clock()
            if self.limited and self._measured:
                before = self._longest.get(self._name, 0.0)
                self._longest[self._name] = max(before, now - self._alive)
                self._seen.add(self._name)
            self._alive = now

    def waiting_for(self, what: str) -> None:
        """Takes what is being waited for from now on. The silence goes on, but the main thread is
        well."""
        with self._lock:
            self.lives()
            self.what = what

    def moved(self, what: str | None = None, *, measured: bool = True) -> None:
        """Ends the silence.

        Args:
            what: the phase that begins, which is waited for from now on; None: it is the same.
            measured: False: it is outside of the run, such as storage, whose pauses are no hang.
        """
        with self._lock:
            self.lives()
            self._since, self._due = self._alive, self.seconds
            if what is not None:
                self.what, self._measured = what, measured
                self._phase += 1
                # "step 3: 2 of 8 updates made" is one in all steps.
                self._name = re.sub(r"\d+", "#", what)

    def moving(self, then: Callable[[], None]) -> Callable[[], None]:
        """A call that ends the silence and then does something: to be given to what loads a model,
        in the place of that."""

        def call() -> None:
            self.moved()
            then()

        return call

    def step_done(self) -> None:
        """Ends a step, in which phases were measured."""
        with self._lock:
            self.lives()
            for name in self._seen:
                self._steps[name] = self._steps.get(name, 0) + 1
            self._seen.clear()

    def sign(self) -> Sign:
        """What the main thread does."""
        frame = self._frame()
        at = f"in {_place(frame)}, waiting for {self.what}"
        return Sign(self._phase, compilations.under_way(frame), at, self._loading)

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Declares that the main thread reads weights or a checkpoint: other processes then do not
        take this one for dead."""
        self._loading = True
        try:
            yield
        finally:
            self._loading = False

    def look(self) -> None:
        """Says what is being waited for if the silence has lasted long enough."""
        compiles = compilations.under_way(self._frame()) or self.others_compile()
        with self._lock:
            now = self.clock()
            if compiles:
                self._alive = now
            silence, still, what = now - self._since, now - self._alive, self.what
            limited, (allowed, longest) = self.limited, self._allowed()
            due = silence >= self._due
            while self._due <= silence:
                self._due *= 2
        text = f"nothing has moved for {duration(silence)}; waiting for {what}"
        if limited and still >= allowed:
            self.give_up(
                f"the main thread has been in {_place(self._frame())} for {duration(still)}, "
                f"{duration(longest)} at most in the steps before; waiting for {what}"
            )
        elif limited and silence >= self.most:
            self.give_up(text)
        elif due:
            self.say(f"  {text}")

    @property
    def _shortest(self) -> float:
        hang = LEAST_HANG_SECONDS if self.hang_factor else math.inf
        return min(self.seconds, self.most, hang)

    def _allowed(self) -> tuple[float, float]:
        """Seconds without a sign that are no hang, and what they are derived from."""
        longest = self._longest.get(self._name, 0.0)
        known = self._measured and self._steps.get(self._name, 0) >= STEPS_TO_LEARN
        if not self.hang_factor or not known:
            return math.inf, longest
        return max(LEAST_HANG_SECONDS, self.hang_factor * longest), longest

    def _frame(self) -> FrameType:
        return sys._current_frames()[self._main]

    def _watch(self) -> None:
        while not self._over.wait(min(self._shortest / LOOKS_A_SILENCE, LONGEST_LOOK_SECONDS)):
            self.look()


def _place(innermost: FrameType) -> str:
    """Where a thread is: the innermost line of this package, or of all."""
    here = os.path.dirname(__file__) + os.sep
    frame: FrameType | None = innermost
    while frame is not None and not frame.f_code.co_filename.startswith(here):
        frame = frame.f_back
    frame = frame or innermost
    file = frame.f_code.co_filename.removeprefix(here)
    return f"{frame.f_code.co_name} ({file}:{frame.f_lineno})"


UNWATCHED = Watchdog(0.0, lambda _: None)  # for callers who watch nothing; its thread never runs
