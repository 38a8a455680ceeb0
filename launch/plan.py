"""Plans a run without its devices: python launch/plan.py --config=FILE --topology=v5p:4x4x4

Compiles the run's own programs ahead of time and prints what the compiler says of each: memory of a
device, operations, bytes, collectives; then the roofline of each program and an estimate of one RL
step. For TPUs it needs libtpu (pip install libtpu) and no TPU. The exit status is 0 where
everything fits, 1 where not, 2 where the command is wrong. docs/plan.md explains the figures.

--config           of the run; --config.FIELD=VALUE as in launch/train.py
--topology         such as v5p:2x2x2, v5p:4x4x4, v6e:8x8; local: the devices of this machine
--program          train, old_logprobs, decode, prefill or all, which it is if not given; with a
                   critic also critic_train, critic_values
--response_tokens  mean length of the responses of the step that is estimated; a quarter of the
                   longest if not given
--prompt_tokens    the same of prompts
--search           tries meshes (fsdp x tensor) and remat policies; --program is train if not given
--json             one object: fits, hbm_bytes, programs and more
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(argv: list[str]) -> int:
    """The exit status: 0 it fits, 1 it does not or failed, 2 the user's mistake."""
    sys.path.insert(0, str(ROOT))
    from dapo_jax.command_line import fail, parse
    from dapo_jax.types import UserError

    try:
        config, flags = parse(
            argv,
            __doc__ or "",
            switches=("json", "search"),
            texts=("topology", "program"),
            integers=("response_tokens", "prompt_tokens"),
        )
        from dapo_jax.planning import chips, plan, programs, report, search

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
