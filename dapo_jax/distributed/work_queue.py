"""Shared work queue: processes claim prompts and report whether each group was kept."""

import time
from typing import Any, NamedTuple

POLL_SECONDS = 0.02  # seconds between two polls of the shared queue


class Report(NamedTuple):
    """The outcome of a prompt."""

    kept: bool  # whether its group is kept
    call: int = 0  # decode call, of the engine that generated it, that sampled its last token


class WorkQueue:
    """Claims and outcomes of the prompts of one step, in a run of one process.

    Prompts are numbered in data order. The process that claims a prompt generates its group.
    """

    def __init__(self) -> None:
        self.claimed = 0  # prompts that this process knows to be claimed
        self.outcomes: dict[int, Report] = {}  # by number

    @property
    def num_kept(self) -> int:
        """Groups kept, in any order."""
        return sum(report.kept for report in self.outcomes.values())

    def claim(self) -> int:
        """Returns the number of the next prompt, which is the caller's to generate."""
        self.claimed += 1
        return self.claimed - 1

    def report(self, number: int, kept: bool, call: int = 0) -> None:
        """Reports the outcome of a prompt."""
        self.outcomes[number] = Report(kept, call)

    def poll(self) -> None:
        """Reads the claims and reports of other processes."""

    def reset(self) -> None:
        """Deletes the queue, once no process polls it."""


class SharedWorkQueue(WorkQueue):
    """A work queue in the key-value store that all processes of a run share."""

    def __init__(self, client: Any, place: str):
        super().__init__()
        self._client, self._place, self._last_poll = client, place, -POLL_SECONDS

    def claim(self) -> int:
        number = self._client.key_value_increment(f"{self._place}/next", 1) - 1
        self.claimed = max(self.claimed, number + 1)
        return number

    def report(self, number: int, kept: bool, call: int = 0) -> None:
        super().report(number, kept, call)
        self._client.key_value_set(f"{self._place}/of/{number}", f"{int(kept)} {call}")

    def poll(self) -> None:
        now = time.monotonic()
        if now - self._last_poll < POLL_SECONDS:
            return
        self._last_poll = now
        for key, value in self._client.key_value_dir_get(self._place):
            name = key.rsplit("/", 1)[1]
            if name == "next":
                self.claimed = max(self.claimed, int(value))
            else:
                kept, call = value.split()
                self.outcomes[int(name)] = Report(kept == "1", int(call))

    def reset(self) -> None:
        self._client.key_value_delete(self._place)
