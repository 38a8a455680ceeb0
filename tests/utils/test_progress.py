"""Progress where nothing reads what a run prints, or cannot show it."""

import io
import os
import pty
import subprocess
import sys

from dapo_jax.utils.progress import Progress

CODE = """
import sys, time
from dapo_jax.utils.progress import Progress
progress = Progress(2)
progress.say("one")
sys.stdin.readline()
progress.say("two")
print("three", file=sys.stderr, flush=True)
progress.say("four")
sys.exit(5)
"""


def test_the_run_continues_where_its_output_is_read_by_nothing_any_more():
    """As after Ctrl-C in `train.py 2>&1 | tee log`, which ends tee first."""
    process = subprocess.Popen(
        [sys.executable, "-c", CODE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "one\n"
        process.stdout.close()
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.wait(60) == 5


def test_a_program_without_standard_error_runs():
    """Started by `2>&-`, as some daemons are."""
    without = ["sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable, "-c", CODE]
    ended = subprocess.run(without, input="\n", stdout=subprocess.PIPE, text=True, timeout=60)
    assert (ended.returncode, ended.stdout.split()) == (5, ["one", "two", "three", "four"])


def test_what_the_output_cannot_encode_is_escaped():
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Progress(2, out).say("\u00fc and \ud800")
    out.seek(0)
    assert out.read() == "\\xfc and \\ud800\n"


def test_the_run_continues_when_its_terminal_is_closed():
    """SIGHUP, which it is sent too, is left out here."""
    ours, theirs = pty.openpty()
    code = f"import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n{CODE}"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        shown = b""
        while b"one" not in shown:
            shown += os.read(ours, 100)
        os.close(ours)
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.wait(60) == 5


def test_a_progress_file_that_cannot_be_written_ends_nothing(tmp_path, monkeypatch):
    """It lies in a job's temporary directory, which may be full or gone."""
    progress = Progress(10, io.StringIO())
    for file in (tmp_path / "progress", tmp_path / "gone" / "progress"):
        monkeypatch.setenv("DAPO_PROGRESS", str(file))
        progress.step({"step": 3, "time/step": 1.0})
    assert (tmp_path / "progress").read_text() == "3\n"


def test_the_time_left_does_not_count_the_evaluation_of_the_base_model():
    out = io.StringIO()
    progress = Progress(10, out)
    progress.step({"step": 0, "time/step": 600.0})
    progress.step({"step": 1, "time/step": 2.0})
    progress.step({"step": 2, "time/step": 4.0})
    assert [line.split()[-2:] for line in out.getvalue().splitlines()[2:]] == [
        ["18", "s"],
        ["24", "s"],
    ]


def test_the_time_left_of_a_resumed_run_is_by_the_steps_of_this_start():
    """Six of its seven steps were made by an earlier one."""
    out = io.StringIO()
    progress = Progress(10, out)
    progress.first_step = 6
    progress.step({"step": 7, "time/step": 4.0})
    assert out.getvalue().split()[-2:] == ["12", "s"]
