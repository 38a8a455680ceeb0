"""Prompts: template, chat, tokens."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import jinja2

from dapo_jax.data.records import Prompt
from dapo_jax.types import UserError

# The template of the published data set, DAPO-Math-17k.
DAPO_TEMPLATE = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
    '{prompt}\n\nRemember to put your answer on its own line after "Answer:".'
)


def render(
    tokenizer: Any,
    prompt: Prompt,
    *,
    template: str | None,
    chat: bool,
    system_prompt: str | None,
) -> str:
    """Returns the text that the model continues.

    Args:
        prompt: a text, or the (role, content) messages of a chat.
        template: `str.format` template with {prompt} for a text; None: the text itself.
        chat: put the prompt into the tokenizer's chat template. A tokenizer without one has
            DAPO_TEMPLATE for texts, and takes the only message of a chat as it is.
        system_prompt: for a prompt without one; None: the chat template's.

    Raises:
        UserError: the prompt does not fit the tokenizer's chat template, or needs one.
    """
    if chat and not tokenizer.chat_template:
        if system_prompt is not None:
            raise UserError(
                "config.data.system_prompt is given, but the tokenizer has no chat template to put "
                "it into. Set it to None, or add chat_template to its tokenizer_config.json."
            )
        chat, template = False, template or DAPO_TEMPLATE
    if isinstance(prompt, str):
        prompt = (("user", prompt if template is None else template.format(prompt=prompt)),)
    if not chat:
        if len(prompt) != 1:
            raise UserError(
                f"a prompt is a chat of {len(prompt)} messages ({prompt[0][1][:40]!r}...), which "
                "needs a chat template. Set config.data.chat to True, and add chat_template to the "
                "tokenizer_config.json of config.model.tokenizer where there is none."
            )
        return prompt[0][1]
    if system_prompt is not None and prompt[0][0] != "system":
        prompt = (("system", system_prompt), *prompt)
    messages = [{"role": role, "content": content} for role, content in prompt]
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except jinja2.TemplateError as error:
        raise UserError(
            f"the chat template of config.model.tokenizer does not take the prompt "
            f"{prompt[-1][1][:40]!r}: {error}. Set config.data.chat to False, or change the prompt."
        ) from error


def encode(tokenizer: Any, texts: Sequence[str], *, chat: bool) -> list[tuple[int, ...]]:
    """Returns the tokens of each text. A chat template adds its special tokens itself."""
    special = not (chat and tokenizer.chat_template)
    found = tokenizer(list(texts), add_special_tokens=special)["input_ids"]
    return [tuple(tokens) for tokens in found]


def fingerprint(tokenizer: Any) -> str:
    """Returns a hash of everything that the tokens of a prompt depend on."""
    special = json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str)  # in templates
    parts = (tokenizer.backend_tokenizer.to_str(), str(tokenizer.chat_template), special)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
