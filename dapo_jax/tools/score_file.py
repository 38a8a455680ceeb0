"""Scoring of a file of answers, for launch/score.py."""

import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dapo_jax.data.records import answer_text
from dapo_jax.rewards.pool import RewardPool, Scored
from dapo_jax.rewards.scorers import load_scorer
from dapo_jax.rewards.types import Rubric, Task, parse_scorers, verdict
from dapo_jax.types import UserError
from dapo_jax.utils.progress import duration

WINDOW_LINES = 2000  # scored at a time: memory does not grow with the file
REPORT_EVERY_SECONDS = 10.0


def score_file(
    scorer: str,
    source: Path,
    target: Path,
    *,
    timeout_seconds: float,
    workers: int,
    say: Callable[[str], None],
) -> str:
    """Scores every line of `source` into `target` and returns a summary of one line.

    Args:
        say: receives malformed lines, and the progress every ten seconds.

    Raises:
        UserError: no such scorer or file, or the target cannot be written.
    """
    rubric = _rubric(scorer, timeout_seconds, workers)
    if not source.is_file():
        raise UserError(f"--input={source}: no such file.")
    if target.exists() and target.samefile(source):
        raise UserError(f"--output={target} is the input; name another file.")
    malformed = scored = right = faults = 0
    size, start = source.stat().st_size, time.monotonic()
    reported = start
    with (
        RewardPool(rubric.names, workers=workers, timeout_seconds=timeout_seconds) as pool,
        _opened(target) as out,
        source.open("rb") as lines,
    ):
        records = _records(lines)
        while window := list(itertools.islice(records, WINDOW_LINES)):
            good = []
            for number, record in window:
                if isinstance(record, str):
                    say(f"{source}, line {number}: {record}; left out")
                    malformed += 1
                else:
                    good.append(record)
            results = pool.score([_task(rubric.names, record) for record in good])
            for record, result in zip(good, results):
                said = _said(rubric, result)
                scored, right = scored + 1, right + said["correct"]
                faults += bool(said["note"])
                # Lone surrogates cannot be written as UTF-8: the escapes of ASCII can hold them.
                out.write(json.dumps(record | said) + "\n")
            now = time.monotonic()
            if now - reported > REPORT_EVERY_SECONDS:
                reported, done = now, lines.tell() / max(1, size)
                left = (now - start) * (1 - done) / max(done, 1e-9)
                rate = scored / (now - start)
                say(f"{scored:,} answers, {rate:,.0f} per second, about {duration(left)} left")
    seconds = time.monotonic() - start
    return (
        f"{scored:,} answers in {seconds:.1f} s, {scored / max(seconds, 1e-9):,.0f} per second; "
        f"{100 * right / max(1, scored):.1f} % correct, {faults:,} without a verdict, "
        f"{malformed:,} malformed lines left out"
    )


def score_records(
    scorer: str, records: Sequence[Mapping[str, Any]], *, timeout_seconds: float, workers: int
) -> list[dict[str, Any]]:
    """Returns each record with its verdict.

    Raises:
        UserError: no such scorer, or a record is malformed.
    """
    rubric = _rubric(scorer, timeout_seconds, workers)
    given = [dict(record) for record in records]
    for number, record in enumerate(given):
        if (problem := _problem(record)) is not None:
            raise UserError(f"record {number}: {problem}.")
    with RewardPool(rubric.names, workers=workers, timeout_seconds=timeout_seconds) as pool:
        results = pool.score([_task(rubric.names, record) for record in given])
    return [record | _said(rubric, result) for record, result in zip(given, results)]


def _rubric(scorer: str, timeout_seconds: float, workers: int) -> Rubric:
    """Returns the scorers as they are weighted; raises UserError for a value that is wrong."""
    if not 0 < timeout_seconds < math.inf or workers < 1:
        raise UserError(
            "--timeout_seconds must be above 0 and finite, and --workers at least 1; got "
            f"{timeout_seconds:g} and {workers}."
        )
    try:
        rubric = Rubric(parse_scorers(scorer), correct_reward=1.0, incorrect_reward=-1.0)
    except ValueError as error:
        raise UserError(f"--scorer={scorer}: {error}.") from error
    for name in rubric.names:
        load_scorer(name, "--scorer")
    return rubric


def _opened(target: Path) -> Any:
    try:
        return target.open("w", encoding="ascii")
    except OSError as error:
        raise UserError(f"--output={target} cannot be written: {error.strerror}.") from error


def _records(lines: Any) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Yields (line number, the record or its problem); skips blank lines."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield number, f"not JSON ({error})"
            continue
        yield number, _problem(record) or record


def _problem(record: Any) -> str | None:
    if not isinstance(record, dict):
        return f"a JSON object is wanted, not {type(record).__name__}"
    for name in ("prediction", "answer"):
        if name not in record:
            return f'no "{name}"; it has {", ".join(map(repr, record)) or "nothing"}'
    if not isinstance(record["prediction"], str):
        return f'"prediction" must be text, not {type(record["prediction"]).__name__}'
    try:
        answer_text(record["answer"], "answer", "")
    except UserError:
        return f'"answer" must be text or a number, not {record["answer"]!r:.40}'
    return None


def _task(scorers: tuple[str, ...], record: dict[str, Any]) -> Task:
    """Returns the record's response; its other fields are the metadata."""
    metadata = dict(record)
    text, answer = metadata.pop("prediction"), metadata.pop("answer")
    ids = metadata.pop("token_ids", None)
    tokens = tuple(ids) if isinstance(ids, list) else ()
    # The answer is read as in training.
    return Task(scorers, text, answer_text(answer, "answer", ""), tokens, metadata)


def _said(rubric: Rubric, result: Scored) -> dict[str, Any]:
    found = verdict(rubric, result.scores)
    said = {
        "correct": found.correct,
        "extracted": found.extracted,
        "reward": found.reward,
        "seconds": round(result.seconds, 6),
        "note": found.note,
    }
    return said if found.extra is None else said | {"extra": found.extra}
