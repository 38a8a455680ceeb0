"""Problems that were prepared before: which of them, and what becomes of a faulty cache."""

import pyarrow
import pyarrow.parquet
import pytest

from dapo_jax.data import dataset
from tests.support.problems import CHAT_TEMPLATE, character_tokenizer, prepare_rows, row


@pytest.fixture
def reads(monkeypatch):
    """The files that were read, in order."""
    found, read_records = [], dataset.records.read_records

    def count(file, columns, field):
        found.append(file.name)
        return read_records(file, columns, field)

    monkeypatch.setattr(dataset.records, "read_records", count)
    return found


ROWS = [row(f"p{i} ü"[: 4 + i], str(i), level=[i, None]) for i in range(3)]
MESSY = [*ROWS, row(""), row("p0 ü", "0"), row("clash", "1"), row("clash", "2"), row("x" * 30)]


def test_what_was_prepared_is_not_made_again(tmp_path, monkeypatch):
    first = prepare_rows(tmp_path, MESSY, max_prompt_tokens=20)
    counts = dict(records=8, unusable=1, repeated=2, conflicting=1, overlong=1, truncated=0)
    assert first.counts == counts | {"problems": 3} and first.first_unusable

    def fail(*_):
        raise AssertionError("read again")

    monkeypatch.setattr(dataset.records, "read_records", fail)
    assert prepare_rows(tmp_path, MESSY, max_prompt_tokens=20) == first
    # What the problems do not depend on: how often and how they are scored, where the file is.
    source = {"weight": 3.0, "scorer": "boxed"}
    again = prepare_rows(
        tmp_path, MESSY, max_prompt_tokens=20, file="elsewhere.jsonl", source=source
    )
    assert again == first
    with pytest.raises(AssertionError, match="read again"):
        prepare_rows(tmp_path, MESSY, max_prompt_tokens=21)


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": [*ROWS[:2], row("p2 ü", "2", level=[2, None], more=1)]},
        {"rows": ROWS[::-1]},
        {"prompt_template": "{prompt}!"},
        {"source": {"prompt_template": "{prompt}!"}},
        {"source": {"prompt_key": "prompt"}},
        {"source": {"answer_key": "answer"}},
        {"source": {"num_problems": 2}},
        {"max_prompt_tokens": 100},
        {"overlong_prompts": "error"},
        {"chat": True},
        {"chat": True, "system_prompt": "Think."},
        {"tokenizer": character_tokenizer()},
        {"tokenizer": character_tokenizer(CHAT_TEMPLATE + " ")},
        {"tokenizer": character_tokenizer(CHAT_TEMPLATE, eos="!", pad="~")},
    ],
)
def test_what_the_problems_depend_on_makes_them_again(tmp_path, reads, changes):
    tokenizer = character_tokenizer(CHAT_TEMPLATE)
    settings = {"rows": ROWS, "tokenizer": tokenizer, "overlong_prompts": "drop"}
    if "system_prompt" in changes:
        settings["chat"] = True
    first = prepare_rows(tmp_path, **settings)
    second = prepare_rows(tmp_path, **settings | changes)
    assert len(reads) == 2
    assert (
        prepare_rows(tmp_path, **settings) == first
        and prepare_rows(tmp_path, **settings | changes) == second
    )
    assert len(reads) == 2, "each has its own"


def test_changed_code_makes_problems_again(tmp_path, reads, monkeypatch):
    prepare_rows(tmp_path, ROWS)
    (tmp_path / "code.py").write_text("")
    module = type(dataset)("other")
    module.__file__ = str(tmp_path / "code.py")
    monkeypatch.setattr(dataset, "CODE", (*dataset.CODE, module))
    prepare_rows(tmp_path, ROWS)
    (tmp_path / "code.py").write_text("changed")
    prepare_rows(tmp_path, ROWS)
    assert len(reads) == 3


def cache_file(cache_home):
    (file,) = (cache_home / "dapo_jax/problems").iterdir()
    return file


@pytest.mark.parametrize("damage", ["empty", "cut", "text", "other", "untold", "directory"])
def test_a_damaged_cache_is_made_again(tmp_path, cache_home, reads, damage):
    first = prepare_rows(tmp_path, ROWS)
    file = cache_file(cache_home)
    content = file.read_bytes()
    if damage in ("other", "untold"):
        metadata = {"about": "[]"} if damage == "other" else None
        pyarrow.parquet.write_table(pyarrow.table({"prompt": []}, metadata=metadata), file)
    elif damage == "directory":
        file.unlink()
        file.mkdir()
    else:
        file.write_bytes({"empty": b"", "cut": content[:-9], "text": b"text"}[damage])
    assert prepare_rows(tmp_path, ROWS) == first
    assert len(reads) == 2
    if damage != "directory":
        assert cache_file(cache_home).read_bytes() == content, "whole, and no other file"


def test_a_cache_that_cannot_be_written_is_none(tmp_path, reads, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "below"))
    for _ in range(2):
        assert len(prepare_rows(tmp_path, ROWS).problems) == 3
    assert len(reads) == 2 and sorted(p.name for p in tmp_path.iterdir()) == [
        "file",
        "problems.jsonl",
    ]


def test_the_cache_is_the_users(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    prepare_rows(tmp_path, ROWS)
    assert len(list((tmp_path / "xdg/dapo_jax/problems").glob("*.parquet"))) == 1
    monkeypatch.delenv("XDG_CACHE_HOME")
    prepare_rows(tmp_path, ROWS)
    assert len(list((tmp_path / "home/.cache/dapo_jax/problems").glob("*.parquet"))) == 1
