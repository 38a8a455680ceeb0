"""Where a response ends because its text does: strings that stop it, found on the host.

The device knows tokens, not text, and draws on while the host reads. So a string is found after the
fact, and what was drawn after the token that completes it is discarded.
"""

from collections.abc import Sequence

import numpy as np

from dapo_jax.types import Detokenize

# Tokens besides those that hold the string: some have no text, and a decoder may take a space off
# the first.
SPARE_TOKENS = 8


def tail_tokens(strings: Sequence[str]) -> int:
    """How many tokens before a new one can hold the beginning of a string that it completes: a
    token of text is a byte of UTF-8 or more."""
    return max(len(string.encode()) for string in strings) + SPARE_TOKENS


def completed_at(
    strings: Sequence[str],
    detokenize: Detokenize,
    sequences: Sequence[np.ndarray],
    first_new: Sequence[int],
) -> list[int | None]:
    """For each sequence of tokens, how many of them there are up to the one that completes the
    first string; None where the text holds none.

    Only the end of a sequence is decoded, all of it only where a string is found there.

    Args:
        strings: at least one, none of them empty.
        first_new: of each sequence, how many of its first tokens are known to hold none.
    """
    before = tail_tokens(strings)
    tails = [tokens[max(0, new - before) :] for tokens, new in zip(sequences, first_new)]
    found: list[int | None] = []
    for text, tokens, new in zip(detokenize(tails), sequences, first_new):
        place = None
        if _holds(text, strings):
            ends = range(new + 1, len(tokens) + 1)
            texts = detokenize([tokens[:end] for end in ends])
            place = next((end for end, t in zip(ends, texts) if _holds(t, strings)), None)
        found.append(place)
    return found


def _holds(text: str, strings: Sequence[str]) -> bool:
    return any(string in text for string in strings)
