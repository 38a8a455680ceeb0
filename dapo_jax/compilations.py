"""Counts compilations, so that a program that recompiles at every step cannot hide."""

import jax

EVENT = "/jax/core/compile/backend_compile_duration"


class CompilationCounter:
    """`count` grows by one with every program that XLA compiles in this process."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: object) -> None:
        self.count += event == EVENT
