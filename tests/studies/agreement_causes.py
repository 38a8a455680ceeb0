r"""Why a scorer and a grader disagree, for `studies.agreement`. Each cause was found by looking at
the cases, and the rules here say which of them it covers, so that the counts can be computed.

`due` is where a cause lies: in the definition of the scorer or of the grader (it reads one form
only, or compares texts), in a fault of Minerva's normal form that is kept for the sake of published
numbers, in a reference, in the grader, or in the library behind `math_verify`.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

from dapo_jax.rewards.types import Score

TO_THE_LETTER = ("exact_match", "math_dapo_strict_box")


class Disagreement(NamedTuple):
    """A response on which a scorer and a grader differ; the grader says the opposite of `score`."""

    file: str
    scorer: str
    grader: str
    text: str
    answer: str
    score: Score


class Cause(NamedTuple):
    name: str
    due: str
    applies: Callable[[Disagreement], object]


# scorer_matrix.json, `boxed`: by the response.
_OTHER_TEXT = (
    r"\boxed{0.5}", r"\boxed{\frac{2}{4}}", r"\boxed{7 3/4}", r"\boxed{3.50}", r"\boxed{2^{10}}",
    r"\boxed{-\frac{1}{2}}", r"\boxed{6+9i}", r"\boxed{3 \text{ or } 4}", r"\boxed{1\times10^{3}}",
    r"\boxed{007}", r"\boxed{evelyn}", r"\boxed{\text{(A)}}",
)  # fmt: skip
# math_train_equivalent_pairs.json: by the reference.
_DAMAGED = ("", "2400^2", "6,8{,}10", r"2007+\frac{\}{p}i2")


def _ends_with_a_stop(d: Disagreement) -> bool:
    stop = _pair(d) and d.text.endswith(".}" if d.text.startswith(r"\boxed") else ".")
    # Of a matrix math-verify can make nothing either way.
    return (
        stop and d.scorer != "gsm8k" and not (d.scorer == "math_verify" and "pmatrix" in d.answer)
    )


def _pair(d: Disagreement) -> bool:
    return "pairs" in d.file


def _real(d: Disagreement) -> bool:
    return "real_outputs" in d.file


def _found(pattern: str) -> Callable[[Disagreement], object]:
    """Whether it stands in the answer as it was given or in the reference; of a real output only in
    the reference, for its text is more than an answer."""
    return lambda d: re.search(pattern, d.answer if _real(d) else f"{d.text} {d.answer}")


# The first that applies is the cause.
CAUSES = (
    Cause("no `Answer:` line", "scorer's definition",
          lambda d: d.scorer in ("exact_match", "math_dapo") and d.score.extracted is None),
    Cause("no `####`", "scorer's definition",
          lambda d: d.scorer == "gsm8k" and "####" not in d.text),
    Cause("the grader reads `Answer:` only", "grader's definition",
          lambda d: d.grader == "verl_math_dapo"),
    Cause("box before the last 100 characters", "definition of the strict box",
          lambda d: _real(d) and "boxed" in d.text and r"\boxed" not in d.text[-100:]),
    Cause("Qwen's grader holds 10000 and 10{,}000 for two", "grader",
          lambda d: d.grader == "qwen_score" and d.score.correct),
    Cause("the library, run here on the same texts, holds it for right", "grader",
          lambda d: "matrix" in d.file and d.scorer == "math_verify"),
    Cause("the test sets an option of the library", "grader's definition",
          lambda d: "math_verify_cases" in d.file),
    Cause("answer in square brackets", "scorer's definition", lambda d: "areal" in d.file),
    Cause("spelled otherwise", "scorer's definition",
          lambda d: _pair(d) and d.scorer in TO_THE_LETTER),
    Cause("same answer, other text", "scorer's definition",
          lambda d: "matrix" in d.file and d.text in _OTHER_TEXT),
    Cause("the brace does not close", "scorer's definition",
          lambda d: "matrix" in d.file and d.score.extracted is None),
    Cause("the grader does not parse a pair", "grader",
          lambda d: "matrix" in d.file and d.text == r"\boxed{(1,2)}"),
    Cause("the reference is a whole text", "reference",
          lambda d: "matrix" in d.file and "So the answer" in d.answer),
    Cause("full stop inside the answer", "Minerva; library", _ends_with_a_stop),
    Cause("reference damaged by its normal form", "reference",
          lambda d: _pair(d) and (d.answer in _DAMAGED or "pmatrix" in d.answer)),
    Cause("text that lost its `\\text` in the reference", "reference",
          lambda d: _pair(d) and re.search(r"^\{|\{or\}", d.answer)),
    Cause("list that reads as one number", "reference",
          lambda d: _pair(d) and d.scorer in ("gsm8k", "math_verify")
          and re.search(r"\d(\^\\circ)?, \d", d.text)),
    Cause("percentage with decimals", "library",
          lambda d: _pair(d) and d.scorer == "math_verify" and r"\%" in d.text),
    Cause("percent sign on one side", "Minerva", _found(r"\\%")),
    Cause("`\\left`, `\\dfrac`, `\\tfrac` or `\\!` on one side", "Minerva",
          _found(r"\\left|\\[dt]frac|(?<!,)\\!")),
    Cause("thousands separator on one side", "definition", _found(r"\d(,\\!|\{,\}|,)\d{3}")),
    Cause("degree or dollar sign on one side", "definition", _found(r"\\circ|\\\$")),
    Cause("unit that Minerva's list lacks", "Minerva", _found(r"\\(text|mbox)\{")),
    Cause("decimal without its zero", "definition", _found(r" \.\d|\{\.\d")),
    Cause("not a plain number", "scorer's definition", lambda d: d.scorer == "gsm8k"),
    Cause("a variable `a` taken for an article", "Minerva", _found(r"an? ")),
    Cause("`\\frac1{72}` made `\\frac{1}{{}72}`", "Minerva", _found(r"\\frac\d\{")),
    Cause("fraction written with a slash", "definition", _found(r"\d/\d")),
    Cause("spaces", "definition",
          lambda d: (d.score.extracted or "").replace(" ", "") == d.answer
          or f"{{{d.answer}}}" in d.text.replace(" ", "")),
)  # fmt: skip


def cause(d: Disagreement) -> Cause:
    """Why they disagree.

    Raises:
        ValueError: no cause is known: look at the case, and say so here.
    """
    found = next((cause for cause in CAUSES if cause.applies(d)), None)
    if found is None:
        raise ValueError(f"nobody has explained this disagreement yet: {d}")
    return found
