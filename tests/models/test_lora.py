"""Adapters: their logits and gradients are those of peft (goldens/make_lora.py), and its files.

transformers computes norms and softmax in float32 whatever the parameters are: 5e-6 of a gradient's
largest entry.
"""

import dataclasses
import functools
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dapo_jax.config import hf_config
from dapo_jax.config.checks import check_training
from dapo_jax.config.cli import load_config
from dapo_jax.data.tokenizer import arithmetic_tokenizer, load_tokenizer
from dapo_jax.models import decoder, hf_weights, int8, lora, peft_adapter, pretrained
from dapo_jax.models.log_probs import row_statistics
from dapo_jax.models.sharding import AXES, param_shardings
from dapo_jax.rollout import memory_budget
from dapo_jax.training import packing
from dapo_jax.types import UserError
from tests.support import checkpoints
from tests.support.engines import make_engine
from tests.support.helpers import in_float64, logits_of, make_mesh, replace_model, tiny_config

GOLDENS = Path(__file__).parent.parent / "goldens" / "lora.npz"
CASES = "qwen2-tied", "qwen3-untied", "llama", "llama-qv"


class Case:
    """Adapters of peft beside their base model, in two directories."""

    def __init__(self, place, name, **changes):
        with np.load(GOLDENS) as file:
            own = {n.removeprefix(f"{name}."): file[n] for n in file.files if n.startswith(name)}
        of = lambda kind: {n[len(kind) :]: x for n, x in own.items() if n.startswith(kind)}
        self.tensors, self.grads = of("tensor."), of("grad.")
        self.logits = own["logits"]
        self.base = checkpoints.golden(own["family"].item())
        checkpoints.write(place / "base", self.base.config, self.base.weights)
        self.place = place / "adapter"
        self.place.mkdir()
        values = json.loads(own["config"].item())
        values |= {"base_model_name_or_path": str(place / "base")} | changes
        (self.place / "adapter_config.json").write_text(json.dumps(values))
        save_file(
            {n: x.astype(np.float32) for n, x in self.tensors.items()},
            self.place / "adapter_model.safetensors",
        )

    def load(self, devices=1, **changes):
        config = checkpoints.config_of(self.place, **changes)
        mesh = make_mesh(config, devices)
        return config, pretrained.load(config.model, config.mesh, mesh, seed=0)


def mean_loss(c, trained, frozen, *, tokens_T):
    """Mean negative log-prob of each token after the first."""
    rows = packing.pack([tokens_T[:1].tolist()], tokens_T[1:], np.array([39]), len(tokens_T)).rows
    rows = jax.tree.map(jnp.asarray, rows)
    statistics = row_statistics(c, lora.join(trained, frozen), rows, temperature=1.0)
    return -jnp.sum(jnp.where(rows.mask_BT, statistics.log_prob_BT, 0.0)) / 39


@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients_are_those_of_peft(tmp_path, name):
    case = Case(tmp_path, name)
    config, params = case.load()
    c = config.model
    assert config.model.path == str(case.place) and c.lora_rank in (1, 2, 3, 4)
    found = np.asarray(logits_of(c, params, case.base.tokens_T))[::5]
    np.testing.assert_allclose(found, case.logits, rtol=0, atol=1e-4)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        wide = replace_model(config, param_dtype="float64", compute_dtype="float64")
        gradient = jax.grad(functools.partial(mean_loss, wide, tokens_T=case.base.tokens_T))
        grads = jax.device_get(jax.jit(gradient)(*lora.split(in_float64(params))))
    sources = peft_adapter.tensors(c)
    checked = 0
    for ours, tensor in sources.items():
        for i in range(c.num_layers):
            expected = case.grads.get(tensor.name.format(i=i))
            if expected is None:  # no adapter there
                continue
            found = grads["layers"][ours.removeprefix("layers.")][i]
            found = found.reshape(expected.shape[::-1]).T
            np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * np.abs(expected).max())
            checked += 1
    assert checked == len(case.grads) == len(case.tensors)


def plain_of(c, params, place):
    """The parameters that are read from what is written of a model with adapters."""
    hf_weights.save(c, params, place, "float32")
    config = checkpoints.config_of(place)
    return config.model, checkpoints.load(config)


