"""What is asked of the simulator, what it rests on, and what it found, as a table."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dapo_jax.config import Config
from dapo_jax.models.sharding import AXES
from dapo_jax.rollout.engine_config import bucket_sizes
from dapo_jax.tools.plan import chips, estimate, price, simulation, workload
from dapo_jax.tools.plan.simulation import POLICIES, Rollout, Setting
from dapo_jax.tools.plan.virtual import Costs
from dapo_jax.types import UserError

MEAN_TOKENS = 5120  # of responses, where nothing is said; at most a quarter of the longest
COMPARED = "1,16,64,256"
HELDOUT_PROMPTS = 30  # of AIME 2024
CHIP = "v5p"


class Asked(NamedTuple):
    """The flags of launch/plan.py with these names; None: not given."""

    simulate_hosts: int
    compare_hosts: str | None = None
    simulate_steps: int | None = None
    length_distribution: str | None = None
    lengths_from: str | None = None
    calibrate_from: str | None = None
    accept: float | None = None
    prompt_tokens: int | None = None
    chip: str | None = None
    decode_seconds: float | None = None
    prefill_seconds: float | None = None
    host_seconds: float | None = None
    reward_seconds: float | None = None
    unit_tokens: int | None = None
    heldout_prompts: int | None = None


def check(config: Config, asked: Asked) -> list[int]:
    """The numbers of hosts to be compared.

    Raises:
        UserError: a flag is out of range, or the config is not one that can be simulated.
    """
    d = config.dynamic_sampling
    for name, value, wanted in (
        ("dynamic_sampling.enabled", d.enabled, True),
        ("dynamic_sampling.partial_rollouts", d.partial_rollouts, False),
    ):
        if value != wanted:
            raise UserError(f"--simulate_hosts needs config.{name} {wanted}; got {value!r}.")
    least = {
        "simulate_hosts": 1, "simulate_steps": 1, "prompt_tokens": 1, "unit_tokens": 1,
        "heldout_prompts": 1,
        "decode_seconds": 1e-9, "prefill_seconds": 0, "host_seconds": 0, "reward_seconds": 0,
    }  # fmt: skip
    for name, low in least.items():
        value = getattr(asked, name)
        if value is not None and not low <= value < math.inf:
            raise UserError(f"--{name} must be {'above 0' if low else '0 or more'}; got {value}.")
    if asked.accept is not None and not 0 < asked.accept <= 1:
        raise UserError(f"--accept must be above 0 and at most 1; got {asked.accept:g}.")
    if (asked.decode_seconds is None) != (asked.prefill_seconds is None):
        raise UserError("--decode_seconds and --prefill_seconds go together.")
    if asked.lengths_from is not None and (asked.accept or asked.length_distribution):
        raise UserError(
            "--lengths_from takes lengths and verdicts from a run: leave --accept and "
            "--length_distribution out."
        )
    if (run := asked.calibrate_from) is not None:
        other = asked.lengths_from
        if other is not None and Path(other).resolve() == Path(run).resolve():
            raise UserError(
                "--calibrate_from and --lengths_from name one run: nothing would be predicted. "
                "Give --lengths_from another one."
            )
        if (shards := _shards(config)) > 1:
            raise UserError(
                "--calibrate_from needs the run of one host, and a config whose rollout is one "
                f"shard: config.mesh has {shards}."
            )
    k, unit = config.rollout.decode_steps, asked.unit_tokens
    if unit is not None and unit % k and k % unit:
        raise UserError(
            f"--unit_tokens must divide config.rollout.decode_steps ({k}) or be a multiple of it; "
            f"got {unit}."
        )
    compared = asked.compare_hosts or ("" if asked.lengths_from else COMPARED)
    try:
        hosts = {int(number) for number in compared.split(",") if number}
    except ValueError:
        hosts = {0}
    if any(number < 1 for number in hosts):
        raise UserError(f"--compare_hosts must be such as {COMPARED}; got {compared!r}.")
    return sorted(hosts | {asked.simulate_hosts})


def simulate(config: Config, asked: Asked, say: Callable[[str], None]) -> dict[str, Any]:
    """What `describe` tells, as plain values.

    Raises:
        UserError: see `check`.
    """
    numbers = check(config, asked)
    setting, assumptions = _setting(config, asked)
    if asked.calibrate_from is not None:
        setting, how = _calibrated(setting, Path(asked.calibrate_from))
        assumptions.append(how)
    d, r = config.dynamic_sampling, config.rollout
    steps = asked.simulate_steps or 3
    measured = lengths = mean = None
    if asked.lengths_from is not None:
        measured = workload.of_run(Path(asked.lengths_from), config, "lengths_from")
        work = measured.workload
        steps = min(asked.simulate_steps or len(measured.seconds), len(measured.seconds))
        assumptions += [
            f"lengths and verdicts of the {steps} steps of {asked.lengths_from}: "
            f"{measured.tokens:,.0f} tokens on average, {measured.accept:.0%} informative"
        ]
    else:
        usual = min(MEAN_TOKENS, max(1, r.max_response_tokens // 4))
        text = asked.length_distribution or f"lognormal:{usual}:1"
        accept = asked.accept or 0.4
        lengths = workload.lengths_of(text, r.max_response_tokens)
        work = workload.drawn(lengths, accept, r.group_size, config.seed)
        some = lengths(np.random.default_rng(0), 100_000)
        mean = round(some.mean())
        assumptions += [
            f"lengths {text}, each for itself: {some.mean():,.0f} tokens on average, "
            f"{np.mean(some == r.max_response_tokens):.1%} of {r.max_response_tokens:,}; "
            f"{accept:.0%} of the prompts informative"
        ]
    token_bytes = estimate.token_bytes(config.model, r) / _devices(config)
    rows, ours = [], []
    for hosts in numbers:
        for policy in POLICIES:
            if hosts == 1 and policy == "dealt":
                continue  # the same as ours
            num = steps if hosts == asked.simulate_hosts else 1
            say(f"{hosts} hosts, {policy}: {num} steps")
            found = simulation.rollouts(setting, work, hosts=hosts, policy=policy, steps=num)
            cached = max(one.tokens_cached for one in found) * token_bytes / chips.GIB
            rows.append({"hosts": hosts, "policy": policy, **_summary(found), "cache_gib": cached})
            if (hosts, policy) == (asked.simulate_hosts, "ours"):
                ours = found
    engine_config = setting.engine_config
    waves = math.ceil((engine_config.max_in_flight + r.group_size) / setting.slots)
    units = engine_config.max_response_tokens
    full = setting.slots * (setting.prompt_tokens / setting.unit_tokens + units / 2)
    longest = units * setting.costs.decode(setting.slots, full)
    result: dict[str, Any] = {
        "simulate_hosts": asked.simulate_hosts,
        "prompts_per_step": config.train.prompts_per_step,
        "most_prompts": d.max_prompts,
        "longest_response_seconds": longest,
        "verdict_bound_seconds": waves * longest,
        "assumptions": assumptions,
        "policies": POLICIES,
        "cache_gib": r.cache_gib,
        "rows": rows,
        "steps": [_step(one) for one in ours],
        "price": None,
    }
    whole = asked.simulate_hosts == _shards(config)
    if whole and lengths is not None and mean is not None and asked.decode_seconds is None:
        sizes = {axis: max(1, getattr(config.mesh, axis)) for axis in AXES}
        say(f"{asked.simulate_hosts} hosts, an evaluation")
        result["price"] = price.price(
            setting, _chip(asked.chip or CHIP), sizes, ours, lengths,
            hosts=asked.simulate_hosts, response_tokens=mean,
            heldout_prompts=asked.heldout_prompts or HELDOUT_PROMPTS,
        )  # fmt: skip
    if measured is not None:
        result["measured"] = _compared(ours, measured.seconds[:steps])
    return result


def _setting(config: Config, asked: Asked) -> tuple[Setting, list[str]]:
    """What hosts are like, and what that rests on."""
    r, shards, devices = config.rollout, _shards(config), _devices(config)
    unit = asked.unit_tokens or simulation.unit_tokens(config)
    slots, prompts = max(1, r.slots // shards), max(1, r.prefill_prompts // shards)
    prompt_tokens = asked.prompt_tokens or max(1, config.data.max_prompt_tokens // 4)
    A = r.page_tokens
    pages = bucket_sizes(-(-config.data.max_prompt_tokens // A))
    padded = A * next((n for n in pages if n * A >= prompt_tokens), pages[-1])
    said = [
        f"a host is one shard of the rollout: {devices} devices with {slots} slots and "
        f"{prompts} prompts a prefill, as config.rollout has them for {shards}; however many there "
        f"are, together they draw the same batch of {config.train.prompts_per_step} prompts x "
        f"{r.group_size}",
    ]
    host, reward = asked.host_seconds or 0.0, asked.reward_seconds
    reward = 0.001 if reward is None else reward
    if asked.decode_seconds is not None:
        assert asked.prefill_seconds is not None
        token, prefill = asked.decode_seconds / r.decode_steps, asked.prefill_seconds
        decode = lambda live, cached: unit * token
        said.append(
            f"a call of decode takes {asked.decode_seconds:g} s for {r.decode_steps} tokens, one "
            f"of prefill {prefill:g} s, as given"
        )
    else:
        chip = _chip(asked.chip or CHIP)

        def seconds(work: estimate.Work) -> float:
            time = estimate.expected(work, chip)
            assert time is not None, "the rates of all chips of `CHIPS` are known"
            return time.longest

        token = lambda live, cached: estimate.decode_token(
            config, devices, slots=slots, live=live, cached_tokens=unit * cached
        )
        decode = lambda live, cached: unit * seconds(token(live, cached))
        prefill = seconds(
            estimate.prefill_call(config, devices, prompts=prompts, prompt_tokens=padded)
        )
        weights = estimate.weight_bytes(config.model) / 1e9
        said.append(
            f"{chip.name} at {estimate.MEMORY_SHARE:.0%} of the rate of its memory and "
            f"{chip.products_share:.0%} of its peak, by arithmetic: every token in all slots "
            f"reads {weights:,.1f} GB of weights, a device its share, and the cache of the "
            f"sequences in slots; prompts of {prompt_tokens} tokens, prefilled as {padded}, take "
            f"{prefill:.3g} s a call; links take no time"
        )
    said += [
        f"{host:g} s of the host for each call; {reward:g} s of one of {config.reward.workers} "
        "workers of a host for each reward; no sequence ever waits for a page of the cache",
        f"{unit} tokens are drawn as one, lengths rounded to them"
        if unit > 1
        else "every token is played",
    ]
    calls = max(1, unit // r.decode_steps)  # that are played as one
    costs = Costs(decode, prefill, host * calls, reward)
    return Setting(config, slots, prompts, unit, prompt_tokens, costs), said


def _devices(config: Config) -> int:
    """Of a shard of the rollout."""
    return config.mesh.rollout_tensor or max(1, config.mesh.tensor)


def _shards(config: Config) -> int:
    return math.prod(max(1, getattr(config.mesh, axis)) for axis in AXES) // _devices(config)


def _calibrated(setting: Setting, run: Path) -> tuple[Setting, str]:
    """The setting with calls so long that the steps of a run take as long as they took, by the
    median of the steps; and how that was found."""
    measured = workload.of_run(run, setting.config, "calibrate_from")
    num, costs = len(measured.seconds), setting.costs
    played = simulation.rollouts(setting, measured.workload, hosts=1, policy="ours", steps=num)
    ratios = [seconds / one.seconds for seconds, one in zip(measured.seconds, played)]
    factor = float(np.median(ratios))
    longer = costs._replace(
        decode=lambda live, cached: factor * costs.decode(live, cached),
        prefill=factor * costs.prefill,
        host=factor * costs.host,
    )
    low, high = min(ratios), max(ratios)
    return setting._replace(costs=longer), (
        f"all calls take {factor:.3f} times as long, by the median of {num} steps of {run} (from "
        f"{low:.3f} to {high:.3f})"
    )


def _chip(name: str) -> chips.Chip:
    known = {chip.name: chip for chip in chips.CHIPS.values()}
    if name not in known:
        raise UserError(f"--chip must be one of {', '.join(known)}; got {name!r}.")
    return known[name]


def _summary(found: Sequence[Rollout]) -> dict[str, Any]:
    seconds = [one.seconds for one in found]
    mean = lambda values: float(np.mean(list(values)))
    return {
        "steps": len(found),
        "seconds": {
            "mean": mean(seconds),
            **{f"p{p}": float(np.percentile(seconds, p)) for p in (10, 50, 90)},
        },
        "idle_mean": mean(one.idle_H.mean() for one in found),
        "idle_worst": mean(one.idle_H.max() for one in found),
        "last_wait_seconds": mean(one.wait_H.max() for one in found),
        "begun": mean(one.begun for one in found),
        "given_back": mean(one.begun - one.tried for one in found),
        "slots_busy": mean(one.slots_busy for one in found),
        "tokens": mean(one.tokens for one in found),
        "tokens_lost_share": mean(one.tokens_lost / one.tokens for one in found),
    }


def _step(one: Rollout) -> dict[str, Any]:
    """One step of `ours`, as plain values."""
    return {
        "share": one.share,
        "seconds": one.seconds,
        "longest_wait_seconds": float(one.wait_H.max()),
        "idle_mean": float(one.idle_H.mean()),
        "begun": one.begun,
        "given_back": one.begun - one.tried,
        "slots_busy": one.slots_busy,
        "tokens_lost_share": one.tokens_lost / one.tokens,
    }


def _compared(ours: Sequence[Rollout], seconds: Sequence[float]) -> dict[str, Any]:
    """Predicted and measured seconds of a run's steps; the medians as well, for a step that the
    machine was disturbed in."""
    predicted = [one.seconds for one in ours]
    return {
        "seconds": list(seconds),
        "predicted_seconds": predicted,
        "ratio_of_sums": sum(predicted) / sum(seconds),
        "ratio_of_medians": float(np.median(predicted) / np.median(seconds)),
    }


def describe(result: Mapping[str, Any]) -> str:
    """The result of `simulate` as text."""
    lines = ["A simulation, not a measurement. It assumes:"]
    lines += [f"- {text}" for text in result["assumptions"]]
    lines += ["", "| hosts | policy | steps | seconds of a rollout | p10 to p90 | idle, mean | "
              "worst host | longest wait | prompts begun | given back | slots at work | "
              "tokens lost | cache of a device |", "|" + "---|" * 13]  # fmt: skip
    for row in result["rows"]:
        s = row["seconds"]
        lines.append(
            f"| {row['hosts']} | {row['policy']} | {row['steps']} | {_seconds(s['mean'])} | "
            f"{_seconds(s['p10'])} to {_seconds(s['p90'])} | {row['idle_mean']:.1%} | "
            f"{row['idle_worst']:.1%} | {_seconds(row['last_wait_seconds'])} s | "
            f"{row['begun']:,.0f} | {row['given_back']:,.0f} | {row['slots_busy']:.1%} | "
            f"{row['tokens_lost_share']:.1%} | {row['cache_gib']:.3g} GiB |"
        )
    lines += [
        "",
        f"The first steps of a run on {result['simulate_hosts']} hosts (ours):",
        "",
        "| step | informative, as it began | seconds of its rollout | longest wait | idle, mean | "
        "prompts begun | given back | slots at work | tokens lost |",
        "|" + "---|" * 9,
    ]
    for number, one in enumerate(result["steps"], 1):
        lines.append(
            f"| {number} | {one['share']:.1%} | {_seconds(one['seconds'])} | "
            f"{_seconds(one['longest_wait_seconds'])} s | {one['idle_mean']:.1%} | "
            f"{one['begun']:,} | {one['given_back']:,} | {one['slots_busy']:.1%} | "
            f"{one['tokens_lost_share']:.1%} |"
        )
    lines += ["", *(f"{name}: {text}" for name, text in result["policies"].items())]
    lines.append(
        "Cache of a device: about what sequences in slots and prompts have of it at most, a page "
        "of each that is not full among it."
    )
    lines.append(
        f"A longest response takes {_seconds(result['longest_response_seconds'])} s; a prompt that "
        f"is begun has its verdict within {_seconds(result['verdict_bound_seconds'])} s, and who "
        "waits for it waits no longer, but for rewards."
    )
    most = max(row["cache_gib"] for row in result["rows"])
    if (given := result["cache_gib"]) is not None and most > given:
        lines.append(
            f"config.rollout.cache_gib is {given:g}, and a device would have some {most:.3g} GiB "
            "in its cache: there sequences would wait for pages, which is not played."
        )
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


def _seconds(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
