"""Problems: read from a file, checked, and served in an order that depends on the seed alone.

The published DAPO-Math-17k file repeats its 17k prompts about a hundred times and gives some of
them two answers. Both are mended here and counted, where the reference trains on the file as it is.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import grain

from dapo_jax.types import Problem, UserError


def read_jsonl(path: str, *, prompt_key: str, answer_key: str, field: str) -> list[tuple[str, str]]:
    """(prompt, answer) of every line, in the order of the file. Blank lines are skipped.

    Args:
        path: UTF-8 text with one JSON object per line.
        prompt_key: the object's key for the prompt, a text.
        answer_key: the object's key for the answer, a text or a whole number.
        field: the config field that gave `path`, for messages, such as "config.data.train_path".

    Raises:
        UserError: the file cannot be read, holds nothing, or has a line that does not fit.
    """
    pairs = []
    first: dict[str, str] = {}  # a prompt that comes a hundred times is kept in memory once
    try:
        # In bytes, so that a line that is not UTF-8 can be named.
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                where = f"{field}: {path}, line {number}"
                row = _parse(line, where)
                prompt = _text(row, prompt_key, "config.data.prompt_key", where)
                if isinstance(row.get(answer_key), int) and not isinstance(row[answer_key], bool):
                    row[answer_key] = str(row[answer_key])
                answer = _text(row, answer_key, "config.data.answer_key", where)
                pairs.append((first.setdefault(prompt, prompt), answer))
    except OSError as error:
        raise UserError(
            f"{field}: cannot read {os.path.abspath(path)}: {error.strerror}. "
            "Give the path of a file with one JSON object per line."
        ) from None
    if not pairs:
        raise UserError(f"{field}: {path} is empty. It must hold one JSON object per line.")
    return pairs


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


def _text(row: dict[str, Any], key: str, key_field: str, where: str) -> str:
    if key not in row:
        columns = ", ".join(map(repr, row)) or "nothing"
        raise UserError(f"{where} has no {key!r}; it has {columns}. Correct {key_field}.")
    value = row[key]
    if not isinstance(value, str):
        raise UserError(f"{where}: {key!r} must be text, not {_kind(value)}. Correct {key_field}, "
                        "or write it as text.")  # fmt: skip
    if not value.strip():
        raise UserError(f"{where}: {key!r} is empty. Fill it in, or remove the line.")
    try:
        value.encode()  # JSON may spell half a surrogate pair, which no tokenizer takes
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where}: {key!r} holds {value[error.start]!r} at character {error.start + 1}, half "
            "of a surrogate pair. Correct the text."
        ) from None
    return value


def _kind(value: Any) -> str:
    """What a JSON value is, in JSON's words, with its beginning."""
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number",
             str: "a text", list: "a list", dict: "an object"}  # fmt: skip
    text = json.dumps(value)
    return f"{names[type(value)]} ({text[:40]}{'...' if len(text) > 40 else ''})"


