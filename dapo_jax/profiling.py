"""Traces of whole rollout steps, by JAX's profiler: what device and host did, and when."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax

from dapo_jax.progress import Progress


@contextlib.contextmanager
def traced(workdir: Path, step: int, steps: tuple[int, ...], progress: Progress) -> Iterator[None]:
    """Writes what happens within to profile/step_N of the run's directory, if `step` is one of
    `steps`; of several processes each to a place of its own. What `progress` says is being done is
    in the trace as a span from there to the next."""
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

    with jax.profiler.trace(place, profiler_options=options):
        progress.watch = tell
        try:
            with spans, jax.profiler.StepTraceAnnotation("rollout step", step_num=step):
                yield
        finally:
            progress.watch = told
    progress.say(f"  step {step} is traced in {place}")
