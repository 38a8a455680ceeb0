"""Several processes, one run: the same batches, the same parameters; and what happens when one is
told to stop, dies, or never comes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest

from dapo_jax.distributed import process_group, work_queue
from dapo_jax.distributed.preemption import StopSignals
from dapo_jax.distributed.process_group import EXIT_RESTART, ProcessGroup
from dapo_jax.distributed.work_queue import WorkQueue
from dapo_jax.rollout.dynamic_sampling import SamplingState, open_queue
from dapo_jax.rollout.prompt_queue import ProblemList
from dapo_jax.types import Problem, StopRequested, UserError
from dapo_jax.utils.progress import Progress
from tests.conftest import ROOT
from tests.support.helpers import make_group, tiny_config
from tests.support.processes import (
    DEVICES,
    PERMUTED,
    RUN,
    Store,
    assert_same_run,
    begin,
    finish_all,
    run_all,
    said,
)
from tests.support.runs import (
    environment,
    finish,
    free_port,
    metrics_of,
    params_at,
    rollouts_of,
    run,
    start,
)


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


def test_two_processes_train_as_one(one, two):
    workdir, (first, second) = two
    assert_same_run(one, workdir)
    assert sum(group["sampling/prompts_kept"] for group in metrics_of(workdir)[1:]) == 12
    assert "2 processes on 1 host, 4 devices" in first and any("3/3" in line for line in first)
    assert second == [], "one process shows and writes"
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    assert [line.get("perf/compilations", 0) for line in lines][2:] == [0, 0], "but at first"


def test_what_is_gathered_has_the_numbers_of_the_devices(home, tmp_path):
    """Where jax.distributed has others: values of unequal size, in the place of who gave them."""
    program = tmp_path / "gathers.py"
    program.write_text(PERMUTED + GATHERS)
    address = f"127.0.0.1:{free_port()}"
    started = [
        subprocess.Popen(
            [sys.executable, str(program), address, str(id)],
            env=environment(home, devices=2), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True,
        )
        for id in range(2)
    ]  # fmt: skip
    for id, (code, out, err) in enumerate(map(finish, started)):
        assert code == 0, (out, err)
        found = json.loads(said(out)[-1])
        index = 1 - id
        assert found["index"] == index and found["keeper"] == 1
        assert found["agreed"] == [0, 1]
        assert found["shared"] == [[0, 1], [1, 300_000]], "by index, neither cut nor permuted"
        assert found["own"] == [index] * 2


# Each gives its index, and values whose size is by far that of one of them.
GATHERS = """
if __name__ == "__main__":
    permute()
    import json
    import jax
    from dapo_jax.distributed import process_group
    group = process_group.start(sys.argv[1], 2, int(sys.argv[2]), 60)
    big = group.all_gather_objects([group.index] * (1 if group.index == 0 else 300_000))
    print(json.dumps({
        "index": group.index, "keeper": group.keeper, "agreed": group.all_gather(group.index),
        "shared": [[row[0], len(row)] for row in big],
        "own": [d.process_index for d in jax.local_devices()],
    }))
    group.shutdown(0)
