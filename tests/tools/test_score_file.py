"""launch/score.py: lines in, lines out, and the errors of lines that it cannot read."""

import json
import os

import pytest

from dapo_jax.tools.score_file import score_file
from tests.support.runs import load_launcher

main = load_launcher("score")


def test_every_line_gets_its_verdict(tmp_path, capsys):
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
    flags = [f"--input={source}", f"--output={target}"]
    assert main(["program", "--scorer=math_dapo", *flags]) == 0
    said, err = capsys.readouterr()
    assert "3 answers in" in said and "66.7 % correct" in said
    assert "5 malformed lines left out" in said
    for number, problem in (
        (2, '"answer" must be text or a number, not True'),
        (3, "no \"prediction\"; it has 'answer'"),
        (4, "not JSON"),
        (5, '"prediction" must be text, not int'),
        (6, "a JSON object is wanted, not list"),
    ):
        assert f"{source}, line {number}: {problem}" in err
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
    limits = dict(timeout_seconds=1.0, workers=2)
    score_file("tests.support.scorers:treacherous", source, target, **limits, say=print)
    out = [json.loads(line) for line in target.read_text().splitlines()]
    notes = ["", "timeout", "timeout", "timeout", "worker died", ""]
    assert [row["note"] for row in out] == notes
    assert [row["correct"] for row in out] == [True, False, False, False, False, True]
    assert all(1.0 <= row["seconds"] < 3.5 for row in out[1:4])


def test_ctrl_c_says_that_the_output_is_not_complete(tmp_path, monkeypatch, capsys):
    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("dapo_jax.tools.score_file.score_file", stopped)
    assert main(["program", "--scorer=boxed", "--input=in", "--output=out"]) == 130
    assert "--output is not complete" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--scorer=math_dapo", "--input is needed"),
        ("--scorer=nope --input=in --output=out", "--scorer: 'nope' is not one of exact_match"),
        ("--scorer=boxed --input=none --output=out", "--input=none: no such file"),
        ("--scorer=boxed --input=in --output=in", "--output=in is the input"),
        ("--scorer=boxed --input=in --output=link", "--output=link is the input"),
        ("--scorer=boxed --input=in --output=/no/f", "--output=/no/f cannot be written: No such"),
        ("--scorer=boxed --input=in --output=out --workers=0", "--workers at least 1"),
        (
            "--scorer=boxed --input=in --output=out --timeout_seconds=inf",
            "--timeout_seconds must be above 0 and finite",
        ),
        ("--scorer=boxed --inputs=x", "Unknown command line flag"),
    ],
)
def test_a_wrong_command_is_refused(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").write_text("{}\n")
    os.symlink("in", "link")
    assert main(["program", *arguments.split()]) == 2
    err = capsys.readouterr().err
    assert message in err and "Traceback" not in err
    assert (tmp_path / "in").read_text() == "{}\n"
