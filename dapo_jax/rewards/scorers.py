"""The built-in scorers: functions of a response and a reference answer that return a `Score`.

They may fail or never return: `RewardPool` runs them in processes of its own. Nothing here imports
JAX.
"""

import functools
import importlib
import importlib.util
import inspect
import re
import sys
import types
import zlib
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dapo_jax.rewards.types import Score, Scorer, Task, as_score
from dapo_jax.types import UserError

MATH_DAPO_LAST_CHARACTERS = 300
STRICT_BOX_LAST_CHARACTERS = 100
MATH_VERIFY_DECIMALS = 6  # to which the library compares floats


def exact_match(response: str, answer: str) -> Score:
    """Compares the text after the last `Answer:` on its line with the reference, stripped."""
    _, found, after = response.rpartition("Answer:")
    extracted = after.partition("\n")[0].strip() if found else ""
    return Score(bool(extracted) and extracted == answer.strip(), extracted or None)


def math_dapo(response: str, answer: str) -> Score:
    """Scores as the published DAPO runs did, faults included.

    Compares the last `Answer:` line in the last 300 characters with the reference, both normalised
    as in Minerva (arXiv:2206.14858, appendix D.1). `42.`, `42.0` and `**Answer:** 42` are therefore
    wrong when 42 is right.
    """
    found = re.findall(r"(?i)Answer\s*:\s*([^\n]+)", response[-MATH_DAPO_LAST_CHARACTERS:])
    if not found:
        return Score(False, None)
    extracted = normalise_minerva(found[-1])
    return Score(extracted == normalise_minerva(answer), extracted)


def math_dapo_strict_box(response: str, answer: str) -> Score:
    r"""Compares the content of the last `\boxed{` in the last 100 characters to the letter."""
    end = response[-STRICT_BOX_LAST_CHARACTERS:]
    _, opening, rest = end.rpartition("\\boxed{")
    extracted = _to_closing_brace(rest) if opening else None
    return Score(extracted is not None and extracted == answer, extracted)


def math_dapo_boxed(response: str, answer: str) -> Score:
    """Scores by `math_dapo`, and without an `Answer:` by `math_dapo_strict_box`, as verl does since
    version 0.9.1."""
    score = math_dapo(response, answer)
    if score.extracted is not None:
        return score
    boxed = math_dapo_strict_box(response[-MATH_DAPO_LAST_CHARACTERS:], answer)
    return boxed if boxed.extracted is not None else score


def boxed(response: str, answer: str) -> Score:
    r"""Compares the content of the last `\boxed{}` with the reference, both in Minerva's form."""
    extracted = last_boxed(response)
    if extracted is None:
        return Score(False, None)
    extracted = normalise_minerva(extracted)
    return Score(extracted == normalise_minerva(answer), extracted)


def gsm8k(response: str, answer: str) -> Score:
    """Compares the last number right after a `####` with the reference's, GSM8K's own format.

    The reference is a number or a solution that ends with `#### number`. Numbers are compared as
    texts without commas and dollar signs: `9.0` is not `9`; of `#### 9/2` the 9 is read.
    """
    extracted = _gsm8k_number(response)
    is_number = re.fullmatch(_GSM8K_NUMBER, answer.strip())
    reference = _gsm8k_number(f"#### {answer}" if is_number else answer)
    return Score(extracted is not None and extracted == reference, extracted)


def last_number(response: str, answer: str) -> Score:
    """Compares the last number of the response with the reference, as numbers: `9.0` is `9`.

    Commas before groups of three digits, a full stop after the last digit and a minus between
    digits are no part of a number. For models that follow no format: any text with a number has an
    answer. It is reported in one spelling, so that equal answers vote together.
    """
    found = re.findall(_NUMBER, response.replace(_UNICODE_MINUS, "-"))
    if not found:
        return Score(False, None)
    extracted = _spelling(found[-1])
    try:
        reference = _spelling(answer.replace(_UNICODE_MINUS, "-"))
    except InvalidOperation:
        raise ValueError(f"last_number needs a number as the answer, not {answer!r:.60}") from None
    return Score(extracted == reference, extracted)


def _spelling(number: str) -> str:
    """Returns the one spelling of a number: 1,234.50 is 1234.5 and .5 is 0.5."""
    # Exact: as floats, long numbers that differ are equal.
    value = Decimal(number.replace(",", ""))
    text = f"{value or Decimal(0):f}"  # -0 is 0
    return text.rstrip("0").rstrip(".") if "." in text else text


def answer_format(response: str, answer: str) -> Score:
    r"""Returns whether the last line has an `Answer: ...` or a `\boxed{}`, right or wrong."""
    last_line = response.rstrip().rpartition("\n")[2]
    given = re.search(r"(?i)answer\s*:\s*\S", last_line) or last_boxed(last_line)
    return Score(bool(given), None)


