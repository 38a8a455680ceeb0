"""Files of prompts and of their samples, a JSON object a line; a stopped file is resumed."""

import functools
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dapo_jax.types import UserError

# Errors of a line that is no JSON, or has other kinds of values than a prompt.
MALFORMED = ValueError, LookupError, TypeError, AttributeError, AssertionError, RecursionError


def read_prompts(source: Path) -> list[dict[str, Any]]:
    """Returns the lines of the file, each with a usable prompt. They may be an earlier output:
    without its samples."""
    try:
        # Not splitlines: a text in JSON may hold other separators of lines, such as U+2028.
        texts = source.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--prompts={source} cannot be read: {error}.") from error
    lines = []
    for number, text in enumerate(texts, 1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
            if "prompt_token_ids" in line:
                tokens = line["prompt_token_ids"]
                assert tokens and all(type(token) is int for token in tokens)
            else:
                prompt_of(line)
        except MALFORMED as error:
            raise UserError(
                f'--prompts={source}, line {number}: an object with "prompt", a text or a list of '
                'messages with "role" and "content", or "prompt_token_ids" is wanted; got '
                f"{text[:60]!r}."
            ) from error
        lines.append({name: x for name, x in line.items() if name != "samples"})
    if not lines:
        raise UserError(f"--prompts={source} holds no prompt.")
    return lines


def prompt_of(line: dict[str, Any]) -> str | tuple[tuple[str, str], ...]:
    """Returns a line's prompt: a text, or (role, content) of each message."""
    prompt = line["prompt"]
    if isinstance(prompt, str):
        return prompt
    messages = tuple((message["role"], message["content"]) for message in prompt)
    assert messages and all(isinstance(part, str) for part in itertools.chain(*messages))
    return messages


def done_before(target: Path, lines: Sequence[dict[str, Any]]) -> int:
    """Returns how many lines the file holds with their samples, and cuts off a partial one.

    Raises:
        UserError: the file cannot be written, or holds something else. It is left as it is.
    """
    found, partial = _content(target)
    if not _is_begun(found, partial, lines):
        raise _other_results(target)
    _cut_off(target, partial)
    return len(found)


def done_in_any_order(target: Path, lines: Sequence[dict[str, Any]]) -> set[int]:
    """Returns the numbers of the lines that the file holds with their samples, in any order, and
    cuts off a partial one.

    Args:
        lines: with the same names in each; no two are equal.

    Raises:
        UserError: see `done_before`.
    """
    found, partial = _content(target)
    as_text = functools.partial(json.dumps, sort_keys=True)
    left = {as_text(line): number for number, line in enumerate(lines)}
    for text in found:
        try:
            line = json.loads(text)
            del left[as_text({name: line[name] for name in line if name in lines[0]})]
        except (ValueError, LookupError, TypeError) as error:
            raise _other_results(target) from error
    if partial and not any(_begins(partial, lines[number]) for number in left.values()):
        raise _other_results(target)
    _cut_off(target, partial)
    return set(range(len(lines))) - set(left.values())


def _content(target: Path) -> tuple[list[bytes], bytes]:
    """Returns the whole lines of the file, which is made if there is none, and a partial one."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
        content = target.read_bytes()
    except OSError as error:
        raise UserError(f"--output={target} cannot be written: {error.strerror}.") from error
    *found, partial = content.split(b"\n")
    return found, partial


def _other_results(target: Path) -> UserError:
    return UserError(
        f"--output={target} holds other results than this command's; name another file."
    )


def _cut_off(target: Path, partial: bytes) -> None:
    if partial:
        with target.open("r+b") as file:
            file.truncate(target.stat().st_size - len(partial))


def _is_begun(found: Sequence[bytes], partial: bytes, lines: Sequence[dict[str, Any]]) -> bool:
    """Returns whether these are the first lines with their samples, and a part of the next."""
    if len(found) + bool(partial) > len(lines):
        return False
    try:
        if not all(json.loads(text).items() >= line.items() for text, line in zip(found, lines)):
            return False
    except (ValueError, AttributeError):
        return False
    return not partial or _begins(partial, lines[len(found)])


def _begins(partial: bytes, line: dict[str, Any]) -> bool:
    """Returns whether a partial line of the file is the beginning of this one with its samples."""
    text = json.dumps(line)[:-1].encode()  # without the brace that closes it
    return partial[: len(text)] == text[: len(partial)]
