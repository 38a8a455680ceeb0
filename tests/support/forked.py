"""Python programs in processes of their own that need not import JAX and this project: each is
forked from a server that has, which saves 5 s of CPU time."""

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["dapo_jax.train_loop"])


class ForkedProgram:
    """Runs a program and keeps its output in files of a new directory inside `directory`. Has the
    methods of `subprocess.Popen` that tests call."""

    def __init__(self, arguments: list[str], env: dict[str, str], directory: Path):
        place = Path(tempfile.mkdtemp(prefix="output-", dir=directory))
        self._output = place / "out", place / "err"
        self._process = _context.Process(target=_run, args=(arguments, env, *self._output))
        self._process.start()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None and self._process.pid is not None:
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def communicate(self, timeout: float) -> tuple[str, str]:
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired("a forked program", timeout)
        out, err = (file.read_text() for file in self._output)
        return out, err


def _run(arguments: list[str], env: dict[str, str], out: Path, err: Path) -> None:
    for file, number in ((out, 1), (err, 2)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(env)
    os.chdir("/")
    import jax
    from jax._src import compiler

    # What JAX reads from the environment as it is imported.
    jax.config.update("jax_compilation_cache_dir", env["JAX_COMPILATION_CACHE_DIR"])
    seconds = float(env["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)
    # JAX lets process 0 alone write compiled programs, so others compile theirs in every run. Here
    # each has a directory of its own.
    compiler.distributed = SimpleNamespace(global_state=SimpleNamespace(process_id=0, client=None))
    sys.argv = arguments
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # multiprocessing passes over them
