"""Scorers in worker processes, each response with a hard time limit.

Answers come from a model: verifiers hang, crash and eat memory on some of them. Such an answer
costs its own credit and a note in its verdict, never the run. An alarm interrupts a scorer that
runs out of time. A scorer that an alarm does not stop is killed with its worker; the other
responses of its chunk are scored again, one by one, in a fresh worker. A pool that does not survive
the death of a worker is replaced, and what waited in its queue goes to the next.
"""

import collections
import concurrent.futures
import ctypes
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.context import SpawnContext
from typing import Any, NamedTuple

import pebble

from dapo_jax.rewards.scorers import LoadedScorer, load_scorer, warm_up
from dapo_jax.rewards.types import Score, Task
from dapo_jax.types import RunError
from dapo_jax.utils.progress import drop_unread_output

try:
    import resource
except ImportError:  # not a POSIX system
    resource = None

CHUNKS_PER_LIFE = 500  # of a worker: caches of libraries grow with each response
# Threads of these libraries take address space; a worker needs one.
ONE_THREAD = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
WORKER_MEMORY_BYTES = 4 * 2**30  # of address space
GRACE_SECONDS = 1.0  # beyond the limit, for the worker's own alarm
ALARM_EVERY_SECONDS = 0.1  # repeatedly: a scorer may swallow the first alarm
CHUNKS_PER_WORKER, MAX_CHUNK = 4, 64
POLL_SECONDS = 0.5  # between checks that the awaited pool is alive
LOCK_SECONDS = 15.0
TERM_SECONDS = 0.05  # workers ignore SIGTERM; pebble kills them this long after it
LOST = "pool lost"  # the end of a chunk whose pool has given up
MAX_LOSSES = 2  # pools that gave up while a worker may have had a response: then it is given up
MAX_REPLACED = 3  # pools in a row that scored nothing
NO_WORKERS = (
    "The processes that score do not start; their errors are above. In a script of your own, "
    "training must stand under `if __name__ == '__main__':`, for each worker imports the script."
)

# Of a worker process: its scorers, and the number of the first chunk that is still wanted.
_scorers: dict[str, LoadedScorer]
_first_wanted: Any


class Scored(NamedTuple):
    """The result of scoring one response."""

    scores: tuple[Score, ...] | str  # of each scorer, or why there are none
    seconds: float


class Chunk(NamedTuple):
    """Responses that one worker scores, one after the other."""

    tasks: list[int]  # indices
    future: pebble.ProcessFuture
    pool: pebble.ProcessPool
    queue: collections.deque[pebble.ProcessFuture]  # of that pool, in the order of scheduling
    losses: int = 0  # of each response, see MAX_LOSSES

    @property
    def is_over(self) -> bool:
        """Returns whether there is something to collect, or nothing to wait for."""
        return self.future.done() or not self.pool.active

    def result(self) -> list[Scored] | str:
        """Returns the scores of the chunk, or of its beginning, or the end of its worker."""
        if not self.future.done():
            return LOST
        try:
            return self.future.result()
        except concurrent.futures.TimeoutError:
            return "timeout"
        except pebble.ProcessExpired:
            return "worker died"
        except concurrent.futures.BrokenExecutor:
            return LOST

    def may_have_been_taken(self, workers: int) -> bool:
        """Returns whether one of the workers may have had this chunk when the pool gave up: they
        take chunks in order, so theirs are among the first that did not end."""
        open_chunks = itertools.islice(filter(_did_not_end, self.queue), workers)
        return self.future in open_chunks


class Pending(NamedTuple):
    """Responses that are being scored; `RewardPool.collect` waits for them."""

    tasks: list[Task]
    scored: dict[int, Scored]  # by index of the task
    chunks: list[Chunk]  # the other tasks


class _Context(SpawnContext):
    """A context that keeps its locks. pebble drops them before it ends the workers, one after the
    other: one that was starting would print that its lock is gone."""

    def __init__(self):
        self.locks = []

    def RLock(self) -> Any:
        self.locks.append(super().RLock())
        return self.locks[-1]


