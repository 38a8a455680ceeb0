"""launch/transform_data.py: what is asked and kept, with a stand-in endpoint and a model."""

import json
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from dapo_jax.data.records import Columns, read_records
from dapo_jax.tools import chat_endpoint, transform
from dapo_jax.types import UserError
from tests.conftest import ROOT
from tests.support.chat_server import ChatServer
from tests.support.runs import call_main, environment, load_launcher
from tests.tools.test_generate import place as model  # noqa: F401, a fixture

main = load_launcher("transform_data")
KEY = "a-key-that-is-secret"


def write_problems(file, number):
    """Five kinds of answers: integers, fractions twice, roots, and pairs or formulas."""
    lines = []
    for i in range(number):
        answer = (str(i), rf"\frac{{{i}}}{{7}}", rf"\frac{{{i}}}{{9}}", r"\sqrt{2}", "(1, 2)")[
            i % 5
        ]
        answer = "n + 1" if i % 10 == 9 else answer
        lines.append({"problem": f"Problem number {i}.", "answer": answer, "level": i % 3})
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(chat_endpoint, "RETRY_SECONDS", (0.01, 0.01))
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with ChatServer() as server:
        yield server


def flags(server, source, output):
    named = [f"--input={source}", f"--output={output}", f"--endpoint={server.url}"]
    return [*named, "--endpoint_model=a-model", "--seed=5"]


def call(capsys, *arguments):
    return call_main(capsys, main, *arguments)


def lines_of(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_fractions_become_integers_and_the_rest_says_why_not(server, tmp_path, capsys):
    source, output = write_problems(tmp_path / "in.jsonl", 20), tmp_path / "out"
    status, out, err = call(capsys, *flags(server, source, output))
    assert status == 0, err
    assert f"12 of 20 problems kept: {output / 'problems.jsonl'}" in out
    rows = lines_of(output / "rows.jsonl")
    assert [row["index"] for row in rows] == list(range(20))
    reasons = [row["reason"] for row in rows[:10]]
    assert reasons == [
        "kept: the answer is an integer",
        "kept: transformed",
        "kept: transformed",
        "the reply holds no rewritten problem",
        "the solutions disagree",
        *reasons[:4],
        "no solution ends with an integer",
    ]
    six = rows[6]
    assert six["prompt"] == "Problem number 6." and six["answer"] == r"\frac{6}{7}"
    assert six["form"] == "some form" and six["integers"] == [13] * 4 and six["agreement"] == 1.0
    assert len(six["solutions"]) == 4 and "Add the numbers" in six["rewriting"]
    assert rows[4]["integers"] == [5, 6, 7, 8], "of four seeds, in two requests"
    report = json.loads((output / "report.json").read_text())
    assert report["reasons"]["kept: transformed"] == 8 and sum(report["reasons"].values()) == 20
    # Twelve rewritings, twelve problems without roots solved in two requests each.
    assert len(server.asked) == 16 + 2 * 12
    assert server.keys == {f"Bearer {KEY}"}
    stored = "".join(file.read_text() for file in output.iterdir())
    assert KEY not in stored + out + err


def test_the_output_is_a_data_source(server, tmp_path, capsys):
    source, output = write_problems(tmp_path / "in.jsonl", 10), tmp_path / "out"
    assert call(capsys, *flags(server, source, output))[0] == 0
    records = list(read_records(output / "problems.jsonl", Columns(None, None, None), "a field"))
    assert [record.answer for record in records] == ["0", "8", "11", "5", "13", "16"]
    first, second = records[0], records[1]
    assert first.prompt == "Problem number 0."
    assert second.prompt == "Problem number 1. Add the numbers of it."
    assert second.metadata["original_answer"] == r"\frac{1}{7}" and second.metadata["level"] == 1


def test_the_input_is_not_overwritten(server, tmp_path, capsys):
    source = write_problems(tmp_path / "problems.jsonl", 5)
    before = source.read_bytes()
    for given in (source, tmp_path):
        status, _, err = call(capsys, *flags(server, given, tmp_path))
        assert status == 2 and "holds the input" in err, err
    assert source.read_bytes() == before and not server.asked


def test_an_output_that_is_a_file_is_named(server, tmp_path, capsys):
    source = write_problems(tmp_path / "problems.jsonl", 5)
    (tmp_path / "out").touch()
    status, _, err = call(capsys, *flags(server, source, tmp_path / "out"))
    assert status == 2 and "out cannot be written to: File exists" in err and not server.asked


def test_messages_keep_their_other_turns(server, tmp_path, capsys):
    """verl's schema: the last message is the problem."""
    source = tmp_path / "in.jsonl"
    messages = [dict(role="system", content="Be brief."), dict(role="user", content="What is it?")]
    record = {"prompt": messages, "reward_model": {"ground_truth": r"\frac{1}{2}"}}
    source.write_text(json.dumps(record) + "\n")
    assert call(capsys, *flags(server, source, tmp_path / "out"))[0] == 0
    (problem,) = lines_of(tmp_path / "out" / "problems.jsonl")
    text = "What is it? Add the numbers of it."
    assert problem["prompt"] == [messages[0], dict(role="user", content=text)]
    assert problem["answer"] == "3" and problem["original_prompt"] == messages


@pytest.mark.parametrize(
    "columns",
    [
        {"prompt": "P.", "reward_model": {"ground_truth": r"\frac{1}{2}", "style": "rule"}},
        {"problem": "P.", "answer": r"\frac{1}{2}", "solution": r"so \boxed{\frac{1}{2}}"},
        {"problem": "P.", "question": "Q.", "answer": r"\frac{1}{2}", "ground_truth": "0.5"},
    ],
)
def test_columns_of_the_original_do_not_shadow_the_answer(server, tmp_path, capsys, columns):
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps(columns | {"level": 2}) + "\n")
    assert call(capsys, *flags(server, source, tmp_path / "out"))[0] == 0
    file = tmp_path / "out" / "problems.jsonl"
    (record,) = read_records(file, Columns(None, None, None), "a field")
    assert (record.prompt, record.answer) == ("P. Add the numbers of it.", "3")
    assert record.metadata["level"] == 2


