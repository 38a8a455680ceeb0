"""Records of a data file: a prompt, an answer and other columns.

Two schemas are read. In plain columns the prompt is a text. In verl's it is the messages of a chat,
and the answer is `reward_model.ground_truth`. The columns are configured, or found by name.
"""

import codecs
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow
import pyarrow.parquet

from dapo_jax.rewards.scorers import last_boxed
from dapo_jax.types import UserError

# Column names, tried in this order where none is configured.
PROMPT_KEYS = ("prompt", "problem", "question")
ANSWER_KEYS = ("reward_model.ground_truth", "answer", "ground_truth", "solution")
RESPONSE_KEYS = ("response", "completion", "output", "answer", "solution")
MESSAGES_KEY = "messages"
ABSENT = object()  # no such column
BATCH_RECORDS = 1024  # of a parquet file in memory at once

Message = tuple[str, str]  # role, content
Prompt = str | tuple[Message, ...]  # a text, or the messages of a chat


class Columns(NamedTuple):
    """The columns to read; None: found by name."""

    prompt_key: str | None
    answer_key: str | None
    # "boxed": the last \\boxed{} in it, "####": the text after the last ####, "text": all of it.
    answer_in: str | None


class Record(NamedTuple):
    prompt: Prompt
    answer: str
    metadata: dict[str, Any]  # the other columns


class ExampleColumns(NamedTuple):
    """The columns of supervised examples; None: found by name."""

    prompt_key: str | None
    response_key: str | None
    messages_key: str | None


class Conversation(NamedTuple):
    """A prompt with the assistant's turns."""

    prompt: Prompt
    turns: tuple[Message, ...]  # from the assistant's first to its last, with those between them


class Unusable(NamedTuple):
    """A record without a problem, or without an assistant's turn."""

    reason: str  # with file and line


def read_records(file: Path, columns: Columns, field: str) -> Iterator[Record | Unusable]:
    """Yields the records of a jsonl or parquet file, in order. Blank lines are skipped.

    Args:
        field: the config field that gave the file, for messages.

    Raises:
        UserError: the file cannot be read, or a record has the wrong shape; with its number.
    """
    for where, row in _rows(file, field):
        yield _record(row, columns, field, where)


def read_conversations(
    file: Path, columns: ExampleColumns, field: str
) -> Iterator[Conversation | Unusable]:
    """Yields the records of a file of supervised examples, as `read_records`, which says more."""
    for where, row in _rows(file, field):
        yield _conversation(row, columns, field, where)


