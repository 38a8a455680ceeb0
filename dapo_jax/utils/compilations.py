"""Counts compilations, and gives their memory back."""

import ctypes
import functools

import jax

EVENT = "/jax/core/compile/backend_compile_duration"
LEAST_SECONDS = 0.2  # of a compilation that leaves enough behind


class CompilationCounter:
    """`count` grows by one with every program that XLA compiles in this process, so that one that
    recompiles at every step cannot hide."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: object) -> None:
        self.count += event == EVENT


@functools.cache  # one listener is enough
def return_memory() -> None:
    """From now on memory that a compilation has freed goes back to the system after it.

    XLA's compiler takes hundreds of megabytes in small pieces. glibc keeps them for more such, and
    what comes then is arrays, which it takes from the system. Other C libraries are left alone.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return

    def listen(event: str, duration_secs: float, **_: object) -> None:
        if event == EVENT and duration_secs >= LEAST_SECONDS:
            trim(0)

    jax.monitoring.register_event_duration_secs_listener(listen)