def test_merged_the_model_is_the_same(tmp_path, monkeypatch):
    """One layer at a time: a device has no place for a second copy of the model."""
    case = Case(tmp_path, "qwen2-tied")
    config, params = case.load()
    shapes, merged = [], lora.merged

    def watched(c, layers, name):
        shapes.append({len(x) for x in layers.values()})
        return merged(c, layers, name)

    monkeypatch.setattr(lora, "merged", watched)
    c, plain = plain_of(config.model, params, tmp_path / "base")
    assert shapes == [{1}] * 7 * c.num_layers
    found = np.asarray(logits_of(c, plain, case.base.tokens_T))[::5]
    np.testing.assert_allclose(found, case.logits, rtol=0, atol=1e-4)


def test_switched_off_and_new_it_is_the_base(tmp_path):
    case = Case(tmp_path, "llama")
    config, params = case.load()
    trained, frozen = lora.split(params)
    off = lora.join(lora.switched_off(trained), frozen)
    new = checkpoints.config_of(tmp_path / "base", model__lora_rank=2)
    fresh = pretrained.load(new.model, new.mesh, make_mesh(new, 1), seed=3)
    for c, params in ((config.model, off), (new.model, fresh)):
        found = np.asarray(logits_of(c, params, case.base.tokens_T))[case.base.positions_X]
        np.testing.assert_allclose(found, case.base.logits_XV, rtol=0, atol=1e-4)
    # A new adapter is not symmetric: its A is drawn, and from the seed.
    again = pretrained.load(new.model, new.mesh, make_mesh(new, 1), seed=4)
    a, b = (x["layers"]["gate_lora_a"] for x in (fresh, again))
    assert np.std(a) > 0 and not np.array_equal(a, b)


def test_new_adapters_are_as_large_as_those_of_peft():
    """peft samples A evenly from -1 / sqrt(inputs) to 1 / sqrt(inputs)."""
    c = tiny_config(model__lora_rank=64).model
    layers = decoder.init_params(c, jax.random.key(0))["layers"]
    inputs = dict.fromkeys(int8.INPUT_AXES, c.hidden_size)
    inputs |= {"o": c.num_heads * c.head_dim, "down": c.intermediate_size}
    for name, num in inputs.items():
        variance = np.var(layers[f"{name}_lora_a"])
        assert variance == pytest.approx(1 / (3 * num), rel=0.1), name


def test_files_are_those_of_peft(tmp_path):
    """What is saved has its names, shapes and values, and loads on a mesh as it was."""
    case = Case(tmp_path, "qwen3-untied")
    config, params = case.load()
    (tmp_path / "out").mkdir()
    peft_adapter.save(config.model, params, tmp_path / "out", "float32")
    saved = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert saved.keys() == case.tensors.keys()
    for name, value in case.tensors.items():
        np.testing.assert_array_equal(saved[name], value.astype(np.float32))
    written = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    theirs = json.loads((case.place / "adapter_config.json").read_text())
    assert {n: x for n, x in written.items() if n != "target_modules"}.items() <= theirs.items()
    assert sorted(written["target_modules"]) == theirs["target_modules"]
    case.place = tmp_path / "out"
    config, spread = case.load(2, mesh__fsdp=2)
    at = param_shardings(config.model, config.mesh, make_mesh(config, 2))
    for x, y, where in zip(*map(jax.tree.leaves, (params, spread, at)), strict=True):
        np.testing.assert_array_equal(x, y)
        assert y.sharding.is_equivalent_to(where, y.ndim)


@pytest.mark.parametrize("revision", ["v1.0", None])
def test_the_revision_of_a_base_on_the_hub_has_its_own_key(tmp_path, monkeypatch, revision):
    """peft asks the hub for base_model_name_or_path at `revision`."""
    case = Case(tmp_path, "llama")
    config, params = case.load()
    path = "owner/name" + (f"@{revision}" if revision else "")
    (tmp_path / "out").mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(hf_config, "base_path", lambda path: path)  # asks no hub
        c = dataclasses.replace(config.model, path=path)
        peft_adapter.save(c, params, tmp_path / "out", "float32")
    values = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (values["base_model_name_or_path"], values["revision"]) == ("owner/name", revision)
    assert hf_config.base_path(str(tmp_path / "out")) == path


def test_the_base_of_adapters_on_a_supervised_run_is_the_model_in_it(tmp_path):
    """peft and transformers find no model in the run directory itself."""
    config, params = Case(tmp_path, "llama").load()
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "base").rename(run / "model")
    (run / "config.json").write_text("{}")  # of the run
    c = dataclasses.replace(config.model, path=str(run))
    (tmp_path / "out").mkdir()
    peft_adapter.save(c, params, tmp_path / "out", "float32")
    values = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert values["base_model_name_or_path"] == str(run / "model")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "use_dora = True"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa'"),
        ({"alora_invocation_tokens": [5, 6]}, r"alora_invocation_tokens = \[5, 6\]"),
        ({"peft_type": "IA3"}, "peft_type = 'IA3'"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"base_model_name_or_path": None}, "base_model_name_or_path = None"),
        ({"r": 5}, "of another shape"),
    ],
)
def test_other_adapters_are_refused(tmp_path, change, message):
    with pytest.raises(UserError, match=message):
        Case(tmp_path, "llama", **change).load()


