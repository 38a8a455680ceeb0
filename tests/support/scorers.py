"""Scorers for tests, most of which misbehave; loaded by workers."""

import os
import sys
import time

import numpy as np

from dapo_jax.rewards.types import Score


class Wordless(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def treacherous(response: str, answer: str) -> Score:
    """Right if equal; hangs, dies, raises or eats memory when the response says so."""
    if response == "hang":
        while True:
            time.sleep(3600)
    if response == "spin":
        while True:
            pass
    if response == "stubborn":  # swallows whatever an alarm raises
        while True:
            try:
                time.sleep(3600)
            except BaseException:
                pass
    if response == "die":
        os._exit(11)
    if response == "raise":
        raise ZeroDivisionError("in the scorer")
    if response == "eat":
        bytearray(2**40)
    if response == "exit":
        sys.exit(3)
    if response == "interrupt":
        raise KeyboardInterrupt
    if response == "no text":
        raise Wordless
    if response == "no letters":
        raise ValueError("\ud800 is half a letter")
    return Score(response == answer, response)


def unhurried(response: str, answer: str) -> bool:
    """Right if it begins with the answer; takes a while, and dies when the response says so."""
    time.sleep(0.01)
    if response.startswith("die"):
        os._exit(11)
    return response.startswith(answer)


def slow(response: str, answer: str) -> bool:
    """A scorer that takes a third of a second."""
    time.sleep(0.3)
    return response == answer


def hanging(response: str, answer: str) -> bool:
    """A scorer that takes longer than anybody waits for it."""
    time.sleep(60)
    return True


def talkative(response: str, answer: str) -> bool:
    """Prints what it judges."""
    print(response, flush=True)
    return response == answer


def plain(response: str, answer: str) -> bool:
    """A scorer that says nothing but right or wrong."""
    return response == answer


def which_modules(response: str, answer: str) -> Score:
    """The answer it read: whether this process has loaded JAX."""
    return Score(False, str("jax" in sys.modules))


def which_process(response: str, answer: str) -> Score:
    """The answer it read: the process; hangs when the response says so."""
    while response == "hang":
        time.sleep(3600)
    return Score(False, str(os.getpid()))


def of_lists(texts, token_ids, answers, metadata):
    """Correct if the text is the answer, with its arguments in `extra`; some texts are faults."""
    (text,), (answer,) = texts, answers
    if text == "nan":
        return [float("nan")]
    if text == "none":
        return []
    if text == "two":
        return [True, True]
    if text == "not a list":
        return True
    if text == "array":
        return np.array([0.25])
    extra = {"extracted": text, "token_ids": token_ids[0], "metadata": metadata[0]}
    return [(0.5, text == answer, extra)]


def length_reward(response: str, answer: str) -> float:
    """A number for a score: a tenth for each character."""
    return len(response) / 10


def of_three(response, answer, metadata):
    """Not a scorer: it takes neither two nor four."""
    return True


def of_any_number(*arguments):
    """Not one either."""
    return True


async def of_a_server(response, answer):
    """Nor one: its score would have to be awaited."""
    return True


def with_default(response, answer, strict=False):
    """A scorer of two: the third has a default."""
    return not strict


def even(text, answer):
    """Right by the length of the text: some responses of a random model are."""
    return len(text) % 2 == 0


def about_the_worker(response: str, answer: str) -> Score:
    """The answer it read: the process that scores, and how many threads NumPy may have there."""
    return Score(True, f"{os.getpid()} {os.environ.get('OPENBLAS_NUM_THREADS')}")


def broken(response: str, answer: str) -> bool:
    """Raises for every response."""
    raise ZeroDivisionError("in the scorer")
