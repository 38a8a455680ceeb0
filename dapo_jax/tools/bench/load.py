"""Benchmark of loading a checkpoint: seconds, and memory besides the arrays."""

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from dapo_jax.config import ModelConfig, hf_config, model_config
from dapo_jax.models import hf_weights
from dapo_jax.models.sharding import AXES, fitting, make_mesh, param_shardings
from dapo_jax.tools.bench.memory import PeakMemory, resident_bytes
from dapo_jax.types import UserError

WIDTH, FF_WIDTH, VOCAB = 2048, 8192, 32_768
SHARD_BYTES = 500_000_000


def bench_load(gigabytes: float, devices: int) -> dict[str, Any]:
    """Loads a random checkpoint over `devices` virtual CPU devices and onto one.

    Returns:
        `sharded` and `one_device`, each with seconds, gigabytes, and in MB the arrays, the largest
        resident memory besides them, and the largest tensor.
    """
    if gigabytes <= 0 or devices < 1:
        raise UserError(
            f"--gigabytes must be above 0 and --devices 1 or more; got {gigabytes:g}, {devices}."
        )
    with tempfile.TemporaryDirectory() as place:
        _make(Path(place), gigabytes)
        sharded, one = (_in_a_process(place, number) for number in (devices, 1))
        return {"sharded": sharded, "one_device": one}


def _make(place: Path, gigabytes: float) -> None:
    """Writes a Qwen2 of about that size in bfloat16, in several files with their index."""
    values = {
        "model_type": "qwen2",
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "intermediate_size": FF_WIDTH,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
    }

    def shapes(layers: int) -> dict[str, tuple[int, ...]]:
        values["num_hidden_layers"] = layers
        (place / "config.json").write_text(json.dumps(values))
        return hf_weights.expected_shapes(_model(place))

    one, two = (sum(map(math.prod, shapes(layers).values())) for layers in (1, 2))
    layer = two - one
    wanted = shapes(max(1, round((gigabytes * 1e9 / 2 - (one - layer)) / layer)))
    rng = np.random.default_rng(0)
    noise = rng.standard_normal(VOCAB * WIDTH, np.float32).astype(ml_dtypes.bfloat16)
    shard: dict[str, np.ndarray] = {}
    file_of: dict[str, str] = {}
    for name, shape in wanted.items():
        shard[name] = noise[: math.prod(shape)].reshape(shape)
        size = sum(array.nbytes for array in shard.values())
        if size > SHARD_BYTES or len(file_of) + len(shard) == len(wanted):
            file = f"model-{len(set(file_of.values())) + 1:05d}.safetensors"
            save_file(shard, place / file)
            file_of |= dict.fromkeys(shard, file)
            shard = {}
    (place / hf_weights.INDEX).write_text(json.dumps({"weight_map": file_of}))


def _model(place: Path) -> ModelConfig:
    dtypes = dict.fromkeys(("param_dtype", "compute_dtype"), "bfloat16")
    return model_config(hf_config.filled({"path": str(place)} | dtypes))


def _in_a_process(place: str, devices: int) -> dict[str, Any]:
    flags = f"--xla_force_host_platform_device_count={devices}"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    program = "from dapo_jax.tools.bench import load; load.print_measured()"
    command = [sys.executable, "-c", program, place]
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(command, env=env, cwd=root, check=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout)


def measure(place: Path) -> dict[str, Any]:
    """Measures the loading of a checkpoint onto the devices of this process."""
    c = _model(place)
    layout = fitting(c, jax.device_count())
    shardings = param_shardings(c, layout, make_mesh(layout))
    start, before = time.monotonic(), resident_bytes()
    with PeakMemory() as memory:
        params = hf_weights.load(c, shardings)
    seconds = time.monotonic() - start
    leaves = jax.tree.leaves(params)
    held = sum(shard.data.nbytes for x in leaves for shard in x.addressable_shards)
    tensors = [math.prod(shape) for shape in hf_weights.expected_shapes(c).values()]
    return {
        "devices": jax.device_count(),
        "mesh": {axis: getattr(layout, axis) for axis in AXES},
        "seconds": round(seconds, 2),
        "gigabytes": round(2e-9 * sum(tensors), 2),
        "arrays_mb": round(held / 1e6),
        "besides_arrays_mb": round((memory.peak_bytes - before - held) / 1e6),
        "largest_tensor_mb": round(2e-6 * max(tensors)),
    }


def print_measured() -> None:
    """Prints what `measure` returns for the directory on the command line."""
    print(json.dumps(measure(Path(sys.argv[1]))))
