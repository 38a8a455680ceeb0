"""Whole runs that train adapters: what samples is what trains, and they resume and are exported."""

import json
import shutil

import jax
import numpy as np
import pytest

from dapo_jax.data.tokenizer import load_tokenizer
from dapo_jax.models import decoder, lora, pretrained
from dapo_jax.models.sharding import make_mesh
from dapo_jax.tools.export import write_directory
from dapo_jax.training import base_model
from dapo_jax.types import UserError
from tests.end_to_end.test_runs import CARRY, RUN, WITHOUT_FILTER, stopped_in
from tests.models.test_hf_weights import config_of
from tests.support.helpers import tiny_config
from tests.support.runs import load_launcher, metrics_of, params_at, rollouts_of, run_here

exporting, generating = map(load_launcher, ("export", "generate"))
LORA = RUN | WITHOUT_FILTER
LORA |= {"train__num_steps": 2, "model__lora_rank": 3, "model__lora_alpha": 9.0}
LORA |= {"optimizer__learning_rate": 1e-2, "optimizer__warmup_steps": 0}
KL = {  # to the base; one update a step
    "train__prompts_per_update": 4,
    "objective__kl_coefficient": 0.1,
    "objective__kl_estimator": "k3",
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, home):
    """The directory of a finished run."""
    workdir = tmp_path_factory.mktemp("lora") / "run"
    run_here(workdir, home, **LORA | KL)
    return workdir


@pytest.mark.slow
def test_what_samples_is_what_trains(trained):
    first, second = metrics_of(trained)[1:]
    assert all(step["rollout/log_prob_mismatch_max"] < 1e-5 for step in (first, second))
    assert first["policy/kl_ref"] < 1e-12 and second["policy/kl_ref"] > 1e-4


@pytest.mark.slow
def test_a_checkpoint_holds_adapters_alone(trained):
    adapters = params_at(trained, 2, **LORA | KL)["layers"]
    assert len(adapters) == 14 and all("_lora_" in name for name in adapters)
    assert all(np.any(x != 0) for x in adapters.values())
    written = json.loads((trained / "checkpoints" / "2" / "host" / "metadata").read_text())
    assert not any("embed" in str(entry) for entry in written["arrays"])


@pytest.mark.slow
def test_on_several_devices_too(trained, tmp_path, home):
    """The base lies over fsdp in training and is whole in rollouts."""
    run_here(tmp_path / "run", home, devices=4, mesh__fsdp=2, mesh__tensor=2, **LORA | KL)
    steps = metrics_of(tmp_path / "run")
    assert max(step.get("rollout/log_prob_mismatch_max", 0.0) for step in steps) < 1e-5
    responses = lambda workdir: [
        json.loads(line)["response"]
        for line in rollouts_of(workdir)["step_000001.jsonl"].splitlines()
    ]
    assert responses(tmp_path / "run") == responses(trained)


@pytest.mark.slow
def test_another_base_is_refused(tmp_path, home, capsys):
    """A checkpoint has adapters alone; the repository or directory of the base may have changed."""
    c, base, workdir = tiny_config().model, tmp_path / "base", tmp_path / "run"

    def write(seed):
        shutil.rmtree(base, ignore_errors=True)
        base.mkdir()
        params = decoder.init_params(c, jax.random.key(seed))
        write_directory(c, params, load_tokenizer(c), base, "float32", {})

    write(1)
    settings = LORA | KL | {"pretrain": None, "model__path": str(base)}
    settings |= {"model__stop_token_ids": (1,)}
    run_here(workdir, home, **settings | {"train__num_steps": 1})
    left = [(workdir / name).read_bytes() for name in ("config.json", "summary.json")]
    write(2)
    with pytest.raises(UserError, match=r"config\.model\.path .* holds other weights than when"):
        run_here(workdir, home, **settings)
    assert [(workdir / name).read_bytes() for name in ("config.json", "summary.json")] == left
    command = ["export.py", f"--workdir={workdir}"]
    assert exporting([*command, f"--output={tmp_path / 'out'}"]) == 2
    assert "holds other weights than when" in capsys.readouterr().err
    write(1)
    assert "resuming after step 1" in run_here(workdir, home, **settings)[1]
    assert exporting([*command, f"--output={tmp_path / 'out'}"]) == 0


