"""Plans a run without its devices: python launch/plan.py --config=FILE --topology=v5p:4x4x4

Compiles the run's own programs ahead of time and prints the memory of a device that each needs;
then operations, bytes and time of each by arithmetic, and an estimate of one RL step. For TPUs it
needs libtpu (uv sync --extra tpu) and no TPU. The exit status is 0 where everything fits, 1 where
not, 2 where the command is wrong. docs/plan.md explains the figures.

--config           of the run; --config.FIELD=VALUE as in launch/train.py
--topology         such as v5p:2x2x2, v5p:4x4x4, v6e:8x8; local: the devices of this machine
--program          train, old_logprobs, weights, decode, prefill or all, which it is if not given;
                   with a critic also critic_train, critic_values; with rollout.cache_gib also
                   prefill_preempted
--response_tokens  mean length of the responses of the step that is estimated; a quarter of the
                   longest if not given
--prompt_tokens    the same of prompts
--search           tries meshes (fsdp x context x tensor) and remat policies; --program is train if
                   not given
--json             one object: fits, hbm_bytes, programs and more

python launch/plan.py --config=FILE --simulate_hosts=64 plays the scheduler of so many hosts over a
virtual clock: how long a rollout takes, how long hosts have nothing to do, what the rule does by
which prompts are begun, and, where so many hosts are the config's mesh, what the run costs. Nothing
is compiled.

--length_distribution  of responses: lognormal:MEAN:SIGMA (if not given lognormal:5120:1, or with a
                       quarter of the longest), uniform:LENGTH, or a .jsonl file with lengths
--accept               share of the prompts that dynamic sampling keeps; 0.4 if not given
--lengths_from         directory of a run that saved all its rollouts: its lengths and verdicts
                       instead, and its measured seconds beside the prediction
--calibrate_from       directory of such a run of one host: calls take as much longer, or shorter,
                       than as said below as its steps took
--compare_hosts        other numbers of hosts in the table, for one step each; 1,16,64,256
--simulate_steps       rollout steps with --simulate_hosts hosts; 3
--chip                 that decodes, v5p if not given; or, measured:
--decode_seconds, --prefill_seconds   of a call each
--host_seconds         of the host for each call; 0
--reward_seconds       of a worker for each response; 0.001
--prompt_tokens        mean length of prompts
--heldout_prompts      prompts of an evaluation, for the price of the run; 30
--unit_tokens          tokens that are drawn as one; as many as keep a response below 128 of them
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TEXTS = ("length_distribution", "lengths_from", "calibrate_from", "compare_hosts", "chip")
INTEGERS = ("simulate_hosts", "simulate_steps", "unit_tokens", "heldout_prompts")
FLOATS = ("accept", "decode_seconds", "prefill_seconds", "host_seconds", "reward_seconds")
# Of what is compiled alone, as those above are of a simulation alone.
COMPILED = ("topology", "program", "search", "response_tokens")


def refuse(flags: Any, names: Iterable[str], reason: str) -> None:
    """Raises UserError where one of the flags is given, which nothing would read."""
    from dapo_jax.types import UserError

    given = [f"--{name}" for name in names if getattr(flags, name) not in (None, False)]
    if given:
        raise UserError(f"{reason} {', '.join(given)} out.")


def simulate(config: Any, flags: Any) -> int:
    """Prints what the simulator finds; 0."""
    from dapo_jax.tools.plan import many_hosts

    refuse(flags, COMPILED, "nothing is compiled with --simulate_hosts: leave")
    asked = many_hosts.Asked(**{name: getattr(flags, name) for name in many_hosts.Asked._fields})
    say = lambda text: print(text, file=sys.stderr, flush=True)
    found = many_hosts.simulate(config, asked, say)
    print(json.dumps(found) if flags.json else many_hosts.describe(found))
    return 0


def main(argv: list[str]) -> int:
    """The exit status: 0 it fits, 1 it does not or failed, 2 the user's mistake."""
    sys.path.insert(0, str(ROOT))
    from dapo_jax.config.cli import fail, parse
    from dapo_jax.types import UserError

    try:
        config, flags = parse(
            argv,
            __doc__ or "",
            switches=("json", "search"),
            texts=("topology", "program", *TEXTS),
            integers=("response_tokens", "prompt_tokens", *INTEGERS),
            floats=FLOATS,
        )
        refuse(flags, ("workdir",), "a plan is of a config and of no run: leave")
        if flags.simulate_hosts is not None:
            return simulate(config, flags)
        simulated = (*TEXTS, *INTEGERS, *FLOATS)
        refuse(flags, simulated, "only --simulate_hosts=N simulates: give it, or leave")
        from dapo_jax.tools.plan import chips, plan, programs, report, search

        if flags.topology is None:
            raise UserError(
                "--topology is needed, for example --topology=v5p:4x4x4, or --topology=local."
            )
        known: dict[str, tuple[str, ...]] = {name: (name,) for name in programs.names(config)}
        known["all"] = tuple(known)
        program = flags.program or ("train" if flags.search else "all")
        if program not in known:
            raise UserError(f"--program must be one of {', '.join(known)}; got {program!r}.")
        most = {
            "response_tokens": config.rollout.max_response_tokens,
            "prompt_tokens": config.data.max_prompt_tokens,
        }
        lengths = {}
        for name, limit in most.items():
            given = getattr(flags, name)
            lengths[name] = max(1, limit // 4) if given is None else given
            if not 1 <= lengths[name] <= limit:
                raise UserError(f"--{name} must be from 1 to {limit:,}; got {given}.")
        say = lambda text: print(text, file=sys.stderr, flush=True)
        target = chips.target(flags.topology)
        if flags.search:
            found = search.search(config, target, known[program], say, **lengths)
            text = search.describe(found)
        else:
            found = plan.plan(config, target, known[program], say, **lengths)
            text = report.describe(config, found)
        print(json.dumps(found) if flags.json else text)
    except Exception as error:
        return fail(error)
    return 0 if found["fits"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv))
