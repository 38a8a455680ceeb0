"""Trains: python launch/train.py --config=configs/tiny_dapo.py

--workdir=DIR is the directory of the run; without it runs/NAME, NAME being that of the config file:
runs/tiny_dapo, or with --config=configs/tiny.py:grpo runs/tiny_grpo.

--config.optimizer.learning_rate=2e-4 overrides a field of the config. --model=HFDIR replaces the
config's model and tokenizer by a Hugging Face directory or hub id. --dry_run prints the plan of the
run (sizes, mesh, batch arithmetic, memory) and touches nothing.

On several hosts every process runs this command. On Cloud TPU, GKE and Slurm they find each other;
elsewhere give --coordinator_address=HOST:PORT (of process 0) --num_processes=N --process_id=I.
They wait --coordinator_timeout=300 seconds for each other.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(argv: list[str]) -> int:
    """Returns the exit status: 0 done, 2 the user's mistake, 1 a failure, 128 + n a signal n; 75
    where the run hung, or a device or the storage failed; where another process failed by itself,
    its status. After 75 and 128 + 15 start it again."""
    sys.path.insert(0, str(ROOT))
    from dapo_jax.config.cli import default_workdir, fail, parse, run_in_group

    try:
        config, flags = parse(
            argv,
            __doc__ or "",
            switches=("dry_run",),
            texts=("model", "coordinator_address"),
            integers=("num_processes", "process_id", "coordinator_timeout"),
        )
        from dapo_jax.config.checks import check_training

        check_training(config)
        if flags.dry_run:
            from dapo_jax.tools.plan.dry_run import describe

            print(describe(config))
            return 0
        workdir = default_workdir(argv) if flags.workdir is None else Path(flags.workdir)
        from dapo_jax.train_loop import train
    except Exception as error:
        return fail(error)
    return run_in_group(flags, lambda group: train(config, workdir.expanduser().resolve(), group))


# Reward workers import this file again: the guard keeps them from training.
if __name__ == "__main__":
    sys.exit(main(sys.argv))
