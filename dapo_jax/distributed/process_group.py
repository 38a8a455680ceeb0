"""Process group: the processes of a run, and their communication besides XLA's collectives.

Every process runs the same program (JAX's multi-controller model). `jax.distributed` finds the
processes and keeps a key-value store on one of them. Small values travel through the store: claims
of prompts, outcomes, stop requests. Responses are large and travel by a collective.

A run of one process goes through the same code, without a store.
"""

import contextlib
import json
import os
import pickle
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax._src import distributed  # the store has no public name; orbax reads it from here too
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dapo_jax.distributed.work_queue import POLL_SECONDS, SharedWorkQueue, WorkQueue
from dapo_jax.types import StopRequested, UserError, causes, error_line
from dapo_jax.utils.files import make_writable
from dapo_jax.utils.progress import written_in_time

T = TypeVar("T")
# Exit status of a fault that is not the run's: launch/restart.sh starts the run again.
EXIT_RESTART = 75
# The same, of a start that waited for other processes. It is not counted as one without progress.
EXIT_WAITED = 76
# JAX aborts all processes where one, killed or frozen, has given no heartbeat for so long.
DEAD_SECONDS = 30
FAILURE_POLL_SECONDS = 2.0
SHUTDOWN_SECONDS = 60
SENDS_PER_DELETE = 256  # sent values that are deleted at once
MAX_GATHER_BYTES = 2**28  # of one collective, over all processes
MIN_GATHER_BYTES = 2**16  # of one process


