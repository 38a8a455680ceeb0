"""Process group: the processes of a run, and their communication besides XLA's collectives.

Every process runs the same program (JAX's multi-controller model). `jax.distributed` finds the
processes and keeps a key-value store on one of them. Small values travel through the store: claims
of prompts, outcomes, stop requests. Responses are large and travel by a collective.

A run of one process goes through the same code, without a store.
"""

import contextlib
import faulthandler
import json
import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax._src import distributed  # the store has no public name; orbax reads it from here too
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dapo_jax.distributed.work_queue import POLL_SECONDS, SharedWorkQueue, WorkQueue
from dapo_jax.types import StopRequested, UserError, causes

T = TypeVar("T")
# Exit status of a fault that is not the run's: launch/restart.sh starts the run again.
EXIT_RESTART = 75
BEAT_SECONDS = 2.0
DEAD_SECONDS = 20.0  # without a heartbeat
# JAX's own limit. JAX ends a process with a stack trace, so ours is shorter. Its heartbeats come
# every half of the limit, so that it may act half of it after a loss.
HEARTBEAT_SECONDS = 58
SHUTDOWN_SECONDS = 60
SENT_TOGETHER = 256  # sent values that are deleted at a time
GATHERED_AT_ONCE = 2**28  # bytes, over all processes
LEAST_GATHERED = 2**16  # bytes per process


