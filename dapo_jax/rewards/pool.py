"""Scorers in worker processes, each response with a hard time limit.

Answers come from a model and verifiers hang, crash and eat memory on some of them. Here such an
answer costs its own credit and a note in its verdict, never the run. A scorer that runs out of time
is interrupted by an alarm in its worker. One that an alarm does not stop (in C code, or because it
catches everything) is killed with its worker; what else was in its chunk is tried one by one in a
fresh worker. Where the pool itself does not survive a death (that of a worker with nothing to do,
or that holds the pipe), it is replaced, and what was not scored yet is handed to the new one.
"""

import collections
import concurrent.futures
import ctypes
import hashlib
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import pebble

from dapo_jax.rewards.scorers import LoadedScorer, load_scorer, warm_up
from dapo_jax.rewards.types import Score, Task
from dapo_jax.types import RunError

try:
    import resource
except ImportError:  # not a POSIX system
    resource = None

# A worker ends and another starts after so many chunks: caches of libraries grow with each response
# and would fill the worker's address space in the end.
CHUNKS_PER_LIFE = 500
# Libraries that multiply matrices make a thread for each core, each with address space of its own:
# 64 of them take more than half of the limit. They read this as they are imported.
ONE_THREAD = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
WORKER_MEMORY_BYTES = 4 * 2**30  # of address space, so that one answer cannot take the machine
# What a worker has beyond the limit to be stopped by its own alarm before it is killed.
GRACE_SECONDS = 1.0
ALARM_EVERY_SECONDS = 0.1  # again and again: a scorer may swallow the first one
REMEMBERED_SCORES = 100_000
CHUNKS_PER_WORKER, MAX_CHUNK = 4, 64
# How often it is looked whether the pool that is waited for is still there.
POLL_SECONDS = 0.5
LOCK_SECONDS = 15.0
LOST = "pool lost"  # what ended a chunk
MAX_LOSSES = 2  # a response with which so many pools were lost is not tried again
MAX_REPLACED = 3  # pools in a row of which no worker took a response

_scorers: dict[str, LoadedScorer]  # of a worker process


class Scored(NamedTuple):
    """What a worker says of one response."""

    scores: tuple[Score, ...] | str  # of each scorer, or why there are none
    seconds: float  # that they took


class Chunk(NamedTuple):
    """Responses that are scored by one worker, one after the other."""

    tasks: list[int]  # by their numbers
    future: pebble.ProcessFuture  # their scores to come
    pool: pebble.ProcessPool  # that it was handed to
    losses: int = 0  # pools that were lost with each of the responses

    @property
    def over(self) -> bool:
        """Whether there is something to collect, or nothing to be waited for."""
        return self.future.done() or not self.pool.active


class Pending(NamedTuple):
    """Responses that are being scored; `RewardPool.collect` waits for them."""

    tasks: list[Task]
    known: dict[int, Scored]  # tasks that are done
    chunks: list[Chunk]  # the others


