"""docs/techniques.md: what its script draws and computes, and that the page quotes it."""

import math
import struct

import pytest

from tests.conftest import ROOT
from tests.support.runs import load_script

NAMES = ("clip_higher", "token_level_loss", "overlong", "dynamic_sampling")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """(directory of the plots, numbers returned, lines printed)."""
    plots = load_script("docs", "technique_plots")
    output = tmp_path_factory.mktemp("techniques") / "made"
    with pytest.MonkeyPatch.context() as patch:
        lines = []
        patch.setattr(plots, "print", lines.append, raising=False)
        values = plots.main(["--output", str(output)])
    return output, values, lines


def test_one_readable_png_per_technique(drawn):
    output = drawn[0]
    assert sorted(path.name for path in output.iterdir()) == sorted(f"{n}.png" for n in NAMES)
    for path in output.iterdir():
        png = path.read_bytes()
        width, height = struct.unpack(">II", png[16:24])
        assert png[:4] == b"\x89PNG" and (width, height) == (1000, 400)
        assert 8_000 < len(png) < 60_000


def test_the_page_quotes_what_is_printed_and_shows_every_plot(drawn):
    _, values, lines = drawn
    page = (ROOT / "docs" / "techniques.md").read_text()
    quoted = [line.strip() for line in lines if line not in NAMES]
    assert len(quoted) == sum(map(len, values.values())) > 40
    page_lines = {line.strip() for line in page.splitlines()}
    assert [line for line in quoted if line not in page_lines] == []
    for name in NAMES:
        assert f"](techniques/{name}.png)" in page
        assert (ROOT / "docs" / "techniques" / f"{name}.png").exists()


def test_clip_bounds_are_relative(drawn):
    values = drawn[1]["clip_higher"]
    for clip_high, bound in ((0.2, 0.012), (0.28, 0.0128)):
        name = f"clip_high {clip_high:.2f}"
        largest = f"{name}: largest probability with a gradient, from"
        assert values[f"{largest} 0.01"] == pytest.approx(bound, rel=1e-5)
        assert values[f"{largest} 0.90"] == 1.0
        free = values[f"{name}: never clipped from an old probability of"]
        assert 0 <= free - 1 / (1 + clip_high) < 1e-3  # the grid's step
        for old in (0.001, 0.01):
            steps = math.ceil(math.log(0.5 / old) / math.log(1 + clip_high))
            assert values[f"{name}: rollout steps from {old:.3f} to 1/2"] == steps


def test_weights_of_tokens(drawn):
    v = drawn[1]["token_level_loss"]
    R, N = v["responses"], v["trained tokens"]
    short, long = v["tokens of the shortest response"], v["tokens of the longest response"]
    assert (R, long) == (64, 20_480)
    assert v["token-mean: weight of a token, any response"] == pytest.approx(1 / N)
    assert v["token-sum: weight of a token, any response"] == 1
    assert v["seq-mean-token-sum: weight of a token, any response"] == 1 / R
    assert v["seq-mean-token-sum-norm: weight of a token, any response"] == 1 / (R * 20_480)
    for whose, n in (("shortest", short), ("longest", long)):
        weight = v[f"seq-mean-token-mean: weight of a token, {whose}"]
        assert weight == pytest.approx(1 / (R * n))
    assert v["seq-mean-token-mean: share of the longest response"] == pytest.approx(100 / R)
    for name in ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm"):
        assert v[f"{name}: share of the longest response"] == pytest.approx(100 * long / N)
    # Four prompts have a quarter each.
    assert v["token-mean-per-group: share of the longest response"] < 25
    per_token = v["token-mean-per-group: weight of a token, longest"]
    assert v["token-mean-per-group: share of the longest response"] == pytest.approx(
        100 * long * per_token
    )


def test_rewards_and_advantages_of_long_responses(drawn):
    v = drawn[1]["overlong"]
    assert v["reward of a right answer of 18,432 tokens"] == 0.5
    assert v["reward of a wrong answer of 20,480 tokens"] == -2.0

    def advantage(own, others):
        rewards = [own, *others]
        mean = sum(rewards) / 16
        return (own - mean) / math.sqrt(sum((r - mean) ** 2 for r in rewards) / 15)

    for outcome, base in (("right", 1.0), ("wrong", -1.0)):
        for num_right in (4, 12):
            rest = num_right - (outcome == "right")
            others = [1.0] * rest + [-1.0] * (15 - rest)
            for where, own in (("short", base), ("at the limit", base - 1)):
                what = f"advantage, {outcome}, {num_right} of 16 right: {where}"
                assert v[what] == pytest.approx(advantage(own, others), abs=1e-5), what
    # Below the mean of the 15 others, (11 - 4) / 15, the advantage is negative.
    turn = 16_384 + math.ceil(4_096 * (1 - 7 / 15))
    assert v["advantage, right, 12 of 16 right: below 0 from tokens"] == turn


def test_shares_of_groups_without_gradient(drawn):
    v = drawn[1]["dynamic_sampling"]
    for G in (4, 8, 16, 32):
        # A group of G is silent at pass rate p if G draws agree.
        silent = v[f"G = {G}: groups without gradient, pass rate 0.9"]
        assert silent == pytest.approx(100 * (0.9**G + 0.1**G))
        for m in (0.5, 0.9):
            # E p^G = prod (m + i) / (1 + i) where p is Beta(m, 1 - m).
            right = math.prod((m + i) / (1 + i) for i in range(G))
            wrong = math.prod((1 - m + i) / (1 + i) for i in range(G))
            teach = v[f"G = {G}: prompts that teach, mean pass rate {m}"]
            assert teach == pytest.approx(100 * (1 - right - wrong))
    # Four standard deviations of a share of 2,000 groups.
    assert 0 < v["largest distance of a dot from its curve"] < 100 * 4 * 0.5 / math.sqrt(2_000)
