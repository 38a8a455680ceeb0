"""Size of the project and of the path from a prompt to a gradient.

Command: python -m tests.studies.reach

The path is what one rollout step of a tiny run calls in its main thread. Left out are functions
inside functions, and what the gradient does not depend on: telemetry, metrics, the run directory,
evaluation. The update is traced inside the step, so that the model's functions count as well.
"""

import dataclasses
import inspect
import os
import re
import sys
import tempfile
import typing
from pathlib import Path

import jax

from dapo_jax import train_loop as train_module
from dapo_jax.config import Config
from dapo_jax.rollout import scheduler
from dapo_jax.training.learner import Learner
from tests.conftest import ROOT
from tests.support.helpers import tiny_config
from tests.test_layers import MODULES, ORDER, ours, package_of

ASIDE = re.compile(
    r"^(runs|evaluation)/|metrics|telemetry|progress|watchdog|compilations|profiling"
)
INNER = re.compile(r"<locals>|\.__")


def calls_of_a_step() -> set[tuple[str, str]]:
    """Returns (file, qualified name) of each function of ours that a rollout step calls."""
    found: set[tuple[str, str]] = set()
    step, here = train_module.TrainLoop.one_step, f"{ROOT}/dapo_jax/"

    def record(frame, event, argument):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(here) and "<" not in code.co_name:
            found.add((code.co_filename.removeprefix(here), code.co_qualname))

    def recorded(*arguments):
        sys.setprofile(record)
        try:
            return step(*arguments)
        finally:
            sys.setprofile(None)

    train_module.TrainLoop.one_step = recorded
    Learner.compile = lambda *_: None  # compiled at the start, the update would be traced there
    scorer = f"{ROOT / 'tests' / 'support' / 'scorers.py'}:even"
    config = tiny_config(pretrain__num_steps=2, train__num_steps=1, reward__scorer=scorer)
    with tempfile.TemporaryDirectory() as place:
        os.environ["XDG_CACHE_HOME"] = place
        assert train_module.train(config, Path(place) / "run") is None
    return found


def num_fields(record: type) -> int:
    """Returns the number of leaf fields of a config; fields of a mapping's records count once."""
    total = 0
    for name, hint in typing.get_type_hints(record).items():
        parts = (hint, *typing.get_args(hint))
        inner = next((part for part in parts if dataclasses.is_dataclass(part)), None)
        if name != "heldout":  # the records of data.train
            total += num_fields(inner) if isinstance(inner, type) else 1
    return total


def lines(*folders: str) -> int:
    """Returns the number of lines of the files in these folders of the project."""
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    texts = [path for path in files if path.suffix in {".py", ".sh", ".yaml"}]
    return sum(len(path.read_text().splitlines()) for path in texts)


def main() -> None:
    one_step = len(inspect.getsourcelines(train_module.TrainLoop.one_step)[0])
    found = calls_of_a_step()
    path = {
        call for call in found if not ASIDE.search("/".join(call)) and not INNER.search(call[1])
    }
    public = {call for call in path if not call[1].rpartition(".")[2].startswith("_")}
    packages = {
        (package_of(name), package_of(other)) for name in MODULES if name for other in ours(name)
    }
    edges = {(a, b) for a, b in packages if a != b}
    skips = sum(
        line.rstrip().endswith("# fmt: skip")
        for folder in ("dapo_jax", "launch", "configs", "tests")
        for path in (ROOT / folder).rglob("*.py")
        for line in path.read_text().splitlines()
    )
    rows = {
        "files on the path from prompt to gradient": len({file for file, _ in path}),
        "functions on it, public ones": f"{len(path)}, {len(public)}",
        "lines of one_step": one_step,
        "parameters of generate": len(inspect.signature(scheduler.generate).parameters),
        "packages and top modules, edges between them": f"{len(ORDER)}, {len(edges)}",
        "lines of dapo_jax, launch, configs": lines("dapo_jax", "launch", "configs"),
        "lines of tests": lines("tests"),
        "config fields": num_fields(Config),
        "fmt: skip": skips,
        "lines of README.md": len((ROOT / "README.md").read_text().splitlines()),
    }
    for name, value in rows.items():
        print(f"{name:48}{value}")
    if "--list" in sys.argv:
        print(*(f"{file}: {name}" for file, name in sorted(path)), sep="\n")


if __name__ == "__main__":
    with jax.numpy_dtype_promotion("standard"):
        main()
