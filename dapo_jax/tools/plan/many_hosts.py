"""Many hosts simulated: the flags of --simulate_hosts, the assumptions, and the result as a table.

The result is a simulation and never a measurement; its text says so.
"""

import dataclasses
import functools
import math
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dapo_jax.config import Config
from dapo_jax.models.sharding import AXES, check_batch_shapes, mesh_shape, rollout_shape
from dapo_jax.rollout import memory_budget
from dapo_jax.rollout.engine_config import bucket_sizes
from dapo_jax.tools.plan import chips, estimate, price, simulation, whole_steps, workload
from dapo_jax.tools.plan.report import markdown_table, seconds_text
from dapo_jax.tools.plan.simulation import Rollout, Setting
from dapo_jax.tools.plan.virtual import Costs
from dapo_jax.types import UserError

MEAN_TOKENS = 5120  # default mean length of a response; at most a quarter of the longest
COMPARED = "1,16,64,256"
EVAL_PROMPTS = 30  # AIME 2024
CHIP = "v5p"
CHIPS_OF_HOST = 4  # of the slices of several hosts of all TPUs
BEST = "best"  # of --split
COLUMNS = (
    "hosts|step|informative rate|rollout|longest wait|idle, mean|prompts started|returned|"
    "slots busy|tokens lost|cache of a device"
).split("|")


class Flags(NamedTuple):
    """The flags of launch/plan.py with these names; None: not given."""

    simulate_hosts: int
    compare_hosts: str | None = None
    simulate_steps: int | None = None
    length_distribution: str | None = None
    lengths_from: str | None = None
    accept: float | None = None
    prompt_tokens: int | None = None
    chip: str | None = None
    profile: str | None = None
    decode_seconds: float | None = None
    prefill_seconds: float | None = None
    host_seconds: float | None = None
    reward_seconds: float | None = None
    heldout_prompts: int | None = None
    split: str | None = None


class SimulatedWork(NamedTuple):
    """The work of the simulated hosts."""

    groups: workload.Workload
    steps: int
    mean_tokens: float  # of a response
    assumption: str  # in words
    lengths: workload.Lengths | None  # None: those of a run
    seconds: list[float] | None  # that the run took for each step's rollout; None: no run


POSITIVE = ("simulate_hosts", "simulate_steps", "prompt_tokens", "heldout_prompts")
SECONDS = ("decode_seconds", "prefill_seconds", "host_seconds", "reward_seconds")


def check(config: Config, flags: Flags) -> list[int]:
    """Returns the numbers of hosts to compare; none with --split.

    Raises:
        UserError: a flag is out of range, or the config cannot be simulated.
    """
    for name in (*POSITIVE, *SECONDS):
        value = getattr(flags, name)
        least = 1 if name in POSITIVE else 1e-9 if name == "decode_seconds" else 0
        if value is not None and not least <= value < math.inf:
            raise UserError(f"--{name} must be {'above 0' if least else '0 or more'}; got {value}.")
    most = config.data.max_prompt_tokens
    if flags.prompt_tokens is not None and flags.prompt_tokens > most:
        raise UserError(
            f"--prompt_tokens must be at most config.data.max_prompt_tokens ({most}); got "
            f"{flags.prompt_tokens}."
        )
    if flags.accept is not None and not 0 < flags.accept <= 1:
        raise UserError(f"--accept must be above 0 and at most 1; got {flags.accept:g}.")
    if flags.accept is not None and not config.dynamic_sampling.enabled:
        raise UserError(
            "--accept is not read where config.dynamic_sampling.enabled is False: every group is "
            "kept. Leave it out."
        )
    if (flags.decode_seconds is None) != (flags.prefill_seconds is None):
        raise UserError("--decode_seconds and --prefill_seconds go together.")
    for name in ("profile", "chip"):
        if getattr(flags, name) is not None and flags.decode_seconds is not None:
            raise UserError(f"--{name} is not read where --decode_seconds is given: leave one out.")
    if flags.lengths_from is not None and (flags.accept or flags.length_distribution):
        raise UserError(
            "--lengths_from takes lengths and verdicts from a run: leave --accept and "
            "--length_distribution out."
        )
    if flags.lengths_from is not None and config.rollout.carries:
        raise UserError(
            "--lengths_from needs config.rollout.max_staleness 0, as the steps of a run that "
            f"carries share prompts; got {config.rollout.max_staleness}."
        )
    if flags.split is not None:
        _check_split(config, flags)
        return []
    compared = flags.compare_hosts or ("" if flags.lengths_from else COMPARED)
    try:
        hosts = {int(number) for number in compared.split(",") if number}
    except ValueError:
        hosts = {0}
    if any(number < 1 for number in hosts):
        raise UserError(f"--compare_hosts must be such as {COMPARED}; got {compared!r}.")
    return sorted(hosts | {flags.simulate_hosts})


