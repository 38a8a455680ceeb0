"""The reference's own numbers: see tests/conformance."""

import re
import subprocess
import sys

from tests.conftest import ROOT


def test_every_compared_case_agrees():
    command = [sys.executable, "-m", "tests.conformance"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"conformance: (\d+) compared", done.stdout)
    assert found and int(found[1]) >= 734
