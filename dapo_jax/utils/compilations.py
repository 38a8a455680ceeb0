"""Listeners to XLA's compilations: a counter, and the return of freed memory to the system."""

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


@functools.cache  # one listener is enough
def return_memory() -> None:
    """Returns memory that a compilation has freed to the system, after each one from now on.

    glibc would keep it, some 330 MB, while arrays are taken from the system. Other C libraries have
    no such call and are left alone.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return

    def listen(event: str, duration_secs: float, **_: object) -> None:
        if event == EVENT and duration_secs >= LEAST_SECONDS:
            trim(0)

    jax.monitoring.register_event_duration_secs_listener(listen)
