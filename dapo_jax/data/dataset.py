"""The problems of a run: read from its sources or generated, cleaned, tokenised, cached.

The published DAPO-Math-17k file repeats its 17k prompts about a hundred times, some of them with
other white space, and gives some of them two answers. Both are mended here and counted, where the
reference trains on the file as it is.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import pyarrow.parquet

from dapo_jax.config import Config, DataConfig, SourceConfig
from dapo_jax.data import arithmetic, prompts, records, sources
from dapo_jax.data.records import Columns, Message, Row, Unusable
from dapo_jax.rewards import scorers
from dapo_jax.rewards.types import CORRECT, Rubric, parse_scorers
from dapo_jax.types import Problem, UserError

TOKENISED_TOGETHER = 1000
CODE = (
    arithmetic,
    prompts,
    records,
    scorers,
    sources,
)  # what a cached file depends on, with this one


class Prepared(NamedTuple):
    """The problems of one source, and where its rows went."""

    problems: list[Problem]
    # rows = unusable + repeated + conflicting + overlong + problems, each row counted once:
    # repeated: beyond the first with the same prompt; conflicting: prompts with several answers;
    # overlong: left out. Of the problems, truncated: their beginning was cut off.
    counts: dict[str, int]
    copies: int  # rows of every distinct prompt, where all have as many; else 0
    first_unusable: str  # what was wrong with the first such row, "" if there is none

    def describe(self) -> str:
        """The summary that is printed."""
        c = self.counts
        distinct = c["rows"] - c["unusable"] - c["repeated"]
        repeated = f"{c['repeated']:,} rows repeat a prompt: {distinct:,} are distinct"
        if self.copies:
            repeated = f"{distinct:,} distinct prompts, {self.copies} rows of each"
        told = {
            "repeated": repeated,
            "conflicting": f"{c['conflicting']:,} prompts with conflicting answers left out",
            "overlong": f"{c['overlong']:,} longer than config.data.max_prompt_tokens left out",
            "truncated": f"{c['truncated']:,} longer than config.data.max_prompt_tokens cut on the "
            "left",
            "unusable": f"{c['unusable']:,} unusable rows left out, the first: "
            + self.first_unusable,
        }
        notes = "; ".join(told[name] for name in told if c[name])
        return f"{c['problems']:,} problems of {c['rows']:,} rows" + (notes and f" ({notes})")


def rubrics(config: Config, chosen: Mapping[str, SourceConfig]) -> dict[str, Rubric]:
    """How the responses to the problems of each source are judged."""
    r = config.reward
    return {
        name: Rubric(parse_scorers(source.scorer or r.scorer), CORRECT, r.incorrect)
        for name, source in chosen.items()
    }


def load(
    config: Config,
    chosen: Mapping[str, SourceConfig],
    tokenizer: Any,
    *,
    field: str,
    say: Callable[[str], None],
    evaluated: bool = False,
) -> list[Problem]:
    """The problems of the sources, numbered from 0 across them.

    Args:
        chosen: `config.data.train`, `config.data.heldout` or others like them.
        field: where they stand, for messages: "config.data.train".
        say: told what became of the rows of each.
        evaluated: they are held out: a line says where launch/evaluate.py has others.

    Raises:
        UserError: a file or a field that cannot serve, or a source without problems.
    """
    if config.data.chat and not tokenizer.chat_template:
        say("the tokenizer has no chat template: problems without a prompt_template are put as in "
            "DAPO-Math-17k")  # fmt: skip
    problems: list[Problem] = []
    for name, source in chosen.items():
        place = f"{field}.{name}"
        prepared = prepare(config, name, source, tokenizer, place)
        say(f"{place.removeprefix('config.data.')}: {prepared.describe()}")
        counts = prepared.counts
        if evaluated and (changed := counts["overlong"] + counts["truncated"]):
            done = "cut" if counts["truncated"] else "left out"
            say(
                f"  warning: {changed} held-out problems of {name} are {done} in this run's "
                "evaluations, and whole in launch/evaluate.py, so that their accuracies differ: "
                f"config.data.max_prompt_tokens is {config.data.max_prompt_tokens}"
            )
        if not prepared.problems:
            raise UserError(
                f"{place}: no problem is left. {prepared.describe()}. Give more problems, or raise "
                f"config.data.max_prompt_tokens ({config.data.max_prompt_tokens})."
            )
        first = len(problems)
        problems += [problem._replace(id=first + problem.id) for problem in prepared.problems]
    return problems


def prepare(
    config: Config, name: str, source: SourceConfig, tokenizer: Any, field: str
) -> Prepared:
    """The problems of one source, numbered from 0 in the order of its rows; see `load`."""
    data = config.data
    prompts.check_template(data.prompt_template, "config.data.prompt_template")
    prompts.check_template(source.prompt_template, f"{field}.prompt_template")
    if source.path == "arithmetic":
        pairs = _generated(config, source, field)
        found = (Row(prompt, answer, {}) for prompt, answer in pairs)
        return _prepare(data, name, source, tokenizer, found, field)
    files = sources.find_files(source.path, source.split, field)
    try:
        fingerprint = _fingerprint(data, source, tokenizer, files)
    except OSError as error:
        raise UserError(f"{field}: a data file cannot be read: {error}.") from error
    cache = _cache_directory() / f"{fingerprint}.parquet"
    cached = _read_cache(cache, name)
    if cached is not None:
        return cached
    columns = _columns(source)
    found = itertools.chain.from_iterable(records.read_rows(f, columns, field) for f in files)
    prepared = _prepare(data, name, source, tokenizer, found, field)
    _write_cache(cache, prepared)
    return prepared


def _columns(source: SourceConfig) -> Columns:
    dataset = sources.DATASETS.get(source.path)
    if dataset is None:
        return Columns(source.prompt_key, source.answer_key, None)
    return Columns(
        source.prompt_key or dataset.prompt_key,
        source.answer_key or dataset.answer_key,
        # Where another column is asked for, what the data set says of its own does not hold.
        dataset.answer_in if source.answer_key is None else None,
    )


def _generated(config: Config, source: SourceConfig, field: str) -> list[tuple[str, str]]:
    assert source.num_problems is not None and source.num_terms is not None
    try:
        return arithmetic.generate_problems(
            source.num_problems,
            num_terms=source.num_terms,
            heldout=source.split == "heldout",
            seed=config.seed,
        )
    except ValueError as error:
        raise UserError(
            f"{field}.num_problems ({source.num_problems}) with num_terms {source.num_terms}: "
            f"{error}. Ask for fewer problems or more terms."
        ) from error


def _prepare(
    data: DataConfig,
    name: str,
    source: SourceConfig,
    tokenizer: Any,
    found: Iterator[Row | Unusable],
    field: str,
) -> Prepared:
    distinct, counts, first_unusable = _distinct(found, source.num_problems, field)
    template = source.prompt_template or data.prompt_template
    kept = [(entry.prompt, entry) for entry in distinct.values() if not entry.conflict]
    counts |= {"conflicting": len(distinct) - len(kept), "overlong": 0, "truncated": 0}
    problems: list[Problem] = []
    for start in range(0, len(kept), TOKENISED_TOGETHER):
        part = kept[start : start + TOKENISED_TOGETHER]
        texts = [
            prompts.render(
                tokenizer,
                prompt,
                template=template,
                chat=data.chat,
                system_prompt=data.system_prompt,
            )
            for prompt, _ in part
        ]
        encoded = prompts.encode(tokenizer, texts, chat=data.chat)
        for text, tokens, (_, entry) in zip(texts, encoded, part):
            if len(tokens) > data.max_prompt_tokens:
                if data.overlong_prompts == "error":
                    raise UserError(
                        f"config.data.max_prompt_tokens is {data.max_prompt_tokens}, but row "
                        f"{entry.row} of {field} ({text[:40]!r}...) has {len(tokens)} tokens. "
                        "Raise it, shorten the prompt, or set config.data.overlong_prompts to "
                        "'drop' or 'truncate'."
                    )
                if data.overlong_prompts == "drop":
                    counts["overlong"] += 1
                    continue
                counts["truncated"] += 1
                tokens = tokens[-data.max_prompt_tokens :]
            problems.append(
                Problem(
                    len(problems), text, tokens, entry.answer, name, metadata=entry.metadata or None
                )
            )
    counts["problems"] = len(problems)
    copies = {entry.rows for entry in distinct.values()}
    return Prepared(problems, counts, copies.pop() if len(copies) == 1 else 0, first_unusable)


@dataclasses.dataclass
class _Entry:
    """What is known of a prompt."""

    prompt: str | tuple[Message, ...]  # as its first row has it
    answer: str
    metadata: dict[str, Any]
    row: int  # the first that it stands in
    rows: int = 1  # that it stands in
    conflict: bool = False


def _distinct(
    found: Iterator[Row | Unusable], limit: int | None, field: str
) -> tuple[dict[str | tuple[Message, ...], _Entry], dict[str, int], str]:
    """(the distinct prompts in order, counts of the rows, what was wrong with the first bad one).

    Prompts that differ in white space only are one; the keys are without it.
    Memory grows with the prompts and not with the rows.
    """
    distinct: dict[str | tuple[Message, ...], _Entry] = {}
    counts = {"rows": 0, "unusable": 0, "repeated": 0}
    first_unusable = ""
    try:
        # What follows the last row that is wanted is not looked at, whatever it is.
        while limit is None or len(distinct) < limit:
            row = next(found, None)
            if row is None:
                break
            counts["rows"] += 1
            if isinstance(row, Unusable):
                counts["unusable"] += 1
                first_unusable = first_unusable or row.reason
                continue
            key = _without_spacing(row.prompt)
            entry = distinct.get(key)
            if entry is None:
                distinct[key] = _Entry(row.prompt, row.answer, row.metadata, counts["rows"])
            else:
                counts["repeated"] += 1
                entry.rows += 1
                entry.conflict |= entry.answer != row.answer
    except MemoryError:
        fewer = max(1, len(distinct) // 2)
        raise UserError(
            f"{field}: memory is full after row {counts['rows']:,} with {len(distinct):,} distinct "
            f"prompts. Read fewer: {field}.num_problems={fewer}, or a smaller file."
        ) from None
    return distinct, counts, first_unusable


def _without_spacing(prompt: str | tuple[Message, ...]) -> str | tuple[Message, ...]:
    """The prompt without its white space: `x+1` and `x + 1` are one problem."""
    if isinstance(prompt, str):
        return "".join(prompt.split())
    return tuple((role, "".join(content.split())) for role, content in prompt)


def _cache_directory() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "dapo_jax" / "problems"


def _fingerprint(data: DataConfig, source: SourceConfig, tokenizer: Any, files: list[Path]) -> str:
    """Hash of all that the problems of a source depend on: files, settings, tokenizer, code."""
    settings = dataclasses.asdict(source) | {"weight": None, "scorer": None, "path": None}
    settings |= {"columns": _columns(source), "template": data.prompt_template}
    settings |= {"chat": data.chat, "system": data.system_prompt}
    settings |= {"longest": data.max_prompt_tokens, "overlong": data.overlong_prompts}
    settings["tokenizer"] = prompts.fingerprint(tokenizer)
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    code = [Path(str(module.__file__)) for module in CODE]
    for file in [*files, *code, Path(__file__)]:
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()[:32]


def _write_cache(cache: Path, prepared: Prepared) -> None:
    """The whole file or none. A cache that cannot be written is none."""
    problems = prepared.problems
    text, tokens = pyarrow.string(), pyarrow.list_(pyarrow.int32())
    table = pyarrow.table(
        {
            "prompt": pyarrow.array([p.prompt for p in problems], text),
            "tokens": pyarrow.array([p.prompt_tokens for p in problems], tokens),
            "answer": pyarrow.array([p.answer for p in problems], text),
            "metadata": pyarrow.array([json.dumps(p.metadata) for p in problems], text),
        },
        metadata={"about": json.dumps(prepared[1:])},
    )
    temporary = cache.with_name(f".{cache.name}.{os.getpid()}.tmp")
    with contextlib.suppress(OSError):
        cache.parent.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(table, temporary)
        temporary.rename(cache)


def _read_cache(cache: Path, name: str) -> Prepared | None:
    """What `_write_cache` wrote; None if there is nothing usable."""
    try:
        table = pyarrow.parquet.read_table(cache)
        about = json.loads(table.schema.metadata[b"about"])
        columns = [table[column].to_pylist() for column in table.column_names]
        problems = [
            Problem(i, prompt, tuple(tokens), answer, name, metadata=json.loads(metadata))
            for i, (prompt, tokens, answer, metadata) in enumerate(zip(*columns))
        ]
        return Prepared(problems, *about)
    except (OSError, pyarrow.ArrowException, LookupError, ValueError, TypeError):
        return None
