"""The largest model of each family that one accelerator trains: all parameters, LoRA, LoRA on int8.

Command: python -m tests.studies.largest_models             # by arithmetic, a minute
         python -m tests.studies.largest_models v5e v6e     # and compiled: 25 minutes,
                                                            # needs uv sync --extra tpu

The work is that of configs/qwen1_5b_gsm8k_lora.py with 32 slots and one row of 2,048 tokens in each
micro-batch. Sizes are those of each model's config.json on the hub. By arithmetic a model fits
where the memory holds both of these:

    rollouts   what a run holds then (memory_budget.held)
    updates    what a run holds then; the input of every layer; of one layer twice the activations
               and once attention's scores; three arrays of the logits of a chunk

The memory is what libtpu gives programs, or nine tenths of a GPU's. With topologies, the largest
that fits by arithmetic is compiled, and while one does not fit the next smaller one.
"""

import dataclasses
import functools
import json
import sys
from pathlib import Path

import jax.numpy as jnp

import dapo_jax
from dapo_jax.models.sharding import AXES
from dapo_jax.rollout import memory_budget
from dapo_jax.rollout.memory_budget import GIB
from dapo_jax.tools.plan import chips
from dapo_jax.tools.plan.plan import plan
from dapo_jax.tools.plan.programs import PROGRAMS

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "qwen1_5b_gsm8k_lora.py"
# The platform, memory in GiB, and the dtype of the arithmetic.
DEVICES = {
    "T4, 16 GB": ("gpu", 0.9 * 15.0, "float32"),
    "v5e-1": ("tpu", 15.75, "bfloat16"),
    "GPU of 24 GB": ("gpu", 0.9 * 24.0, "bfloat16"),
    "v6e-1": ("tpu", 31.24, "bfloat16"),
    "GPU of 80 GB": ("gpu", 0.9 * 80.0, "bfloat16"),
}
METHODS = {
    "all parameters": dict(lora_rank=0, lora_alpha=32.0, param_dtype="float32"),
    "LoRA": dict(lora_rank=32, param_dtype="float32"),
    "LoRA on int8": dict(lora_rank=32, param_dtype="int8"),
}
FIELDS = "num_layers hidden_size num_heads num_kv_heads head_dim intermediate_size vocab_size"
QWEN2 = dict(qkv_bias=True, qk_norm=False)
QWEN3 = dict(qkv_bias=False, qk_norm=True)
LLAMA = dict(qkv_bias=False, qk_norm=False)
# Of each family the sizes in descending order: FIELDS, and whether the embeddings are tied.
FAMILIES = {
    "Qwen2.5": (
        QWEN2,
        {
            "72B": (80, 8192, 64, 8, 128, 29568, 152064, False),
            "32B": (64, 5120, 40, 8, 128, 27648, 152064, False),
            "14B": (48, 5120, 40, 8, 128, 13824, 152064, False),
            "7B": (28, 3584, 28, 4, 128, 18944, 152064, False),
            "3B": (36, 2048, 16, 2, 128, 11008, 151936, True),
            "1.5B": (28, 1536, 12, 2, 128, 8960, 151936, True),
            "0.5B": (24, 896, 14, 2, 64, 4864, 151936, True),
        },
    ),
    "Qwen3": (
        QWEN3,
        {
            "32B": (64, 5120, 64, 8, 128, 25600, 151936, False),
            "14B": (40, 5120, 40, 8, 128, 17408, 151936, False),
            "8B": (36, 4096, 32, 8, 128, 12288, 151936, False),
            "4B": (36, 2560, 32, 8, 128, 9728, 151936, True),
            "1.7B": (28, 2048, 16, 8, 128, 6144, 151936, True),
            "0.6B": (28, 1024, 16, 8, 128, 3072, 151936, True),
        },
    ),
    "Llama 3": (
        LLAMA,
        {
            "70B": (80, 8192, 64, 8, 128, 28672, 128256, False),
            "8B": (32, 4096, 32, 8, 128, 14336, 128256, False),
            "3B": (28, 3072, 24, 8, 128, 8192, 128256, True),
            "1B": (16, 2048, 32, 8, 64, 8192, 128256, True),
        },
    ),
    "SmolLM2": (
        LLAMA,
        {
            "1.7B": (24, 2048, 32, 32, 64, 8192, 49152, True),
            "360M": (32, 960, 15, 5, 64, 2560, 49152, True),
            "135M": (30, 576, 9, 3, 64, 1536, 49152, True),
        },
    ),
}


