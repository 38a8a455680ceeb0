"""Draws a run on one page: python launch/report.py runs/tiny [runs/other ...]

Writes report.html and report.png into the first directory, also while its run goes on. Further
runs are drawn into the same plots.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(argv: list[str]) -> int:
    """The exit status: 0 done, 2 the user's mistake."""
    sys.path.insert(0, str(ROOT))
    from dapo_jax.command_line import fail
    from dapo_jax.report import write_report

    places = [Path(argument).expanduser().resolve() for argument in argv[1:]]
    if not places or any(argument.startswith("-") for argument in argv[1:]):
        print((__doc__ or "").strip())
        return 0 if argv[1:] in (["--help"], ["-h"]) else 2
    try:
        print(write_report(places[0], beside=places[1:]))
    except Exception as error:
        return fail(error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
