"""Silence is told of, and what is waited for; whatever the main thread is blocked in."""

import os
import subprocess
import sys
import threading

from dapo_jax.distributed.process_group import EXIT_RESTART
from dapo_jax.utils.progress import Progress
from dapo_jax.utils.watchdog import UNWATCHED, Watchdog
from tests.conftest import ROOT


def test_it_tells_of_silence_once_and_then_each_time_it_has_doubled():
    said, now = [], [0.0]
    watch = Watchdog(10.0, said.append, lambda: now[0])
    watch.moved("the device")

    def told_from(first, last):
        for now[0] in range(first, last):
            before = len(said)
            watch.look()
            if len(said) > before:
                yield now[0], said[-1]

    line = "  nothing has moved for {}; waiting for {}".format
    assert list(told_from(0, 15)) == [(10, line("10 s", "the device"))]
    watch.waiting_for("reward workers")  # which is no movement
    assert list(told_from(15, 79)) == [
        (20, line("20 s", "reward workers")),
        (40, line("40 s", "reward workers")),
    ]
    watch.moved()
    assert list(told_from(79, 98)) == [(88, line("10 s", "reward workers"))]
    # A thread that could not look for long tells once of all of it.
    now[0] = 1000.0
    for _ in range(3):
        watch.look()
    assert said[4:] == [line("15 min 22 s", "reward workers")]


def test_what_loads_a_model_ends_the_silence_each_time_that_it_asks():
    now, said, asked = [0.0], [], []
    watch = Watchdog(10.0, said.append, lambda: now[0])
    call = watch.moving(lambda: asked.append(now[0]))
    for now[0] in (9.0, 18.0):
        call()
        watch.look()
    assert asked == [9.0, 18.0] and said == []
    now[0] = 28.5
    watch.look()
    assert len(said) == 1


def test_a_main_thread_that_is_blocked_need_do_nothing():
    """In a call that only another thread ends."""
    said = []
    here, there = os.pipe()
    with Watchdog(0.2, said.append) as watch:
        watch.moved("a pipe")
        late = threading.Timer(1.2, os.write, (there, b"x"))
        late.start()
        assert os.read(here, 1) == b"x"
        told = list(said)
    late.join()
    os.close(here)
    os.close(there)
    assert 2 <= len(told) <= 3 and all(line.endswith("waiting for a pipe") for line in told)
    assert not any(thread.name == "watchdog" for thread in threading.enumerate())


def test_it_gives_up_in_the_end_and_says_of_what():
    said, given_up, now = [], [], [0.0]
    watch = Watchdog(10.0, said.append, lambda: now[0], most=35.0, give_up=given_up.append)
    watch.moved("storage")
    for now[0] in range(100):
        watch.look()
    assert len(said) == 4 and given_up == [], "only where it is limited"
    said.clear()
    watch.limited, now[0] = True, 0.0
    watch.moved("the device")
    for now[0] in range(36):
        watch.look()
    assert len(said) == 2 and given_up == ["nothing has moved for 35 s; waiting for the device"]
    watch.moved()
    watch.look()
    assert len(given_up) == 1


def test_a_process_that_hangs_ends_with_the_status_that_starts_it_again():
    program = """if True:
        import os
        from dapo_jax.distributed.process_group import ALONE
        from dapo_jax.utils.watchdog import Watchdog
        here, _ = os.pipe()
        with Watchdog(0.0, print, most=0.3, give_up=ALONE.give_up) as watch:
            watch.limited = True
            watch.moved("a pipe")
            os.read(here, 1)
    """
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == EXIT_RESTART and ended.stdout == ""
    stacks, error = ended.stderr.split("error: ")
    assert error == (
        "nothing has moved for 0 s; waiting for a pipe; this process ends. The same command "
        "resumes from the last checkpoint.\n"
    )
    assert "most recent call first" in stacks and 'File "<string>", line 9 in <module>' in stacks


def test_switched_off_there_is_no_thread():
    with Watchdog(0.0, print):
        assert not any(thread.name == "watchdog" for thread in threading.enumerate())
    UNWATCHED.moved("nothing")


def test_what_the_loop_does_is_movement(capsys):
    now, said = [0.0], []
    progress = Progress(3, 0)
    watch = Watchdog(5.0, said.append, lambda: now[0])
    progress.watch = watch.moved
    now[0] = 4.0
    progress.doing("step 1: updating")
    now[0] = 8.0
    watch.look()
    progress.say("a line of the watchdog's is none")
    now[0] = 9.0
    watch.look()
    assert said == ["  nothing has moved for 5 s; waiting for step 1: updating"]
    assert "watchdog" in capsys.readouterr().out