def test_the_tokenizer_is_that_of_the_adapters_or_without_one_of_the_base(tmp_path):
    case = Case(tmp_path, "llama")
    own = arithmetic_tokenizer()
    own.save_pretrained(str(tmp_path / "base"))
    model = load_config("configs/tiny_dapo.py", {}, model=str(case.place)).model
    both = model, dataclasses.replace(model, tokenizer=None)
    assert [load_tokenizer(c).eos_token for c in both] == ["<eos>", "<eos>"]
    own.add_special_tokens({"eos_token": "<unk>"})
    own.save_pretrained(str(case.place))
    assert [load_tokenizer(c).eos_token for c in both] == ["<unk>", "<unk>"]


def test_tensors_that_are_missing_or_not_known_are_named(tmp_path):
    case = Case(tmp_path, "llama")
    file = case.place / "adapter_model.safetensors"
    tensors = load_file(file)
    gone = tensors.pop("base_model.model.model.layers.1.mlp.up_proj.lora_B.weight")
    save_file(tensors | {"base_model.model.lm_head.lora_A.weight": gone}, file)
    message = r"1 missing: .*layers\.1\.mlp\.up_proj\.lora_B.*1 not known: .*lm_head"
    with pytest.raises(UserError, match=message):
        case.load()
    file.unlink()
    with pytest.raises(UserError, match=r"adapter_model\.safetensors is missing"):
        case.load()


def test_contradictions_are_refused(tmp_path):
    case = Case(tmp_path, "llama")
    with pytest.raises(UserError, match=r"model\.lora_rank is 8, and 4 in the adapter_config\.js"):
        case.load(model__lora_rank=8)
    with pytest.raises(UserError, match=r"model\.lora_alpha is not read when"):
        tiny_config(model__lora_alpha=8.0)
    values = {"learning_rate": 1e-4}
    with pytest.raises(UserError, match=r"config\.critic: with config\.model\.lora_rank 2"):
        tiny_config(model__lora_rank=2, objective__advantage="gae", critic=values)


def test_the_base_is_frozen_in_the_compute_dtype():
    c = replace_model(tiny_config(), lora_rank=2, compute_dtype="bfloat16")
    trained, frozen = lora.split(decoder.param_shapes(c))
    assert {x.dtype for x in jax.tree.leaves(trained)} == {jnp.dtype("float32")}
    assert {x.dtype for x in jax.tree.leaves(frozen)} == {jnp.dtype("bfloat16")}


def test_rollouts_read_the_frozen_arrays_in_place():
    """In bfloat16 the adapters alone are copied, and on a CPU the layers as decoding has them."""
    engine = make_engine(model={"lora_rank": 2, "compute_dtype": "bfloat16"})
    params = decoder.init_params(engine.config.model, jax.random.key(0))
    loaded = engine.load_params(params).prefill
    place = lambda tree: {
        jax.tree_util.keystr(path): x.unsafe_buffer_pointer()
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }
    ours, theirs = place(params), place(loaded)
    copied = {name for name in ours if ours[name] != theirs[name]}
    assert copied == {name for name in ours if "_lora_" in name} and len(copied) == 14


def test_int8_is_off_by_half_a_step_at_most():
    base = jax.device_get(decoder.init_params(tiny_config().model, jax.random.key(0)))
    base["layers"]["q"] = base["layers"]["q"].copy()
    base["layers"]["q"][0, :, 0, 1] = 0.0  # a channel of zeros
    found = jax.device_get(int8.quantized_layers(base["layers"]))
    for name, w in base["layers"].items():
        if name not in int8.INPUT_AXES:
            np.testing.assert_array_equal(found[name], w)
            continue
        values, scale = found[name], found[f"{name}_scale"]
        assert values.dtype == np.int8 and scale.dtype == np.float32
        inputs = 2 if name == "o" else 1
        assert scale.shape == w.shape[:1] + w.shape[1 + inputs :]
        scale = scale.reshape(len(w), *[1] * inputs, *scale.shape[1:])
        assert np.all(np.abs(values * scale - w) <= scale * 0.5001)
        largest = np.abs(values).max(tuple(range(1, 1 + inputs)))
        assert np.all((largest == 127) | (np.abs(w).max(tuple(range(1, 1 + inputs))) == 0))


