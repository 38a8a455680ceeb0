"""What the terminal shows."""

import sys
from collections.abc import Callable
from typing import Any, TextIO

COLUMNS = (
    ("step", 9), ("reward", 8), ("sampled", 8), ("trained", 8), ("held-out", 9), ("length", 7),
    ("entropy", 8), ("tok/s", 7), ("s/step", 7), ("left", 8),
)  # fmt: skip
HEADER_EVERY_LINES = 20


def duration(seconds: float) -> str:
    """Seconds as people write them: 8 s, 3 min 20 s, 2 h 05 min."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"


class Progress:
    """One line per step on standard output, or on `out`; on a terminal, also what is being done
    right now.

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
        self.watch: Callable[[str], None] = lambda _: None  # told of all that is being done

    def say(self, text: str) -> None:
        """Prints a line."""
        self.doing("")
        if not self.quiet:
            print(text, file=self.out, flush=True)

    def doing(self, text: str) -> None:
        """Shows on a terminal, until the next output, what is being done."""
        if text:
            self.watch(text)
        if self.live:
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()

    def step(self, metrics: dict[str, Any]) -> None:
        """Prints the line of a step and the time that the rest should take."""
        step = metrics["step"]
        self.seconds += metrics["time/step"]
        left = self.seconds / max(1, step - self.first_step) * (self.num_steps - step)
        held_out = next((v for k, v in metrics.items() if k.startswith("eval/avg@")), None)
        percent = lambda x: "" if x is None else f"{100 * x:.1f} %"
        number = lambda key, form: format(metrics[key], form) if key in metrics else ""
        values = (
            f"{step}/{self.num_steps}",
            number("reward/mean", "+.3f"),
            percent(metrics.get("accuracy/sampled")),
            percent(metrics.get("accuracy/trained")),
            percent(held_out),
            number("length/mean", ".1f"),
            number("policy/entropy", ".3f"),
            number("perf/tokens_per_second", ".0f"),
            number("time/step", ".1f"),
            duration(left) if step else "",
        )
        if self.lines % HEADER_EVERY_LINES == 0:
            self.say("".join(name.rjust(width) for name, width in COLUMNS))
        self.lines += 1
        self.say("".join(v.rjust(max(w, len(v) + 1)) for v, (_, w) in zip(values, COLUMNS)))