"""


@pytest.mark.slow
def test_a_run_whose_numberings_differ_trains_as_one(one, home, tmp_path):
    program = tmp_path / "permuted.py"
    train = ROOT / "launch" / "train.py"
    program.write_text(
        f"{PERMUTED}\nif __name__ == '__main__':\n    import runpy\n    permute()\n"
        f"    runpy.run_path({str(train)!r}, run_name='__main__')\n"
    )
    workdir = tmp_path / "run"
    first, second = run_all(workdir, home, 2, program=program, **RUN)
    assert first == [] and any("3/3" in line for line in second), "index 0 is the second started"
    assert_same_run(one, workdir)


@pytest.mark.parametrize("tables", [["[0, 2]", "[0, 2]"], ["[0, 1]", "[0, 1]"]])
def test_processes_whose_devices_are_not_theirs_alone_are_refused(tables, monkeypatch):
    store = Store()
    store.values["index_of/1"] = tables[1]
    index, count = json.loads(tables[0])
    monkeypatch.setattr(jax, "process_index", lambda: index)
    monkeypatch.setattr(jax, "process_count", lambda: count)
    with pytest.raises(UserError, match="id 0 is 0 of . id 1 is 0 of".replace(". ", "., ")):
        process_group._numbered(0, 2, store, 1)


@pytest.mark.slow
def test_four_processes_train_as_one(one, home, tmp_path):
    run_all(tmp_path / "run", home, 4, **RUN)
    assert_same_run(one, tmp_path / "run")


def test_a_run_is_stopped_goes_on_loses_a_process_and_goes_on_in_four(one, two, home, tmp_path):
    workdir, endless = tmp_path / "run", RUN | {"train__num_steps": 1000}
    # SIGTERM to one: all save and stop.
    started = begin(workdir, home, 1, **RUN)
    started[1].send_signal(signal.SIGTERM)
    ended = finish_all(started)
    assert [code for code, *_ in ended] == [128 + signal.SIGTERM] * 2, ended
    assert all(err == "" for *_, err in ended)
    assert "stopped after step" in said(ended[0][1])[-1]
    assert len(metrics_of(workdir)) < 4
    # The same processes go on bit for bit. (Once step 5 is done, step 3 is saved for certain.)
    started = begin(workdir, home, 5, **endless)
    # One dies: the other ends in time and says why.
    started[1].kill()
    begun = time.monotonic()
    (code, out, err), _ = finish_all(started)
    assert time.monotonic() - begun < 60
    assert code == EXIT_RESTART and "process 1" in err and "from the last checkpoint" in err
    assert any(line.startswith("resuming after step") for line in said(out))
    trained = lambda place: [
        {name: value for name, value in step.items() if not name.startswith("eval/")}
        for step in metrics_of(place)[:4]
    ]
    assert trained(workdir) == trained(two[0])
    mine = rollouts_of(workdir)
    assert rollouts_of(two[0]).items() <= mine.items() and len(mine) >= 3
    ours, theirs = (params_at(place, 3, **RUN) for place in (workdir, two[0]))
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y), ours, theirs)
    # Four go on, from before the last step of the run that was not disturbed.
    for step in (workdir / "checkpoints").iterdir():
        if not step.name.isdigit() or int(step.name) > 2:
            shutil.rmtree(step)
    first, *_ = run_all(workdir, home, 4, **RUN)
    assert "resuming after step 2 of 3" in first
    assert_same_run(one, workdir)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_set_aside_once(two, home, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(two[0], workdir)
    damaged = [file for file in (workdir / "checkpoints" / "3" / "arrays").rglob("d/*")]
    for file in damaged:
        file.write_bytes(b"\0" * file.stat().st_size)
    first, _ = run_all(workdir, home, 2, **RUN)
    assert damaged and any(line.startswith("warning: checkpoint 3 in") for line in first)
    assert "resuming after step 2 of 3" in first
    assert (workdir / "checkpoints" / "damaged" / "3").exists()
    assert metrics_of(workdir) == metrics_of(two[0])


@pytest.mark.slow
def test_a_signal_in_the_middle_of_sampling_stops_all(home, tmp_path):
    """Nothing is ever informative, so that one waits for verdicts of the other. Both are sent it,
    as by the shutdown of a pod: the second has heard of the first by then, and saves."""
    workdir = tmp_path / "run"
    settings = RUN | {
        "reward__scorer": f"{ROOT / 'tests' / 'support' / 'scorers.py'}:plain",
        "dynamic_sampling__max_prompts": 1_600_000,
    }
    started = begin(workdir, home, 0, **settings)
    time.sleep(5)
    started[1].send_signal(signal.SIGTERM)
    time.sleep(0.1)
    started[0].send_signal(signal.SIGTERM)
    begun = time.monotonic()
    ended = finish_all(started)
    assert time.monotonic() - begun < 30
    assert [code for code, *_ in ended] == [128 + signal.SIGTERM] * 2, ended
    assert len(metrics_of(workdir)) == 1


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
    assert code == EXIT_RESTART
    assert "not all processes were there within 2 s" in err and "127.0.0.1:9" in err


def test_all_processes_see_one_directory(home, tmp_path):
    port = free_port()
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
        process_group.start(*arguments, 1)


@pytest.mark.parametrize("number", [1, 2, 5])
@pytest.mark.parametrize("seed", range(4))
def test_which_process_generates_what_and_when_does_not_matter(number, seed, monkeypatch):
    """Processes take turns as chance has it; all see the batch that one alone would."""
    monkeypatch.setattr(work_queue, "POLL_SECONDS", 0.0)
    rng = np.random.default_rng(seed)
    right = np.random.default_rng(7).integers(0, 5, 400)  # of 4; 0 and 4 teach nothing
    config = tiny_config(train__prompts_per_step=8)
    problems = [Problem(i, "", (1,), "", "") for i in range(400)]
    store = Store()
    queues = [
        open_queue(
            config, SamplingState(0.6), ProblemList(problems), step=1,
            group=ProcessGroup(i, number, store if number > 1 else None),
        )
        for i in range(number)
    ]  # fmt: skip
    pending = [[] for _ in queues]
    for _ in range(10_000):
        i = int(rng.integers(number))
        queues[i].resolved()
        if all(queue.done for queue in queues):
            break
        if not queues[i].done and rng.random() < 0.6:
            claimed = queues[i].claim()
            if claimed is not None and claimed < queues[i].max_prompts:
                pending[i].append(claimed)
        elif pending[i]:
            found = pending[i].pop(rng.integers(len(pending[i])))
            k = right[queues[i].problem(found).id]
            queues[i].report(found, make_group([True] * k + [False] * (4 - k), id=found))
    informative = [i for i in range(400) if 0 < right[i] < 4]
    groups = {n: g for queue in queues for n, g in queue.groups.items()}
    for queue in queues:
        most = min(queue.max_prompts, informative[7] + 1)
        assert queue.num_resolved == most and queue.num_kept == sum(i < most for i in informative)
        assert all(groups[n].problem.id == n for n in range(queue.num_resolved))
    # Hardly more is claimed than is needed.
    assert queues[0].work_queue.claimed <= informative[7] + 1 + 8 / 0.6 + number


def test_we_tell_of_a_lost_process_before_jax_aborts_the_others():
    """JAX's signs of life come every half of its limit: the last may be so old when a process is
    lost."""
    ours = process_group.DEAD_SECONDS + 2 * process_group.BEAT_SECONDS
    assert ours < process_group.HEARTBEAT_SECONDS / 2 and process_group.HEARTBEAT_SECONDS < 60


@pytest.mark.parametrize("loading", [False, True])
def test_a_process_that_loads_is_not_taken_for_dead(monkeypatch, loading):
    monkeypatch.setattr(process_group, "BEAT_SECONDS", 0.002)
    monkeypatch.setattr(process_group, "DEAD_SECONDS", 0.05)
    left = []
    monkeypatch.setattr(
        process_group, "leave", lambda message, status: left.append((message, status))
    )
    store = Store()
    store.key_value_set("beat/1", json.dumps([1, loading]))
    one = ProcessGroup(0, 2, store)
    thread = threading.Thread(target=one._watch)
    thread.start()
    time.sleep(0.5)
    one._gone.set()
    thread.join()
    assert bool(left) != loading
    assert all("process 1 on" in message and status == EXIT_RESTART for message, status in left)


def test_a_signal_to_one_is_seen_by_the_others():
    store = Store()
    one, other = (ProcessGroup(i, 2, store) for i in range(2))
    assert other.stop_asked() is None
    other._looked = 0.0
    one.ask_to_stop(15)
    assert other.stop_asked() == 15


def test_the_signal_that_all_processes_are_sent_does_not_end_one_that_was_told(capsys):
    """A pod's shutdown sends SIGTERM to each; who hears of another's first is saving by then, or
    has saved and takes leave of the others. A second one that it is sent itself ends it."""
    store, before = Store(), [(s, signal.getsignal(s)) for s in (signal.SIGTERM, signal.SIGINT)]
    first, second = (StopSignals(Progress(0, 0), ProcessGroup(i, 2, store)) for i in range(2))
    try:
        with first:
            os.kill(os.getpid(), signal.SIGTERM)
            with pytest.raises(StopRequested):
                first.check()
        with second, pytest.raises(StopRequested):
            second.check()
        assert second.received == signal.SIGTERM and not second.sent
        assert signal.getsignal(signal.SIGTERM) == second._remember
        os.kill(os.getpid(), signal.SIGTERM)
        assert second.sent
    finally:
        for number, handler in before:
            signal.signal(number, handler)
    assert capsys.readouterr().out.count("saving, then stopping") == 2


def test_a_process_alone_shares_with_itself():
    process_group = ProcessGroup()
    assert (
        process_group.is_primary
        and process_group.all_gather(3) == [3]
        and process_group.all_gather_objects("x") == ["x"]
    )
    assert process_group.stop_asked() is None
    assert type(process_group.work_queue()) is WorkQueue and process_group.shutdown(5) == 5