def _check_split(config: Config, flags: Flags) -> None:
    text, most = flags.split or "", flags.simulate_hosts - 1
    if most < 1:
        raise UserError("--simulate_hosts must be 2 or more hosts for --split; got 1.")
    if text != BEST and not (text.isdecimal() and 1 <= int(text) <= most):
        raise UserError(
            f"--split must be {BEST!r} or how many of the hosts sample, less than "
            f"--simulate_hosts={flags.simulate_hosts}; got {text!r}."
        )
    if config.rollout.max_staleness < 1:
        raise UserError(
            "--split needs config.rollout.max_staleness 1 or more, since the parameters that "
            "sample lack one update; got 0."
        )
    refused = ("compare_hosts", "lengths_from", "decode_seconds")
    if given := [f"--{name}" for name in refused if getattr(flags, name) is not None]:
        raise UserError(
            "--split simulates one number of hosts, with updates as long as the plan estimates: "
            f"leave {', '.join(given)} out."
        )


def simulate(config: Config, flags: Flags, say: Callable[[str], None]) -> dict[str, Any]:
    """Returns the result as plain values, for `describe`.

    Raises:
        UserError: see `check`.
    """
    numbers = check(config, flags)
    config = _with_replicas(_with_mesh(config, flags.simulate_hosts), flags, say)
    check_batch_shapes(config, _sizes(config))
    setting, assumptions = _setting(config, flags)
    r, work = config.rollout, _work(config, flags)
    steps, assumptions = work.steps, [*assumptions, work.assumption]
    shards, devices = _replicas(config)
    token_gib = estimate.token_bytes(config.model, r) / devices / chips.GIB
    simulated: dict[int, list[Rollout]] = {}  # by number of hosts

    def rollouts(hosts: int, num: int) -> list[Rollout]:
        if hosts not in simulated:
            say(f"{hosts} hosts: {num} steps")
            groups = work.groups
            simulated[hosts] = simulation.rollouts(setting, groups, hosts=hosts, steps=num)
        return simulated[hosts]

    own_hosts, whole = flags.simulate_hosts, None
    if flags.split is not None:
        one_less = dataclasses.replace(r, max_staleness=r.max_staleness - 1)
        setting = setting._replace(config=dataclasses.replace(config, rollout=one_less))
        whole = _split(setting, flags, lambda hosts: rollouts(hosts, steps))
        numbers = [own_hosts := whole["sampling"]]
    rows, own = [], []
    for hosts in numbers:
        found = rollouts(hosts, steps if hosts == own_hosts else 1)
        rows += [_row(hosts, step, one, token_gib) for step, one in enumerate(found, 1)]
        own = found if hosts == own_hosts else own
    result: dict[str, Any] = {
        "simulate_hosts": flags.simulate_hosts,
        "assumptions": assumptions,
        "cache_gib": r.cache_gib,
        "rows": rows,
        "price": None,
        "whole_steps": whole,
    }
    is_own_mesh = shards == flags.simulate_hosts and flags.decode_seconds is None
    if work.lengths is not None and is_own_mesh and whole is None:
        seconds, updates = [one.seconds for one in own], _updates(setting, flags, own, shards)
        result["whole_steps"] = {
            "sampling": None,
            "steps": whole_steps.in_turn(seconds, updates),
            "staleness": max(one.staleness for one in own),
        }
        say(f"{shards} hosts, an evaluation")
        result["price"] = price.price(
            setting,
            _chip(flags),
            _sizes(config),
            own,
            work.lengths,
            hosts=shards,
            response_tokens=round(work.mean_tokens),
            eval_prompts=flags.heldout_prompts or EVAL_PROMPTS,
        )
    if work.seconds is not None:
        predicted = [one.seconds for one in own]
        result["measured"] = {
            "seconds": work.seconds,
            "predicted_seconds": predicted,
            "ratio_of_sums": sum(predicted) / sum(work.seconds),
            # The medians show whether other work slowed the machine down in some steps.
            "ratio_of_medians": float(np.median(predicted) / np.median(work.seconds)),
        }
    return result


