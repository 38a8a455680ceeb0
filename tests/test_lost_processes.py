"""A process of a run that dies or freezes: the others end, and the run goes on."""

import shutil
import signal
import time

import pytest

from dapo_jax.processes import START_AGAIN
from tests.processes import DEVICES, RUN, assert_same_run, begin
from tests.runs import finish, run


@pytest.mark.slow
@pytest.mark.parametrize(
    "lost, number", [(1, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGSTOP)]
)
def test_a_process_that_is_lost_ends_the_others_and_the_run_goes_on(home, tmp_path, lost, number):
    """In another number of processes, to the same parameters but for rounding."""
    workdir = tmp_path / "run"
    started = begin(workdir, home, 1, **RUN | {"train__num_steps": 1000})
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
        one = tmp_path / "one"
        run(one, home, devices=DEVICES, **RUN)
        # As far as the run that was not disturbed.
        for step in (workdir / "checkpoints").iterdir():
            if step.name.isdigit() and int(step.name) > 2:
                shutil.rmtree(step)
        assert "resuming after step" in run(workdir, home, devices=DEVICES, **RUN)
        assert_same_run(one, workdir)