def test_an_error_that_passes_is_tried_again_and_another_stops(server, tmp_path, capsys):
    source, output = write_problems(tmp_path / "in.jsonl", 10), tmp_path / "out"
    server.failures = [503, 429]
    assert call(capsys, *flags(server, source, output), "--concurrency=1")[0] == 0
    whole = (output / "rows.jsonl").read_text()
    server.failures = [401]
    status, _, err = call(capsys, *flags(server, source, tmp_path / "b"), "--concurrency=1")
    assert status == 2 and re.search(r"--endpoint=http.*HTTP 401.*same command resumes", err), err
    assert KEY not in err
    # Out of reach in the middle of the solutions.
    asked = len(server.asked)
    server.failures = []
    real = chat_endpoint.ask
    calls = []

    def fails_later(*arguments):
        calls.append(arguments)
        if len(calls) == 11:
            server.failures = [503] * 3
        return real(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_endpoint, "ask", fails_later)
        status, _, err = call(capsys, *flags(server, source, tmp_path / "b"), "--concurrency=1")
    assert status == 2 and "HTTP 503" in err
    assert len(lines_of(tmp_path / "b" / "solve.jsonl")) == 2
    before = len(server.asked)
    assert call(capsys, *flags(server, source, tmp_path / "b"), "--concurrency=1")[0] == 0
    assert len(server.asked) - before == 2 * 4, "four of six problems were left to solve"
    assert before > asked and (tmp_path / "b" / "rows.jsonl").read_text() == whole


def test_a_prompt_that_is_refused_is_dropped_and_named(server, tmp_path, capsys):
    source, output = write_problems(tmp_path / "in.jsonl", 20), tmp_path / "out"
    assert call(capsys, *flags(server, source, tmp_path / "all"))[0] == 0
    asked, server.refused = len(server.asked), "Problem number 2."
    status, out, err = call(capsys, *flags(server, source, output))
    assert status == 0 and "1 the endpoint refused the prompt" in out, err
    rows, others = lines_of(output / "rows.jsonl"), lines_of(tmp_path / "all" / "rows.jsonl")
    assert rows[2].pop("reason") == "the endpoint refused the prompt"
    assert rows[:2] + rows[3:] == others[:2] + others[3:] and others[2]["reason"].startswith("kept")
    replies = lines_of(output / "rewrite.jsonl")
    (refused,) = [line["refused"] for line in replies if not line["samples"]]
    assert refused == 'HTTP 400: {"error": "content filter"}'
    assert len(server.asked) - asked == asked - 2, "its solutions are not asked for"
    # The fault may be in every request.
    server.refused = ""
    status, _, err = call(capsys, *flags(server, source, tmp_path / "none"))
    assert status == 2 and "HTTP 400" in err
    assert not (tmp_path / "none" / "rewrite.jsonl").read_text()


