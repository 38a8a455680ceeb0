"""Tokenizers: `transformers` fast tokenizers, loaded, or built for generated arithmetic."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

# transformers announces at import that torch is missing, which here is as it should be.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dapo_jax.config import ModelConfig
from dapo_jax.data import arithmetic
from dapo_jax.types import UserError
from dapo_jax.utils import hf_hub

# Of a repository, what a tokenizer may consist of.
FILES = ("*.json", "*.jinja", "tokenizer*", "vocab*", "merges.txt")


def arithmetic_tokenizer() -> PreTrainedTokenizerFast:
    """A fast tokenizer whose tokens are the words of `arithmetic`: labels, digits, a few more."""
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
    """The tokens that end a response, the tokenizer's end of sequence first."""
    return tuple(dict.fromkeys((tokenizer.eos_token_id, *config.stop_token_ids)))


def text_stream(tokenizer: Any) -> Callable[[int], str]:
    """A function that takes the tokens of one text in turn and returns what each adds to it, ""
    while a character is incomplete; special tokens are left out."""
    stream = decoders.DecodeStream(skip_special_tokens=True)
    return lambda token: stream.step(tokenizer.backend_tokenizer, token) or ""


def _read(directory: Path) -> Any:
    """What tokenizer.json says, where there is one."""
    if (directory / "tokenizer.json").is_file():
        # AutoTokenizer gives every directory of a qwen2 model Qwen's own way of cutting a text into
        # words, whatever the file has and whichever class is asked for.
        return PreTrainedTokenizerFast.from_pretrained(directory)
    return AutoTokenizer.from_pretrained(directory)


def load_tokenizer(config: ModelConfig, save_to: Path | None = None) -> Any:
    """The tokenizer of the config, checked against the model's vocabulary.

    Args:
        save_to: where to leave a copy in Hugging Face format.

    Raises:
        UserError: it cannot be loaded, has no end-of-sequence token, or more tokens than the model.
    """
    place = config.tokenizer or config.path
    if place is None:
        tokenizer = arithmetic_tokenizer()
    else:
        field = "config.model.tokenizer" if config.tokenizer else "config.model.path"
        # By the id of a repository transformers asks the hub of one thing after another, and where
        # the hub is out of reach waits for each.
        directory = hf_hub.model_directory(place, FILES, field)
        try:
            tokenizer = _read(directory)
        except Exception as error:  # of a damaged file tokenizers raises no other class
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
        tokenizer.save_pretrained(str(save_to))
    return tokenizer
