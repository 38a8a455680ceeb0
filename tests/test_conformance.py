"""The reference's own numbers, where they are at hand: see tests/conformance."""

import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.helpers import SHARED


def test_every_compared_case_agrees():
    oracle = SHARED / "oracle" / "verl_0.9.1_seed0.json"
    if not oracle.exists():
        pytest.skip(f"the reference's numbers are not there: {oracle}")
    command = [sys.executable, "-m", "tests.conformance", "--oracle", str(oracle)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"conformance: (\d+) compared", done.stdout)
    assert found and int(found[1]) >= 720
