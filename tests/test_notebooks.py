"""The notebooks: what is stored in them, and that one of them runs."""

import csv
import json
import re
import subprocess
import sys
from statistics import fmean

import pytest

from tests.conftest import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MOST_BYTES = 2_000_000
# Paths of a machine, except the neutral one that notebooks are executed in; package hosts.
FORBIDDEN = r"(?<![\w.:/])/(?!tmp/dapo_jax)[\w.-]+/[\w.-]+|https?://\S*(pypi|simple/)"
RUN = """
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], 4)
where = {"metadata": {"path": sys.argv[2]}}
nbclient.NotebookClient(notebook, timeout=120, resources=where).execute()
nbformat.write(notebook, sys.argv[3])
"""


def texts(notebook):
    """The texts that code cells of a notebook have put out, cell by cell."""
    return [
        "".join("".join(output.get("text", "")) for output in cell["outputs"])
        for cell in notebook["cells"]
        if cell["cell_type"] == "code"
    ]


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_stored_outputs_can_be_shown_to_anyone(file):
    text = file.read_text()
    assert len(text) < MOST_BYTES
    notebook = json.loads(text)
    cells = notebook["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert f"notebooks/{file.name}" in "".join(cells[0]["source"])  # the badges
    assert "git" in "".join(code[0]["source"]) and "import dapo_jax" in "".join(code[0]["source"])
    outputs = [output for cell in code for output in cell["outputs"]]
    assert outputs and not [o for o in outputs if o["output_type"] == "error"]
    assert not [found for text in texts(notebook) for found in re.finditer(FORBIDDEN, text)]
    assert not re.search("<iframe|widget-view", text)  # GitHub does not show them


@pytest.mark.slow
def test_the_four_techniques_give_the_stored_figures(tmp_path):
    """Needs no device to be fast: figures are equal wherever it runs."""
    stored = ROOT / "notebooks" / "01_four_techniques.ipynb"
    result = tmp_path / "result.ipynb"
    command = [sys.executable, "-c", RUN, str(stored), str(stored.parent), str(result)]
    subprocess.run(command, check=True, timeout=300)
    # The first cell prints versions.
    assert texts(json.loads(result.read_text()))[1:] == texts(json.loads(stored.read_text()))[1:]


@pytest.mark.parametrize("file", ["docs/table1.md", "notebooks/02_table1.ipynb"])
def test_the_stored_table_is_that_of_the_runs(file):
    text = (ROOT / file).read_text()
    if file.endswith("ipynb"):
        cells = json.loads(text)["cells"]
        outputs = [output for cell in cells for output in cell.get("outputs", ())]
        text = "".join("".join(o.get("data", {}).get("text/markdown", "")) for o in outputs)
    with open(ROOT / "docs" / "table1.csv") as lines:
        runs = list(csv.DictReader(lines))
    rows = sorted({run["row"] for run in runs})
    shown = {
        row: float(re.search(rf"^\| {row} \| ([\d.]+) \(", text, re.MULTILINE)[1]) for row in rows
    }
    means = {
        row: 100 * fmean(float(run["accuracy"]) for run in runs if run["row"] == row)
        for row in rows
    }
    assert shown == pytest.approx(means, abs=0.051)