def config_of(family, size, method, dtype):
    """The run's config; it is not checked, as the path of the base has other sizes."""
    kind, sizes = FAMILIES[family]
    *numbers, tied = sizes[size]
    changes = dict(zip(FIELDS.split(), numbers, strict=True)) | kind | METHODS[method]
    base = dapo_jax.load_config(f"{CONFIG}:t4" if dtype == "float32" else str(CONFIG))
    return dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, tie_embeddings=tied, **changes),
        mesh=dataclasses.replace(base.mesh, fsdp=1),
        rollout=dataclasses.replace(base.rollout, slots=32),
        train=dataclasses.replace(base.train, rows_per_micro_batch=1),
    )


@functools.cache
def needed(family, size, method, platform, dtype):
    """GiB that the run needs by arithmetic."""
    config = config_of(family, size, method, dtype)
    c, T = config.model, config.train.row_tokens
    held = memory_budget.held(config, dict.fromkeys(AXES, 1), platform=platform)
    width = jnp.dtype(c.compute_dtype).itemsize
    layer = (2 * c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    layer += 3 * c.intermediate_size + 4 * c.hidden_size
    activations = T * width * (c.num_layers * c.hidden_size + 2 * layer)
    activations += 3 * 4 * c.log_prob_chunk_tokens * c.vocab_size
    activations += c.num_heads * T * T * (4 + width)
    return max(held.rollout_bytes, held.update_bytes + activations) / GIB


def largest(family, method, platform, gib, dtype):
    """Sizes of the family that fit by arithmetic, the largest first, with the GiB they need."""
    need = {s: needed(family, s, method, platform, dtype) for s in FAMILIES[family][1]}
    return {size: gibs for size, gibs in need.items() if gibs <= gib}


def compile_largest(family, method, topology):
    """Prints the GiB of each program with what lies beside it, until a size fits."""
    target = chips.target(f"{topology}:1x1")
    device = DEVICES[f"{topology}-1"]
    for size in largest(family, method, *device):
        config = config_of(family, size, method, device[-1])
        lengths = dict(response_tokens=400, prompt_tokens=105)
        found = plan(config, target, wanted=PROGRAMS, say=lambda _: None, **lengths)
        peaks = {n: x["peak_bytes"] + x["held_bytes"] for n, x in found["programs"].items()}
        numbers = {name: round(peak / GIB, 2) for name, peak in peaks.items()}
        line = dict(topology=topology, method=method, model=f"{family} {size}", fits=found["fits"])
        print(json.dumps(line | {"GiB": numbers}), flush=True)
        if found["fits"]:
            return


def main(topologies):
    print("| device | method |" + "".join(f" {family} |" for family in FAMILIES))
    print("|---|---|" + "---|" * len(FAMILIES))
    for name, device in DEVICES.items():
        for method in METHODS:
            cells = []
            for family in FAMILIES:
                fits = largest(family, method, *device)
                cells += [f"{size} ({gib:.1f})" for size, gib in fits.items()][:1] or ["-"]
            print(f"| {name} | {method} | " + " | ".join(cells) + " |", flush=True)
    for topology in topologies:
        for method in METHODS:
            for family in FAMILIES:
                compile_largest(family, method, topology)


if __name__ == "__main__":
    main(sys.argv[1:])
