"""The rows of a data file: a prompt, an answer, and what else stands there.

Two shapes are read. In plain columns the prompt is a text. In the schema of verl it is the messages
of a chat, and the answer is `reward_model.ground_truth`. Which columns hold them is in the config,
or is seen from their names.
"""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import pyarrow.parquet

from dapo_jax.rewards.scorers import last_boxed
from dapo_jax.types import UserError

# Tried in this order where the config names none.
PROMPT_KEYS = ("prompt", "problem", "question")
ANSWER_KEYS = ("reward_model.ground_truth", "answer", "ground_truth", "solution")
BATCH_ROWS = 1024  # of a parquet file that are in memory at once as Python objects

Message = tuple[str, str]  # role, content


class Columns(NamedTuple):
    """Which columns are read; None: as their names show."""

    prompt_key: str | None
    answer_key: str | None
    # "boxed": the last \\boxed{} in it, "####": what follows the last ####, "text": all of it.
    answer_in: str | None


class Row(NamedTuple):
    prompt: str | tuple[Message, ...]
    answer: str
    metadata: dict[str, Any]  # the columns that are neither


class Unusable(NamedTuple):
    """A row that holds no problem."""

    reason: str  # with file and line


def read_rows(file: Path, columns: Columns, field: str) -> Iterator[Row | Unusable]:
    """The rows of a jsonl or parquet file, in order. Blank lines are skipped.

    Args:
        field: the config field that gave the file, for messages.

    Raises:
        UserError: the file cannot be read, or has a row of the wrong shape; with its number.
    """
    try:
        rows = _jsonl(file, field) if file.suffix == ".jsonl" else _parquet(file, field)
        for where, row in rows:
            yield _row(row, columns, field, where)
    except OSError as error:
        raise UserError(
            f"{field}: cannot read {file.absolute()}: {error.strerror or error}."
        ) from error


def _jsonl(file: Path, field: str) -> Iterator[tuple[str, dict[str, Any]]]:
    # In bytes, so that a line that is not UTF-8 can be named.
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                where = f"{field}: {file}, line {number}"
                yield where, _parse(line, where)


def _parquet(file: Path, field: str) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        table = pyarrow.parquet.ParquetFile(file)
        number = 0
        for batch in table.iter_batches(BATCH_ROWS):
            for row in batch.to_pylist():
                number += 1
                yield f"{field}: {file}, row {number}", row
    # ValueError and OverflowError: text that is not UTF-8, a time that Python has no year for.
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:
        raise UserError(f"{field}: {file} is not a sound parquet file: {error}.") from error


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise UserError(
            f"{where} is not UTF-8: byte {line[error.start]:#04x} at byte {error.start + 1} of the "
            "line. Convert the file to UTF-8."
        ) from None
    except json.JSONDecodeError as error:
        raise UserError(
            f"{where} is not JSON: {error.msg}, column {error.colno}. "
            "Each line must hold one whole JSON object."
        ) from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; deep nesting
        raise UserError(f"{where} cannot be read as JSON: {error}. Correct the line.") from None
    if not isinstance(row, dict):
        raise UserError(
            f"{where} must be a JSON object, not {_kind(row)}. "
            "Write one object per line, without a list around them."
        )
    return row


def _row(row: dict[str, Any], columns: Columns, field: str, where: str) -> Row | Unusable:
    prompt_key = _key(row, columns.prompt_key, PROMPT_KEYS, f"{field}.prompt_key", where)
    answer_key = _key(row, columns.answer_key, ANSWER_KEYS, f"{field}.answer_key", where)
    prompt = _prompt(_get(row, prompt_key), prompt_key, where)
    text = answer_text(_get(row, answer_key), answer_key, where)
    answer = _extracted(text, columns.answer_in, answer_key)
    if answer is None:
        return Unusable(f"{where}: {answer_key!r} holds no answer ({text[-40:]!r})")
    messages = [("", prompt)] if isinstance(prompt, str) else prompt
    for key, parts in ((prompt_key, messages), (answer_key, [("", answer)])):
        if not any(content.strip() for _, content in parts):
            return Unusable(f"{where}: {key!r} is empty")
        try:
            "".join(role + content for role, content in parts).encode()
        except UnicodeEncodeError:  # JSON may spell half a surrogate pair
            return Unusable(f"{where}: {key!r} holds half of a surrogate pair")
    left = {k: v for k, v in row.items() if k not in (prompt_key, answer_key)}
    return Row(prompt, answer.strip(), json.loads(json.dumps(left, default=str)))


def _key(
    row: dict[str, Any], key: str | None, candidates: tuple[str, ...], field: str, where: str
) -> str:
    """The column to read: the one asked for, or the first of the candidates that is there."""
    for name in candidates if key is None else (key,):
        if _has(row, name):
            return name
    wanted = repr(key) if key is not None else f"any of {', '.join(map(repr, candidates))}"
    raise UserError(
        f"{where} has no {wanted}; it has {', '.join(map(repr, row)) or 'nothing'}. "
        f"Name the column in {field}."
    )


def _has(row: Any, key: str) -> bool:
    outer, _, inner = key.partition(".")
    if not isinstance(row, dict):
        return False
    return key in row or (outer in row and _has(row[outer], inner))


def _get(row: Any, key: str) -> Any:
    if key in row:
        return row[key]
    outer, _, inner = key.partition(".")
    return _get(row[outer], inner)


def _prompt(value: Any, key: str, where: str) -> str | tuple[Message, ...]:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise UserError(f"{where}: {key!r} must be text or a list of messages, not {_kind(value)}.")
    messages = []
    for message in value:
        fields = message if isinstance(message, dict) else {}
        role, content = fields.get("role"), fields.get("content")
        if not isinstance(role, str) or not isinstance(content, str):
            raise UserError(
                f"{where}: a message of {key!r} must have 'role' and 'content', both text; got "
                f"{_kind(message)}."
            )
        messages.append((role, content))
    return tuple(messages)


def answer_text(value: Any, key: str, where: str) -> str:
    """The answer as text; numbers are written as they are, whole ones without a point."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    finite = not isinstance(value, float) or math.isfinite(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and finite:
        return str(value)
    if not isinstance(value, str):
        raise UserError(
            f"{where}: {key!r} must be text, not {_kind(value)}. Write the answer as text, or "
            "name the column that holds it."
        )
    return value


def _extracted(text: str, answer_in: str | None, key: str) -> str | None:
    if answer_in is None:
        boxed = key.endswith("solution")
        answer_in = "boxed" if boxed else "####" if re.search(r"(^|\n)#### ", text) else "text"
    if answer_in == "boxed":
        return last_boxed(text)
    if answer_in == "####":
        _, found, after = text.rpartition("####")
        return after.replace(",", "") if found else None
    return text


def _kind(value: Any) -> str:
    """What a value is, in JSON's words, with its beginning."""
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number",
             str: "a text", list: "a list", dict: "an object"}  # fmt: skip
    text = json.dumps(value, default=str)
    kind = names.get(type(value), type(value).__name__)
    return f"{kind} ({text[:40]}{'...' if len(text) > 40 else ''})"
