"""A counter of XLA's compilations, and the return of freed memory to the system."""

import ctypes
import functools

import jax

EVENT = "/jax/core/compile/backend_compile_duration"
LEAST_SECONDS = 0.2  # shorter compilations leave little memory behind


class CompilationCounter:
    """`count` is the number of programs that this process has compiled since."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: object) -> None:
        self.count += event == EVENT


def return_freed() -> None:
    """Returns memory that this process has freed to the system.

    glibc would keep it, in pieces that the arrays of another phase do not fit in. Other C libraries
    have no such call and are left alone.
    """
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


@functools.cache  # one listener is enough
def return_memory() -> None:
    """Calls `return_freed` after each compilation from now on: it leaves some 330 MB behind."""

    def listen(event: str, duration_secs: float, **_: object) -> None:
        if event == EVENT and duration_secs >= LEAST_SECONDS:
            return_freed()

    jax.monitoring.register_event_duration_secs_listener(listen)
