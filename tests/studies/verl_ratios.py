"""The published times of verl's three trainer modes against the simulator's.

Command: python -m tests.studies.verl_ratios [--steps=30] [--sigma=0.8] [--correlation=0.5]

Published (verl, docs/advance/v1_async_trainer.md, commit 1b86216e, "V1 trainer all modes"): the
first 150 steps of Qwen3.5-35B-A3B on four nodes of 8 GPUs, batches of 64 prompts, responses of at
most 32,768 tokens; replicas of 4 GPUs. On the same GPUs in turn ("sync") 22.79 h, with unfinished
responses carried over ("colocate_async") 14.72 h, two nodes sampling and two training
("separate_async") 14.10 h; mean lengths of 12,720, 12,854 and 12,288 tokens. Tokens per second
times seconds are 512 responses a step: 8 a prompt. Of another run (its "no-switch"), with one node
sampling for two that train: 13.15 h for 100 steps of 13,343 tokens.

Assumed: all prompts are kept; lengths are log-normal, and as many responses are in flight as in
verl, a batch in "sync" and two in the others (a warm-up batch, its default); a token of all of a
replica's slots takes a + b times the busy ones; half the nodes take twice as long to update;
prefills take what the products of 3e9 active parameters do at 40 % of an H100's peak.

Fitted: b, to the node that samples alone; a, so that a synchronous step takes its 547 s with the
update of each row. The update's share of a synchronous step is not published: the rows vary it.
"""

import sys
from collections.abc import Callable

import numpy as np

from dapo_jax.tools.plan import simulation, whole_steps, workload
from dapo_jax.tools.plan.simulation import Setting
from dapo_jax.tools.plan.virtual import Costs
from tests.support.helpers import tiny_config

GROUP, BATCH, MOST, PROMPT = 8, 64, 32_768, 157
MEANS = {"sync": 12_720, "carry": 12_854, "split": 12_288, "node": 13_343}
HOSTS = {"sync": 8, "carry": 8, "split": 4, "node": 2}  # replicas that sample
PUBLISHED = {"sync": 22.79 * 24, "carry": 14.72 * 24, "split": 14.10 * 24, "node": 13.15 * 36}
TOKEN_PREFILL = 2 * 3e9 / (4 * 989e12 * 0.4)  # s
TRANSFER = 2 * 35e9 / 4 / 50e9  # s: a GPU's share of bfloat16 weights at 400 Gb/s
STEPS = np.array([[1.2, 1.0], [1.0, 1.2]])  # of finite differences
STALENESS = 8  # verl's default threshold, in versions


def main(steps: int, sigma: float, correlation: float) -> None:
    """Prints a table of ratios by the update's share of a synchronous step."""
    work = {mode: workload_of(mean, sigma, correlation) for mode, mean in MEANS.items()}

    def rollouts(mode: str, a: float, b: float) -> list[float]:
        found = simulation.rollouts(setting(mode, a, b), work[mode], hosts=HOSTS[mode], steps=steps)
        return [one.seconds for one in found]

    print("| update / sync step | a, ms | b, ms | carry / sync | split / sync | published |")
    print("|---|---|---|---|---|---|")
    for share in (0.1, 0.2, 0.3, 0.4):
        update = share * PUBLISHED["sync"]
        a, b = fitted(rollouts, PUBLISHED["sync"] - update)
        updates = np.full(steps, update)
        whole = {
            mode: whole_steps.in_turn(rollouts(mode, a, b), updates) for mode in ("sync", "carry")
        }
        split = whole_steps.at_once(rollouts("split", a, b), 2 * updates, TRANSFER)
        total = {mode: sum(step.seconds for step in of) for mode, of in whole.items()}
        total["split"] = sum(step.seconds for step in split)
        ratios = [total[mode] / total["sync"] for mode in ("carry", "split")]
        print(f"| {share:.2f} | {1e3 * a:.1f} | {1e3 * b:.3f} | ", end="")
        print(" | ".join(f"{ratio:.2f}" for ratio in ratios), "| 0.65, 0.62 |", flush=True)


Rollouts = Callable[[str, float, float], list[float]]  # seconds, by mode and costs


def fitted(rollouts: Rollouts, sync: float) -> tuple[float, float]:
    """Returns the costs (a, b) with these seconds of a synchronous rollout and the node's step."""
    wanted, at = np.array([sync, PUBLISHED["node"]]), np.array([6e-3, 5e-5])
    found = lambda a, b: np.array([np.mean(rollouts(mode, a, b)) for mode in ("sync", "node")])
    for _ in range(3):  # Newton's method; the seconds are almost linear in both
        here = found(*at)
        slopes = np.stack([(found(*at * up) - here) / (at * (up - 1)).sum() for up in STEPS], 1)
        at = np.maximum(at + np.linalg.solve(slopes, wanted - here), at / 10)
    return float(at[0]), float(at[1])


def workload_of(mean: int, sigma: float, correlation: float) -> workload.Workload:
    """Returns lengths whose mean after the cut is the published one."""
    low, high = float(mean), float(MOST)
    of = lambda m: workload.lengths_of(f"lognormal:{m}:{sigma}:{correlation}", MOST)
    for _ in range(20):
        middle = (low + high) / 2
        rng = np.random.default_rng(0)
        found = np.mean([of(middle)(rng, GROUP) for _ in range(10_000)])
        low, high = (low, middle) if found > mean else (middle, high)
    return workload.sampled(of(low), 1.0, GROUP, seed=0)


def setting(mode: str, a: float, b: float) -> Setting:
    """Returns the replicas of a mode."""
    in_flight = GROUP * BATCH * (1 if mode == "sync" else 2)
    config = tiny_config(
        rollout__group_size=GROUP,
        rollout__max_response_tokens=MOST,
        rollout__max_staleness=0 if mode == "sync" else STALENESS,
        rollout__slots=in_flight,
        train__prompts_per_step=BATCH,
        train__prompts_per_update=16,
        train__row_tokens=MOST + 2048,
        dynamic_sampling__enabled=False,
        dynamic_sampling__max_prompts=BATCH,
    )
    unit = simulation.unit_tokens(config)
    decode = lambda busy, cached: unit * (a + b * busy)
    costs = Costs(decode, TOKEN_PREFILL * PROMPT, reward=0.001)
    return Setting(config, in_flight // HOSTS[mode], 1, unit, PROMPT, costs)


if __name__ == "__main__":
    given = dict(text.lstrip("-").split("=") for text in sys.argv[1:])
    main(
        int(given.get("steps", 30)),
        float(given.get("sigma", 0.8)),
        float(given.get("correlation", 0.5)),
    )
