"""Benchmarks: n samples of every problem, their transcripts, and the figures reported of them.

A directory holds the samples of one model with one set of settings:

settings.json    all that the samples depend on
NAME.jsonl       the transcripts of a benchmark, one problem to a line
NAME.html        a page of the same transcripts
results.json     the figures of every benchmark

A problem is written as soon as it is done. A later call resumes with the problems that are left.
"""

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import jax

from dapo_jax.evaluation.benchmark_page import write_page
from dapo_jax.evaluation.majority_vote import votes
from dapo_jax.evaluation.metrics import attempts_of, statistics
from dapo_jax.rewards.pool import RewardPool
from dapo_jax.rewards.types import Rubric
from dapo_jax.rollout.collector import IDLE_SECONDS, RolloutCollector
from dapo_jax.rollout.prompt_queue import PromptQueue
from dapo_jax.types import Attempt, Attempts, Problem, UserError, Verdict, verdict_from_json
from dapo_jax.utils.files import write_atomically
from dapo_jax.utils.progress import Progress, duration

REPORT_EVERY_SECONDS = 10.0
ATTEMPT = ("text", "length", "truncated", "invalid")  # fields of a sample besides its verdict


class Benchmark(NamedTuple):
    """A named set of problems with its scorers."""

    name: str
    problems: Sequence[Problem]  # all of the source `name`
    rubric: Rubric


def open_directory(directory: Path, settings: Mapping[str, Any]) -> None:
    """Creates the directory of an evaluation, or checks that it belongs to this one.

    Raises:
        UserError: it cannot be written to, or holds samples of another model or other settings.
    """
    file = directory / "settings.json"
    wanted = json.loads(json.dumps(settings))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            write_atomically(file, json.dumps(wanted, indent=1) + "\n")
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
    collector: RolloutCollector,
    key: jax.Array,
    directory: Path,
    *,
    progress: Progress,
) -> dict[str, Any]:
    """Runs a benchmark: writes its transcripts and page, and returns its figures.

    See `metrics.statistics` for the figures.

    Args:
        collector: generates and scores the samples; its engine holds the weights.
        directory: see `open_directory`.

    Raises:
        UserError: the directory holds transcripts of other problems or of other scorers.
        StopRequested: a stop was requested; finished problems are kept.
    """
    num_samples, pool = collector.settings.num_samples, collector.pool
    file, judged_by = directory / f"{benchmark.name}.jsonl", _judged_by(benchmark.rubric, pool)
    done = _read(file, benchmark, num_samples, judged_by)
    left = [problem for problem in benchmark.problems if problem.id not in done]
    if done:
        every = len(benchmark.problems)
        progress.say(f"{benchmark.name}: {len(done)} of {every} problems were done before")
    if left:
        with file.open("a", encoding="ascii") as out:
            _record(benchmark, left, collector, key, out, done, progress, judged_by)
    groups = [done[problem.id] for problem in benchmark.problems]
    lines = [_line(group, judged_by) + "\n" for group in groups]
    write_atomically(file, "".join(lines))  # in the order of the problems
    collector.telemetry.phase(f"reward workers: which answers to {benchmark.name} are equal")
    rubrics, moved = {benchmark.name: benchmark.rubric}, collector.telemetry.moved
    figures = statistics(groups, votes(groups, rubrics, pool, moved))
    figures = {"problems": len(groups), "samples": num_samples} | figures
    results = directory / "results.json"
    every = json.loads(results.read_text()) if results.exists() else {}
    write_atomically(results, json.dumps(every | {benchmark.name: figures}, indent=1) + "\n")
    settings = json.loads((directory / "settings.json").read_text())
    write_page(directory / f"{benchmark.name}.html", benchmark.name, groups, figures, settings)
    return figures


def _record(
    benchmark: Benchmark,
    problems: Sequence[Problem],
    collector: RolloutCollector,
    key: jax.Array,
    out: TextIO,
    done: dict[int, Attempts],
    progress: Progress,
    judged_by: Mapping[str, Any],
) -> None:
    """Generates the problems' samples, and writes each problem as soon as it is scored."""
    wanted, num_done = len(problems), 0
    begun = reported = time.monotonic()
    for output in collector.run(PromptQueue.of_list(problems), key):
        for _, scored in output.groups:
            group = attempts_of(scored)
            done[group.problem.id] = group
            out.write(_line(group, judged_by) + "\n")
            out.flush()
            os.fsync(out.fileno())
            num_done += 1
        if output.idle:
            time.sleep(IDLE_SECONDS)
        now = time.monotonic()
        if num_done and now - reported > REPORT_EVERY_SECONDS:
            reported = now
            correct = [v.correct for group in done.values() for v in group.verdicts]
            progress.say(
                f"{benchmark.name}: {num_done:,} of {wanted:,} problems, "
                f"{100 * sum(correct) / len(correct):.1f} % correct so far, about "
                f"{duration((now - begun) * (wanted - num_done) / num_done)} left"
            )


def _judged_by(rubric: Rubric, pool: RewardPool) -> dict[str, Any]:
    """Returns the rubric as JSON has it, with a hash of each scorer's file: an edited scorer is
    another."""
    sources = {name: pool.sources[name] for name in rubric.names}
    files = {n: hashlib.sha256(s).hexdigest() for n, s in sources.items() if s is not None}
    return json.loads(json.dumps(rubric._asdict() | ({"files": files} if files else {})))


def _line(group: Attempts, judged_by: Mapping[str, Any]) -> str:
    problem = group.problem
    return json.dumps(
        {
            "problem_id": problem.id,
            "prompt": problem.prompt,
            "answer": problem.answer,
            "rubric": judged_by,
            "samples": [
                {name: getattr(attempt, name) for name in ATTEMPT} | attempt.verdict._asdict()
                for attempt in group.attempts
            ],
        }
    )


def _read(
    file: Path, benchmark: Benchmark, num_samples: int, judged_by: Mapping[str, Any]
) -> dict[int, Attempts]:
    """Returns finished problems by their ids. Removes a line that a kill left half written."""
    if not file.exists():
        return {}
    problems = {problem.id: problem for problem in benchmark.problems}
    lines = file.read_text(encoding="ascii").splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]
    if len(whole) < len(lines):
        write_atomically(file, "".join(whole))
    done = {}
    for number, line in enumerate(whole, 1):
        try:
            record = json.loads(line)
            problem = problems.get(record["problem_id"])
            found = (record["prompt"], record["answer"], len(record["samples"]))
            judged_before = record["rubric"]
            attempts = tuple(_attempt(sample) for sample in record["samples"])
        except (ValueError, LookupError, TypeError) as error:
            raise UserError(
                f"{file}, line {number}: this is no transcript of this version ({error!r}). Choose "
                "another --output, or remove the file."
            ) from error
        if problem is None or found != (problem.prompt, problem.answer, num_samples):
            raise UserError(
                f"{file}, line {number}: these are transcripts of other problems, or of another "
                "number of samples. Choose another --output, or remove the file."
            )
        if judged_before != judged_by:
            raise UserError(
                f"{file}, line {number}: these were judged by {judged_before}, and {judged_by} "
                "is requested. Choose another --output, or remove the file."
            )
        done[problem.id] = Attempts(problem, attempts)
    return done


def _attempt(sample: dict[str, Any]) -> Attempt:
    verdict = {name: value for name, value in sample.items() if name in Verdict._fields}
    fields = {name: sample[name] for name in ATTEMPT}
    return Attempt(verdict=verdict_from_json(verdict), **fields)
