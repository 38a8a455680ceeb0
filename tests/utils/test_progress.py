"""Progress where nothing reads what a run prints."""

import subprocess
import sys

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
