"""Scorers in worker processes, each response with a hard time limit.

Answers come from a model and verifiers hang, crash and eat memory on some of them. Here such an
answer costs its own credit and a note in its verdict, never the run: the worker is killed and
replaced, and everything else that was in its chunk is scored again.
"""

import concurrent.futures
import ctypes
import multiprocessing
import signal
import sys
from collections.abc import Sequence

import pebble

from dapo_jax.reward import Score, Scorer, load_scorer
from dapo_jax.types import RunError, Verdict

try:
    import resource
except ImportError:  # not a POSIX system
    resource = None

WORKER_MEMORY_BYTES = 4 * 2**30  # of address space, so that one answer cannot take the machine
CHUNKS_PER_WORKER = 4

_scorer: Scorer  # of a worker process


class RewardPool:
    """Worker processes that score; a context manager.

    Args:
        scorer: see `dapo_jax.reward.load_scorer`.
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
        items = list(zip(texts, answers, strict=True))
        size = max(1, -(-len(items) // (self.workers * CHUNKS_PER_WORKER)))
        chunks = [items[start : start + size] for start in range(0, len(items), size)]
        scores: list[Score | str] = []
        for chunk, result in zip(chunks, self._run(chunks)):
            # A chunk has the time of one response. If it takes longer, or its worker dies, its
            # responses are tried one by one, and each has the whole limit to itself.
            scores += result if isinstance(result, list) else self._one_by_one(chunk)
        return [self._verdict(score) for score in scores]

    def _one_by_one(self, chunk: list[tuple[str, str]]) -> list[Score | str]:
        results = self._run([[item] for item in chunk])
        return [result if isinstance(result, str) else result[0] for result in results]

    def _run(self, chunks: list[list[tuple[str, str]]]) -> list[list[Score | str] | str]:
        """The scores of each chunk, or what ended its worker."""
        futures = [
            self.pool.schedule(_score_chunk, args=(chunk,), timeout=self.timeout_seconds)
            for chunk in chunks
        ]
        return [_result(future) for future in futures]

    def _verdict(self, score: Score | str) -> Verdict:
        if isinstance(score, str):
            return Verdict(False, self.incorrect, note=score)
        reward = self.correct if score.correct else self.incorrect
        return Verdict(score.correct, reward, score.extracted, steps=score.steps)


def _result(future: pebble.ProcessFuture) -> list[Score | str] | str:
    try:
        return future.result()
    except concurrent.futures.TimeoutError:
        return "timeout"
    except pebble.ProcessExpired:
        return "worker died"
    except concurrent.futures.BrokenExecutor as error:
        raise RunError(
            "The processes that score do not start; what they said of it is above. In a script of "
            "your own, training must stand under `if __name__ == '__main__':`, for each of them "
            "imports the script."
        ) from error


def _start_worker(scorer: str) -> None:
    """Runs once in each worker, before its first chunk."""
    global _scorer
    # Ctrl-C reaches the whole process group: the parent decides when its workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        pr_set_pdeathsig = 1  # a parent that is killed takes its workers along
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if resource is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (WORKER_MEMORY_BYTES, hard))
    _scorer = load_scorer(scorer)


def _score_chunk(items: list[tuple[str, str]]) -> list[Score | str]:
    return [_score(text, answer) for text, answer in items]


def _score(text: str, answer: str) -> Score | str:
    try:
        score = _scorer(text, answer)
    except (Exception, SystemExit) as error:  # the user's code: anything may come out of it
        return f"error: {type(error).__name__}: {error}"
    if isinstance(score, tuple):
        correct, extracted, *steps = score
        steps = tuple((int(end), float(reward)) for end, reward in (steps[0] if steps else ()))
        return Score(bool(correct), extracted, steps)
    return Score(bool(score), None)
