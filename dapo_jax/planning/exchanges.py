"""What devices exchange in a compiled program: how much, and along which axes of their mesh."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from dapo_jax.planning import hlo
from dapo_jax.planning.hlo import Array, Computation, Instruction

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


class Exchange(NamedTuple):
    """Collectives that are alike, per device."""

    kind: str  # of KINDS
    groups: tuple[tuple[int, ...], ...]  # devices that exchange with each other
    arrays: tuple[Array, ...]  # what a device has after one
    bytes: int  # of those, or of what a device had before where that is more
    wire_bytes: float  # that a device must receive at least
    in_open_loop: bool  # in a loop of unknown length: in an update, that over micro-batches
    calls: int = 1

    @property
    def shapes(self) -> str:
        """Such as `f32[32,16], bf16[8]`."""
        sizes = lambda array: ",".join(map(str, array.dims))
        return ", ".join(f"{array.dtype}[{sizes(array)}]" for array in self.arrays)

    def axes(self, axis_sizes: Mapping[str, int]) -> tuple[str, ...]:
        """The axes of a mesh, given in its order, along which the devices of a group differ."""
        shape = tuple(axis_sizes.values())
        differ = {
            axis
            for group in self.groups
            for axis, places in zip(axis_sizes, np.unravel_index(group, shape), strict=True)
            if len(set(places.tolist())) > 1
        }
        return tuple(axis for axis in axis_sizes if axis in differ)


def read(
    i: Instruction, of: Computation, devices: int, *, scatters: bool, in_open_loop: bool
) -> Exchange | None:
    """The exchange that an instruction is; None: it is none, or each device is a group by itself.

    Args:
        of: the computation that it is in.
        devices: of the program.
        scatters: whether an all-reduce is cut up at once.
    """
    kind = i.opcode.removesuffix("-start")
    if kind not in KINDS:
        return None
    groups = _groups(i.text, devices)
    members = max(map(len, groups))
    if members < 2:
        return None
    left = i.arrays
    if kind in ("all-gather", "collective-permute") and kind != i.opcode:
        # The type of the beginning of one also names what went in, before what comes out.
        inputs = max(1, len(i.operands))
        left = left[inputs : 2 * inputs]
    taken = sum(a.bytes for name in i.operands for a in hlo.arrays(name, of))
    size = max(taken, sum(a.bytes for a in left))
    kind = "reduce-scatter" if scatters and kind == "all-reduce" else kind
    share = {"all-reduce": 2 * (members - 1) / members, "collective-permute": 1.0}
    wire = size * share.get(kind, (members - 1) / members)
    return Exchange(kind, groups, left, size, wire, in_open_loop)


def described(found: Iterable[Exchange], axis_sizes: Mapping[str, int]) -> str:
    """The rows of a Markdown table, the most bytes first."""
    lines = [
        "| exchange | over | what each device then has | bytes | times |",
        "|---|---|---|---|---|",
    ]
    for one in sorted(found, key=lambda one: -one.bytes * one.calls):
        often = f"{one.calls:,}" + (" per micro-batch" if one.in_open_loop else "")
        axes = " x ".join(one.axes(axis_sizes))
        lines.append(f"| {one.kind} | {axes} | {one.shapes} | {one.bytes:,} | {often} |")
    return "\n".join(lines)


def _groups(text: str, devices: int) -> tuple[tuple[int, ...], ...]:
    """The devices that exchange with each other, in each of the ways XLA writes them down."""
    numbers = lambda text: [int(n) for n in text.split(",")]
    tuples = lambda rows: tuple(tuple(row) for row in rows)

    def ids(sizes: str, order: str | None) -> np.ndarray:
        every = np.arange(math.prod(numbers(sizes))).reshape(numbers(sizes))
        return every.transpose(numbers(order)) if order else every

    # mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}: along a of a mesh laid over the ids.
    mesh = re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?"
        r" \{([^}]*)\}",
        text,
    )
    if mesh:
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        laid = ids(mesh[2] or str(math.prod(sizes.values())), mesh[3])
        laid = laid.reshape(list(sizes.values()))
        along = [list(sizes).index(name) for name in re.findall(r"'(\w+)'", mesh[4])]
        members = math.prod(laid.shape[axis] for axis in along)
        rows = np.moveaxis(laid, along, range(-len(along), 0)).reshape(-1, members)
        return tuples(rows.tolist())
    # [2,4]<=[4,2]T(1,0): 2 groups of 4, of the ids laid out so and transposed.
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if iota:
        return tuples(ids(iota[2], iota[3]).reshape(numbers(iota[1])).tolist())
    listed = re.search(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}", text)
    groups = [numbers(g) for g in re.findall(r"\{([\d,]+)\}", listed[1])] if listed else []
    return tuples(groups) or (tuple(range(devices)),)  # none given: all devices
