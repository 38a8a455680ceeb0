"""Records of data files: both schemas, the place of the answer, errors of faulty files."""

import datetime
import json
import re

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from dapo_jax.data.records import BATCH_RECORDS, Columns, Record, Unusable, read_records
from dapo_jax.types import UserError

FIELD = "config.data.train.sums"
AS_THEY_SHOW = Columns(None, None, None)
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]


def write_jsonl(tmp_path, content):
    file = tmp_path / "problems.jsonl"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


def write_parquet(tmp_path, rows, schema=None):
    file = tmp_path / "problems.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema=schema), file)
    return file


def read(file, prompt_key=None, answer_key=None, answer_in=None):
    return list(read_records(file, Columns(prompt_key, answer_key, answer_in), FIELD))


def line(question: object = "1+1?", answer: object = "2", **more: object):
    return json.dumps({"question": question, "answer": answer, **more}, ensure_ascii=False)


def row_of(tmp_path, columns, **keys):
    """The only row of a file with these columns."""
    (row,) = read(write_jsonl(tmp_path, json.dumps(columns)), **keys)
    return row


def test_rows_in_order_without_blank_lines(tmp_path):
    content = "\n".join(["", line("a ü", "x"), "  ", line(" b\n", -7) + "\r", line("a ü", " 0 ")])
    assert read(write_jsonl(tmp_path, content)) == [
        Record("a ü", "x", {}),
        Record(" b\n", "-7", {}),  # the prompt as it is, the answer without the space around it
        Record("a ü", "0", {}),
    ]


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_both_kinds_of_file_hold_the_same_rows(tmp_path, write):
    rows = [
        {"prompt": CHAT, "reward_model": {"ground_truth": "2", "style": "rule"}, "level": 3},
        {"prompt": CHAT[1:], "reward_model": {"ground_truth": "3", "style": "rule"}, "level": 4},
    ]
    written = rows if write is write_parquet else "\n".join(map(json.dumps, rows))
    one, two = read(write(tmp_path, written))
    assert one.prompt == (("system", "Be brief."), ("user", "1+1?"))
    assert two.prompt == (("user", "1+1?"),)
    assert [row.answer for row in (one, two)] == ["2", "3"]
    assert one.metadata == {"reward_model": rows[0]["reward_model"], "level": 3}


def test_more_rows_than_are_read_at_once(tmp_path):
    num = 2 * BATCH_RECORDS + 1
    file = write_parquet(tmp_path, [{"prompt": f"p{i}", "answer": i} for i in range(num)])
    assert [row.prompt for row in read(file)] == [f"p{i}" for i in range(num)]
    rows = [{"prompt": f"p{i}", "answer": "1" if i != num - 2 else " "} for i in range(num)]
    found = read(write_parquet(tmp_path, rows))[num - 2]
    assert found == Unusable(f"{FIELD}: {file}, row {num - 1}: 'answer' is empty")


ALL_ANSWERS = {"prompt": "t", "solution": "\\boxed{s}", "ground_truth": "g"}


@pytest.mark.parametrize(
    "columns, prompt, answer",
    [
        ({"problem": "p", "answer": "a"}, "p", "a"),
        ({"question": "q", "ground_truth": "g"}, "q", "g"),
        ({"solution": "\\boxed{s}", "question": "q"}, "q", "s"),
        # The first of the names that are tried, wherever it stands in the row.
        ({"question": "q", "problem": "p", "prompt": "t", "answer": "a"}, "t", "a"),
        ({"question": "q", "problem": "p", "answer": "a"}, "p", "a"),
        (ALL_ANSWERS | {"answer": "a"}, "t", "a"),
        (ALL_ANSWERS, "t", "g"),
        ({"prompt": "t", "answer": "a", "reward_model": {"ground_truth": "r"}}, "t", "r"),
        ({"prompt": "t", "answer": "a", "reward_model": {"style": "r"}}, "t", "a"),
        ({"prompt": "t", "answer": "a", "reward_model": "ground_truth"}, "t", "a"),
        ({"prompt": "t", "answer": "a", "reward_model": ["ground_truth"]}, "t", "a"),
        ({"prompt": "t", "answer": "a", "reward_model": None}, "t", "a"),
    ],
)
def test_columns_are_found_by_their_names(tmp_path, columns, prompt, answer):
    row = row_of(tmp_path, columns)
    assert (row.prompt, row.answer) == (prompt, answer)


NESTED = {"x": {"y": {"z": "1"}, "w": 0}}


