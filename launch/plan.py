"""Compiles for TPUs that are not there: python launch/plan.py --config=FILE --topology=v5p:4x4x4

Prints of each program what the compiler says: memory of a device, operations. Needs libtpu
(pip install libtpu) and no TPU. The exit status is 0 where everything fits, 1 where not.

--config    of the run; --config.FIELD=VALUE as in launch/train.py
--topology  such as v5p:2x2x2, v5p:4x4x4, v6e:8x8
--program   decode, prefill or all, which it is if not given
--json      one object: fits, hbm_bytes, programs
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
            argv, __doc__ or "", switches=("json",), texts=("topology", "program")
        )
        from dapo_jax import ahead_of_time

        if flags.topology is None:
            raise UserError("--topology is needed, for example --topology=v5p:4x4x4.")
        program = flags.program or "all"
        known: dict[str, tuple[str, ...]] = {name: (name,) for name in ahead_of_time.PROGRAMS}
        known["all"] = ahead_of_time.PROGRAMS
        if program not in known:
            raise UserError(f"--program must be one of {', '.join(known)}; got {program!r}.")
        say = lambda text: print(text, file=sys.stderr, flush=True)
        found = ahead_of_time.plan(config, flags.topology, known[program], say)
        print(json.dumps(found) if flags.json else ahead_of_time.describe(found))
    except Exception as error:
        return fail(error)
    return 0 if found["fits"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv))
