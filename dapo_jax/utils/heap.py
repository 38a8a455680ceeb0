"""The heap of this process: memory that was freed returns to the system."""

import ctypes
import functools

import jax

from dapo_jax.utils.compilations import EVENT

LEAST_SECONDS = 0.2  # shorter compilations leave little memory behind


def trim_heap() -> None:
    """Returns freed memory to the system.

    glibc would keep it, in pieces that the arrays of the next phase do not fit in. Other C
    libraries have no such call; nothing is done there.
    """
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


@functools.cache  # one listener is enough
def trim_after_compilations() -> None:
    """Trims the heap after each compilation from now on: one leaves some 330 MB behind."""

    def listen(event: str, duration_secs: float, **_: object) -> None:
        if event == EVENT and duration_secs >= LEAST_SECONDS:
            trim_heap()

    jax.monitoring.register_event_duration_secs_listener(listen)
