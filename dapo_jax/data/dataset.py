"""The problems of a run: read from its sources or generated, cleaned, tokenised, cached.

The published DAPO-Math-17k file repeats its 17k prompts about a hundred times, some with other
white space or a second answer. Unlike verl, this repairs and counts both.
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import pyarrow.parquet

from dapo_jax.config import Config, DataConfig, SourceConfig
from dapo_jax.data import arithmetic, prompts, records, sources, word_problems
from dapo_jax.data.records import Prompt, Record, Unusable
from dapo_jax.rewards import scorers
from dapo_jax.rewards.types import CORRECT_REWARD, Rubric, parse_scorers
from dapo_jax.types import Problem, UserError
from dapo_jax.utils import user_cache

TOKENISE_BATCH = 1000
_BETWEEN_DIGITS = re.compile(r" (?=\d)(?<=\d )")  # begins with its space: fast to search
# By `path` of a source.
GENERATORS = {
    "arithmetic": arithmetic.generate_problems,
    "word_problems": word_problems.generate_problems,
}
# The modules that a cached file depends on, besides this one.
CODE = (prompts, records, scorers, sources)


class Prepared(NamedTuple):
    """The problems of one source, and counts of its records."""

    problems: list[Problem]
    # records = unusable + repeated + conflicting + overlong + problems, each record counted once.
    # repeated: beyond the first with the same prompt; conflicting: prompts with several answers;
    # overlong: left out. Of the problems, truncated: their beginning was cut off.
    counts: dict[str, int]
    copies: int  # records of each distinct prompt where all have the same number; else 0
    first_unusable: str  # reason of the first unusable record, "" if there is none

    def describe(self) -> str:
        """Returns the summary that is printed."""
        c, limit = self.counts, "longer than config.data.max_prompt_tokens"
        distinct = c["records"] - c["unusable"] - c["repeated"]
        repeated = f"{c['repeated']:,} records repeat a prompt: {distinct:,} are distinct"
        if self.copies:
            repeated = f"{distinct:,} distinct prompts, {self.copies} records of each"
        notes = {
            "repeated": repeated,
            "conflicting": f"{c['conflicting']:,} prompts with conflicting answers left out",
            "overlong": f"{c['overlong']:,} {limit} left out",
            "truncated": f"{c['truncated']:,} {limit} cut on the left",
            "unusable": f"{c['unusable']:,} unusable left out, the first: {self.first_unusable}",
        }
        text = "; ".join(notes[name] for name in notes if c[name])
        return f"{c['problems']:,} problems of {c['records']:,} records" + (text and f" ({text})")


def rubrics(config: Config, chosen: Mapping[str, SourceConfig]) -> dict[str, Rubric]:
    """Returns the rubric of each source."""
    r = config.reward
    return {
        name: Rubric(parse_scorers(source.scorer or r.scorer), CORRECT_REWARD, r.incorrect)
        for name, source in chosen.items()
    }


def check_scorers(config: Config) -> None:
    """Raises UserError for a scorer of the run's sources that cannot be loaded, by its field."""
    for kind, chosen in (("train", config.data.train), ("heldout", config.data.heldout)):
        for name, source in chosen.items():
            own = f"config.data.{kind}.{name}.scorer"
            field = "config.reward.scorer" if source.scorer is None else own
            for scorer, _ in parse_scorers(source.scorer or config.reward.scorer):
                scorers.load_scorer(scorer, field)


