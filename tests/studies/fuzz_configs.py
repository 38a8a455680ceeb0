"""Random configs, each run in two ways.

Command: python -m tests.studies.fuzz_configs [--first=0] [--last=20]

Samples a method (objective, advantage, sampling, model) and two computations of it (mesh, rows,
rematerialisation, slots, pages, chunks). Both must generate the same responses and give the same
numbers for the first step, to rounding. Prints a line for each pair and exits 0 if all agree that
are not refused. A pair takes half a minute to one and a half on two cores.
"""

import argparse
import contextlib
import io
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests import conftest  # eight virtual devices

# isort: split
import jax

from dapo_jax.algorithms.advantages import ADVANTAGES
from dapo_jax.algorithms.aggregation import AGGREGATIONS
from dapo_jax.config import Config
from dapo_jax.train_loop import train
from dapo_jax.types import UserError
from tests.algorithms.test_policy_losses import SETTINGS, configured
from tests.support.helpers import tiny_dict
from tests.support.runs import metrics_of, rollouts_of

assert conftest
CORRECTION = dict(policy="old", importance=("token", None, 2.0))
SLIDING = {"sliding_window": (9, (1,))}
QWEN3 = {"qk_norm": True, "qkv_bias": False, "tie_embeddings": False}
MODELS: tuple[dict[str, Any], ...] = ({}, QWEN3 | SLIDING, {"num_kv_heads": 4})
# data, fsdp, context and tensor over eight devices.
MESHES = [(8, 1, 1, 1), (1, 8, 1, 1), (2, 2, 1, 2), (1, 2, 2, 2), (1, 4, 2, 1), (4, 1, 1, 2)]
MESHES += [(1, 1, 4, 2), (2, 2, 2, 1), (1, 1, 8, 1)]
ONE_STEP = {
    "train__num_steps": 1,
    "train__prompts_per_update": 4,  # one update: the next meets what rounding made of the first
    "evaluation__every_steps": 1,
    "checkpoint__every_steps": 1,
    "log__rollouts_per_step": 100_000,
}
# Metrics of the computation, or of timing.
MAY_DIFFER = ("batch/padding_share", "rollout/log_prob_mismatch", "mismatch/")


def learned(rng: random.Random) -> dict[str, Any]:
    """Returns overrides of the method: what is learned."""
    loss = rng.choice(["ppo-clip", *SETTINGS])
    advantage = rng.choice(["grpo", *(a for a in ADVANTAGES if a not in ("grpo-process", "gdpo"))])
    values = {"normalise_std": rng.choice([True, False]), "std_ddof": rng.choice([0, 1])}
    values |= {"gamma": rng.choice([1.0, 0.99]), "gae_lambda": 0.95}
    read = ADVANTAGES[advantage].arguments
    chosen = configured(loss) | {
        "objective__advantage": advantage,
        "objective__aggregation": rng.choice([*AGGREGATIONS]),
        "objective__overlong_filter": rng.random() < 0.3,
        "objective__top_entropy_share": rng.choice([1.0, 1.0, 0.2]),
        "objective__entropy_coefficient": rng.choice([0.0, 0.0, 0.01]),
        "objective__entropy_adaptation": rng.choice([None, None, (1.5, 0.01)]),
        "rollout__temperature": rng.choice([1.0, 1.0, 0.7]),
        "rollout__top_p": rng.choice([1.0, 1.0, 0.9]),
        "rollout__top_k": rng.choice([0, 0, 5]),
        "rollout__stop_strings": rng.choice([(), (), ("=",), ("\n",)]),
        "rollout__end_repetition": rng.choice([None, None, 1, 3]),
        "rollout__end_of_thinking": rng.choice([None, None, (6, "\nAnswer: ")]),
        "rollout__group_size": rng.choice([2, 3, 4, 8]),
        "seed": rng.randrange(3),
    }
    chosen["objective__advantage_args"] = {k: v for k, v in values.items() if k in read}
    chosen |= {f"model__{name}": value for name, value in rng.choice(MODELS).items()}
    if rng.random() < 0.3:
        chosen["objective__kl_coefficient"] = 0.05
        chosen["objective__kl_estimator"] = rng.choice(["k1", "abs", "k2", "k3", "k3+"])
    cut = chosen["rollout__top_p"] < 1 or chosen["rollout__top_k"] > 0
    corrected = rng.random() < 0.2
    if cut or corrected or rng.random() < 0.3:
        chosen["rollout__log_prob_source"] = "recompute"
    if corrected:
        rules = (("seq-mean-k1", 0.99, 1.01), ("token-k1", 0.5, 1.5), ("sequence-mask", None, 0.1))
        reject = rng.choice([(), *((rule,) for rule in rules)])
        chosen["correction"] = CORRECTION | {"reject": reject}
        if rng.random() < 0.5:
            chosen["correction"]["importance"] = ("normalised-token", None, 2.0)
    if advantage == "gae":
        critic = dict(learning_rate=1e-3, value_clip=0.5, head_start_steps=0)
        return chosen | {"critic": critic, "dynamic_sampling__enabled": False}
    enabled = rng.random() < 0.8
    return chosen | {
        "dynamic_sampling__enabled": enabled,
        "rollout__max_staleness": 2 if rng.random() < 0.3 else 0,
    }