def test_a_fault_of_all_requests_refuses_no_prompt(tmp_path, monkeypatch):
    """Such as an account without money, in the middle of the file."""
    endpoint = chat_endpoint.Endpoint("http://localhost/v1", "name", 0.0, 9, 0, concurrency=3)
    lines = [{"index": i, "prompt": f"prompt {i}"} for i in range(60)]
    target, refused = tmp_path / "replies.jsonl", {f"prompt {i}" for i in range(10, 60)}

    def ask(_, prompt, num_samples):
        if prompt in refused:
            raise chat_endpoint.Refused("HTTP 400: billing_hard_limit_reached")
        return ["reply"] * num_samples

    monkeypatch.setattr(chat_endpoint, "ask", ask)
    ask_all = lambda: chat_endpoint.ask_file(endpoint, lines, target, num_samples=1, say=print)
    with pytest.raises(UserError, match="billing_hard_limit_reached"):
        ask_all()
    assert all(line["samples"] for line in lines_of(target))
    refused.clear()
    ask_all()
    found = lines_of(target)
    assert len(found) == 60 and all(line["samples"] for line in found)


def test_replies_are_kept_as_they_come(tmp_path, monkeypatch):
    """Though the first prompt has none."""
    endpoint = chat_endpoint.Endpoint("http://localhost/v1", "name", 0.0, 9, 0, concurrency=3)
    lines = [{"index": i, "prompt": f"prompt {i}"} for i in range(6)]
    asked, others, target = [], threading.Event(), tmp_path / "replies.jsonl"

    def ask(_, prompt, num_samples):
        asked.append(prompt)
        if prompt == "prompt 0" and not others.is_set():
            assert others.wait(60)
            raise UserError("out of reach")
        if len(asked) == 6:
            others.set()
        return [f"reply to {prompt}"] * num_samples

    monkeypatch.setattr(chat_endpoint, "ask", ask)
    ask_all = lambda: chat_endpoint.ask_file(endpoint, lines, target, num_samples=2, say=print)
    with pytest.raises(UserError, match="out of reach"):
        ask_all()
    assert sorted(line["index"] for line in lines_of(target)) == [1, 2, 3, 4, 5]
    with target.open("a") as file:
        file.write('{"index": 0, "prom')  # killed here
    del asked[:]
    ask_all()
    assert asked == ["prompt 0"]
    assert sorted(line["index"] for line in lines_of(target)) == list(range(6))
    lines[2]["prompt"] = "another"
    with pytest.raises(UserError, match="holds other results"):
        ask_all()


@pytest.mark.slow
def test_killed_twice_no_row_is_lost_or_doubled(server, tmp_path, capsys):
    source = write_problems(tmp_path / "in.jsonl", 200)
    server.seconds = 0.02
    command = [sys.executable, str(ROOT / "launch" / "transform_data.py")]
    killed = flags(server, source, tmp_path / "killed")
    for requests in (60, 250):  # while rewriting, while solving
        process = subprocess.Popen([*command, *killed], env=environment(tmp_path), stderr=-3)
        limit = time.monotonic() + 120
        while len(server.asked) < requests:
            assert process.poll() is None and time.monotonic() < limit
            time.sleep(0.005)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    assert not (tmp_path / "killed" / "rows.jsonl").exists()
    server.seconds = 0.0
    assert call(capsys, *killed)[0] == 0
    assert call(capsys, *flags(server, source, tmp_path / "whole"))[0] == 0
    for name in ("rows.jsonl", "problems.jsonl", "report.json"):
        ours, theirs = ((tmp_path / place / name).read_text() for place in ("killed", "whole"))
        assert ours == theirs, name
    rows = lines_of(tmp_path / "killed" / "rows.jsonl")
    assert [row["index"] for row in rows] == list(range(200))
    assert len(lines_of(tmp_path / "killed" / "problems.jsonl")) == 120


def test_a_model_of_ones_own(model, tmp_path, capsys):  # noqa: F811
    """A random one: what it writes is no rewritten problem, and is kept in the row."""
    source = write_problems(tmp_path / "in.jsonl", 3)
    arguments = (f"--input={source}", f"--output={tmp_path / 'out'}", f"--model={model}")
    status, out, err = call(capsys, *arguments, "--max_new_tokens=8", "--chat")
    assert status == 0, err
    assert "1 of 3 problems kept" in out
    rows = lines_of(tmp_path / "out" / "rows.jsonl")
    assert rows[1]["reason"] == "the reply holds no rewritten problem" and rows[1]["rewriting"]
    assert call(capsys, *arguments, "--max_new_tokens=8", "--chat")[1] == out


