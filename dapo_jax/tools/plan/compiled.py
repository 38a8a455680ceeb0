"""Memory of one program, compiled for devices that need not be there."""

import re
import time
from typing import Any

import jax

from dapo_jax.tools.plan.programs import Program
from dapo_jax.types import RunError

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def measure(program: Program) -> dict[str, Any]:
    """Bytes of a device that one program needs, as compiled. A program that the compiler refuses
    for its memory has the compiler's own figure, and says so in `refused`.

    Raises:
        RunError: it is refused for something else.
    """
    lowered = program.lower()
    begun = time.monotonic()
    try:
        memory = lowered.compile().memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        found = _refused(str(error), program)
        if found is None:
            raise RunError(
                f"the compiler refuses the program: {str(error)[:600]}\n"
                "config.rollout.kernel='xla' and config.model.attention='xla' do without "
                "kernels, if it is one of these."
            ) from error
        return found | {"compile_seconds": round(time.monotonic() - begun, 1)}
    arguments, temporary = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    new = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return {
        "argument_bytes": arguments,
        "temp_bytes": temporary,
        "peak_bytes": arguments + temporary + new,
        "held_bytes": sum(program.held.values()),
        "held": program.held,
        "refused": None,
        "compile_seconds": round(time.monotonic() - begun, 3),
    }


def too_large(program: Program) -> dict[str, Any]:
    """The numbers of a program whose arguments alone are too much: not worth compiling."""
    reason = "not compiled: temporaries are not in it"
    return _by_peak(program, program.argument_bytes, reason) | {"compile_seconds": 0.0}


def _refused(message: str, program: Program) -> dict[str, Any] | None:
    """What is known of a program that was refused for its memory; None: for something else."""
    figure = r"([\d.]+)([KMGT]?)"
    # The second names temporaries, but its figure has the arguments in it as well.
    used = re.search(rf"Used {figure} of [\d.]+[KMGT]? hbm", message) or re.search(
        rf"required for HLO temporaries \({figure}\) exceeds available HBM \([\d.]+[KMGT]?\)",
        message,
    )
    if used is None:
        return None
    return _by_peak(program, int(float(used[1]) * UNITS[used[2]]), used[0])


def _by_peak(program: Program, peak_bytes: int, reason: str) -> dict[str, Any]:
    return {
        "argument_bytes": program.argument_bytes,
        "temp_bytes": max(0, peak_bytes - program.argument_bytes),
        "peak_bytes": peak_bytes,
        "held_bytes": sum(program.held.values()),
        "held": program.held,
        "refused": reason,
    }