@pytest.mark.parametrize(
    "columns, keys, prompt, answer, metadata",
    [
        ({"q": "1", "a": "2", "prompt": "3"}, ("q", "a"), "1", "2", {"prompt": "3"}),
        (NESTED | {"a": "2"}, ("x.y.z", "a"), "1", "2", NESTED),  # the whole column
        # A column whose own name has a point in it comes first, and is left out of the metadata.
        ({"x.y": "1", "x": {"y": "2"}, "a": "3"}, ("x.y", "a"), "1", "3", {"x": {"y": "2"}}),
        ({"x": {"y.z": "1"}, "a": "3"}, ("x.y.z", "a"), "1", "3", {"x": {"y.z": "1"}}),
    ],
)
def test_columns_by_key(tmp_path, columns, keys, prompt, answer, metadata):
    row = row_of(tmp_path, columns, prompt_key=keys[0], answer_key=keys[1])
    assert row == Record(prompt, answer, metadata)


@pytest.mark.parametrize(
    "text, answer_in, answer",
    [
        ("so \\boxed{1}", "text", "so \\boxed{1}"),
        ("\\boxed{1} or \\boxed{\\frac{1}{2}}.", "boxed", "\\frac{1}{2}"),
        ("5 + 5\n#### 1,0\n#### 1,010 ", "####", "1010"),
        ("6 ####7", "####", "7"),
        ("#### -$1,234,567.5 dollars", "####", "-$1234567.5 dollars"),
        ("#### (-1,3)", "####", "(-1,3)"),
        ("#### 1,5", "####", "1,5"),
        # None: as it shows.
        ("5 + 5\n#### 1,010", None, "1010"),
        ("#### 3", None, "3"),
        ("####3", None, "####3"),
        ("a #### b", None, "a #### b"),
        ("1,010", None, "1,010"),
        ("\\boxed{1}", None, "\\boxed{1}"),
    ],
)
def test_where_the_answer_stands(tmp_path, text, answer_in, answer):
    row = row_of(tmp_path, {"question": "q", "answer": text}, answer_in=answer_in)
    assert isinstance(row, Record) and row.answer == answer


def test_the_answer_of_a_solution_is_in_its_box(tmp_path):
    columns = {"question": "q", "solution": "so \\boxed{7}.\n#### 8", "it": {"solution": "9"}}
    assert row_of(tmp_path, columns).answer == "7"
    assert row_of(tmp_path, columns, answer_in="####").answer == "8"
    assert row_of(tmp_path, columns, answer_in="text").answer == columns["solution"]
    assert row_of(tmp_path, columns, answer_key="it.solution").answer == "9"


@pytest.mark.parametrize(
    "solution, answer",
    [
        ("$\\frac{1}{2}$", "\\frac{1}{2}"),
        (" 7\n", "7"),
        ("Yes", "Yes"),
        ("$\\boxed{7}$", "7"),
        ("$1$ or $2$", None),
        ("it is $7$", None),
        ("\u89e3\uff1a\u6240\u4ee5\u7b54\u6848\u662f7\u3002", None),  # Chinese: so the answer is 7
    ],
)
def test_a_solution_may_be_the_bare_answer(tmp_path, solution, answer):
    """As in TRL's data sets."""
    row = row_of(tmp_path, {"question": "q", "solution": solution})
    assert (row.answer if isinstance(row, Record) else None) == answer


NUMBERS = [(27.0, "27"), (27, "27"), (-0.5, "-0.5"), (-3.0, "-3"), (0, "0"), (1e16, "1" + 16 * "0")]
NUMBERS += [(5e-5, "0.00005"), (float(np.float32(0.1)), "0.1"), (0.1, "0.1"), (1 / 3, f"{1 / 3}")]


@pytest.mark.parametrize("number, answer", [*NUMBERS, (10**400, "1" + 400 * "0")])
def test_numbers_as_answers(tmp_path, number, answer):
    assert row_of(tmp_path, {"question": "q", "answer": number}).answer == answer
    if number < 2**63:
        (row,) = read(write_parquet(tmp_path, [{"question": "q", "answer": number}]))
        assert isinstance(row, Record) and row.answer == answer


def test_metadata_are_the_other_columns_as_json_can_hold_them(tmp_path):
    when = datetime.datetime(2024, 2, 3)
    rows = [{"question": "q", "answer": "a", "when": when, "raw": b"x", "list": [1, 2], "no": None}]
    (row,) = read(write_parquet(tmp_path, rows))
    assert isinstance(row, Record)
    assert row.metadata == {"when": str(when), "raw": "b'x'", "list": [1, 2], "no": None}
    assert json.loads(json.dumps(row.metadata)) == row.metadata