def load(
    config: Config,
    chosen: Mapping[str, SourceConfig],
    tokenizer: Any,
    *,
    field: str,
    say: Callable[[str], None],
    warns_of_changed: bool = False,
    training: Sequence[Problem] = (),
) -> list[Problem]:
    """Returns the problems of the sources, numbered from 0 across them.

    Args:
        chosen: `config.data.train`, `config.data.heldout` or other sources.
        field: where they are, for messages: "config.data.train".
        say: prints a summary of each source.
        warns_of_changed: say how many prompts were changed, which launch/evaluate.py would keep.
        training: problems of training; say how many of these are among them.

    Raises:
        UserError: a file or a field is wrong, or a source has no problems.
    """
    if config.data.chat and not tokenizer.chat_template:
        say(
            "the tokenizer has no chat template: problems without a prompt_template have "
            "DAPO-Math-17k's"
        )
    problems: list[Problem] = []
    trained = {_without_spacing(problem.prompt) for problem in training}
    for name, source in chosen.items():
        place = f"{field}.{name}"
        prepared = prepare(config, name, source, tokenizer, place)
        say(f"{place.removeprefix('config.data.')}: {prepared.describe()}")
        counts = prepared.counts
        if warns_of_changed and (changed := counts["overlong"] + counts["truncated"]):
            done = "cut" if counts["truncated"] else "left out"
            say(
                f"  warning: {changed} held-out problems of {name} are {done} in this run's "
                "evaluations, and whole in launch/evaluate.py: config.data.max_prompt_tokens is "
                f"{config.data.max_prompt_tokens}"
            )
        if not prepared.problems:
            more = "Give more problems, each with one answer"
            if counts["overlong"]:
                most = config.data.max_prompt_tokens
                more += f", or raise config.data.max_prompt_tokens ({most})"
            raise UserError(f"{place}: no problem is left. {prepared.describe()}. {more}.")
        shared = sum(_without_spacing(problem.prompt) in trained for problem in prepared.problems)
        if shared:
            say(
                f"  warning: {shared:,} of {counts['problems']:,} held-out problems of {name} are "
                "training problems, too"
            )
        first = len(problems)
        problems += [problem._replace(id=first + problem.id) for problem in prepared.problems]
    return problems


def prepare(
    config: Config, name: str, source: SourceConfig, tokenizer: Any, field: str
) -> Prepared:
    """Returns the problems of one source, numbered from 0 in the order of its records."""
    data = config.data
    if source.path in GENERATORS:
        pairs = _generated(config, source, field)
        found = (Record(prompt, answer, {}) for prompt, answer in pairs)
        return _prepare(data, name, source, tokenizer, found, field)
    files = sources.find_files(source.path, source.split, field)
    try:
        fingerprint = _fingerprint(data, source, tokenizer, files)
    except OSError as error:
        raise UserError(f"{field}: a data file cannot be read: {error}.") from error
    cache = user_cache.directory("problems") / f"{fingerprint}.parquet"
    cached = _read_cache(cache, name)
    if cached is not None:
        return cached
    columns = sources.columns(source.path, source.prompt_key, source.answer_key)
    found = itertools.chain.from_iterable(records.read_records(f, columns, field) for f in files)
    prepared = _prepare(data, name, source, tokenizer, found, field)
    _write_cache(cache, prepared)
    return prepared


def _generated(config: Config, source: SourceConfig, field: str) -> list[tuple[str, str]]:
    assert source.num_problems is not None and source.levels is not None
    try:
        return GENERATORS[source.path](
            source.num_problems,
            levels=source.levels,
            heldout=source.split == "heldout",
            seed=config.seed,
        )
    except ValueError as error:
        raise UserError(
            f"{field}.num_problems ({source.num_problems}) with levels {source.levels}: "
            f"{error}. Ask for fewer problems or other levels."
        ) from error


