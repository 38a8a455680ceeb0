"""A wrong field of a supervised config is an error with its name and value."""

import pytest

from dapo_jax.config.cli import load_config
from dapo_jax.config.sft import SftConfig
from dapo_jax.types import UserError
from tests.support.helpers import tiny_dict, with_fields

WRITTEN = {"path": "word_problems", "split": "train", "num_examples": 4, "levels": (1,)}


def changed(field, value):
    """A right config as nested dicts, with one field replaced."""
    values = {
        "model": tiny_dict()["model"] | {"tokenizer": "here"},
        "data": {"train": {"a": {"path": "a.jsonl"}, "b": dict(WRITTEN)}},
        "train": {"num_epochs": 2},
    }
    return with_fields(values, {field: value})


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("train.steps", 3, "is not a field. config.train has: num_steps, num_epochs"),
        ("rollout", {}, "is not a field"),
        ("train.num_steps", 3, r"num_steps and config.train.num_epochs both .*got 3 and 2"),
        ("train.num_epochs", None, r"give one and set the other to None .got None and None"),
        ("model.tokenizer", None, "is needed when config.model.path is None"),
        ("model.param_dtype", "bfloat16", "is for evaluation"),
        ("mesh.data", -1, "at most one axis may be -1"),
        ("data.train", {}, "names no source"),
        ("seed", 2**32, r"must be below 2\*\*32; got 4294967296"),
        ("data.heldout_share", 1.0, r"must be in \[0, 1\); got 1.0"),
        ("data.unusable_examples", "skip", "must be one of 'error', 'drop'; got 'skip'"),
        ("data.train.a.path", "arithmetic", "no other generator writes responses; got 'arithm"),
        ("data.train.a.levels", (1,), "levels is not read when .*path is 'a.jsonl'"),
        ("data.train.a.answer_key", "x", "answer_key is not a field"),
        ("data.train.b.levels", (3,), "must be a non-empty tuple of 1, 2"),
        ("data.train.b.split", None, "must be 'train' or 'heldout'; got None"),
        ("data.train.b.num_examples", None, "must be given for word_problems"),
        ("data.train.b.prompt_key", "x", "prompt_key is not read"),
        ("log.rollouts_per_step", 3, "is not read when config.train has no rollouts"),
    ],
)
def test_a_wrong_field_is_named(field, value, message):
    SftConfig.from_dict(changed("seed", 1))
    with pytest.raises(UserError, match=message) as error:
        SftConfig.from_dict(changed(field, value))
    assert field.split(".")[-1] in str(error.value)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"data.heldout": {"c": {"path": "c.jsonl"}}, "data.heldout_share": 0.1}, "heldout_share"),
        ({"data.chat": False, "data.system_prompt": "S"}, "system_prompt is not read"),
        ({"data.train.a.messages_key": "m", "data.train.a.prompt_key": "p"}, "prompt_key is not r"),
    ],
)
def test_fields_that_contradict_each_other_are_named(changes, message):
    with pytest.raises(UserError, match=message):
        SftConfig.from_dict(with_fields(changed("seed", 0), changes))


def test_the_example_is_right():
    config = load_config("configs/sft_word_problems.py", {}, kind=SftConfig)
    assert config.optimizer.learning_rate > 1e-5
    assert {source.split for source in config.data.train.values()} == {"train"}
    assert {source.split for source in config.data.heldout.values()} == {"heldout"}
    with pytest.raises(UserError, match="config.dynamic_sampling is not a field"):
        load_config("configs/smollm2_word_problems.py", {}, kind=SftConfig)
