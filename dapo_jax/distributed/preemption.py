"""Signals to stop, remembered until the run can: it saves, then stops."""

import contextlib
import signal
import time
from collections.abc import Callable
from types import FrameType

from dapo_jax.distributed.process_group import ALONE, ProcessGroup
from dapo_jax.types import StopRequested
from dapo_jax.utils.progress import Progress

# A scheduler that signals every process of a job, as Slurm does, and a launcher that passes its own
# signal on make two of one.
ONE_SIGNAL_SECONDS = 2.0


class StopSignals:
    """Context manager that remembers signals to stop: SIGTERM, Ctrl-C and, unless it is ignored as
    under nohup, SIGHUP.

    A signal to one process stops all. A second one to the same process ends it at once; a second
    SIGTERM or SIGHUP within ONE_SIGNAL_SECONDS is taken for the first.
    """

    def __init__(self, progress: Progress, process_group: ProcessGroup = ALONE):
        self.progress, self.process_group = progress, process_group
        self.received: int | None = None  # the signal, of this process or another
        self.sent_at: float | None = None  # when a signal first came to this process
        self._reported = False  # the other processes know

    def __enter__(self) -> "StopSignals":
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        self.before = {number: signal.signal(number, self._remember) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        if self.received is not None and self.process_group.count > 1:
            return  # it may still be sent to this process while the group shuts down
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.sent_at is not None:
            if number != signal.SIGINT and now - self.sent_at < ONE_SIGNAL_SECONDS:
                return
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.sent_at = now
        self.received = self.received or number
        name = signal.Signals(number).name
        with contextlib.suppress(RuntimeError):  # it came while a line was being printed
            self.progress.say(f"{name}: saving, then stopping (again to stop at once)")

    def check(self) -> None:
        """Raises StopRequested if a signal has come. One process may raise before another: see
        `ProcessGroup.stop_together`."""
        if self.received is None:
            # A signal may come to this process during the call: it is not overwritten.
            requested = self.process_group.stop_requested()
            if requested is not None:
                self.received, self._reported = requested, True
        if self.received is not None:
            if not self._reported:
                self.process_group.request_stop(self.received)
                self._reported = True
            raise StopRequested

    def check_together(self, waiting: Callable[[str], None] = lambda _: None) -> None:
        """Raises StopRequested in all processes, if a signal has come to one of them.

        Args:
            waiting: is called with the names of the processes that are awaited.
        """
        with self.process_group.stop_together(waiting):
            self.check()

    def received_by_any(self) -> int | None:
        """Returns the number of a signal that came to a process of the group, the same in all, or
        None. Every process must call it."""
        numbers = self.process_group.all_gather(self.received)
        return next((number for number in numbers if number is not None), None)
