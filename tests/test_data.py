"""Problems: what a faulty file is told, what is left out, and the order of the stream."""

import json
import multiprocessing
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Literal

import pytest

from dapo_jax.data import ProblemStream, prepare, read_jsonl
from dapo_jax.types import Problem, UserError

FIELD = "config.data.train_path"
ROOT = Path(__file__).parents[1]


def write(tmp_path, content):
    path = tmp_path / "problems.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def read(path):
    return read_jsonl(path, prompt_key="question", answer_key="answer", field=FIELD)


def row(question: object = "1+1?", answer: object = "2"):
    return json.dumps({"question": question, "answer": answer}, ensure_ascii=False)


def test_reads_rows_in_order_and_skips_blank_lines(tmp_path):
    path = write(tmp_path, f"\n{row('a ü', 'x')}\n  \n{row('b', -7)}\r\n{row('a ü', ' 0 ')}")
    assert read(path) == [("a ü", "x"), ("b", "-7"), ("a ü", " 0 ")]


@pytest.mark.parametrize(
    "line, wanted",
    [
        (b"\xff\xfe{}", "not UTF-8: byte 0xff at byte 1"),
        ('{"question": "a", "answer": }', "not JSON: Expecting value, column 29"),
        (row()[:-1], "not JSON"),
        ("[" + row() + "]", "a JSON object, not a list"),
        ("3", "a JSON object, not a number (3)"),
        ('{"prompt": "a", "answer": "b"}', "no 'question'; it has 'prompt', 'answer'"),
        ('{"question": "a"}', "no 'answer'; it has 'question'"),
        ("{}", "it has nothing"),
        (row([{"role": "user"}]), "'question' must be text, not a list"),
        (row(3), "'question' must be text, not a number"),
        (row("a", True), "'answer' must be text, not a boolean (true)"),
        (row("a", 0.5), "'answer' must be text, not a number (0.5)"),
        (row("a", None), "'answer' must be text, not null"),
        (row("a", {"b": 1}), "'answer' must be text, not an object"),
        (row(" \t"), "'question' is empty"),
        (row("a", ""), "'answer' is empty"),
        (r'{"question": "a\ud800", "answer": "b"}', "half of a surrogate pair"),
        ('{"question": "a", "answer": ' + "9" * 5000 + "}", "cannot be read as JSON"),
        ("[" * 200_000, "cannot be read as JSON"),
    ],
)
def test_a_faulty_line_is_named(tmp_path, line, wanted):
    line = line if isinstance(line, bytes) else line.encode()
    path = write(tmp_path, b"\n" + row().encode() + b"\n" + line + b"\n" + row().encode())
    with pytest.raises(UserError) as error:
        read(path)
    message = str(error.value)
    assert message.startswith(f"{FIELD}: {path}, line 3") and wanted in message
    assert len(message) < len(path) + 300


@pytest.mark.parametrize(
    "name, wanted",
    [("absent", "No such file"), ("", "Is a directory"), ("problems.jsonl/x", "Not a directory")],
)
def test_an_unreadable_file_is_named(tmp_path, name, wanted):
    write(tmp_path, row())
    path = str(tmp_path / name)
    with pytest.raises(UserError) as error:
        read(path)
    assert all(part in str(error.value) for part in (FIELD, path.rstrip("/"), wanted))


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_file_is_named(tmp_path, content):
    path = write(tmp_path, content)
    with pytest.raises(UserError, match=f"{FIELD}: {path} is empty"):
        read(path)


def encode(text):
    return list(text.encode())


def prepare_short(pairs, overlong: Literal["drop", "error"] = "drop", **options):
    return prepare(pairs, encode, source="test", max_prompt_tokens=5, overlong=overlong, **options)


def test_prepare_counts_every_row_once():
    pairs = [("a", "1"), ("clash", "1"), ("a", "1"), ("clash", "2"), ("clash", "1"),
             ("toolong", "1"), ("toolong", "1"), ("five!", "3"), ("c", "1")]  # fmt: skip
    problems, counts = prepare_short(pairs)
    assert problems == [
        Problem(0, "a", (97,), "1", "test"),
        Problem(1, "five!", tuple(b"five!"), "3", "test"),
        Problem(2, "c", (99,), "1", "test"),
    ]
    assert counts == {"rows": 9, "duplicates": 3, "conflicting": 2, "overlong": 1, "problems": 3}


