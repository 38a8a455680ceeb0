"""Several processes, one run: the same batches, the same parameters; and what happens when one is
told to stop, dies, or never comes."""

import concurrent.futures
import shutil
import signal
import socket
import time

import jax
import numpy as np
import pytest

from dapo_jax import processes
from dapo_jax.dynamic_sampling import Stream
from dapo_jax.processes import START_AGAIN, Board, Processes
from dapo_jax.types import Problem, UserError
from tests.conftest import ROOT
from tests.helpers import make_group, tiny_config
from tests.runs import finish, metrics_of, params_at, rollouts_of, run, start, start_all

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
LONG = {"train__num_steps": 1000}


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


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def one(tmp_path_factory, home):
    """The run in one process."""
    workdir = tmp_path_factory.mktemp("one") / "run"
    run(workdir, home, devices=DEVICES, **RUN)
    return workdir


@pytest.fixture(scope="module")
def two(one, tmp_path_factory, home):
    """The run in two processes, and what each said."""
    workdir = tmp_path_factory.mktemp("two") / "run"
    return workdir, run_all(workdir, home, 2, **RUN)


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


def test_two_processes_train_as_one(one, two):
    workdir, (first, second) = two
    assert_same_run(one, workdir)
    assert sum(group["sampling/prompts_kept"] for group in metrics_of(workdir)[1:]) == 12
    assert "2 processes on 1 host, 4 devices" in first and any("3/3" in line for line in first)
    assert second == [], "one process shows and writes"


@pytest.mark.slow
def test_four_processes_train_as_one(one, home, tmp_path):
    run_all(tmp_path / "run", home, 4, **RUN)
    assert_same_run(one, tmp_path / "run")


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


@pytest.mark.slow
def test_a_signal_to_one_stops_all_and_the_run_goes_on_bit_for_bit(two, home, tmp_path):
    workdir = tmp_path / "run"
    started = begin(workdir, home, 1, **RUN)
    started[1].send_signal(signal.SIGTERM)
    ended = finish_all(started)
    assert [code for code, *_ in ended] == [128 + signal.SIGTERM] * 2, ended
    assert all(err == "" for *_, err in ended)
    assert "stopped after step" in said(ended[0][1])[-1]
    assert len(metrics_of(workdir)) < 4
    first, _ = run_all(workdir, home, 2, **RUN)
    assert any(line.startswith("resuming after step") for line in first)
    assert metrics_of(workdir) == metrics_of(two[0]) and rollouts_of(workdir) == rollouts_of(two[0])
    ours, theirs = (params_at(place, 3, **RUN) for place in (workdir, two[0]))
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y), ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "lost, number", [(1, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGSTOP)]
)
def test_a_process_that_is_lost_ends_the_others_and_the_run_goes_on(
    one, home, tmp_path, lost, number
):
    """In another number of processes, to the same parameters but for rounding."""
    workdir = tmp_path / "run"
    started = begin(workdir, home, 1, **RUN | LONG)
    started[lost].send_signal(number)
    begun = time.monotonic()
    code, _, err = finish(started[1 - lost])
    assert time.monotonic() - begun < 60
    started[lost].kill()
    finish(started[lost])
    # Where the store is lost, JAX may be faster than we are, and aborts.
    assert code == START_AGAIN or (lost == 0 and code == -signal.SIGABRT), err
    if code == START_AGAIN:
        assert f"process {lost}" in err and "goes on from the last checkpoint" in err
    assert any((workdir / "checkpoints").iterdir())
    if lost == 1 and number == signal.SIGKILL:
        # As far as the run that was not disturbed.
        for step in (workdir / "checkpoints").iterdir():
            if step.name.isdigit() and int(step.name) > 2:
                shutil.rmtree(step)
        run(workdir, home, devices=DEVICES, **RUN)
        assert_same_run(one, workdir)


def test_who_never_comes_is_not_waited_for(home, tmp_path):
    process = start(
        tmp_path / "run",
        home,
        flags=(
            "--coordinator_address=127.0.0.1:9", "--num_processes=2", "--process_id=1",
            "--coordinator_timeout=2",
        ),
    )  # fmt: skip
    code, _, err = finish(process)
    assert code == START_AGAIN
    assert "not all processes were there within 2 s" in err and "127.0.0.1:9" in err