def _rows(file: Path, field: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (its place, columns) of each record."""
    try:
        yield from _jsonl(file, field) if file.suffix == ".jsonl" else _parquet(file, field)
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
        for batch in table.iter_batches(BATCH_RECORDS):
            for row in batch.to_pylist():
                number += 1
                yield f"{field}: {file}, row {number}", row
    # ValueError and OverflowError: text that is not UTF-8, a time beyond the year 9999.
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:
        raise UserError(f"{field}: {file} is not a sound parquet file: {error}.") from error


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.removeprefix(codecs.BOM_UTF8).decode())
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


def _record(row: dict[str, Any], columns: Columns, field: str, where: str) -> Record | Unusable:
    prompt_key, value = _column(row, columns.prompt_key, PROMPT_KEYS, f"{field}.prompt_key", where)
    prompt = _prompt(value, prompt_key, where)
    answer_key, value = _column(row, columns.answer_key, ANSWER_KEYS, f"{field}.answer_key", where)
    text = answer_text(value, answer_key, where)
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
    others = {k: v for k, v in row.items() if k not in (prompt_key, answer_key)}
    return Record(prompt, answer.strip(), json.loads(json.dumps(others, default=str)))


def _conversation(
    row: dict[str, Any], columns: ExampleColumns, field: str, where: str
) -> Conversation | Unusable:
    texts = columns.prompt_key is not None or columns.response_key is not None
    messages_key = columns.messages_key or MESSAGES_KEY
    if columns.messages_key is not None or (not texts and messages_key in row):
        name = f"{field}.messages_key"
        _, value = _column(row, messages_key, (), name, where)
        messages = _prompt(value, messages_key, where)
        if isinstance(messages, str):
            raise UserError(f"{where}: {messages_key!r} must be a list of messages, not a text.")
        ours = [i for i, (role, _) in enumerate(messages) if role == "assistant"]
        if not ours:
            return Unusable(f"{where}: {messages_key!r} has no message of the role 'assistant'")
        if ours[0] == 0:
            return Unusable(f"{where}: {messages_key!r} begins with the assistant: no prompt")
        found = Conversation(messages[: ours[0]], messages[ours[0] : ours[-1] + 1])
    else:
        name = f"{field}.prompt_key"
        prompt_key, value = _column(row, columns.prompt_key, PROMPT_KEYS, name, where)
        prompt = _prompt(value, prompt_key, where)
        name = f"{field}.response_key"
        key, value = _column(row, columns.response_key, RESPONSE_KEYS, name, where)
        if not isinstance(value, str):
            raise UserError(f"{where}: {key!r} must be text, not {_kind(value)}.")
        found = Conversation(prompt, (("assistant", value),))
    prompt = found.prompt
    messages = [("", prompt)] if isinstance(prompt, str) else [*prompt]
    if not any(content.strip() for _, content in messages):
        return Unusable(f"{where}: the prompt is empty")
    if not all(content.strip() for role, content in found.turns if role == "assistant"):
        return Unusable(f"{where}: a response is empty")
    try:
        "".join(role + content for role, content in (*messages, *found.turns)).encode()
    except UnicodeEncodeError:
        return Unusable(f"{where}: it holds half of a surrogate pair")
    return found


def _column(
    row: dict[str, Any], key: str | None, candidates: tuple[str, ...], field: str, where: str
) -> tuple[str, Any]:
    """Returns the column to read, the configured one or the first candidate, and its value."""
    for name in candidates if key is None else (key,):
        value = _find(row, name)
        if value is not ABSENT:
            return name, value
    none_of = f"none of {', '.join(map(repr, candidates))}"
    raise UserError(
        f"{where} has {none_of if key is None else f'no {key!r}'}; "
        f"it has {', '.join(map(repr, row)) or 'nothing'}. "
        f"Name the column in {field}."
    )


def _find(row: Any, key: str) -> Any:
    """Returns the value of a column, or with the key "outer.inner" that of a field in it."""
    if not isinstance(row, dict):
        return ABSENT
    if key in row:
        return row[key]
    outer, _, inner = key.partition(".")
    return _find(row.get(outer), inner)


def _prompt(value: Any, key: str, where: str) -> Prompt:
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
    """Returns the answer as text; whole numbers without a decimal point."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, float) and math.isfinite(value):
        # Columns of 32 bits come as floats of 64, with more digits than the file has.
        short = np.float32(value)
        shortest = short if float(short) == value else value
        return np.format_float_positional(shortest, trim="0")
    if isinstance(value, int) and not isinstance(value, bool):
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
        if boxed and "\\boxed" not in text:
            # TRL's data sets have the bare answer there: a formula in dollars, a number, a word.
            # In visible ASCII: a Chinese solution has no spaces either.
            bare = re.fullmatch(r"\$([^$]+)\$|([!-~]+)", text.strip())
            return (bare[1] or bare[2]) if bare else None
        answer_in = "boxed" if boxed else "####" if re.search(r"(^|\n)#### ", text) else "text"
    if answer_in == "boxed":
        return last_boxed(text)
    if answer_in == "####":
        _, found, after = text.rpartition("####")
        number = re.fullmatch(r"\s*[^\d,]{0,3}\d{1,3}(,\d{3})+(\.\d+)?\D*", after)
        return (after.replace(",", "") if number else after) if found else None
    return text


def _kind(value: Any) -> str:
    """Names the JSON type of a value, with the value's beginning."""
    names: dict[type, str] = {type(None): "null", bool: "a boolean", int: "a number"}
    names |= {float: "a number", str: "a text", list: "a list", dict: "an object"}
    text = json.dumps(value, default=str)
    kind = names.get(type(value), type(value).__name__)
    return f"{kind} ({text[:40]}{'...' if len(text) > 40 else ''})"
