"""Several processes, one run: the same batches, the same parameters; stops, and failures."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from dapo_jax.distributed import (
    EXIT_WAITED,
    ProcessGroup,
    StopSignals,
    preemption,
    process_group,
    work_queue,
)
from dapo_jax.rollout.dynamic_sampling import DynamicSamplingState, open_queue
from dapo_jax.rollout.prompt_queue import NO_PROMPT
from dapo_jax.runs.run_directory import check_processes
from dapo_jax.setup import RunComponents
from dapo_jax.types import StopRequested, UserError
from dapo_jax.utils.progress import Progress
from tests.conftest import ROOT
from tests.rollout.test_dynamic_sampling import Data
from tests.support.helpers import make_group, tiny_config
from tests.support.processes import (
    DEVICES,
    PERMUTED,
    RUN,
    Store,
    assert_same_run,
    begin,
    finish_all,
    lines_of,
    run_all,
)
from tests.support.runs import (
    environment,
    free_port,
    metrics_of,
    params_at,
    rollouts_of,
    run_here,
)


@pytest.fixture(scope="module")
def one(tmp_path_factory, home):
    """The run in one process."""
    workdir = tmp_path_factory.mktemp("one") / "run"
    run_here(workdir, home, devices=DEVICES, **RUN)
    return workdir


@pytest.fixture(scope="module")
def two(tmp_path_factory, home):
    """The run in two processes, and what each printed."""
    workdir = tmp_path_factory.mktemp("two") / "run"
    return workdir, run_all(workdir, home, 2, **RUN)


@pytest.mark.slow
def test_two_processes_train_as_one(one, two):
    workdir, (first, second) = two
    assert_same_run(one, workdir)
    assert sum(step["sampling/prompts_kept"] for step in metrics_of(workdir)[1:]) == 12
    assert "2 processes on 1 host, 4 devices" in first and any("3/3" in line for line in first)
    assert second == [], "one process prints and writes"
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    assert [line.get("perf/compilations", 0) for line in lines][2:] == [0, 0]


# launch/train.py in such processes: index 0 is the last that is started.
PERMUTED_TRAIN = f"""{PERMUTED}
if __name__ == "__main__":
    import runpy
    permute()
    runpy.run_path({str(ROOT / "launch" / "train.py")!r}, run_name="__main__")
"""


@pytest.mark.slow
def test_a_stop_changes_no_bit_and_four_processes_resume(one, two, home, tmp_path):
    """SIGTERM to one process: both save and stop. The four are numbered the other way round than
    jax.distributed numbers them."""
    workdir = tmp_path / "run"
    started = begin(workdir, home, 1, **RUN)
    started[1].send_signal(signal.SIGTERM)
    ended = finish_all(started)
    assert [code for code, *_ in ended] == [128 + signal.SIGTERM] * 2, ended
    assert all(err == "" for *_, err in ended)
    assert "stopped after step" in lines_of(ended[0][1])[-1] and len(metrics_of(workdir)) < 4
    first, _ = run_all(workdir, home, 2, **RUN)
    assert any(line.startswith("resuming after step") for line in first)
    assert metrics_of(workdir) == metrics_of(two[0])
    assert rollouts_of(workdir) == rollouts_of(two[0])
    ours, theirs = (params_at(place, 3, **RUN) for place in (workdir, two[0]))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    shutil.rmtree(workdir / "checkpoints" / "3")
    program = tmp_path / "permuted.py"
    program.write_text(PERMUTED_TRAIN)
    *others, first = run_all(workdir, home, 4, program=program, **RUN)
    assert others == [[], [], []] and "resuming after step 2 of 3" in first
    assert_same_run(one, workdir)


@pytest.mark.slow
def test_a_signal_in_the_middle_of_sampling_stops_all(home, tmp_path):
    """No group is ever informative, so that one process awaits verdicts of the other. Both are sent
    the signal, as by the shutdown of a pod."""
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
    sent = time.monotonic()
    ended = finish_all(started)
    assert time.monotonic() - sent < 30
    assert [code for code, *_ in ended] == [128 + signal.SIGTERM] * 2, ended
    assert len(metrics_of(workdir)) == 1


# Each process gathers its index, and two values. One value is far larger than the other.
GATHERS = """
if __name__ == "__main__":
    permute()
    import json
    import jax
    from dapo_jax.distributed import process_group
    group = process_group.start(sys.argv[1], 2, int(sys.argv[2]), 60)
    group.watch()
    big = group.all_gather_objects([group.index] * (1 if group.index == 0 else 300_000))
    print(json.dumps({
        "index": group.index, "keeper": group.keeper, "small": group.all_gather(group.index),
        "large": [[values[0], len(values)] for values in big],
        "own": [d.process_index for d in jax.local_devices()],
    }))
    if group.index == 1:
        group.shutdown(3, ValueError("a fault of one"))
    group.all_gather("never reached by the other")
