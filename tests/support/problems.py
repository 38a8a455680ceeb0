"""Rows made into problems with a tokenizer whose tokens are characters, for tests."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from dapo_jax.config import SourceConfig
from dapo_jax.data.dataset import Prepared, prepare
from tests.support.helpers import source_dict, tiny_config

FIELD = "config.data.train.sums"
CHAT_TEMPLATE = (
    "{% if messages[0].role != 'system' %}[system]default{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "[{{ message.role }}]{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}{{ eos_token }}"
)


def character_tokenizer(
    chat_template: str | None = None, *, eos: str = "~", pad: str = "!"
) -> PreTrainedTokenizerFast:
    """A token for every character, its code; `^` before a text where special tokens are added."""
    vocab = {chr(code): code for code in (10, *range(32, 127))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing("^ $A", special_tokens=[("^", 94)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=eos, pad_token=pad, chat_template=chat_template
    )


def tokens_of(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


def row(prompt: object = "a", answer: object = "1", **more: object) -> dict[str, Any]:
    return {"prompt": prompt, "answer": answer, **more}


def write_rows(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def prepare_rows(
    directory: Path,
    rows: list[dict[str, Any]],
    *,
    tokenizer: Any = None,
    file: str = "problems.jsonl",
    source: dict[str, Any] | None = None,
    **settings: Any,
) -> Prepared:
    """The problems of a file with these rows.

    Args:
        directory: where the file is written.
        source: fields of its config.
        settings: fields of `config.data`.
    """
    settings = {"max_prompt_tokens": 200} | settings
    config = tiny_config()
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, **settings))
    path = write_rows(directory / file, rows)
    chosen = SourceConfig(**source_dict(**{"path": str(path)} | (source or {})))
    return prepare(config, "sums", chosen, tokenizer or character_tokenizer(), FIELD)
