"""Processes that draw together.

A model that the devices of one process do not hold is split over those of some: a team, with one
engine between them. All of a team make the same calls of it, in the same order, as JAX wants it.
What these depend on besides the problems is asked by the first alone, who tells the others: whether
to stop, which prompt is next, whether enough is drawn. The rest follows from what the device
returns, which all of them read. The first alone scores, and speaks for the team.

Where each process holds the model it is a team of its own, and nothing is told.
"""

from collections.abc import Callable
from typing import TypeVar

from dapo_jax.distributed import process_group
from dapo_jax.distributed.process_group import Processes
from dapo_jax.types import StopRequested

T = TypeVar("T")


class Team:
    """The team that this process is in.

    Args:
        them: all processes; a team is some with numbers in a row.
        size: of every team.
    """

    def __init__(self, them: Processes = process_group.ALONE, size: int = 1):
        self.them, self.size = them, size
        self.index, place = divmod(them.index, size)
        self.count = them.count // size  # teams
        self.first = place == 0
        self._others = [self.index * size + i for i in range(1, size)]

    def broadcast(self, ask: Callable[[], T], waiting: Callable[[str], None] = lambda _: None) -> T:
        """What `ask` returns, or StopRequested, in the first of the team; the others do not ask.

        Args:
            ask: returns something small that JSON can hold.
            waiting: is told who is waited for.
        """
        if self.size == 1:
            return ask()
        if not self.first:
            stop, value = self.them.hear(self.index * self.size, waiting)
            if stop:
                raise StopRequested
            return value
        try:
            value = ask()
        except StopRequested:
            self.them.tell(self._others, (True, None))
            raise
        self.them.tell(self._others, (False, value))
        return value


ALONE = Team()