@pytest.mark.parametrize(
    "reply, expected",
    [
        ("so it is 12\nAnswer: 12", 12),
        ("Answer: 3\nno, wait\nAnswer: -1,204.", -1204),
        ("**Answer:** $7$", 7),
        (r"Answer: \boxed{42}", 42),
        ("Answer: 12 apples", None),
        ("Answer: 1.5", None),
        (r"Answer: \frac{1}{2}", None),
        ("Answer: 1,2", None),
        ("Answer: 3,141,592", 3141592),
        ("Answer: 3141,592", None),
        ("Answer: " + "7" * 5000, None),  # Python converts no more than 4,300 digits
        ("12", None),
        ("", None),
    ],
)
def test_the_integer_of_a_reply(reply, expected):
    assert transform.parse_integer(reply) == expected


@pytest.mark.parametrize(
    "integers, kept, agreement",
    [
        ([3, 3, 3, 3], True, 1.0),
        ([3, 3, 3, 4], True, 0.75),
        ([3, 3, None, None], False, 0.5),
        ([3, 3, 3, None], True, 0.75),
        ([None, None], False, 0.0),
    ],
)
def test_solutions_have_to_agree(integers, kept, agreement):
    found = transform.vote(integers, 0.75)
    assert (found["reason"] is None) == kept and found["agreement"] == agreement
    assert found["integer"] == (3 if agreement else None)


def test_a_tie_is_no_agreement():
    assert transform.vote([1, 1, 2, 2], 0.5)["reason"] == "the solutions disagree"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--model=a", "--endpoint=http://b"], "one of --model and --endpoint is needed"),
        ([], "one of --model and --endpoint is needed"),
        (
            ["--endpoint=localhost:1", "--endpoint_model=m"],
            "--endpoint must be a URL.*'localhost:1'",
        ),
        (["--endpoint=http://[::1/v1", "--endpoint_model=m"], "--endpoint must be a URL"),
        (["--endpoint=http://me:secret@a/v1", "--endpoint_model=m"], "variable OPENAI_API_KEY"),
        (["--endpoint=http://a/v1"], "--endpoint_model is needed"),
        (["--model=a", "--min_agreement=1.5"], "--min_agreement must be above 0 and at most 1"),
        (["--model=a", "--num_samples=0"], "--num_samples must be above 0; got 0"),
        (["--endpoint=http://a/v1", "--endpoint_model=m", "--concurrency=0"], "--concurrency must"),
    ],
)
def test_mistakes_on_the_command_line(tmp_path, capsys, arguments, message):
    source = write_problems(tmp_path / "in.jsonl", 2)
    status, _, err = call(capsys, f"--input={source}", f"--output={tmp_path / 'o'}", *arguments)
    assert status == 2 and re.search(message, err), err
    assert "secret" not in err


def test_other_settings_than_those_of_the_output_are_refused(server, tmp_path, capsys):
    source = write_problems(tmp_path / "in.jsonl", 5)
    assert call(capsys, *flags(server, source, tmp_path / "out"))[0] == 0
    status, _, err = call(capsys, *flags(server, source, tmp_path / "out"), "--temperature=0.1")
    assert status == 2 and "holds other results than this command's" in err


def test_samples_of_an_earlier_output_are_replaced_and_the_command_resumes(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(chat_endpoint, "ask", lambda _, prompt, n: asked.append(prompt) or ["new"])
    endpoint = chat_endpoint.Endpoint("http://a/v1", "a-model", 1.0, 16, 5, 1)
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    earlier = [{"prompt": f"Problem {i}.", "samples": [{"text": "old"}]} for i in range(3)]
    source.write_text("".join(json.dumps(row) + "\n" for row in earlier))
    replies = transform.from_endpoint(endpoint, print)
    for _ in range(2):
        assert replies(source, target, 1)
        found = [(row["prompt"], row["samples"]) for row in lines_of(target)]
        assert found == [(row["prompt"], [{"text": "new"}]) for row in earlier]
        assert len(asked) == 3, "the second call has nothing to do"


def test_a_column_that_is_named_is_searched_for_its_answer(tmp_path, monkeypatch):
    """math500's own column holds answers alone; its solutions end in a box."""
    source = tmp_path / "in.jsonl"
    row = {"problem": "1/5 of 4?", "answer": "4/5", "solution": r"It is so, \boxed{4/5}"}
    source.write_text(json.dumps(row))
    monkeypatch.setattr(transform.sources, "find_files", lambda *_: [source])
    for column in ("", "solution"):
        settings = transform.Settings("math500", tmp_path / "out", "", column, 0, 1, 1.0)
        (found,) = transform._rows(settings)
        assert found["answer"] == "4/5"