@pytest.mark.slow
def test_an_int8_base_is_read_from_files_layer_by_layer(tmp_path):
    """The same bits as of the plain base, on a mesh; what is merged is the same function."""
    case = Case(tmp_path, "qwen2-tied")
    config = checkpoints.config_of(tmp_path / "base", model__lora_rank=2)
    plain = pretrained.load(config.model, config.mesh, make_mesh(config, 1), seed=0)
    of_base = lora.split(plain)[1]["layers"]
    sizes = {"mesh__fsdp": 2, "mesh__tensor": 2, "model__param_dtype": "int8"}
    config = checkpoints.config_of(tmp_path / "base", model__lora_rank=2, **sizes)
    c, mesh = config.model, make_mesh(config, 4)
    params = pretrained.load(c, config.mesh, mesh, seed=0)
    expected = int8.quantized_layers(of_base)
    found = lora.split(params)[1]["layers"]
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), jax.device_get(expected))
    assert found["gate_scale"].sharding.spec[1] == "tensor"
    drawn = lambda x: jnp.asarray(np.random.default_rng(0).standard_normal(x.shape), x.dtype) / 9
    params = lora.join(jax.tree.map(drawn, lora.split(params)[0]), lora.split(params)[1])
    params = jax.device_put(jax.device_get(params), jax.devices()[0])
    ours = logits_of(c, params, case.base.tokens_T)
    (tmp_path / "out").mkdir()
    shutil.copy(tmp_path / "base" / "config.json", tmp_path / "out")
    theirs = logits_of(*plain_of(c, params, tmp_path / "out"), case.base.tokens_T)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
    off = lora.join(lora.switched_off(lora.split(params)[0]), lora.split(params)[1])
    rounded = np.asarray(logits_of(c, off, case.base.tokens_T))[case.base.positions_X]
    assert 1e-3 < np.abs(rounded - case.base.logits_XV).max() < 0.3


def test_int8_is_for_a_frozen_base():
    with pytest.raises(UserError, match=r"'int8' is for the frozen base of adapters.*lora_rank"):
        check_training(tiny_config(model__param_dtype="int8"))


def test_int8_is_read_in_place_and_counted():
    """On a CPU decoding has a copy of the layers, in int8 too."""
    model = {"lora_rank": 2, "param_dtype": "int8", "compute_dtype": "bfloat16"}
    engine = make_engine(model=model)
    params = decoder.init_params(engine.config.model, jax.random.key(0))
    loaded = engine.load_params(params)
    for name in ("q", "q_scale"):
        ours, theirs = params["layers"][name], loaded.prefill["layers"][name]
        assert ours.unsafe_buffer_pointer() == theirs.unsafe_buffer_pointer()
    assert loaded.decode["layers"][0]["down"].dtype == jnp.int8
    config = load_config(
        "configs/qwen1_5b_gsm8k_lora.py", {"mesh.fsdp": 1, "model.param_dtype": "int8"}
    )
    held = memory_budget.held(config, dict.fromkeys(AXES, 1))
    of_layers = 28 * (2 * 1536 * 1536 + 2 * 1536 * 256 + 3 * 1536 * 8960)
    channels = 28 * (1536 + 2 * 256 + 1536 + 2 * 8960 + 1536)
    frozen = of_layers + 4 * channels + 2 * (1_543_714_304 - of_layers)
    assert held.always["frozen parameters"] == frozen
    assert held.always["parameters"] == 4 * 36_929_536


def test_the_plan_counts_what_is_trained_and_what_is_frozen():
    """36,929,536 is what peft prints for rank 32 on Qwen2.5-1.5B; r (in + out) for each matrix."""
    config = load_config("configs/qwen1_5b_gsm8k_lora.py", {"mesh.fsdp": 1})
    held = memory_budget.held(config, dict.fromkeys(AXES, 1))
    sizes = (1536, 1536), (1536, 256), (1536, 256), (1536, 1536)
    sizes += (1536, 8960), (1536, 8960), (8960, 1536)
    assert 28 * 32 * sum(map(sum, sizes)) == 36_929_536
    assert held.always["parameters"] == held.update["gradients"] == 4 * 36_929_536
    assert held.always["optimiser state"] == 8 * 36_929_536
    assert held.always["frozen parameters"] == 2 * 1_543_714_304  # Qwen2.5-1.5B, tied
    assert held.rollout["rollout copy of the parameters"] == 2 * 36_929_536