class RewardPool:
    """Worker processes that score; a context manager.

    Args:
        scorers: those that tasks may name, see `dapo_jax.rewards.scorers.load_scorer`.
        workers: number of processes.
        timeout_seconds: hard limit for one response, all its scorers together.

    Raises:
        UserError: there is no such scorer.
    """

    def __init__(
        self,
        scorers: Iterable[str],
        *,
        workers: int,
        timeout_seconds: float,
    ):
        names = tuple(dict.fromkeys(scorers))
        # Here too: a wrong name is the user's mistake and not a worker's.
        self.reads_all = {name: load_scorer(name).reads_all for name in names}
        self.workers, self.timeout_seconds = workers, timeout_seconds
        # Scores by what a task hashes to: short answers come again and again, and long ones are not
        # worth their memory.
        self.known: collections.OrderedDict[bytes, Scored] = collections.OrderedDict()
        self.names = names
        self.pool = self._new_pool()
        self.replaced = 0  # pools
        # Of those, since a worker took a response; None: none ever did.
        self.in_a_row: int | None = None

    def _new_pool(self) -> pebble.ProcessPool:
        for name in ONE_THREAD:  # of workers: what this process multiplies with is there already
            os.environ.setdefault(name, "1")
        # spawn: a fork of a process in which JAX runs threads can deadlock.
        return pebble.ProcessPool(
            self.workers,
            max_tasks=CHUNKS_PER_LIFE,
            initializer=_start_worker,
            initargs=(self.names,),
            context=multiprocessing.get_context("spawn"),
        )

    def _replace(self) -> None:
        """Another pool in the place of one that has given up.

        Raises:
            RunError: it would not do better.
        """
        if self.in_a_row is None or self.in_a_row >= MAX_REPLACED:
            raise RunError(_NO_WORKERS)
        self.pool.stop()
        self.pool.join()
        self.pool = self._new_pool()
        self.replaced += 1
        self.in_a_row += 1

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.stop()
        self.pool.join()

    def score(self, tasks: Sequence[Task]) -> list[Scored]:
        """What the scorers say of each response, in order.

        Raises:
            RunError: no worker can be started.
        """
        return self.collect(self.submit(tasks))

    def submit(self, tasks: Sequence[Task]) -> Pending:
        """Hands responses to the workers and does not wait. What was scored before is not again.

        Raises:
            RunError: no worker can be started.
        """
        tasks = [self._needed(task) for task in tasks]
        names = [_name(task) for task in tasks]
        known = {i: self.known[name] for i, name in enumerate(names) if name in self.known}
        new = [i for i in range(len(tasks)) if i not in known]
        size = max(1, min(MAX_CHUNK, -(-len(new) // (self.workers * CHUNKS_PER_WORKER))))
        parts = [new[start : start + size] for start in range(0, len(new), size)]
        return Pending(tasks, known, [self._schedule(tasks, part, 0) for part in parts])

    def collect(self, pending: Pending) -> list[Scored]:
        """What the scorers say of each response that was submitted, in order. See `score`."""
        tasks, results = pending.tasks, pending.known
        while not self.ready(pending):
            # A pool that has given up forgets what it had not handed to a worker.
            concurrent.futures.wait([pending.chunks[0].future], POLL_SECONDS)
        for i, task in enumerate(tasks):
            # What ran out of time or died may do better another day.
            if not isinstance(results[i].scores, str):
                self.known[_name(task)] = results[i]
        while len(self.known) > REMEMBERED_SCORES:
            self.known.popitem(last=False)
        return [results[i] for i in range(len(tasks))]

    def ready(self, pending: Pending) -> bool:
        """Whether `collect` has nothing to wait for. Does not wait: takes what has come, and hands
        out again what is to be tried again.

        Raises:
            RunError: no worker can be started.
        """
        while over := [chunk for chunk in pending.chunks if chunk.over]:
            pending.chunks[:] = [chunk for chunk in pending.chunks if chunk not in over]
            for chunk in over:
                self._take(pending, chunk)
        return not pending.chunks

    def _take(self, pending: Pending, chunk: Chunk) -> None:
        """Takes the scores of a chunk that is over, and hands out again those that it lacks."""
        numbers, losses, scores = chunk.tasks, chunk.losses, self._result(chunk)
        if scores == LOST:
            losses += 1
            scores = "worker died"
            if len(numbers) == 1 and losses < MAX_LOSSES:
                pending.chunks.append(self._schedule(pending.tasks, numbers, losses))
                return
        elif chunk.pool is self.pool:
            self.in_a_row = 0
        if isinstance(scores, list):
            pending.known.update(zip(numbers, scores))
            rest = [numbers[len(scores) :]]  # what the worker had no time for
        elif len(numbers) == 1:
            limit = self.timeout_seconds + GRACE_SECONDS
            pending.known[numbers[0]] = Scored(scores, limit if scores == "timeout" else 0.0)
            rest = []
        else:
            rest = [[i] for i in numbers]
        pending.chunks.extend(self._schedule(pending.tasks, part, losses) for part in rest if part)

    def _result(self, chunk: Chunk) -> list[Scored] | str:
        """The scores of a chunk that is over, or of its beginning, or what ended its worker."""
        if not chunk.future.done():
            return LOST
        try:
            return chunk.future.result()
        except concurrent.futures.TimeoutError:
            return "timeout"
        except pebble.ProcessExpired:
            return "worker died"
        except (concurrent.futures.BrokenExecutor, concurrent.futures.CancelledError):
            return LOST

    def _needed(self, task: Task) -> Task:
        """The task without what none of its scorers reads: it costs time on the way to a worker,
        and equal responses to different problems need scoring once."""
        if any(self.reads_all[name] for name in task.scorers):
            return task
        return task._replace(token_ids=(), metadata=None)

    def _schedule(self, tasks: list[Task], chunk: list[int], losses: int) -> Chunk:
        limit = self.timeout_seconds
        try:
            if not self.pool.active:
                self._replace()
            # A worker starts no further response once the first limit is over, and the last one it
            # has started has a limit of its own.
            future = self.pool.schedule(
                _score_chunk,
                args=([tasks[i] for i in chunk], limit),
                timeout=limit * min(2, len(chunk)) + GRACE_SECONDS,
            )
        except RuntimeError as error:  # the pool has given up at once
            raise RunError(_NO_WORKERS) from error
        return Chunk(chunk, future, self.pool, losses)


_NO_WORKERS = (
    "The processes that score do not start; what they said of it is above. In a script of your "
    "own, training must stand under `if __name__ == '__main__':`, for each of them imports the "
    "script."
)


def _name(task: Task) -> bytes:
    # As JSON, whose escapes hold the lone surrogates that decoders let out.
    return hashlib.blake2b(json.dumps(task).encode(), digest_size=16).digest()


class _OutOfTime(BaseException):
    """Raised by the alarm. Not an Exception, so that scorers that catch those let it through."""


def _start_worker(names: Sequence[str]) -> None:
    """Runs once in each worker, before its first response."""
    global _scorers
    # A worker that is killed as it takes a response leaves the pipe locked. The others wait twice
    # this long for it, and end: then the pool is replaced.
    pebble.CONSTS.channel_lock_timeout = LOCK_SECONDS
    # Ctrl-C reaches the whole process group: the parent decides when its workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        pr_set_pdeathsig = 1  # a parent that is killed takes its workers along
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if resource is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (WORKER_MEMORY_BYTES, hard))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash leaves no dump behind
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, _alarm)
    _scorers = {name: load_scorer(name) for name in names}
    warm_up(names)


def _alarm(*_: object) -> None:
    raise _OutOfTime


def _score_chunk(tasks: list[Task], timeout_seconds: float) -> list[Scored]:
    """The scores of as many of the tasks, from the first, as are begun within the limit of one."""
    start, scores = time.perf_counter(), []
    for task in tasks:
        if scores and time.perf_counter() - start > timeout_seconds:
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
    except (Exception, SystemExit) as error:  # the user's code: anything may come out of it
        scores = f"error: {type(error).__name__}: {error}"
    return Scored(scores, time.perf_counter() - start)
