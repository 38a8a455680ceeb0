"""Supervised runs: they learn, resume bit for bit, and a DAPO run starts from their model."""

import dataclasses
import json
import re
import shutil
import signal
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import dapo_jax
from dapo_jax.config.cli import load_config
from dapo_jax.data.examples import Example
from dapo_jax.data.tokenizer import load_tokenizer
from dapo_jax.models import hf_weights
from dapo_jax.models.sharding import make_mesh, param_shardings
from dapo_jax.runs.checkpoint import restore_part
from dapo_jax.tools import sft
from dapo_jax.types import RunError, UserError
from dapo_jax.utils.progress import Progress
from tests.conftest import ROOT
from tests.support.helpers import logits_of, make_params
from tests.support.runs import (
    finish,
    load_launcher,
    metrics_of,
    run_here,
    start,
    start_all,
    write_config,
    write_values,
)
from tests.support.sft import fine_tune_here, sft_config, sft_dict

STEPS = 6
LAUNCH = ROOT / "launch" / "sft.py"
launch = load_launcher("sft")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The directory of the data and the tokenizer."""
    return tmp_path_factory.mktemp("sft_data")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, home, place):
    """The directory of an undisturbed run, and what it printed."""
    workdir = tmp_path_factory.mktemp("sft") / "run"
    return workdir, fine_tune_here(workdir, home, sft_config(place))[1]


def saved(workdir, step, place):
    """The parameters and the host state in a checkpoint."""
    model = sft_config(place).model
    mesh = make_mesh(sft_config(place).mesh, jax.devices()[:1])
    like = jax.tree.map(
        lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at),
        sft.decoder.param_shapes(model),
        param_shardings(model, sft_config(place).mesh, mesh),
    )
    return jax.device_get(restore_part(workdir / "checkpoints", step, ("params",), like)[1:])


def params_of(workdir, step, place):
    return saved(workdir, step, place)[0]


def assert_same(workdir, other, place):
    jax.tree.map(
        np.testing.assert_array_equal,
        params_of(workdir, STEPS, place),
        params_of(other, STEPS, place),
    )
    assert metrics_of(workdir) == metrics_of(other)
    files = (run / "model" / "model.safetensors" for run in (workdir, other))
    assert len({file.read_bytes() for file in files}) == 1


def test_a_run_learns_and_leaves_what_it_promises(finished, place):
    workdir, out = finished
    steps, summary = metrics_of(workdir), json.loads((workdir / "summary.json").read_text())
    assert [numbers["step"] for numbers in steps] == list(range(STEPS + 1))
    assert [step["step"] for step in steps if "loss/heldout" in step] == [0, 2, 4, 6]
    assert summary["steps"] == STEPS and summary["final_loss"] == steps[-1]["loss/heldout"]
    assert summary["base_loss"] == steps[0]["loss/heldout"] > summary["final_loss"] + 0.5
    assert 3 < steps[1]["loss/train"] < 4.5  # about log(32), the vocabulary
    # Four of the eight examples that are not held out, a step.
    assert [step["data/epoch"] for step in steps[1:]] == [0.5, 1.0, 1.5, 2.0, 2.5, 3.0]
    assert steps[-1]["loss/train"] < steps[1]["loss/train"] - 0.5
    documented = (ROOT / "docs" / "metrics.md").read_text()
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    for name in set().union(*map(json.loads, lines)) - {"step"}:
        assert f"`{name}`" in documented, f"{name} is not in docs/metrics.md"
    for word in ("train.sums: 10 examples", "held out", "loss", "tok/s", "left", "model: "):
        assert word in out, word
    names = {file.name for file in (workdir / "model").iterdir()}
    assert names >= {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    sampling = json.loads((workdir / "model" / "generation_config.json").read_text())
    assert (sampling["do_sample"], sampling["top_k"]) == (True, 0), "transformers takes 50"
    assert (
        load_tokenizer(sft_config(place, model__tokenizer=str(workdir)).model).eos_token == "<eos>"
    )


def test_the_held_out_loss_is_that_of_the_trained_tokens(place, monkeypatch):
    """The turns of a user between two responses do not count."""
    monkeypatch.setattr(sft, "make_mesh", lambda mesh: make_mesh(mesh, jax.devices()[:1]))
    rng, config = np.random.default_rng(0), sft_config(place)
    sampled = lambda num: rng.integers(3, 32, num, np.int32)
    examples = [
        Example(tuple(sampled(2 + n)), sampled(6 + n), rng.random(6 + n) < 0.5) for n in range(5)
    ]
    parts: list = [None, None, None]  # signals, run directory and checkpoints
    of = sft.Examples(examples, examples)
    run = sft.FineTuning(config, of, Progress(0, quiet=True), *parts, 0.0)
    params, losses = make_params(config, seed=1), []
    for example in examples:
        tokens, n = [*example.prompt, *example.response], len(example.prompt)
        z = logits_of(config.model, params, tokens)[n - 1 : -1].astype(np.float64)
        log_p = z - np.log(np.exp(z).sum(axis=1, keepdims=True))
        losses += [-log_p[i, example.response[i]] for i in np.flatnonzero(example.trained)]
    found = run._evaluate(SimpleNamespace(all_params=params))
    assert found == {"loss/heldout": pytest.approx(np.mean(losses), rel=1e-5)}


def test_every_example_is_in_every_epoch(place):
    """And orders differ between epochs and seeds."""
    trained = {}
    for seed in (0, 1):
        epochs = {"train__num_steps": None, "train__num_epochs": 2, "train__examples_per_update": 3}
        config = sft_config(place, seed=seed, **epochs)
        found = sft.load_examples(config, load_tokenizer(config.model), Progress(0, quiet=True))
        config = sft.with_num_steps(config, len(found.train))
        n, N = len(found.train), config.train.examples_per_update
        assert config.train.num_steps == -(-2 * n // N) and n % N
        order = sft.ExampleOrder(n, seed)
        trained[seed] = [order[i] for i in range(2 * n)]
        for epoch in (trained[seed][:n], trained[seed][n:]):
            assert sorted(epoch) == list(range(n))
        assert trained[seed][:n] != trained[seed][n:]
    assert trained[0] != trained[1]


@pytest.mark.parametrize("num_steps, num_epochs", [(2, None), (None, 1)])
def test_a_rate_that_would_never_fall_is_refused(place, num_steps, num_epochs):
    """Eight examples are two updates, as many as the warm-up has steps."""
    falls = {"optimizer__final_rate_share": 0.1, "optimizer__warmup_steps": 2}
    steps = {"train__num_steps": num_steps, "train__num_epochs": num_epochs}
    with pytest.raises(UserError, match=r"warmup_steps must be below 2, the run's steps"):
        sft.with_num_steps(sft_config(place, **falls, **steps), 8)
    assert sft.with_num_steps(sft_config(place, **steps), 8).train.num_steps == 2
    longer = sft_config(place, **falls, train__num_steps=3)
    assert sft.with_num_steps(longer, 8) == longer


@pytest.mark.parametrize("num, examples_per_update", [(12, 8), (30, 20), (3, 7)])
def test_every_mini_batch_fits_also_at_the_end_of_an_epoch(num, examples_per_update):
    """An example at the end of one epoch may be the first of the next. No two of the longest three
    fit in a row."""
    lengths = [27, 26, 25, *[2] * (num - 3)]
    examples = [Example((3,), np.ones(n - 1, np.int32), np.ones(n - 1, bool)) for n in lengths]
    order, N = sft.ExampleOrder(num, 0), examples_per_update
    most = sft.most_rows(lengths, N, 48)
    used = []
    for step in range(300):
        chosen = [order[i] for i in range(step * N, (step + 1) * N)]
        used.append(len(sft.pack([examples[i] for i in chosen], 48, 1).rows.tokens_BT))
    assert max(used) <= most


class Crash(Exception):
    pass


def test_a_run_that_crashed_and_was_stopped_is_the_same_bit_for_bit(
    finished, tmp_path, home, place, monkeypatch
):
    """It crashes in the middle of step 4 and resumes after step 2. A signal comes before step 5,
    which saves."""
    real, workdir = sft.FineTuning._one_step, tmp_path / "run"

    def crashing(self, step, state, host):
        result = real(self, step, state, host)
        if step == 4:
            raise Crash
        return result

    def signalled(self, step, state, host):
        if step == 5:
            signal.raise_signal(signal.SIGTERM)
        return real(self, step, state, host)

    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(sft.FineTuning, "_one_step", crashing)
        fine_tune_here(workdir, home, sft_config(place))
    with monkeypatch.context() as patch:
        patch.setattr(sft.FineTuning, "_one_step", signalled)
        stopped_by, out = fine_tune_here(workdir, home, sft_config(place))
    assert stopped_by == signal.SIGTERM and "stopped after step 5; the same command" in out
    assert f"resuming after step 2 of {STEPS}" in out and not (workdir / "model").exists()
    _, out = fine_tune_here(workdir, home, sft_config(place))
    assert f"resuming after step 5 of {STEPS}" in out
    assert_same(workdir, finished[0], place)


@pytest.mark.slow
def test_a_killed_run_is_the_same_bit_for_bit(tmp_path, home, place):
    """The launcher, killed with SIGKILL at a time of its own."""
    file = write_values(tmp_path, sft_dict(place, checkpoint__every_steps=1))
    begin = lambda workdir: start(workdir, home, program=LAUNCH, config=file)
    killed = tmp_path / "killed"
    process, metrics = begin(killed), killed / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") > 3):
        time.sleep(0.005)
    process.kill()
    assert finish(process)[0] == -signal.SIGKILL
    for workdir in (killed, tmp_path / "whole"):
        code, _, err = finish(begin(workdir))
        assert code == 0 and err == "", err
    assert_same(killed, tmp_path / "whole", place)


@pytest.mark.slow
def test_eight_devices_train_as_one(finished, tmp_path, home, place):
    mesh = {"mesh__data": 2, "mesh__fsdp": 2, "mesh__tensor": 2, "train__rows_per_micro_batch": 4}
    fine_tune_here(tmp_path / "run", home, sft_config(place, **mesh), devices=8)
    for one, many in zip(metrics_of(finished[0]), metrics_of(tmp_path / "run"), strict=True):
        for name in ("loss/train", "loss/heldout", "optimizer/grad_norm"):
            assert (name in one) == (name in many)
            assert one.get(name, 0) == pytest.approx(many.get(name, 0), rel=1e-3), (one, name)


@pytest.mark.slow
def test_two_processes_train_as_one(finished, tmp_path, home, place):
    file, workdir = write_values(tmp_path, sft_dict(place, mesh__data=2)), tmp_path / "run"
    settings = {"processes": 2, "devices": 1, "program": LAUNCH, "config": file}
    for process in start_all(workdir, home, **settings):
        code, _, err = finish(process)
        assert code == 0, err
    for one, many in zip(metrics_of(finished[0]), metrics_of(workdir), strict=True):
        name = "loss/train" if one["step"] else "loss/heldout"
        assert one[name] == pytest.approx(many[name], rel=1e-3), one["step"]
    files = (run / "model" / "model.safetensors" for run in (workdir, finished[0]))
    ours, whole = map(load_file, files)
    for name, value in whole.items():
        np.testing.assert_allclose(ours[name], value, atol=1e-3)


def test_a_dapo_run_starts_from_the_model(finished, tmp_path, home, place):
    """config.model.path is the directory of the run, or the model in it."""
    workdir = finished[0]
    file = write_config(tmp_path / "config", train__num_steps=1)
    config = load_config(str(file), {}, model=str(workdir))
    inner = load_config(str(file), {}, model=str(workdir / "model"))
    place_of = {"path": str(workdir), "tokenizer": str(workdir)}
    assert config.model == dataclasses.replace(inner.model, **place_of)
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    loaded = hf_weights.load(config.model, param_shardings(config.model, config.mesh, mesh))
    ours = params_of(workdir, STEPS, place)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(loaded), ours)
    _, out = run_here(tmp_path / "run", home, config=config)
    assert str(workdir) in out and "random parameters" not in out
    assert [numbers["step"] for numbers in metrics_of(tmp_path / "run")] == [0, 1]


def test_other_data_and_another_config_are_refused(finished, tmp_path, home, place):
    before = (finished[0] / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match=r"optimizer.learning_rate: 0.01 there, 0.5 now"):
        fine_tune_here(finished[0], home, sft_config(place, optimizer__learning_rate=0.5))
    with pytest.raises(UserError, match=r"num_steps is 3, and the run in .* is past it, at step 6"):
        fine_tune_here(finished[0], home, sft_config(place, train__num_steps=3))
    workdir = tmp_path / "run"
    shutil.copytree(finished[0], workdir)
    config = sft_config(place, train__num_steps=7)
    rows = (place / "sums.jsonl").read_text()
    try:
        for answer in (5, 8):  # of an example to train on, and of the held-out ones
            (place / "sums.jsonl").write_text(rows.replace(f"Answer: {answer}", "Answer: 7"))
            with pytest.raises(UserError, match="config.data: the examples are not those of the"):
                fine_tune_here(workdir, home, config)
    finally:
        (place / "sums.jsonl").write_text(rows)
    assert (finished[0] / "metrics.jsonl").read_bytes() == before


def test_a_run_of_more_steps_has_no_model_until_its_end(
    finished, tmp_path, home, place, monkeypatch
):
    """That of fewer steps would be taken for its own."""
    workdir = tmp_path / "run"
    shutil.copytree(finished[0], workdir)

    def crash(*_):
        raise Crash

    monkeypatch.setattr(sft.FineTuning, "_one_step", crash)
    with pytest.raises(Crash):
        fine_tune_here(workdir, home, sft_config(place, train__num_steps=STEPS + 1))
    assert not (workdir / "model").exists()


def test_a_run_starts_from_the_model_of_another_and_divergence_ends_it(
    finished, tmp_path, home, place
):
    """Its base loss is the final loss of the run before."""
    file = write_values(tmp_path, sft_dict(place, optimizer__learning_rate=1e38))
    config = dapo_jax.load_sft_config(str(file), model=finished[0])
    with pytest.raises(RunError, match=r"is (nan|inf) at step \d.*learning_rate"):
        fine_tune_here(tmp_path / "run", home, config)
    summary = json.loads((finished[0] / "summary.json").read_text())
    base_loss = metrics_of(tmp_path / "run")[0]["loss/heldout"]
    assert base_loss == pytest.approx(summary["final_loss"], rel=1e-6)
    assert not (tmp_path / "run" / "model").exists()


def test_mistakes_on_the_command_line_are_named(tmp_path, place, capsys):
    file = write_values(tmp_path, sft_dict(place))
    arguments = ["program", f"--config={file}", f"--workdir={tmp_path / 'run'}"]
    for argument, message in (
        ("--config.train.row_tokens=4", r"sums, example 1 has \d+ tokens, .*row_tokens \(4\)"),
        ("--config.train.steps=4", "config.train.steps is not a field"),
        ("--config.data.train.sums.path=none.jsonl", "there is no file .*none.jsonl"),
        ("--config.data.heldout_share=0.99", r"heldout_share \(0.99\) of 10 different prompts"),
        ("--config.mesh.data=3", "config.mesh .data=3"),
        ("--model=nowhere", "config.model.path: there is no directory .*nowhere"),
    ):
        assert launch([*arguments, argument]) == 2
        err = capsys.readouterr().err
        assert "Traceback" not in err and re.search(message, err), err


def test_the_function_of_the_public_interface(tmp_path, place, finished, monkeypatch):
    """Its record has the metrics and the summary, and a config file is read as one of its kind."""
    file = write_values(tmp_path, sft_dict(place))
    config = dapo_jax.load_sft_config(str(file), {"train.num_steps": STEPS})
    monkeypatch.setattr(sft, "make_mesh", lambda mesh: make_mesh(mesh, jax.devices()[:1]))
    with jax.numpy_dtype_promotion("standard"):
        run = dapo_jax.sft(config, finished[0])  # done: the model and the summary are written again
    assert run.summary["steps"] == STEPS
    before = saved(finished[0], STEPS, place)[1]["host"]["seconds"]
    assert run.summary["seconds"] > before, "those of every start"
    assert [line["step"] for line in run.metrics] == list(range(STEPS + 1))


@pytest.mark.slow
def test_adapters_are_tuned_resumed_and_merged(finished, tmp_path, home, place, monkeypatch):
    """On the model of another run; a third run starts from what is written, at the same loss."""
    file = write_values(tmp_path, sft_dict(place))
    more = {"model.lora_rank": 2, "optimizer.learning_rate": 0.003}
    load = lambda path, changes: load_config(
        str(file), changes, model=str(path), kind=type(sft_config(place))
    )
    config, real = load(finished[0], more), sft.FineTuning._one_step

    def signalled(self, step, state, host):
        if step == 4:
            signal.raise_signal(signal.SIGTERM)
        return real(self, step, state, host)

    fine_tune_here(tmp_path / "whole", home, config)
    with monkeypatch.context() as patch:
        patch.setattr(sft.FineTuning, "_one_step", signalled)
        assert fine_tune_here(tmp_path / "stopped", home, config)[0] == signal.SIGTERM
    assert "resuming after step 4" in fine_tune_here(tmp_path / "stopped", home, config)[1]
    steps = metrics_of(tmp_path / "whole")
    assert metrics_of(tmp_path / "stopped") == steps
    before, after = metrics_of(finished[0])[-1]["loss/heldout"], steps[-1]["loss/heldout"]
    assert steps[0]["loss/heldout"] == pytest.approx(before, rel=1e-6) and after < before - 0.003
    base = tmp_path / "base"  # another one, of the same name
    shutil.copytree(finished[0] / "model", base)
    with monkeypatch.context() as patch:
        patch.setattr(sft.FineTuning, "_one_step", signalled)
        fine_tune_here(tmp_path / "moved", home, load(base, more))
    shutil.rmtree(base)
    shutil.copytree(tmp_path / "whole" / "model", base)
    written = lambda: (tmp_path / "moved" / "config.json").stat().st_mtime_ns
    left = written()
    with pytest.raises(UserError, match="holds other weights than when"):
        fine_tune_here(tmp_path / "moved", home, load(base, more))
    assert written() == left
    fine_tune_here(tmp_path / "third", home, load(tmp_path / "whole", {"train.num_steps": 1}))
    assert metrics_of(tmp_path / "third")[0]["loss/heldout"] == pytest.approx(after, rel=1e-4)
