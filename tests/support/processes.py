"""Whole runs in several processes, and a key-value store in memory."""

import concurrent.futures
import time

import jax
import numpy as np
import pytest

from tests.conftest import ROOT
from tests.support.runs import finish, metrics_of, params_at, rollouts_of, start_all

RUN = {
    "train__num_steps": 3,
    "evaluation__every_steps": 2,
    "checkpoint__every_steps": 1,
    "checkpoint__keep_newest": 20,
    "data__train__sums__num_problems": 40,
    "mesh__data": 2,
    "mesh__fsdp": 2,
    "model__num_layers": 1,  # each process compiles its own programs
    # An untrained model, and a scorer that finds something right in what it writes.
    "pretrain__num_steps": 2,
    "reward__scorer": f"{ROOT / 'tests' / 'support' / 'scorers.py'}:even",
}
DEVICES = 4

# Two processes whose devices are numbered the other way round than jax.distributed numbers them, as
# on some TPU slices: the backend is created with another id.
PERMUTED = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})

def permute():
    import jax
    from jax._src import distributed
    initialize = jax.distributed.initialize
    def permuted(*arguments, **named):
        initialize(*arguments, **named)
        state = distributed.global_state
        id, state.process_id = state.process_id, state.num_processes - 1 - state.process_id
        assert jax.process_index() == state.process_id != id
        state.process_id = id
    jax.distributed.initialize = permuted
"""


class Store:
    """The key-value store of `jax.distributed`, in memory: a place is a directory, not a key."""

    def __init__(self):
        self.values = {}

    def key_value_set(self, key, value, allow_overwrite=False):
        assert allow_overwrite or key not in self.values
        self.values[key] = value

    def key_value_dir_get(self, place):
        return [(k, v) for k, v in list(self.values.items()) if k.startswith(f"{place}/")]

    def key_value_increment(self, key, by):
        self.values[key] = str(int(self.values.get(key, 0)) + by)
        return int(self.values[key])

    def blocking_key_value_get(self, key, timeout_in_ms):
        if key not in self.values:
            raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {timeout_in_ms} ms")
        return self.values[key]

    def key_value_delete(self, place):
        self.values.pop(place, None)
        for key, _ in self.key_value_dir_get(place):
            del self.values[key]


def finish_all(started):
    """(exit status, output, errors) of each process."""
    with concurrent.futures.ThreadPoolExecutor(len(started)) as threads:
        return list(threads.map(finish, started))


def lines_of(text):
    """Lines of an output, without those of gloo about its connections, which come in pieces."""
    return [line for line in text.splitlines() if "peer ranks" not in line and line.strip()]


def run_all(workdir, home, number, **settings):
    """Runs several processes to their end; returns the lines that each printed."""
    devices = DEVICES // number
    ended = finish_all(start_all(workdir, home, processes=number, devices=devices, **settings))
    for code, out, err in ended:
        assert code == 0 and err == "", (out, err)
    return [lines_of(out) for _, out, _ in ended]


def begin(workdir, home, steps, **settings):
    """Starts a run in two processes; returns them after so many steps."""
    started = start_all(workdir, home, processes=2, devices=2, **settings)
    lines = workdir / "metrics.jsonl"
    limit = time.monotonic() + 240
    while not (lines.exists() and len(lines.read_text().splitlines()) > steps):
        for process in started:
            assert process.poll() is None, finish(process)
        assert time.monotonic() < limit
        time.sleep(0.01)
    return started


def assert_same_run(one, other):
    """The same responses to the last bit, the same parameters to 1e-5."""
    for name in ("rollouts", "heldout"):
        assert rollouts_of(one, name) == rollouts_of(other, name)
    for ours, theirs in zip(metrics_of(one), metrics_of(other), strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            exact = not name.startswith(("policy/", "optimizer/", "rollout/log_prob"))
            assert value == (theirs[name] if exact else pytest.approx(theirs[name], abs=1e-4)), name
    a, b = params_at(one, 3, **RUN), params_at(other, 3, **RUN)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), a, b)
