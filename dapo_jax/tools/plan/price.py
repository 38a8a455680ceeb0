"""Seconds and chip-hours of a run: rollouts and evaluation as simulated, updates by arithmetic."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from dapo_jax.config import Config
from dapo_jax.tools.plan import estimate, simulation
from dapo_jax.tools.plan.chips import Chip
from dapo_jax.tools.plan.simulation import Rollout, Setting
from dapo_jax.tools.plan.workload import Lengths, drawn


def price(
    setting: Setting,
    chip: Chip,
    sizes: Mapping[str, int],
    rollouts: Sequence[Rollout],
    lengths: Lengths,
    *,
    hosts: int,
    response_tokens: int,
    heldout_prompts: int,
) -> dict[str, Any] | None:
    """Seconds of a step and of the run; None where the chip's rates are not known.

    Args:
        sizes: of the mesh's axes.
        rollouts: the first steps as simulated. The first of several does not count: it begins with
            a prior instead of an estimate.
        lengths: of responses, those of an evaluation too.
        hosts: that they were simulated with; together they are the mesh.
        response_tokens: mean length.
        heldout_prompts: prompts of an evaluation.
    """
    config = setting.config
    done = estimate.step(
        config, sizes, chip,
        response_tokens=response_tokens, prompt_tokens=setting.prompt_tokens,
    )  # fmt: skip
    if done["seconds"] is None:
        return None
    counted = rollouts[1:] or rollouts
    sampled = ("prefill", "decode")  # that the simulation has
    parts = {"rollout": sum(one.seconds for one in counted) / len(counted)}
    parts |= {k: part["seconds"] for k, part in done["parts"].items() if k not in sampled}
    evaluation = _evaluation(setting, lengths, hosts, heldout_prompts)
    every, steps = config.evaluation.every_steps, config.train.num_steps
    parts["evaluation"] = evaluation / every
    seconds, chips = sum(parts.values()), math.prod(sizes.values())
    hours = seconds * steps / 3600
    return {
        "chip": chip.name,
        "chips": chips,
        "parts": parts,
        "evaluation_seconds": evaluation,
        "evaluation_every_steps": every,
        "heldout_prompts": heldout_prompts,
        "step_seconds": seconds,
        "num_steps": steps,
        "hours": hours,
        "chip_hours": hours * chips,
    }


def describe(found: Mapping[str, Any]) -> str:
    """A price as one line."""
    parts = " + ".join(f"{name} {seconds:,.0f}" for name, seconds in found["parts"].items())
    return (
        f"Price: one step takes {found['step_seconds']:,.0f} s = {parts} (one evaluation of "
        f"{found['heldout_prompts']} prompts takes {found['evaluation_seconds']:,.0f} s, every "
        f"{found['evaluation_every_steps']} steps). {found['num_steps']:,} steps take "
        f"{found['hours']:,.0f} hours on {found['chips']} {found['chip']}: "
        f"{found['chip_hours']:,.0f} chip-hours. Start, checkpoints and what restarts lose come "
        "on top."
    )


def _evaluation(setting: Setting, lengths: Lengths, hosts: int, prompts: int) -> float:
    """Seconds of an evaluation, as a rollout whose groups are all wanted."""
    samples = max(2, setting.config.evaluation.num_samples)  # one alone is never informative
    prompts = math.ceil(prompts * setting.config.evaluation.num_samples / samples)
    config: Config = dataclasses.replace(
        setting.config,
        rollout=dataclasses.replace(setting.config.rollout, group_size=samples),
        train=dataclasses.replace(
            setting.config.train, prompts_per_step=prompts, prompts_per_update=prompts
        ),
    )
    work = drawn(lengths, 1.0, samples, config.seed)
    setting = setting._replace(config=config)
    return simulation.rollout(setting, work, hosts=hosts, policy="ours", step=0, share=1.0).seconds
