"""Evaluates: python launch/evaluate.py --config=configs/tiny_dapo.py --workdir=runs/tiny_dapo

Prints avg@n, cons@n (majority vote over equal answers, a tie shared between the answers in it) and
the unbiased pass@k for k = 1, 2, 4 ... n, each with its 95 % interval over problems. Writes
results.json, the transcripts, and a page of each benchmark that shows every problem. After a stop
anywhere the same command resumes.

--config        of the model; --config.FIELD=VALUE as in launch/train.py
--workdir       of a run; --step: of its checkpoints, the newest if not given
--model         a Hugging Face directory or hub id, evaluated where there is no --workdir; with one,
                the --model that the run was given; with neither, the base model of the config
--benchmarks    aime24, aime25, amc23, math500, gsm8k, ..., hub ids or files, with commas between
                them; the held-out problems of the config if not given
--num_samples   n, 32 if not given; --num_problems: the first so many of each benchmark
--temperature   as config.evaluation if not given; so is --top_p; --top_k and --min_p: 0, off
--seed          0 if not given
--scorer        as the config says if not given
--output        directory; below the run if not given
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(argv: list[str]) -> int:
    """The exit status: 0 done, 2 the user's mistake, 1 a failure, 128 + n stopped by signal n."""
    sys.path.insert(0, str(ROOT))
    from dapo_jax.config.cli import fail, parse

    try:
        texts = ("model", "benchmarks", "scorer", "output")
        integers = ("step", "num_samples", "num_problems", "top_k", "seed")
        floats = ("temperature", "top_p", "min_p")
        config, flags = parse(argv, __doc__ or "", texts=texts, integers=integers, floats=floats)
        from dapo_jax.evaluation.cli import evaluate_model, request

        stopped_by = evaluate_model(config, request(config, flags))
    except Exception as error:
        return fail(error)
    return 0 if stopped_by is None else 128 + stopped_by


# Workers that score import this file again.
if __name__ == "__main__":
    sys.exit(main(sys.argv))
