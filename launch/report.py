"""Plots runs on one page: python launch/report.py --workdir=DIR [--compare DIR2 DIR3 ...]

Writes report.html and report.png into the directory of the run, which may still train. Runs whose
configs differ in config.seed alone are one line, with an interval over seeds.

--workdir  the run
--compare  other runs, in the same plots
--paper    the curves of the DAPO paper in the same plots, in grey
--diagnose print what the metrics show to be wrong, also on the page; with --paper the trends that
           are like the paper's and unlike them
--fit      fit held-out accuracy against compute, "tokens" or "seconds": asymptote, extrapolation,
           and a warning where the runs do not determine it; writes fit.png, too
"""

import argparse
import sys
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
FLAGS = "Flags: --workdir=DIR, --compare DIR2 DIR3 ..., --paper, --diagnose, --fit=tokens."


class Parser(argparse.ArgumentParser):
    """Raises UserError as the other programs do, instead of printing the usage."""

    def error(self, message: str) -> NoReturn:
        from dapo_jax.types import UserError

        raise UserError(f"{message}. {FLAGS}")


def directory(text: str) -> Path:
    # An unset shell variable would be the current directory.
    if not text:
        raise argparse.ArgumentTypeError("a directory is needed, nothing was given")
    return Path(text).expanduser().resolve()


def parse(arguments: list[str]) -> argparse.Namespace:
    """Returns the flags `workdir`, `compare`, `paper`, `diagnose` and `fit`.

    Raises:
        UserError: an unknown, missing or malformed flag.
    """
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--workdir", type=directory)
    parser.add_argument("--compare", type=directory, nargs="+", action="extend", default=[])
    parser.add_argument("--paper", action="store_true")
    parser.add_argument("--diagnose", action="store_true")
    parser.add_argument("--fit", choices=("tokens", "seconds"))
    # argparse accepts an equals sign only before the first directory of a list.
    apart = [
        part
        for argument in arguments
        for part in (argument.split("=", 1) if argument.startswith("--compare=") else [argument])
    ]
    flags, rest = parser.parse_known_args(apart)
    if rest:
        parser.error(f"{rest[0]!r} is not a flag")
    if flags.workdir is None:
        parser.error("--workdir is needed: the directory of the run")
    return flags


def main(argv: list[str]) -> int:
    """Returns the exit status: 0 done, 2 the user's mistake, 1 a failure."""
    sys.path.insert(0, str(ROOT))
    from dapo_jax.config.cli import fail

    if any(argument in ("--help", "-h", "-help") for argument in argv):
        print((__doc__ or "").strip())
        return 0
    try:
        flags = parse(argv[1:])
        import dapo_jax

        page = dapo_jax.report(flags.workdir, flags.compare, paper=flags.paper)
        if flags.diagnose:
            print(*dapo_jax.diagnose(flags.workdir, flags.compare, paper=flags.paper), sep="\n")
        if flags.fit:
            print(*dapo_jax.fit_curves(flags.workdir, flags.compare, compute=flags.fit), sep="\n")
            print(flags.workdir / "fit.png")
        print(page)
    except Exception as error:
        return fail(error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
