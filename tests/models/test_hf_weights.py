"""Hugging Face checkpoints: weights read equal weights written, and a misfit is an error."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dapo_jax.config import Config, hf_config
from dapo_jax.models import hf_weights
from dapo_jax.types import UserError
from dapo_jax.utils import hf_hub
from tests.support.checkpoints import config_of, load
from tests.support.helpers import SHARED, logits_of, tiny_dict

BASE = {
    "model_type": "qwen2", "vocab_size": 37, "hidden_size": 24, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
    "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES = {
    "qwen2": {},
    "qwen2-untied": {"tie_word_embeddings": False, "num_key_value_heads": 4},
    "qwen2-window": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
    "qwen2-yarn": {
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 10, "num_key_value_heads": 1},
    "llama": {"model_type": "llama", "rope_scaling": LLAMA3, "tie_word_embeddings": False},
    "mistral": {"model_type": "mistral", "sliding_window": 6},
}


def checkpoint(place, family, *, seed=0, dtype=np.float32):
    """A random checkpoint of a family, as its own library would write it."""
    place.mkdir()
    values = BASE | FAMILIES[family]
    (place / "config.json").write_text(json.dumps(values))
    rng = np.random.default_rng(seed)
    shapes = hf_weights.expected_shapes(config_of(place).model)
    tensors = {name: (0.2 * rng.standard_normal(s)).astype(dtype) for name, s in shapes.items()}
    save_file(tensors, place / "model.safetensors")
    return tensors


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_written_is_what_was_read(tmp_path, family, monkeypatch):
    tensors = checkpoint(tmp_path / "in", family)
    config = config_of(tmp_path / "in")
    params = load(config)
    monkeypatch.setattr(hf_weights, "MAX_SHARD_BYTES", 10_000)  # several files
    out = tmp_path / "out"
    out.mkdir()
    hf_weights.save(config.model, params, out, "float32")
    written = hf_config.to_hf(config.model, eos=[2], bos=1, dtype="float32")
    (out / "config.json").write_text(json.dumps(written))
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 1
    assert all(file.stat().st_mode & 0o044 for file in files), "others may read them"
    again = {name: value for file in files for name, value in load_file(file).items()}
    assert again.keys() == tensors.keys()
    for name, value in tensors.items():
        np.testing.assert_array_equal(again[name], value, err_msg=name)
    jax.tree.map(np.testing.assert_array_equal, load(config_of(out)), params)


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_what_is_written_has_the_positions_of_the_checkpoint(tmp_path, family):
    """Engines take max_position_embeddings as the longest text."""
    checkpoint(tmp_path / "in", family)
    config = config_of(tmp_path / "in").model
    written = lambda: hf_config.to_hf(config, eos=[2], bos=1, dtype="float32")
    assert written()["max_position_embeddings"] == BASE["max_position_embeddings"]
    shutil.rmtree(tmp_path / "in")
    assert written()["max_position_embeddings"] == {"qwen2": 131_072, "llama": 8 * 32}[family]


@pytest.mark.parametrize("family", ["qwen2-untied", "qwen3"])
def test_eight_devices_hold_the_same_numbers(tmp_path, family):
    checkpoint(tmp_path / "in", family)
    sharded = {"mesh__data": 1, "mesh__fsdp": 4, "mesh__tensor": 2 if family != "qwen3" else 1}
    config = config_of(tmp_path / "in", **sharded)
    many = load(config, 8 if family != "qwen3" else 4)
    assert any(not x.sharding.is_fully_replicated for x in jax.tree.leaves(many))
    jax.tree.map(np.testing.assert_array_equal, many, load(config_of(tmp_path / "in")))


def test_bfloat16_in_and_out(tmp_path):
    import ml_dtypes

    tensors = checkpoint(tmp_path / "in", "qwen2", dtype=ml_dtypes.bfloat16)
    config = config_of(tmp_path / "in")
    params = load(config)
    assert params["embed"].dtype == jnp.float32, "as config.model.param_dtype says"
    hf_weights.save(config.model, params, tmp_path / "in", "bfloat16")
    for name, value in load_file(tmp_path / "in" / "model.safetensors").items():
        assert value.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(value, tensors[name])


def test_a_tensor_is_read_in_small_pieces(tmp_path, monkeypatch):
    """A read releases Python's lock for as long as the storage takes, so that heartbeats go on."""
    tensors = checkpoint(tmp_path / "in", "qwen2-untied")
    monkeypatch.setattr(hf_weights, "READ_BYTES", 1000)
    stored, sizes, read = hf_weights._stored_tensors(tmp_path / "in"), [], np.fromfile
    count = lambda file, dtype, count: sizes.append(count * dtype.itemsize)
    monkeypatch.setattr(np, "fromfile", lambda *args: count(*args) or read(*args))
    for name, value in tensors.items():
        for index in ((slice(None),) * value.ndim, (slice(1, 20), slice(3, 7))[: value.ndim]):
            del sizes[:]
            found = hf_weights._read(name, stored[name], index)
            np.testing.assert_array_equal(found, value[index], err_msg=name)
            assert max(sizes) <= 1000 and sum(sizes) <= value.nbytes
    assert any(value.nbytes > 3000 for value in tensors.values())


