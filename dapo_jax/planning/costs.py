"""What a compiled program does, counted in its text: operations, bytes and collectives.

XLA's own cost analysis counts the body of a loop once. Here every loop is counted as often as it
runs: layers are scanned, and so are chunks of the vocabulary and micro-batches.

Counted per device: operations of matrix products (`dot` and, as TPUs have them, `convolution`);
bytes that instructions read and write, what lies in on-chip memory left out; and collectives.
"""

import math
import re
from typing import NamedTuple

from dapo_jax.planning import exchanges, hlo
from dapo_jax.planning.exchanges import Exchange
from dapo_jax.planning.hlo import Computation, Instruction

# What is written into an array that stays where it is: which operand holds the new part.
IN_PLACE = {"dynamic-update-slice": 1, "scatter": 2}
# Bytes move elsewhere, or not at all.
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional",
    "call", "after-all", "partition-id", "replica-id", "optimization-barrier",
    "add-dependency", "domain", "async-start", "async-update", "async-done",
}  # fmt: skip
_PRODUCT = "__cublas"
_KERNELS = (_PRODUCT, "__cudnn", "tpu_custom_call", "__gpu$xla.gpu.triton", "mosaic_gpu")


class Costs(NamedTuple):
    """Of one call of a program, per device."""

    flops: float
    bytes_accessed: float
    exchanges: tuple[Exchange, ...]  # of which no two are alike
    uncounted_kernels: int  # calls of kernels that do not say what they do

    @property
    def wire_bytes(self) -> float:
        return sum(one.wire_bytes * one.calls for one in self.exchanges)


def count(text: str, unknown_trips: int = 1) -> Costs:
    """What one call of the program costs a device.

    Args:
        text: of the optimised module.
        unknown_trips: how often the outermost loops run whose count is not in the program: the
            micro-batches of an update, the tokens of a decode call. Such loops within them: once.
    """
    entry, computations = hlo.read(text)
    counter = Counter(computations, unknown_trips, hlo.devices(text))
    counter.count(entry, 1, inside=False)
    found = (one._replace(calls=calls) for one, calls in counter.exchanges.items())
    return Costs(counter.flops, counter.bytes, tuple(found), counter.uncounted)


class Counter:
    def __init__(self, computations: dict[str, Computation], unknown_trips: int, devices: int):
        self.computations, self.unknown_trips = computations, unknown_trips
        self.devices = devices
        self.flops = self.bytes = 0.0
        self.uncounted = 0
        self.exchanges: dict[Exchange, int] = {}  # and how often

    def count(self, name: str, times: int, *, inside: bool, moves: bool = True) -> None:
        """Adds a computation that runs so many times.

        Args:
            inside: within a loop whose count is not known.
            moves: whether its instructions move bytes; those of a fusion do not.
        """
        computation = self.computations.get(name, {})
        for i in computation.values():
            if i.opcode == "while":
                trips = hlo.trips(i, computation, self.computations)
                unknown = trips is None
                if trips is None:
                    trips = 1 if inside else self.unknown_trips
                self.count(i.called("body") or "", times * trips, inside=inside or unknown)
            elif i.opcode == "conditional":
                for branch in hlo.branches(i):  # which is taken is not known: all, an upper bound
                    self.count(branch, times, inside=inside)
            elif i.opcode in ("call", "async-start"):
                called = i.called("to_apply") or i.called("calls") or ""
                self.count(called, times, inside=inside, moves=moves)
            elif i.opcode == "fusion":
                called = i.called("calls") or ""
                self.count(called, times, inside=inside, moves=False)
                if moves:
                    self.bytes += times * self._fusion_bytes(i, computation, called)
            elif i.opcode == "custom-call":
                self._kernel(i, computation, times, moves)
            else:
                self.flops += times * _product(i, computation)
                # So TPUs write a reduce-scatter: a fusion of an all-reduce with a slice.
                scatters = name.startswith("all-reduce-scatter")
                one = exchanges.read(
                    i, computation, self.devices, scatters=scatters, in_open_loop=inside
                )
                if one is not None:
                    self.exchanges[one] = self.exchanges.get(one, 0) + times
                if moves and i.opcode not in _FREE and not i.opcode.endswith("-done"):
                    self.bytes += times * _bytes(i, computation)

    def _kernel(self, i: Instruction, of: Computation, times: int, moves: bool) -> None:
        """A library's product has its sizes; a kernel says itself what it costs, if it does."""
        target = re.search(r'custom_call_target="([^"]*)"', i.text)
        if target is None or not target[1].startswith(_KERNELS):
            return
        if target[1].startswith(_PRODUCT):
            self.flops += times * _library_product(i, of)
            self.bytes += times * _bytes(i, of) if moves else 0
            return
        said = {
            name: int(number)
            for name, number in re.findall(r'"(flops|bytes_accessed)":\s*"?(\d+)', i.text)
        }
        self.flops += times * said.get("flops", 0)
        self.uncounted += 0 if "flops" in said else times
        self.bytes += times * said.get("bytes_accessed", 0) if moves else 0

    def _fusion_bytes(self, i: Instruction, of: Computation, called: str) -> float:
        """A slice of an operand that is read counts as the slice, one written in place too."""
        total = sum(
            self._read(called, number)
            for number, name in enumerate(i.operands)
            if not any(a.on_chip for a in hlo.arrays(name, of))
        )
        body = self.computations.get(called, {})
        root = next((x for x in body.values() if x.root), None)
        if root is None:
            return total + i.size
        parts = root.operands if root.opcode == "tuple" else (root.name,)
        written = (self._written(name, body) for name, a in zip(parts, i.arrays) if not a.on_chip)
        return total + sum(written)

    def _read(self, called: str, number: int) -> float:
        """Bytes that a fusion reads of one of its operands."""
        body = self.computations.get(called, {})
        parameter = next(
            (
                x
                for x in body.values()
                if x.opcode == "parameter" and x.text.startswith(f"({number})")
            ),
            None,
        )
        return self._read_of(parameter, body) if parameter else 0.0

    def _read_of(self, of: Instruction, body: Computation) -> float:
        whole, total = sum(a.bytes for a in of.arrays), 0.0
        for user in (x for x in body.values() if of.name in x.operands):
            if user.opcode in ("dynamic-slice", "gather", "slice") and user.operands[0] == of.name:
                total += sum(a.bytes for a in user.arrays)
            elif user.opcode in IN_PLACE and user.operands[0] == of.name:
                continue
            elif user.opcode in ("bitcast", "reshape") or (
                not user.root and _same_place(user, of.name)
            ):
                total += self._read_of(user, body)
            elif user.opcode == "fusion":
                called = user.called("calls") or ""
                places = [n for n, name in enumerate(user.operands) if name == of.name]
                total += sum(self._read(called, n) for n in places)
            else:
                return whole
        return min(whole, total)

    def _written(self, name: str, body: Computation) -> float:
        """Bytes that a fusion writes of one of its results."""
        i = body.get(name)
        if i is None:
            return 0.0
        if i.opcode in IN_PLACE:
            return sum(a.bytes for a in hlo.arrays(i.operands[IN_PLACE[i.opcode]], body))
        if i.opcode in ("bitcast", "reshape"):
            return self._written(i.operands[0], body)
        if i.opcode == "fusion":
            inner = self.computations.get(i.called("calls") or "", {})
            root = next((x for x in inner.values() if x.root), None)
            if root is not None and root.opcode != "tuple":
                return self._written(root.name, inner)
        return sum(a.bytes for a in i.arrays)


