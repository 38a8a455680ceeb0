"""Agreement of the scorers with other graders.

Command: python -m tests.studies.agreement --cases=FOLDER [--list]

Prints a table of scorer by grader for each file of cases. A cell `345/400 +2 -53` is 345
agreements on 400 cases, 2 right by the scorer and wrong by the grader, and 53 the other way round;
it is empty where the file has no such verdict. docs/scorers.md has these tables and explains them.
"""

import argparse
import collections
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from dapo_jax.rewards.pool import RewardPool
from dapo_jax.rewards.scorers import last_boxed
from dapo_jax.rewards.types import Score, Task

SCORERS = ("exact_match", "math_dapo", "math_dapo_boxed", "math_dapo_strict_box", "boxed")
SCORERS += ("gsm8k", "math_verify")
NUMBER = r"-?(\d+|\d{1,3}(,\d{3})+)(\.\d+)?"
TIMEOUT_SECONDS = 60.0  # none of these cases takes a second; a busy machine should not matter


class Disagreement(NamedTuple):
    """A response on which a scorer and a grader differ; the grader says the opposite of `score`."""

    scorer: str
    grader: str
    text: str
    answer: str
    score: Score


class Case(NamedTuple):
    """A response for one scorer, and the verdicts of graders."""

    file: str
    scorer: str
    text: str
    answer: str
    verdicts: dict[str, bool]


def in_its_form(scorer: str, answer: str) -> str:
    """Returns a response with the answer in the form that the scorer reads."""
    if scorer == "gsm8k":
        return f"#### {answer}"
    if scorer in ("exact_match", "math_dapo", "math_dapo_boxed"):
        return f"Answer: {answer}"
    return f"\\boxed{{{answer}}}"


def real_outputs(folder: Path) -> Iterator[Case]:
    """Yields whole responses of a model, which all end in a box, and their answers alone in the
    form of the scorers that read no box."""
    name = "qwen_math_real_outputs.jsonl"
    rows = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    for row in rows:
        dapo = {g: row[g]["acc"] for g in ("verl_math_dapo", "verl_math_dapo_strict_box")}
        about_the_answer = {
            grader: bool(int(row[grader])) for grader in ("qwen_score", "prm800k", "math_verify")
        }
        for scorer in SCORERS:
            verdicts = about_the_answer | dapo
            yield Case(name, scorer, row["response"], row["ground_truth"], verdicts)
        for scorer in ("exact_match", "math_dapo", "gsm8k"):
            text = in_its_form(scorer, last_boxed(row["response"]) or "")
            answers = f"{name}, the answer in the scorer's form"
            yield Case(answers, scorer, text, row["ground_truth"], about_the_answer)


def dapo_oracle(folder: Path) -> Iterator[Case]:
    name = "verl_math_dapo_oracle.json"
    for row in json.loads((folder / name).read_text()):
        for scorer, column in (("math_dapo", "default"), ("math_dapo_strict_box", "strict_box")):
            verdicts = {f"verl {column}": row[column]["acc"]}
            yield Case(name, scorer, row["solution_str"], row["ground_truth"], verdicts)


def scorer_matrix(folder: Path) -> Iterator[Case]:
    """Each scorer with the columns of its own reference; for `boxed`, which has none, of the
    graders that were given the content of the box."""
    name = "scorer_matrix.json"
    columns = {
        "math_dapo": ("math_dapo_pre_0.9.1",),
        "math_dapo_boxed": ("math_dapo_0.9.1",),
        "math_dapo_strict_box": ("math_dapo_strict_box",),
        "boxed": ("hendrycks_is_equiv_boxed", "prm800k_grade_answer", "minerva_lm_eval"),
        "math_verify": ("math_verify", "verl_math_verify"),
    }
    for row in json.loads((folder / name).read_text())["cases"]:
        for scorer, graders in columns.items():
            expected = row["expected"]
            verdicts = {g: bool(expected[g]) for g in graders if expected[g] is not None}
            text = row["prediction"]
            if row["kind"] == "answer":
                text = in_its_form(scorer, text)
            yield Case(name, scorer, text, row["ground_truth"], verdicts)


def math_verify_cases(folder: Path) -> Iterator[Case]:
    name = "math_verify_cases.json"
    for row in json.loads((folder / name).read_text()):
        verdicts = {grader: bool(row[grader]) for grader in ("expected", "math_verify_0.9.0")}
        yield Case(name, "math_verify", row["pred"], row["gold"], verdicts)


