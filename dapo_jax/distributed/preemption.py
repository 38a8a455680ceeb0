"""SIGTERM and Ctrl-C, remembered until the run is where it can stop."""

import signal
from collections.abc import Callable
from types import FrameType

from dapo_jax.distributed.process_group import ALONE, ProcessGroup
from dapo_jax.types import StopRequested
from dapo_jax.utils.progress import Progress


class StopSignals:
    """While active, SIGTERM and Ctrl-C are remembered instead of acted on; a second one that this
    process is sent is not. What one process was sent counts for all: those that were told by
    another are often sent it too, while they save.
    """

    def __init__(self, progress: Progress, process_group: ProcessGroup = ALONE):
        self.progress, self.process_group = progress, process_group
        self.received: int | None = None
        self.sent = False  # a signal, to this process
        self.told = False  # the other processes

    def __enter__(self) -> "StopSignals":
        self.before = {s: signal.signal(s, self._remember) for s in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        if self.received is not None and self.process_group.count > 1:
            return  # a process that stops with others may be sent it while they take leave
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.sent:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.sent = True
        if self.received is None:
            self.received = number
        name = signal.Signals(number).name
        self.progress.say(f"{name}: saving, then stopping (again to stop at once)")

    def check(self) -> None:
        """Raises StopRequested if a signal has come. Where there are several processes, one may
        raise before another: see `ProcessGroup.stop_together`."""
        if self.received is not None:
            if not self.told:
                self.process_group.ask_to_stop(self.received)
                self.told = True
            raise StopRequested
        self.received = self.process_group.stop_asked()
        if self.received is not None:
            self.told = True
            raise StopRequested

    def check_together(self, waiting: Callable[[str], None] = lambda _: None) -> None:
        """Raises StopRequested in all processes, if a signal has come to one of them.

        Args:
            waiting: is told who is waited for.
        """
        with self.process_group.stop_together(waiting):
            self.check()
