"""Benchmarks: n samples of every problem, kept as transcripts, and the figures quoted of them.

A directory holds what was drawn with one model and one set of settings:

settings.json    what the samples depend on
NAME.jsonl       the transcripts of a benchmark, one problem to a line
NAME.html        the same to be read, one problem after the other
results.json     the figures of every benchmark

Problems are written as they are done, and a call that finds some of them goes on with the others.
"""

import collections
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dapo_jax.benchmark_page import write_page
from dapo_jax.evaluate import statistics
from dapo_jax.progress import Progress, duration
from dapo_jax.reward import Rubric, Task, verdict
from dapo_jax.reward_pool import Pending, RewardPool
from dapo_jax.types import (
    Attempt,
    Attempts,
    Problem,
    Response,
    UserError,
    Verdict,
    verdict_from_json,
)
from dapo_jax.votes import votes
from dapo_jax.watchdog import UNWATCHED, Watchdog

REPORT_EVERY_SECONDS = 10.0

# (problem, sample, response) of responses that have just ended, the problem as an index.
Finished = Callable[[Sequence[tuple[int, int, Response]]], None]
# Draws the samples of every problem and hands them over as they end.
Draw = Callable[[Sequence[Problem], Finished], None]


class Benchmark(NamedTuple):
    name: str
    problems: Sequence[Problem]  # all of the source `name`
    rubric: Rubric


def open_directory(directory: Path, settings: Mapping[str, Any]) -> None:
    """Makes the directory of an evaluation, or makes sure that it is that of this one.

    Raises:
        UserError: it cannot be written to, or holds samples of another model or other settings.
    """
    file = directory / "settings.json"
    wanted = json.loads(json.dumps(settings))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            _write(file, json.dumps(wanted, indent=1) + "\n")
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"--output={directory} cannot be used: {error}. Choose another directory."
        ) from error
    for name in wanted | found:
        if wanted.get(name) != found.get(name):
            raise UserError(
                f"--output={directory} holds another evaluation: {name} was {found.get(name)!r} "
                f"and is {wanted.get(name)!r} now. Choose another --output."
            )


def run(
    benchmark: Benchmark,
    draw: Draw,
    pool: RewardPool,
    directory: Path,
    *,
    num_samples: int,
    progress: Progress,
    watch: Watchdog = UNWATCHED,
) -> dict[str, Any]:
    """The figures of a benchmark, see `evaluate.statistics`; its transcripts and its page are in
    the directory then.

    Args:
        draw: draws `num_samples` responses to every problem that it is given.
        directory: see `open_directory`.
        watch: is told what is waited for.

    Raises:
        UserError: transcripts that are there are of other problems or judged by other scorers.
    """
    file = directory / f"{benchmark.name}.jsonl"
    done = _read(file, benchmark, num_samples)
    left = [problem for problem in benchmark.problems if problem.id not in done]
    if done:
        every = len(benchmark.problems)
        progress.say(f"{benchmark.name}: {len(done)} of {every} problems were done before")
    if left:
        with _Recorder(benchmark, left, pool, file, done, num_samples, progress, watch) as recorder:
            try:
                draw(left, recorder.finished)
            finally:  # stopped too: what is drawn is kept
                recorder.record(wait=True)
    groups = [done[problem.id] for problem in benchmark.problems]
    lines = [_line(group, benchmark.rubric) + "\n" for group in groups]
    _write(file, "".join(lines))  # in the order of the problems
    watch.moved(f"reward workers: which answers to {benchmark.name} are equal")
    figures = statistics(groups, votes(groups, {benchmark.name: benchmark.rubric}, pool))
    figures = {"problems": len(groups), "samples": num_samples} | figures
    results = directory / "results.json"
    every = json.loads(results.read_text()) if results.exists() else {}
    _write(results, json.dumps(every | {benchmark.name: figures}, indent=1) + "\n")
    settings = json.loads((directory / "settings.json").read_text())
    write_page(directory / f"{benchmark.name}.html", benchmark.name, groups, figures, settings)
    return figures


