"""Whole runs in processes of their own, for the end-to-end tests."""

import importlib.util
import json
import os
import subprocess
import sys

from tests.conftest import FAST_COMPILATION, ROOT
from tests.helpers import tiny_dict


def load_launcher(name):
    spec = importlib.util.spec_from_file_location(f"launch_{name}", ROOT / "launch" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


def write_config(directory, **overrides):
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "a_config.py"
    file.write_text(
        "import ml_collections\n"
        f"def get_config():\n    return ml_collections.ConfigDict({tiny_dict(**overrides)!r})\n"
    )
    return file


def start(workdir, home, *, devices=1, optimise=False, **overrides):
    """launch/train.py in a process of its own."""
    command = [
        sys.executable,
        str(ROOT / "launch" / "train.py"),
        f"--config={write_config(workdir.with_name(workdir.name + '_config'), **overrides)}",
        f"--workdir={workdir}",
    ]
    env = environment(home, devices=devices, optimise=optimise)
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=env, cwd="/", stdout=pipe, stderr=pipe, text=True)


def environment(home, *, devices=1, optimise=False):
    """Of a process that keeps its caches in `home`."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    if not optimise:
        flags += f" {FAST_COMPILATION}"
    return os.environ | {
        "XDG_CACHE_HOME": str(home),
        "XLA_FLAGS": flags,
        "JAX_COMPILATION_CACHE_DIR": str(home / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


def finish(process):
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def run(workdir, home, **settings):
    code, out, err = finish(start(workdir, home, **settings))
    assert code == 0, err
    assert err == "", err  # a run that goes well warns of nothing
    return out


def metrics_of(workdir):
    """metrics.jsonl without what may vary."""
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    varies = ("time/", "perf/")
    return [
        {name: value for name, value in json.loads(line).items() if not name.startswith(varies)}
        for line in lines
    ]
