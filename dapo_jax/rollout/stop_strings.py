"""Stop strings: find where a response's text completes one, on the host.

The device knows tokens, not text, and samples on while the host reads. The scheduler discards the
tokens after the one that completes a string.
"""

from collections.abc import Sequence

import numpy as np

from dapo_jax.types import Detokenize

# Some tokens have no text, and a decoder may drop a space before the first.
SPARE_TOKENS = 8


def tail_tokens(strings: Sequence[str]) -> int:
    """Returns how many tokens before a new one may hold the beginning of a string that it
    completes: a token with text holds a byte of UTF-8 or more."""
    return max(len(string.encode()) for string in strings) + SPARE_TOKENS


def first_completions(
    strings: Sequence[str],
    detokenize: Detokenize,
    sequences: Sequence[np.ndarray],
    num_checked: Sequence[int],
) -> list[int | None]:
    """Returns, for each sequence of tokens, its length up to the token that completes the first
    string; None where its text holds none.

    Only the end of a sequence is decoded, and all of it where a string is found there.

    Args:
        strings: at least one, none of them empty.
        num_checked: leading tokens of each sequence that are known to hold no string.
    """
    holds = lambda text: any(string in text for string in strings)
    before = tail_tokens(strings)
    tails = [tokens[max(0, n - before) :] for tokens, n in zip(sequences, num_checked)]
    found: list[int | None] = []
    for text, tokens, n in zip(detokenize(tails), sequences, num_checked):
        lengths = range(n + 1, len(tokens) + 1) if holds(text) else ()
        texts = detokenize([tokens[:length] for length in lengths]) if lengths else ()
        found.append(next((length for length, t in zip(lengths, texts) if holds(t)), None))
    return found
