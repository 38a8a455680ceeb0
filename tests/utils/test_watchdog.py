"""The watchdog reports silence, whatever call the main thread is blocked in."""

import contextlib
import os
import re
import select
import subprocess
import sys
import threading

import pytest

from dapo_jax.distributed.process_group import EXIT_RESTART
from dapo_jax.utils.progress import Progress
from dapo_jax.utils.watchdog import Watchdog
from tests.conftest import ROOT


def test_it_reports_a_silence_once_and_then_each_time_it_has_doubled():
    said, now = [], [0.0]
    watch = Watchdog(10.0, lambda line: said.append((now[0], line)), lambda: now[0])
    watch.moved("the device")

    def look(first, last):
        said.clear()
        for now[0] in range(first, last):
            watch.look()
        return said

    line = "  nothing has moved for {}; waiting for {}".format
    assert look(0, 15) == [(10, line("10 s", "the device"))]
    watch.waiting_for("reward workers")  # no movement
    late = [(20, line("20 s", "reward workers")), (40, line("40 s", "reward workers"))]
    assert look(15, 79) == late
    watch.moved()
    assert look(79, 98) == [(88, line("10 s", "reward workers"))]
    # A thread that could not look for long reports all of it at once.
    assert look(1000, 1003) == [(1000, line("15 min 22 s", "reward workers"))]
    loaded = []
    watch.moving(lambda: loaded.append("a tensor"))()
    assert look(1003, 1011) == [] and loaded == ["a tensor"]


def test_a_main_thread_that_is_blocked_need_do_nothing():
    """Only the watchdog's thread ends the call: by its second line."""
    said = []
    here, there = os.pipe()

    def say(line):
        said.append(line)
        if len(said) == 2:
            os.write(there, b"x")

    with Watchdog(0.05, say) as watch:
        watch.moved("a pipe")
        ready, *_ = select.select([here], [], [], 60.0)
    os.close(here)
    os.close(there)
    assert ready and all(line.endswith("waiting for a pipe") for line in said)
    assert not any(thread.name == "watchdog" for thread in threading.enumerate())


def test_it_gives_up_only_where_it_is_limited():
    said, given_up, now = [], [], [0.0]
    watch = Watchdog(10.0, said.append, lambda: now[0], most=35.0, give_up=given_up.append)
    watch.moved("storage")
    for now[0] in range(100):
        watch.look()
    assert len(said) == 4 and given_up == []
    said.clear()
    watch.limited, now[0] = True, 0.0
    watch.moved("the device")
    for now[0] in range(36):
        watch.look()
    assert len(said) == 2 and given_up == ["nothing has moved for 35 s; waiting for the device"]
    watch.moved()
    watch.look()
    assert len(given_up) == 1


def test_it_gives_up_though_its_lines_are_not_read():
    """Standard output stands still, or is a file on a full disk."""
    over, now = threading.Event(), [0.0]

    def full(line):
        raise OSError(28, "No space left on device")

    for say in (lambda line: over.wait(), full):
        given_up, now[0] = [], 0.0
        watch = Watchdog(10.0, say, lambda: now[0], most=35.0, give_up=given_up.append)
        watch.limited = True
        watch.moved("the device")
        for now[0] in (11.0, 36.0):
            watch.look()
        assert len(given_up) == 1
    over.set()


HANGS = """if True:
    import os
    from dapo_jax.distributed.process_group import ALONE
    from dapo_jax.utils.watchdog import Watchdog
    here, _ = os.pipe()
    with Watchdog(0.0, print, most=0.3, give_up=ALONE.give_up) as watch:
        watch.limited = True
        watch.moved("a pipe")
        os.read(here, 1)
"""


def test_a_process_that_hangs_ends_with_the_status_that_starts_it_again():
    ended = subprocess.run(
        [sys.executable, "-c", HANGS], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == EXIT_RESTART and ended.stdout == ""
    stacks, error = ended.stderr.split("error: ")
    assert re.fullmatch(
        r"nothing has moved for \d+ s; waiting for a pipe; this process ends\. The same command "
        r"resumes from the last checkpoint\.\n",
        error,
    )
    assert "most recent call first" in stacks and 'File "<string>", line 9 in <module>' in stacks


@pytest.mark.parametrize("output", ["full", "broken", "closed"])
def test_a_process_that_hangs_ends_though_its_output_is_not_read(output):
    reads, writes = os.pipe()
    if output == "full":
        os.set_blocking(writes, False)
        with contextlib.suppress(BlockingIOError):
            while os.write(writes, bytes(4096)):
                pass
        os.set_blocking(writes, True)
    if output == "broken":
        os.close(reads)
    program = [sys.executable, "-c", HANGS]
    command = ["sh", "-c", 'exec "$@" >&-', "sh", *program] if output == "closed" else program
    ended = subprocess.run(command, cwd=ROOT, stdout=writes, stderr=writes, timeout=60)
    assert ended.returncode == EXIT_RESTART


def test_switched_off_there_is_no_thread():
    with Watchdog(0.0, print):
        assert not any(thread.name == "watchdog" for thread in threading.enumerate())


def test_a_phase_of_the_loop_is_movement_and_a_line_is_none(capsys):
    now, said = [0.0], []
    progress = Progress(3)
    watch = Watchdog(5.0, said.append, lambda: now[0])
    progress.watch = watch.moved
    now[0] = 4.0
    progress.doing("step 1: updating")
    progress.say("a line")
    now[0] = 9.0
    watch.look()
    assert said == ["  nothing has moved for 5 s; waiting for step 1: updating"]
    assert capsys.readouterr().out == "a line\n"
