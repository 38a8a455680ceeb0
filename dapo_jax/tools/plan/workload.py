"""Responses of a simulated run: sampled from a length distribution, or those of a real run."""

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from dapo_jax.config import Config
from dapo_jax.tools.plan.virtual import Group
from dapo_jax.types import UserError

KNOWN = (
    "lognormal:MEAN:SIGMA[:CORRELATION], lognormal:MEAN-LAST:SIGMA[:CORRELATION], uniform:LENGTH "
    "or the path of a .jsonl file"
)
# (rollout step, number of the prompt in it) -> its responses; repeatable.
Workload = Callable[[int, int], Group]


class Lengths(Protocol):
    """A distribution of lengths in tokens."""

    def __call__(self, rng: np.random.Generator, num: int, progress: float = 0.0) -> np.ndarray:
        """Returns `num` lengths of one group, at this share of the simulated steps."""
        ...


def lengths_of(text: str, most: int) -> Lengths:
    """Returns the distribution that --length_distribution names, cut at `most` tokens.

    MEAN is before the cut; MEAN-LAST grows evenly over the simulated steps. CORRELATION, 0 by
    default, is that of the logarithms of two lengths of one group.

    Raises:
        UserError: no such distribution, or no such file.
    """
    kind, *given = text.split(":")
    cut = lambda raw: np.clip(np.rint(raw), 1, most).astype(int)
    if kind.endswith(".jsonl") and not given:
        found = _lengths_in(Path(text))
        return lambda rng, num, progress=0.0: cut(rng.choice(found, num))
    first, _, last = given[0].partition("-") if given else ("", "", "")
    try:
        values = [float(value) for value in (first, *given[1:])]
        final = float(last) if last else values[0]
    except ValueError:
        values, final = [], 0.0
    if kind == "uniform" and len(values) == 1 and not last and 1 <= values[0] <= most:
        return lambda rng, num, progress=0.0: cut(np.full(num, values[0]))
    if kind == "lognormal" and len(values) in (2, 3):
        mean, sigma, correlation = (*values, 0.0)[:3]
        means_are_known = 0 < mean <= most and 0 < final <= most
        if means_are_known and sigma >= 0 and 0 <= correlation <= 1:
            own, shared = sigma * math.sqrt(1 - correlation), sigma * math.sqrt(correlation)

            def lengths(rng: np.random.Generator, num: int, progress: float = 0.0) -> np.ndarray:
                mu = math.log(mean + progress * (final - mean)) - sigma**2 / 2
                of_group = shared * rng.standard_normal() if correlation else 0.0
                return cut(rng.lognormal(mu + of_group, own, num))

            return lengths
    raise UserError(
        f"--length_distribution must be {KNOWN}, with MEAN, LAST and LENGTH from 1 to {most:,}; "
        f"got {text!r}."
    )


def _lengths_in(path: Path) -> np.ndarray:
    if not path.is_file():
        raise UserError(f"--length_distribution={path}: no such file. It may be {KNOWN}.")
    try:
        found = [_length(json.loads(line)) for line in path.read_text().splitlines() if line]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"--length_distribution={path}: every line must be a number, or an object with a "
            f'"length" as in the rollouts that a run saves; {type(error).__name__}: {error}.'
        ) from error
    if not found:
        raise UserError(f"--length_distribution={path} is empty.")
    return np.array(found)


def _length(line: Any) -> int:
    return int(line["length"] if isinstance(line, dict) else line)


def sampled(
    lengths: Lengths,
    accept: float,
    group_size: int,
    seed: int,
    *,
    progress: Callable[[int, int], float] = lambda step, number: 0.0,
) -> Workload:
    """Returns lengths for prompts that are informative with probability `accept`.

    Args:
        progress: of the lengths, by the rollout step and the number of the prompt in it.
    """

    @functools.lru_cache(maxsize=100_000)
    def group(step: int, number: int) -> Group:
        rng = np.random.default_rng((seed, step, number))
        correct_G = np.zeros(group_size, bool)
        correct_G[0] = rng.random() < accept
        return Group(lengths(rng, group_size, progress(step, number)), correct_G)

    return group


class Measured(NamedTuple):
    """The rollouts of a real run."""

    workload: Workload  # its steps, from 0
    seconds: list[float]  # of each step's rollout
    accept: float  # share of the prompts that were informative
    tokens: float  # mean length


def of_run(directory: Path, config: Config) -> Measured:
    """Returns the rollouts that a run saved. Prompts beyond those of a step take the responses of
    another prompt of the step.

    Raises:
        UserError: there is no such run, or it did not save all of its responses.
    """
    files = sorted((directory / "rollouts").glob("step_*.jsonl"))
    if not files or not (directory / "metrics.jsonl").is_file():
        raise UserError(f"--lengths_from={directory} is not the directory of a run with rollouts.")
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    whole = (line for line in lines if line.endswith("}"))  # the last one may be half written
    metrics = {line["step"]: line for line in map(json.loads, whole)}
    G, steps, seconds = config.rollout.group_size, [], []
    for file in files:
        records = [json.loads(line) for line in file.read_text().splitlines()]
        step = int(file.stem.removeprefix("step_"))
        tried = metrics.get(step, {}).get("sampling/prompts_tried")
        if not tried or len(records) != G * tried:
            raise UserError(
                f"--lengths_from={directory}: step {step} has {len(records)} responses saved of "
                f"{tried} prompts with {G} each. Run it with --config.log.rollouts_per_step="
                "1000000, and give its own config here."
            )
        by_field = (np.array([r[name] for r in records]) for name in ("length", "correct"))
        steps.append([Group(*group) for group in zip(*(x.reshape(-1, G) for x in by_field))])
        seconds.append(metrics[step]["time/rollout"])

    def group(step: int, number: int) -> Group:
        groups = steps[step]
        if number >= len(groups):
            number = int(np.random.default_rng((step, number)).integers(len(groups)))
        return groups[number]

    every = [group for groups in steps for group in groups]
    informative = [0 < int(group.correct_G.sum()) < G for group in every]
    tokens = float(np.mean([group.lengths_G for group in every]))
    return Measured(group, seconds, float(np.mean(informative)), tokens)