@pytest.mark.parametrize(
    "columns, reason",
    [
        ({"question": " \t", "answer": "2"}, "'question' is empty"),
        ({"question": [], "answer": "2"}, "'question' is empty"),
        ({"question": [{"role": "user", "content": " "}], "answer": "2"}, "'question' is empty"),
        ({"question": "q", "answer": ""}, "'answer' is empty"),
        ({"question": "q", "answer": "so\n#### "}, "'answer' is empty"),
        ({"question": "q", "solution": "\\boxed{ }"}, "'solution' is empty"),
        ({"question": "q", "solution": "it is 7"}, "'solution' holds no answer ('it is 7')"),
        ({"question": "q", "solution": "\\boxed{7"}, "'solution' holds no answer"),
        ({"question": "a\ud800", "answer": "b"}, "'question' holds half of a"),
        ({"question": "a", "answer": "\udfff"}, "'answer' holds half of a"),
        (
            {"question": [{"role": "u", "content": "\ud800"}], "answer": "b"},
            "'question' holds half",
        ),
        (
            {"question": [{"role": "\ud800", "content": "a"}], "answer": "b"},
            "'question' holds half",
        ),
    ],
)
def test_a_row_without_a_problem_is_passed_over(tmp_path, columns, reason):
    file = write_jsonl(tmp_path, f"{line()}\n\n{json.dumps(columns)}\n{line()}")
    first, row, last = read(file)
    assert isinstance(row, Unusable)
    assert row.reason.startswith(f"{FIELD}: {file}, line 3: {reason}")
    row.reason.encode()  # no half pair itself
    assert first == last == Record("1+1?", "2", {})


def test_a_box_that_is_asked_for_must_be_there(tmp_path):
    (row,) = read(write_jsonl(tmp_path, line("q", 60 * "x" + "7")), answer_in="boxed")
    assert isinstance(row, Unusable)
    assert row.reason.endswith(f"'answer' holds no answer ('{39 * 'x'}7')"), "its end, not all"
    (row,) = read(write_jsonl(tmp_path, line("q", "7")), answer_in="####")
    assert isinstance(row, Unusable)


@pytest.mark.parametrize(
    "faulty, wanted",
    [
        (b"\xff\xfe{}", "not UTF-8: byte 0xff at byte 1"),
        (b'{"question": "\xc3\x28"}', "not UTF-8: byte 0xc3 at byte 15"),
        ('{"question": "a", "answer": }', "not JSON: Expecting value, column 29"),
        (line()[:-1], "not JSON"),
        ("[" + line() + "]", "a JSON object, not a list"),
        ("3", "a JSON object, not a number (3)"),
        ('"a"', 'a JSON object, not a text ("a")'),
        ('{"input": "a", "answer": "b"}', "has none of 'prompt', 'problem', 'question'; it "),
        ('{"question": "a"}', "'ground_truth', 'solution'; it has 'question'"),
        ("{}", "it has nothing"),
        (line(3), "'question' must be text or a list of messages, not a number (3)"),
        (line(None), "'question' must be text or a list of messages, not null"),
        (line({"role": "user"}), "'question' must be text or a list of messages, not an object"),
        (line(["a"]), "a message of 'question' must have 'role' and 'content', both text"),
        (line([{"role": "user"}]), "'role' and 'content', both text; got an object"),
        (line([CHAT[0], {"role": 1, "content": "a"}]), "both text; got an object"),
        (line([{"role": "user", "content": [{"text": "a"}]}]), "'role' and 'content', both text"),
        (line("a", True), "'answer' must be text, not a boolean (true)"),
        (line("a", None), "'answer' must be text, not null"),
        (line("a", {"b": 1}), "'answer' must be text, not an object"),
        (line("a", ["1", "2"]), "'answer' must be text, not a list"),
        (line("a", float("nan")), "'answer' must be text, not a number (NaN)"),
        (line("a", float("-inf")), "'answer' must be text, not a number (-Infinity)"),
        ('{"question": "a", "answer": ' + "9" * 5000 + "}", "cannot be read as JSON"),
        ("[" * 200_000, "cannot be read as JSON"),
    ],
)
def test_a_faulty_line_is_named(tmp_path, faulty, wanted):
    faulty = faulty if isinstance(faulty, bytes) else faulty.encode()
    file = write_jsonl(tmp_path, b"\n" + line().encode() + b"\n" + faulty + b"\n" + line().encode())
    rows = read_records(file, AS_THEY_SHOW, FIELD)
    assert next(rows) == Record("1+1?", "2", {})
    with pytest.raises(UserError) as error:
        next(rows)
    message = str(error.value)
    assert message.startswith(f"{FIELD}: {file}, line 3") and wanted in message
    assert len(message) < len(str(file)) + 300