class RewardPool:
    """Worker processes that score; a context manager.

    Args:
        scorers: names that tasks may have, see `dapo_jax.rewards.scorers.load_scorer`.
        workers: number of processes.
        timeout_seconds: hard limit for one response, all its scorers together.

    Raises:
        UserError: there is no such scorer.
    """

    def __init__(self, scorers: Iterable[str], *, workers: int, timeout_seconds: float):
        self.names = tuple(dict.fromkeys(scorers))
        # Loaded here too: a wrong name is the user's mistake, not a worker's.
        loaded = {name: load_scorer(name) for name in self.names}
        self.reads_all = {name: scorer.reads_all for name, scorer in loaded.items()}
        # Workers come and go: one that begins later must not score by a file edited meanwhile.
        self.sources = {name: scorer.source for name, scorer in loaded.items()}
        self.workers, self.timeout_seconds = workers, timeout_seconds
        self.context = _Context()  # no fork: in a process in which JAX runs threads it can deadlock
        self.num_chunks = 0  # scheduled
        self.first_wanted = self.context.Value("Q", 0, lock=False)
        self._start_pool()
        self.replaced = 0  # pools
        self.fruitless: int | None = None  # pools since the last score; None: no score ever

    def _start_pool(self) -> None:
        pebble.CONSTS.term_timeout = TERM_SECONDS
        for name in ONE_THREAD:  # read by workers as they import; this process has imported
            os.environ.setdefault(name, "1")
        self.pool = pebble.ProcessPool(
            self.workers,
            max_tasks=CHUNKS_PER_LIFE,
            initializer=_start_worker,
            initargs=(self.sources, self.first_wanted),
            context=self.context,
        )
        self.queue = collections.deque()

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.stop()
        self.pool.join()

    def score(
        self, tasks: Sequence[Task], moved: Callable[[], None] = lambda: None
    ) -> list[Scored]:
        """Scores each response, in order.

        Raises:
            RunError: no worker can be started.
        """
        return self.collect(self.submit(tasks), moved)

    def submit(self, tasks: Sequence[Task]) -> Pending:
        """Hands responses to the workers and does not wait. See `score`."""
        tasks = [self._needed(task) for task in tasks]
        size = max(1, min(MAX_CHUNK, -(-len(tasks) // (self.workers * CHUNKS_PER_WORKER))))
        indices = range(len(tasks))
        parts = [list(indices[start : start + size]) for start in indices[::size]]
        return Pending(tasks, {}, [self._schedule(tasks, part, 0) for part in parts])

    def collect(self, pending: Pending, moved: Callable[[], None] = lambda: None) -> list[Scored]:
        """Waits for the responses of a `submit` and returns their scores, in order. See `score`."""
        there = 0
        while not self.ready(pending):
            if there < (there := len(pending.scored)):
                moved()
            # With a time limit: a pool that gives up forgets the chunks that no worker has.
            concurrent.futures.wait([pending.chunks[0].future], POLL_SECONDS)
        return [pending.scored[i] for i in range(len(pending.tasks))]

    def ready(self, pending: Pending) -> bool:
        """Returns whether `collect` has nothing to wait for; does not wait. Takes the scores that
        have arrived and schedules again the responses that need it. See `score`."""
        while over := [chunk for chunk in pending.chunks if chunk.is_over]:
            pending.chunks[:] = [chunk for chunk in pending.chunks if chunk not in over]
            for chunk in over:
                self._take(pending, chunk)
        return not pending.chunks

    def give_up(self) -> None:
        """Gives up every response that was submitted and not collected: what is submitted next does
        not wait for them. Nothing may ask for them afterwards."""
        self.first_wanted.value = self.num_chunks

    def _take(self, pending: Pending, chunk: Chunk) -> None:
        """Takes the scores of a chunk that is over, and schedules its other responses again."""
        indices, losses, scores = chunk.tasks, chunk.losses, chunk.result()
        if scores == LOST:
            if not chunk.may_have_been_taken(self.workers):
                pending.chunks.append(self._schedule(pending.tasks, indices, losses))
                return
            losses += 1
            scores = "worker died"
            if len(indices) == 1 and losses < MAX_LOSSES:
                pending.chunks.append(self._schedule(pending.tasks, indices, losses))
                return
        elif chunk.pool is self.pool:
            self.fruitless = 0
        if isinstance(scores, list):
            pending.scored.update(zip(indices, scores))
            rest = [indices[len(scores) :]]  # the responses that the worker had no time for
        elif len(indices) == 1:
            limit = self.timeout_seconds + GRACE_SECONDS
            pending.scored[indices[0]] = Scored(scores, limit if scores == "timeout" else 0.0)
            rest = []
        else:
            rest = [[i] for i in indices]
        pending.chunks.extend(self._schedule(pending.tasks, part, losses) for part in rest if part)

    def _needed(self, task: Task) -> Task:
        """Drops the fields that no scorer of the task reads: sending them takes time."""
        if any(self.reads_all[name] for name in task.scorers):
            return task
        return task._replace(token_ids=(), metadata=None)

    def _schedule(self, tasks: list[Task], chunk: list[int], losses: int) -> Chunk:
        """Hands a chunk to the pool, to a new one if that has given up."""
        if not self.pool.active:
            self._replace_pool()
        limit = self.timeout_seconds
        # A worker starts no response after the first limit, and the last one has its own limit.
        timeout = limit * min(2, len(chunk)) + GRACE_SECONDS
        arguments = (self.num_chunks, [tasks[i] for i in chunk], limit)
        try:
            future = self.pool.schedule(_score_chunk, args=arguments, timeout=timeout)
        except RuntimeError:  # the pool has given up this moment
            self._replace_pool()
            return self._schedule(tasks, chunk, losses)
        self.num_chunks += 1
        while self.queue and self.queue[0].done():
            self.queue.popleft()
        self.queue.append(future)
        return Chunk(chunk, future, self.pool, self.queue, losses)

    def _replace_pool(self) -> None:
        if self.fruitless is None or self.fruitless >= MAX_REPLACED:
            raise RunError(NO_WORKERS)
        self.pool.stop()
        self.pool.join()
        self._start_pool()
        self.replaced += 1
        self.fruitless += 1


def _did_not_end(future: pebble.ProcessFuture) -> bool:
    broken = concurrent.futures.BrokenExecutor
    return not future.done() or isinstance(future.exception(), broken)


class _OutOfTime(BaseException):
    """Raised by the alarm; no Exception, which scorers may catch."""


def _start_worker(sources: dict[str, bytes | None], first_wanted: Any) -> None:
    """Initialises a worker with these scorers, and the sources of their files."""
    global _scorers, _first_wanted
    _first_wanted = first_wanted
    # A worker that is killed as it takes a response leaves the pipe locked. The others wait twice
    # this long for it and end; then the pool is replaced.
    pebble.CONSTS.channel_lock_timeout = LOCK_SECONDS
    # Ctrl-C, SIGTERM from a scheduler and a closed terminal reach every process. The run may score
    # more responses before it stops; it ends its workers itself.
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    if sys.platform == "linux":
        pr_set_pdeathsig = 1  # workers die with a killed parent
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if resource is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (WORKER_MEMORY_BYTES, hard))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, _alarm)
    _scorers = {name: load_scorer(name, source=source) for name, source in sources.items()}
    warm_up(list(sources))


def _alarm(*_: object) -> None:
    raise _OutOfTime


def _score_chunk(number: int, tasks: list[Task], timeout_seconds: float) -> list[Scored]:
    """Scores the tasks, from the first, that start within the time limit of one; none once the
    chunk is given up."""
    drop_unread_output()  # a scorer that prints to a broken pipe would fail on each response
    start, scores = time.perf_counter(), []
    for task in tasks:
        if scores and time.perf_counter() - start > timeout_seconds:
            break
        if number < _first_wanted.value:
            break
        scores.append(_score(task, timeout_seconds))
    return scores


def _score(task: Task, timeout_seconds: float) -> Scored:
    start = time.perf_counter()
    alarm = hasattr(signal, "setitimer")
    try:
        try:
            if alarm:
                signal.setitimer(signal.ITIMER_REAL, timeout_seconds, ALARM_EVERY_SECONDS)
            scores = tuple(_scorers[name](task) for name in task.scorers)
        finally:
            if alarm:
                signal.setitimer(signal.ITIMER_REAL, 0.0)
    except _OutOfTime:
        scores = "timeout"
        # The alarm may have come before the line that stops it.
        signal.setitimer(signal.ITIMER_REAL, 0.0)
    except BaseException as error:  # the user's code
        scores = f"error: {type(error).__name__}: {_text_of(error)}"
    return Scored(scores, time.perf_counter() - start)


def _text_of(error: BaseException) -> str:
    """Returns the message of an error of a user's class, as a file and a terminal can hold it."""
    try:
        text = str(error)
    except Exception as fault:
        text = f"its text raises {type(fault).__name__}"
    return text.encode("utf-8", "backslashreplace").decode()
