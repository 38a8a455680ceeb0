"""Progress of a run: on the terminal, and the newest step for launch/restart.sh."""

import contextlib
import errno
import os
import select
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TextIO

HEADER_EVERY_LINES = 20
WRITE_SECONDS = 1.0  # that a thread waits for its output


class Column(NamedTuple):
    """A column of the lines of steps."""

    title: str
    width: int
    metric: str  # that it shows; one that ends in @ stands for the first that begins so
    form: str  # of its value, as of `format`; "%": as a percentage


COLUMNS = (
    Column("reward", 8, "reward/mean", "+.3f"),
    Column("sampled", 8, "accuracy/sampled", "%"),
    Column("trained", 8, "accuracy/trained", "%"),
    Column("held-out", 9, "eval/avg@", "%"),
    Column("length", 7, "length/mean", ".1f"),
    Column("entropy", 8, "policy/entropy", ".3f"),
    Column("tok/s", 7, "perf/tokens_per_second", ".0f"),
    Column("s/step", 7, "time/step", ".1f"),
)


def duration(seconds: float) -> str:
    """Returns seconds as text: 8 s, 3 min 20 s, 2 h 05 min."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"


class Progress:
    """One line per step on standard output, or on `out`; on a terminal also the current phase.

    Args:
        quiet: shows nothing.
        columns: between the number of the step and the time left.
    """

    def __init__(
        self,
        num_steps: int,
        out: TextIO | None = None,
        *,
        quiet: bool = False,
        columns: tuple[Column, ...] = COLUMNS,
    ):
        self.columns = columns
        self.num_steps, self.out, self.quiet = num_steps, out, quiet
        self.first_step = 0  # the last step of an earlier start, where a run resumes
        self.seconds = 0.0
        self.lines = 0
        # Standard error is None where the program was started without one, by `2>&-`.
        self.live = sys.stderr is not None and sys.stderr.isatty() and not quiet
        self.watch: Callable[[str], None] = lambda _: None  # receives every phase

    def say(self, text: str) -> None:
        """Prints a line."""
        self.doing("")
        if not self.quiet:
            try:
                print(_printable(text, self.out or sys.stdout), file=self.out, flush=True)
            except OSError as error:
                # `| tee`, say, which Ctrl-C has ended, or a terminal that was closed.
                if error.errno not in (errno.EPIPE, errno.EIO):
                    raise
                drop_unread_output()

    def doing(self, text: str) -> None:
        """Shows the current phase on a terminal, until the next output."""
        if text:
            self.watch(text)
        if self.live:
            try:
                sys.stderr.write(f"\r\x1b[K{_printable(text, sys.stderr)}")
                sys.stderr.flush()
            except OSError:  # the terminal was closed
                self.live = False

    def step(self, metrics: dict[str, Any]) -> None:
        """Prints the line of a step, with an estimate of the time left. Where launch/restart.sh
        started the run, the number of the step is written to the file that it reads."""
        step = metrics["step"]
        if file := os.environ.get("DAPO_PROGRESS"):
            with contextlib.suppress(OSError):  # restart.sh then sees no progress
                Path(file).write_text(f"{step}\n")
        if step:  # step 0 is the evaluation of the base model
            self.seconds += metrics["time/step"]
        left = self.seconds / max(1, step - self.first_step) * (self.num_steps - step)
        columns = (
            ("step", 9, f"{step}/{self.num_steps}"),
            *((c.title, c.width, _cell(metrics, c)) for c in self.columns),
            ("left", 8, duration(left) if step else ""),
        )
        if self.lines % HEADER_EVERY_LINES == 0:
            self.say("".join(title.rjust(width) for title, width, _ in columns))
        self.lines += 1
        self.say("".join(text.rjust(max(width, len(text) + 1)) for _, width, text in columns))


def _printable(text: str, out: TextIO) -> str:
    """Returns the text with escapes for what the encoding of `out` does not have."""
    encoding = getattr(out, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def drop_unread_output() -> bool:
    """Sends standard output and errors to nowhere if they go to a pipe that no process reads: the
    run continues without them, and Python's own flush at the end has no error.

    Returns:
        Whether one of them did.
    """
    found = False
    for stream in filter(None, (sys.stdout, sys.stderr)):
        poll = select.poll()
        try:
            poll.register(stream.fileno(), 0)
        except (OSError, ValueError):  # not a file
            continue
        if poll.poll(0):  # errors alone are asked for
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
            found = True
    return found


def written_in_time(write: Callable[[], None]) -> None:
    """Writes output in a thread of its own, and waits for it WRITE_SECONDS: it may stand still
    (Ctrl-S, a pipe that is not read), or fail."""

    def quietly() -> None:
        with contextlib.suppress(Exception):
            write()

    thread = threading.Thread(target=quietly, daemon=True)
    thread.start()
    thread.join(WRITE_SECONDS)


def _cell(metrics: dict[str, Any], column: Column) -> str:
    """Returns the text of a column; "" where the step has no such metric."""
    name, form = column.metric, column.form
    if name.endswith("@"):
        name = next((key for key in metrics if key.startswith(name)), "")
    if name not in metrics:
        return ""
    return f"{100 * metrics[name]:.1f} %" if form == "%" else format(metrics[name], form)
