"""A tokenizer is that of its tokenizer.json, whatever model is in its directory."""

import json

import pytest

from dapo_jax.data.tokenizer import arithmetic_tokenizer, load_tokenizer, save_tokenizer
from dapo_jax.types import UserError
from tests.support.helpers import tiny_config

PROMPT = "Add: a=8 b=9 c=6\n"


@pytest.mark.parametrize("family", [None, "qwen2", "qwen3", "llama", "mistral"])
def test_a_prompt_has_the_same_tokens_in_the_directory_of_every_family(tmp_path, family):
    """transformers gives a qwen2 directory Qwen's tokenizer, whatever the files of it say."""
    ours = arithmetic_tokenizer()
    ours.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    ours.save_pretrained(str(tmp_path))
    if family:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    found = load_tokenizer(tiny_config(model__tokenizer=str(tmp_path), pretrain=None).model)
    tokens = ours(PROMPT).input_ids
    assert found(PROMPT).input_ids == tokens and len(tokens) == 8
    assert found.decode(tokens) == PROMPT
    assert (found.eos_token_id, found.pad_token_id) == (ours.eos_token_id, ours.pad_token_id)
    assert found.chat_template == ours.chat_template


def test_what_is_saved_is_read_by_transformers_4_too(tmp_path):
    """4.57.1 refuses the class TokenizersBackend, and a list as extra_special_tokens."""
    ours = arithmetic_tokenizer()
    ours.add_special_tokens({"extra_special_tokens": ["<a>", "<b>"]})
    save_tokenizer(ours, tmp_path)
    values = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert values["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert values["additional_special_tokens"] == ["<a>", "<b>"]
    assert "extra_special_tokens" not in values
    found = load_tokenizer(tiny_config(model__tokenizer=str(tmp_path), pretrain=None).model)
    assert found.all_special_tokens == ours.all_special_tokens
    assert found("<b>" + PROMPT).input_ids == ours("<b>" + PROMPT).input_ids


def test_a_damaged_file_is_reported(tmp_path):
    arithmetic_tokenizer().save_pretrained(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text('{"version": ')
    config = tiny_config(model__tokenizer=str(tmp_path), pretrain=None).model
    with pytest.raises(UserError, match=r"the tokenizer of config.model.tokenizer .* not be lo"):
        load_tokenizer(config)


def test_a_tokenizer_that_the_model_cannot_follow_is_refused(tmp_path):
    arithmetic_tokenizer().save_pretrained(str(tmp_path))
    place = {"model__tokenizer": str(tmp_path), "pretrain": None}
    model = lambda size: tiny_config(**place, model__vocab_size=size).model
    assert len(load_tokenizer(model(29))) == 29
    with pytest.raises(UserError, match=r"vocab_size \(28\) is smaller .* \(29\)\. Set it to 29"):
        load_tokenizer(model(28))
    file = tmp_path / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    del settings["eos_token"]
    file.write_text(json.dumps(settings))
    with pytest.raises(UserError, match="has no end-of-sequence token"):
        load_tokenizer(model(32))
