"""What a run's compiled programs exchange between the chips of a replica, and what they copy.

Command: python -m tests.studies.tpu_programs [v5e:2x2 v5p:2x2x1 v6e:2x2]
         needs uv sync --extra tpu

The programs are those of configs/qwen7b_dapo.py with top-p over 4 chips, fsdp x tensor 2 x 2, two
layers of it. One line of JSON for each topology. What grows with the vocabulary or the cache must
stay where it is, and shards must not wait for each other at every token: other trainers paid for
both.
"""

import dataclasses
import json
import math
import sys
from pathlib import Path

import jax

import dapo_jax
from dapo_jax.models.sharding import make_mesh
from dapo_jax.rollout.programs import Programs
from dapo_jax.rollout.slots import NewRequests
from dapo_jax.tools.plan import chips, programs
from tests.support import hlo

ROOT = Path(__file__).resolve().parents[2]
TOPOLOGIES = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2")
FSDP, TENSOR = 2, 2
ROW_TOKENS = 2304  # no other axis has this length


def config_of_two_layers():
    """Returns the run's config."""
    config = dapo_jax.load_config(str(ROOT / "configs" / "qwen7b_dapo.py"))
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, num_layers=2),
        mesh=dataclasses.replace(config.mesh, data=1, fsdp=FSDP, tensor=TENSOR),
        data=dataclasses.replace(config.data, max_prompt_tokens=512),
        rollout=dataclasses.replace(
            config.rollout, top_p=0.7, slots=128, prefill_prompts=4, max_response_tokens=1024
        ),
        reward=dataclasses.replace(config.reward, overlong_buffer_tokens=0),
        train=dataclasses.replace(config.train, row_tokens=ROW_TOKENS, rows_per_micro_batch=FSDP),
    )


def measure(topology):
    """Compiles the programs. Returns by program what must not be found in them, and the sizes that
    the rest is compared with."""
    config = config_of_two_layers()
    c, mesh = config.model, make_mesh(config.mesh, chips.target(topology).devices)
    engine = programs.engine_of(config, mesh)
    (pool,) = engine.pool_layout.pool(c, engine.shard_pages)
    own_layer = math.prod(pool.shape[1:]) // TENSOR
    run = programs.programs(config, mesh)
    decode, prefill, train = (run[n].lower().compile() for n in ("decode", "prefill", "train"))
    insert = compiled_insert(engine, mesh, prefill.out_info)
    text = {"decode": decode, "prefill": prefill, "insert": insert, "train": train}
    text = {name: program.as_text() for name, program in text.items()}
    found = {name: hlo.exchanges(of) for name, of in text.items()}
    pool_copied = lambda name: [a for a in hlo.copies(text[name]) if math.prod(a[1]) >= own_layer]
    handed_over = (
        *zip(prefill.output_formats.pages, insert.input_formats[0][1].pages, strict=True),
        *zip(insert.output_formats.pool, decode.input_formats[0][1].pool, strict=True),
    )
    elements = lambda one: max(math.prod(shape) for _, shape in one.arrays)
    which = lambda wanted, name: [one.named for one in found[name] if wanted(one)]
    return {
        "topology": topology,
        "hidden": engine.shard_slots * c.hidden_size,
        "own_logits": engine.shard_slots * c.vocab_size // TENSOR,
        "own_pool_layer_bytes": own_layer * pool.dtype.itemsize,
        "decode": {
            "exchanges": len(found["decode"]),
            "largest": max(map(elements, found["decode"])),
            "between_shards": which(lambda one: not one.within(TENSOR), "decode"),
            "of_one_element": which(lambda one: elements(one) == 1, "decode"),
            "in_conditions": [one.named for one in hlo.exchanges_in_conditions(text["decode"])],
            "pool_copied": pool_copied("decode"),
            "temporary_bytes": decode.memory_analysis().temp_size_in_bytes,
        },
        "insert": {"exchanges": len(found["insert"]), "pool_copied": pool_copied("insert")},
        "prefill": {
            "exchanges": len(found["prefill"]),
            # Hidden states are summed. Keys and values stay with their heads.
            "other_than_sums": which(lambda one: one.kind != "all-reduce", "prefill"),
            "relaid": [[str(made), str(taken)] for made, taken in handed_over if made != taken],
        },
        "train": {
            "exchanges": len(found["train"]),
            "large": which(lambda one: any(map(not_weights(c), one.arrays)), "train"),
        },
    }


def not_weights(c):
    """Returns a test of (dtype, shape): larger than the hidden states of a device's tokens, and no
    part of the unembedding. Logits are that, also of a part of the vocabulary or of the tokens."""

    def test(array):
        size, longest = math.prod(array[1]), max(array[1], default=1)
        weights = size // longest in (c.hidden_size, c.hidden_size // FSDP)
        return size > ROW_TOKENS * c.hidden_size and not weights

    return test


def compiled_insert(engine, mesh, prefix):
    """Returns the program that puts prefilled prompts into the pool."""
    run = Programs(engine, mesh, mesh)
    new = NewRequests.none(engine, engine.prefill_prompts // engine.shards, engine.params)
    shapes = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    return run.insert.lower(jax.eval_shape(run.init), shapes(prefix), new).compile()


if __name__ == "__main__":
    for topology in sys.argv[1:] or TOPOLOGIES:
        print(json.dumps(measure(topology)), flush=True)