def math_verify(response: str, answer: str) -> Score:
    r"""Compares expressions by the math-verify library: 1/2 is 0.5, a set is a set in any order.

    A reference without delimiters ($, \boxed, \(, \[) is read as LaTeX and, where it looks like a
    number, also as a number: "1,22" is a pair and a decimal, and "4.5e33", in which the library
    reads Euler's number, is 4.5 \times 10^{33}.
    """
    parse, verify, number, latex = _math_verify_library()
    if re.search(r"(?<!\\)\$|\\boxed|\\\(|\\\[", answer):
        golds = [parse(answer, [latex, number])]
    else:
        golds = [parse(f"\\boxed{{{answer}}}", [latex]) or parse(answer, [latex, number])]
        if re.fullmatch(r"[-+]?[\d\s.,]+", answer.strip()):
            golds.append(parse(answer, [number]))
    decimals = MATH_VERIFY_DECIMALS
    if plain := re.fullmatch(r"([-+]?(?:\d+\.?\d*|\.\d+))(?:[eE]([-+]?\d{1,3}))?", answer.strip()):
        if plain[2]:
            power = f"\\boxed{{{plain[1]} \\times 10^{{{int(plain[2])}}}}}"
            golds.append(parse(power, [latex]))
        # Three digits of the reference at least: 0.0 is not 1e-9.
        decimals = max(decimals, min(2 - Decimal(plain[0]).adjusted(), 1000))
    verify = functools.partial(verify, float_rounding=decimals, numeric_precision=max(15, decimals))
    # The library knows no space after the command, which LaTeX allows.
    found = parse(re.sub(r"\\boxed\s+\{", r"\\boxed{", response), [number, latex])
    extracted = str(found[-1]) if found else None  # the text of the expression
    return Score(any(gold and verify(gold, found) for gold in golds) if found else False, extracted)


