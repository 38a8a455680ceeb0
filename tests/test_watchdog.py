"""Silence is told of, and what is waited for; whatever the main thread is blocked in."""

import os
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np

from dapo_jax import compilations
from dapo_jax.processes import START_AGAIN
from dapo_jax.progress import Progress
from dapo_jax.watchdog import LEAST_HANG_SECONDS, UNWATCHED, Watchdog
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


class Steps:
    """A watchdog of a run whose steps take as long as they are told."""

    def __init__(self, factor=10.0):
        self.now, self.given_up = 0.0, []
        self.watch = Watchdog(
            0.0, print, lambda: self.now, hang_factor=factor, give_up=self.given_up.append
        )

    def passes(self, seconds):
        """Time in which the main thread does nothing; the watchdog looks every second."""
        for _ in range(seconds):
            self.now += 1.0
            self.watch.look()

    def step(self, *pauses):
        """Draws a while, then makes updates."""
        self.begin()
        for number, pause in enumerate(pauses):
            self.watch.moved(f"step {len(self.watch._steps)}: update {number}")
            self.passes(pause)
        self.watch.step_done()
        self.watch.limited = False

    def begin(self):
        self.watch.moved("drawing")
        self.watch.limited = True
        self.passes(1)


def test_a_main_thread_hangs_that_is_still_for_many_times_the_longest_of_the_phase_before():
    run = Steps()
    for pauses in ((1, 7, 2), (1,), (3, 2)):
        run.step(*pauses)
        run.passes(500)  # what is saved
    run.begin()
    run.passes(20)
    run.watch.moved("step 4: update 0")
    run.passes(69)
    assert run.given_up == []
    run.passes(1)
    (why,) = run.given_up
    assert why.startswith("the main thread has been in ") and why.endswith(
        " for 1 min 10 s, 7 s at most in the steps before; waiting for step 4: update 0"
    )
    # Drawing has been short, apart from this once: a hang in it is found in less than a minute.
    run = Steps()
    for _ in range(3):
        run.step(30)
    run.begin()
    run.passes(int(LEAST_HANG_SECONDS) - 2)
    assert run.given_up == []
    run.passes(1)
    assert len(run.given_up) == 1 and run.given_up[0].endswith("waiting for drawing")


def test_who_compiles_or_waits_for_one_that_does_not_hang(monkeypatch):
    run = Steps()
    for _ in range(3):
        run.step(1)
    run.begin()
    run.watch.others_compile = lambda: True
    run.passes(1000)
    run.watch.others_compile = lambda: False
    with monkeypatch.context() as patch:
        patch.setattr("dapo_jax.compilations.under_way", lambda frame: True)
        run.passes(1000)
        assert run.watch.sign().compiling
    assert run.given_up == [] and not run.watch.sign().compiling
    run.passes(int(LEAST_HANG_SECONDS))
    assert len(run.given_up) == 1


def test_a_thread_that_compiles_is_seen_to():
    seen, main, over = [], threading.get_ident(), threading.Event()

    def look():
        while not over.wait(0.001):
            seen.append(compilations.under_way(sys._current_frames()[main]))

    thread = threading.Thread(target=look)
    thread.start()
    jax.jit(lambda x: sum(jnp.sin(x * n) @ x for n in range(50)))(np.ones((8, 8), np.float32))
    over.set()
    thread.join()
    assert any(seen) and not compilations.under_way(sys._current_frames()[main])


def test_who_asks_again_and_again_does_not_hang():
    """For the verdicts of workers and of other processes, however long they take."""
    run = Steps()
    for _ in range(3):
        run.step(1)
    run.begin()
    for ask in (run.watch.lives, lambda: run.watch.waiting_for("process 1")):
        for _ in range(100):
            ask()
            run.passes(9)
    assert run.given_up == []


def test_what_is_not_known_or_outside_of_the_run_is_no_hang():
    run = Steps()
    run.passes(1000)
    for _ in range(3):
        run.step(1000)
    run.step(1)
    run.passes(1000)
    run.begin()
    run.watch.moved("evaluation, for the first time")
    run.passes(1000)
    run.watch.moved("drawing", measured=False)
    run.passes(1000)
    assert run.given_up == []
    alone = Steps(factor=0.0)
    for _ in range(3):
        alone.step(1)
    alone.watch.limited = True
    alone.passes(1000)
    assert alone.given_up == []


def test_a_process_that_hangs_ends_with_the_status_that_starts_it_again():
    program = """if True:
        import os
        from dapo_jax.processes import ALONE
        from dapo_jax.watchdog import Watchdog
        here, _ = os.pipe()
        with Watchdog(0.0, print, most=0.3, give_up=ALONE.give_up) as watch:
            watch.limited = True
            watch.moved("a pipe")
            os.read(here, 1)
    """
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == START_AGAIN and ended.stdout == ""
    assert ended.stderr == (
        "error: nothing has moved for 0 s; waiting for a pipe; this process ends. The same command "
        "goes on from the last checkpoint.\n"
    )


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
