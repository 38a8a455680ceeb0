"""Traces of whole rollout steps by JAX's profiler."""

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
    """Traces the block to `workdir`/profile/step_N if `step` is one of `steps`.

    Each of several processes has a directory below. Each phase that `progress` shows is a span of
    the trace. A trace that fails is reported and does not end the run.

    Args:
        writing: called before the trace is written, which takes several times as long as the step.
    """
    if step not in steps:
        yield
        return
    place = workdir / "profile" / f"step_{step:06d}"
    if jax.process_count() > 1:
        place /= f"process_{jax.process_index()}"
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # calls of Python functions would be most of the trace
    watch, spans = progress.watch, contextlib.ExitStack()

    def next_span(phase: str) -> None:
        watch(phase)
        spans.close()
        spans.enter_context(jax.profiler.TraceAnnotation(phase))

    failed = lambda e: progress.say(f"  warning: step {step} is not traced in {place}: {e}")
    try:
        jax.profiler.start_trace(place, profiler_options=options)
    except Exception as error:  # XLA's own, of several kinds
        failed(error)
        yield
        return
    progress.watch = next_span
    try:
        with spans, jax.profiler.StepTraceAnnotation("rollout step", step_num=step):
            yield
    finally:
        progress.watch = watch
        writing()
        try:
            jax.profiler.stop_trace()
            progress.say(f"  step {step} is traced in {place}")
        except Exception as error:
            failed(error)
