"""Compares our functions with the reference's own numbers.

Command: python -m tests.conformance

verl_0.9.1.npz holds inputs and outputs of the functions of verl 0.9.1, called on random inputs
(seed 0, float64) with torch 2.13.0 on CPU. Prints one line per family, the cases where we differ
on purpose, the cases that are not ours, and as a last line how many were compared. Exits 0 only if
every compared case agrees to 1e-5 in value and gradient.
"""

import collections
import re
import sys

import jax
import numpy as np

from tests.conformance import host, losses
from tests.conformance.cases import TOLERANCE, Case, Differs, load, relative_error

FAMILIES = losses.FAMILIES | host.FAMILIES

NOT_OURS = {
    "balance": "a workload balancer of torch ranks",
    "kl/full": "the reference raises",
}


def family_of(case: Case) -> str:
    """The key of FAMILIES or NOT_OURS."""
    if case.id in NOT_OURS:
        return case.id
    first, _, rest = case.id.partition("/")
    second = rest.split("/")[0]
    if first in ("policy", "policy_f32"):
        return f"{first}/{second}"
    if first == "adv":
        # Without what the name says of its parameters.
        second = re.sub(
            r"_(vectorized_)?(std|nostd|std_f32|tail|notail|eq|w|g[\d.]+.*)$", "", second
        )
        return f"adv/{second}"
    return first


def main() -> int:
    """Prints the comparison; returns 0 if every compared case agrees."""
    worst: dict[str, float] = collections.defaultdict(float)
    counts: collections.Counter[str] = collections.Counter()
    not_ours: collections.Counter[str] = collections.Counter()
    failed, differing, notes = [], [], collections.Counter()
    for case in load():
        family = family_of(case)
        if family in NOT_OURS:
            not_ours[family] += 1
            continue
        result = FAMILIES[family](case)
        assert result is not None, case.id
        if isinstance(result, Differs):
            differing.append((case.id, result))
            continue
        error = max(relative_error(*pair) for pair in result.pairs)
        counts[family] += 1
        worst[family] = max(worst[family], error)
        if not error <= TOLERANCE:
            failed.append((case.id, error))
        if result.note:
            notes[f"{family}: {result.note}"] += 1
    for family in sorted(counts):
        print(
            f"{family:32s} {counts[family]:4d} compared, worst relative error {worst[family]:.1e}"
        )
    for note, count in sorted(notes.items()):
        print(f"left out on purpose, in {count} cases of {note}")
    for name, result in differing:
        ours, theirs = (float(np.max(np.abs(x))) for x in (result.ours, result.theirs))
        print(f"differs on purpose: {name}: {ours:.6g} here, {theirs:.6g} there: {result.reason}")
    for family, count in sorted(not_ours.items()):
        print(f"not applicable: {family} ({count}): {NOT_OURS[family]}")
    for name, error in failed:
        print(f"FAILED: {name}: relative error {error:.1e}")
    print(
        f"conformance: {counts.total()} compared, {not_ours.total()} not applicable, "
        f"{len(differing)} different on purpose, "
        f"worst relative error {max(worst.values(), default=0.0):.1e}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    with jax.enable_x64(True):
        sys.exit(main())
