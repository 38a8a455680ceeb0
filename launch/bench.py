"""Measures: python launch/bench.py rollout | gap | train | step | packing | load [flags] [--json]

rollout  random weights, tied embeddings: tokens per second, occupancy of the decode slots while
         responses wait, compilations after the first run, peak memory, seconds by phase, and the
         share of this machine's limit: on CPU what the matrix products alone allow, on GPU and TPU
         what reading weights and cache does
  --layers 4 --width 256 --heads 4 --kv_heads 2 --d_ff 1024 --vocab 512 --dtype float32   the model
  --prompts 4 --group 8 --prompt_len 32 --gen_len 128                                     the work
  --lengths uniform|longtail   of the responses: all gen_len; or log-normal with sigma 1, mean
                               gen_len / 4, at most gen_len
  --slots 0                    sequences decoded at once; 0: as many as responses, at most 64
  --prefill_prompts 0          of a call; 0: all there are, at most 8
  --decode_steps 8 --page_tokens 32 --temperature 1 --top_p 1 --runs 7
gap      how far the log-probs that such rollouts store are from the trainer's, in nats; flags as of
         rollout, but for --runs and --lengths
train    one update, objective and optimiser of configs/tiny_dapo.py, random weights and tokens:
         tokens per second, share of what the matrix products with weights allow on this machine,
         peak memory, compile time, share of padding
  --layers ... --dtype float32   the model, as above; bfloat16 computes with float32 masters
  --batch 32 --row_len 160 --prompt_len 32   rows, tokens of a row, and of each prompt in it
  --packed                       as many responses as fit in the rows; without it one a row
  --lengths uniform|longtail     of the responses, as above, the longest filling a row
  --micro_batch 8 --runs 7       rows whose activations are alive at once; 0: all
  --remat dots                   what is kept of them for the backward pass: config.model.remat
step     a whole step, rollout and one update on packed rows: seconds, and seconds by phase; flags
         as of rollout, but for --temperature, --top_p and --prefill_prompts, and --micro_batch 8
         --remat dots --runs 5
  --share_prompts                prompts stand once in a row for all of their responses there
packing  nothing is run: how evenly attention over packed rows lies over devices, with the rows of
         a mini-batch as first-fit-decreasing leaves them, and in the order that updates take; how
         many blocks splash attention computes, whole rows have, and pairs of tokens attend
  --responses 512 --prompt_len 512 --row_len 22528 --lengths longtail|uniform
  --micro_batch 32 --shards 16   rows of a micro-batch, and devices that they lie over
load     a made checkpoint onto virtual CPU devices, and onto one: seconds, and the memory that was
         needed besides the arrays
  --gigabytes 2 --devices 8
"""

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def main(argv: list[str]) -> int:
    """The exit status: 0 done, 2 the user's mistake, 1 a failure."""
    sys.path.insert(0, str(ROOT))
    from dapo_jax.config.cli import fail

    try:
        found = measure(argv)
        print(json.dumps(found) if "--json" in argv else json.dumps(found, indent=2))
    except Exception as error:
        return fail(error)
    return 0


def measure(argv: list[str]) -> dict:
    """The figures of what the command line asks for."""
    from dapo_jax.config.cli import parse_flags
    from dapo_jax.types import UserError

    sizes: dict[str, float] = {
        "layers": 4, "width": 256, "heads": 4, "kv_heads": 2, "d_ff": 1024, "vocab": 512,
    }  # fmt: skip
    numbers = sizes | {
        "prompts": 4, "group": 8, "prompt_len": 32, "gen_len": 128, "slots": 0,
        "decode_steps": 8, "page_tokens": 32, "temperature": 1.0,
    }  # fmt: skip
    text: dict[str, str | None] = {"dtype": "float32", "lengths": "uniform"}
    kinds: dict[str, dict[str, Any]] = {
        "rollout": {
            "text": text,
            "numbers": {**numbers, "top_p": 1.0, "runs": 7, "prefill_prompts": 0},
        },
        "gap": {"text": {"dtype": "float32"}, "numbers": numbers},
        "train": {
            "text": {**text, "remat": "dots"},
            "numbers": sizes | {
                "batch": 32, "row_len": 160, "prompt_len": 32, "micro_batch": 8, "runs": 7,
            },
            "switches": ("packed",),
        },
        "step": {
            "text": {**text, "remat": "dots"},
            "numbers": {
                **{name: value for name, value in numbers.items() if name != "temperature"},
                "micro_batch": 8, "runs": 5,
            },
            "switches": ("share_prompts",),
        },
        "packing": {
            "text": {"lengths": "longtail"},
            "numbers": {
                "responses": 512, "row_len": 22_528, "prompt_len": 512, "micro_batch": 32,
                "shards": 16,
            },
        },
        "load": {"text": {}, "numbers": {"gigabytes": 2.0, "devices": 8}},
    }  # fmt: skip
    kind = argv[1] if len(argv) > 1 else ""
    if kind not in kinds and not {"--help", "-h"} & set(argv):
        raise UserError(f"what is to be measured? Known are {', '.join(kinds)}; got {kind!r}.")
    known = kinds.get(kind, {"text": {}, "numbers": {}})
    flags = parse_flags(
        [argv[0], *argv[2:]] if kind in kinds else argv,
        __doc__ or "",
        text=known["text"],
        numbers=known["numbers"],
        switches=("json", *known.get("switches", ())),
    )
    del flags["json"]
    if kind == "load":
        from dapo_jax.tools.bench.load import bench_load

        return bench_load(**flags)
    if kind == "train":
        from configs import tiny_dapo
        from dapo_jax.tools.bench.train import TrainShape, bench_train

        return bench_train(TrainShape(**flags), tiny_dapo.get_config().to_dict())
    if kind == "packing":
        from dapo_jax.tools.bench.packing import PackingShape, bench_packing

        return bench_packing(PackingShape(**flags))
    from dapo_jax.tools.bench.shapes import Shape

    if kind == "step":
        from configs import tiny_dapo
        from dapo_jax.tools.bench.step import bench_step

        base = tiny_dapo.get_config().to_dict()
        base["train"] = base["train"] | {"share_prompts": flags.pop("share_prompts")}
        micro_batch, remat = flags.pop("micro_batch"), flags.pop("remat")
        return bench_step(Shape(**flags, temperature=1.0, top_p=1.0), micro_batch, remat, base)
    if kind == "gap":
        from dapo_jax.tools.bench.gap import bench_gap

        return bench_gap(Shape(**flags, lengths="uniform", top_p=1.0, runs=1))
    from dapo_jax.tools.bench.rollout import bench_rollout

    return bench_rollout(Shape(**flags))


if __name__ == "__main__":
    sys.exit(main(sys.argv))
