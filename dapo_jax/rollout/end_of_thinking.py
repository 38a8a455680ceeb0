"""Forced end of thinking: closes the thinking of a response that has not closed it after N tokens.

The scheduler cuts the response after N tokens, however many came in the same call, appends a phrase
that was not sampled, and has both prefilled: the answer is sampled after them. Sources: the
interruptions of ScaleRL, arXiv:2510.13786, section 4; budget forcing of s1, arXiv:2501.19393.
"""

from typing import Any, NamedTuple

from dapo_jax.config import RolloutConfig
from dapo_jax.types import UserError


class EndOfThinking(NamedTuple):
    """When and how thinking is ended."""

    after_tokens: int  # N, tokens of the response
    phrase: tuple[int, ...]  # tokens
    # The last word of the phrase: thinking is closed where the text of N tokens has it.
    closing: str

    @classmethod
    def of(cls, config: RolloutConfig, tokenizer: Any) -> "EndOfThinking | None":
        """Returns what `config.rollout.end_of_thinking` asks for.

        Raises:
            UserError: the tokenizer has no tokens for the phrase, or its texts leave out the
                closing word.
        """
        if config.end_of_thinking is None:
            return None
        after_tokens, text = config.end_of_thinking
        phrase = tuple(tokenizer.encode(text, add_special_tokens=False))
        closing = text.split()[-1]
        read = tokenizer.decode(phrase, skip_special_tokens=True)
        if closing not in read or tokenizer.unk_token_id in phrase:
            raise UserError(
                f"config.rollout.end_of_thinking[1] ({text!r}) reads {read!r} in the tokens of "
                f"this model, without special and unknown ones, and closes thinking by {closing!r}."
                " Give a phrase that the tokenizer keeps, with a last word that is no special "
                "token: scorers would not see it either."
            )
        return cls(after_tokens, phrase, closing)