def test_all_processes_see_one_directory(home, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = [
        start(
            tmp_path / f"of_{i}", home, flags=(
                f"--coordinator_address=127.0.0.1:{port}", "--num_processes=2", f"--process_id={i}"
            ),
        )
        for i in range(2)
    ]  # fmt: skip
    for code, _, err in finish_all(started):
        assert code == 2 and "is not the same directory for all processes: process 1 on" in err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("a:1", None, 0), "go together; got a:1, None, 0"),
        ((None, 2, 0), "go together"),
        (("a:1", 2, 2), "--process_id must be 0 or more and below --num_processes"),
    ],
)
def test_flags_that_do_not_fit(arguments, message):
    with pytest.raises(UserError, match=message):
        processes.start(*arguments, 1)


class Store:
    """The store of keys and values, in memory."""

    def __init__(self):
        self.values = {}

    def key_value_set(self, key, value, allow_overwrite=False):
        assert allow_overwrite or key not in self.values
        self.values[key] = value

    def key_value_dir_get(self, place):
        return [(k, v) for k, v in self.values.items() if k.startswith(f"{place}/") or k == place]

    def key_value_increment(self, key, by):
        self.values[key] = str(int(self.values.get(key, 0)) + by)
        return int(self.values[key])

    def key_value_delete(self, place):
        for key, _ in self.key_value_dir_get(place):
            del self.values[key]


@pytest.mark.parametrize("number", [1, 2, 5])
@pytest.mark.parametrize("seed", range(4))
def test_who_draws_what_and_when_does_not_matter(number, seed, monkeypatch):
    """Processes take turns as chance has it; all see the batch that one alone would."""
    monkeypatch.setattr(processes, "LOOK_SECONDS", 0.0)
    rng = np.random.default_rng(seed)
    right = np.random.default_rng(7).integers(0, 5, 400)  # of 4; 0 and 4 teach nothing
    problem = lambda i: Problem(i, "", (1,), "", "")
    config = tiny_config(dynamic_sampling__surplus="return").dynamic_sampling
    store = Store()

    def make(i):
        them = Processes(i, number, store if number > 1 else None)
        stream = Stream(config, 0.6, 8, them.board())
        data = iter(range(400))
        taken = lambda n: [problem(next(data)) for _ in range(n)]
        return stream, stream.problems(taken), []

    each = [make(i) for i in range(number)]
    for _ in range(10_000):
        stream, problems, drawing = each[rng.integers(number)]
        stream.look()
        if all(stream.over for stream, *_ in each):
            break
        if not stream.over and rng.random() < 0.6 and (found := next(problems, None)) is not None:
            drawing.append((len(stream.taken) - 1, found))
        elif drawing:
            index, found = drawing.pop(rng.integers(len(drawing)))
            k = right[found.id]
            stream.scored(index, make_group([True] * k + [False] * (4 - k), id=found.id))
    informative = [i for i in range(400) if 0 < right[i] < 4]
    groups = {n: g for stream, *_ in each for n, g in stream.groups.items()}
    for stream, *_ in each:
        most = min(stream.most, informative[7] + 1)
        assert stream.decided == most and stream.accepted == sum(i < most for i in informative)
        assert all(groups[n].problem.id == n for n in range(stream.decided))
    # Nobody begins much more than is needed.
    assert each[0][0].board.begun <= informative[7] + 1 + 8 / 0.6 + number


def test_values_are_dealt_and_collected_in_their_order(monkeypatch):
    all_of_them = [Processes(i, 3, Store()) for i in range(3)]
    dealt = [them.deal(list(range(8))) for them in all_of_them]
    assert dealt == [[0, 3, 6], [1, 4, 7], [2, 5]]
    monkeypatch.setattr(Processes, "share", lambda self, value: dealt)
    assert all_of_them[1].collect(dealt[1]) == list(range(8))


def test_a_process_alone_shares_with_itself():
    them = Processes()
    assert them.first and them.agree(3) == [3] and them.share("x") == ["x"]
    assert them.collect(them.deal([1, 2])) == [1, 2] and them.stop_asked() is None
    assert type(them.board()) is Board and them.leave(5) == 5
