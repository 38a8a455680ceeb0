"""Traces of steps: a failure ends no run and hides no stop."""

import jax
import pytest

from dapo_jax.types import StopRequested
from dapo_jax.utils.profiling import traced
from dapo_jax.utils.progress import Progress


@pytest.mark.parametrize("fails", ["start_trace", "stop_trace"])
def test_a_trace_that_cannot_be_made_is_reported(monkeypatch, capsys, tmp_path, fails):
    def broken(*_, **__):
        raise RuntimeError("no room")

    other = {"start_trace": "stop_trace", "stop_trace": "start_trace"}[fails]
    monkeypatch.setattr(jax.profiler, fails, broken)
    monkeypatch.setattr(jax.profiler, other, lambda *_, **__: None)
    progress, watched, written = Progress(0), [], []
    progress.watch = watched.append
    with traced(tmp_path, 3, (3,), progress, lambda: written.append(3)):
        progress.doing("step 3: sampling")
    assert "warning: step 3 is not traced in" in capsys.readouterr().out
    with (
        pytest.raises(StopRequested),
        traced(tmp_path, 3, (3,), progress, lambda: written.append(3)),
    ):
        raise StopRequested
    assert "warning" in capsys.readouterr().out
    progress.doing("step 4: sampling")
    assert watched == ["step 3: sampling", "step 4: sampling"]
    assert progress.watch == watched.append, "later phases are no spans of a trace"
    assert written == ([3, 3] if fails == "stop_trace" else [])


def test_other_steps_are_not_traced(monkeypatch, tmp_path):
    monkeypatch.setattr(jax.profiler, "start_trace", None)
    with traced(tmp_path, 4, (3, 5), Progress(0), lambda: None):
        pass
    assert not list(tmp_path.iterdir())