def _work(config: Config, flags: Flags) -> SimulatedWork:
    r = config.rollout
    if flags.lengths_from is not None:
        measured = workload.of_run(Path(flags.lengths_from), config)
        steps = min(flags.simulate_steps or len(measured.seconds), len(measured.seconds))
        assumption = (
            f"lengths and verdicts of the {steps} steps of {flags.lengths_from}: "
            f"{measured.tokens:,.0f} tokens on average, {measured.accept:.0%} informative"
        )
        seconds = measured.seconds[:steps]
        return SimulatedWork(measured.workload, steps, measured.tokens, assumption, None, seconds)
    steps = flags.simulate_steps or 3
    accept = flags.accept or (0.4 if config.dynamic_sampling.enabled else 1.0)
    usual = min(MEAN_TOKENS, max(1, r.max_response_tokens // 4))
    text = flags.length_distribution or f"lognormal:{usual}:1"
    lengths = workload.lengths_of(text, r.max_response_tokens)
    num_prompts = steps * config.train.prompts_per_step / accept  # expected, of all steps
    progress = lambda step, number: min(1.0, step / steps + number / num_prompts)
    groups = workload.sampled(lengths, accept, r.group_size, config.seed, progress=progress)
    rng, num = np.random.default_rng(0), 100_000 // r.group_size
    some = np.concatenate([lengths(rng, r.group_size, i / num) for i in range(num)])
    assumption = (
        f"lengths {text}: {some.mean():,.0f} tokens on average, "
        f"{np.mean(some == r.max_response_tokens):.1%} of {r.max_response_tokens:,}; "
        f"{accept:.0%} of the prompts informative"
    )
    return SimulatedWork(groups, steps, some.mean(), assumption, lengths, None)


def _split(
    setting: Setting, flags: Flags, rollouts: Callable[[int], list[Rollout]]
) -> dict[str, Any]:
    """Returns the whole steps of split meshes, for `whole_steps.describe`.

    Args:
        setting: with the staleness that is left for carried responses.
        rollouts: by the number of hosts that sample.
    """
    model, (_, devices), chip = setting.config.model, _replicas(setting.config), _chip(flags)
    copy = estimate.Work(0.0, 0.0, estimate.replica_bytes(model) / devices)
    times, hosts = estimate.expected(copy, chip), flags.simulate_hosts
    assert times is not None, "the rates of all chips of `CHIPS` are known"

    def steps(sampling: int) -> list[whole_steps.Step]:
        found = rollouts(sampling)
        updates = _updates(setting, flags, found, hosts - sampling)
        return whole_steps.at_once([one.seconds for one in found], updates, times.links)

    tried = functools.cache(steps)
    if flags.split == BEST:
        sampling = whole_steps.best_split(tried, hosts)
    else:
        sampling = int(flags.split or "")
    return {
        "sampling": sampling,
        "training": hosts - sampling,
        "transfer_seconds": times.links,
        "steps": tried(sampling),
        "staleness": 1 + max(one.staleness for one in rollouts(sampling)),
    }


def _updates(setting: Setting, flags: Flags, rollouts: list[Rollout], hosts: int) -> list[float]:
    """Returns the seconds of each step's update on that many hosts."""
    config = setting.config
    return [
        whole_steps.update_seconds(
            config,
            _sizes(config),
            _chip(flags),
            share=hosts / _replicas(config)[0],
            response_tokens=one.response_tokens,
            prompt_tokens=setting.prompt_tokens,
            trained_prompts=simulation.trained_prompts(config, one),
        )
        for one in rollouts
    ]


def _with_mesh(config: Config, hosts: int) -> Config:
    """Returns the config with a mesh whose axis of -1 takes as many devices as the hosts have."""
    mesh = config.mesh
    if -1 not in (getattr(mesh, axis) for axis in AXES):
        return config
    devices = hosts * (mesh.rollout_tensor or max(1, mesh.tensor))
    sizes = dict(zip(AXES, mesh_shape(mesh, devices)))
    return dataclasses.replace(config, mesh=dataclasses.replace(mesh, **sizes))


def _with_replicas(config: Config, flags: Flags, say: Callable[[str], None]) -> Config:
    """Returns the config with the replica size that a run on such chips would choose."""
    if flags.decode_seconds is not None or (gib := _chip(flags).gib) is None:
        return config
    devices = [
        types.SimpleNamespace(process_index=i // CHIPS_OF_HOST, platform=_chip(flags).platform)
        for i in range(math.prod(_sizes(config).values()))
    ]
    memory = int(gib * chips.GIB)
    return memory_budget.with_replica_size(config, devices, memory, say, refuse=False)


def _sizes(config: Config) -> dict[str, int]:
    return {axis: getattr(config.mesh, axis) for axis in AXES}


def _chip(flags: Flags) -> chips.Chip:
    chip = chips.named(flags.chip or CHIP)
    return chip if flags.profile is None else chips.with_profile(chip, flags.profile)


def _replicas(config: Config) -> tuple[int, int]:
    """Returns (number of the rollout's shards, devices of each)."""
    shape = rollout_shape(_sizes(config), config.mesh.rollout_tensor)
    return math.prod(shape.values()) // shape["tensor"], shape["tensor"]


def _setting(config: Config, flags: Flags) -> tuple[Setting, list[str]]:
    """Returns (the simulated hosts, the assumptions about them in words)."""
    r, (shards, devices) = config.rollout, _replicas(config)
    unit = simulation.unit_tokens(config)
    slots, prompts = max(1, r.slots // shards), max(1, r.prefill_prompts // shards)
    prompt_tokens = flags.prompt_tokens or max(1, config.data.max_prompt_tokens // 4)
    assumptions = [
        f"a host is one of {shards} shards of the rollout: {devices} devices with {slots} slots "
        f"and {prompts} prompts a prefill; all hosts generate {config.train.prompts_per_step} "
        f"prompts x {r.group_size} together",
    ]
    if flags.decode_seconds is not None:
        assert flags.prefill_seconds is not None
        token, prefill = flags.decode_seconds / r.decode_steps, flags.prefill_seconds
        decode = lambda busy, cached: unit * token
        assumptions.append(
            f"a call of decode takes {flags.decode_seconds:g} s for {r.decode_steps} tokens, one "
            f"of prefill {prefill:g} s, as given"
        )
    else:
        chip = _chip(flags)

        def seconds(work: estimate.Work) -> float:
            time = estimate.expected(work, estimate.with_dtype(chip, config.model))
            assert time is not None, "the rates of all chips of `CHIPS` are known"
            return time.longest

        def decode(busy: int, cached: float) -> float:
            cached_tokens = unit * cached
            work = estimate.decode_token(config, devices, slots=slots, cached_tokens=cached_tokens)
            return unit * seconds(work)

        page = r.page_tokens
        pages = bucket_sizes(-(-config.data.max_prompt_tokens // page))
        padded = page * next((n for n in pages if n * page >= prompt_tokens), pages[-1])
        prefill = seconds(
            estimate.prefill_call(config, devices, prompts=prompts, prompt_tokens=padded)
        )
        assumptions.append(
            f"{chip.name} at {chip.memory_share:.0%} of the rate of its memory and "
            f"{chip.products_share:.0%} of its peak; a prefill of prompts of {prompt_tokens} "
            f"tokens, padded to {padded}, takes {prefill:.3g} s; links take no time"
        )
    host = flags.host_seconds or 0.0
    reward = 0.001 if flags.reward_seconds is None else flags.reward_seconds
    assumptions += [
        f"{host:g} s of the host for each call; {reward:g} s of one of {config.reward.workers} "
        "workers of a host for each reward; no sequence waits for a page of the cache; whether the "
        "run fits the memory is not checked, see --topology",
        f"lengths are multiples of {unit} tokens, sampled as one",
    ]
    calls = max(1, unit // r.decode_steps)  # simulated as one
    costs = Costs(decode, prefill, host * calls, reward)
    return Setting(config, slots, prompts, unit, prompt_tokens, costs), assumptions


def _row(hosts: int, step: int, one: Rollout, token_gib: float) -> dict[str, Any]:
    return {
        "hosts": hosts,
        "step": step,
        "rate": one.rate,
        "seconds": one.seconds,
        "longest_wait_seconds": float(one.wait_H.max()),
        "idle_mean": float(one.idle_H.mean()),
        "begun": one.claimed,
        "given_back": one.claimed - one.tried,
        "slots_busy": one.slots_busy,
        "tokens_lost_share": one.tokens_lost / (one.tokens + one.tokens_resumed),
        "cache_gib": one.tokens_cached * token_gib,
    }


def describe(result: Mapping[str, Any]) -> str:
    """Returns the result of `simulate` as text."""
    share, count, gib = "{:.1%}".format, "{:,}".format, "{:.3g} GiB".format
    times = (share, seconds_text, seconds_text, share)
    forms = (str, str, *times, count, count, share, share, gib)
    texts = [[form(x) for form, x in zip(forms, row.values())] for row in result["rows"]]
    lines = [
        "A simulation, not a measurement. It assumes:",
        *(f"- {text}" for text in result["assumptions"]),
        "",
        *markdown_table(COLUMNS, texts),
        "",
        "Step 1 starts with the informative rate that a new run assumes. The cache is the largest "
        "use by sequences in slots and their prompts, with one partly filled page each.",
    ]
    most = max(row["cache_gib"] for row in result["rows"])
    if (given := result["cache_gib"]) is not None and most > given:
        lines.append(
            f"config.rollout.cache_gib is {given:g}, and a device would hold {most:.3g} GiB: "
            "sequences would wait for pages, which is not simulated."
        )
    if result["whole_steps"] is not None:
        lines.append(whole_steps.describe(result["whole_steps"]))
    if result["price"] is not None:
        lines.append(price.describe(result["price"]))
    if "measured" in result:
        m = result["measured"]
        lines.append(
            f"Measured {sum(m['seconds']):.3g} s over {len(m['seconds'])} steps, predicted "
            f"{sum(m['predicted_seconds']):.3g} s: {m['ratio_of_sums'] - 1:+.1%}; medians "
            f"{np.median(m['seconds']):.3g} and {np.median(m['predicted_seconds']):.3g} s: "
            f"{m['ratio_of_medians'] - 1:+.1%}."
        )
    return "\n".join(lines)
