"""The project's own papers agree with each other."""

import ast
import importlib.metadata
import os
import re
import sys
import tomllib

import pytest

from tests.conftest import ROOT
from tests.studies.planted_defects import DEFECTS


def test_requirements_are_those_of_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")] == project["dependencies"]


def names_of(requirements):
    """The distributions' names, as packaging writes them."""
    names = (re.match(r"[\w-]+", line)[0] for line in requirements if isinstance(line, str))
    return {re.sub(r"[-_.]+", "-", name).lower() for name in names}


@pytest.mark.parametrize(
    "folders, groups", [(("dapo_jax", "launch", "configs"), ()), (("tests", "docs"), ("dev",))]
)
def test_every_package_that_is_imported_is_declared(folders, groups):
    """A package that another one brings today may be missing from that one's next release."""
    papers = tomllib.loads((ROOT / "pyproject.toml").read_text())
    declared = names_of(papers["project"]["dependencies"])
    declared |= {name for group in groups for name in names_of(papers["dependency-groups"][group])}
    provided_by = importlib.metadata.packages_distributions()
    own = {"dapo_jax", "launch", "configs", "tests"}
    imported = {}
    for folder in folders:
        # The goldens were made once, and the peers run, with packages that are not needed here.
        elsewhere = {*(ROOT / "tests/goldens").rglob("*"), *(ROOT / "tests/peers").rglob("*")}
        for path in set((ROOT / folder).rglob("*.py")) - elsewhere:
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    modules = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    modules = [node.module]
                else:
                    continue
                for module in modules:
                    imported.setdefault(module.split(".")[0], path)
    others = imported.keys() - own - sys.stdlib_module_names
    assert "jax" in others and len(others) > 5
    for module in sorted(others):
        assert names_of(provided_by[module]) & declared, f"{imported[module]} imports {module}"


def test_every_path_in_the_readme_exists():
    text = (ROOT / "README.md").read_text()
    named = set(re.findall(r"`((?:dapo_jax|configs|docs|launch|tests)/[\w/.]+)`", text))
    named |= set(re.findall(r"\]\(([\w/.]+)\)", text))
    assert len(named) > 15
    for path in named:
        assert (ROOT / path).exists(), path


def test_planted_defects_have_their_places():
    for defect in DEFECTS:
        text = (ROOT / defect.file).read_text()
        assert text.count(defect.right) == 1, f"{defect.name}: its place in {defect.file} changed"
    results = (ROOT / "docs" / "results.md").read_text()
    assert f"Each of {len(DEFECTS)} defects planted in the code" in results


@pytest.mark.parametrize("script", ["run", "slow"])
def test_the_workflow_runs_all_checks_on_every_supported_python(script):
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    first, end = map(int, re.findall(r"3\.(\d+)", project["requires-python"]))
    versions = ", ".join(f'"3.{minor}"' for minor in range(first, end))
    assert f"python: [{versions}]\n" in workflow
    scripts = re.search(r"checks: \[(.*)\]\n", workflow)
    assert scripts and script in scripts[1].split(", ")
    assert "- run: .ci/${{ matrix.checks }}\n" in workflow
    assert os.access(ROOT / ".ci" / script, os.X_OK)


def test_pre_commit_runs_the_style_checks_of_the_workflow():
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    assert re.findall(r"entry: (.*)", hooks) == [".ci/style"]
    assert "\n.ci/style\n" in (ROOT / ".ci/run").read_text()


def test_no_line_of_markdown_is_longer_than_120_characters():
    for file in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")):
        for number, line in enumerate(file.read_text().splitlines(), start=1):
            assert len(line) <= 120, f"{file.name}:{number}"