class ProcessGroup:
    """The processes of a run, seen from one of them.

    There is one numbering, `jax.process_index()`: of devices, meshes, replicas, checkpoints and of
    what is gathered. `jax.distributed` has ids of its own, which on TPUs need not be the same.

    Args:
        index: `jax.process_index()`.
        client: of the store; None: this process is alone.
        keeper: the index of the process that keeps the store, whose id is 0.
    """

    def __init__(self, index: int = 0, count: int = 1, client: Any = None, keeper: int = 0):
        self.index, self.count, self._client, self.keeper = index, count, client, keeper
        self.hosts = [socket.gethostname()] * count
        self._calls = self._queues = self._sends = 0
        self._looked = 0.0
        self._leaving = False  # a connection that ends is no loss any more
        self._is_loading = False  # reads weights or a checkpoint
        self._gone = threading.Event()
        self._unanswered = 0  # times that this process found nothing new from the store

    @property
    def is_primary(self) -> bool:
        """Whether this process writes files and prints."""
        return self.index == 0

    def described(self) -> str:
        """Returns a description such as "4 processes on 2 hosts, 16 devices"."""
        hosts = len(set(self.hosts))
        return (
            f"{self.count} processes on {hosts} host{'s' * (hosts > 1)}, "
            f"{jax.device_count()} devices"
        )

    def all_gather(self, value: T, waiting: Callable[[str], None] = lambda _: None) -> list[T]:
        """Returns the value of each process, by index. Every process must call it.

        Args:
            value: small, and JSON can hold it.
            waiting: is called with the processes that are waited for.
        """
        if self.count == 1:
            return [value]
        place, self._calls = f"gather/{self._calls}", self._calls + 1
        self._client.key_value_set(f"{place}/{self.index}", json.dumps(value))
        pause = 0.0005
        while True:
            found = dict(self._client.key_value_dir_get(place))
            given = {int(key.rsplit("/", 1)[1]): text for key, text in found.items()}
            if len(given) == self.count:
                break
            missing = [i for i in range(self.count) if i not in given]
            waiting("process " + ", ".join(map(str, missing[:8])))
            time.sleep(pause)
            pause = min(2 * pause, POLL_SECONDS)
        if self._calls >= 2:  # all have seen those of the call before, or they were not here
            self._client.key_value_delete(f"gather/{self._calls - 2}/{self.index}")
        return [json.loads(given[i]) for i in range(self.count)]

    @contextlib.contextmanager
    def stop_together(self, waiting: Callable[[str], None] = lambda _: None) -> Iterator[None]:
        """Raises StopRequested in every process at the end of the block, if it was raised within
        the block in one of them."""
        stopped = False
        try:
            yield
        except StopRequested:
            stopped = True
        if any(self.all_gather(stopped, waiting)):
            raise StopRequested

    def all_gather_objects(self, value: T) -> list[T]:
        """Returns the value of each process, by index. For large values: they are pickled and
        travel by a collective. Every process must call it."""
        if self.count == 1:
            return [value]
        data = np.frombuffer(pickle.dumps(value, protocol=5), np.uint8)
        sizes = self.all_gather(len(data))
        # Few sizes, since each one is a program of its own.
        room = 1 << (max(*sizes, LEAST_GATHERED) - 1).bit_length()
        chunk = min(room, max(1, GATHERED_AT_ONCE // self.count))
        parts = []
        for start in range(0, max(sizes), chunk):
            mine = np.zeros(chunk, np.uint8)
            mine[: len(data[start : start + chunk])] = data[start : start + chunk]
            parts.append(_gather(mine))
        whole = np.concatenate(parts, axis=1)
        return [pickle.loads(whole[i, :size].tobytes()) for i, size in enumerate(sizes)]

    def send(self, others: Sequence[int], value: Any) -> None:
        """Sends a small value that JSON can hold to other processes, which call `recv`. A process
        sends to the same ones always, and receives from one."""
        for other in others:
            self._client.key_value_set(self._sent_key(other), json.dumps(value))
        self._sends += 1

    def recv(self, from_whom: int, waiting: Callable[[str], None] = lambda _: None) -> Any:
        """Returns the next value that was sent to this process."""
        key = self._sent_key(self.index)
        while True:
            try:
                text = self._client.blocking_key_value_get(key, int(1000 * BEAT_SECONDS))
                break
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
                waiting(f"process {from_whom}")
        self._sends += 1
        if self._sends % SENT_TOGETHER == 0:
            self._client.key_value_delete(key.rsplit("/", 1)[0])
        return json.loads(text)

    def _sent_key(self, whom: int) -> str:
        """Returns the key of the next value sent to a process."""
        return f"sent/{whom}/{self._sends // SENT_TOGETHER}/{self._sends}"

    def work_queue(self) -> WorkQueue:
        """Returns a work queue for one step; every process must ask for as many as the others."""
        self._queues += 1
        if self.count == 1:
            return WorkQueue()
        return SharedWorkQueue(self._client, f"work_queue/{self._queues}")

    def ask_to_stop(self, signal_number: int) -> None:
        """Makes `stop_asked` return a signal in every process."""
        if self.count > 1:
            self._client.key_value_set("stop/signal", str(signal_number), allow_overwrite=True)

    def stop_asked(self) -> int | None:
        """Returns the signal that some process received, or None."""
        now = time.monotonic()
        if self.count == 1 or now - self._looked < 5 * POLL_SECONDS:
            return None
        self._looked = now
        found = dict(self._client.key_value_dir_get("stop"))
        return int(found["stop/signal"]) if found else None

    def check_place(self, directory: Any) -> None:
        """Raises UserError unless all processes see the same directory."""
        if self.count == 1:
            return
        mark = directory / ".processes"
        if self.is_primary:
            directory.mkdir(parents=True, exist_ok=True)
            mark.write_text(str(os.getpid()))
        (written, *_) = self.all_gather(str(os.getpid()))
        seen = self.all_gather(mark.exists() and mark.read_text() == written)
        if self.is_primary:
            mark.unlink(missing_ok=True)
        if not all(seen):
            i = seen.index(False)
            raise UserError(
                f"--workdir={directory} is not the same directory for all processes: process {i} "
                f"on {self.hosts[i]} does not see what process 0 on {self.hosts[0]} wrote there. "
                "Choose one on a file system that all hosts share."
            )

    def watch(self) -> None:
        """From now on, in a thread: gives signs of life, and ends this process where another gives
        none or has failed."""
        if self.count > 1:
            self.hosts = self.all_gather(socket.gethostname())
            for what in (self._watch, self._watch_store):
                threading.Thread(target=what, name="processes", daemon=True).start()

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Declares that this process reads weights or a checkpoint: it may give no heartbeat for a
        while, and the others do not take it for dead."""
        self._is_loading = True
        try:
            yield
        finally:
            self._is_loading = False

    def _watch_store(self) -> None:
        """Its process may be frozen, and never answer."""
        while not self._gone.wait(BEAT_SECONDS):
            # Counted, as this process, too, may have been frozen for a while.
            self._unanswered += 1
            if self._unanswered > DEAD_SECONDS / BEAT_SECONDS and not self._leaving:
                self._leave_silent(self.keeper)

    def _leave_silent(self, i: int) -> None:
        where = f"process {i} on {self.hosts[i]}"
        leave(f"{where} has given no sign of life for {DEAD_SECONDS:.0f} s", EXIT_RESTART)

    def _watch(self) -> None:
        beats: dict[int, tuple[str, float]] = {}
        number = 0
        while not self._gone.wait(BEAT_SECONDS):
            number += 1
            try:
                mine = json.dumps([number, self._is_loading])
                self._client.key_value_set(f"beat/{self.index}", mine, allow_overwrite=True)
                failed = self._client.key_value_dir_get("failed")
                found = self._client.key_value_dir_get("beat")
            except Exception as error:  # whatever the connection raises when its end is gone
                if not self._leaving:
                    where = f"process {self.keeper} on {self.hosts[self.keeper]}"
                    leave(f"{where} is lost ({_line(error)})", EXIT_RESTART)
                return
            self._unanswered = 0
            for key, text in failed:
                i, told = int(key.rsplit("/", 1)[1]), json.loads(text)
                if i != self.index:
                    if told["stacks"]:
                        _show_stacks()
                    where = f"process {i} on {self.hosts[i]} failed"
                    leave(f"{where}: {told['message']}", told["status"])
            now = time.monotonic()
            for key, beat in found:
                i = int(key.rsplit("/", 1)[1])
                if i not in beats or beats[i][0] != beat:
                    beats[i] = beat, now
                elif now - beats[i][1] > DEAD_SECONDS and not json.loads(beat)[1]:
                    # One that died while it loads is found by JAX, whose signs need no lock.
                    self._leave_silent(i)

    def shutdown(self, status: int, error: Exception | None = None) -> int:
        """The exit status of this process at its end; does not return where it has to be ended at
        once, for collectives that it was in would be waited for.

        Args:
            error: that was told, where it ends by one.
        """
        if self.count == 1:
            return status
        if error is None:
            self._leaving = True
            jax.distributed.shutdown()  # waits for all: the others may be writing the report
            self._gone.set()
            return status
        if any(isinstance(cause, jax.errors.JaxRuntimeError) for cause in causes(error)):
            # If it is because another is lost, the thread knows in a while, and tells who it is.
            time.sleep(DEAD_SECONDS + 3 * BEAT_SECONDS)
        self._tell_failure(_line(error), status)
        _end(status)
        return status

    def give_up(self, message: str) -> None:
        """Ends this process at once, from whatever thread, and has it started again; the others
        are told why, and end too. Each shows where its threads are: which of them hangs is not
        known.

        Args:
            message: why.
        """
        _show_stacks()
        _say_end(message, EXIT_RESTART)
        if self.count > 1:
            self._tell_failure(message, EXIT_RESTART, stacks=True)
        _end(EXIT_RESTART)

    def _tell_failure(self, message: str, status: int, *, stacks: bool = False) -> None:
        told = {"status": status, "message": message, "stacks": stacks}
        try:
            self._client.key_value_set(
                f"failed/{self.index}", json.dumps(told), allow_overwrite=True
            )
            if self.index == self.keeper:
                time.sleep(3 * BEAT_SECONDS)  # the store ends with this process
        except Exception:  # the store is gone: the others know
            pass


ALONE = ProcessGroup()


def start(
    coordinator_address: str | None,
    num_processes: int | None,
    process_id: int | None,
    timeout_seconds: int,
) -> ProcessGroup:
    """The processes of this run. Without an address they are found by `jax.distributed`, on Cloud
    TPU, GKE, Slurm and under Open MPI; where it finds none this process is alone. Where the others
    are not there in time the process ends.

    Raises:
        UserError: some of the arguments are missing or malformed.
    """
    if timeout_seconds <= 0:
        raise UserError(f"--coordinator_timeout must be above 0 seconds; got {timeout_seconds}.")
    given = (coordinator_address, num_processes, process_id)
    if any(value is not None for value in given) and None in given:
        raise UserError(
            "--coordinator_address, --num_processes and --process_id go together; got "
            + ", ".join(str(value) for value in given)
            + "."
        )
    if coordinator_address is not None:
        host, _, port = coordinator_address.rpartition(":")
        if not (host and port.isascii() and port.isdigit() and 0 < int(port) < 2**16):
            raise UserError(
                "--coordinator_address must be HOST:PORT, of process 0; got "
                f"{coordinator_address!r}."
            )
    if num_processes is not None and process_id is not None:
        if not 0 <= process_id < num_processes:
            raise UserError(
                f"--process_id must be 0 or more and below --num_processes ({num_processes}); got "
                f"{process_id}."
            )
        if num_processes == 1:
            return ALONE
    place = f" at {coordinator_address}" if coordinator_address else ""
    # JAX would end the process with a stack trace.
    late = threading.Timer(
        timeout_seconds,
        lambda: leave(
            f"not all processes were there within {timeout_seconds} s. The coordinator, process 0, "
            f"was looked for{place}; --coordinator_timeout=SECONDS gives more time",
            EXIT_RESTART,
        ),
    )
    late.daemon = True
    late.start()
    try:
        jax.distributed.initialize(
            coordinator_address,
            num_processes,
            process_id,
            initialization_timeout=timeout_seconds + HEARTBEAT_SECONDS,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        )
    except ValueError as error:
        if "coordinator_address should be defined" in str(error):
            return ALONE
        raise UserError(f"the processes of this run cannot be found: {_line(error)}") from error
    except RuntimeError as error:
        # Called from a program that has used JAX before, such as a notebook.
        if coordinator_address is None and "must be called before" in str(error):
            return ALONE
        raise UserError(f"the processes of this run cannot be found: {_line(error)}") from error
    finally:
        late.cancel()
    state = distributed.global_state
    assert state.num_processes is not None
    if state.num_processes == 1:
        return ALONE
    return _numbered(state.process_id, state.num_processes, state.client, timeout_seconds)


def _numbered(id: int, count: int, client: Any, timeout_seconds: float) -> ProcessGroup:
    """The processes by the numbers that their devices have.

    Each tells which index belongs to its id; the table is the same in all of them.

    Args:
        id: of this process, to `jax.distributed`.

    Raises:
        UserError: the indices are not 0, 1, ... of as many processes.
    """
    index = jax.process_index()
    client.key_value_set(f"index_of/{id}", json.dumps([index, jax.process_count()]))
    table = [
        json.loads(client.blocking_key_value_get(f"index_of/{i}", 1000 * timeout_seconds))
        for i in range(count)
    ]
    if sorted(table) != [[i, count] for i in range(count)]:
        told = ", ".join(f"id {i} is {at} of {number}" for i, (at, number) in enumerate(table))
        raise UserError(
            f"jax.distributed has {count} processes, and their devices say otherwise: {told}. Give "
            "each process devices of its own, and start as many processes as the platform has "
            "hosts."
        )
    return ProcessGroup(index, count, client, keeper=table[0][0])


def _gather(mine: np.ndarray) -> np.ndarray:
    """The array that each process gave, by index [processes, ...]."""
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    mesh = Mesh(np.array(devices).reshape(jax.process_count(), -1), ("processes", "devices"))
    rows = NamedSharding(mesh, PartitionSpec("processes"))
    shape = (jax.process_count(), *mine.shape)
    whole = jax.make_array_from_process_local_data(rows, mine[None], shape)
    everywhere = jax.jit(_same, out_shardings=NamedSharding(mesh, PartitionSpec()))
    return np.asarray(everywhere(whole).addressable_data(0))


def _same(x: jax.Array) -> jax.Array:
    return x


def _line(error: BaseException) -> str:
    lines = (str(error).strip() or repr(error)).splitlines()
    return lines[0][:300]


def leave(message: str, status: int) -> None:
    """Ends this process at once, from whatever thread, and says why."""
    _say_end(message, status)
    _end(status)


def _show_stacks() -> None:
    """Writes where all threads are."""
    faulthandler.dump_traceback(2, all_threads=True)


def _say_end(message: str, status: int) -> None:
    again = ". The same command goes on from the last checkpoint" if status == EXIT_RESTART else ""
    print(f"error: {message}; this process ends{again}.", file=sys.stderr, flush=True)


def _end(status: int) -> None:
    """At once: no thread and no collective is waited for."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
