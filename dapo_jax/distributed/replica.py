"""Inference replica: the processes that share one engine because none of them holds the model.

All processes of a replica must make the same engine calls in the same order (SPMD). The leader
takes the host-side decisions that depend on time (stop, next prompt, outcomes) and broadcasts them;
all else follows from results that every process reads. The leader alone scores.

A process that holds the model is a replica of its own, and nothing is broadcast.
"""

from collections.abc import Callable
from typing import TypeVar

from dapo_jax.distributed import process_group
from dapo_jax.distributed.process_group import ProcessGroup
from dapo_jax.types import StopRequested

T = TypeVar("T")


class Replica:
    """The replica that this process belongs to.

    Args:
        process_group: all processes; those of a replica have consecutive indices.
        size: processes per replica.
    """

    def __init__(self, process_group: ProcessGroup = process_group.ALONE, size: int = 1):
        self.process_group, self.size = process_group, size
        self.index, place = divmod(process_group.index, size)
        self.count = process_group.count // size  # replicas
        self.is_leader = place == 0
        self._followers = [self.index * size + i for i in range(1, size)]

    def broadcast(self, ask: Callable[[], T], waiting: Callable[[str], None] = lambda _: None) -> T:
        """Evaluates `ask` on the leader and returns its result on every process of the replica.

        Args:
            ask: returns a small value that JSON can hold. Only the leader calls it.
            waiting: is called with the name of the process that is awaited.

        Raises:
            StopRequested: on every process, where `ask` raised it on the leader.
        """
        if self.size == 1:
            return ask()
        if self.is_leader:
            try:
                value = ask()
            except StopRequested:
                self.process_group.send(self._followers, (True, None))
                raise
            self.process_group.send(self._followers, (False, value))
            return value
        stop, value = self.process_group.recv(self.index * self.size, waiting)
        if stop:
            raise StopRequested
        return value


ALONE = Replica()
