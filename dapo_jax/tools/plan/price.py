"""The price of a run: rollouts and evaluation as simulated, updates by arithmetic."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from dapo_jax.rollout.dynamic_sampling import DynamicSamplingState
from dapo_jax.tools.plan import estimate, simulation
from dapo_jax.tools.plan.chips import Chip
from dapo_jax.tools.plan.report import number_text, seconds_text
from dapo_jax.tools.plan.simulation import Rollout, Setting
from dapo_jax.tools.plan.workload import Lengths, sampled


def price(
    setting: Setting,
    chip: Chip,
    sizes: Mapping[str, int],
    rollouts: Sequence[Rollout],
    lengths: Lengths,
    *,
    hosts: int,
    response_tokens: int,
    eval_prompts: int,
) -> dict[str, Any] | None:
    """Returns seconds of a step and of the run, and chip-hours; None where the chip's rates are not
    known.

    Args:
        sizes: sizes of the mesh's axes.
        rollouts: the first steps, simulated. The first of several is left out, since it starts with
            a prior instead of an estimate.
        lengths: of responses, also in evaluation.
        hosts: number of hosts simulated; together they are the mesh.
        response_tokens: mean length.
        eval_prompts: prompts of one evaluation.
    """
    config = setting.config
    counted = rollouts[1:] or rollouts
    trained = sum(simulation.trained_prompts(config, one) for one in counted) / len(counted)
    lengths_of_step = dict(response_tokens=response_tokens, prompt_tokens=setting.prompt_tokens)
    step = estimate.step(config, sizes, chip, **lengths_of_step, trained_prompts=round(trained))
    if step["seconds"] is None:
        return None
    simulated = ("prefill", "decode")
    parts = {"rollout": sum(one.seconds for one in counted) / len(counted)}
    parts |= {k: part["seconds"] for k, part in step["parts"].items() if k not in simulated}
    evaluation = _evaluation_seconds(setting, lengths, hosts, eval_prompts)
    every, steps = config.evaluation.every_steps, config.train.num_steps
    parts["evaluation"] = evaluation / every
    seconds, num_chips = sum(parts.values()), math.prod(sizes.values())
    hours = seconds * steps / 3600
    return {
        "chip": chip.name,
        "chips": num_chips,
        "parts": parts,
        "evaluation_seconds": evaluation,
        "evaluation_every_steps": every,
        "heldout_prompts": eval_prompts,
        "step_seconds": seconds,
        "num_steps": steps,
        "hours": hours,
        "chip_hours": hours * num_chips,
    }


def describe(found: Mapping[str, Any]) -> str:
    """Returns a price as one line."""
    parts = " + ".join(f"{name} {number_text(part)}" for name, part in found["parts"].items())
    return (
        f"Price: one step takes {seconds_text(found['step_seconds'])} = {parts} (one evaluation of "
        f"{found['heldout_prompts']} prompts takes {seconds_text(found['evaluation_seconds'])}, "
        f"every {found['evaluation_every_steps']} steps). {found['num_steps']:,} steps take "
        f"{number_text(found['hours'])} hours on {found['chips']} {found['chip']}: "
        f"{number_text(found['chip_hours'])} chip-hours. Start, checkpoints and restarts are not "
        "included."
    )


def _evaluation_seconds(setting: Setting, lengths: Lengths, hosts: int, prompts: int) -> float:
    """Simulates an evaluation as a rollout whose groups are all kept."""
    config, num = setting.config, setting.config.evaluation.num_samples
    samples = max(2, num)  # a group of one sample is never informative
    prompts = math.ceil(prompts * num / samples)
    # The limit on the prompts that a training step tries is none on those of an evaluation.
    most = max(prompts, config.dynamic_sampling.max_prompts)
    changed = dataclasses.replace(
        config,
        rollout=dataclasses.replace(config.rollout, group_size=samples, max_staleness=0),
        dynamic_sampling=dataclasses.replace(config.dynamic_sampling, max_prompts=most),
        train=dataclasses.replace(
            config.train, prompts_per_step=prompts, prompts_per_update=prompts
        ),
    )
    workload = sampled(lengths, 1.0, samples, config.seed)
    setting = setting._replace(config=changed)
    state = DynamicSamplingState(informative_rate=1.0)
    one, _ = simulation.rollout(setting, workload, hosts=hosts, step=0, state=state)
    return one.seconds
