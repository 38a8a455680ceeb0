"""Scoring a file of answers: what launch/score.py does."""

import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dapo_jax.data.records import answer_text
from dapo_jax.rewards.pool import RewardPool, Scored
from dapo_jax.rewards.scorers import load_scorer
from dapo_jax.rewards.types import Rubric, Task, parse_scorers, verdict
from dapo_jax.types import UserError
from dapo_jax.utils.progress import duration

WINDOW_LINES = 2000  # read, scored and written at a time: memory does not grow with the file
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
    """Scores every line of `source` into `target`; what came of it, as a line of text.

    Args:
        say: told of malformed lines, and of the progress every ten seconds.

    Raises:
        UserError: there is no such scorer or file, or the target cannot be written.
    """
    if timeout_seconds <= 0 or workers < 1:
        raise UserError(
            "--timeout_seconds must be above 0 and --workers at least 1; got "
            f"{timeout_seconds:g} and {workers}."
        )
    if not source.is_file():
        raise UserError(f"--input={source}: no such file.")
    if target.exists() and target.samefile(source):
        raise UserError(f"--output={target} is the input; name another file.")
    try:
        rubric = Rubric(parse_scorers(scorer), correct=1.0, incorrect=-1.0)
        for name in rubric.names:
            load_scorer(name)
    except UserError as error:
        raise UserError(str(error).replace("config.reward.scorer", "--scorer", 1)) from error
    except ValueError as error:
        raise UserError(f"--scorer={scorer}: {error}.") from error
    malformed = scored = right = faults = 0
    size, start = source.stat().st_size, time.monotonic()
    reported = start
    with (
        RewardPool(rubric.names, workers=workers, timeout_seconds=timeout_seconds) as pool,
        _opened(target) as out,
        source.open("rb") as lines,
    ):
        rows = _rows(lines)
        while window := list(itertools.islice(rows, WINDOW_LINES)):
            good = []
            for number, row in window:
                if isinstance(row, str):
                    say(f"{source}, line {number}: {row}; left out")
                    malformed += 1
                else:
                    good.append(row)
            results = pool.score([_task(rubric.names, row) for row in good])
            for row, result in zip(good, results):
                said = _said(rubric, result)
                scored, right = scored + 1, right + said["correct"]
                faults += bool(said["note"])
                # Lone surrogates cannot be written as UTF-8: the escapes of ASCII can hold them.
                out.write(json.dumps(row | said) + "\n")
            now = time.monotonic()
            if now - reported > REPORT_EVERY_SECONDS:
                reported, done = now, lines.tell() / max(1, size)
                left = (now - start) * (1 - done) / max(done, 1e-9)
                say(f"{scored:,} answers, {scored / (now - start):,.0f} per second, "
                    f"about {duration(left)} left")  # fmt: skip
    seconds = time.monotonic() - start
    return (
        f"{scored:,} answers in {seconds:.1f} s, {scored / max(seconds, 1e-9):,.0f} per second; "
        f"{100 * right / max(1, scored):.1f} % correct, {faults:,} without a verdict, "
        f"{malformed:,} malformed lines left out"
    )


def _opened(target: Path) -> Any:
    try:
        return target.open("w", encoding="ascii")
    except OSError as error:
        raise UserError(f"--output={target} cannot be written: {error.strerror}.") from error


def _rows(lines: Any) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """(line number, row or what is wrong with it); blank lines are passed over."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield number, f"not JSON ({error})"
            continue
        yield number, _problem(row) or row


def _problem(row: Any) -> str | None:
    if not isinstance(row, dict):
        return f"a JSON object is wanted, not {type(row).__name__}"
    for name in ("prediction", "answer"):
        if name not in row:
            return f'no "{name}"; it has {", ".join(map(repr, row)) or "nothing"}'
    if not isinstance(row["prediction"], str):
        return f'"prediction" must be text, not {type(row["prediction"]).__name__}'
    try:
        answer_text(row["answer"], "answer", "")
    except UserError:
        return f'"answer" must be text or a number, not {row["answer"]!r:.40}'
    return None


def _task(scorers: tuple[str, ...], row: dict[str, Any]) -> Task:
    """The row's response; what else the row holds are its metadata."""
    read = ("prediction", "answer", "token_ids")
    rest = {name: value for name, value in row.items() if name not in read}
    token_ids = row.get("token_ids")
    return Task(
        scorers,
        row["prediction"],
        answer_text(row["answer"], "answer", ""),  # as training reads it
        tuple(token_ids) if isinstance(token_ids, list) else (),
        rest,
    )


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
