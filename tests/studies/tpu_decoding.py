"""What a compiled decode program exchanges between the chips of a replica, and what it copies.

Command: python -m tests.studies.tpu_decoding [v5e:2x2 v5p:2x2x1 v6e:2x2] [1.0 0.7]
         topologies and values of top-p; needs uv sync --extra tpu

The program is that of configs/qwen7b_dapo.py over 4 chips, two layers of it, with top-p and
without. One line of JSON for each. What grows with the vocabulary or the cache must stay where it
is: other trainers gathered logits over chips at every token.
"""

import dataclasses
import json
import math
import sys
from pathlib import Path

import dapo_jax
from dapo_jax.models.sharding import make_mesh
from dapo_jax.tools.plan import chips, programs
from tests.support import hlo

ROOT = Path(__file__).resolve().parents[2]
TOPOLOGIES = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2")
CHIPS, LAYERS, SLOTS = 4, 2, 128


def measure(topology, top_p):
    """Compiles the program. Returns elements: of the logits on one chip, of the largest array that
    any exchange leaves, and of the cache; and the arrays that are copied and as large as a layer of
    the cache."""
    config = dapo_jax.load_config(str(ROOT / "configs" / "qwen7b_dapo.py"))
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, num_layers=LAYERS),
        mesh=dataclasses.replace(config.mesh, data=1, fsdp=1, tensor=CHIPS),
        rollout=dataclasses.replace(config.rollout, top_p=top_p, slots=SLOTS),
    )
    target = chips.target(topology)
    mesh = make_mesh(config.mesh, target.devices)
    program = programs.programs(config, mesh)["decode"]
    text = program.lower().compile().as_text()
    engine = programs.engine_of(config, mesh)
    (pool,) = engine.pool_layout.pool(config.model, engine.shard_pages)
    own_pool = math.prod(pool.shape) // CHIPS
    exchanged = {array: math.prod(array[2]) for array in hlo.collectives(text)}
    largest = max(exchanged, key=lambda array: exchanged[array])
    return {
        "topology": topology,
        "top_p": top_p,
        "own_logits": SLOTS * config.model.vocab_size // CHIPS,
        "exchanged": exchanged[largest],
        "largest": largest,
        "own_pool": own_pool,
        "copied": [a for a in hlo.copies(text) if math.prod(a[1]) >= own_pool // LAYERS],
    }


if __name__ == "__main__":
    topologies = [given for given in sys.argv[1:] if ":" in given] or TOPOLOGIES
    top_ps = [float(given) for given in sys.argv[1:] if ":" not in given] or (1.0, 0.7)
    for topology in topologies:
        for top_p in top_ps:
            print(json.dumps(measure(topology, top_p)), flush=True)
