"""Fine-tunes on written responses: python launch/sft.py --config=configs/sft_word_problems.py

--workdir=DIR is the directory of the run; without it runs/NAME, NAME being that of the config file.
At the end it holds the model in Hugging Face format, DIR/model, and config.model.path=DIR or
--model=DIR of launch/train.py takes it from there. docs/sft.md says more.

--config.optimizer.learning_rate=2e-5 overrides a field of the config. --model=HFDIR replaces the
config's model and tokenizer by a Hugging Face directory or hub id. The same command resumes a run
that was stopped.

On several hosts every process runs this command, as launch/train.py; there are the flags
--coordinator_address, --num_processes, --process_id and --coordinator_timeout.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(argv: list[str]) -> int:
    """Returns the exit status, as that of launch/train.py."""
    sys.path.insert(0, str(ROOT))
    from dapo_jax.config.cli import default_workdir, fail, parse, run_in_group
    from dapo_jax.config.sft import SftConfig

    try:
        config, flags = parse(
            argv,
            __doc__ or "",
            texts=("model", "coordinator_address"),
            integers=("num_processes", "process_id", "coordinator_timeout"),
            kind=SftConfig,
        )
        workdir = default_workdir(argv) if flags.workdir is None else Path(flags.workdir)
        from dapo_jax.tools.sft import fine_tune
    except Exception as error:
        return fail(error)
    return run_in_group(
        flags, lambda group: fine_tune(config, workdir.expanduser().resolve(), group)
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv))