@pytest.mark.parametrize(
    "keys, wanted",
    [
        ({"prompt_key": "q"}, r"has no 'q'; it has 'question', 'answer'. .*sums.prompt_key\."),
        ({"answer_key": "answer.x"}, r"has no 'answer.x'; it has .*sums.answer_key\."),
        ({"answer_key": "a.b"}, r"has no 'a.b'"),
        ({"answer_key": "answer."}, r"has no 'answer.'"),
    ],
)
def test_a_key_that_is_not_there(tmp_path, keys, wanted):
    with pytest.raises(UserError, match=wanted):
        read(write_jsonl(tmp_path, line()), **keys)


@pytest.mark.parametrize(
    "row, wanted",
    [
        ({"prompt": "a", "answer": None}, "'answer' must be text, not null"),
        ({"prompt": None, "answer": "b"}, "'prompt' must be text or a"),
        ({"prompt": "a", "answer": b"b"}, "'answer' must be text, not bytes"),
        ({"prompt": "a", "score": 1}, r"has none of .*it has 'prompt', 'score'"),
    ],
)
def test_a_faulty_row_of_parquet_is_named(tmp_path, row, wanted):
    good = [] if "score" in row or row["answer"] == b"b" else [{"prompt": "a", "answer": "b"}]
    file = write_parquet(tmp_path, [*good, row])
    where = re.escape(f"{FIELD}: {file}, row {len(good) + 1}")
    with pytest.raises(UserError, match=f"^{where}:? {wanted}"):
        read(file)


@pytest.mark.parametrize("damage", ["cut", "empty", "text", "pages"])
def test_a_damaged_parquet_file_is_named(tmp_path, damage):
    file = write_parquet(tmp_path, [{"prompt": f"prompt {i}", "answer": "b"} for i in range(500)])
    content = file.read_bytes()
    damaged = {"cut": content[: len(content) // 2], "empty": b"", "text": b"prompt,answer\n1,2\n"}
    # The pages of the data are checked only when they are read, as an error of reading.
    damaged["pages"] = content[:4] + b"\xff" * 200 + content[204:]
    file.write_bytes(damaged[damage])
    sound = f"{FIELD}: {file} is not a sound parquet file: "
    wanted = f"{FIELD}: cannot read {file}: " if damage == "pages" else sound
    with pytest.raises(UserError, match="^" + re.escape(wanted)):
        read(file)


def test_parquet_that_python_cannot_hold_is_named(tmp_path):
    """Text that is not UTF-8, which parquet does not check, and times beyond the year 9999."""
    text = pyarrow.array([b"a", b"\xff"], pyarrow.binary()).view(pyarrow.string())
    far = pyarrow.array([0, 2**62], pyarrow.timestamp("ms"))
    for column in (text, far):
        file = tmp_path / "problems.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"prompt": column, "answer": ["1", "2"]}), file)
        with pytest.raises(UserError) as error:
            read(file)
        assert str(error.value).startswith(f"{FIELD}: {file} is not a sound parquet file: ")


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("place", ["absent", "a directory", "below a file"])
def test_an_unreadable_file_is_named(tmp_path, place, suffix):
    (tmp_path / f"file{suffix}").write_text("")
    (tmp_path / f"directory{suffix}").mkdir()
    file, wanted = {
        "absent": (tmp_path / f"absent{suffix}", "No such file"),
        "a directory": (tmp_path / f"directory{suffix}", "directory"),
        "below a file": (tmp_path / f"file{suffix}" / f"x{suffix}", "Not a directory"),
    }[place]
    with pytest.raises(UserError) as error:
        read(file)
    assert str(error.value).startswith(f"{FIELD}: cannot read {file}: ")
    assert wanted in str(error.value).removeprefix(f"{FIELD}: cannot read {file}: ")


def test_a_byte_order_mark_is_passed_over(tmp_path):
    file = tmp_path / "windows.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + line("q", "7").encode() + b"\n")
    (row,) = read(file)
    assert row == read(write_jsonl(tmp_path, line("q", "7")))[0]
