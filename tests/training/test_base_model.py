"""A base model that was made before is taken where nothing that it depends on differs."""

import os
from pathlib import Path

import jax
import numpy as np
import pytest

from dapo_jax.data import arithmetic
from dapo_jax.data.tokenizer import arithmetic_tokenizer
from dapo_jax.distributed import ProcessGroup
from dapo_jax.runs.checkpoint import Checkpoints
from dapo_jax.training import base_model, pretrain
from dapo_jax.training.base_model import fingerprint
from dapo_jax.types import UserError
from tests.support import checkpoints
from tests.support.helpers import make_mesh, make_params, segments_of, tiny_config
from tests.test_layers import ours

# Packages and modules that the fit imports, and that do not change what it computes.
OTHERS = {"algorithms", "config", "rewards", "types"}
OTHERS |= {"models.int8", "models.lora", "utils.fields", "utils.hf_hub"}


def test_every_module_that_computes_a_base_model_is_in_its_fingerprint():
    found, left = set(), ["training.pretrain"]
    while left:
        name = left.pop()
        if name not in found and not {name, name.partition(".")[0]} & OTHERS:
            found.add(name)
            left.extend(ours(name))
    hashed = {module.__name__.removeprefix("dapo_jax.") for module in base_model.CODE}
    assert hashed == found | {"data.tokenizer"}


def test_the_text_of_a_base_has_no_held_out_prompt():
    """Of problems at random one in five is held out."""
    tokenizer = arithmetic_tokenizer()
    rows = next(pretrain.text_rows(tiny_config(), tokenizer))
    prompts = [
        tokenizer.decode(rows.tokens_BT[row, at & ~rows.mask_BT[row]].tolist())
        for row, at in segments_of(rows)
    ]
    assert len(prompts) > 20 and all(text.startswith("Add:") for text in prompts)
    assert not any(map(arithmetic.is_heldout, prompts))


def test_other_versions_make_another_base_model(monkeypatch):
    before = fingerprint(tiny_config())
    monkeypatch.setattr("importlib.metadata.version", lambda name: f"{name} of tomorrow")
    assert fingerprint(tiny_config()) != before


@pytest.mark.parametrize(
    "change, same",
    [
        ({"train__num_steps": 9}, True),
        ({"seed": 1}, False),
        ({"train__row_tokens": 96}, True),
        ({"rollout__max_response_tokens": 200, "train__row_tokens": 256}, False),
        ({"data__train__sums__levels": (3,)}, False),
        ({"pretrain__num_steps": 99}, False),
    ],
)
def test_what_a_base_model_depends_on(change, same):
    assert (fingerprint(tiny_config(**change)) == fingerprint(tiny_config())) == same


@pytest.mark.parametrize(
    "axes, message",
    [
        (dict(data=3), r"config.pretrain.rows_per_step \(8\) .* config.mesh.fsdp = 3; nearest: 9"),
        (dict(data=1, context=3), r"config.mesh.context \(3\) must divide half of the 128 tokens"),
    ],
)
def test_rows_that_do_not_split_over_the_mesh_are_refused(axes, message):
    config = tiny_config(**{f"mesh__{axis}": size for axis, size in axes.items()})
    with pytest.raises(UserError, match=message):
        pretrain.make_base(config, make_mesh(config, 3), arithmetic_tokenizer(), print)


def test_the_primary_says_whether_there_is_a_base_to_reuse(tmp_path, monkeypatch):
    """And not a host whose file system does not show it yet: it would make one by itself."""
    config = tiny_config()
    mesh, params, place = make_mesh(config, 1), make_params(config), tmp_path / "base"
    with Checkpoints(place, keep_newest=1, keep_best=0) as checkpoints:
        checkpoints.save(0, params, {"seconds": 9.0}, accuracy=None)
        checkpoints.wait()
    second = ProcessGroup(index=1, count=2)
    monkeypatch.setattr(second, "all_gather", lambda mine: [(False, True), mine])
    monkeypatch.setattr(Path, "is_dir", lambda path: path != place and os.path.isdir(path))
    found, seconds = base_model.load_or_make(
        config, mesh, None, place, say=print, check_stop=lambda: None, process_group=second
    )
    assert seconds == 9.0
    jax.tree.map(np.testing.assert_array_equal, found, params)


def test_a_copy_that_fails_halfway_leaves_nothing(tmp_path, monkeypatch):
    (tmp_path / "made").mkdir()

    def full(source, target):
        target.mkdir()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(base_model.shutil, "copytree", full)
    with pytest.raises(OSError, match="No space"):
        base_model._copy(tmp_path / "made", tmp_path / "cache" / "kept")
    assert list((tmp_path / "cache").iterdir()) == []


def test_texts_that_are_longer_than_the_models_positions_are_warned_of(tmp_path):
    """verl and vLLM refuse them. A scaling that a user adds makes the model's own longer."""
    golden = checkpoints.golden("qwen2-untied")
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 48}

    def said(most, stages=(), **changes):
        rope = golden.config["rope_parameters"]
        values = golden.config | {"rope_parameters": rope | changes}
        values |= {"max_position_embeddings": most}
        checkpoints.write(tmp_path, values, golden.weights)
        config = checkpoints.config_of(tmp_path, data__max_prompt_tokens=32, stages=stages)
        assert config.rollout.max_response_tokens == 32
        lines = []
        mesh = make_mesh(config, 1)
        base_model.load_or_make(config, mesh, None, None, say=lines.append, check_stop=lambda: None)
        return [line for line in lines if "warning" in line]

    (line,) = said(63)
    assert "may have 64 tokens" in line and "made for 63 (max_position_embeddings)" in line
    assert said(64) == said(None) == said(48, **scaling) == []
    longer = (2, {"rollout.max_response_tokens": 40, "train.row_tokens": 72})
    (line,) = said(64, stages=(longer, (3, {"rollout.max_response_tokens": 32})))
    assert "may have 72 tokens" in line, "of the longest stage"
