"""launch/score.py: lines in, lines out, and what it says of those it cannot read."""

import json
import subprocess
import sys

import pytest

from dapo_jax.tools.score_file import score_file
from dapo_jax.types import UserError
from tests.conftest import ROOT


def run(*arguments):
    command = [sys.executable, str(ROOT / "launch" / "score.py"), *arguments]
    return subprocess.run(command, cwd="/", capture_output=True, text=True)


def test_every_line_gets_its_verdict(tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [
        {"prediction": "Answer: 42", "answer": "42", "id": 7},
        {"prediction": "Answer: 41", "answer": 42.0},
        {"prediction": "Answer: \ud800\x00", "answer": "\ud800\x00"},
    ]
    bad = [
        '{"prediction": "4", "answer": true}',
        '{"answer": "4"}',
        "not json",
        '{"prediction": 3, "answer": "4"}',
        "[1]",
        "",
    ]
    lines = [json.dumps(rows[0]), *bad, *map(json.dumps, rows[1:])]
    source.write_text("\n".join(lines) + "\n")
    done = run("--scorer=math_dapo", f"--input={source}", f"--output={target}")
    assert done.returncode == 0, done.stderr
    assert "3 answers in" in done.stdout and "66.7 % correct" in done.stdout
    assert "5 malformed lines left out" in done.stdout
    for number, problem in (
        (2, '"answer" must be text or a number, not True'),
        (3, "no \"prediction\"; it has 'answer'"),
        (4, "not JSON"),
        (5, '"prediction" must be text, not int'),
        (6, "a JSON object is wanted, not list"),
    ):
        assert f"{source}, line {number}: {problem}" in done.stderr
    out = [json.loads(line) for line in target.read_text().splitlines()]
    assert [row["correct"] for row in out] == [True, False, True]
    assert [row["reward"] for row in out] == [1.0, -1.0, 1.0]
    assert [row["extracted"] for row in out] == ["42", "41", "\ud800\x00"]
    assert all(row["note"] == "" and row["seconds"] >= 0 for row in out)
    assert out[0]["id"] == 7


def test_a_hanging_scorer_costs_its_limit(tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    texts = ["7", "spin", "hang", "stubborn", "die", "7"]
    source.write_text("".join(json.dumps({"prediction": t, "answer": "7"}) + "\n" for t in texts))
    score_file(
        "tests.support.scorers:treacherous",
        source,
        target,
        timeout_seconds=1.0,
        workers=2,
        say=print,
    )
    out = [json.loads(line) for line in target.read_text().splitlines()]
    notes = ["", "timeout", "timeout", "timeout", "worker died", ""]
    assert [row["note"] for row in out] == notes
    assert [row["correct"] for row in out] == [True, False, False, False, False, True]
    assert all(1.0 <= row["seconds"] < 3.5 for row in out[1:4])


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--scorer=math_dapo"], "--input is needed"),
        (
            ["--scorer=nope", "--input={in}", "--output={out}"],
            "--scorer: 'nope' is not one of exact_match",
        ),
        (
            ["--scorer=boxed", "--input=/no/such", "--output={out}"],
            "--input=/no/such: no such file",
        ),
        (["--scorer=boxed", "--input={in}", "--output={in}"], "is the input; name another"),
        (["--scorer=boxed", "--input={in}", "--output=/no/such/f"], "cannot be written: No such"),
        (["--scorer=boxed", "--input={in}", "--output={out}", "--workers=0"], "at least 1"),
        (["--scorer=boxed", "--inputs=x"], "Unknown command line flag"),
    ],
)
def test_a_wrong_command_is_told(tmp_path, arguments, message):
    source = tmp_path / "in.jsonl"
    source.write_text("{}\n")
    places = {"{in}": str(source), "{out}": str(tmp_path / "out.jsonl")}
    for mark, place in places.items():
        arguments = [argument.replace(mark, place) for argument in arguments]
    done = run(*arguments)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


def test_the_target_is_not_the_source_by_another_name(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text("{}\n")
    (tmp_path / "link.jsonl").symlink_to(source)
    with pytest.raises(UserError, match="is the input"):
        score_file(
            "boxed", source, tmp_path / "link.jsonl", timeout_seconds=1.0, workers=1, say=print
        )
    assert source.read_text() == "{}\n"
