"""The pool: a response on which the scorer hangs, dies or raises costs itself and nothing else."""

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from types import SimpleNamespace

import pytest
from pebble.common.process import stop_process

from dapo_jax.rewards import pool as reward_pool
from dapo_jax.rewards.pool import RewardPool
from dapo_jax.rewards.types import Rubric, Score, Task, verdict
from dapo_jax.types import RunError, UserError, Verdict
from tests.conftest import ROOT


def named(function):
    return f"tests.support.scorers:{function}"


TREACHEROUS, LISTS, PLAIN = named("treacherous"), named("of_lists"), named("plain")
GENTLE = [LISTS, PLAIN, *map(named, ("with_default", "which_modules", "length_reward"))]


def verdicts(pool, texts, answers, scorer=TREACHEROUS):
    """Verdicts of one scorer, whose rewards are 1 and -1."""
    rubric = Rubric(((scorer, 1.0),), 1.0, -1.0)
    tasks = [Task(rubric.names, *item) for item in zip(texts, answers, strict=True)]
    return [verdict(rubric, scored.scores) for scored in pool.score(tasks)]


@pytest.fixture(scope="module")
def one_worker():
    """A pool of one worker for all scorers; it survives whatever the tests do."""
    names = [TREACHEROUS, *GENTLE, named("which_process")]
    with RewardPool(names, workers=1, timeout_seconds=0.5) as pool:
        yield pool


