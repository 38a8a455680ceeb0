"""Traces of whole rollout steps, by JAX's profiler: what device and host did, and when."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from dapo_jax.utils.progress import Progress


@contextlib.contextmanager
def traced(
    workdir: Path,
    step: int,
    steps: tuple[int, ...],
    progress: Progress,
    writing: Callable[[], None],
) -> Iterator[None]:
    """Writes what happens within to profile/step_N of the run's directory, if `step` is one of
    `steps`; of several processes each to a place of its own. What `progress` says is being done is
    in the trace as a span from there to the next. A trace that cannot be made is told, and ends
    nothing.

    Args:
        writing: called before the trace is written, which takes several times as long as the step.
    """
    if step not in steps:
        yield
        return
    place = workdir / "profile" / f"step_{step:06d}"
    if jax.process_count() > 1:
        place = place / f"process_{jax.process_index()}"
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # every call of Python's would be most of the trace
    told, spans = progress.watch, contextlib.ExitStack()

    def tell(what: str) -> None:
        told(what)
        spans.close()
        spans.enter_context(jax.profiler.TraceAnnotation(what))

    def failed(error: Exception) -> None:
        progress.say(f"  warning: step {step} is not traced in {place}: {error}")

    try:
        jax.profiler.start_trace(place, profiler_options=options)
    except Exception as error:  # XLA's own, of several kinds
        failed(error)
        yield
        return
    progress.watch = tell
    try:
        with spans, jax.profiler.StepTraceAnnotation("rollout step", step_num=step):
            yield
    finally:
        progress.watch = told
        writing()
        try:
            jax.profiler.stop_trace()
        except Exception as error:
            failed(error)
        else:
            progress.say(f"  step {step} is traced in {place}")
