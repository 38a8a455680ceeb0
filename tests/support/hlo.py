"""What a compiled program's text says of its arrays and of the exchange between devices."""

import re
from typing import NamedTuple

import numpy as np

KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
COLLECTIVE = re.compile(rf"= (.*?) ({KINDS})(?:-start)?\((.*)")


class Exchange(NamedTuple):
    """A collective of a program."""

    kind: str
    arrays: tuple  # (dtype, shape) of what a device has afterwards, numbers and booleans too
    options: str  # its operands, and the devices that exchange

    def within(self, size):
        """Whether only devices of one block of so many neighbours in the mesh exchange."""
        groups = _groups(self.options)
        return bool(groups) and all(len({i // size for i in group}) == 1 for group in groups)

    @property
    def named(self):
        """For people, and for JSON."""
        return self.kind, *(f"{dtype}{list(shape)}" for dtype, shape in self.arrays)


def arrays(text):
    """(dtype, shape) of each array that a program's text names."""
    for dtype, sizes in re.findall(r"\b([a-z]+\d+)\[([\d,]+)\]", text):
        yield dtype, tuple(int(size) for size in sizes.split(","))


def collectives(text):
    """(kind, dtype, shape) of each array that devices have after a collective of the program."""
    return {
        (kind, *array) for result, kind, _ in COLLECTIVE.findall(text) for array in arrays(result)
    }


def exchanges(text):
    """The collectives of a program, one `Exchange` each."""
    return [
        Exchange(kind, tuple(_results(result)), rest)
        for result, kind, rest in COLLECTIVE.findall(text)
    ]


def exchanges_in_conditions(text):
    """The collectives that decide whether a loop goes on: in its condition, or what that calls."""
    blocks = re.findall(r"^(?:ENTRY )?%(\S+) \([^\n]*\{\n(.*?)^\}", text, re.M | re.S)
    blocks = dict(blocks)
    found, wanted = set(), set(re.findall(r"condition=%([\w.-]+)", text))
    assert wanted <= blocks.keys(), "the text is parsed"
    while wanted:
        found |= wanted
        named = re.findall(r"%([\w.-]+)", "".join(blocks[name] for name in wanted))
        wanted = (set(named) & blocks.keys()) - found
    return [one for name in found for one in exchanges(blocks[name])]


def _results(text):
    for dtype, sizes in re.findall(r"\b(pred|[a-z]+\d+)\[([\d,]*)\]", text):
        if (dtype, sizes) != ("u32", ""):  # of a collective that is awaited elsewhere: no data
            yield dtype, tuple(int(size) for size in sizes.split(",") if size)


def _groups(text):
    """The groups of devices that exchange; none: all devices do."""
    listed = re.search(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})?\}", text)
    if listed:
        groups = re.findall(r"\{([\d,]+)\}", listed[1] or "")
        return tuple(tuple(map(int, group.split(","))) for group in groups)
    # Places 0 to n - 1 in this shape, its axes in another order, cut into groups.
    cut = re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    assert cut, f"the groups of {text[:300]}"
    shape = [int(size) for size in cut[3].split(",")]
    axes = [int(axis) for axis in cut[4].split(",")] if cut[4] else None
    ids = np.arange(np.prod(shape)).reshape(shape).transpose(axes)
    return tuple(map(tuple, ids.reshape(int(cut[1]), int(cut[2])).tolist()))


def copies(text):
    """(dtype, shape) of each array that a copy of the program makes."""
    results = re.findall(r"= (.*?) (?:copy|copy-start|transpose)\(", text)
    return {array for result in results for array in arrays(result)}