class ProcessGroup:
    """The processes of a run, seen from one of them.

    Processes are numbered by `jax.process_index()`, as are devices, meshes and checkpoints. The ids
    of `jax.distributed` may differ on TPUs.

    Args:
        index: of this process.
        client: of the key-value store; None: the run has one process.
        keeper: index of the process that keeps the store.
    """

    def __init__(self, index: int = 0, count: int = 1, client: Any = None, keeper: int = 0):
        self.index, self.count, self._client, self.keeper = index, count, client, keeper
        self.hosts = [socket.gethostname()] * count
        self._gathers = self._queues = self._sends = 0
        self._last_poll = 0.0
        self._stopped = threading.Event()

    @property
    def is_primary(self) -> bool:
        """Returns whether this process writes files and prints."""
        return self.index == 0

    def described(self) -> str:
        """Returns a description such as "4 processes on 2 hosts, 16 devices"."""
        hosts = len(set(self.hosts))
        plural = "s" * (hosts > 1)
        return f"{self.count} processes on {hosts} host{plural}, {jax.device_count()} devices"

    def all_gather(self, value: T, waiting: Callable[[str], None] = lambda _: None) -> list[T]:
        """Returns the value of each process, by index. Every process must call it.

        Args:
            value: small, and JSON can hold it.
            waiting: is called with the names of the processes that are awaited.
        """
        if self.count == 1:
            return [value]
        place, self._gathers = f"gather/{self._gathers}", self._gathers + 1
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
        if self._gathers >= 2:  # every process has read the values of the call before
            self._client.key_value_delete(f"gather/{self._gathers - 2}/{self.index}")
        return [json.loads(given[i]) for i in range(self.count)]

    @contextlib.contextmanager
    def stop_together(self, waiting: Callable[[str], None] = lambda _: None) -> Iterator[None]:
        """Raises StopRequested in every process at the end of the block, if the block raised it in
        one of them."""
        stopped = False
        try:
            yield
        except StopRequested:
            stopped = True
        if any(self.all_gather(stopped, waiting)):
            raise StopRequested

    def all_gather_objects(self, value: T) -> list[T]:
        """Returns the value of each process, by index. Every process must call it.

        For large values: they are pickled, and travel by a collective.
        """
        if self.count == 1:
            return [value]
        data = np.frombuffer(pickle.dumps(value, protocol=5), np.uint8)
        sizes = self.all_gather(len(data))
        # Powers of two: each size compiles a program.
        size = 1 << (max(*sizes, MIN_GATHER_BYTES) - 1).bit_length()
        chunk = min(size, max(1, MAX_GATHER_BYTES // self.count))
        parts = []
        for start in range(0, max(sizes), chunk):
            mine = np.zeros(chunk, np.uint8)
            mine[: len(data[start : start + chunk])] = data[start : start + chunk]
            parts.append(_gather_arrays(mine))
        whole = np.concatenate(parts, axis=1)
        return [pickle.loads(whole[i, :size].tobytes()) for i, size in enumerate(sizes)]

    def send(self, others: Sequence[int], value: Any) -> None:
        """Sends a small value that JSON can hold to processes that call `recv`.

        A process always sends to the same ones, and receives from one.
        """
        for other in others:
            self._client.key_value_set(self._send_key(other), json.dumps(value))
        self._sends += 1

    def recv(self, sender: int, waiting: Callable[[str], None] = lambda _: None) -> Any:
        """Returns the next value that was sent to this process."""
        key = self._send_key(self.index)
        while True:
            try:
                text = self._client.blocking_key_value_get(key, 1000)
                break
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
                waiting(f"process {sender}")
        self._sends += 1
        if self._sends % SENDS_PER_DELETE == 0:
            self._client.key_value_delete(key.rsplit("/", 1)[0])
        return json.loads(text)

    def _send_key(self, receiver: int) -> str:
        return f"sent/{receiver}/{self._sends // SENDS_PER_DELETE}/{self._sends}"

    def work_queue(self) -> WorkQueue:
        """Returns a work queue for one step; every process must ask for as many as the others."""
        self._queues += 1
        if self.count == 1:
            return WorkQueue()
        return SharedWorkQueue(self._client, f"work_queue/{self._queues}")

    def request_stop(self, signal_number: int) -> None:
        """Makes `stop_requested` return a signal in every process."""
        if self.count > 1:
            self._client.key_value_set("stop/signal", str(signal_number), allow_overwrite=True)

    def stop_requested(self) -> int | None:
        """Returns the signal that some process received, or None."""
        now = time.monotonic()
        if self.count == 1 or now - self._last_poll < 5 * POLL_SECONDS:
            return None
        self._last_poll = now
        found = dict(self._client.key_value_dir_get("stop"))
        return int(found["stop/signal"]) if found else None

    def check_place(self, directory: Any) -> None:
        """Raises UserError unless all processes see the same directory, and the primary can write
        there."""
        if self.count == 1:
            return
        mark = directory / ".processes"
        if self.is_primary:
            make_writable(directory, "--workdir")
            mark.write_text(str(os.getpid()))
        (written, *_) = self.all_gather(str(os.getpid()))
        seen = self.all_gather(mark.exists() and mark.read_text() == written)
        if self.is_primary:
            mark.unlink(missing_ok=True)
        if not all(seen):
            i = seen.index(False)
            raise UserError(
                f"--workdir={directory} is not the same directory for all processes: process {i} "
                f"on {self.hosts[i]} does not see a file that process 0 on {self.hosts[0]} wrote "
                "there. Choose one on a file system that all hosts share."
            )

    def check_equal(self, values: Mapping[str, Any]) -> None:
        """Raises UserError unless all processes give the same values, which JSON can hold."""
        if self.count == 1:
            return
        each = self.all_gather(dict(values))
        for i, theirs in enumerate(each):
            names = each[0].keys() | theirs.keys()
            lines = [
                f"{name}: {each[0].get(name)!r} in process 0, {theirs.get(name)!r} in process {i}"
                for name in sorted(names)
                if each[0].get(name) != theirs.get(name)
            ]
            if lines:
                raise UserError(
                    f"process {i} on {self.hosts[i]} differs from process 0 on {self.hosts[0]}:\n  "
                    + "\n  ".join(lines)
                    + "\nStart all with the same command, config files and data."
                )

    def watch(self) -> None:
        """Starts a thread that ends this process as soon as another reports a failure."""
        if self.count > 1:
            self.hosts = self.all_gather(socket.gethostname())
            threading.Thread(target=self._watch, name="failures", daemon=True).start()

    def _watch(self) -> None:
        while not self._stopped.wait(FAILURE_POLL_SECONDS):
            try:
                failed = self._client.key_value_dir_get("failed")
            except jax.errors.JaxRuntimeError:  # the store is gone: JAX ends this process
                return
            for key, text in failed:
                i, report = int(key.rsplit("/", 1)[1]), json.loads(text)
                if i != self.index:
                    message = f"process {i} on {self.hosts[i]} failed: {report['message']}"
                    end(message, report["status"], stacks=report["stacks"])

    def _report_failure(self, message: str, status: int, *, stacks: bool = False) -> None:
        report = json.dumps({"status": status, "message": message, "stacks": stacks})
        try:
            self._client.key_value_set(f"failed/{self.index}", report, allow_overwrite=True)
        except jax.errors.JaxRuntimeError:  # the store is gone, and JAX ends the others
            return
        if self.index == self.keeper:
            time.sleep(3 * FAILURE_POLL_SECONDS)  # the store ends with this process

    def shutdown(self, status: int, error: Exception | None = None) -> int:
        """Returns the exit status of this process, after all others have come here too.

        Args:
            error: failure that was printed. It ends all processes at once, as others may be in a
                collective with this one; the call does not return.
        """
        if self.count == 1:
            return status
        if error is None:
            self._stopped.set()
            jax.distributed.shutdown()  # waits for all: the primary may write the report
            return status
        if any(isinstance(cause, jax.errors.JaxRuntimeError) for cause in causes(error)):
            # Where a collective failed because another process is lost, JAX names it in this time.
            time.sleep(1.5 * DEAD_SECONDS)
        self._report_failure(error_line(error), status)
        end_now(status)
        return status

    def give_up(self, message: str) -> None:
        """Ends all processes at once, from any thread, to be started again. Each prints its stacks:
        which of them hangs is not known."""
        say_end(message, EXIT_RESTART, stacks=True)
        if self.count > 1:
            self._report_failure(message, EXIT_RESTART, stacks=True)
        end_now(EXIT_RESTART)


ALONE = ProcessGroup()


def start(
    coordinator_address: str | None,
    num_processes: int | None,
    process_id: int | None,
    timeout_seconds: int,
) -> ProcessGroup:
    """Returns the process group of this run. Ends the process where others are not there in time.

    Without an address `jax.distributed` finds the processes: on Cloud TPU, GKE, Slurm and under
    Open MPI. Where it finds none, the run has one process.

    Raises:
        UserError: some of the arguments are missing or malformed.
    """
    if timeout_seconds <= 0:
        raise UserError(f"--coordinator_timeout must be above 0 seconds; got {timeout_seconds}.")
    given = (coordinator_address, num_processes, process_id)
    if None in given and given != (None, None, None):
        raise UserError(
            "--coordinator_address, --num_processes and --process_id go together; got "
            f"{', '.join(map(str, given))}."
        )
    host, _, port = (coordinator_address or "HOST:0").rpartition(":")
    if not (host and port.isdecimal() and int(port) < 2**16):
        raise UserError(
            f"--coordinator_address must be HOST:PORT, of process 0; got {coordinator_address!r}."
        )
    if not 0 <= (process_id or 0) < (num_processes or 1):
        raise UserError(
            f"--process_id must be 0 or more and below --num_processes ({num_processes}); got "
            f"{process_id}."
        )
    if num_processes == 1:
        return ALONE
    place = f" at {coordinator_address}" if coordinator_address else ""
    late = threading.Timer(  # before JAX, which would end the process with a stack trace
        timeout_seconds,
        lambda: end(
            f"not all processes were there within {timeout_seconds} s. The coordinator, process 0, "
            f"was looked for{place}; --coordinator_timeout=SECONDS gives more time",
            EXIT_WAITED,
        ),
    )
    late.daemon = True
    late.start()
    try:
        jax.distributed.initialize(
            coordinator_address,
            num_processes,
            process_id,
            initialization_timeout=2 * timeout_seconds,
            heartbeat_timeout_seconds=DEAD_SECONDS,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        )
    except (ValueError, RuntimeError) as error:
        # The second: called from a program that has used JAX before, such as a notebook.
        none_found = "coordinator_address should be defined", "must be called before"
        if coordinator_address is None and any(text in str(error) for text in none_found):
            return ALONE
        message = f"the processes of this run cannot be found: {error_line(error)}"
        raise UserError(message) from error
    finally:
        late.cancel()
    state = distributed.global_state
    if state.num_processes == 1:
        return ALONE
    assert state.num_processes is not None
    return _numbered(state.process_id, state.num_processes, state.client, timeout_seconds)


def _numbered(id: int, count: int, client: Any, timeout_seconds: float) -> ProcessGroup:
    """Returns the group, numbered as JAX numbers the devices; `id` is this process's own.

    Each process writes its index under its id, and all read the same table.
    """
    index = jax.process_index()
    client.key_value_set(f"index_of/{id}", json.dumps([index, jax.process_count()]))
    table = [
        json.loads(client.blocking_key_value_get(f"index_of/{i}", 1000 * timeout_seconds))
        for i in range(count)
    ]
    if sorted(table) != [[i, count] for i in range(count)]:
        found = ", ".join(f"id {i} is {at} of {number}" for i, (at, number) in enumerate(table))
        raise UserError(
            f"jax.distributed has {count} processes, and their devices say otherwise: {found}. "
            "Give each process devices of its own, and start as many processes as the platform has "
            "hosts."
        )
    return ProcessGroup(index, count, client, keeper=table[0][0])


def _gather_arrays(mine: np.ndarray) -> np.ndarray:
    """Returns the array of each process, by index [processes, ...]."""
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    mesh = Mesh(np.array(devices).reshape(jax.process_count(), -1), ("processes", "devices"))
    split = NamedSharding(mesh, PartitionSpec("processes"))
    shape = (jax.process_count(), *mine.shape)
    whole = jax.make_array_from_process_local_data(split, mine[None], shape)
    everywhere = jax.jit(_same, out_shardings=NamedSharding(mesh, PartitionSpec()))
    return np.asarray(everywhere(whole).addressable_data(0))


def _same(x: jax.Array) -> jax.Array:
    return x


def end(message: str, status: int, *, stacks: bool = False) -> None:
    """Ends this process at once, from any thread, and prints why."""
    say_end(message, status, stacks=stacks)
    end_now(status)


def say_end(message: str, status: int, *, stacks: bool = False) -> None:
    """Prints why this process ends, after the stack of every thread where `stacks` asks for it."""
    remedy = ". The same command resumes from the last checkpoint" if status == EXIT_RESTART else ""
    text = f"{_stacks() if stacks else ''}error: {message}; this process ends{remedy}."
    written_in_time(lambda: print(text, file=sys.stderr, flush=True))


def _stacks() -> str:
    """Returns the stack of every thread. faulthandler would write them itself, and stop all threads
    where its output stands still."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    for ident, frame in sys._current_frames().items():
        lines.append(f"Thread {names.get(ident, ident)} (most recent call first):")
        for f, number in traceback.walk_stack(frame):
            lines.append(f'  File "{f.f_code.co_filename}", line {number} in {f.f_code.co_name}')
    return "".join(f"{line}\n" for line in lines)


def end_now(status: int) -> None:
    """Ends this process without waiting for threads, collectives or a reader of its output."""
    written_in_time(lambda: sys.stdout.flush())  # standard error flushes each line
    os._exit(status)
