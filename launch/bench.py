"""Measures: python launch/bench.py load [--gigabytes=2 --devices=8] [--json]

load  a made checkpoint of that size onto that many virtual CPU devices, and onto one: seconds, and
      the memory that was needed besides the arrays
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(argv: list[str]) -> int:
    """The exit status: 0 done, 2 the user's mistake, 1 a failure."""
    sys.path.insert(0, str(ROOT))
    from dapo_jax.command_line import fail, parse_flags
    from dapo_jax.types import UserError

    try:
        flags = parse_flags(
            [argv[0], *argv[2:]] if argv[1:2] == ["load"] else argv,
            __doc__ or "",
            text={},
            numbers={"gigabytes": 2.0, "devices": 8},
            switches=("json",),
        )
        if argv[1:2] != ["load"]:
            raise UserError("what is to be measured? Known are: load.")
        from dapo_jax.bench.load import bench_load

        found = bench_load(flags["gigabytes"], flags["devices"])
        print(json.dumps(found) if flags["json"] else json.dumps(found, indent=2))
    except Exception as error:
        return fail(error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