def test_a_file_that_has_become_shorter_is_an_error(tmp_path):
    checkpoint(tmp_path / "in", "qwen2")
    stored = hf_weights._stored_tensors(tmp_path / "in")
    file = tmp_path / "in" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(OSError, match="become shorter"):
        for name, tensor in stored.items():
            hf_weights._read(name, tensor, (slice(None),) * len(tensor.shape))


def test_a_dtype_that_holds_no_weights_is_an_error(tmp_path):
    checkpoint(tmp_path / "in", "qwen2")
    changed(tmp_path / "in", lambda t: t.update({"model.norm.weight": np.zeros(24, np.int8)}))
    with pytest.raises(UserError, match="model.norm.weight in .* has dtype I8; known are F64, F32"):
        load(config_of(tmp_path / "in"))


def changed(place, change):
    tensors = load_file(place / "model.safetensors")
    change(tensors)
    save_file(tensors, place / "model.safetensors")


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t.pop("model.norm.weight"), r"1 missing: model\.norm\.weight"),
        (
            lambda t: t.update({"model.layers.0.self_attn.o_proj.bias": np.zeros(3, np.float32)}),
            r"1 not known: model\.layers\.0\.self_attn\.o_proj\.bias",
        ),
        (
            lambda t: t.update({"model.embed_tokens.weight": np.zeros((36, 24), np.float32)}),
            r"of another shape: model\.embed_tokens\.weight \(\[36, 24\], \[37, 24\] is wanted\)",
        ),
    ],
)
def test_every_tensor_is_used_and_every_parameter_filled(tmp_path, change, message):
    checkpoint(tmp_path / "in", "qwen2")
    changed(tmp_path / "in", change)
    with pytest.raises(UserError, match=message):
        load(config_of(tmp_path / "in"))


def test_a_tied_head_that_is_another_matrix_is_an_error(tmp_path):
    """transformers 5 does not tie such a model, whatever its config says."""
    tensors = checkpoint(tmp_path / "in", "qwen2")
    head = tensors["model.embed_tokens.weight"].copy()
    head[-1, -1] += 1
    changed(tmp_path / "in", lambda tensors: tensors.update({"lm_head.weight": head}))
    message = r"a lm_head\.weight that differs .* has tie_word_embeddings true\. Set that to false"
    with pytest.raises(UserError, match=message):
        load(config_of(tmp_path / "in"))


