"""The notebooks: what is stored in them, and that those for a CPU run."""

import csv
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

from tests.conftest import FAST_COMPILATION, ROOT
from tests.support.runs import load_script, programs

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MOST_BYTES = 2_000_000
# Paths of a machine, except the neutral one that notebooks are executed in; package hosts.
FORBIDDEN = r"(?<![\w.:/])/(?!tmp/dapo_jax)[\w.-]+/[\w.-]+|https?://\S*(pypi|simple/)"
RUN = """
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], 4)
where = {"metadata": {"path": sys.argv[2]}}
if len(sys.argv) > 4:  # other values of the cell with the tag "parameters"
    cells = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", ())]
    cells[0].source = sys.argv[4]
nbclient.NotebookClient(notebook, timeout=240, resources=where).execute()
nbformat.write(notebook, sys.argv[3])
"""
# The notebooks that CI runs smaller than they are stored; PLACE is an empty directory.
CHANGES = {
    "train.num_steps": 1,
    "pretrain.num_steps": 2,
    "evaluation.num_samples": 2,
    # A base of two updates is right by chance alone, and few groups are informative.
    "dynamic_sampling.max_prompts": 32,
}
SMALLER = {
    "00_quickstart": f"CHANGES, WORKDIR = {CHANGES}, 'PLACE/run'",
    "04_your_reward_your_data": f"CHANGES, FOLDER = {CHANGES}, 'PLACE'",
    "06_plan_a_pod": """
CONFIG = "configs/qwen0_5b_gsm8k.py"
SLICES = {"v5e:1x1": {}}
PROGRAM = "prefill"
TOO_SMALL = "v5e:1x1", {"rollout.slots": 4096}, "decode"
""",
}


def texts(notebook):
    """The texts that code cells of a notebook have put out, cell by cell."""
    return [
        "".join("".join(output.get("text", "")) for output in cell["outputs"])
        for cell in notebook["cells"]
        if cell["cell_type"] == "code"
    ]


def execute(notebook, result, home, *parameters):
    """Returns the notebook with its outputs after a run in its own directory, on one device."""
    place = str(notebook.parent)
    command = [sys.executable, "-c", RUN, str(notebook), place, str(result), *parameters]
    environment = os.environ | {"XLA_FLAGS": FAST_COMPILATION, "XDG_CACHE_HOME": str(home)}
    environment |= {
        "JAX_COMPILATION_CACHE_DIR": programs(home),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    subprocess.run(command, check=True, timeout=300, env=environment)
    return json.loads(result.read_text())


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


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_the_first_cell_installs_before_it_imports_jax(file, tmp_path, monkeypatch):
    """In an empty directory, as on Colab; git, pip and the imports do nothing."""
    source = "".join(json.loads(file.read_text())["cells"][1]["source"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(sys, "path", [*sys.path])
    calls = []

    def run(command, check):
        assert check
        calls.append(command[1:] if command[0] == sys.executable else command)
        if command[0] == "git":
            Path("dapo_jax/launch").mkdir(parents=True)
            Path("dapo_jax/launch/train.py").touch()

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    cell, _, _ = source.partition("import jax\n")
    with pytest.raises(RuntimeError, match="restart the runtime"):
        exec(cell, {})
    monkeypatch.delitem(sys.modules, "jax")
    exec(cell, {})
    assert calls[0][:2] == ["git", "clone"]
    assert calls[1] == ["notebooks/install.py"]


OLDEST = "0.11.1" if sys.version_info >= (3, 12) else "0.10.2"


@pytest.mark.parametrize(
    ("there", "gpu", "wanted"),
    [
        ({"jax": OLDEST}, True, f"jax=={OLDEST}"),
        ({"jax": "0.12.0.1", "libtpu": "0.0.40"}, False, "jax==0.12.0.1"),
        ({"jax": "0.7.2"}, False, "jax>=0.10.2,<0.13"),
        ({"jax": "0.13.0"}, False, "jax>=0.10.2,<0.13"),
        ({}, False, "jax>=0.10.2,<0.13"),
        ({"jax": "0.7.2", "libtpu": "0.0.17"}, False, "jax[tpu]>=0.10.2,<0.13"),
        ({"jax": "0.7.2"}, True, "jax[cuda12]>=0.10.2,<0.13"),
    ],
)
def test_a_jax_that_is_too_old_or_too_new_is_replaced(there, gpu, wanted, monkeypatch):
    install = load_script("notebooks", "install")
    calls = []

    def run(command, **_):
        calls.append(command)
        return subprocess.CompletedProcess(command, 0 if gpu else 9)

    monkeypatch.setattr(install, "version", there.get)
    monkeypatch.setattr(install.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(install.subprocess, "run", run)
    install.main()
    packages, jetstream = (call[call.index("-q") + 1 :] for call in calls[-2:])
    assert jetstream[0] == "--no-deps"
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    every = {line for line in lines if re.match("[a-z]", line) and not line.startswith("jax>")}
    assert {*packages, *jetstream[1:]} == every | {wanted}
    assert [name.partition("==")[0] for name in jetstream[1:]] == ["google-jetstream"]


def test_a_jax_that_stays_runs_with_flax_and_is_one_that_the_requirements_admit():
    install = load_script("notebooks", "install")
    numbers = lambda version: tuple(map(int, version.split(".")))
    (of_flax,) = [
        wanted.removeprefix("jax>=")
        for wanted in importlib.metadata.requires("flax")
        if wanted.startswith("jax>=")
    ]
    text = (ROOT / "requirements.txt").read_text()
    low, high = re.search(r"^jax>=([\d.]+),<([\d.]+)$", text, re.MULTILINE).groups()
    assert install.OLDEST >= max(numbers(of_flax), numbers(low))
    assert install.END == numbers(high)


def test_the_four_techniques_give_the_stored_figures(tmp_path, home):
    """Needs no device to be fast: figures are equal wherever it runs."""
    stored = ROOT / "notebooks" / "01_four_techniques.ipynb"
    executed = execute(stored, tmp_path / "result.ipynb", home)
    # The first cell prints versions.
    assert texts(executed)[1:] == texts(json.loads(stored.read_text()))[1:]


@pytest.mark.parametrize("name", SMALLER)
def test_a_notebook_runs_at_a_smaller_size(name, tmp_path, home):
    if name == "06_plan_a_pod" and importlib.util.find_spec("libtpu") is None:
        pytest.skip("needs libtpu (uv sync --extra tpu)")
    parameters = SMALLER[name].replace("PLACE", str(tmp_path))
    notebook = ROOT / "notebooks" / f"{name}.ipynb"
    executed = execute(notebook, tmp_path / "result.ipynb", home, parameters)
    code = [cell for cell in executed["cells"] if cell["cell_type"] == "code"]
    assert all(cell["execution_count"] for cell in code)


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
