"""Runs the parts of a check, each in a process of its own.

So a part that dies or hangs takes no other with it, and the memory of a device starts at nothing.
The first process opens no device.
"""

import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dapo_jax.tools.check import page
from dapo_jax.tools.check.findings import Check, Finding, Result, Store
from dapo_jax.types import UserError
from dapo_jax.utils.files import make_writable

PARTS = ("device", "numbers", "rollout", "update", "step", "resume")
NO_MEMORY = ("RESOURCE_EXHAUSTED", "Out of memory", "out of memory")
STOPPED_AFTER = 5.0  # seconds that a part has to end after SIGTERM


def check(output: Path, parts: Sequence[str], minutes: float) -> None:
    """Checks what `run` is called with, and creates the directory if it is missing.

    Raises:
        UserError: an unknown part, no time, or a directory that cannot be written.
    """
    for part in parts:
        if part not in PARTS:
            raise UserError(f"--parts must be some of {', '.join(PARTS)}; got {part!r}.")
    if not 0 < minutes < math.inf:
        raise UserError(f"--minutes must be above 0; got {minutes:g}.")
    make_writable(output, "--output")


def run(
    launcher: Path,
    output: Path,
    parts: Sequence[str],
    minutes: float,
    say: Callable[[str], None],
) -> Store:
    """Runs those checks of the parts that have no finding yet, and writes the page.

    Args:
        launcher: launch/check.py, which is called again for each part.
        output: directory of check.json, check.html and a log of each part.
        minutes: of all parts together. What has no time left is run by the next call.

    Raises:
        UserError: `output` holds the check of another machine.
    """
    store, end = Store(output), time.monotonic() + 60 * minutes
    # Or the part would go on without this process, and hold the devices.
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        for part in parts:
            seconds = end - time.monotonic()
            if seconds <= 0:
                say(f"{part}: not run, the {minutes:g} minutes are over")
                continue
            say(f"{part} (of {', '.join(parts)}; {seconds / 60:.1f} minutes left)")
            store.forget(part)
            while _run_part(launcher, output, part, store, end, say):
                say(f"  {part}: starts again after the check that ended it")
    finally:
        signal.signal(signal.SIGTERM, before)
        page.write(store)
    return store


def _run_part(
    launcher: Path, output: Path, part: str, store: Store, end: float, say: Callable[[str], None]
) -> bool:
    """Starts a part, shows its findings as they come, and stops it when the time is over.

    Returns whether the part died of a check and has others left.
    """
    command = [sys.executable, str(launcher), f"--output={output}", f"--parts={part}", "--here"]
    shown = {(f.part, f.name) for f in store.findings}
    with (
        # A part that is killed leaves its temporary files, such as a checkpoint of gigabytes.
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place,
        (output / f"{part}.log").open("w") as log,
    ):
        variables = os.environ | {"TMPDIR": place}
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=variables)
        try:
            while process.poll() is None and time.monotonic() < end:
                time.sleep(0.2)
                _show(store, shown, say)
            over = process.poll() is None
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(STOPPED_AFTER)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
    _show(store, shown, say)
    if over:
        say(f"  {part}: stopped, the time is over; the same command runs what is missing")
    elif process.returncode == 2:  # the user's mistake, such as another machine's check.json
        raise UserError(
            (output / f"{part}.log").read_text().strip().splitlines()[-1].removeprefix("error: ")
        )
    elif process.returncode:
        missing = [
            name for name in store.planned.get(part, ["start"]) if not store.find(part, name)
        ]
        if missing:
            text = f"the process ended with exit code {process.returncode}: see {part}.log"
            store.add(Finding(part, missing[0], "wrong", text, {}, 0.0))
            _show(store, shown, say)
        return len(missing) > 1 and time.monotonic() < end
    return False


def _show(store: Store, shown: set[tuple[str, str]], say: Callable[[str], None]) -> None:
    """Says the findings that are not among those `shown`, and adds them there."""
    store.read()
    for f in store.findings:
        if (f.part, f.name) not in shown:
            shown.add((f.part, f.name))
            say(f"  {f.verdict:7}  {f.name}: {f.reason} ({f.seconds:.0f} s)")


def run_here(output: Path, part: str, base: dict[str, Any]) -> None:
    """Runs the checks of one part that have no finding yet, in this process.

    Args:
        base: the values of configs/tiny_dapo.py.
    """
    from dapo_jax.tools.check.machine import this_machine

    store, machine = Store(output), this_machine()
    none_fits = Result("not run", "the memory is too small for the smallest of the models")
    checks = _checks(part, machine, store, base) or {"models": lambda: none_fits}
    store.begin(part, checks, machine.identity())
    for name, check in checks.items():
        if store.find(part, name) is None:
            start = time.monotonic()
            result = _result(check)
            seconds = time.monotonic() - start
            figures = dict(result.figures)
            store.add(Finding(part, name, result.verdict, result.reason, figures, seconds))


def _checks(part: str, machine: Any, store: Store, base: dict[str, Any]) -> dict[str, Check]:
    from dapo_jax.tools.check import device, numerics, rollout, steps, update

    match part:
        case "device":
            return device.checks(machine)
        case "numbers":
            return numerics.checks(machine, base)
        case "rollout":
            return rollout.checks(machine, store)
        case "update":
            return update.checks(machine, store, base)
        case "step":
            return steps.step_checks(machine, base)
        case _:
            return steps.resume_checks(machine, base)


def _result(check: Check) -> Result:
    """Returns the result of a check; one that fails is wrong, unless the memory is too small."""
    try:
        return check()
    except Exception as error:
        text = str(error)
        first = next(iter(text.splitlines()), "")[:300]
        if any(words in text for words in NO_MEMORY):
            return Result("not run", f"it does not fit: {first}")
        import traceback

        traceback.print_exc()
        return Result("wrong", f"{type(error).__name__}: {first}")