def test_a_tied_head_and_old_buffers_are_no_surplus(tmp_path):
    tensors = checkpoint(tmp_path / "in", "qwen2")
    extra = {
        "lm_head.weight": tensors["model.embed_tokens.weight"],
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(3, np.float32),
        "model.layers.0.attn.bias": np.ones((1, 4), bool),
    }
    changed(tmp_path / "in", lambda tensors: tensors.update(extra))
    load(config_of(tmp_path / "in"))


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda place: (place / "model.safetensors").unlink(), "there are no weights in it"),
        (
            lambda place: (place / "model.safetensors").write_bytes(
                (place / "model.safetensors").read_bytes()[:-100]
            ),
            r"the shard .*model\.safetensors is missing, cut short or damaged",
        ),
        (
            lambda place: (place / "model.safetensors").write_bytes(b"\xff" * 100),
            r"the shard .*model\.safetensors is missing, cut short or damaged",
        ),
        (
            lambda place: (place / "model.safetensors.index.json").write_text("{"),
            r"model\.safetensors\.index\.json cannot be read",
        ),
        (
            lambda place: (place / "model.safetensors.index.json").write_text(
                json.dumps({"weight_map": {"model.norm.weight": "model-2.safetensors"}})
            ),
            r"the shard .*model-2\.safetensors is missing",
        ),
        (lambda place: (place / "config.json").write_text("["), r"config\.json cannot be read"),
        (lambda place: (place / "config.json").write_text("[]"), "must hold a JSON object"),
        (lambda place: shutil.rmtree(place), "there is no directory"),
    ],
)
def test_a_damaged_checkpoint_is_an_error_that_names_the_file(tmp_path, damage, message):
    checkpoint(tmp_path / "in", "qwen2")
    config = config_of(tmp_path / "in")
    damage(tmp_path / "in")
    with pytest.raises(UserError, match=message):
        load(config)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model_type": "gpt2"}, "model_type = 'gpt2'; known are qwen2, qwen3, llama, mistral"),
        ({"model_type": None, "config": {}}, "is the directory of a run.*launch/export.py"),
        (
            {"hidden_act": "gelu"},
            "hidden_act = 'gelu'; the decoder here supports 'silu' or 'swish' only",
        ),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"num_experts": 8}, "num_experts = 8; the decoder here supports 0 only"),
        ({"rope_interleaved": True}, "rope_interleaved = True"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0; .* null only"),
        ({"is_causal": False}, "is_causal = False"),
        ({"quantization_config": {"bits": 4}}, "quantization_config = "),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "its rope type must be"),
        ({"rope_scaling": LLAMA3 | {"spin": 1}}, "spin is not known here"),
        ({"rope_scaling": {"type": "linear"}}, "its factor is needed"),
        ({"hidden_size": None}, "hidden_size"),
        ({"sliding_window": 4, "layer_types": ["linear"] * 3}, "layer_types"),
        ({"sliding_window": 4, "layer_types": ["sliding_attention"] * 3}, "without a window"),
    ],
)
def test_what_the_decoder_does_not_do_is_refused(change, message):
    values = {name: v for name, v in (BASE | change).items() if v is not None}
    with pytest.raises(UserError, match=message):
        hf_config.model_fields(values, "here")


def test_unknown_keys_are_ignored_and_named_once(capsys):
    """Keys of SmolLM2-135M-Instruct and of checkpoints that were converted from GGUF."""
    more = {
        "is_llama_config": True,
        "rope_interleaved": False,
        "partial_rotary_factor": 1.0,
        "final_logit_softcapping": None,
        "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}},
        "_model_name_or_path": "a/b",
    }
    for _ in range(2):
        assert hf_config.model_fields(BASE | more, "a/b") == hf_config.model_fields(BASE, "c")
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 1
    assert warnings[0].endswith(": _model_name_or_path, is_llama_config, transformers.js_config")


@pytest.mark.parametrize(
    "family, given, expected",
    [
        ("qwen2", {}, dict(num_kv_heads=32, head_dim=16, sliding_window=None)),
        ("qwen2", {"use_sliding_window": True}, dict(sliding_window=(4096, (28, 29)))),
        ("qwen3", {}, dict(num_kv_heads=32, head_dim=128, sliding_window=None)),
        ("qwen3", {"num_key_value_heads": None}, dict(num_kv_heads=4)),
        ("llama", {}, dict(num_kv_heads=4, head_dim=16, sliding_window=None)),
        ("mistral", {}, dict(num_kv_heads=8, sliding_window=(4096, (*range(30),)))),
        ("mistral", {"sliding_window": None}, dict(sliding_window=None)),
    ],
)
def test_a_key_that_is_left_out_is_what_transformers_takes(family, given, expected):
    """Found with AutoConfig.from_pretrained of transformers 5.23.0 on the same files."""
    sizes = dict(hidden_size=64, num_hidden_layers=30, num_attention_heads=4, intermediate_size=8)
    values = {"model_type": family, "vocab_size": 37, "rms_norm_eps": 1e-6} | sizes | given
    found = hf_config.model_fields(values, "here")
    assert {name: found[name] for name in expected} == expected


def test_a_field_that_contradicts_the_checkpoint_is_an_error(tmp_path):
    checkpoint(tmp_path / "in", "qwen2")
    fields = dict.fromkeys(hf_config.FIELDS) | {"path": str(tmp_path / "in"), "hidden_size": 25}
    with pytest.raises(
        UserError, match=r"config\.model\.hidden_size is 25, and 24 in the config\.json"
    ):
        hf_config.filled(fields)