def test_prepare_encodes_the_filled_template():
    problems, counts = prepare_short([("{x}", "1"), ("{xy}", "2")], prompt_template="{prompt}{{}}")
    assert problems == [Problem(0, "{x}{}", tuple(b"{x}{}"), "1", "test")]
    assert counts["overlong"] == 1


@pytest.mark.parametrize("template", ["{prompt} \\boxed{}", "{prompt}{", "{{prompt}}", "{prompt.a}",
                                      "{prompt[0]}", "{other}", "none"])  # fmt: skip
def test_prepare_refuses_a_faulty_template(template):
    with pytest.raises(UserError, match="config.data.prompt_template") as error:
        prepare_short([("a", "1")], prompt_template=template)
    assert repr(template) in str(error.value)


def test_prepare_names_an_overlong_row():
    with pytest.raises(UserError, match="max_prompt_tokens is 5.*row 3 .*6 tokens"):
        prepare_short([("a", "1"), ("a", "1"), ("sixsix", "1")], overlong="error")


def test_prepare_refuses_to_leave_nothing():
    with pytest.raises(
        UserError, match="of 4 rows: 1 duplicates, 2 with conflicting answers, 1 lon"
    ):
        prepare_short([("a", "1"), ("a", "2"), ("toolong", "1"), ("toolong", "1")])
    with pytest.raises(UserError, match="of 0 rows"):
        prepare_short([])


def make_problems(num):
    return [Problem(i, f"p{i}", (i, i + 1), str(i), "test") for i in range(num)]


def take_ids(stream, n):
    return [problem.id for problem in stream.take(n)]


def test_epochs_are_different_permutations():
    stream = ProblemStream(make_problems(20), 3)
    epochs = [take_ids(stream, 20) for _ in range(5)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert len(set(map(tuple, [*epochs, range(20)]))) == 6


def test_take_continues_whatever_the_portions():
    problems = make_problems(7)
    whole, parts = ProblemStream(problems, 0), ProblemStream(problems, 0)
    assert whole.take(20) == [p for n in (3, 0, 9, 1, 7) for p in parts.take(n)]
    (only,) = make_problems(1)
    visits = [only._replace(epoch=epoch) for epoch in range(3)]
    assert ProblemStream([only], 0).take(3) == visits


def test_order_depends_on_the_seed():
    orders = [take_ids(ProblemStream(make_problems(20), seed), 60) for seed in (0, 1, 2, 2**40)]
    assert take_ids(ProblemStream(make_problems(20), 1), 60) == orders[1]
    # No epoch of one seed is an epoch of another either.
    epochs = [tuple(order[i : i + 20]) for order in orders for i in (0, 20, 40)]
    assert len(set(epochs)) == 12


@pytest.mark.parametrize("taken", [0, 3, 7, 10, 14, 100])
def test_state_continues_exactly(taken):
    problems = make_problems(7)
    stream = ProblemStream(problems, 5)
    stream.take(taken)
    state = json.loads(json.dumps(stream.get_state()))
    expected = stream.take(16)
    stream.set_state(state)
    assert stream.take(16) == expected
    resumed = ProblemStream(problems, 5)
    resumed.take(2)
    resumed.set_state(state)
    assert resumed.get_state() == state
    assert resumed.take(16) == expected


@pytest.mark.parametrize(
    "problems, seed, field",
    [
        (make_problems(7), 6, "config.seed"),
        (make_problems(8), 5, "config.data"),
        ([*make_problems(6), Problem(6, "p6", (6, 7), "other", "test")], 5, "config.data"),
    ],
)
def test_state_of_other_data_is_refused(problems, seed, field):
    state = ProblemStream(make_problems(7), 5).get_state()
    stream = ProblemStream(problems, seed)
    with pytest.raises(UserError, match=f"{field}: "):
        stream.set_state(state)


def test_another_process_sees_the_same_order_and_no_noise():
    code = (
        "from dapo_jax.data import ProblemStream\n"
        "from dapo_jax.types import Problem\n"
        "problems = [Problem(i, f'p{i}', (i, i + 1), str(i), 'test') for i in range(10)]\n"
        "print([problem.id for problem in ProblemStream(problems, 11).take(25)])\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", code],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONHASHSEED": "77", "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    before = threading.active_count()
    expected = take_ids(ProblemStream(make_problems(10), 11), 25)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{expected}\n", "")
    assert threading.active_count() == before and not multiprocessing.active_children()
