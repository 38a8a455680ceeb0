"""The pool: a response on which the scorer hangs, dies or raises costs itself and nothing else."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from dapo_jax.reward import Rubric, Task, verdict
from dapo_jax.reward_pool import RewardPool
from dapo_jax.types import UserError
from tests.conftest import ROOT


class Pool(RewardPool):
    """A pool with one scorer, whose verdicts are 1 and -1."""

    def __init__(self, scorer="tests.scorers:treacherous", *, workers=2, timeout_seconds=1.0):
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


def test_slow_responses_each_have_the_whole_limit():
    """Together they take longer than the limit of one, alone none does."""
    with Pool(workers=1) as pool:
        verdicts = pool.verdicts(["slow"] * 12, ["slow"] * 12)
    assert all(v.correct and not v.note for v in verdicts)


def test_what_was_scored_before_is_not_scored_again():
    with Pool("tests.scorers:counting", workers=1) as pool:
        first = pool.verdicts(["a", "b", "a"], ["1", "1", "1"])
        again = pool.verdicts(["b", "c", "a", "a"], ["1", "1", "1", "2"])
    count = lambda verdicts: [int(v.extracted) for v in verdicts]
    assert count(first)[:2] == [1, 2]
    assert count(again) == [2, 4, count(first)[2], 5], "by text and answer together"


def test_a_hang_costs_its_limit_once_and_no_worker():
    """Twenty hangs of a tenth of a second among 200 responses, in one worker of long life."""
    texts = ["hang" if i % 10 == 0 else f"{os.getpid()} {i}" for i in range(200)]
    with Pool("tests.scorers:which_process", workers=1, timeout_seconds=0.1) as pool:
        verdicts = pool.verdicts(texts, ["7"] * 200)
    assert [v.note for v in verdicts] == ["timeout" if t == "hang" else "" for t in texts]
    assert len({v.extracted for v in verdicts if not v.note}) == 1


def test_a_scorer_may_return_a_bool():
    with Pool("tests.scorers:plain") as pool:
        verdicts = pool.verdicts(["7", "8"], ["7", "7"])
    assert [v.correct for v in verdicts] == [True, False]
    assert [v.extracted for v in verdicts] == [None, None]


def test_workers_do_not_load_jax():
    with Pool("tests.scorers:which_modules") as pool:
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
        from dapo_jax.reward import Task
        from dapo_jax.reward_pool import RewardPool
        if __name__ == "__main__":
            names = ("tests.scorers:treacherous",)
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
