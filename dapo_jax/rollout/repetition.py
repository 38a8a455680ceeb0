"""Early end of repetition: finds the token at which a response has repeated itself too long.

The scheduler asks after each engine call. Invariant: where a response ends is a function of its
own log-probs; what is kept between calls only saves time.
"""

import math

import numpy as np

CONFIDENT = math.log(0.99)


class RepetitionDetector:
    """Finds responses whose last N tokens each had a probability above 0.99.

    Source: MiniMax-M1, arXiv:2506.13585, section 3.2, with N = 3,000.

    Args:
        num_tokens: N.
        log_probs_XT: float32, of the tokens of X responses of up to T tokens; the caller fills it.
    """

    def __init__(self, num_tokens: int, log_probs_XT: np.ndarray):
        self.num_tokens, self.log_probs_XT = num_tokens, log_probs_XT
        self.run_X = np.zeros(log_probs_XT.shape[:-1], np.int32)  # confident tokens at the end

    def begin(self, place: tuple[int, ...], length: int) -> None:
        """Starts a response that has its first `length` tokens already."""
        last = self.log_probs_XT[place][max(0, length - self.num_tokens) : length]
        unsure = np.flatnonzero(~(last > CONFIDENT))
        self.run_X[place] = len(last) - (int(unsure[-1]) + 1 if len(unsure) else 0)

    def advance(self, before_X: np.ndarray, after_X: np.ndarray) -> dict[tuple[int, ...], int]:
        """Takes new tokens; returns the places of the responses for which the rule now holds, each
        with its length up to the first token with which it does.

        Args:
            before_X: int, tokens of each response that are known already.
            after_X: int, tokens of each response.
        """
        found: dict[tuple[int, ...], int] = {}
        at = np.nonzero(after_X > before_X)
        for i in range(int((after_X - before_X).max(initial=0))):
            has_token = before_X[at] + i < after_X[at]
            at = tuple(index[has_token] for index in at)
            token = before_X[at] + i  # its index in the response
            fits = self.log_probs_XT[(*at, token)] > CONFIDENT
            self.run_X[at] = np.where(fits, self.run_X[at] + 1, 0)
            holds = self.run_X[at] >= self.num_tokens
            for *place, index in zip(*(x[holds].tolist() for x in (*at, token))):
                found.setdefault(tuple(place), index + 1)
        return found
