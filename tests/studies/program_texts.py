"""Whether a commit changes what is computed: hashes of the programs that go to the compiler.

Command: python -m tests.studies.program_texts [CONFIG ...]     in a clone of each of two commits

One line for each program of a run on one CPU device: its length and hash before XLA. Equal lines
are equal programs, with the same speed and the same bits.
"""

import hashlib
import sys

import jax

import dapo_jax
from dapo_jax.models.sharding import make_mesh
from dapo_jax.tools.plan import programs

if __name__ == "__main__":
    for path in sys.argv[1:] or ("configs/tiny_dapo.py", "configs/qwen0_5b_gsm8k.py"):
        config = dapo_jax.load_config(path, {"mesh.fsdp": 1, "mesh.data": 1})
        mesh = make_mesh(config.mesh, jax.devices()[:1])
        for name, program in programs.programs(config, mesh).items():
            text = program.lower().as_text()
            print(path, name, len(text), hashlib.sha256(text.encode()).hexdigest()[:16])
