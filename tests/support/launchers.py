"""The shell scripts in launch/: dry runs, and programs that stand in for those they call."""

import os
import subprocess

from tests.conftest import ROOT

GOLDENS = ROOT / "tests" / "goldens" / "launchers"
PLACE = "--project=my-project --zone=us-east5-a --name=qwen32b"
CLUSTER = f"{PLACE} --cluster=dapo"
TRAIN = "-- --config=configs/qwen32b_dapo.py --workdir=/shared/runs/qwen32b"
SLICE = "--accelerator_type=v5p-128 --runtime_version=v2-alpha-tpuv5 --spot"
NFS = "--nfs=10.0.0.2:/shared"
NODES = "--accelerator=tpu-v5p-slice --topology=4x4x4 --storage=shared"
IMAGE = "--image=REGISTRY/dapo_jax:1"
CAPACITY = "--tpu_type=v5p-128 --storage_gb=4096 --spot"
GPUS = "--nodes=8 --gpus_per_node=8 --cpus_per_process=12"

# What docs/pods.md shows. Each file of goldens has commands and what their dry runs print.
DRY_RUNS = {
    "tpu_vm": [
        f"launch/tpu_vm.sh create {PLACE} {SLICE}",
        f"launch/tpu_vm.sh setup {PLACE} {NFS}",
        f"launch/tpu_vm.sh start {PLACE} {TRAIN}",
        f"launch/tpu_vm.sh status {PLACE}",
        f"launch/tpu_vm.sh tail {PLACE}",
        f"launch/tpu_vm.sh stop {PLACE}",
        f"launch/tpu_vm.sh delete {PLACE}",
        f"launch/tpu_vm.sh run {PLACE} {SLICE} {NFS} {TRAIN}",
    ],
    "xpk": [
        f"launch/xpk.sh create {CLUSTER} --storage=shared {CAPACITY}",
        f"launch/xpk.sh setup {IMAGE}",
        f"launch/xpk.sh start {CLUSTER} {NODES} {IMAGE} {TRAIN}",
        f"launch/xpk.sh status {CLUSTER}",
        f"launch/xpk.sh tail {CLUSTER}",
        f"launch/xpk.sh stop {CLUSTER}",
        f"launch/xpk.sh delete {CLUSTER}",
        f"launch/xpk.sh run {CLUSTER} {CAPACITY} {NODES} {IMAGE} {TRAIN}",
    ],
    "slurm": [
        f"launch/slurm.sh {GPUS} --time=24:00:00 {TRAIN}",
        f"launch/slurm.sh {GPUS} --processes_per_node=1 {TRAIN}",
    ],
    "restart": [f"launch/restart.sh -- .venv/bin/python launch/train.py {TRAIN[3:]}"],
}
MANIFEST = f"launch/xpk.sh manifest {CLUSTER} {NODES} {IMAGE} --env=LIBTPU_INIT_ARGS=--x=1 {TRAIN}"


def call(line, *, cwd=ROOT, path=None, **variables):
    """(status, output, errors) of a command of launch/, whose programs are looked for in `path`."""
    variables = {"PATH": f"{path}:{os.environ['PATH']}"} | variables if path else variables
    command = ["bash", "-c", line]
    done = subprocess.run(
        command, cwd=cwd, env=os.environ | variables, capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stdout, done.stderr


def dry_run(line):
    """What a command prints that runs nothing."""
    head, dashes, rest = line.partition(" -- ")
    status, out, err = call(f"{head} --dry_run{dashes}{rest}", path="/nowhere")
    assert status == 0, err
    return out


def golden(name):
    return "".join(f"$ {line}\n{dry_run(line)}" for line in DRY_RUNS[name])


def stand_in(directory, name, script):
    """A program called `name` in `directory`, which also writes its arguments to `log` there."""
    directory.mkdir(exist_ok=True)
    file = directory / name
    file.write_text(f'#!/usr/bin/env bash\necho "{name} $*" >> "{directory}/log"\n{script}\n')
    file.chmod(0o755)
    return file


def statuses(directory, *values):
    """A program that ends with these statuses, one after the other, and then with 99."""
    queue = directory / "statuses"
    queue.write_text("".join(f"{value}\n" for value in values))
    take = f'status=$(head -n 1 "{queue}")\nsed -i.old 1d "{queue}"\nexit "${{status:-99}}"'
    return stand_in(directory, "train", take)


def calls(directory):
    """The command lines of the stand-ins in `directory`, in their order."""
    log = directory / "log"
    return log.read_text().splitlines() if log.exists() else []