"""


def test_gathered_values_are_by_index_and_a_failure_ends_all(home, tmp_path):
    """jax.distributed numbers the processes differently. Index 1 fails, index 0 waits for it."""
    program = tmp_path / "gathers.py"
    program.write_text(PERMUTED + GATHERS)
    command = [sys.executable, str(program), f"127.0.0.1:{free_port()}"]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    env = environment(home, devices=2)
    started = [subprocess.Popen([*command, str(id)], env=env, **pipes) for id in range(2)]
    for id, (code, out, err) in enumerate(finish_all(started)):
        index = 1 - id
        assert code == 3, (out, err)
        assert ("process 1 on" in err and "failed: a fault of one" in err) == (index == 0)
        found = json.loads(lines_of(out)[-1])
        assert found["index"] == index and found["keeper"] == 1
        assert found["small"] == [0, 1]
        assert found["large"] == [[0, 1], [1, 300_000]], "neither cut nor permuted"
        assert found["own"] == [index] * 2


@pytest.mark.parametrize("tables", [["[0, 2]", "[0, 2]"], ["[0, 1]", "[0, 1]"]])
def test_processes_that_share_devices_are_refused(tables, monkeypatch):
    store = Store()
    store.values["index_of/1"] = tables[1]
    index, count = json.loads(tables[0])
    monkeypatch.setattr(jax, "process_index", lambda: index)
    monkeypatch.setattr(jax, "process_count", lambda: count)
    with pytest.raises(UserError, match=r"id 0 is 0 of ., id 1 is 0 of"):
        process_group._numbered(0, 2, store, 1)


def test_a_coordinator_that_never_comes_is_not_awaited(home):
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from dapo_jax.distributed import "
        "process_group; process_group.start('127.0.0.1:9', 2, 1, 2)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment(home), capture_output=True, text=True
    )
    assert ended.returncode == EXIT_WAITED
    assert "not all processes were there within 2 s" in ended.stderr
    assert "127.0.0.1:9" in ended.stderr


@pytest.mark.parametrize("shared", [True, False])
def test_all_processes_see_one_directory(tmp_path, shared):
    store, refused = Store(), []

    def check(i):
        try:
            ProcessGroup(i, 2, store).check_place(tmp_path / ("shared" if shared else str(i)))
        except UserError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=check, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(refused) == (0 if shared else 2)
    assert all("is not the same directory for all processes: process 1" in e for e in refused)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--workdir=.*/file/run cannot be written to: Not a dir"):
        ProcessGroup(0, 2, store).check_place(tmp_path / "file" / "run")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("a:1", None, 0), "go together; got a:1, None, 0"),
        ((None, 2, 0), "go together; got None, 2, 0"),
        (("a:1", 2, 2), r"--process_id must be .* --num_processes \(2\); got 2"),
    ],
)
def test_flags_that_do_not_fit(arguments, message):
    with pytest.raises(UserError, match=message):
        process_group.start(*arguments, 1)


@pytest.mark.parametrize("number", [1, 2, 5])
@pytest.mark.parametrize("seed", range(4))
def test_which_process_generates_what_and_when_does_not_matter(number, seed, monkeypatch):
    """Processes act in a random order; all see the batch of one alone."""
    monkeypatch.setattr(work_queue, "POLL_SECONDS", 0.0)
    rng = np.random.default_rng(seed)
    correct = np.random.default_rng(7).integers(0, 5, 400)  # of 4; 0 and 4 teach nothing
    config = tiny_config(train__prompts_per_step=8)
    store = Store() if number > 1 else None
    queues = [
        open_queue(
            config, DynamicSamplingState(0.6), Data(), step=1, group=ProcessGroup(i, number, store)
        )
        for i in range(number)
    ]
    pending = [[] for _ in queues]
    for _ in range(10_000):
        i = int(rng.integers(number))
        queues[i].resolved()
        if all(queue.done for queue in queues):
            break
        if not queues[i].done and rng.random() < 0.6:
            claimed = queues[i].claim()
            if claimed not in (None, NO_PROMPT):
                pending[i].append(claimed)
        elif pending[i]:
            found = pending[i].pop(rng.integers(len(pending[i])))
            k = correct[queues[i].problem(found).id]
            queues[i].report(found, make_group([True] * k + [False] * (4 - k), id=found))
    informative = [i for i in range(400) if 0 < correct[i] < 4]
    groups = {n: g for queue in queues for n, g in queue.groups.items()}
    for queue in queues:
        most = min(queue.max_prompts, informative[7] + 1)
        assert queue.num_resolved == most and queue.num_kept == sum(i < most for i in informative)
        assert all(groups[n].problem.id == n for n in range(queue.num_resolved))
    # Hardly more is claimed than is needed.
    assert queues[0].work_queue.claimed <= informative[7] + 1 + 8 / 0.6 + number


def test_processes_with_other_configs_are_refused():
    """They would train together, each on its own data, without a word."""
    store, said = Store(), {}
    first, second = (ProcessGroup(i, 2, store) for i in range(2))
    first.hosts = second.hosts = ["a", "b"]

    def check(group, **overrides):
        try:
            check_processes(tiny_config(**overrides), group)
        except UserError as error:
            said[group.index] = str(error)

    def both(**overrides):
        other = threading.Thread(target=check, args=(second,), kwargs=overrides)
        other.start()
        check(first)
        other.join()

    both()
    assert not said
    both(seed=5, objective__clip_high=0.9)
    wanted = (
        "process 1 on b differs from process 0 on a:\n"
        "  config.objective.clip_high: 0.28 in process 0, 0.9 in process 1\n"
        "  config.seed: 0 in process 0, 5 in process 1\n"
        "Start all with the same command, config files and data."
    )
    assert said == {0: wanted, 1: wanted}


def test_processes_compare_their_problems(tmp_path):
    """They may have read other files of one name."""
    seen = []

    class Listening(ProcessGroup):
        def check_equal(self, values):
            seen.append(values)

    for side, number in (("train", 20), ("train", 21), ("heldout", 5)):
        config = tiny_config(
            **{"data__train__sums__num_problems": 20}
            | {f"data__{side}__sums__num_problems": number}
        )
        RunComponents(config, tmp_path, Progress(0, quiet=True), Listening())
    training, heldout = (f"SHA-256 of the {x} problems" for x in ("training", "held-out"))
    assert [values.keys() for values in seen] == [{training, heldout}] * 3
    first, train, held = seen
    assert train[training] != first[training] == held[training]
    assert held[heldout] != first[heldout] == train[heldout]


def test_the_end_of_the_terminal_stops_the_run_and_nohup_ignores_it():
    before = signal.getsignal(signal.SIGHUP)
    try:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with StopSignals(Progress(0, quiet=True)) as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGHUP)  # of the shell, and of the terminal itself
            with pytest.raises(StopRequested):
                signals.check()
        assert signals.received == signal.SIGHUP
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with StopSignals(Progress(0, quiet=True)) as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            signals.check()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_that_comes_while_others_are_asked_is_not_lost():
    def asked():
        signal.raise_signal(signal.SIGTERM)

    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    store, before = Store(), [(s, signal.getsignal(s)) for s in numbers]
    first, second = (ProcessGroup(i, 2, store) for i in range(2))
    first.stop_requested = asked
    try:
        with StopSignals(Progress(0, quiet=True), first) as signals:
            with pytest.raises(StopRequested):
                signals.check()
        assert signals.received == signal.SIGTERM == second.stop_requested()
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def test_the_signal_sent_to_all_processes_does_not_end_one_that_stops_already(capsys):
    """A pod's shutdown sends SIGTERM to each process. One that another stopped first survives its
    own, also while it shuts down; a second one of its own ends it."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    store, before = Store(), [(s, signal.getsignal(s)) for s in numbers]
    first, second = (StopSignals(Progress(0), ProcessGroup(i, 2, store)) for i in range(2))
    try:
        with first:
            assert second.process_group.stop_requested() is None
            os.kill(os.getpid(), signal.SIGTERM)
            with pytest.raises(StopRequested):
                first.check()
        second.process_group._last_poll = 0.0
        with second, pytest.raises(StopRequested):
            second.check()
        assert second.received == signal.SIGTERM and second.sent_at is None
        assert signal.getsignal(signal.SIGTERM) == second._remember
        os.kill(os.getpid(), signal.SIGTERM)
        assert second.sent_at is not None
        # Of a scheduler and of the launcher that it signals too: two at once are one.
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        for number, handler in before:
            signal.signal(number, handler)
    assert capsys.readouterr().out.count("saving, then stopping") == 2


