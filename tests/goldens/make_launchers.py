"""Writes what the dry runs of launch/*.sh print, and the filled JobSet, to tests/goldens/launchers.

python -m tests.goldens.make_launchers, from the root of the repository. Read the difference: these
are commands that cost money.
"""

from tests.support.launchers import DRY_RUNS, GOLDENS, MANIFEST, call, golden

if __name__ == "__main__":
    GOLDENS.mkdir(exist_ok=True)
    for name in DRY_RUNS:
        (GOLDENS / f"{name}.txt").write_text(golden(name))
    (GOLDENS / "jobset.yaml").write_text(call(MANIFEST)[1])
