"""Tokenizers: `transformers` fast tokenizers, loaded, or built for generated arithmetic."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

# transformers would announce at import that torch is missing.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dapo_jax.config import ModelConfig, hf_config
from dapo_jax.data import arithmetic
from dapo_jax.types import UserError
from dapo_jax.utils import hf_hub

# Files that a tokenizer may have in a repository.
FILES = ("*.json", "*.jinja", "tokenizer*", "vocab*", "merges.txt")


def arithmetic_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a fast tokenizer whose tokens are the words of `arithmetic`."""
    vocab = {w: i for i, w in enumerate(["<pad>", "<eos>", "<unk>", *arithmetic.WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    pattern = Regex("|".join(arithmetic.WORDS))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern, behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def stop_tokens(config: ModelConfig, tokenizer: Any) -> tuple[int, ...]:
    """Returns the tokens that end a response, the tokenizer's end of sequence first."""
    return tuple(dict.fromkeys((tokenizer.eos_token_id, *config.stop_token_ids)))


def text_stream(tokenizer: Any) -> Callable[[int], str]:
    """Returns a function of the tokens of one text, in turn, that returns the text each adds: ""
    for special tokens and incomplete characters."""
    stream = decoders.DecodeStream(skip_special_tokens=True)
    return lambda token: stream.step(tokenizer.backend_tokenizer, token) or ""


def load_tokenizer(config: ModelConfig, save_to: Path | None = None) -> Any:
    """Returns the tokenizer of the config, checked against the model's vocabulary. Adapters of peft
    that come without one have that of their base model.

    Args:
        save_to: directory for a copy in Hugging Face format.

    Raises:
        UserError: it cannot be loaded, has no end-of-sequence token, or more tokens than the model.
    """
    place = config.tokenizer or config.path
    if place is None:
        tokenizer = arithmetic_tokenizer()
    else:
        field = "config.model.tokenizer" if config.tokenizer else "config.model.path"
        # Given a repository's id, transformers would ask the hub many times, each with a time-out.
        directory = hf_hub.model_directory(place, FILES, field)
        if not any(directory.glob("tokenizer*")):
            directory = hf_hub.model_directory(hf_config.base_path(place), FILES, field)
        # AutoTokenizer splits words as Qwen does in every directory of a qwen2 model, whatever
        # tokenizer.json has.
        is_fast = (directory / "tokenizer.json").is_file()
        load = PreTrainedTokenizerFast if is_fast else AutoTokenizer
        try:
            tokenizer = load.from_pretrained(directory)
        except Exception as error:  # tokenizers raises no other class for a damaged file
            raise UserError(
                f"the tokenizer of {field} ({place!r}) could not be loaded: {error} "
                "Give a directory in Hugging Face format or the id of a repository on the hub."
            ) from error
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"config.model.tokenizer ({place!r}) has no end-of-sequence token: "
            "responses could not end. Set eos_token in its tokenizer_config.json."
        )
    if len(tokenizer) > config.vocab_size:
        raise UserError(
            f"config.model.vocab_size ({config.vocab_size}) is smaller than the tokenizer's "
            f"vocabulary ({len(tokenizer)}). Set it to {len(tokenizer)} or more."
        )
    if save_to is not None:
        save_tokenizer(tokenizer, save_to)
    return tokenizer


def save_tokenizer(tokenizer: Any, directory: Path) -> None:
    """Writes a tokenizer in Hugging Face format, for every version of transformers.

    Version 5 names a class that version 4 does not have, and lists special tokens under a key that
    is a mapping in version 4. Both versions read the names of version 4.
    """
    tokenizer.save_pretrained(str(directory))
    file = directory / "tokenizer_config.json"
    values = json.loads(file.read_text())
    if values.get("tokenizer_class") == "TokenizersBackend":
        values["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(values.get("extra_special_tokens"), list):
        values["additional_special_tokens"] = values.pop("extra_special_tokens")
    file.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n")
