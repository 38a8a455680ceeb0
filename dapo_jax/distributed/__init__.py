"""The processes of a run: process group, inference replica, work queue, preemption."""

from dapo_jax.distributed.preemption import StopSignals
from dapo_jax.distributed.process_group import (
    ALONE,
    EXIT_RESTART,
    EXIT_WAITED,
    ProcessGroup,
)
from dapo_jax.distributed.replica import Replica
from dapo_jax.distributed.work_queue import POLL_SECONDS, WorkQueue

__all__ = [
    "ALONE",
    "EXIT_RESTART",
    "EXIT_WAITED",
    "POLL_SECONDS",
    "ProcessGroup",
    "Replica",
    "StopSignals",
    "WorkQueue",
]
