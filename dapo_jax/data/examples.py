"""Supervised examples: conversations as tokens, with a mask of the assistant's tokens."""

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dapo_jax.config.sft import WRITTEN, ExamplesConfig, SftConfig
from dapo_jax.data import prompts, records, sources, word_problems
from dapo_jax.data.records import Conversation, ExampleColumns, Unusable
from dapo_jax.data.tokenizer import stop_tokens
from dapo_jax.types import UserError

TOKENISE_BATCH = 1000
REMEDY = "Correct it, or set config.data.unusable_examples to 'drop'."


class Example(NamedTuple):
    """One conversation in tokens."""

    prompt: tuple[int, ...]  # before the assistant's first turn
    response: np.ndarray  # int32, from there to the end of its last turn
    trained: np.ndarray  # bool, token of the response that the assistant writes

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.response)


def load(
    config: SftConfig,
    chosen: Mapping[str, ExamplesConfig],
    tokenizer: Any,
    *,
    field: str,
    say: Callable[[str], None],
) -> list[Example]:
    """Returns the examples of the sources, in their order.

    Args:
        chosen: `config.data.train` or `config.data.heldout`.
        field: where they are, for messages: "config.data.train".
        say: prints a summary of each source.

    Raises:
        UserError: a file or a field is wrong, an example cannot be used, or a source has none.
    """
    examples: list[Example] = []
    for name, source in chosen.items():
        place = f"{field}.{name}"
        found, unusable = _prepare(config, source, tokenizer, place)
        tokens = sum(example.length for example in found)
        trained = sum(int(example.trained.sum()) for example in found)
        summary = f"{len(found):,} examples, {tokens:,} tokens, {trained:,} of them trained"
        if unusable:
            summary += f"; {len(unusable):,} unusable left out, the first: {unusable[0]}"
        say(f"{place.removeprefix('config.data.')}: {summary}")
        if not found:
            raise UserError(f"{place}: no example is left. {summary}. Give more examples.")
        examples += found
    return examples


def split_heldout(examples: Sequence[Example], share: float) -> tuple[list[Example], list[Example]]:
    """Returns (training, held-out) examples: the prompts with the lowest hashes are held out, with
    all their examples. They are the same for every seed.

    Raises:
        UserError: no example is left to train on.
    """
    digest = lambda example: hashlib.sha256(np.asarray(example.prompt).tobytes()).digest()
    digests = [digest(example) for example in examples]
    ordered = sorted(set(digests))
    chosen = set(ordered[: max(1, round(share * len(ordered)))])
    train = [example for example, digest in zip(examples, digests) if digest not in chosen]
    heldout = [example for example, digest in zip(examples, digests) if digest in chosen]
    if not train:
        raise UserError(
            f"config.data.heldout_share ({share}) of {len(ordered):,} different prompts leaves "
            "none to train on. Lower it, or name held-out examples in config.data.heldout."
        )
    return train, heldout


def fingerprint(examples: Sequence[Example]) -> str:
    """Returns a hash of the examples in their order."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(np.asarray([len(example.prompt), *example.prompt], np.int64).tobytes())
        digest.update(example.response.tobytes() + example.trained.tobytes())
    return digest.hexdigest()


def _prepare(
    config: SftConfig, source: ExamplesConfig, tokenizer: Any, field: str
) -> tuple[list[Example], list[str]]:
    """Returns the examples of one source, and for each one left out the reason."""
    unusable: list[str] = []

    def leave_out(reason: str) -> None:
        if config.data.unusable_examples == "error":
            raise UserError(f"{reason}. {REMEDY}")
        unusable.append(reason)

    def usable() -> Iterator[tuple[str, Conversation]]:
        found = itertools.islice(_conversations(config, source, field), source.num_examples)
        for number, conversation in enumerate(found, 1):
            if isinstance(conversation, Unusable):
                leave_out(conversation.reason)
            else:
                yield f"{field}, example {number}", conversation

    examples: list[Example] = []
    conversations, longest = usable(), config.train.row_tokens
    while batch := list(itertools.islice(conversations, TOKENISE_BATCH)):
        for (where, _), example in zip(batch, _tokenised(config, tokenizer, batch)):
            if example.length <= longest:
                examples.append(example)
            else:
                leave_out(
                    f"{where} has {example.length:,} tokens, and a row holds "
                    f"config.train.row_tokens ({longest:,})"
                )
    return examples, unusable


def _conversations(
    config: SftConfig, source: ExamplesConfig, field: str
) -> Iterator[Conversation | Unusable]:
    if source.path == WRITTEN:
        for prompt, response in _generated(config, source, field):
            yield Conversation(prompt, (("assistant", response),))
        return
    dataset = sources.DATASETS.get(source.path)
    prompt_key = source.prompt_key
    if dataset is not None and source.messages_key is None:
        prompt_key = prompt_key or dataset.prompt_key
    columns = ExampleColumns(prompt_key, source.response_key, source.messages_key)
    for file in sources.find_files(source.path, source.split, field):
        yield from records.read_conversations(file, columns, field)


def _generated(config: SftConfig, source: ExamplesConfig, field: str) -> list[tuple[str, str]]:
    assert source.num_examples is not None and source.levels is not None
    try:
        return word_problems.generate_solved(
            source.num_examples,
            levels=source.levels,
            heldout=source.split == "heldout",
            seed=config.seed,
        )
    except ValueError as error:
        raise UserError(
            f"{field}.num_examples ({source.num_examples}) with levels {source.levels}: {error}. "
            "Ask for fewer examples or other levels."
        ) from error


def _tokenised(
    config: SftConfig, tokenizer: Any, batch: Sequence[tuple[str, Conversation]]
) -> Iterator[Example]:
    """Yields conversations in tokens. Pieces are tokenised one by one, as in generation the model
    continues the tokens of its prompt.

    Raises:
        UserError: the chat template does not fit, see `prompts.render_turns`, or it ends a turn
            with no token that ends a response.
    """
    data, stops = config.data, stop_tokens(config.model, tokenizer)
    templated = data.chat and bool(tokenizer.chat_template)
    rendered = [
        prompts.render_turns(
            tokenizer,
            *conversation,
            template=data.prompt_template,
            chat=data.chat,
            system_prompt=data.system_prompt,
        )
        for _, conversation in batch
    ]
    firsts = prompts.encode(tokenizer, [pieces[0][0] for pieces in rendered], chat=data.chat)
    later = [text for pieces in rendered for text, _ in pieces[1:]]
    encoded = iter(tokenizer(later, add_special_tokens=False)["input_ids"])
    for (where, _), prompt, pieces in zip(batch, firsts, rendered):
        response: list[int] = []
        trained: list[bool] = []
        for _, is_assistant in pieces[1:]:
            tokens = next(encoded)
            if is_assistant and not templated:
                tokens = [*tokens, tokenizer.eos_token_id]
            ends = [i for i, token in enumerate(tokens, 1) if token in stops]
            if is_assistant and not ends:
                raise UserError(
                    f"{where}: the chat template of config.model.tokenizer ends the assistant's "
                    f"turn with none of the tokens that end a response ({stops}): the model would "
                    "not learn to stop. Add its end of turn to config.model.stop_token_ids, or "
                    "change the template."
                )
            own = ends[-1] if is_assistant else 0  # after them the template's, such as a new line
            response += tokens
            trained += [True] * own + [False] * (len(tokens) - own)
        length = len(trained) - trained[::-1].index(True)
        yield Example(
            prompt, np.array(response[:length], np.int32), np.array(trained[:length], bool)
        )
