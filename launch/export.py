"""Exports: python launch/export.py --workdir=DIR --output=HFDIR [--step=N] [--dtype=bfloat16]

Writes a checkpoint of a run as a complete Hugging Face directory: config.json, safetensors with
their index, tokenizer and generation_config.json.

--workdir  of the run
--output   a new or empty directory
--step     of a checkpoint, default the newest
--dtype    of the tensors, float32 or bfloat16; default the run's compute dtype
--adapter  of a run with config.model.lora_rank: its adapters alone, as peft keeps them; without
           this they are merged into the weights
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(argv: list[str]) -> int:
    """Returns the exit status: 0 done, 2 the user's mistake, 1 a failure."""
    sys.path.insert(0, str(ROOT))
    from dapo_jax.config.cli import fail, parse_flags

    try:
        flags = parse_flags(
            argv,
            __doc__ or "",
            text={"workdir": None, "output": None, "dtype": ""},
            numbers={"step": -1},
            switches=("adapter",),
        )
        from dapo_jax.tools.export import export

        place = lambda name: Path(flags[name]).expanduser().resolve()
        step = None if flags["step"] < 0 else flags["step"]
        dtype, adapter = flags["dtype"] or None, flags["adapter"]
        print(export(place("workdir"), step, place("output"), dtype, adapter=adapter))
    except Exception as error:
        return fail(error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
