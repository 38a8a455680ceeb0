"""Rewrites problems so that their answers are integers, as appendix A of the DAPO paper does.

    python launch/transform_data.py --input=math --output=DIR --model=HFDIR --chat
    python launch/transform_data.py --input=FILE.jsonl --output=DIR \\
        --endpoint=http://localhost:8000/v1 --endpoint_model=NAME

DIR/problems.jsonl is a data source: --config.data.train.mine.path=DIR/problems.jsonl
--config.data.train.mine.weight=1.
DIR/rows.jsonl has every record with its original, all replies and why it was dropped,
DIR/report.json the counts. After a stop the same command resumes.

--input           a name of docs/data.md, a jsonl or parquet file or a data set of the hub
--output          a directory
--model           Hugging Face directory or hub id; or
--endpoint        an OpenAI-compatible URL, its model in --endpoint_model, its key in the
                  environment variable OPENAI_API_KEY, which is never stored
--num_samples     solutions of each rewritten problem, default 4
--min_agreement   share of them that must end with the same integer, default 0.75
--num_problems    the first so many, default 0: all
--prompt_key, --answer_key  columns, default found by name
--temperature     default 0.7
--max_new_tokens  of each reply, default 2048
--seed            default 0
--concurrency     requests to the endpoint at once, default 8
--chat            put prompts into the model's chat template
--slots           sequences decoded at once with --model, default 64
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(argv: list[str]) -> int:
    """Returns the exit status: 0 done, 2 the user's mistake, 1 a failure, 130 stopped."""
    sys.path.insert(0, str(ROOT))
    from dapo_jax.config.cli import fail, parse_flags

    say = lambda line: print(line, file=sys.stderr)
    try:
        texts = ("model", "endpoint", "endpoint_model", "prompt_key", "answer_key")
        integers = {"num_samples": 4, "max_new_tokens": 2048, "seed": 0, "concurrency": 8}
        integers |= {"slots": 64, "num_problems": 0}
        flags = parse_flags(
            argv,
            __doc__ or "",
            text={"input": None, "output": None} | dict.fromkeys(texts, ""),
            numbers=integers | {"min_agreement": 0.75, "temperature": 0.7},
            switches=("chat",),
        )
        from dapo_jax.tools import transform
        from dapo_jax.types import UserError

        if bool(flags["model"]) == bool(flags["endpoint"]):
            raise UserError("one of --model and --endpoint is needed.")
        if flags["endpoint"]:
            named = {name: flags[name] for name in transform.Endpoint._fields[2:]}
            endpoint = transform.Endpoint(flags["endpoint"], flags["endpoint_model"], **named)
            replies = transform.from_endpoint(endpoint, say)
        else:
            replies = transform.from_model(flags)
        named = {n: flags[n] for n in transform.Settings._fields if n not in ("source", "output")}
        output = Path(flags["output"]).expanduser()
        report = transform.transform(transform.Settings(flags["input"], output, **named), replies)
        if report is None:
            raise KeyboardInterrupt
        print(f"{report['kept']} of {report['records']} problems kept: {output / 'problems.jsonl'}")
        for reason, count in report["reasons"].items():
            print(f"{count:8,} {reason}")
    except KeyboardInterrupt:
        say("stopped; the same command resumes")
        return 130
    except Exception as error:
        return fail(error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
