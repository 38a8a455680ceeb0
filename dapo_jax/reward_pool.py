"""Scorers in worker processes, each response with a hard time limit.

Answers come from a model and verifiers hang, crash and eat memory on some of them. Here such an
answer costs its own credit and a note in its verdict, never the run. A scorer that runs out of time
is interrupted by an alarm in its worker. One that an alarm does not stop (in C code, or because it
catches everything) is killed with its worker; what else was in its chunk is tried one by one in a
fresh worker.
"""

import collections
import concurrent.futures
import ctypes
import hashlib
import multiprocessing
import signal
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import pebble

from dapo_jax.reward import Score, Scorer
from dapo_jax.scorers import load_scorer
from dapo_jax.types import RunError, Verdict

try:
    import resource
except ImportError:  # not a POSIX system
    resource = None

WORKER_MEMORY_BYTES = 4 * 2**30  # of address space, so that one answer cannot take the machine
# What a worker has beyond the limit to be stopped by its own alarm before it is killed.
GRACE_SECONDS = 1.0
ALARM_EVERY_SECONDS = 0.1  # again and again: a scorer may swallow the first one
REMEMBERED_VERDICTS = 100_000
CHUNKS_PER_WORKER, MAX_CHUNK = 4, 64

_scorer: Scorer  # of a worker process


class Scored(NamedTuple):
    """What a worker says of one response."""

    score: Score | str  # or why there is none
    seconds: float  # that the scorer took


class Pending(NamedTuple):
    """Responses that are being scored; `RewardPool.collect` waits for them."""

    items: list[tuple[str, str]]
    known: dict[int, Scored]  # items that were scored before
    chunks: list[tuple[list[int], pebble.ProcessFuture]]  # the others, and their scores to come


