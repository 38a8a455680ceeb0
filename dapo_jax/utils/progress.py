"""Progress of a run on the terminal."""

import sys
from collections.abc import Callable
from typing import Any, TextIO

HEADER_EVERY_LINES = 20


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
    """

    def __init__(
        self, num_steps: int, last_step: int, out: TextIO | None = None, *, quiet: bool = False
    ):
        self.num_steps, self.out, self.quiet = num_steps, out, quiet
        self.first_step = last_step
        self.seconds = 0.0
        self.lines = 0
        self.live = sys.stderr.isatty() and not quiet
        self.watch: Callable[[str], None] = lambda _: None  # receives every phase

    def say(self, text: str) -> None:
        """Prints a line."""
        self.doing("")
        if not self.quiet:
            print(text, file=self.out, flush=True)

    def doing(self, text: str) -> None:
        """Shows the current phase on a terminal, until the next output."""
        if text:
            self.watch(text)
        if self.live:
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()

    def step(self, metrics: dict[str, Any]) -> None:
        """Prints the line of a step, with an estimate of the time left."""
        step = metrics["step"]
        self.seconds += metrics["time/step"]
        left = self.seconds / max(1, step - self.first_step) * (self.num_steps - step)
        accuracy = next((key for key in metrics if key.startswith("eval/avg@")), "")
        percent = lambda key: f"{100 * metrics[key]:.1f} %" if key in metrics else ""
        number = lambda key, form: format(metrics[key], form) if key in metrics else ""
        columns = (
            ("step", 9, f"{step}/{self.num_steps}"),
            ("reward", 8, number("reward/mean", "+.3f")),
            ("sampled", 8, percent("accuracy/sampled")),
            ("trained", 8, percent("accuracy/trained")),
            ("held-out", 9, percent(accuracy)),
            ("length", 7, number("length/mean", ".1f")),
            ("entropy", 8, number("policy/entropy", ".3f")),
            ("tok/s", 7, number("perf/tokens_per_second", ".0f")),
            ("s/step", 7, number("time/step", ".1f")),
            ("left", 8, duration(left) if step else ""),
        )
        if self.lines % HEADER_EVERY_LINES == 0:
            self.say("".join(title.rjust(width) for title, width, _ in columns))
        self.lines += 1
        self.say("".join(text.rjust(max(width, len(text) + 1)) for _, width, text in columns))
