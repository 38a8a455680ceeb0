"""One program compiled for devices that need not be there, and what the compiler says of it."""

import re
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

from dapo_jax.planning import costs
from dapo_jax.planning.exchanges import Exchange
from dapo_jax.planning.programs import Program
from dapo_jax.types import RunError

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def measure(
    program: Program, axis_sizes: Mapping[str, int], *, keep_text: Path | None = None
) -> dict[str, Any]:
    """What one program needs of a device, as compiled. A program that the compiler refuses for its
    memory gets the compiler's own figure, `refused`, and no costs.

    Args:
        axis_sizes: of the mesh, in its order.
        keep_text: a file for the optimised program, where it is wanted.

    Raises:
        RunError: it is refused for something else.
    """
    begun = time.monotonic()
    lowered = program.lower()
    lowering = time.monotonic() - begun
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        # The text comes from XLA's dump: for TPUs `Compiled.as_text` fails on programs with
        # asynchronous instructions, which the binding cannot parse.
        options = {"xla_dump_to": place, "xla_dump_hlo_as_text": True}
        try:
            compiled = lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            found = _refused(str(error), program)
            if found is None:
                raise RunError(
                    f"the compiler refuses the program: {str(error)[:600]}\n"
                    "config.rollout.kernel='xla' and config.model.attention='xla' do without "
                    "kernels, if it is one of these."
                ) from error
            return found | {"compile_seconds": round(time.monotonic() - begun, 1)}
        seconds = time.monotonic() - begun
        text = _text(Path(place), compiled)
    if keep_text is not None and text is not None:
        keep_text.write_text(text)
    memory, once = compiled.memory_analysis(), compiled.cost_analysis() or {}
    arguments, temporary = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    new = memory.output_size_in_bytes - memory.alias_size_in_bytes
    found = {
        "argument_bytes": arguments,
        "temp_bytes": temporary,
        "peak_bytes": arguments + temporary + new,
        "held_bytes": sum(program.held.values()),
        "held": program.held,
        "refused": None,
        "loops_counted": text is not None,
        "flops": float(once.get("flops", 0.0)),
        "bytes_accessed": float(once.get("bytes accessed", 0.0)),
        "collectives": None,
        "wire_bytes": None,
        "uncounted_kernels": None,
        "trips": program.trips,
        "each_trip": None,
        "lower_seconds": round(lowering, 1),
        "compile_seconds": round(seconds, 3),
    }
    if text is None:
        return found
    whole, one, two = (costs.count(text, n) for n in (program.trips, 1, 2))
    return found | {
        "flops": whole.flops,
        "bytes_accessed": whole.bytes_accessed,
        "collectives": _summed(whole.exchanges, axis_sizes),
        "wire_bytes": whole.wire_bytes,
        "uncounted_kernels": whole.uncounted_kernels,
        # What one more micro-batch, or token, adds.
        "each_trip": {
            "flops": two.flops - one.flops,
            "bytes_accessed": two.bytes_accessed - one.bytes_accessed,
            "wire_bytes": two.wire_bytes - one.wire_bytes,
        },
    }


def _summed(found: Iterable[Exchange], axis_sizes: Mapping[str, int]) -> list[dict[str, Any]]:
    """Exchanges of one kind over the same axes together, those that move most first."""
    rows: dict[tuple[str, tuple[str, ...]], dict[str, Any]] = {}
    for one in found:
        axes = one.axes(axis_sizes)
        empty = {"kind": one.kind, "axes": axes, "calls": 0, "bytes": 0, "wire_bytes": 0.0}
        row = rows.setdefault((one.kind, axes), empty)
        row["calls"] += one.calls
        row["bytes"] += one.calls * one.bytes
        row["wire_bytes"] += one.calls * one.wire_bytes
    return sorted(rows.values(), key=lambda row: -row["wire_bytes"])


def _text(place: Path, compiled: Any) -> str | None:
    """The optimised program as text; None: neither the dump nor the binding has it."""
    dumped = sorted(place.glob("*after_optimizations.txt"), key=lambda file: file.stat().st_size)
    if dumped:
        return dumped[-1].read_text()
    try:
        return compiled.as_text()
    except (jax.errors.JaxRuntimeError, NotImplementedError):
        return None


def too_large(program: Program) -> dict[str, Any]:
    """The numbers of a program whose arguments alone are too much: not worth compiling."""
    reason = "not compiled: temporaries are not in it"
    return _without_costs(program, program.argument_bytes, reason) | {"compile_seconds": 0.0}


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
    return _without_costs(program, int(float(used[1]) * UNITS[used[2]]), used[0])


def _without_costs(program: Program, peak_bytes: int, reason: str) -> dict[str, Any]:
    return {
        "argument_bytes": program.argument_bytes,
        "temp_bytes": max(0, peak_bytes - program.argument_bytes),
        "peak_bytes": peak_bytes,
        "held_bytes": sum(program.held.values()),
        "held": program.held,
        "refused": reason,
        "loops_counted": False,
        "flops": None,
        "bytes_accessed": None,
        "collectives": None,
        "wire_bytes": None,
        "uncounted_kernels": None,
        "trips": program.trips,
        "each_trip": None,
        "lower_seconds": None,
    }
