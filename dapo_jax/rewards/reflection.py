"""Phrases with which a response checks itself or goes back: reflection, as the DAPO paper calls it.

Section 4.3 of the paper (arXiv:2503.14476) shows such a response without a count; the list is ours.
It finds words, not thought: a phrase may be empty, and a check may have none of these phrases.
"""

import re

ENGLISH = (
    r"(?:re|double|cross)-?check(?:s|ed|ing)?",
    r"check(?:ing)? (?:again|(?:my|our|the|this|that|your) (?:answer|work|result|calculation)s?)",
    r"verify(?:ing)? (?:again|(?:my|our|the|this|that) (?:answer|work|result|calculation)s?)",
    r"let(?:'s|’s| us| me) (?:check|verify|think again|try again|go back|start over)",
    r"re-?(?:think|consider|examin|evaluat|assess)(?:e|s|es|ed|ing)?",
    r"on second thought",
    r"(?:wait|hold on|hmm)(?:[,.!…]| a (?:moment|minute|second))",
    r"(?:i|we)(?: have|'ve|’ve)? made (?:a|an) (?:mistake|error)",
    r"(?:that|this)(?: is|'s|’s) (?:not right|wrong|incorrect)",
)
CHINESE = (
    "等等",
    "等一下",
    "再检查",
    "检查一下",
    "重新检查",
    "重新考虑",
    "重新思考",
    "重新计算",
    "再想想",
    "验证一下",
    "再算一",
    "回过头",
    "算错了",
    "反思",
)
PATTERN = re.compile(rf"\b(?:{'|'.join(ENGLISH)})(?!\w)|{'|'.join(CHINESE)}", re.IGNORECASE)


def find_reflection(text: str) -> re.Match[str] | None:
    """Returns the first phrase of the list in a response."""
    return PATTERN.search(text)
