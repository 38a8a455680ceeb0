"""Prompts: template, chat, tokens."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import jinja2

from dapo_jax.data.records import Message, Prompt
from dapo_jax.types import UserError

# The template of the published data set, DAPO-Math-17k.
DAPO_TEMPLATE = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
    '{prompt}\n\nRemember to put your answer on its own line after "Answer:".'
)

# For templates that write today's date into every prompt, as Llama 3.2's: a run that is resumed
# tomorrow must have the prompts of today.
FIXED_DATE = "{%- macro strftime_now(format) -%}26 Jul 2024{%- endmacro -%}"


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
                "config.data.system_prompt (launch/generate.py: --system_prompt) is given, but the "
                "tokenizer has no chat template to put it into. Leave it out, or add chat_template "
                "to its tokenizer_config.json."
            )
        chat, template = False, template or DAPO_TEMPLATE
    messages = _messages(prompt, template)
    if not chat:
        if len(messages) != 1:
            raise UserError(
                f"a prompt is a chat of {len(messages)} messages ({messages[0][1][:40]!r}...), "
                "which needs a chat template. Set config.data.chat to True (launch/generate.py: "
                "give --chat), and add chat_template to the tokenizer_config.json of "
                "config.model.tokenizer where there is none."
            )
        return messages[0][1]
    messages = _with_system(messages, system_prompt)
    text, (role, content) = _chat_text(tokenizer, messages), messages[-1]
    # A template may change a prompt, such as by taking /no_think out of it.
    left_out = lambda: text == _chat_text(tokenizer, (*messages[:-1], (role, "?" * len(content))))
    if role == "user" and content.strip() not in text and left_out():
        raise UserError(
            f"the chat template of config.model.tokenizer leaves out the prompt {content[:40]!r}, "
            "as one that reads lists of parts does with a text. Set config.data.chat to False, or "
            "change the template."
        )
    return text


def render_turns(
    tokenizer: Any,
    prompt: Prompt,
    turns: Sequence[Message],
    *,
    template: str | None,
    chat: bool,
    system_prompt: str | None,
) -> list[tuple[str, bool]]:
    """Returns the text of a conversation in pieces: (text, whether the assistant writes it).

    The pieces alternate, and the first is `render`'s text. A chat template's marks after an
    assistant's turn are part of the turn.

    Args:
        turns: from the assistant's first turn to its last.
        template, chat, system_prompt: see `render`.

    Raises:
        UserError: as `render`; or the tokenizer's chat template does not write what `render` gives
            before the assistant's turns, or later turns change it.
    """
    first = render(tokenizer, prompt, template=template, chat=chat, system_prompt=system_prompt)
    if not (chat and tokenizer.chat_template):
        if len(turns) > 1:
            raise UserError(
                f"the conversation that begins with {first[:40]!r} has several turns, which need a "
                "chat template. Set config.data.chat to True, and add chat_template to the "
                "tokenizer_config.json of config.model.tokenizer where there is none."
            )
        return [(first, False), (turns[0][1], True)]
    messages = (*_with_system(_messages(prompt, template), system_prompt), *turns)
    pieces: list[tuple[str, bool]] = []
    done = ""
    for i, (role, content) in enumerate(messages):
        if role != "assistant" or i < len(messages) - len(turns):
            continue
        before = _chat_text(tokenizer, messages[:i])
        after = _chat_text(tokenizer, messages[: i + 1], generation=False)
        if not (before.startswith(done) and after.startswith(before)):
            raise UserError(
                f"the chat template of config.model.tokenizer writes the turns before "
                f"{content[:40]!r} differently once that turn is there, so they are not what the "
                "model continues. Give each assistant's turn as an example of its own, with a "
                "prompt and a response, or change the template."
            )
        turn = after[len(before) :]
        head, found, _ = turn.partition(content.strip())
        if (
            found
            and head.strip()
            and before == _chat_text(tokenizer, messages[:i], generation=False)
        ):
            raise UserError(
                f"the chat template of config.model.tokenizer ignores add_generation_prompt: the "
                f"model would have to write {head!r} itself. Add the generation prompt to the "
                "template, or set config.data.chat to False."
            )
        pieces += [(before[len(done) :], False), (turn, True)]
        done = after
    return pieces


def _messages(prompt: Prompt, template: str | None) -> tuple[Message, ...]:
    if not isinstance(prompt, str):
        return prompt
    return (("user", prompt if template is None else template.format(prompt=prompt)),)


def _with_system(messages: tuple[Message, ...], text: str | None) -> tuple[Message, ...]:
    return messages if text is None or messages[0][0] == "system" else (("system", text), *messages)


def _chat_text(tokenizer: Any, messages: Sequence[Message], *, generation: bool = True) -> str:
    """Returns messages in the chat template, with the generation prompt where asked for."""
    values = [{"role": role, "content": content} for role, content in messages]
    try:
        template = tokenizer.get_chat_template()
        if "strftime_now" in template:
            template = FIXED_DATE + template
        return tokenizer.apply_chat_template(
            values, tokenize=False, add_generation_prompt=generation, chat_template=template
        )
    except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
        raise UserError(
            f"the chat template of config.model.tokenizer does not take the prompt "
            f"{messages[-1][1][:40]!r}: {error}. Set config.data.chat to False, or change the "
            "prompt."
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
