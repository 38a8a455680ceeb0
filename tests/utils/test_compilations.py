"""Memory that compilations have freed goes back to the system."""

from types import SimpleNamespace

import jax
import pytest

from dapo_jax.utils import compilations


@pytest.fixture
def listening(monkeypatch):
    """(what `return_memory` has registered, the calls of the C library's malloc_trim)."""
    listeners, calls = [], []
    monkeypatch.setattr(jax.monitoring, "register_event_duration_secs_listener", listeners.append)
    library = SimpleNamespace(malloc_trim=calls.append)
    monkeypatch.setattr(compilations.ctypes, "CDLL", lambda name: library)
    return listeners, calls, library


def test_after_each_compilation_that_takes_its_time(listening):
    listeners, calls, _ = listening
    compilations.return_memory.__wrapped__()
    (listen,) = listeners
    listen("/jax/core/compile/jaxpr_trace_duration", 5.0)
    listen(compilations.EVENT, 0.01)
    assert not calls
    listen(compilations.EVENT, 0.5, fun_name="update")
    assert calls == [0]


def test_other_c_libraries_are_left_alone(listening):
    listeners, _, library = listening
    del library.malloc_trim
    compilations.return_memory.__wrapped__()
    assert not listeners


def test_the_event_is_that_of_jax():
    """JAX does not promise its name: the listener would be silent where it changed."""
    counter = compilations.CompilationCounter()
    jax.jit(lambda x: x * 3 + 1).lower(1.0).compile()
    assert counter.count == 1
