"""Rule-based rewards: what a response is worth, from its text and its length in tokens.

A scorer says whether a response is correct; correctness alone decides the filter of dynamic
sampling. The reward that the advantage sees adds the soft overlong punishment, which knows lengths
and not correctness. Nothing here imports JAX: scorers run in worker processes.
"""

import importlib
import importlib.util
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import ArrayLike

from dapo_jax.types import UserError


class Score(NamedTuple):
    """A scorer's verdict: is it correct, which answer did it read (None: it found none), and for
    process supervision, the steps of the response."""

    correct: bool
    extracted: str | None
    # (characters of the text up to the end of the step, its reward), in order.
    steps: tuple[tuple[int, float], ...] = ()


# (text of the response, reference answer) -> Score. A plain bool is accepted too; then the answers
# cannot be put to a vote and cons@k is not reported.
Scorer = Callable[[str, str], Score | bool]


def soft_overlong_punishment(
    lengths_G: ArrayLike, *, max_response_tokens: int, buffer_tokens: int, penalty: float
) -> np.ndarray:
    """The length reward of each response, float64 [G], from 0 down to -penalty.

        R(y) = 0                                  where |y| <= L_max - L_cache
               ((L_max - L_cache) - |y|) / L_cache   in between
               -1                                 where L_max < |y|

    Source: DAPO, arXiv:2503.14476, eq. 13, scaled by `penalty`.

    Args:
        lengths_G: response lengths in tokens, end-of-sequence token included.
        max_response_tokens: L_max.
        buffer_tokens: L_cache; 0 means no punishment.
        penalty: factor on the whole, 1 in the paper.
    """
    lengths_G = np.asarray(lengths_G, np.float64)
    if buffer_tokens == 0:
        return np.zeros_like(lengths_G)
    over_G = lengths_G - (max_response_tokens - buffer_tokens)
    return -penalty * np.clip(over_G / buffer_tokens, 0.0, 1.0)


def exact_match(response: str, answer: str) -> Score:
    """Correct if what follows the last `Answer:` on its line is the reference, spaces apart."""
    _, found, after = response.rpartition("Answer:")
    extracted = after.partition("\n")[0].strip() if found else ""
    return Score(bool(extracted) and extracted == answer.strip(), extracted or None)


MATH_DAPO_LAST_CHARACTERS = 300


def math_dapo(response: str, answer: str) -> Score:
    r"""The scorer of the published DAPO runs, faults included, for comparable numbers.

    Reads the last match of `(?i)Answer\s*:\s*([^\n]+)` in the last 300 characters, normalises it
    and the reference as Minerva did (Lewkowycz et al. 2022, arXiv:2206.14858, appendix D.1) and
    compares the strings. `42.`, `42.0` and `**Answer:** 42` are therefore wrong when 42 is right.
    """
    found = re.findall(r"(?i)Answer\s*:\s*([^\n]+)", response[-MATH_DAPO_LAST_CHARACTERS:])
    if not found:
        return Score(False, None)
    extracted = normalise_minerva(found[-1])
    return Score(extracted == normalise_minerva(answer), extracted)


# Minerva's tables, in the order in which they are applied.
_REPLACED = (
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"),
    (",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
)  # fmt: skip
_REMOVED = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots",
    "sue", "points", "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds",
    "meters", "meals", "edges", "students", "childrentickets", "multiples", "\\text{s}",
    "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}",
    "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots",
)  # fmt: skip
_REWRITTEN = (
    (r"(.*?)(\$)(.*?)(\$)(.*)", r"$\3$"),  # of mixed text, the formula
    (r"\\text\{(.*?)\}", r"\1"),
    (r"\\textbf\{(.*?)\}", r"\1"),
    (r"\\overline\{(.*?)\}", r"\1"),
    (r"\\boxed\{(.*)\}", r"\1"),
    (r"frac([^{])(.)", r"frac{\1}{\2}"),  # \frac12
    (r"sqrt([^{])", r"sqrt{\1}"),
)


def normalise_minerva(answer: str) -> str:
    """An answer in the canonical form of the Minerva evaluation: see `math_dapo`."""
    answer = answer.split("=")[-1]
    for old, new in _REPLACED:
        answer = answer.replace(old, new)
    for old in _REMOVED:
        answer = answer.replace(old, "")
    for pattern, replacement in _REWRITTEN:
        answer = re.sub(pattern, replacement, answer)
    answer = answer.replace("$", "")
    if answer.replace(",", "").isdigit():
        answer = answer.replace(",", "")
    return answer.strip()


SCORERS: dict[str, Scorer] = {"exact_match": exact_match, "math_dapo": math_dapo}


def load_scorer(name: str) -> Scorer:
    """The scorer of a name in SCORERS, of `module:function` or of `path/to/file.py:function`.

    Raises:
        UserError: there is no such scorer.
    """
    if name in SCORERS:
        return SCORERS[name]
    place, colon, function = name.rpartition(":")
    if not colon or not place or not function:
        raise UserError(
            f"config.reward.scorer: {name!r} is not one of {', '.join(SCORERS)}, nor "
            "module:function, nor path/to/file.py:function."
        )
    scorer = getattr(_import(place, name), function, None)
    if not callable(scorer):
        raise UserError(f"config.reward.scorer: {place} has no function {function!r}.")
    return cast(Scorer, scorer)


def _import(place: str, name: str) -> types.ModuleType:
    if not place.endswith(".py"):
        try:
            return importlib.import_module(place)
        except ImportError as error:
            raise UserError(
                f"config.reward.scorer: {name!r} cannot be imported: {error}. Put the module on "
                "PYTHONPATH, or name its file: path/to/file.py:function."
            ) from error
    path = Path(place).expanduser().resolve()
    spec = importlib.util.spec_from_file_location(f"scorer_{path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise UserError(f"config.reward.scorer: there is no file {path}.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