def test_stop_tokens_that_are_given_hold_all_of_the_checkpoint(tmp_path):
    place = tmp_path / "in"
    checkpoint(place, "qwen2")
    (place / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    fields = dict.fromkeys(hf_config.FIELDS) | {"path": str(place)}
    message = r"config\.model\.stop_token_ids is \(5,\), and what .* is \(5, 7\)"
    for given in ((5, 7), (3, 7, 5)):
        assert hf_config.filled(fields | {"stop_token_ids": given})["stop_token_ids"] == given
    with pytest.raises(UserError, match=message):
        hf_config.filled(fields | {"stop_token_ids": (5,)})
    config = config_of(place).model
    hf_config.check(config)
    with pytest.raises(UserError, match=message):
        hf_config.check(dataclasses.replace(config, stop_token_ids=(5,)))


def data(*names):
    place = SHARED.joinpath("data", *names)
    if not place.exists():
        pytest.skip(f"the reference data are not there: {place}")
    return place


@pytest.mark.parametrize(
    "model_name, shapes_of, num",
    [("Qwen2.5-32B", "Qwen2.5-32B", 771), ("Qwen2.5-7B-Instruct", "Qwen2.5-7B", 339)],
)
def test_published_checkpoints_are_mapped_whole(model_name, shapes_of, num):
    values = json.loads(data("configs", "qwen2.5", f"{model_name}.config.json").read_text())
    fields = hf_config.model_fields(values, model_name)
    config = Config.from_dict(model_dict(fields)).model
    found = json.loads(data("configs", "index", f"{shapes_of}.shapes.json").read_text())["shapes"]
    assert len(found) == num
    hf_weights.check_tensors(config, {name: tuple(shape) for name, shape in found.items()}, "index")


def test_a_narrow_checkpoint_with_all_names_of_qwen2_5_32b(tmp_path):
    """Its 64 layers and 771 tensors in the files of its own index: in, sharded, and out again."""
    index = json.loads(
        data("configs", "index", "Qwen2.5-32B.model.safetensors.index.json").read_text()
    )["weight_map"]
    values = json.loads(data("configs", "qwen2.5", "Qwen2.5-32B.config.json").read_text())
    values |= {"hidden_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2,
               "intermediate_size": 54, "vocab_size": 38, "eos_token_id": 2}  # fmt: skip
    place = tmp_path / "in"
    place.mkdir()
    (place / "config.json").write_text(json.dumps(values))
    (place / hf_weights.INDEX).write_text(json.dumps({"weight_map": index}))
    rng = np.random.default_rng(0)
    shapes = hf_weights.expected_shapes(config_of(place).model)
    assert shapes.keys() == index.keys() and len(shapes) == 771
    tensors = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    for file in set(index.values()):
        save_file({n: x for n, x in tensors.items() if index[n] == file}, place / file)
    config = config_of(place, mesh__data=1, mesh__fsdp=4, mesh__tensor=2)
    params = load(config, 8)
    assert len(set(index.values())) == 17
    hf_weights.save(config.model, params, tmp_path, "float32")
    again = load_file(tmp_path / "model.safetensors")
    assert again.keys() == tensors.keys()
    for name, value in tensors.items():
        np.testing.assert_array_equal(again[name], value, err_msg=name)


def test_qwen3_32b_is_mapped_whole():
    index = data("configs", "index", "Qwen3-32B.model.safetensors.index.json")
    names = json.loads(index.read_text())["weight_map"].keys()
    values = json.loads(data("configs", "other", "Qwen--Qwen3-32B.config.json").read_text())
    config = Config.from_dict(model_dict(hf_config.model_fields(values, "Qwen3-32B"))).model
    assert len(names) == 707 and hf_weights.expected_shapes(config).keys() == names


@pytest.mark.parametrize(
    "name", ["Qwen--Qwen3-0.6B", "Qwen--Qwen3-8B", "meta-llama--Llama-3.2-3B",
             "meta-llama--Meta-Llama-3.1-70B", "meta-llama--Meta-Llama-3.1-8B"]
)  # fmt: skip
def test_published_configs_are_read_and_written_alike(name):
    values = json.loads(data("configs", "other", f"{name}.config.json").read_text())
    fields = hf_config.model_fields(values, name)
    config = Config.from_dict(model_dict(fields)).model
    written = hf_config.to_hf(config, eos=[1, 2], bos=None, dtype="bfloat16")
    assert hf_config.model_fields(written, name) == fields


def test_mixture_of_experts_is_refused():
    values = json.loads(data("configs", "other", "Qwen--Qwen3-30B-A3B.config.json").read_text())
    with pytest.raises(UserError, match="qwen3_moe"):
        hf_config.model_fields(values, "a")


def model_dict(fields):
    return tiny_dict(
        pretrain=None,
        model__path="x",
        model__tokenizer="x",
        **{f"model__{name}": value for name, value in fields.items()},
    )


def test_stories260k_writes_its_story():
    """A trained model: the training forward finds every token that its own program drew."""
    place = data("weights", "stories260K")
    config = config_of(place)
    params = load(config)
    expected = json.loads((place / "expected_greedy.json").read_text())
    prompt, greedy = expected["prompt_ids"], expected["greedy_ids"]
    tokens = greedy if greedy[: len(prompt)] == prompt else prompt + greedy
    logits_TV = logits_of(config.model, params, tokens)
    found = np.argmax(logits_TV, axis=-1)[len(prompt) - 1 : -1]
    np.testing.assert_array_equal(found, tokens[len(prompt) :])
    np.testing.assert_allclose(logits_TV[0, :16], expected["logits_pos0_first16"], atol=1e-4)


@pytest.mark.parametrize("stated, longest", [(64, 8 * 32), (1024, 1024)])
def test_positions_are_those_that_scaling_reaches(tmp_path, stated, longest):
    """Where a user added it, the original ones may still be stated, or others."""
    checkpoint(tmp_path / "in", "llama")
    file = tmp_path / "in" / "config.json"
    values = json.loads(file.read_text()) | {"max_position_embeddings": stated}
    file.write_text(json.dumps(values))
    assert hf_config.positions(config_of(tmp_path / "in").model) == longest


@pytest.mark.parametrize(
    "change, dtype",
    [
        ({}, "float32"),
        ({"torch_dtype": "float32"}, "float32"),
        ({"torch_dtype": "float16"}, "bfloat16"),
        ({"dtype": "bfloat16"}, "bfloat16"),
    ],
)
def test_the_dtype_of_a_checkpoint_is_read_under_both_names(tmp_path, change, dtype):
    (tmp_path / "config.json").write_text(json.dumps(BASE | change))
    assert hf_config.stored_dtype(str(tmp_path)) == dtype


def test_a_directory_with_weights_of_its_own_is_the_model(tmp_path):
    """Another model may lie in its subdirectory `model`, where a supervised run has its own."""
    checkpoint(tmp_path / "in", "qwen2")
    (tmp_path / "in" / "model").mkdir()
    shutil.copy(tmp_path / "in" / "config.json", tmp_path / "in" / "model")
    assert hf_hub.model_directory(str(tmp_path / "in"), []) == tmp_path / "in"
    (tmp_path / "in" / "model.safetensors").unlink()
    assert hf_hub.model_directory(str(tmp_path / "in"), []) == tmp_path / "in" / "model"


def test_yarn_without_a_factor_reaches_the_positions_of_the_model():
    yarn = {"rope_type": "yarn", "original_max_position_embeddings": 16}
    fields = hf_config.model_fields(BASE | {"rope_scaling": yarn}, "a model")
    assert fields["rope_scaling"]["factor"] == 64 / 16


@pytest.mark.parametrize("theta", [{}, {"rope_theta": 1e6}])
def test_a_rope_that_is_stated_twice_must_be_the_same(theta):
    """transformers 5.24 reads rope_scaling alone, and the rope_theta in it or next to it."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    plain = {name: value for name, value in BASE.items() if name != "rope_theta"} | theta
    saved = {"rope_type": "default", "rope_theta": 1e6}  # as its save_pretrained writes it
    read = lambda **keys: hf_config.model_fields(plain | keys, "here")
    with pytest.raises(UserError, match="has rope_scaling = .*'yarn'.*; its rope_parameters diff"):
        read(rope_parameters=saved, rope_scaling=yarn)
    if not theta:  # transformers would take 10,000
        with pytest.raises(UserError, match="its rope_parameters differ"):
            read(rope_parameters=saved | yarn, rope_scaling=yarn)
    both = read(rope_parameters=saved | yarn, rope_scaling=yarn | {"rope_theta": 1e6})
    assert both == read(rope_parameters=saved | yarn) == read(rope_scaling=saved | yarn)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"layer_types": ["linear_attention"] * 3}, "it must name 3 full or sliding"),
        ({"layer_types": ["full_attention"] * 2}, "it must name 3 full or sliding"),
        ({"layer_types": [["full_attention"]] * 3}, "it must name 3 full or sliding"),
        ({"use_sliding_window": True, "sliding_window": 4, "max_window_layers": None}, "a number"),
        ({"max_position_embeddings": "64", "rope_scaling": {"type": "default"}}, "be a number"),
    ],
)
def test_a_null_window_hides_no_other_key(change, message):
    with pytest.raises(UserError, match=message):
        hf_config.model_fields(BASE | {"sliding_window": None} | change, "here")
