"""Trains: python launch/train.py --config=configs/tiny_dapo.py --workdir=runs/tiny

Config fields are overridden as --config.optimizer.learning_rate=2e-4. --model=HFDIR takes a Hugging
Face directory or hub id in the place of the config's model and tokenizer. --dry_run prints the plan
of the run (sizes, mesh, batch arithmetic, memory) and touches nothing.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(argv: list[str]) -> int:
    """The exit status: 0 done, 2 the user's mistake, 1 a failure, 128 + n stopped by signal n."""
    sys.path.insert(0, str(ROOT))
    from dapo_jax.command_line import fail, parse

    try:
        config, flags = parse(argv, __doc__ or "", switches=("dry_run",), texts=("model",))
        if flags.dry_run:
            from dapo_jax.plan import describe

            print(describe(config))
            return 0
        from dapo_jax.types import UserError

        if not flags.workdir:
            raise UserError("--workdir is needed: the directory that will hold the run.")
        from dapo_jax.train import train

        stopped_by = train(config, Path(flags.workdir).expanduser().resolve())
    except Exception as error:
        return fail(error)
    return 0 if stopped_by is None else 128 + stopped_by


# Workers that score rewards import this file again; the guard keeps them from training.
if __name__ == "__main__":
    sys.exit(main(sys.argv))
