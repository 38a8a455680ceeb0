"""The pool: a response on which the scorer hangs, dies or raises costs itself and nothing else."""

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from dapo_jax.rewards import pool as reward_pool
from dapo_jax.rewards.pool import RewardPool
from dapo_jax.rewards.types import Rubric, Score, Task, verdict
from dapo_jax.types import UserError, Verdict
from tests.conftest import ROOT


class Pool(RewardPool):
    """A pool with one scorer, whose verdicts are 1 and -1."""

    def __init__(
        self, scorer="tests.support.scorers:treacherous", *, workers=2, timeout_seconds=1.0
    ):
        self.rubric = Rubric(((scorer, 1.0),), 1.0, -1.0)
        super().__init__(self.rubric.names, workers=workers, timeout_seconds=timeout_seconds)

    def verdicts(self, texts, answers):
        tasks = [Task(self.rubric.names, *item) for item in zip(texts, answers, strict=True)]
        return [verdict(self.rubric, scored.scores) for scored in self.score(tasks)]


def test_faults_cost_themselves_only():
    texts = ["7", "hang", "8", "die", "raise", "7", "eat", "exit", *["7"] * 40]
    with Pool() as pool:
        verdicts = pool.verdicts(texts, ["7"] * len(texts))
        again = pool.verdicts(["7", "hang"], ["7", "7"])
    right = [text == "7" for text in texts]
    assert [v.correct for v in verdicts] == right
    assert [v.reward for v in verdicts] == [1.0 if r else -1.0 for r in right]
    notes = {text: v.note for text, v in zip(texts, verdicts)}
    assert notes["7"] == notes["8"] == ""
    assert notes["hang"] == "timeout"
    assert notes["die"] == "worker died"
    assert notes["raise"] == "error: ZeroDivisionError: in the scorer"
    assert notes["eat"].startswith("error: MemoryError")
    assert notes["exit"] != ""
    assert [v.extracted for v in verdicts[:3]] == ["7", None, "8"]
    assert [v.note for v in again] == ["", "timeout"]


def test_idle_workers_that_are_killed_are_replaced():
    """As by the system when memory runs out. What was handed over meanwhile is scored."""
    texts = [str(i) for i in range(40)]
    with Pool() as pool:
        pool.verdicts(["7"], ["7"])
        for child in multiprocessing.active_children():
            child.kill()
        verdicts = pool.verdicts(texts, ["7"] * 40)
        assert pool.replaced == 1
    assert [v.correct for v in verdicts] == [text == "7" for text in texts]
    assert not any(v.note for v in verdicts)


def test_what_is_tried_again_is_not_waited_for_before_it_is_there():
    """While responses are drawn: whoever asks whether all is there hands out again what a worker
    left or died with, and goes on."""
    texts = ["hang", "7", "die", "8", "7", "9", "7", "6"]  # two to a chunk
    with Pool(workers=1) as pool:
        tasks = [Task(pool.rubric.names, text, "7") for text in texts]
        waited = []
        pool.waiting = lambda: waited.append(1)
        pending, asked, most = pool.submit(tasks), 0, time.monotonic() + 100
        while not pool.ready(pending) and time.monotonic() < most:
            asked += 1
            time.sleep(0.01)
        scored = pool.collect(pending)
    assert not waited and asked > 50
    assert [verdict(pool.rubric, s.scores).note for s in scored] == [
        "timeout", "", "worker died", *[""] * 5
    ]  # fmt: skip
    assert [verdict(pool.rubric, s.scores).correct for s in scored] == [t == "7" for t in texts]


def test_slow_responses_each_have_the_whole_limit():
    """Together they take longer than the limit of one, alone none does."""
    with Pool(workers=1) as pool:
        verdicts = pool.verdicts(["slow"] * 12, ["slow"] * 12)
    assert all(v.correct and not v.note for v in verdicts)


def test_the_first_response_has_the_whole_limit():
    """math-verify is imported before, which takes longer than the limit here."""
    with Pool("math_verify", workers=1, timeout_seconds=0.5) as pool:
        verdicts = pool.verdicts(["\\boxed{0.25}"], ["\\frac{1}{4}"])
    assert verdicts[0] == Verdict(True, 1.0, "0.25")


def test_what_was_scored_before_is_not_scored_again():
    with Pool("tests.support.scorers:counting", workers=1) as pool:
        first = pool.verdicts(["a", "b", "a"], ["1", "1", "1"])
        again = pool.verdicts(["b", "c", "a", "a"], ["1", "1", "1", "2"])
    count = lambda verdicts: [int(v.extracted) for v in verdicts]
    assert count(first)[:2] == [1, 2]
    assert count(again) == [2, 4, count(first)[2], 5], "by text and answer together"


def test_a_hang_costs_its_limit_once_and_no_worker():
    """Twenty hangs of a tenth of a second among 200 responses, in one worker of long life."""
    texts = ["hang" if i % 10 == 0 else f"{os.getpid()} {i}" for i in range(200)]
    with Pool("tests.support.scorers:which_process", workers=1, timeout_seconds=0.1) as pool:
        verdicts = pool.verdicts(texts, ["7"] * 200)
    assert [v.note for v in verdicts] == ["timeout" if t == "hang" else "" for t in texts]
    assert len({v.extracted for v in verdicts if not v.note}) == 1


def test_a_scorer_may_return_a_bool():
    with Pool("tests.support.scorers:plain") as pool:
        verdicts = pool.verdicts(["7", "8"], ["7", "7"])
    assert [v.correct for v in verdicts] == [True, False]
    assert [v.extracted for v in verdicts] == [None, None]


