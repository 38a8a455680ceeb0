import pytest

from dapo_jax.rewards.reflection import find_reflection

REFLECTS = {
    # DAPO, table 2.
    "However, wait a moment, let's rethink about the dihedral angles": "wait a moment",
    # DeepSeek-R1, table 3 of the preprint.
    "Wait, wait. Wait. That's an aha moment I can flag here.": "Wait,",
    "Let's reevaluate this step-by-step": "reevaluate",
    "That gives 12. Let me double-check: 5 + 7 = 12.": "double-check",
    "Re-examining the second case, x = 3.": "Re-examining",
    "Let’s check this answer.": "Let’s check",
    "Hmm, I made a mistake in line 2.": "Hmm,",
    "We check our answer by substituting it.": "check our answer",
    "On second thought, there are four.": "On second thought",
    "这里不对,让我重新检查一下": "重新检查",
    "等等,再想想": "等等",
}
DOES_NOT = [
    "",
    "The waiter waits for 12 minutes at table 4.",
    "The answer is 12. Anna checked out 3 books.",
    "They go back to the shop and buy 3 more.",
    "A recheckered cloth",
    "There are 5 checkers, and she considers 3 of them.",
    "答案是 12",
]


@pytest.mark.parametrize("text", REFLECTS)
def test_the_first_phrase_is_found(text):
    found = find_reflection(text)
    assert found is not None and found[0] == REFLECTS[text]


@pytest.mark.parametrize("text", DOES_NOT)
def test_other_words_are_none(text):
    assert find_reflection(text) is None
