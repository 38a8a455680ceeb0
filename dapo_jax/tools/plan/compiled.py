"""Memory of one program, compiled for devices that may be absent."""

import re
import time
from typing import Any

import jax

from dapo_jax.tools.plan.programs import Program
from dapo_jax.types import RunError

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
FIGURE = r"([\d.]+)([KMGT]?)"
# Messages of a compiler that refuses a program for its memory. Both figures include the arguments,
# though the second speaks of temporaries.
REFUSALS = (
    rf"Used {FIGURE} of [\d.]+[KMGT]? hbm",
    rf"required for HLO temporaries \({FIGURE}\) exceeds available HBM \([\d.]+[KMGT]?\)",
)


def measure(program: Program) -> dict[str, Any]:
    """Returns the bytes of a device that one program needs. A program refused for its memory has
    the compiler's figure, and the reason in `refused`.

    Raises:
        RunError: the compiler refuses it for another reason.
    """
    lowered = program.lower()
    start = time.monotonic()
    try:
        memory = lowered.compile().memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        used = next((m for m in (re.search(r, str(error)) for r in REFUSALS) if m), None)
        if used is None:
            raise RunError(
                f"the compiler refuses the program: {str(error)[:600]}\n"
                "If one of our kernels is the reason, config.rollout.kernel='xla' and "
                "config.model.attention='xla' avoid them."
            ) from error
        peak = int(float(used[1]) * UNITS[used[2]])
        return _numbers(program, peak, used[0], time.monotonic() - start)
    arguments, temporary = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    new = memory.output_size_in_bytes - memory.alias_size_in_bytes
    found = _numbers(program, arguments + temporary + new, None, time.monotonic() - start)
    return found | {"argument_bytes": arguments, "temp_bytes": temporary}


def too_large(program: Program) -> dict[str, Any]:
    """Returns the numbers of a program whose arguments alone exceed the memory."""
    reason = "not compiled: without temporaries"
    return _numbers(program, program.argument_bytes, reason, 0.0)


def _numbers(
    program: Program, peak_bytes: int, refused: str | None, seconds: float
) -> dict[str, Any]:
    return {
        "argument_bytes": program.argument_bytes,
        "temp_bytes": max(0, peak_bytes - program.argument_bytes),
        "peak_bytes": peak_bytes,
        "held_bytes": sum(program.held.values()),
        "held": program.held,
        "refused": refused,
        "compile_seconds": round(seconds, 3),
    }
