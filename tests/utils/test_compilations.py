"""Memory that compilations have freed returns to the system."""

from types import SimpleNamespace

import jax
import pytest

from dapo_jax.utils import compilations


@pytest.mark.parametrize("has_trim", [True, False])
def test_memory_returns_after_each_compilation_that_takes_its_time(monkeypatch, has_trim):
    """Other C libraries than glibc have no malloc_trim."""
    listeners, trimmed = [], []
    monkeypatch.setattr(jax.monitoring, "register_event_duration_secs_listener", listeners.append)
    library = SimpleNamespace(**{"malloc_trim": trimmed.append} if has_trim else {})
    monkeypatch.setattr(compilations.ctypes, "CDLL", lambda name: library)
    compilations.return_memory.__wrapped__()
    assert len(listeners) == has_trim
    for listen in listeners:
        listen("/jax/core/compile/jaxpr_trace_duration", 5.0)
        listen(compilations.EVENT, 0.01)
        assert not trimmed
        listen(compilations.EVENT, 0.5, fun_name="update")
        assert trimmed == [0]


def test_the_event_is_that_of_jax():
    """JAX does not promise its name: the listener would be silent where it changed."""
    counter = compilations.CompilationCounter()
    jax.jit(lambda x: x * 3 + 1).lower(1.0).compile()
    assert counter.count == 1