class _Recorder:
    """Scores problems whose samples are all drawn, and writes them down when they are scored."""

    def __init__(
        self,
        benchmark: Benchmark,
        problems: Sequence[Problem],
        pool: RewardPool,
        file: Path,
        done: dict[int, Attempts],
        num_samples: int,
        progress: Progress,
        watch: Watchdog,
    ):
        self.watch = watch
        self.benchmark, self.problems, self.pool = benchmark, problems, pool
        self.done, self.num_samples, self.progress = done, num_samples, progress
        self.drawn: dict[int, dict[int, Response]] = collections.defaultdict(dict)
        self.scored: collections.deque[tuple[int, list[Response], Pending]] = collections.deque()
        self.file = file.open("a", encoding="ascii")
        self.responses = 0
        self.begun = self.reported = 0.0  # set when the first response ends: programs are compiled

    def __enter__(self) -> "_Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def finished(self, ended: Sequence[tuple[int, int, Response]]) -> None:
        """Takes responses that have ended."""
        if not self.begun:
            self.begun = self.reported = time.monotonic()
        for index, sample, response in ended:
            drawn = self.drawn[index]
            drawn[sample] = response
            self.responses += 1
            if len(drawn) == self.num_samples:
                responses = [drawn[i] for i in range(self.num_samples)]
                tasks = [self._task(self.problems[index], response) for response in responses]
                self.scored.append((index, responses, self.pool.submit(tasks)))
                del self.drawn[index]
        self.record(wait=False)
        if time.monotonic() - self.reported > REPORT_EVERY_SECONDS:
            self._report()

    def record(self, *, wait: bool) -> None:
        """Writes down the problems that are scored."""
        while self.scored and (wait or self.pool.ready(self.scored[0][2])):
            self.watch.waiting_for(f"reward workers, problems without verdicts: {len(self.scored)}")
            index, responses, pending = self.scored.popleft()
            attempts = tuple(
                Attempt(
                    response.text,
                    len(response.tokens),
                    response.truncated,
                    verdict(self.benchmark.rubric, scored.scores),
                    response.invalid,
                )
                for response, scored in zip(responses, self.pool.collect(pending))
            )
            group = Attempts(self.problems[index], attempts)
            self.done[group.problem.id] = group
            self.file.write(_line(group, self.benchmark.rubric) + "\n")
            self.file.flush()
            os.fsync(self.file.fileno())
            self.watch.moved()

    def _task(self, problem: Problem, response: Response) -> Task:
        names = self.benchmark.rubric.names
        token_ids = tuple(response.tokens.tolist())
        return Task(names, response.text, problem.answer, token_ids, problem.metadata)

    def _report(self) -> None:
        now = self.reported = time.monotonic()
        wanted = len(self.problems) * self.num_samples
        left = (now - self.begun) * (wanted - self.responses) / max(self.responses, 1)
        said = [v.correct for group in self.done.values() for v in group.verdicts]
        so_far = f", {100 * sum(said) / len(said):.1f} % correct so far" if said else ""
        self.progress.say(
            f"{self.benchmark.name}: {self.responses:,} of {wanted:,} responses{so_far}, about "
            f"{duration(left)} left"
        )


def _line(group: Attempts, rubric: Rubric) -> str:
    problem = group.problem
    return json.dumps(
        {
            "problem_id": problem.id,
            "prompt": problem.prompt,
            "answer": problem.answer,
            "rubric": rubric._asdict(),
            "samples": [
                {
                    "text": attempt.text,
                    "length": attempt.length,
                    "truncated": attempt.truncated,
                    "invalid": attempt.invalid,
                    **attempt.verdict._asdict(),
                }
                for attempt in group.attempts
            ],
        }
    )


def _read(file: Path, benchmark: Benchmark, num_samples: int) -> dict[int, Attempts]:
    """The problems that are done, by their ids. A line that a kill left half written is removed."""
    if not file.exists():
        return {}
    problems = {problem.id: problem for problem in benchmark.problems}
    rubric = json.loads(json.dumps(benchmark.rubric._asdict()))
    lines = file.read_text(encoding="ascii").splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]
    if len(whole) < len(lines):
        _write(file, "".join(whole))
    done = {}
    for number, line in enumerate(whole, 1):
        row = json.loads(line)
        problem = problems.get(row["problem_id"])
        same = problem is not None and (problem.prompt, problem.answer) == (
            row["prompt"],
            row["answer"],
        )
        if problem is None or not same or len(row["samples"]) != num_samples:
            raise UserError(
                f"{file}, line {number}: these are transcripts of other problems, or of another "
                "number of samples. Choose another --output, or remove the file."
            )
        judged_by = row.get("rubric", rubric)  # transcripts of before have none
        if judged_by != rubric:
            raise UserError(
                f"{file}, line {number}: these were judged by {judged_by}, and {rubric} is asked "
                "for. Choose another --output, or remove the file."
            )
        attempts = tuple(_attempt(sample) for sample in row["samples"])
        done[problem.id] = Attempts(problem, attempts)
    return done


def _attempt(sample: dict[str, Any]) -> Attempt:
    said = {name: value for name, value in sample.items() if name in Verdict._fields}
    return Attempt(
        sample["text"],
        sample["length"],
        sample["truncated"],
        verdict_from_json(said),
        sample.get("invalid", False),  # transcripts of before have none
    )


def _write(file: Path, text: str) -> None:
    """The whole text or what was there before."""
    temporary = file.with_name(f".{file.name}.tmp")
    temporary.write_text(text, encoding="ascii")
    os.replace(temporary, file)
