"""Seconds of whole steps: rollouts as simulated, and updates, in turn or at the same time.

Split meshes: some hosts sample, the others train. Update s begins when batch s is full and update
s - 1 has ended. Its parameters reach a second buffer of the sampler `transfer` seconds after it
has ended; meanwhile the sampler samples. Rollout s + 1 begins when rollout s has ended and the
parameters of update s - 1 are there. These lack one update, which is one of the steps of
`config.rollout.max_staleness`. The other steps are for carried responses, as in `rollout.carry`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from dapo_jax.config import Config
from dapo_jax.tools.plan import estimate
from dapo_jax.tools.plan.chips import Chip
from dapo_jax.tools.plan.report import seconds_text


class Step(NamedTuple):
    """One whole step. All values are seconds."""

    seconds: float  # since the update before ended
    rollout: float
    update: float  # with recomputed log-probs
    sampler_waits: float = 0.0  # for parameters, before the rollout
    trainer_waits: float = 0.0  # for the batch


def in_turn(rollouts: Sequence[float], updates: Sequence[float]) -> list[Step]:
    """Returns the steps of hosts that do both."""
    return [Step(sum(pair), *pair) for pair in zip(rollouts, updates, strict=True)]


def at_once(rollouts: Sequence[float], updates: Sequence[float], transfer: float) -> list[Step]:
    """Returns the steps of hosts that sample and of others that train, see above."""
    steps = []
    full = ended = arrived = 0.0  # times: batch, update, parameters of the update before that
    for rollout, update in zip(rollouts, updates, strict=True):
        begins = max(full, arrived)
        sampler_waits, full = begins - full, begins + rollout
        arrived = ended + transfer if steps else 0.0
        trained = max(full, ended) + update
        trainer_waits = max(full, ended) - ended
        steps.append(Step(trained - ended, rollout, update, sampler_waits, trainer_waits))
        ended = trained
    return steps


def best_split(of: Callable[[int], Sequence[Step]], hosts: int) -> int:
    """Returns how many of the hosts should sample.

    With more, rollouts are shorter and updates longer: one of the two numbers around the point
    where they take as long.

    Args:
        of: the steps, by the number of hosts that sample.
    """
    low, high = 1, hosts - 1  # the least number with rollouts as short as updates, if there is one
    while low < high:
        middle = (low + high) // 2
        steps = of(middle)
        counted = steps[1:] or steps
        if sum(step.rollout - step.update for step in counted) <= 0:
            high = middle
        else:
            low = middle + 1
    return min(max(1, low - 1), low, key=lambda num: mean_seconds(of(num)))


def mean_seconds(steps: Sequence[Step]) -> float:
    """Returns the mean of the steps after the first, which starts cold."""
    counted = steps[1:] or steps
    return sum(step.seconds for step in counted) / len(counted)


def update_seconds(
    config: Config,
    sizes: Mapping[str, int],
    chip: Chip,
    *,
    share: float,
    response_tokens: float,
    prompt_tokens: int,
    trained_prompts: int | None = None,
) -> float:
    """Returns the estimated seconds of a step's updates and of the log-probs before them.

    Args:
        sizes: sizes of the mesh's axes.
        share: of its devices that train: the data axis is smaller, then fsdp.
        response_tokens, prompt_tokens: mean lengths.
        trained_prompts: of a short batch; None: of a full one.
    """
    shards = sizes["data"] * sizes["fsdp"] * share
    fsdp = min(sizes["fsdp"], shards)
    scaled: Any = {**sizes, "data": shards / fsdp, "fsdp": fsdp}
    lengths = dict(response_tokens=round(response_tokens), prompt_tokens=prompt_tokens)
    found = estimate.step(config, scaled, chip, **lengths, trained_prompts=trained_prompts)
    parts = found["parts"]
    return sum(parts[name]["seconds"] for name in estimate.BATCHED if name in parts)


def describe(found: Mapping[str, Any]) -> str:
    """Returns the steps that `many_hosts` found as text."""
    steps = [Step(*values) for values in found["steps"]]
    counted = steps[1:] or steps
    mean = lambda name: sum(getattr(step, name) for step in counted) / len(counted)
    how = "rollout and update in turn"
    if found["sampling"]:
        how = f"{found['sampling']} hosts sampling and {found['training']} training"
    first, others = seconds_text(steps[0].seconds), seconds_text(mean_seconds(steps))
    lines = [
        f"Whole steps, {how}: the first takes {first}, the others {others} on average, with "
        f"rollouts of {seconds_text(mean('rollout'))} and updates of "
        f"{seconds_text(mean('update'))}. Trained tokens are up to {found['staleness']} rollout "
        "steps old."
    ]
    if found["sampling"]:
        sampler, trainer = (
            mean(f"{name}_waits") / mean_seconds(steps) for name in ("sampler", "trainer")
        )
        lines.append(
            f"Parameters arrive {found['transfer_seconds']:.2g} s after an update. The sampler "
            f"waits for them {sampler:.1%} of the time, the trainer for its batch {trainer:.1%}."
        )
    return "\n".join(lines)
