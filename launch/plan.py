"""Plans a run without its devices: python launch/plan.py --config=FILE --topology=v5p:4x4x4

Compiles the run's own programs ahead of time and prints the memory of a device that each needs;
then operations, bytes and time of each by arithmetic, and an estimate of one RL step. For TPUs it
needs libtpu (uv sync --inexact --extra tpu) and no TPU. The exit status is 0 where everything fits,
1 where it does not, 2 where the command is wrong. docs/plan.md explains the figures.

--config           of the run; --config.FIELD=VALUE as in launch/train.py
--topology         such as v5p:2x2x2, v5p:4x4x4, v6e:8x8; local: the devices of this machine
--program          train, old_logprobs, weights, decode, prefill or all (default); with a critic
                   also critic_train, critic_values; where sequences resume also prefill_preempted
--response_tokens  mean length of a response in the estimated step; default a quarter of the longest
--prompt_tokens    the same of prompts
--profile          check.json of launch/check.py on such a chip: the estimate takes the shares of
                   its rates that were measured there; also with --simulate_hosts
--step             a rollout step, whose stage is planned where the config has stages; default 1.
                   The price of a simulation is that of the steps of this stage
--search           tries meshes (fsdp x context x tensor) and remat policies; --program defaults to
                   train
--json             one object: fits, hbm_bytes, programs and more

python launch/plan.py --config=FILE --simulate_hosts=64 simulates the rollouts of that many hosts on
a virtual clock: seconds of a rollout, idle time, prompts begun, and, where the hosts are the
config's mesh, the price of the run. Nothing is compiled.

--length_distribution  of responses: lognormal:MEAN:SIGMA (default lognormal:5120:1, with a quarter
                       of the longest for 5120 where that is less), lognormal:MEAN-LAST:SIGMA:
                       CORRELATION with a mean that grows and lengths correlated in a group,
                       uniform:LENGTH, or a .jsonl file: a number, or an object with "length", in
                       each line
--accept               share of the prompts that dynamic sampling keeps, default 0.4
--lengths_from         directory of a run that saved all its rollouts: its lengths and verdicts
                       instead, and its measured seconds for comparison
--compare_hosts        other numbers of hosts in the table, one step each, default 1,16,64,256
--simulate_steps       rollout steps with --simulate_hosts hosts, default 3
--split                how many of the hosts sample while the others train, or best: the number
                       with the shortest steps
--chip                 of the hosts, default v5p; or, measured:
--decode_seconds, --prefill_seconds   of a call each
--host_seconds         of the host for each call, default 0
--reward_seconds       of a worker for each response, default 0.001
--prompt_tokens        mean length of prompts
--heldout_prompts      prompts of an evaluation, for the price of the run, default 30
"""

import dataclasses
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TEXTS = ("length_distribution", "lengths_from", "compare_hosts", "chip", "split")
INTEGERS = ("simulate_hosts", "simulate_steps", "heldout_prompts")
FLOATS = ("accept", "decode_seconds", "prefill_seconds", "host_seconds", "reward_seconds")
COMPILED = ("topology", "program", "search", "response_tokens")  # not read by a simulation


def refuse(flags: Any, names: Iterable[str], reason: str) -> None:
    """Raises UserError where one of the flags is given, which nothing would read."""
    from dapo_jax.types import UserError

    given = [f"--{name}" for name in names if getattr(flags, name) not in (None, False)]
    if given:
        raise UserError(f"{reason} {', '.join(given)} out.")


def steps_of_stage(config: Any, step: int) -> int:
    """Returns the number of rollout steps of the stage that `step` is in."""
    last = config.train.num_steps
    firsts = [1, *(first for first, _ in config.stages if first <= last), last + 1]
    return min(x for x in firsts if x > step) - max(x for x in firsts if x <= step)


def simulate(config: Any, flags: Any, num_steps: int) -> tuple[dict[str, Any], str]:
    """Returns (the result of a simulation, its text). `num_steps` are those of the stage."""
    from dapo_jax.tools.plan import many_hosts

    refuse(flags, COMPILED, "nothing is compiled with --simulate_hosts: leave")
    given = many_hosts.Flags(**{name: getattr(flags, name) for name in many_hosts.Flags._fields})
    # The price is that of the steps of one stage.
    train = dataclasses.replace(config.train, num_steps=num_steps)
    found = many_hosts.simulate(dataclasses.replace(config, train=train), given, say)
    return found, many_hosts.describe(found)


def compiled(config: Any, flags: Any) -> tuple[dict[str, Any], str]:
    """Returns (a plan or a search, its text)."""
    import dapo_jax
    from dapo_jax.tools.plan import report, search
    from dapo_jax.types import UserError

    simulated = (*TEXTS, *INTEGERS, *FLOATS)
    refuse(flags, simulated, "only --simulate_hosts=N simulates: give it, or leave")
    if flags.topology is None:
        raise UserError(
            "--topology is needed, for example --topology=v5p:4x4x4, or --topology=local."
        )
    asked = ("topology", "program", "search", "response_tokens", "prompt_tokens", "profile")
    found = dapo_jax.plan(config, **{name: getattr(flags, name) for name in asked}, say=say)
    if flags.search:
        return found, search.describe(found)
    return found, report.describe(config, found)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(argv: list[str]) -> int:
    """Returns the exit status: 0 it fits or was simulated, 1 it does not fit, or a failure, 2 the
    user's mistake."""
    sys.path.insert(0, str(ROOT))
    from dapo_jax.config.cli import fail, parse
    from dapo_jax.types import UserError

    try:
        config, flags = parse(
            argv,
            __doc__ or "",
            switches=("json", "search"),
            texts=("topology", "program", "profile", *TEXTS),
            integers=("step", "response_tokens", "prompt_tokens", *INTEGERS),
            floats=FLOATS,
        )
        refuse(flags, ("workdir",), "a plan is of a config and of no run: leave")
        step, last = 1 if flags.step is None else flags.step, config.train.num_steps
        if not 1 <= step <= last:
            raise UserError(
                f"--step must be from 1 to config.train.num_steps ({last}); got {step}."
            )
        planned = config.at(step)
        if flags.simulate_hosts is None:
            found, text = compiled(planned, flags)
        else:
            found, text = simulate(planned, flags, steps_of_stage(config, step))
        print(json.dumps(found) if flags.json else text)
    except Exception as error:
        return fail(error)
    return 0 if found.get("fits", True) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv))
