"""A counter of XLA's compilations."""

import jax

EVENT = "/jax/core/compile/backend_compile_duration"


class CompilationCounter:
    """Counts the programs that this process compiles from now on, in `count`."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: object) -> None:
        self.count += event == EVENT
