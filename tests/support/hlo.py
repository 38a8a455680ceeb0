"""What a compiled program's text says of its arrays and of the exchange between devices."""

import re


def arrays(text):
    """(dtype, shape) of each array that a program's text names."""
    for dtype, sizes in re.findall(r"\b([a-z]+\d+)\[([\d,]+)\]", text):
        yield dtype, tuple(int(size) for size in sizes.split(","))


def collectives(text):
    """(kind, dtype, shape) of each array that devices have after a collective of the program."""
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    return {
        (kind, *array)
        for result, kind in re.findall(rf"= (.*?) ({kinds})(?:-start)?\(", text)
        for array in arrays(result)
    }


def copies(text):
    """(dtype, shape) of each array that a copy of the program makes."""
    results = re.findall(r"= (.*?) (?:copy|copy-start|transpose)\(", text)
    return {array for result in results for array in arrays(result)}