def areal_cases(folder: Path) -> Iterator[Case]:
    """Both of AReaL's functions are math-verify; our `gsm8k` is compared with its namesake."""
    name = "areal_reward_cases.json"
    for row in json.loads((folder / name).read_text()):
        for scorer in ("gsm8k", "math_verify"):
            verdicts = {row["fn"]: bool(row["expected"])}
            if scorer == "math_verify" or row["fn"] == "gsm8k_reward_fn":
                yield Case(name, scorer, row["completion"], row["answer"] or "", verdicts)


def equivalent_pairs(folder: Path) -> Iterator[Case]:
    """MATH's answer as the response, Qwen's normal form of it as the reference: all pairs should
    be right. `gsm8k` is run on numbers only."""
    name = "math_train_equivalent_pairs.json"
    for row in json.loads((folder / name).read_text()):
        for scorer in SCORERS:
            if scorer != "gsm8k" or re.fullmatch(NUMBER, row["normalised"]):
                text = in_its_form(scorer, row["raw"])
                yield Case(name, scorer, text, row["normalised"], {"equivalent": True})


FILES = (real_outputs, dapo_oracle, scorer_matrix, math_verify_cases, areal_cases, equivalent_pairs)


def scores(cases: Sequence[Case]) -> list[Score]:
    """Returns the score of each case.

    Raises:
        RuntimeError: a scorer reached no verdict.
    """
    with RewardPool(SCORERS, workers=2, timeout_seconds=TIMEOUT_SECONDS) as pool:
        scored = pool.score([Task((case.scorer,), case.text, case.answer) for case in cases])
    found = []
    for case, one in zip(cases, scored):
        if isinstance(one.scores, str):
            raise RuntimeError(f"{case.scorer} on {case.text!r}: {one.scores}")
        found.append(one.scores[0])
    return found


def disagreements(cases: Sequence[Case], found: Sequence[Score]) -> list[Disagreement]:
    return [
        Disagreement(case.scorer, grader, case.text, case.answer, score)
        for case, score in zip(cases, found)
        for grader, verdict in case.verdicts.items()
        if verdict != score.correct
    ]


def agreement_table(cases: Sequence[Case], differing: Sequence[Disagreement]) -> list[str]:
    """Returns a Markdown table of scorer by grader; the columns are the fewer of the two."""
    numbers = collections.Counter((case.scorer, g) for case in cases for g in case.verdicts)
    ours = collections.Counter((d.scorer, d.grader) for d in differing if d.score.correct)
    theirs = collections.Counter((d.scorer, d.grader) for d in differing if not d.score.correct)
    graders = list(dict.fromkeys(grader for case in cases for grader in case.verdicts))

    def cell(scorer: str, grader: str) -> str:
        at = scorer, grader
        agreed = numbers[at] - ours[at] - theirs[at]
        return f"{agreed}/{numbers[at]} +{ours[at]} -{theirs[at]}" if numbers[at] else ""

    scorers = [s for s in SCORERS if any(s == case.scorer for case in cases)]
    if len(graders) <= len(scorers):
        table = [[f"`{s}`", *(cell(s, g) for g in graders)] for s in scorers]
        return _markdown(["", *graders], table)
    table = [[g, *(cell(s, g) for s in scorers)] for g in graders]
    return _markdown(["", *(f"`{s}`" for s in scorers)], table)


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]


def all_cases(folder: Path) -> list[Case]:
    return [case for read in FILES for case in read(folder)]


def report(cases: Sequence[Case], found: Sequence[Score]) -> tuple[list[str], list[Disagreement]]:
    """Returns the lines of all tables, and the disagreements behind them."""
    of_file: dict[str, list[tuple[Case, Score]]] = collections.defaultdict(list)
    for case, score in zip(cases, found):
        of_file[case.file].append((case, score))
    lines: list[str] = []
    everything: list[Disagreement] = []
    for file, pairs in of_file.items():
        its_cases = [case for case, _ in pairs]
        differing = disagreements(its_cases, [score for _, score in pairs])
        everything += differing
        lines += [f"### {file}", "", *agreement_table(its_cases, differing), ""]
    return lines[:-1], everything


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="the scorers against other graders' verdicts")
    parser.add_argument("--cases", type=Path, required=True, help="folder of the cases")
    parser.add_argument("--list", action="store_true", help="print every disagreement, too")
    arguments = parser.parse_args(argv)
    cases = all_cases(arguments.cases)
    lines, differing = report(cases, scores(cases))
    print("\n".join(lines))
    for d in differing if arguments.list else ():
        verdicts = "right, wrong" if d.score.correct else "wrong, right"
        print(f"\n{d.scorer}, {d.grader}: {verdicts}")
        print(f"    {d.text[-70:]!r}\n    read {d.score.extracted!r}, reference {d.answer!r}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