def prepare(
    pairs: Sequence[tuple[str, str]],
    encode: Callable[[str], Sequence[int]],
    *,
    source: str,
    max_prompt_tokens: int,
    overlong: Literal["drop", "error"],
    prompt_template: str | None = None,
) -> tuple[list[Problem], dict[str, int]]:
    """The problems fit for training, numbered from 0 in input order, and where the rows went.

    Each row is counted once: rows = duplicates + conflicting + overlong + problems. A prompt with
    two different answers is dropped with both, since nothing says which one is right.

    Args:
        pairs: (prompt, answer) of each row.
        encode: text to tokens.
        source: name under which accuracy is reported.
        max_prompt_tokens: longest prompt kept, template included.
        overlong: what to do with a longer one.
        prompt_template: `str.format` template with {prompt}; None: the prompt as it is.

    Returns:
        The problems, and the counts "rows", "duplicates" (beyond the first of equal rows),
        "conflicting" and "overlong" (rows left out, duplicates not counted again), "problems".

    Raises:
        UserError: the template is faulty, a prompt is too long and `overlong` is "error", or no
            problem is left.
    """
    template = "{prompt}" if prompt_template is None else prompt_template
    _check_template(template)
    first_rows: dict[tuple[str, str], int] = {}
    for row, pair in enumerate(pairs, 1):
        first_rows.setdefault(pair, row)
    answers: dict[str, int] = {}
    for prompt, _ in first_rows:
        answers[prompt] = answers.get(prompt, 0) + 1

    problems: list[Problem] = []
    counts = {"rows": len(pairs), "duplicates": len(pairs) - len(first_rows), "conflicting": 0,
              "overlong": 0, "problems": 0}  # fmt: skip
    for (prompt, answer), row in first_rows.items():
        if answers[prompt] > 1:
            counts["conflicting"] += 1
            continue
        text = template.format(prompt=prompt)
        tokens = tuple(int(token) for token in encode(text))
        if len(tokens) > max_prompt_tokens:
            if overlong == "error":
                raise UserError(
                    f"config.data.max_prompt_tokens is {max_prompt_tokens}, but row {row} of "
                    f"{source!r} ({text[:40]!r}...) has {len(tokens)} tokens. Raise it, shorten "
                    "the prompt, or set config.data.overlong_prompts to 'drop'."
                )
            counts["overlong"] += 1
            continue
        problems.append(Problem(len(problems), text, tokens, answer, source))
    counts["problems"] = len(problems)
    if not problems:
        raise UserError(
            f"config.data: no problem of {source!r} is left of {counts['rows']} rows: "
            f"{counts['duplicates']} duplicates, {counts['conflicting']} with conflicting answers, "
            f"{counts['overlong']} longer than config.data.max_prompt_tokens "
            f"({max_prompt_tokens}). Give more problems, or raise that limit."
        )
    return problems, counts


def _check_template(template: str) -> None:
    try:
        wrong = "" if "\0\1" in template.format(prompt="\0\1") else "does not contain {prompt}"
    except (LookupError, ValueError, AttributeError) as error:
        wrong = f"cannot be filled in ({error})"
    if wrong:
        raise UserError(
            f"config.data.prompt_template {wrong}; got {template!r}. Write {{prompt}} where the "
            "prompt belongs, and every other brace twice: \\boxed{{}}."
        )


class ProblemStream:
    """Problems without end: every epoch a permutation of all of them, drawn from the seed.

    Within an epoch no problem repeats. Problems taken around an epoch's end may: the last of one
    permutation can be among the first of the next. `Problem.epoch` tells the two visits apart, so
    that their samples have different random keys.

    Args:
        problems: at least one.
        seed: 0 or more.
    """

    def __init__(self, problems: Sequence[Problem], seed: int):
        assert problems and seed >= 0, f"{len(problems)} problems, seed {seed}"
        self._problems = tuple(problems)
        content = hashlib.sha256()
        for problem in self._problems:
            content.update(json.dumps(problem).encode())
        self._identity = {"seed": seed, "problems": len(problems), "sha256": content.hexdigest()}
        # Over indices, because grain walks every token of an element to estimate its bytes. The
        # seed goes through `.seed`, which hashes it: `.shuffle(seed=s)` orders epoch e by s + e, so
        # that a run's second epoch would be the first epoch of the run with the next seed.
        dataset = grain.MapDataset.source(range(len(problems))).seed(seed).shuffle().repeat()
        # Without threads: there is nothing to wait for.
        options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        self._indices: grain.DatasetIterator[int] = iter(dataset.to_iter_dataset(options))

    def take(self, n: int) -> list[Problem]:
        """The next `n` problems, each with the epoch it is taken in."""
        first = self._indices.get_state()["next_index"]
        return [
            self._problems[next(self._indices)]._replace(epoch=i // len(self._problems))
            for i in range(first, first + n)
        ]

    def get_state(self) -> dict[str, Any]:
        """The position and what it is a position in, as JSON can hold them."""
        return {**self._identity, "grain": self._indices.get_state()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes to the position of `state`, so that `take` continues exactly.

        Raises:
            UserError: the state belongs to other problems or another seed.
        """
        for name, field in (("seed", "config.seed"), ("problems", "config.data"),
                            ("sha256", "config.data")):  # fmt: skip
            if state[name] != self._identity[name]:
                raise UserError(
                    f"{field}: the checkpoint's position is in other training data: {name} was "
                    f"{state[name]}, and is {self._identity[name]} now. Restore {field} and its "
                    "files, or start a new run."
                )
        self._indices.set_state(dict(state["grain"]))