def test_a_signal_stops_a_run_whose_line_waits_for_its_reader():
    """As on a terminal that Ctrl-S has halted: Python's files refuse a line within a line."""
    (reader, writer), main = os.pipe(), threading.get_ident()

    def end_and_read():
        time.sleep(0.2)
        signal.pthread_kill(main, signal.SIGTERM)
        time.sleep(0.2)
        while os.read(reader, 2**16):
            pass
        os.close(reader)

    with os.fdopen(writer, "w") as out, StopSignals(Progress(1, out)) as signals:
        other = threading.Thread(target=end_and_read)
        other.start()
        signals.progress.say("x" * 2**18)  # more than a pipe holds
        with pytest.raises(StopRequested):
            signals.check()
    other.join()


@pytest.mark.parametrize(
    "number, seconds, ends",
    [
        (signal.SIGINT, 0.1, True),
        (signal.SIGTERM, 1.9, False),  # of a scheduler and of the launcher that it signals too
        (signal.SIGTERM, 2.1, True),
        (signal.SIGHUP, 1.9, False),
    ],
)
def test_a_second_signal_of_its_own_ends_a_process_at_once(monkeypatch, number, seconds, ends):
    now, done = [0.0], []
    stub = SimpleNamespace(
        SIGINT=signal.SIGINT, SIG_DFL=signal.SIG_DFL, Signals=signal.Signals,
        signal=lambda *given: done.append(given), raise_signal=done.append,
    )  # fmt: skip
    monkeypatch.setattr(preemption, "signal", stub)
    monkeypatch.setattr(preemption, "time", SimpleNamespace(monotonic=lambda: now[0]))
    signals = StopSignals(Progress(0, quiet=True))
    signals._remember(number, None)
    assert signals.received == number and not done
    now[0] = seconds
    signals._remember(number, None)
    assert done == ([(number, signal.SIG_DFL), number] if ends else [])
