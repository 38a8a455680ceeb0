"""Freed memory returns to the system."""

import ctypes
import os
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from dapo_jax.utils import compilations, heap


@pytest.mark.parametrize("has_trim", [True, False])
def test_memory_returns_after_each_compilation_that_takes_its_time(monkeypatch, has_trim):
    """Other C libraries than glibc have no malloc_trim."""
    listeners, trimmed = [], []
    monkeypatch.setattr(jax.monitoring, "register_event_duration_secs_listener", listeners.append)
    library = SimpleNamespace(**{"malloc_trim": trimmed.append} if has_trim else {})
    monkeypatch.setattr(heap.ctypes, "CDLL", lambda name: library)
    heap.trim_after_compilations.__wrapped__()
    (listen,) = listeners
    listen("/jax/core/compile/jaxpr_trace_duration", 5.0)
    listen(compilations.EVENT, 0.01)
    assert not trimmed
    listen(compilations.EVENT, 0.5, fun_name="update")
    assert trimmed == [0] * has_trim


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="malloc_trim is glibc's")
def test_freed_memory_returns():
    """Without the call glibc keeps what lies below a piece in use."""
    status = Path("/proc/self/statm")
    resident = lambda: int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    pieces = [bytearray(b"x" * 100_000) for _ in range(3000)]
    in_use, before = pieces[-1], resident()
    del pieces
    heap.trim_heap()
    assert before - resident() > 200e6 and in_use