def test_a_signal_to_every_process_costs_no_response():
    """Slurm's SIGTERM before a time limit, SIGHUP of a closed terminal: the run stops by itself."""
    program = """if True:
        import os, signal, sys
        from dapo_jax.rewards.pool import RewardPool
        from dapo_jax.rewards.types import Task
        if __name__ == "__main__":
            name = "tests.support.scorers:slow"
            for number in (signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, lambda *_: None)
            with RewardPool([name], workers=2, timeout_seconds=60.0) as pool:
                pool.score([Task((name,), "7", "7")] * 2)
                for number in (signal.SIGTERM, signal.SIGHUP):
                    pending = [pool.submit([Task((name,), "7", "7")]) for _ in range(6)]
                    os.killpg(0, number)
                    print([pool.collect(p)[0].scores[0] for p in pending])
    """
    run = [sys.executable, "-c", program]
    done = subprocess.run(
        run, cwd=ROOT, capture_output=True, text=True, timeout=120, start_new_session=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Score(") == 12 and "worker died" not in done.stdout


def test_faults_cost_themselves_only():
    texts = ["7", "hang", "8", "die", "raise", "7", "eat", "exit", *["7"] * 40]
    with RewardPool([TREACHEROUS], workers=2, timeout_seconds=0.5) as pool:
        found = verdicts(pool, texts, ["7"] * len(texts))
        again = verdicts(pool, ["7", "hang"], ["7", "7"])
    right = [text == "7" for text in texts]
    assert [v.correct for v in found] == right
    assert [v.reward for v in found] == [1.0 if r else -1.0 for r in right]
    notes = {text: v.note for text, v in zip(texts, found)}
    assert notes["7"] == notes["8"] == ""
    assert notes["hang"] == "timeout"
    assert notes["die"] == "worker died"
    assert notes["raise"] == "error: ZeroDivisionError: in the scorer"
    assert notes["eat"].startswith("error: MemoryError")
    assert notes["exit"] != ""
    assert [v.extracted for v in found[:3]] == ["7", None, "8"]
    assert [v.note for v in again] == ["", "timeout"]


def test_errors_of_any_kind_cost_themselves_only():
    texts = ["7", "interrupt", "no text", "no letters", "7"]
    with RewardPool([TREACHEROUS], workers=1, timeout_seconds=0.5) as pool:
        found = verdicts(pool, texts, ["7"] * len(texts))
    assert [v.correct for v in found] == [text == "7" for text in texts]
    assert [v.note for v in found[1:4]] == [
        "error: KeyboardInterrupt: ",
        "error: Wordless: its text raises RuntimeError",
        r"error: ValueError: \ud800 is half a letter",
    ]


def test_idle_workers_that_are_killed_are_replaced():
    """As by the system when memory runs out. Every response is scored."""
    texts = [str(i) for i in range(40)]
    with RewardPool([TREACHEROUS], workers=2, timeout_seconds=1.0) as pool:
        verdicts(pool, ["7"], ["7"])
        for child in multiprocessing.active_children():
            child.kill()
        found = verdicts(pool, texts, ["7"] * 40)
        assert pool.replaced == 1
    assert [v.correct for v in found] == [text == "7" for text in texts]
    assert not any(v.note for v in found)


def test_responses_that_wait_while_workers_are_killed_are_scored():
    """Twice every worker is killed until the pool gives up. The first time they have chunks, which
    are scored again one by one. The second time two workers lose two single responses at most, and
    two more at most may have been with a worker both times."""
    texts = [str(i) for i in range(200)]
    rubric = Rubric(((named("unhurried"), 1.0),), 1.0, -1.0)
    others = multiprocessing.active_children()
    with RewardPool(rubric.names, workers=2, timeout_seconds=5.0) as pool:
        pool.score([Task(rubric.names, "7", "7")])
        pending = pool.submit([Task(rubric.names, text, "7") for text in texts])
        for round in (0, 1):
            assert not pool.ready(pending) and pool.replaced == round
            while pool.pool.active:
                for child in multiprocessing.active_children():
                    if child not in others:
                        child.kill()
                time.sleep(0.01)
        found = [verdict(rubric, scored.scores) for scored in pool.collect(pending)]
        assert pool.replaced == 2
    lost = [v for v in found if v.note]
    assert len(lost) <= 4 and all(v.note == "worker died" for v in lost)
    assert all(v.correct == text.startswith("7") for text, v in zip(texts, found) if not v.note)


def test_ready_schedules_again_and_does_not_wait(one_worker):
    """While responses are generated, responses that a worker left or died with are tried again."""
    texts = ["hang", "7", "die", "8", "7", "9", "7", "6"]  # two to a chunk
    rubric = Rubric(((TREACHEROUS, 1.0),), 1.0, -1.0)
    pending, asked = one_worker.submit([Task(rubric.names, text, "7") for text in texts]), 0
    deadline = time.monotonic() + 100
    while not one_worker.ready(pending) and time.monotonic() < deadline:
        asked += 1
        time.sleep(0.01)
    found = [verdict(rubric, scored.scores) for scored in one_worker.collect(pending)]
    assert asked > 10  # a ready that waits is asked once for each chunk
    assert [v.note for v in found] == ["timeout", "", "worker died", *[""] * 5]
    assert [v.correct for v in found] == [text == "7" for text in texts]


def test_what_is_given_up_is_not_scored():
    """The next response waits for the one under way at most, not for 200 of them."""
    scorer = named("unhurried")  # 10 ms
    with RewardPool([scorer], workers=1, timeout_seconds=5.0) as pool:
        task = Task((scorer,), "7", "7")
        pool.score([task])  # the worker is there
        pending = pool.submit([task] * 200)
        pool.give_up()
        (scored,) = pool.score([task])
        assert scored.scores == (Score(True),)
        ended = [chunk.future.result() for chunk in pending.chunks]
        assert sum(map(len, ended)) < 100
        assert len(pool.score([task] * 8)) == 8


def test_a_chunk_has_time_for_its_last_response(one_worker, monkeypatch):
    """It begins within the limit of the first, and has a whole limit of its own."""
    asked, schedule = set(), one_worker.pool.schedule

    def recorded(function, args, timeout):
        asked.add((len(args[1]), timeout))
        return schedule(function, args=args, timeout=timeout)

    monkeypatch.setattr(one_worker.pool, "schedule", recorded)
    for number in (1, 8):  # one to a chunk, and two
        verdicts(one_worker, ["7"] * number, ["7"] * number)
    limit, grace = one_worker.timeout_seconds, reward_pool.GRACE_SECONDS
    assert asked == {(1, limit + grace), (2, 2 * limit + grace)}


@pytest.mark.parametrize("limit, begun", [(1.0, 1), (5.0, 2), (100.0, 5)])
def test_a_worker_begins_no_response_after_the_first_limit(monkeypatch, limit, begun):
    """Responses of three seconds. The others of the chunk are scheduled again."""
    now = [0.0]

    def takes_three_seconds(task):
        now[0] += 3.0
        return Score(True)

    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr(reward_pool, "time", clock)
    monkeypatch.setattr(reward_pool, "_scorers", {"x": takes_three_seconds}, raising=False)
    monkeypatch.setattr(reward_pool, "_first_wanted", SimpleNamespace(value=0), raising=False)
    assert len(reward_pool._score_chunk(0, [Task(("x",), "", "")] * 5, limit)) == begun


def test_a_hang_costs_its_limit_once_and_no_worker():
    """Two hangs of half a second among 80 responses, in one worker of long life."""
    texts = ["hang" if i % 40 == 0 else str(i) for i in range(80)]
    scorer = named("which_process")
    with RewardPool([scorer], workers=1, timeout_seconds=0.5) as pool:
        found = verdicts(pool, texts, ["7"] * 80, scorer)
    assert [v.note for v in found] == ["timeout" if t == "hang" else "" for t in texts]
    assert len({v.extracted for v in found if not v.note}) == 1


def test_a_scorer_of_lists_is_given_all(one_worker):
    """Token ids and metadata arrive; the other scorer is called with text and answer."""
    names = (LISTS, PLAIN)
    tasks = [
        Task(names, "7", "7", (5, 6), {"level": [1, None]}),
        Task(names, "7", "7", (5, 7), None),
        Task(names, "8", "7"),
    ]
    for task, scored in zip(tasks, one_worker.score(tasks)):
        right = task.text == task.answer
        given = {"token_ids": list(task.token_ids), "metadata": task.metadata}
        assert scored.scores == (Score(right, task.text, reward=0.5, extra=given), Score(right))


def test_fields_that_no_scorer_reads_are_not_sent(one_worker):
    task = Task((PLAIN,), "a", "1", (3,), {"i": 0})
    both = task._replace(scorers=(PLAIN, LISTS))
    pending = one_worker.submit([task, both])
    assert pending.tasks == [Task((PLAIN,), "a", "1"), both]
    one_worker.collect(pending)


def test_a_scorer_of_lists_that_fails_costs_one_response(one_worker):
    texts = ["7", "nan", "none", "two", "not a list", "array", "7"]
    found = verdicts(one_worker, texts, ["7"] * len(texts), LISTS)
    notes = {text: v.note for text, v in zip(texts, found)}
    assert notes["7"] == notes["array"] == ""
    assert notes["nan"] == "error: ValueError: the scorer's reward is nan"
    for text in ("none", "two", "not a list"):
        assert notes[text].startswith("error: TypeError: a scorer of lists returns a list")
    assert [v.correct for v in found] == [True, *[False] * 4, True, True]
    assert [v.reward for v in found] == [0.5, *[-1.0] * 4, 0.25, 0.5]


def test_several_scorers_share_one_limit(one_worker):
    names = (TREACHEROUS, named("length_reward"))
    rubric = Rubric(((names[0], 1.0), (names[1], 2.0)), 1.0, -1.0)
    tasks = [Task(names, text, "12345") for text in ("12345", "1", "raise", "hang")]
    tasks.append(Task(names[1:], "raise", ""))
    scored = one_worker.score(tasks)
    found = [verdict(rubric, s.scores) for s in scored[:4]]
    assert [v.correct for v in found] == [True, False, False, False]
    assert [v.reward for v in found] == pytest.approx([1 + 2 * 0.5, -1 + 2 * 0.1, -3, -3])
    assert [v.note[:5] for v in found] == ["", "", "error", "timeo"]
    assert scored[4].scores == (Score(True, reward=0.5),)


def test_a_scorer_that_is_edited_meanwhile_scores_as_when_the_run_began(tmp_path):
    """Workers end after a while, and those that replace them begin later."""
    file = tmp_path / "mine.py"
    file.write_text("def same(text, answer):\n    return text == answer\n")
    with RewardPool([f"{file}:same"], workers=1, timeout_seconds=30.0) as pool:
        file.write_text("def same(text, answer):\n    return False  # for the next run\n")
        assert verdicts(pool, ["7"], ["7"], f"{file}:same")[0].correct


def test_a_wrong_scorer_is_the_users_mistake():
    """It is known before a worker starts."""
    with pytest.raises(UserError, match=r"config\.reward\.scorer: 'no_such_scorer' is not one of"):
        RewardPool(["no_such_scorer"], workers=1, timeout_seconds=1.0)


def test_a_parameter_with_a_default_is_not_counted(one_worker):
    assert verdicts(one_worker, ["a"], ["b"], named("with_default"))[0].correct


def test_workers_do_not_load_jax(one_worker):
    assert verdicts(one_worker, [""], [""], named("which_modules"))[0].extracted == "False"


def test_nothing_to_score(one_worker):
    assert one_worker.score([]) == []


def test_the_first_response_does_not_pay_for_the_import_of_math_verify():
    """It takes longer than this limit, and once interrupted it finds no answer ever after."""
    with RewardPool(["math_verify"], workers=1, timeout_seconds=0.5) as pool:
        found = verdicts(
            pool, ["\\boxed{0.25}", "\\boxed{2}"], ["\\frac{1}{4}", "2"], "math_verify"
        )
    assert found == [Verdict(True, 1.0, "0.25"), Verdict(True, 1.0, "2")]


def test_a_pool_that_ends_while_workers_start_is_silent(monkeypatch, capfd):
    """pebble ends them one after the other; the others meet a pool that is closed."""
    wait_and_stop = lambda process: (process.join(3.0), stop_process(process))
    monkeypatch.setattr("pebble.pool.process.stop_process", wait_and_stop)
    with RewardPool([PLAIN], workers=2, timeout_seconds=5.0) as pool:
        pool.submit([Task((PLAIN,), "7", "7")])
    assert capfd.readouterr().err == ""


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_workers_die_with_a_killed_parent():
    code = textwrap.dedent("""
        from dapo_jax.rewards.types import Task
        from dapo_jax.rewards.pool import RewardPool
        if __name__ == "__main__":
            names = ("tests.support.scorers:treacherous",)
            pool = RewardPool(names, workers=1, timeout_seconds=60.0)
            pool.score([Task(names, "1", "1")])
            import multiprocessing
            print(*[child.pid for child in multiprocessing.active_children()], flush=True)
            pool.score([Task(names, "hang", "1")])
    """)
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    workers = [int(pid) for pid in parent.stdout.readline().split()]
    assert workers
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 20
    while any(_alive(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(_alive(pid) for pid in workers)


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_workers_have_one_thread_to_multiply_with_and_end_after_a_while(monkeypatch):
    monkeypatch.setattr(reward_pool, "CHUNKS_PER_LIFE", 2)
    for name in reward_pool.ONE_THREAD:
        monkeypatch.delenv(name, raising=False)
    scorer = named("about_the_worker")
    with RewardPool([scorer], workers=1, timeout_seconds=30.0) as pool:
        found = [verdicts(pool, [str(i)], ["7"], scorer)[0] for i in range(5)]
        assert pool.replaced == 0
    assert all(v.correct and not v.failed for v in found)
    workers, threads = zip(*(str(v.extracted).split() for v in found))
    assert [workers.index(worker) for worker in workers] == [0, 0, 2, 2, 4]
    assert set(threads) == {"1"} and str(os.getpid()) not in workers


def test_no_alarm_is_left_of_a_response_that_ran_out_of_time(monkeypatch):
    """One may come just before it is stopped. The next would end the worker, or the run."""
    calls = []

    def setitimer(which, seconds, interval=0.0):
        calls.append(seconds)
        if calls == [5.0, 0.0]:
            raise reward_pool._OutOfTime

    monkeypatch.setattr(reward_pool.signal, "setitimer", setitimer)
    monkeypatch.setattr(reward_pool, "_scorers", {"x": lambda task: Score(True)}, raising=False)
    assert reward_pool._score(Task(("x",), "", ""), 5.0).scores == "timeout"
    assert calls == [5.0, 0.0, 0.0]


@pytest.mark.parametrize("fruitless, replaced", [(None, 0), (0, 3)])
def test_workers_that_do_not_start_end_the_run(tmp_path, fruitless, replaced):
    """At once where none ever scored; after three pools that scored nothing where one did."""
    file = tmp_path / "mine.py"
    file.write_text(
        "import multiprocessing\n"
        "if multiprocessing.parent_process() is not None:\n"
        "    raise SystemExit\n"
        "def same(text, answer):\n"
        "    return True\n"
    )
    name = f"{file}:same"
    with RewardPool([name], workers=1, timeout_seconds=5.0) as pool:
        pool.fruitless = fruitless
        with pytest.raises(RunError, match="processes that score do not start"):
            for _ in range(4):
                pool.score([Task((name,), "7", "7")])
        assert pool.replaced == replaced
