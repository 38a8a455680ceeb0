"""Writes: python launch/generate.py --model=HFDIR --prompt="Once upon a time"

The text of each sample is printed as it comes. With --json one object is printed instead, with
"samples": a list of "text", "token_ids", "log_probs" (of the distribution sampled from),
"model_log_probs" (of the model itself: untempered, nothing left out) and "finish_reason".

--model           Hugging Face directory or hub id
--prompt          a text; --prompt_token_ids=1,2,3 gives tokens instead
--prompts         FILE.jsonl with "prompt" (a text, or messages) or "prompt_token_ids" in each line;
                  --output=FILE.jsonl gets each line with its samples. Stopped anywhere, the same
                  command goes on
--num_samples     of each prompt, 4 if not given
--temperature     1 if not given; 0: greedy
--top_p           0.7 if not given; --top_k and --min_p: 0, which leaves nothing out
--max_new_tokens  256 if not given
--stop            text after which a sample ends, or several: --stop='["\\n\\n", "Question:"]'
--seed            0 if not given
--chat            put the prompt into the chat template, or where there is none into DAPO's prompt
--dtype           float32 or bfloat16; if not given that of the checkpoint, on CPUs float32
--slots           sequences decoded at once, 64 if not given
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(argv: list[str]) -> int:
    """The exit status: 0 done, 2 the user's mistake, 1 a failure, 128 + n stopped by signal n."""
    sys.path.insert(0, str(ROOT))
    from dapo_jax.config.cli import fail, parse_flags

    try:
        flags = parse_flags(
            argv,
            __doc__ or "",
            text={"model": None, "prompt": "", "prompt_token_ids": "", "prompts": "", "output": "",
                  "dtype": "", "stop": ""},
            numbers={"num_samples": 4, "temperature": 1.0, "top_p": 0.7, "top_k": 0, "min_p": 0.0,
                     "max_new_tokens": 256,
                     "seed": 0, "slots": 64},
            switches=("json", "chat"),
        )  # fmt: skip
        from dapo_jax.tools.generate import generate

        stopped_by = generate(flags)
    except Exception as error:
        return fail(error)
    return 0 if stopped_by is None else 128 + stopped_by


if __name__ == "__main__":
    sys.exit(main(sys.argv))
