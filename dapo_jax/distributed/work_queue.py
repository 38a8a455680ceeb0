"""Who draws which prompt of a step, and what came of it: what processes tell each other of it."""

import time
from typing import Any

LOOK_SECONDS = 0.02  # between two looks at what others tell


class Board:
    """Who draws which of the prompts of a step, and what came of them. Prompts have numbers, in the
    order of the data; each is drawn by the process that claims it."""

    def __init__(self) -> None:
        self.begun = 0  # prompts claimed, as far as is known
        self.verdicts: dict[int, bool] = {}  # by number: whether the group is informative

    def claim(self) -> int:
        """The number of the next prompt, which is the caller's to draw."""
        self.begun += 1
        return self.begun - 1

    def tell(self, number: int, informative: bool) -> None:
        """Tells what came of a prompt."""
        self.verdicts[number] = informative

    def look(self) -> None:
        """Takes in what others have told."""

    def clear(self) -> None:
        """Forgets everything, once nobody looks any more."""


class SharedBoard(Board):
    """One that all processes see."""

    def __init__(self, client: Any, place: str):
        super().__init__()
        self._client, self._place, self._looked = client, place, -LOOK_SECONDS

    def claim(self) -> int:
        number = self._client.key_value_increment(f"{self._place}/next", 1) - 1
        self.begun = max(self.begun, number + 1)
        return number

    def tell(self, number: int, informative: bool) -> None:
        super().tell(number, informative)
        self._client.key_value_set(f"{self._place}/of/{number}", str(int(informative)))

    def look(self) -> None:
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        for key, value in self._client.key_value_dir_get(self._place):
            name = key.rsplit("/", 1)[1]
            if name == "next":
                self.begun = max(self.begun, int(value))
            else:
                self.verdicts[int(name)] = value == "1"

    def clear(self) -> None:
        self._client.key_value_delete(self._place)