def _prepare(
    data: DataConfig,
    name: str,
    source: SourceConfig,
    tokenizer: Any,
    found: Iterator[Record | Unusable],
    field: str,
) -> Prepared:
    distinct, counts, first_unusable = _distinct(found, source.num_problems)
    # Without the field: another source with the same file may read it from the cache.
    first_unusable = first_unusable.removeprefix(f"{field}: ")
    template = source.prompt_template or data.prompt_template
    kept = [entry for entry in distinct if not entry.conflict]
    counts |= {"conflicting": len(distinct) - len(kept), "overlong": 0, "truncated": 0}
    problems: list[Problem] = []
    for start in range(0, len(kept), TOKENISE_BATCH):
        batch = kept[start : start + TOKENISE_BATCH]
        render = functools.partial(
            prompts.render, template=template, chat=data.chat, system_prompt=data.system_prompt
        )
        texts = [render(tokenizer, entry.record.prompt) for entry in batch]
        encoded = prompts.encode(tokenizer, texts, chat=data.chat)
        for text, tokens, entry in zip(texts, encoded, batch):
            if len(tokens) > data.max_prompt_tokens:
                if data.overlong_prompts == "error":
                    raise UserError(
                        f"config.data.max_prompt_tokens is {data.max_prompt_tokens}, but record "
                        f"{entry.number} of {field} ({text[:40]!r}...) has {len(tokens)} tokens. "
                        "Raise it, shorten the prompt, or set config.data.overlong_prompts to "
                        "'drop' or 'truncate'."
                    )
                if data.overlong_prompts == "drop":
                    counts["overlong"] += 1
                    continue
                counts["truncated"] += 1
                tokens = tokens[-data.max_prompt_tokens :]
            answer, metadata = entry.record.answer, entry.record.metadata or None
            problems.append(Problem(len(problems), text, tokens, answer, name, metadata=metadata))
    counts["problems"] = len(problems)
    copies = {entry.copies for entry in distinct}
    return Prepared(problems, counts, copies.pop() if len(copies) == 1 else 0, first_unusable)


@dataclasses.dataclass
class _Entry:
    """A distinct prompt."""

    record: Record  # the first that has it
    number: int  # of that record, from 1
    copies: int = 1  # records that have it
    conflict: bool = False  # some of them have another answer


def _distinct(
    found: Iterator[Record | Unusable], limit: int | None
) -> tuple[list[_Entry], dict[str, int], str]:
    """Returns the distinct prompts in order, counts of the records, and the first reason of an
    unusable record. Prompts that differ in white space only are one, `x+1` and `x + 1`, unless it
    separates numbers: `1 23` and `12 3`.

    Memory grows with the prompts and not with the records.
    """
    distinct: dict[Prompt, _Entry] = {}
    counts = {"records": 0, "unusable": 0, "repeated": 0}
    first_unusable = ""
    # Records beyond the last one wanted are not read, and may be faulty.
    while limit is None or len(distinct) < limit:
        record = next(found, None)
        if record is None:
            break
        counts["records"] += 1
        if isinstance(record, Unusable):
            counts["unusable"] += 1
            first_unusable = first_unusable or record.reason
            continue
        entry = _Entry(record, counts["records"], 0)
        entry = distinct.setdefault(_without_spacing(record.prompt), entry)
        entry.copies += 1
        entry.conflict |= entry.record.answer != record.answer
        counts["repeated"] += entry.copies > 1
    return list(distinct.values()), counts, first_unusable


def _without_spacing(prompt: Prompt) -> Prompt:
    if isinstance(prompt, str):
        # Spaces between digits stay, as zero bytes.
        return _BETWEEN_DIGITS.sub("\0", " ".join(prompt.split())).replace(" ", "")
    return tuple((role, str(_without_spacing(content))) for role, content in prompt)


def _fingerprint(data: DataConfig, source: SourceConfig, tokenizer: Any, files: list[Path]) -> str:
    """Returns a hash of everything that problems depend on: files, settings, tokenizer, code."""
    settings = dataclasses.asdict(source) | {"weight": None, "scorer": None, "path": None}
    columns = sources.columns(source.path, source.prompt_key, source.answer_key)
    settings |= {"columns": columns, "template": data.prompt_template}
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
    """Writes the whole file or none; a failure is no error."""
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
    """Reads the file of `_write_cache`; None if there is none, or it is damaged."""
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
