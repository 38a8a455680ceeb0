"""What is to be known of compilations: how many there are, whether one is under way, and that their
memory comes back."""

import ctypes
import functools
import os
from types import FrameType

import jax

EVENT = "/jax/core/compile/backend_compile_duration"
LEAST_SECONDS = 0.2  # of a compilation that leaves enough behind
COMPILER = os.path.join("jax", "_src", "compiler.py")  # nothing public tells of its beginning


class CompilationCounter:
    """`count` grows by one with every program that XLA compiles in this process, so that one that
    recompiles at every step cannot hide."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: object) -> None:
        self.count += event == EVENT


def under_way(frame: FrameType | None) -> bool:
    """Whether a thread compiles, or reads what was compiled before.

    Args:
        frame: its innermost.
    """
    while frame is not None and not frame.f_code.co_filename.endswith(COMPILER):
        frame = frame.f_back
    return frame is not None


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
