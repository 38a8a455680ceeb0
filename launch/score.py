"""Scores a file: python launch/score.py --scorer=math_dapo --input=IN.jsonl --output=OUT.jsonl

Each line of the input is a JSON object with "prediction", a text, and "answer", a text or a number.
The output adds "correct", "extracted", "reward" (1 or -1, or the scorer's own; of
several their weighted sum), "seconds" and "note". Other lines are reported by number and skipped.

--scorer           one of dapo_jax/rewards/scorers.py, module:function, path/to/file.py:function,
                   or several with weights: "math_dapo + 0.1 * answer_format"
--timeout_seconds  hard limit for one answer, default 5
--workers          processes that score, default 2
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(argv: list[str]) -> int:
    """Returns the exit status: 0 done, 2 the user's mistake, 1 a failure, 130 stopped."""
    sys.path.insert(0, str(ROOT))
    from dapo_jax.config.cli import fail, parse_flags

    try:
        flags = parse_flags(
            argv,
            __doc__ or "",
            text={"scorer": None, "input": None, "output": None},
            numbers={"timeout_seconds": 5.0, "workers": 2},
        )
        from dapo_jax.tools.score_file import score_file

        print(
            score_file(
                flags["scorer"],
                Path(flags["input"]).expanduser(),
                Path(flags["output"]).expanduser(),
                timeout_seconds=flags["timeout_seconds"],
                workers=flags["workers"],
                say=lambda line: print(line, file=sys.stderr),
            )
        )
    except KeyboardInterrupt:
        print("stopped: --output is not complete; the same command begins again", file=sys.stderr)
        return 130
    except Exception as error:
        return fail(error)
    return 0


# The processes that score import this file again.
if __name__ == "__main__":
    sys.exit(main(sys.argv))
