"""Early end of repetition: finds the token at which a response has repeated itself too long.

The scheduler asks after each engine call. Invariant: where a response ends is a function of its
own tokens and log-probs; what is kept between calls only saves time.
"""

import math

import numpy as np

CONFIDENT = math.log(0.99)
REPEATS = 4  # times that the tokens of "periodic" hold their period, at least


class RepetitionDetector:
    """Applies a rule to the last N tokens of X responses.

        confident: each was sampled with a probability above 0.99.
        periodic: some p in 1 .. N // 4 is a period of these tokens y_1 .. y_N:
                  y_i = y_(i-p) for p < i <= N.

    Source: confident is MiniMax-M1's, arXiv:2506.13585, section 3.2, with N = 3,000; periodic is
    ours.

    A token costs O(1), amortised. With P = N // 4, any N tokens of period q <= P hold the 2 P
    tokens before one of the lengths that P divides. There, `_find_period` looks for the smallest
    period p of the last 2 P. As p + q <= 2 P, p divides q (Fine and Wilf), so that p is a period
    of the N tokens too: one candidate is followed, token by token, until it fails.

    Args:
        rule: ("confident" or "periodic", N); of "periodic" N is 4 or more.
        tokens_XT: int32, of responses of up to T tokens; the caller fills it.
        log_probs_XT: float32, of these tokens; the caller fills it. Read by "confident" only.
    """

    def __init__(self, rule: tuple[str, int], tokens_XT: np.ndarray, log_probs_XT: np.ndarray):
        self.kind, self.num_tokens = rule
        self.tokens_XT, self.log_probs_XT = tokens_XT, log_probs_XT
        self.run_X = np.zeros(tokens_XT.shape[:-1], np.int32)  # last tokens that the rule fits
        self.period_X = np.zeros_like(self.run_X)  # of the run, with "periodic"; 0: no candidate

    def begin(self, place: tuple[int, ...], length: int) -> None:
        """Starts a response that has its first `length` tokens already."""
        self.run_X[place] = self.period_X[place] = 0
        if self.kind == "confident":
            last = self.log_probs_XT[place][max(0, length - self.num_tokens) : length]
            self.run_X[place] = _num_true_at_end(last > CONFIDENT)
        else:
            self._find_period(place, length)

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
            self._take(at, token)
            holds = self.run_X[at] >= self.num_tokens
            for *place, index in zip(*(x[holds].tolist() for x in (*at, token))):
                found.setdefault(tuple(place), index + 1)
        return found

    def _take(self, at: tuple[np.ndarray, ...], token: np.ndarray) -> None:
        if self.kind == "confident":
            fits = self.log_probs_XT[(*at, token)] > CONFIDENT
            self.run_X[at] = np.where(fits, self.run_X[at] + 1, 0)
            return
        period = self.period_X[at]
        earlier = self.tokens_XT[(*at, token - period)]
        fits = (period > 0) & (self.tokens_XT[(*at, token)] == earlier)
        self.run_X[at] = np.where(fits, self.run_X[at] + 1, 0)
        self.period_X[at] = np.where(fits, period, 0)
        looks = ~fits & ((token + 1) % (self.num_tokens // REPEATS) == 0)
        for *place, index in zip(*(x[looks].tolist() for x in (*at, token))):
            self._find_period(tuple(place), index + 1)

    def _find_period(self, place: tuple[int, ...], length: int) -> None:
        """Makes the smallest period of the last 2 (N // 4) tokens the candidate, if it is N // 4 at
        most, and counts the tokens that it fits."""
        longest = self.num_tokens // REPEATS
        if length < 2 * longest:
            return
        last = self.tokens_XT[place][max(0, length - self.num_tokens) : length]
        if period := _smallest_period(last[-2 * longest :]):
            self.period_X[place] = period
            self.run_X[place] = period + _num_true_at_end(last[period:] == last[:-period])


def _smallest_period(tokens: np.ndarray) -> int:
    """Returns the smallest period of 2 P tokens that is P at most; 0 where there is none.

    With a period q <= P, the first half recurs after q tokens. If it recurs after p < q as well, p
    is a period too: the first p + P tokens have the periods p and q, and so gcd(p, q), which
    divides q and is thus a period of all. Hence the first recurrence decides.
    """
    half = len(tokens) // 2
    text, size = tokens.tobytes(), tokens.itemsize
    place = text.find(text[: half * size], size)  # in linear time
    while place % size and place > 0:  # found within a token
        place = text.find(text[: half * size], place + 1)
    period = place // size
    return period if place > 0 and (tokens[period:] == tokens[:-period]).all() else 0


def _num_true_at_end(values: np.ndarray) -> int:
    """Returns how many of the last values are all true."""
    false = np.flatnonzero(~values)
    return len(values) - (int(false[-1]) + 1 if len(false) else 0)
