"""One run in several processes, for the tests."""

import concurrent.futures
import time

import jax
import numpy as np
import pytest

from tests.conftest import ROOT
from tests.runs import finish, metrics_of, params_at, rollouts_of, start_all

RUN = {
    "train__num_steps": 3,
    "evaluation__every_steps": 2,
    "checkpoint__every_steps": 1,
    "checkpoint__keep_newest": 20,
    "data__train__sums__num_problems": 40,
    "mesh__data": 2,
    "mesh__fsdp": 2,
    # A model that knows nothing, and a scorer that finds something right in what it writes.
    "pretrain__num_steps": 2,
    "pretrain__warmup_steps": 1,
    "reward__scorer": f"{ROOT / 'tests' / 'scorers.py'}:even",
}
DEVICES = 4


def finish_all(started):
    """(exit status, output, errors) of each process."""
    with concurrent.futures.ThreadPoolExecutor(len(started)) as threads:
        return list(threads.map(finish, started))


def said(text):
    """Without what the library of collectives says of its connections, in pieces."""
    return [line for line in text.splitlines() if "peer ranks" not in line and line.strip()]


def run_all(workdir, home, number, **settings):
    ended = finish_all(
        start_all(workdir, home, processes=number, devices=DEVICES // number, **settings)
    )
    for code, out, err in ended:
        assert code == 0 and err == "", (out, err)
    return [said(out) for _, out, _ in ended]


def assert_same_run(one, other):
    """The same rollouts to the last bit, the same parameters to 1e-5."""
    assert rollouts_of(one) == rollouts_of(other)
    for ours, theirs in zip(metrics_of(one), metrics_of(other), strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            exact = not name.startswith(("policy/", "optimizer/", "rollout/log_prob"))
            assert value == (theirs[name] if exact else pytest.approx(theirs[name], abs=1e-4)), name
    a, b = params_at(one, 3, **RUN), params_at(other, 3, **RUN)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), a, b)


def begin(workdir, home, steps, **settings):
    """A run in two processes that has taken so many steps."""
    started = start_all(workdir, home, processes=2, devices=2, **settings)
    lines = workdir / "metrics.jsonl"
    limit = time.monotonic() + 240
    while not (lines.exists() and len(lines.read_text().splitlines()) > steps):
        for process in started:
            assert process.poll() is None, finish(process)
        assert time.monotonic() < limit
        time.sleep(0.01)
    return started
