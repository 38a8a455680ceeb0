"""Generates text: python launch/generate.py --model=HFDIR --prompt="Once upon a time"

Prints the text of each sample as it comes, or with --json one object with "samples": a list of
"text", "token_ids", "log_probs" (under the sampling distribution), "model_log_probs" (under the
untempered model) and "finish_reason".

--model           Hugging Face directory or hub id
--prompt          a text; --prompt_token_ids=1,2,3 gives tokens instead
--prompts         FILE.jsonl with "prompt" (a text, or messages) or "prompt_token_ids" in each line;
                  --output=FILE.jsonl gets each line with its samples. After a stop the same
                  command resumes
--num_samples     of each prompt, default 4
--temperature     default 1; 0: greedy
--top_p           default 0.7; --top_k and --min_p: default 0, which keeps all tokens
--max_new_tokens  default 256
--stop            text after which a sample ends, or several: --stop='["\\n\\n", "Question:"]'
--seed            default 0
--chat            put the prompt into the chat template, or without one into DAPO's prompt
--system_prompt   with --chat, for prompts without one; default the chat template's
--dtype           float32 or bfloat16; default the checkpoint's, on CPUs float32
--slots           sequences decoded at once, default 64
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(argv: list[str]) -> int:
    """Returns the exit status: 0 done, 2 the user's mistake, 1 a failure, 128 + n a signal n."""
    sys.path.insert(0, str(ROOT))
    from dapo_jax.config.cli import fail, parse_flags

    try:
        prompts = ("prompt", "prompt_token_ids", "prompts", "system_prompt")
        floats = {"temperature": 1.0, "top_p": 0.7, "min_p": 0.0}
        integers = {"num_samples": 4, "top_k": 0, "max_new_tokens": 256, "seed": 0, "slots": 64}
        flags = parse_flags(
            argv,
            __doc__ or "",
            text={"model": None} | dict.fromkeys((*prompts, "output", "dtype", "stop"), ""),
            numbers=integers | floats,
            switches=("json", "chat"),
        )
        from dapo_jax.tools.generate import generate

        stopped_by = generate(flags)
    except Exception as error:
        return fail(error)
    return 0 if stopped_by is None else 128 + stopped_by


if __name__ == "__main__":
    sys.exit(main(sys.argv))