def computed(rng: random.Random) -> dict[str, Any]:
    """Returns overrides of the computation: devices, batches, memory."""
    axes = zip(("data", "fsdp", "context", "tensor"), rng.choice(MESHES))
    slots = rng.choice([8, 16, 24, 48])
    of_slots = rng.choice([None, None, None, 0.5, 0.8])  # all at their longest need 16 KiB each
    return {f"mesh__{axis}": size for axis, size in axes} | {
        "mesh__rollout_tensor": rng.choice([None, None, 1, 2]),
        "rollout__slots": slots,
        "rollout__cache_gib": None if of_slots is None else of_slots * slots * 2**14 / 2**30,
        "rollout__prefill_prompts": rng.choice([8, 16]),
        "rollout__decode_steps": rng.choice([1, 3, 8, 16]),
        "rollout__page_tokens": rng.choice([8, 16, 32]),
        "train__row_tokens": rng.choice([64, 96, 128, 256]),
        "train__rows_per_micro_batch": rng.choice([8, 16]),
        "train__share_prompts": rng.random() < 0.25,
        "model__remat": rng.choice(["none", "dots", "dots_no_batch", "attention", "full"]),
        "model__log_prob_chunk_tokens": rng.choice([16_384, 64, 32]),
    }


def run(config: Config, workdir: Path) -> None:
    # optax's update is not written for strict promotion.
    silent = contextlib.redirect_stdout(io.StringIO())
    with silent, jax.numpy_dtype_promotion("standard"):
        stopped_by = train(config, workdir)
    if stopped_by is not None:
        sys.exit(128 + stopped_by)
    jax.clear_caches()


def differences(one: Path, other: Path, loss: str) -> list[str]:
    """Returns the differences between the first steps of two runs."""
    a, b = (metrics_of(workdir)[1] for workdir in (one, other))
    # The gradient of |log ratio| at 0 is a matter of rounding, and so is which of two tokens with
    # like covariances is among the largest.
    unsure = ("optimizer/grad_norm",) if loss in ("kl-cov", "clip-cov") else ()
    found = [
        f"{name}: {a.get(name)} and {b.get(name)}"
        for name in sorted(a.keys() | b.keys())
        if not name.startswith(MAY_DIFFER + unsure) and not close(a.get(name), b.get(name))
    ]
    sampled = [responses_in(workdir) for workdir in (one, other)]
    if sampled[0] != sampled[1]:
        found.append(f"{len(sampled[0])} and {len(sampled[1])} responses, not the same")
    return found


def close(a: Any, b: Any) -> bool:
    numbers = isinstance(a, int | float) and isinstance(b, int | float)
    return math.isclose(a, b, rel_tol=2e-3, abs_tol=1e-4) if numbers else a == b


def responses_in(workdir: Path) -> list[Mapping[str, Any]]:
    (text,) = rollouts_of(workdir).values()
    rows = [json.loads(line) for line in text.splitlines()]
    return [{k: v for k, v in row.items() if not isinstance(v, float)} for row in rows]


def main(argv: list[str]) -> int:
    """0 if every pair that is not refused agrees."""
    parser = argparse.ArgumentParser(description="runs random configs in two ways each")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--last", type=int, default=20)
    arguments = parser.parse_args(argv)
    failures = 0
    for number in range(arguments.first, arguments.last):
        rng, start = random.Random(number), time.monotonic()
        what, ways = learned(rng), [computed(rng), computed(rng)]
        with tempfile.TemporaryDirectory() as place:
            workdirs = [Path(place) / str(i) for i in range(len(ways))]
            try:
                for workdir, way in zip(workdirs, ways):
                    run(Config.from_dict(tiny_dict(**ONE_STEP | what | way)), workdir)
                found = differences(*workdirs, what["objective__loss"])
            except UserError as error:
                print(f"{number}: refused: {error}", flush=True)
                continue
        failures += bool(found)
        said = f"differ\n  {what}\n  {ways[0]}\n  {ways[1]}\n  " + "\n  ".join(found)
        seconds = time.monotonic() - start
        print(f"{number}: {said if found else 'agree'} ({seconds:.0f} s)", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
