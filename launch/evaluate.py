"""Evaluates: python launch/evaluate.py --config=configs/tiny_dapo.py --workdir=runs/tiny_dapo

Prints avg@n, cons@n (majority vote over equal answers; a tie is shared) and the unbiased pass@k for
k = 1, 2, 4 ... n, each with its 95 % interval over problems. Writes results.json, the transcripts,
and a page of each benchmark with every problem. After a stop the same command resumes.

--config        of the model; --config.FIELD=VALUE as in launch/train.py
--workdir       of a run; --step: of a checkpoint, default the newest
--model         a Hugging Face directory or hub id instead of a run; with --workdir, the one that
                the run was given. Without both: the base model
--benchmarks    aime24, aime25, amc23, math500, gsm8k, ..., hub ids or files, separated by commas;
                train/NAME: problems of config.data.train; default the config's eval problems
--num_samples   n, default 32, at temperature 0 one
--num_problems  only the first ones of each benchmark
--temperature   default that of config.evaluation, as of --top_p; --top_k, --min_p: 0, off
--seed          default 0
--scorer        default the config's
--output        directory; default below the run
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(argv: list[str]) -> int:
    """Returns the exit status: 0 done, 2 the user's mistake, 1 a failure, 128 + n a signal n."""
    sys.path.insert(0, str(ROOT))
    from dapo_jax.config.cli import fail, parse

    try:
        texts = ("model", "benchmarks", "scorer", "output")
        integers = ("step", "num_samples", "num_problems", "top_k", "seed")
        floats = ("temperature", "top_p", "min_p")
        config, flags = parse(argv, __doc__ or "", texts=texts, integers=integers, floats=floats)
        from dapo_jax.tools.evaluate import evaluate_model, request

        stopped_by = evaluate_model(config, request(config, flags)).stopped_by
    except Exception as error:
        return fail(error)
    return 0 if stopped_by is None else 128 + stopped_by


# Workers that score import this file again.
if __name__ == "__main__":
    sys.exit(main(sys.argv))
