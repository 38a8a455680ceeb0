"""The text of a compiled program, as far as counting in it needs: instructions with the sizes of
what they make, and how often loops run."""

import math
import re
from typing import NamedTuple

BYTES = {"pred": 1, "bf16": 2, "f16": 2, "c64": 8, "c128": 16, "token": 0, "opaque": 0}
# In the first line of a module.
HEADS = ("num_partitions", "replica_count")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")


class Array(NamedTuple):
    dtype: str
    dims: tuple[int, ...]
    bytes: int
    on_chip: bool  # in a memory space of its own, not the device's main memory


class Instruction(NamedTuple):
    root: bool
    name: str
    arrays: tuple[Array, ...]  # of its type; more than one for a tuple
    opcode: str
    operands: tuple[str, ...]
    text: str  # what follows the operands

    @property
    def size(self) -> int:
        return sum(a.bytes for a in self.arrays if not a.on_chip)

    def called(self, key: str) -> str | None:
        found = re.search(rf"\b{key}=%?([\w.\-]+)", self.text)
        return found[1] if found else None


Computation = dict[str, Instruction]


def devices(text: str) -> int:
    """That run the program together."""
    heads = (re.search(rf"\b{name}=(\d+)", text[:100_000]) for name in HEADS)
    return math.prod(int(head[1]) for head in heads if head)


def read(text: str) -> tuple[str, dict[str, Computation]]:
    """(name of the entry, computations by name) of a module in XLA's text form."""
    computations: dict[str, Computation] = {}
    entry, current = "", {}
    for line in text.splitlines():
        if head := _HEAD.match(line):
            current = computations[head[2]] = {}
            entry = head[2] if head[1] else entry
        elif found := _LINE.match(line):
            instruction = _instruction(bool(found[1]), found[2], found[3])
            if instruction is not None:
                current[instruction.name] = instruction
    return entry, computations


def _instruction(root: bool, name: str, rest: str) -> Instruction | None:
    kind, after = _until(rest, " ")
    opcode, bracket, after = after.partition("(")
    if not bracket:
        return None
    inner, text = _until("(" + after, None)
    # A parameter's number and a constant's value stand where operands would.
    operands = tuple(re.findall(r"%([\w.\-]+)", inner))
    text = inner + text if opcode in ("parameter", "constant") else text
    return Instruction(root, name, _types(kind), opcode.strip(), operands, text)


def _until(text: str, end: str | None) -> tuple[str, str]:
    """The text up to `end` outside brackets, or to the bracket that closes the first; the rest."""
    depth = 0
    for at, letter in enumerate(text):
        if letter in "({[":
            depth += 1
        elif letter in ")}]":
            depth -= 1
            if end is None and depth == 0:
                return text[: at + 1], text[at + 1 :]
        elif depth == 0 and letter == end:
            return text[:at], text[at + 1 :]
    return text, ""


def _types(kind: str) -> tuple[Array, ...]:
    found = []
    for dtype, dims, layout in _ARRAY.findall(kind):
        size = tuple(int(d.lstrip("<=")) for d in dims.split(",") if d)
        space = re.search(r"S\((\d+)\)", layout)
        width = BYTES.get(dtype)
        if width is None:
            bits = re.search(r"\d+", dtype)
            width = int(bits[0]) / 8 if bits else 0
        found.append(Array(dtype, size, math.ceil(math.prod(size) * width), bool(space)))
    return tuple(found)


def arrays(name: str, of: Computation) -> tuple[Array, ...]:
    return of[name].arrays if name in of else ()


def trips(loop: Instruction, of: Computation, computations: dict[str, Computation]) -> int | None:
    """How often a loop runs, or at most where its scope says so (`rollout.tiles`); None: it is not
    in the program."""
    if most := re.search(r'\bat_most_(\d+)_turns/while"', loop.text):
        return int(most[1])
    if known := re.search(r'known_trip_count[^0-9}]*"?n"?\D*(\d+)', loop.text):
        return int(known[1])
    condition = computations.get(loop.called("condition") or "", {})
    body = computations.get(loop.called("body") or "", {})
    last = next((i for i in condition.values() if i.root), None)
    if last is None or last.opcode != "compare" or "direction=LT" not in last.text:
        return None
    limit, counter = _number(last.operands[1], condition), _element(last.operands[0], condition)
    if limit is None or counter is None:
        return None
    start = of.get(loop.operands[0])
    first = _number(start.operands[counter], of) if start and start.opcode == "tuple" else None
    end = next((i for i in body.values() if i.root), None)
    step = None
    if end is not None and end.opcode == "tuple":
        # A loop that XLA has unrolled counts by more than one.
        changed = body.get(end.operands[counter])
        if changed is not None and changed.opcode == "add":
            step = next((n for n in (_number(x, body) for x in changed.operands) if n), None)
    return -(-(limit - (first or 0)) // (step or 1))


def _number(name: str, of: Computation) -> int | None:
    """The value of a constant, through copies of it."""
    i = of.get(name)
    while i is not None and i.opcode in ("copy", "bitcast") and i.operands:
        i = of.get(i.operands[0])
    if i is None or i.opcode != "constant":
        return None
    number = re.match(r"\((-?\d+)\)", i.text)
    return int(number[1]) if number else None


def _element(name: str, of: Computation) -> int | None:
    """Which element of a tuple an instruction is, through copies of it."""
    i = of.get(name)
    while i is not None and i.opcode in ("copy", "bitcast") and i.operands:
        i = of.get(i.operands[0])
    found = re.search(r"index=(\d+)", i.text) if i and i.opcode == "get-tuple-element" else None
    return int(found[1]) if found else None


def branches(i: Instruction) -> list[str]:
    listed = re.search(r"branch_computations=\{([^}]*)\}", i.text)
    if listed:
        return re.findall(r"%?([\w.\-]+)", listed[1])
    named = (i.called(key) for key in ("true_computation", "false_computation"))
    return [name for name in named if name]
