"""Measures: python launch/bench.py rollout | mismatch | train | step [flags] [--json]

rollout  random weights: tokens per second, occupancy of the decode slots while responses wait,
         compilations after the first run, peak memory, and seconds by phase
  --layers 4 --width 256 --heads 4 --kv_heads 2 --d_ff 1024 --vocab 512 --dtype float32   the model
  --prompts 4 --group 8 --prompt_len 32 --gen_len 128                                     the work
  --lengths uniform|longtail   of the responses: all gen_len; or log-normal with sigma 1, mean
                               gen_len / 4, at most gen_len
  --slots 0                    sequences decoded at once; 0: one for each response, at most 64
  --prefill_prompts 0          of a call; 0: all, at most 8
  --decode_steps 8 --page_tokens 32 --temperature 1 --top_p 1 --runs 7
mismatch of log-probs, in nats, between such rollouts and the trainer; flags of rollout without
         --runs, --lengths, --top_p and --prefill_prompts
train    one update, objective and optimiser of configs/tiny_dapo.py, random weights and tokens:
         tokens per second, share of what the matrix products with weights allow on this machine,
         peak memory, compile time, share of padding
  --layers ... --dtype float32   the model, as above; bfloat16 computes with float32 masters
  --batch 32 --row_len 160 --prompt_len 32   rows, tokens of a row, and of each prompt in it
  --packed                       as many responses as fit in the rows; without it one a row
  --lengths uniform|longtail     of the responses, as above, the longest filling a row
  --micro_batch 8 --runs 7       rows whose activations are alive at once; 0: all
  --remat dots                   config.model.remat
step     a whole step, rollout and one update on packed rows: seconds, and seconds by phase; flags
         of rollout without --temperature, --top_p and --prefill_prompts, and --micro_batch 8
         --remat dots --runs 5
  --share_prompts                prompts stand once in a row for all of their responses there
"""

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MODEL = {"layers": 4, "width": 256, "heads": 4, "kv_heads": 2, "d_ff": 1024, "vocab": 512}
WORK = {"prompts": 4, "group": 8, "prompt_len": 32, "gen_len": 128}
ENGINE = {"slots": 0, "decode_steps": 8, "page_tokens": 32}
TEXT = {"dtype": "float32", "lengths": "uniform"}
ROW = {"batch": 32, "row_len": 160, "prompt_len": 32, "micro_batch": 8, "runs": 7}
# By kind: (text flags, number flags, switches), with their defaults.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "rollout": (
        TEXT,
        MODEL | WORK | ENGINE | {"temperature": 1.0, "top_p": 1.0, "runs": 7, "prefill_prompts": 0},
        (),
    ),
    "mismatch": ({"dtype": "float32"}, MODEL | WORK | ENGINE | {"temperature": 1.0}, ()),
    "train": (TEXT | {"remat": "dots"}, MODEL | ROW, ("packed",)),
    "step": (
        TEXT | {"remat": "dots"},
        MODEL | WORK | ENGINE | {"micro_batch": 8, "runs": 5},
        ("share_prompts",),
    ),
}


def main(argv: list[str]) -> int:
    """Returns the exit status: 0 done, 2 the user's mistake, 1 a failure."""
    sys.path.insert(0, str(ROOT))
    from dapo_jax.config.cli import fail

    try:
        found = measure(argv)
        print(json.dumps(found) if "--json" in argv else json.dumps(found, indent=2))
    except Exception as error:
        return fail(error)
    return 0


def measure(argv: list[str]) -> dict[str, Any]:
    """Returns the figures that the command line asks for."""
    from configs import tiny_dapo
    from dapo_jax.config.cli import parse_flags
    from dapo_jax.tools import bench
    from dapo_jax.types import UserError

    kind, *rest = argv[1:] or [""]
    if kind not in KINDS:
        if not {"--help", "-h"} & set(argv):
            raise UserError(f"what is to be measured? Known are {', '.join(KINDS)}; got {kind!r}.")
        kind, rest = "rollout", ["--help"]
    text, numbers, switches = KINDS[kind]
    switches = ("json", *switches)
    program = [argv[0], *rest]
    flags = parse_flags(program, __doc__ or "", text=text, numbers=numbers, switches=switches)
    del flags["json"]
    base = tiny_dapo.get_config().to_dict()
    match kind:
        case "rollout":
            return bench.bench_rollout(bench.Shape(**flags))
        case "mismatch":
            return bench.bench_mismatch(bench.Shape(**flags, lengths="uniform", top_p=1.0, runs=1))
        case "train":
            return bench.bench_train(bench.TrainShape(**flags), base)
        case _:
            base["train"] = base["train"] | {"share_prompts": flags.pop("share_prompts")}
            micro_batch, remat = flags.pop("micro_batch"), flags.pop("remat")
            shape = bench.Shape(**flags, temperature=1.0, top_p=1.0)
            return bench.bench_step(shape, micro_batch, remat, base)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
