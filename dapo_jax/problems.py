"""The problems of a run: training and held-out, generated or read from files."""

from typing import Any

from dapo_jax import arithmetic, data
from dapo_jax.config import Config
from dapo_jax.types import Problem, UserError


def load_problems(config: Config, tokenizer: Any) -> tuple[list[Problem], list[Problem], list[str]]:
    """(training problems, held-out problems, lines that say what was read and left out).

    Raises:
        UserError: a file or a field that cannot serve; see `dapo_jax.data`.
    """
    sides, notes = [], []
    for side in ("train", "heldout"):
        pairs, template = _pairs(config, side)
        problems, counts = data.prepare(
            pairs,
            tokenizer.encode,
            source=config.data.source,
            max_prompt_tokens=config.data.max_prompt_tokens,
            overlong=config.data.overlong_prompts,
            prompt_template=template,
        )
        left_out = ", ".join(
            f"{counts[name]} {name}"
            for name in ("duplicates", "conflicting", "overlong")
            if counts[name]
        )
        notes.append(
            f"{side}: {counts['problems']} problems" + (left_out and f" ({left_out} left out)")
        )
        sides.append(problems)
    return sides[0], sides[1], notes


def _pairs(config: Config, side: str) -> tuple[list[tuple[str, str]], str | None]:
    """((prompt, answer) pairs, prompt template) of one side of the data."""
    d = config.data
    if d.source == "jsonl":
        path = d.train_path if side == "train" else d.heldout_path
        assert path is not None and d.prompt_key is not None and d.answer_key is not None
        pairs = data.read_jsonl(
            path,
            prompt_key=d.prompt_key,
            answer_key=d.answer_key,
            field=f"config.data.{side}_path",
        )
        return pairs, d.prompt_template
    num = d.num_train if side == "train" else d.num_heldout
    assert num is not None and d.num_terms is not None
    try:
        pairs = arithmetic.generate_problems(
            num, num_terms=d.num_terms, heldout=side == "heldout", seed=config.seed
        )
    except ValueError as error:
        raise UserError(
            f"config.data.num_{side} ({num}) with config.data.num_terms {d.num_terms}: {error}. "
            "Ask for fewer problems or more terms."
        ) from error
    return pairs, None