@functools.cache
def _math_verify_library() -> tuple[Callable[..., Any], Callable[..., Any], Any, Any]:
    # Imported late: it takes seconds, and most scorers do not need it. See warm_up.
    import logging

    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    # It warns of every text that it cannot parse. Time limits are the pool's.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    parse = functools.partial(parse, parsing_timeout=0)
    verify = functools.partial(verify, timeout_seconds=None)
    return parse, verify, ExprExtractionConfig(), LatexExtractionConfig()


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last `\boxed{...}`, or the text from the last `\boxed ` to a `$`;
    None if there is no box or its brace does not close."""
    boxes = list(re.finditer(r"\\boxed(?:\s*(\{)| )", text))
    if not boxes:
        return None
    rest = text[boxes[-1].end() :]
    return _to_closing_brace(rest) if boxes[-1][1] else rest.partition("$")[0]


def _to_closing_brace(text: str) -> str | None:
    """Returns the text up to the brace that closes an earlier one; None if there is none."""
    depth = 1
    for brace in re.finditer(r"[{}]", text):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[: brace.start()]
    return None


# The last form is .5, which follows no letter, digit or full stop.
_NUMBER = r"(?:(?<!\d)-)?(?:\d+(?:,\d{3}(?!\d))*(?:\.\d+)?|(?<![\w.])\.\d+)"
_UNICODE_MINUS = "\u2212"
_GSM8K_NUMBER = r"(-?)\$?(-?[0-9.,]*[0-9])"


def _gsm8k_number(text: str) -> str | None:
    found = re.findall(r"####\s*" + _GSM8K_NUMBER, text)
    return "".join(found[-1]).replace(",", "") if found else None


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
_WRAPPERS = (r"\\text\{(.*?)\}", r"\\textbf\{(.*?)\}", r"\\overline\{(.*?)\}", r"\\boxed\{(.*)\}")
_REWRITTEN = (
    (r"frac([^{])(.)", r"frac{\1}{\2}"),  # \frac12
    (r"sqrt([^{])", r"sqrt{\1}"),
)


def _formula(line: str) -> str:
    """Returns the first formula of a line in its dollar signs, else the line."""
    parts = line.split("$", 2)
    return f"${parts[1]}$" if len(parts) == 3 else line


def _unwrapped(line: str) -> str:
    """Returns a line without its wrappers, what they hold in their place.

    None closes after the line's last brace. Searched for there, each opening would cost a search
    to the end of the line.
    """
    for pattern in _WRAPPERS:
        head, brace, tail = line.rpartition("}")
        line = re.sub(pattern, r"\1", head + brace) + tail
    return line


def normalise_minerva(answer: str) -> str:
    """Returns an answer in the canonical form of the Minerva evaluation, see `math_dapo`."""
    answer = answer.split("=")[-1]
    for old, new in _REPLACED:
        answer = answer.replace(old, new)
    for old in _REMOVED:
        answer = answer.replace(old, "")
    answer = "\n".join(_unwrapped(_formula(line)) for line in answer.split("\n"))
    for pattern, replacement in _REWRITTEN:
        answer = re.sub(pattern, replacement, answer)
    answer = answer.replace("$", "")
    if answer.replace(",", "").isdigit():
        answer = answer.replace(",", "")
    return answer.strip()


def equivalent_by_math_verify(ours: str, theirs: str) -> bool:
    """Returns whether two answers that math-verify read are equal."""
    return math_verify(f"\\boxed{{{ours}}}", theirs).correct


# By the name in `config.reward.scorer` and `launch/score.py --scorer`.
_BUILT_IN = (exact_match, math_dapo, math_dapo_boxed, math_dapo_strict_box, math_verify, boxed)
SCORERS: dict[str, Scorer] = {
    f.__name__: f for f in (*_BUILT_IN, gsm8k, last_number, answer_format)
}
# By scorer whose equal answers may differ as texts: a scorer that compares two answers, for cons@k.
EQUIVALENCES = {"math_verify": f"{__name__}:equivalent_by_math_verify"}


class LoadedScorer(NamedTuple):
    """A scorer and its calling convention."""

    function: Callable[..., Any]
    reads_all: bool  # called with (texts, token ids, answers, metadata), not with (text, answer)
    source: bytes | None = None  # of its file, where it is named by one

    def __call__(self, task: Task) -> Score:
        """Scores one response.

        Raises:
            TypeError, ValueError: the function returned no score.
        """
        if not self.reads_all:
            return as_score(self.function(task.text, task.answer))
        # Lists of one: each response has a time limit of its own.
        found = self.function([task.text], [list(task.token_ids)], [task.answer], [task.metadata])
        if not isinstance(found, (list, np.ndarray)) or len(found) != 1:
            raise TypeError("a scorer of lists returns a list with a score for each response")
        return as_score(found[0])


def load_scorer(
    name: str, field: str = "config.reward.scorer", source: bytes | None = None
) -> LoadedScorer:
    """Loads a scorer: a name in SCORERS, `module:function` or `path/to/file.py:function`.

    A function with two parameters without default is called with (text, answer) and returns a
    score, see `as_score`. One with four is called with the lists (texts, token ids, answers,
    metadata) and returns a list of scores. Metadata are the other columns of the problem's record.

    Args:
        field: where the name stands, for messages.
        source: of the scorer's file, as it was before; None: as it is now.

    Raises:
        UserError: there is no such scorer, or it takes other arguments.
    """
    if name in SCORERS:
        return LoadedScorer(SCORERS[name], False)
    place, _, function = name.rpartition(":")
    if not place or not function:
        raise UserError(
            f"{field}: {name!r} is not one of {', '.join(SCORERS)}, nor "
            "module:function, nor path/to/file.py:function."
        )
    module, source = _import(place, name, field, source)
    scorer = getattr(module, function, None)
    if not callable(scorer):
        raise UserError(f"{field}: {place} has no function {function!r}.")
    try:
        parameters = inspect.signature(scorer).parameters.values()
    except ValueError as error:  # some functions in C
        raise UserError(
            f"{field}: {name!r} does not say its arguments ({error}). Call it from a function in "
            "Python that takes (text, answer)."
        ) from error
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p.name for p in parameters if p.kind in positional and p.default is p.empty]
    if len(needed) not in (2, 4):
        raise UserError(
            f"{field}: {name!r} takes ({', '.join(needed)}); a scorer takes "
            "(text, answer) or (texts, token_ids, answers, metadata)."
        )
    if inspect.iscoroutinefunction(scorer):
        raise UserError(
            f"{field}: {name!r} is an async function; a scorer returns its score. Write one that "
            "calls asyncio.run."
        )
    return LoadedScorer(scorer, len(needed) == 4, source)


def warm_up(names: Sequence[str]) -> None:
    """Imports the libraries of scorers, which takes seconds. An alarm that interrupts the import of
    SymPy leaves it broken for the life of the process."""
    if "math_verify" in names or EQUIVALENCES["math_verify"] in names:
        math_verify("\\boxed{1}", "1")


def _import(
    place: str, name: str, field: str, source: bytes | None
) -> tuple[types.ModuleType, bytes | None]:
    """Imports a module by name, or a file here or in the project's directory; returns the file's
    source too."""
    if not place.endswith(".py"):
        try:
            if place.startswith("."):  # import_module's own error is a TypeError
                raise ImportError("it is neither a module nor a file that ends in .py")
            return importlib.import_module(place), None
        except ImportError as error:
            raise UserError(
                f"{field}: {name!r} cannot be imported: {error}. Put the module on "
                "PYTHONPATH, or name its file: path/to/file.py:function."
            ) from error
    path = Path(place).expanduser().resolve()
    path = path if path.is_file() else Path(__file__).resolve().parents[2] / place
    unique = f"scorer_{path.stem}_{zlib.crc32(bytes(path)):08x}"
    spec = importlib.util.spec_from_file_location(unique, path)
    if spec is None or (source is None and not path.is_file()):
        raise UserError(f"{field}: there is no file {Path(place).absolute()}.")
    source = path.read_bytes() if source is None else source
    module = importlib.util.module_from_spec(spec)
    sys.modules[unique] = module  # where dataclasses look for it
    try:
        exec(compile(source, path, "exec"), module.__dict__)
    except (ImportError, SyntaxError) as error:
        raise UserError(
            f"{field}: {path} cannot be imported: {error}. Modules that it imports must be "
            "installed or on PYTHONPATH; its own directory is not."
        ) from error
    return module, source
