"""Whole runs for the end-to-end tests: in this process, or in processes of their own."""

import contextlib
import importlib.util
import io
import json
import os
import shutil
import socket
from pathlib import Path
from unittest import mock

import jax

from dapo_jax import setup, train_loop
from dapo_jax.models import decoder
from dapo_jax.models.sharding import AXES, make_mesh
from dapo_jax.runs.checkpoint import Checkpoints
from dapo_jax.runs.report import page as report_page
from dapo_jax.training import step as train_step
from dapo_jax.training.learner import LearnerState
from tests.conftest import FAST_COMPILATION, ROOT
from tests.support.forked import ForkedProgram
from tests.support.helpers import tiny_config, tiny_dict


def load_script(directory, name):
    """The module of a file that no package has, in docs/ say."""
    file = ROOT / directory / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"{directory}_{name}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_launcher(name):
    return load_script("launch", name).main


def call_main(capsys, main, *arguments):
    """(status, what it printed, what it printed as errors) of a launcher in this process."""
    status = main(["program", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert "Traceback" not in err, err
    return status, out, err


def write_config(directory, **overrides):
    directory.mkdir(parents=True, exist_ok=True)
    return write_values(directory, tiny_dict(**overrides))


def write_values(directory, values):
    """A config file of these values."""
    file = directory / "a_config.py"
    file.write_text(
        "import ml_collections\n"
        f"def get_config():\n    return ml_collections.ConfigDict({values!r})\n"
    )
    return file


def programs(home):
    """The directory of compiled programs, one for all processes of a test session."""
    # pytest-xdist gives each worker a directory popen-gwN of its own.
    shared = home.parent.parent if home.parent.name.startswith("popen-") else home.parent
    return os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(shared / "programs")


def run_here(workdir, home, *, devices=1, config=None, page=False, **overrides):
    """Trains in this process, on so many of its devices. Returns the signal that stopped the run,
    if one did, and what the run printed.

    Args:
        page: make the page of the run, which takes as long as many steps.
    """
    config = config or tiny_config(**overrides)
    mesh_of = lambda config: make_mesh(config, jax.devices()[:devices])
    jax.config.update("jax_compilation_cache_dir", programs(home))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    out = io.StringIO()
    with (
        mock.patch.dict(os.environ, XDG_CACHE_HOME=str(home)),
        mock.patch.object(setup, "make_mesh", mesh_of),
        contextlib.nullcontext() if page else mock.patch.object(report_page, "write_report"),
        jax.numpy_dtype_promotion("standard"),
        contextlib.redirect_stdout(out),
    ):
        stopped_by = train_loop.train(config, workdir)
    return stopped_by, out.getvalue()


TRAIN = ROOT / "launch" / "train.py"


def start(
    workdir, home, *, devices=1, optimise=False, process=0, flags=(), program=TRAIN, config=None,
    **overrides,
):  # fmt: skip
    """Starts launch/train.py, or another program, in a process of its own."""
    config = config or write_config(workdir.with_name(workdir.name + "_config"), **overrides)
    arguments = [str(program), f"--config={config}", f"--workdir={workdir}", *flags]
    env = environment(home, devices=devices, optimise=optimise, process=process)
    return ForkedProgram(arguments, env, workdir.parent)


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start_all(workdir, home, *, processes, devices, program=TRAIN, config=None, **overrides):
    """One run in several processes with so many devices each."""
    # Written once: the first process reads it while the others are started.
    config = config or write_config(workdir.with_name(workdir.name + "_config"), **overrides)
    settings = {"devices": devices, "program": program, "config": config}
    common = (f"--coordinator_address=127.0.0.1:{free_port()}", f"--num_processes={processes}")
    return [
        start(workdir, home, process=i, flags=(*common, f"--process_id={i}"), **settings)
        for i in range(processes)
    ]


def environment(home, *, devices=1, optimise=False, process=0):
    """The environment of a process that keeps its caches in `home`."""
    # Processes of one run compile the same programs at the same time: none reads what another
    # has half written.
    compiled = Path(programs(home), f"process_{process}" if process else "")
    flags = f"--xla_force_host_platform_device_count={devices}"
    if not optimise:
        flags += f" {FAST_COMPILATION}"
    return os.environ | {
        "XDG_CACHE_HOME": str(home),
        "XLA_FLAGS": flags,
        "JAX_COMPILATION_CACHE_DIR": str(compiled),
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
    """metrics.jsonl without times and other values that vary."""
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    varies = ("time/", "perf/")
    return [
        {name: value for name, value in json.loads(line).items() if not name.startswith(varies)}
        for line in lines
    ]


def rollouts_of(workdir, name="rollouts"):
    return {file.name: file.read_text() for file in (workdir / name).iterdir()}


def params_at(workdir, step, **overrides):
    """The trained parameters of a checkpoint, on one device."""
    config = tiny_config(**overrides | {f"mesh__{axis}": 1 for axis in AXES})
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    state = LearnerState(train_step.state_shardings(config, mesh), None)
    shapes = jax.eval_shape(
        lambda key: LearnerState(
            train_step.init_state(config, decoder.init_params(config.model, key)), None
        ),
        jax.random.key(0),
    )
    with jax.numpy_dtype_promotion("standard"):
        like = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, state
        )
    copy = workdir.with_name(f"{workdir.name}_upto_{step}")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(workdir / "checkpoints" / str(step), copy / str(step))
    with Checkpoints(copy, keep_newest=20, keep_best=0) as checkpoints:
        restored = checkpoints.restore(like.saved)
    assert restored is not None and restored[0] == step
    return jax.device_get(restored[1].policy.params)