@pytest.mark.slow
def test_a_carried_run_on_int8_resumes_bit_for_bit(tmp_path, home, monkeypatch):
    settings = LORA | CARRY | {"train__num_steps": 4, "optimizer__learning_rate": 1e-2}
    settings["model__param_dtype"] = "int8"
    run_here(tmp_path / "whole", home, **settings)
    steps = metrics_of(tmp_path / "whole")
    assert max(step.get("rollout/log_prob_mismatch_max", 0.0) for step in steps) < 1e-5
    with monkeypatch.context() as patch:
        stopped_in(3, 15, patch)
        assert run_here(tmp_path / "stopped", home, **settings)[0] == 15
    assert "resuming after step 2" in run_here(tmp_path / "stopped", home, **settings)[1]
    assert metrics_of(tmp_path / "stopped") == steps
    assert rollouts_of(tmp_path / "stopped") == rollouts_of(tmp_path / "whole")


@pytest.mark.slow
def test_exported_merged_and_as_adapters(trained, tmp_path, capsys, home, monkeypatch):
    """The merged directory is the model that was trained. Adapters of a base with a path load."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    flags = ["program", f"--workdir={trained}"]
    assert exporting([*flags, f"--output={tmp_path / 'merged'}"]) == 0
    merged = config_of(tmp_path / "merged")
    mesh = make_mesh(merged.mesh, jax.devices()[:1])
    found = pretrained.load(merged.model, merged.mesh, mesh, seed=0)
    config = tiny_config(**LORA | KL)
    whole = _whole(config, trained, mesh)
    for ours, theirs in zip(*map(jax.tree.leaves, (found, _plain(config, whole))), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)

    # Adapters on a base that is a directory.
    changes = LORA | {"pretrain": None, "model__path": str(tmp_path / "merged")}
    changes |= {"model__stop_token_ids": (1,)}
    run_here(tmp_path / "second", home, **changes)
    flags = ["program", f"--workdir={tmp_path / 'second'}", f"--output={tmp_path / 'adapter'}"]
    assert exporting([*flags, "--adapter"]) == 0
    again = config_of(tmp_path / "adapter")
    assert (again.model.lora_rank, again.model.lora_alpha) == (3, 9.0)
    loaded = lora.split(pretrained.load(again.model, again.mesh, mesh, seed=5))[0]
    ours = params_at(tmp_path / "second", 2, **changes)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(loaded), ours)
    capsys.readouterr()
    flags = ["--prompt=Add: a=7 b=9\n", "--temperature=0", "--max_new_tokens=8"]
    assert generating(["program", f"--model={tmp_path / 'adapter'}", *flags]) == 0
    said = capsys.readouterr().out
    assert (
        exporting(["program", f"--workdir={tmp_path / 'second'}", f"--output={tmp_path / 'plain'}"])
        == 0
    )
    capsys.readouterr()
    assert generating(["program", f"--model={tmp_path / 'plain'}", *flags]) == 0
    assert capsys.readouterr().out == said


def _whole(config, workdir, mesh):
    """All parameters of the last checkpoint."""
    tokenizer = load_tokenizer(config.model)
    base, _ = base_model.load_or_make(
        config, mesh, tokenizer, workdir / "base", say=print, check_stop=lambda: None
    )
    adapters = params_at(workdir, 2, **LORA | KL)
    return lora.join(adapters, lora.split(base)[1])


def _plain(config, params):
    """By hand: W + (alpha / rank) A B."""
    params = jax.device_get(params)
    layers = dict(params["layers"])
    for name in [name for name in layers if f"{name}_lora_a" in layers]:
        a, b = layers.pop(f"{name}_lora_a"), layers.pop(f"{name}_lora_b")
        side = np.stack([np.tensordot(x, y, 1) for x, y in zip(a, b)])
        layers[name] = layers[name] + 3.0 * side
    return params | {"layers": layers}
