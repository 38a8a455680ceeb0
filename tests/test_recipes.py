"""docs/recipes.md is what the configs say."""

import re

import pytest

from dapo_jax.config.cli import load_config
from tests.conftest import ROOT
from tests.support.runs import load_script


def test_the_document_is_current():
    text = load_script("docs", "recipes").recipes()
    assert (ROOT / "docs" / "recipes.md").read_text() == text, "python docs/recipes.py"


def test_every_method_is_there_with_what_it_changes():
    """A few recipes by hand."""
    text = (ROOT / "docs" / "recipes.md").read_text()
    methods = re.findall(r"^def ([a-z]\w*)\(c: ", (ROOT / "configs" / "tiny.py").read_text(), re.M)
    assert len(methods) >= 20 and all(f"\n- `{name}` (arXiv " in text for name in methods)
    entry = lambda name: " ".join(text.partition(f"- `{name}`")[2].partition("\n- ")[0].split())
    assert entry("cispo") == (
        "(arXiv 2506.13585): `objective.loss` cispo, `objective.clip_low` 1.0, "
        "`objective.clip_dual` none, `objective.aggregation` token-mean-per-group"
    )
    assert entry("token_loss") == ": `dynamic_sampling.enabled` False"
    assert "`rollout.max_response_tokens` 512," in entry("qwen0_5b_gsm8k")
    assert "`model.head_dtype` float32, `rollout.end_repetition` 3000," in entry("minimax_m1")


@pytest.mark.parametrize(
    ("recipe", "step", "tokens", "group_size", "prompts", "updates"),
    [
        ("deepscaler", 1040, 8192, 8, 128, 2),
        ("deepscaler", 1041, 16_384, 16, 128, 2),
        ("deepscaler", 1521, 24_576, 16, 128, 2),
        ("skywork_or1", 660, 16_384, 16, 256, 1),
        ("skywork_or1", 661, 32_768, 32, 160, 1),
        ("r1_zero", 512, 32_768, 16, 512, 16),
        ("r1_zero", 513, 65_536, 16, 512, 16),
    ],
)
def test_the_stages_of_recipes_are_the_published_ones(
    recipe, step, tokens, group_size, prompts, updates
):
    c = load_config(f"configs/recipes.py:{recipe}", {}).at(step)
    assert (c.rollout.max_response_tokens, c.rollout.group_size) == (tokens, group_size)
    assert c.train.prompts_per_step == prompts == updates * c.train.prompts_per_update
    refills = c.dynamic_sampling.enabled and c.dynamic_sampling.max_prompts > prompts
    assert not refills