LISTS = "tests.support.scorers:of_lists"


def test_a_scorer_of_lists_is_given_all():
    """Token ids and metadata arrive, for that scorer alone is not called for text and answer."""
    names = (LISTS, "tests.support.scorers:plain")
    tasks = [
        Task(names, "7", "7", (5, 6), {"level": [1, None]}),
        Task(names, "7", "7", (5, 6), {"level": 2}),
        Task(names, "7", "7", (5, 7), None),
        Task(names, "8", "7"),
    ]
    with RewardPool(names, workers=1, timeout_seconds=5.0) as pool:
        scored = [s.scores for s in pool.score(tasks)]
        again = [s.scores for s in pool.score(tasks)]
    assert scored == again
    for task, scores in zip(tasks, scored):
        right = task.text == task.answer
        given = {"token_ids": list(task.token_ids), "metadata": task.metadata}
        assert scores == (Score(right, task.text, reward=0.5, extra=given), Score(right))


def test_a_scorer_of_lists_that_fails_costs_one_response():
    texts = ["7", "nan", "none", "two", "not a list", "array", "7"]
    with Pool(LISTS, workers=1) as pool:
        verdicts = pool.verdicts(texts, ["7"] * len(texts))
    notes = {text: v.note for text, v in zip(texts, verdicts)}
    assert notes["7"] == notes["array"] == ""
    assert notes["nan"] == "error: ValueError: the scorer's reward is nan"
    for text in ("none", "two", "not a list"):
        assert notes[text].startswith("error: TypeError: a scorer of texts, token ids, answers")
    assert [v.correct for v in verdicts] == [True, *[False] * 4, True, True]
    assert [v.reward for v in verdicts] == [0.5, *[-1.0] * 4, 0.25, 0.5]


def test_what_no_scorer_reads_is_not_sent():
    """So that equal responses to different problems are scored once."""
    names = ("tests.support.scorers:counting",)
    with RewardPool([*names, LISTS], workers=1, timeout_seconds=5.0) as pool:
        tasks = [Task(names, "a", "1", (i,), {"i": i}) for i in range(3)]
        first = [s.scores for s in pool.score(tasks[:1])]
        assert [s.scores for s in pool.score(tasks[1:])] == first * 2
        both = [task._replace(scorers=(*names, LISTS)) for task in tasks]
        scored = [s.scores for s in pool.score(both)]
    assert len({str(scores) for scores in scored}) == 3


def test_several_scorers_share_one_limit():
    names = ("tests.support.scorers:treacherous", "tests.support.scorers:length_reward")
    rubric = Rubric(((names[0], 1.0), (names[1], 2.0)), 1.0, -1.0)
    with RewardPool(names, workers=1, timeout_seconds=1.0) as pool:
        tasks = [Task(names, text, "12345") for text in ("12345", "1", "raise", "hang")]
        tasks.append(Task(names[1:], "raise", ""))
        scored = pool.score(tasks)
    verdicts = [verdict(rubric, s.scores) for s in scored[:4]]
    assert [v.correct for v in verdicts] == [True, False, False, False]
    assert [v.reward for v in verdicts] == pytest.approx([1 + 2 * 0.5, -1 + 2 * 0.1, -3, -3])
    assert [v.note[:5] for v in verdicts] == ["", "", "error", "timeo"]
    assert scored[4].scores == (Score(True, reward=0.5),), "a scorer of its own is another task"


@pytest.mark.parametrize(
    "name, wanted",
    [
        ("of_three", r"takes \(response, answer, metadata\); a scorer takes \(text, answer\) or"),
        ("of_any_number", r"takes \(\); a scorer takes \(text, answer\) or \(texts, token_ids, "),
    ],
)
def test_a_scorer_of_another_number_is_the_users_mistake(name, wanted):
    with pytest.raises(
        UserError, match=rf"config\.reward\.scorer: 'tests.support.scorers:{name}' {wanted}"
    ):
        Pool(f"tests.support.scorers:{name}")


def test_a_parameter_with_a_default_is_not_counted():
    with Pool("tests.support.scorers:with_default", workers=1) as pool:
        assert pool.verdicts(["a"], ["b"])[0].correct


def test_workers_do_not_load_jax():
    with Pool("tests.support.scorers:which_modules") as pool:
        (verdict,) = pool.verdicts([""], [""])
    assert verdict.extracted == "False"


def test_nothing_to_score():
    with Pool() as pool:
        assert pool.verdicts([], []) == []


def test_a_wrong_scorer_is_the_users_mistake():
    with pytest.raises(UserError, match=r"config\.reward\.scorer"):
        Pool("no_such_scorer")


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
    monkeypatch.setattr(reward_pool, "CHUNKS_PER_LIFE", 3)
    for name in reward_pool.ONE_THREAD:
        monkeypatch.delenv(name, raising=False)
    with Pool("tests.support.scorers:about_the_worker", workers=1, timeout_seconds=30.0) as pool:
        found = [pool.verdicts([str(i)], ["7"])[0] for i in range(8)]
        assert pool.replaced == 0
    assert all(verdict.correct and not verdict.failed for verdict in found)
    workers, threads = zip(*(str(verdict.extracted).split() for verdict in found))
    assert [workers.index(worker) for worker in workers] == [0, 0, 0, 3, 3, 3, 6, 6]
    assert set(threads) == {"1"}