class RewardPool:
    """Worker processes that score; a context manager.

    Args:
        scorer: see `dapo_jax.scorers.load_scorer`.
        correct: reward of a correct response.
        incorrect: reward of any other, and of one on which no verdict was reached.
        workers: number of processes.
        timeout_seconds: hard limit for one response.

    Raises:
        UserError: there is no such scorer.
    """

    def __init__(
        self,
        scorer: str,
        *,
        correct: float,
        incorrect: float,
        workers: int,
        timeout_seconds: float,
    ):
        load_scorer(scorer)  # a wrong name is the user's mistake and not a worker's
        self.correct, self.incorrect = correct, incorrect
        self.workers, self.timeout_seconds = workers, timeout_seconds
        # Scores by what text and answer hash to: short answers come again and again, and long ones
        # are not worth their memory.
        self.known: collections.OrderedDict[bytes, Scored] = collections.OrderedDict()
        # spawn: a fork of a process in which JAX runs threads can deadlock.
        self.pool = pebble.ProcessPool(
            workers,
            initializer=_start_worker,
            initargs=(scorer,),
            context=multiprocessing.get_context("spawn"),
        )

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.stop()
        self.pool.join()

    def score(self, texts: Sequence[str], answers: Sequence[str]) -> list[Verdict]:
        """The verdict on each text against its answer, in their order.

        Raises:
            RunError: no worker can be started.
        """
        return self.collect(self.submit(texts, answers))

    def submit(self, texts: Sequence[str], answers: Sequence[str]) -> Pending:
        """Hands responses to the workers and does not wait. What was scored before is not again.

        Raises:
            RunError: no worker can be started.
        """
        items = list(zip(texts, answers, strict=True))
        names = [_name(*item) for item in items]
        known = {i: self.known[name] for i, name in enumerate(names) if name in self.known}
        new = [i for i in range(len(items)) if i not in known]
        size = max(1, min(MAX_CHUNK, -(-len(new) // (self.workers * CHUNKS_PER_WORKER))))
        chunks = [new[start : start + size] for start in range(0, len(new), size)]
        futures = [(chunk, self._schedule(items, chunk)) for chunk in chunks]
        return Pending(items, known, futures)

    def collect(self, pending: Pending) -> list[Verdict]:
        """The verdicts on what was submitted, in its order. See `score`."""
        return [self._verdict(scored.score) for scored in self.collect_scores(pending)]

    def collect_scores(self, pending: Pending) -> list[Scored]:
        """What the scorer said, without rewards. See `score`."""
        items, results = pending.items, dict(pending.known)
        waiting = collections.deque(pending.chunks)
        while waiting:
            chunk, future = waiting.popleft()
            scores = _result(future)
            if isinstance(scores, list):
                results |= dict(zip(chunk, scores))
                rest = [chunk[len(scores) :]]  # what the worker had no time for
            elif len(chunk) == 1:
                limit = self.timeout_seconds + GRACE_SECONDS
                results[chunk[0]] = Scored(scores, limit if scores == "timeout" else 0.0)
                rest = []
            else:
                rest = [[i] for i in chunk]
            waiting.extend((part, self._schedule(items, part)) for part in rest if part)
        for i, item in enumerate(items):
            # What ran out of time or died may do better another day.
            if isinstance(results[i].score, Score):
                self.known[_name(*item)] = results[i]
        while len(self.known) > REMEMBERED_VERDICTS:
            self.known.popitem(last=False)
        return [results[i] for i in range(len(items))]

    def _schedule(self, items: list[tuple[str, str]], chunk: list[int]) -> pebble.ProcessFuture:
        limit = self.timeout_seconds
        try:
            # A worker starts no further response once the first limit is over, and the last one it
            # has started has a limit of its own.
            return self.pool.schedule(
                _score_chunk,
                args=([items[i] for i in chunk], limit),
                timeout=limit * min(2, len(chunk)) + GRACE_SECONDS,
            )
        except RuntimeError as error:  # the pool has given up
            raise RunError(_NO_WORKERS) from error

    def _verdict(self, score: Score | str) -> Verdict:
        if isinstance(score, str):
            return Verdict(False, self.incorrect, note=score)
        reward = self.correct if score.correct else self.incorrect
        return Verdict(score.correct, reward, score.extracted, steps=score.steps)


_NO_WORKERS = (
    "The processes that score do not start; what they said of it is above. In a script of your "
    "own, training must stand under `if __name__ == '__main__':`, for each of them imports the "
    "script."
)


def _name(text: str, answer: str) -> bytes:
    # Lone surrogates come out of decoders too, and have no UTF-8 of their own.
    parts = (part.encode("utf-8", "surrogatepass") for part in (answer, text))
    return hashlib.blake2b(b"\0\0".join(parts), digest_size=16).digest()


def _result(future: pebble.ProcessFuture) -> list[Scored] | str:
    """The scores of a chunk, or of its beginning, or what ended its worker."""
    try:
        return future.result()
    except concurrent.futures.TimeoutError:
        return "timeout"
    except pebble.ProcessExpired:
        return "worker died"
    except concurrent.futures.BrokenExecutor as error:
        raise RunError(_NO_WORKERS) from error


class _OutOfTime(BaseException):
    """Raised by the alarm. Not an Exception, so that scorers that catch those let it through."""


def _start_worker(scorer: str) -> None:
    """Runs once in each worker, before its first response."""
    global _scorer
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
    _scorer = load_scorer(scorer)


def _alarm(*_: object) -> None:
    raise _OutOfTime


def _score_chunk(items: list[tuple[str, str]], timeout_seconds: float) -> list[Scored]:
    """The scores of as many of the items, from the first, as are begun within the limit of one."""
    start, scores = time.perf_counter(), []
    for item in items:
        if scores and time.perf_counter() - start > timeout_seconds:
            break
        scores.append(_score(*item, timeout_seconds))
    return scores


def _score(text: str, answer: str, timeout_seconds: float) -> Scored:
    start = time.perf_counter()
    alarm = hasattr(signal, "setitimer")
    try:
        try:
            if alarm:
                signal.setitimer(signal.ITIMER_REAL, timeout_seconds, ALARM_EVERY_SECONDS)
            score = _checked(_scorer(text, answer))
        finally:
            if alarm:
                signal.setitimer(signal.ITIMER_REAL, 0.0)
    except _OutOfTime:
        score = "timeout"
    except (Exception, SystemExit) as error:  # the user's code: anything may come out of it
        score = f"error: {type(error).__name__}: {error}"
    return Scored(score, time.perf_counter() - start)


def _checked(score: Score | bool) -> Score:
    if isinstance(score, tuple):
        correct, extracted, *steps = score
        steps = tuple((int(end), float(reward)) for end, reward in (steps[0] if steps else ()))
        return Score(bool(correct), extracted, steps)
    return Score(bool(score), None)
