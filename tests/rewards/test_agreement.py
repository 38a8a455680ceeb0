"""docs/scorers.md states the agreement that tests/studies/agreement.py computes."""

import re

import pytest

from dapo_jax.rewards.scorers import SCORERS
from tests.conftest import ROOT
from tests.studies import agreement
from tests.support.helpers import SHARED

CASES = SHARED / "data" / "grader_cases"
# Files on which math_verify takes longer than a second; its figures there are not computed again.
SLOW = ("math_train_equivalent_pairs", "math_verify_cases", "qwen_math_real_outputs")


def cells(text):
    """(heading, row, column) -> cell of each table."""
    found, heading, header = {}, "", []
    for line in text.splitlines():
        if line.startswith("#"):
            heading = line
        if not line.startswith("| "):
            header = []
            continue
        row = [cell.strip() for cell in line.strip("|").split("|")]
        if header and not line.startswith("| ---"):
            found |= {(heading, row[0], column): cell for column, cell in zip(header, row[1:])}
        header = header or row[1:]
    return found


def test_the_documented_agreement_is_what_the_command_computes():
    documented = cells((ROOT / "docs" / "scorers.md").read_text())
    if not CASES.exists():
        pytest.skip(f"other graders' verdicts are not there: {CASES}")
    cases = [
        case
        for case in agreement.all_cases(CASES)
        if case.scorer != "math_verify" or not case.file.startswith(SLOW)
    ]
    scores = [SCORERS[case.scorer](case.text, case.answer) for case in cases]
    lines, _ = agreement.report(cases, scores)
    computed = cells("\n".join(lines))
    assert len(computed) > 50
    assert computed == {place: documented.get(place) for place in computed}


def test_every_scorer_is_in_the_list_of_scorers():
    text = (ROOT / "docs" / "scorers.md").read_text()
    assert set(re.findall(r"^- `(\w+)`: [A-Z]", text, re.M)) == set(SCORERS)
