"""What devices exchange in a compiled program, read from its text."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?[\w.-]+ = (.+?) ([a-z][\w-]*)\(")
CALLED = re.compile(r"(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.-]+)")


class Collective(NamedTuple):
    """One exchange, with all that are like it."""

    kind: str  # of KINDS
    axes: tuple[str, ...]  # mesh axes whose devices take part
    shape: str  # what each device has afterwards, such as "f32[32,16]"
    bytes: int  # of that
    times: int  # in one run, loops of unknown length gone through once
    # Whether it is in a loop of unknown length: in an update, that over micro-batches.
    in_open_loop: bool


def collectives(hlo: str, axis_sizes: dict[str, int]) -> list[Collective]:
    """Every kind of exchange in a program, the most bytes first.

    Args:
        hlo: `compiled.as_text()` of a program on a mesh: shapes in it are those of one device.
        axis_sizes: of the mesh, in its order.
    """
    bodies, entry = _computations(hlo)
    found: Counter[Collective] = Counter()

    def visit(name: str, times: int, in_open_loop: bool) -> None:
        for line in bodies.get(name, ()):
            match = INSTRUCTION.match(line)
            if match is None:
                continue
            shape, operation = match.groups()
            kind = operation.removesuffix("-start")
            if kind in KINDS:
                arrays = re.findall(r"\w+\[[\d,]*\]", shape)
                if kind in ("all-gather", "collective-permute") and kind != operation:
                    arrays = arrays[1:2]  # the first is what went in
                size = sum(map(_bytes, arrays))
                axes = _axes(line, axis_sizes)
                if axes:  # else each device is a group by itself
                    one = Collective(kind, axes, ", ".join(arrays), size, 1, in_open_loop)
                    found[one] += times
            known = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
            open_loop = operation == "while" and known is None
            inner = times * (int(known[1]) if known else 1)
            for called in _called(line):
                visit(called, inner, in_open_loop or open_loop)

    visit(entry, 1, False)
    each = [one._replace(times=times) for one, times in found.items()]
    return sorted(each, key=lambda one: (-one.bytes * one.times, one))


def described(found: list[Collective]) -> str:
    """The exchanges as the rows of a Markdown table."""
    lines = [
        "| exchange | over | what each device then has | bytes | times |",
        "|---|---|---|---|---|",
    ]
    for one in found:
        often = f"{one.times}" + (" per micro-batch" if one.in_open_loop else "")
        axes = " x ".join(one.axes)
        lines.append(f"| {one.kind} | {axes} | {one.shape} | {one.bytes:,} | {often} |")
    return "\n".join(lines)


def arrays(hlo: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(dtype, shape) of every array that a program has on a device, repetitions included."""
    for dtype, sizes in re.findall(r"\b([a-z]+\d+|pred)\[([\d,]*)\]", hlo):
        yield dtype, tuple(int(size) for size in sizes.split(",") if size)


def _computations(hlo: str) -> tuple[dict[str, list[str]], str]:
    """(lines of each computation by its name, name of the one that a run begins with)."""
    bodies: dict[str, list[str]] = {}
    name = entry = ""
    for line in hlo.splitlines():
        head = re.match(r"^(ENTRY )?%?([\w.-]+) \(.*\{\s*$", line)
        if head:
            name = head[2]
            bodies[name] = []
            entry = name if head[1] else entry
        elif name:
            bodies[name].append(line)
    return bodies, entry


def _called(line: str) -> Iterator[str]:
    yield from CALLED.findall(line)
    for names in re.findall(r"branch_computations=\{([^}]*)\}", line):
        yield from (name.strip().lstrip("%") for name in names.split(","))


def _bytes(array: str) -> int:
    dtype, sizes = array.rstrip("]").split("[")
    bits = re.search(r"\d+", dtype)
    count = math.prod(int(size) for size in sizes.split(",") if size)
    return count * (int(bits[0]) if bits else 8) // 8


def _axes(line: str, axis_sizes: dict[str, int]) -> tuple[str, ...]:
    """The mesh axes along which the devices of a group differ."""
    shape = tuple(axis_sizes.values())
    differ = {
        axis
        for group in _groups(line, math.prod(shape))
        for axis, places in zip(axis_sizes, np.unravel_index(group, shape), strict=True)
        if len(set(places.tolist())) > 1
    }
    return tuple(axis for axis in axis_sizes if axis in differ)


def _groups(line: str, devices: int) -> list[list[int]]:
    """The devices that exchange with each other, in each of the ways XLA writes them down."""
    numbers = lambda text: [int(n) for n in text.split(",")]

    def ids(sizes: str, order: str | None) -> np.ndarray:
        every = np.arange(devices).reshape(numbers(sizes))
        return every.transpose(numbers(order)) if order else every

    # mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}: along a of a mesh laid over the ids.
    mesh = re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?"
        r" \{([^}]*)\}",
        line,
    )
    if mesh:
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        laid = ids(mesh[2] or str(devices), mesh[3]).reshape([int(n) for n in sizes.values()])
        along = [list(sizes).index(name) for name in re.findall(r"'(\w+)'", mesh[4])]
        members = math.prod(laid.shape[axis] for axis in along)
        return np.moveaxis(laid, along, range(-len(along), 0)).reshape(-1, members).tolist()
    # [2,4]<=[4,2]T(1,0): 2 groups of 4, of the ids laid out so and transposed.
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    if iota:
        return ids(iota[2], iota[3]).reshape(numbers(iota[1])).tolist()
    listed = re.search(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}", line)
    groups = [numbers(g) for g in re.findall(r"\{([\d,]+)\}", listed[1])] if listed else []
    return groups or [list(range(devices))]  # none given: all devices
