"""Which block sizes of the TPU's attention kernels compile, and what the compiler says of them.

Command: python -m tests.studies.tpu_blocks [v5e v5p v6e]     needs uv sync --extra tpu

The candidates of launch/check.py --tune, for the shapes of the 1.5B and 7B. One line of JSON for
each chip, model and pass: by candidate the compiler's estimates, or why it refuses.
"""

import json
import re
import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dapo_jax.tools.bench.shapes import bench_model
from dapo_jax.tools.check import tuning
from dapo_jax.tools.check.machine import MODELS
from dapo_jax.tools.plan import chips

TOPOLOGIES = {"v5e": "v5e:1x1", "v5p": "v5p:2x2x1", "v6e": "v6e:1x1"}


def estimates(device, c, pass_, blocks):
    """Returns the compiler's figures for a program, or its refusal."""
    mesh, everywhere = Mesh(np.array([device]), ("x",)), PartitionSpec()
    here = NamedSharding(mesh, everywhere)
    run, shapes = tuning.program(c, pass_, tuple(blocks.items()))
    # The kernel of paged attention looks up the chip by the mesh that it is in.
    run = jax.shard_map(run, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False)
    try:
        compiled = jax.jit(run, in_shardings=here, out_shardings=here).lower(*shapes).compile()
    except Exception as error:  # Mosaic's and XLA's own, of several kinds
        needed = re.search(
            r"[Ss]coped allocation with size ([\d.]+[KMG]?) and limit ([\d.]+[KMG]?)", str(error)
        )
        return {"refused": needed.groups() if needed else str(error)[:300]}
    cost = compiled.cost_analysis() or {}
    figures = {
        key: cost[key] for key in ("flops", "bytes accessed", "optimal_seconds") if key in cost
    }
    return figures | {"temporary_bytes": compiled.memory_analysis().temp_size_in_bytes}


if __name__ == "__main__":
    for chip in sys.argv[1:] or TOPOLOGIES:
        device = chips.target(TOPOLOGIES[chip]).devices[0]
        for model in ("1.5B", "7B"):
            c = bench_model((*MODELS[model], "bfloat16"))
            for group in tuning.groups(c):
                for blocks in group.candidates:
                    found = estimates(device, c, group.pass_, blocks)
                    line = {"chip": chip, "model": model, "pass": group.pass_, "blocks": blocks}
                    print(json.dumps(line | found), flush=True)
