"""The findings of a check, and the file that keeps them."""

import json
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from dapo_jax.types import UserError
from dapo_jax.utils.files import write_atomically

Verdict = Literal["ok", "slow", "wrong", "not run"]
KEPT = ("ok", "slow")  # verdicts of checks that are not run again
FILE = "check.json"


class Result(NamedTuple):
    """The result of one check."""

    verdict: Verdict
    reason: str  # one line
    figures: Mapping[str, Any] = types.MappingProxyType({})


Check = Callable[[], Result]


class Finding(NamedTuple):
    """A result, and where it is from."""

    part: str
    name: str
    verdict: Verdict
    reason: str
    figures: dict[str, Any]
    seconds: float


class Store:
    """The file check.json of a directory: the machine, the checks of each part, the findings.

    The processes of a check write it one after another.
    """

    def __init__(self, directory: Path):
        self.file = directory / FILE
        self.machine: dict[str, Any] | None = None
        self.planned: dict[str, list[str]] = {}  # names of the checks by part
        self.findings: list[Finding] = []
        self.read()

    def read(self) -> None:
        """Reads what other processes have written.

        Raises:
            UserError: the file is not one of a check.
        """
        if not self.file.exists():
            return
        try:
            content = json.loads(self.file.read_text())
            self.machine, self.planned = content["machine"], content["planned"]
            self.findings = [Finding(**finding) for finding in content["findings"]]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{self.file} cannot be read ({error}). Choose another --output."
            ) from error

    def begin(self, part: str, names: Iterable[str], machine: Mapping[str, Any]) -> None:
        """Notes what a part is going to check.

        Raises:
            UserError: the findings in the file are of another machine or other versions.
        """
        if self.machine is not None and self.machine != machine:
            names = dict.fromkeys([*self.machine, *machine])
            other = [name for name in names if machine.get(name) != self.machine.get(name)]
            raise UserError(
                f"{self.file} is of another machine or other versions ({', '.join(other)}). "
                "Choose another --output."
            )
        self.machine = dict(machine)
        self.planned[part] = list(names)
        self._write()

    def forget(self, part: str) -> None:
        """Removes the findings of a part that are to be checked again: wrong or not run."""
        keep = lambda finding: finding.part != part or finding.verdict in KEPT
        if not all(map(keep, self.findings)):
            self.findings = list(filter(keep, self.findings))
            self._write()

    def add(self, finding: Finding) -> None:
        self.findings.append(finding)
        self._write()

    def find(self, part: str, name: str) -> Finding | None:
        """Returns the finding of a check, if it has one."""
        same = lambda f: (f.part, f.name) == (part, name)
        return next(filter(same, self.findings), None)

    def figure(self, part: str, name: str, figure: str) -> float | None:
        """Returns a figure of a finding; None: it is not known."""
        found = self.find(part, name)
        return None if found is None else found.figures.get(figure)

    def _write(self) -> None:
        content = {
            "machine": self.machine,
            "planned": self.planned,
            "findings": [finding._asdict() for finding in self.findings],
        }
        write_atomically(self.file, json.dumps(content, indent=1) + "\n")