def _same_place(i: Instruction, name: str) -> bool:
    """Whether a fusion within a fusion is one of its operands in another tiling, of which only what
    is asked for is read."""
    aliased = re.search(r"output_to_operand_aliasing=\{\{\}: \((\d+), \{\}\)\}", i.text)
    return i.opcode == "fusion" and aliased is not None and i.operands[int(aliased[1])] == name


def _bytes(i: Instruction, of: Computation) -> float:
    """Bytes that an instruction by itself reads and writes."""
    off_chip = lambda name: sum(a.bytes for a in hlo.arrays(name, of) if not a.on_chip)
    if i.opcode in ("dynamic-slice", "gather", "slice"):
        return 2 * i.size
    if i.opcode in IN_PLACE:
        return 2 * off_chip(i.operands[IN_PLACE[i.opcode]])
    if i.opcode == "copy-start":  # its type names what is written and what is read
        return sum(a.bytes for a in i.arrays[:2] if not a.on_chip)
    if i.opcode.endswith("-start"):
        return i.size
    return i.size + sum(map(off_chip, i.operands))


def _product(i: Instruction, of: Computation) -> float:
    """Operations of a matrix product, two for each multiplication; 0 for anything else."""
    if i.opcode == "dot":
        dims = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", i.text)
        left = hlo.arrays(i.operands[0], of)
        if not dims or not left:
            return 0.0
        contracted = math.prod(left[0].dims[int(d)] for d in dims[1].split(",") if d)
        return 2.0 * math.prod(i.arrays[0].dims) * contracted
    if i.opcode == "convolution":
        return _convolution(i, of)
    return 0.0


def _library_product(i: Instruction, of: Computation) -> float:
    """Operations of a product that a library does on GPUs."""
    dims = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', i.text)
    left = hlo.arrays(i.operands[0], of)
    if not dims or not left:
        return 0.0
    contracted = math.prod(left[0].dims[int(d)] for d in re.findall(r"\d+", dims[1]))
    return 2.0 * math.prod(i.arrays[0].dims) * contracted


def _convolution(i: Instruction, of: Computation) -> float:
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", i.text)
    left, right = (hlo.arrays(name, of) for name in i.operands[:2])
    if not labels or not left or not right:
        return 0.0
    lhs = dict(zip(labels[1], left[0].dims))
    rhs = dict(zip(labels[2], right[0].dims))
    out = dict(zip(labels[3], i.arrays[0].dims))
    spatial = [label for label in labels[3] if label.isdigit()]
    window = re.search(r"window=\{([^}]*)\}", i.text)
    options = dict(part.split("=", 1) for part in window[1].split()) if window else {}

    def option(name: str, default: str) -> list[str]:
        return options[name].split("x") if name in options else [default] * len(spatial)

    steps = zip(*(map(int, option(name, "1")) for name in ("stride", "lhs_dilate", "rhs_dilate")))
    pads = (int(pad.split("_")[0]) for pad in option("pad", "0_0"))
    total = 2.0 * out["b"] * out["f"] * rhs["i"]
    for label, step, pad in zip(spatial, steps, pads):
        total *= _taps(lhs[label], rhs[label], out[label], step, pad)
    return total


def _taps(lhs: int, rhs: int, out: int, step: tuple[int, int, int], pad: int) -> int:
    """Pairs of an output and a kernel position that meet an element and not padding.

    Args:
        step: stride of the outputs, and how far apart elements and kernel positions are.
    """
    stride, dilate, spread = step
    if rhs == 1 and stride == dilate == 1 and pad == 0:
        return out
    end = (lhs - 1) * dilate + 1
    places = (o * stride + k * spread - pad for o in range(out) for k in range(rhs))
    return sum(1 for place in places if 0 <= place < end and place % dilate == 0)
