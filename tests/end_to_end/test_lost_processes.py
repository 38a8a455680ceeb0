"""A process that dies, freezes or hangs ends the others."""

import re
import signal
import time

import pytest

from dapo_jax.distributed import EXIT_RESTART
from tests.conftest import ROOT
from tests.support.processes import RUN, begin, finish_all
from tests.support.runs import finish

# launch/train.py, but the second process hangs in its fourth step.
HANGS = f"""
import pathlib, runpy, sys, time
sys.path.insert(0, {str(ROOT)!r})
if __name__ == "__main__":
    from dapo_jax import train_loop
    ready = train_loop.TrainLoop._groups_to_train
    def hang(self, groups, step):
        if step == 4 and self.process_group.index == 1:
            pathlib.Path(__file__).with_suffix(".begun").touch()
            time.sleep(10_000)
        return ready(self, groups, step)
    train_loop.TrainLoop._groups_to_train = hang
    runpy.run_path({str(ROOT / "launch" / "train.py")!r}, run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize("lost, number", [(0, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_a_process_that_is_lost_ends_the_others(home, tmp_path, lost, number):
    """JAX aborts them, a status that launch/restart.sh starts again."""
    started = begin(tmp_path / "run", home, 1, **RUN | {"train__num_steps": 1000})
    started[lost].send_signal(number)
    sent = time.monotonic()
    code, _, err = finish(started[1 - lost])
    assert time.monotonic() - sent < 60
    started[lost].kill()
    finish(started[lost])
    assert code == -signal.SIGABRT and "another task died" in err, err


@pytest.mark.slow
def test_a_process_that_hangs_ends_all(home, tmp_path):
    """Both print their stacks: one hangs in a call, the other awaits it."""
    program = tmp_path / "hangs.py"
    program.write_text(HANGS)
    workdir = tmp_path / "run"
    settings = RUN | {"train__num_steps": 1000, "rollout__watchdog_limit_seconds": 30.0}
    settings["reward__timeout_seconds"] = 5.0
    started = begin(workdir, home, 3, program=program, **settings)
    (code, _, err), (code_of_hung, _, err_of_hung) = finish_all(started)
    assert time.time() - program.with_suffix(".begun").stat().st_mtime < 60
    assert (code, code_of_hung) == (EXIT_RESTART, EXIT_RESTART)
    message = r"nothing has moved for \d+ s; waiting for"
    assert re.search(message, err) and re.search(message, err_of_hung)
    assert "hangs.py" in err_of_hung and "in hang" in err_of_hung
    assert "hangs.py" in err and "in hang" not in err and "in one_step" in err
