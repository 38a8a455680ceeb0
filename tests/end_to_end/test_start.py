"""The start of a run: what it compiles and reads, in which order, and how much memory it holds."""

import gc
import json
from unittest import mock

import jax
import pytest

from dapo_jax import train_loop
from dapo_jax.config import Config, hf_config
from dapo_jax.data.tokenizer import load_tokenizer, stop_tokens
from dapo_jax.models import hf_weights
from dapo_jax.runs.checkpoint import Checkpoints
from dapo_jax.training import base_model, step
from dapo_jax.training.learner import Learner
from dapo_jax.types import RunError
from tests.conftest import ROOT
from tests.support.helpers import make_params, tiny_config, tiny_dict
from tests.support.runs import metrics_of, run_here

SETTINGS = {
    "train__num_steps": 1,
    "evaluation__every_steps": 100,
    "reward__workers": 1,
    # Large enough that the device holds little besides parameters.
    "model__num_layers": 1,
    "dynamic_sampling__max_prompts": 8,
    "model__hidden_size": 128,
    "model__intermediate_size": 512,
    "rollout__slots": 8,
    "rollout__prefill_prompts": 8,
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A model in Hugging Face format that the tiny config can train."""
    place = tmp_path_factory.mktemp("model")
    config = tiny_config(**SETTINGS)
    tokenizer = load_tokenizer(config.model, save_to=place)
    hf_weights.save(config.model, make_params(config), place, "float32")
    eos = list(stop_tokens(config.model, tokenizer))
    values = hf_config.to_hf(config.model, eos=eos, bos=None, dtype="float32")
    (place / "config.json").write_text(json.dumps(values))
    return place


def config_of(directory, **changes):
    values = tiny_dict(**SETTINGS | {"pretrain": None} | changes)
    given = dict.fromkeys(hf_config.FIELDS)
    given |= {"path": str(directory), "tokenizer": str(directory)}
    values["model"] = hf_config.filled(values["model"] | given)
    return Config.from_dict(values)


def held():
    """Bytes of all live arrays."""
    gc.collect()
    return sum(x.nbytes for x in jax.live_arrays())


@pytest.fixture
def events(monkeypatch):
    """Calls of starting runs: (name, copies of the parameters that the device held then)."""
    found, before = [], held()
    num_bytes = sum(x.nbytes for x in jax.tree.leaves(make_params(tiny_config(**SETTINGS))))

    def recorded(place, name, label, after=False):
        real = getattr(place, name)

        def call(*args, **kwargs):
            if not after:
                found.append((label, (held() - before) / num_bytes))
            result = real(*args, **kwargs)
            if after:
                found.append((label, (held() - before) / num_bytes))
            return result

        monkeypatch.setattr(place, name, call)

    recorded(Learner, "compile", "compile")
    recorded(base_model, "load_or_make", "read base", after=True)
    recorded(Checkpoints, "restore", "restore", after=True)
    recorded(Checkpoints, "save", "save")
    recorded(train_loop.TrainLoop, "_evaluate", "evaluate")
    recorded(train_loop.TrainLoop, "one_step", "step")
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings, reads, most",
    [
        ({}, [], 3.2),
        ({"objective__kl_coefficient": 0.1, "objective__kl_estimator": "k3"}, ["read base"], 4.2),
    ],
)
def test_a_start_compiles_first_and_a_resumed_one_reads_the_base_where_it_is_the_reference(
    directory, home, tmp_path, events, monkeypatch, settings, reads, most
):
    """The most that is held, in copies of the parameters: a state of Adam is three."""
    progress = tmp_path / "progress"  # what launch/restart.sh reads
    monkeypatch.setenv("DAPO_PROGRESS", str(progress))
    run_here(tmp_path / "run", home, config=config_of(directory, **settings))
    assert progress.read_text() == "1\n"
    names = ["compile", "restore", "read base", "evaluate", "step", "evaluate", "save"]
    assert [name for name, _ in events] == names
    assert dict(events)["read base"] < 1.1
    assert all(copies < most for _, copies in events), events
    assert not (tmp_path / "run" / "checkpoints" / "0").exists()
    events.clear()
    run_here(tmp_path / "run", home, config=config_of(directory, train__num_steps=2, **settings))
    assert [name for name, _ in events][: 3 + len(reads)] == ["compile", "restore", *reads, "step"]
    assert all(copies < most for _, copies in events), events
    assert [numbers["step"] for numbers in metrics_of(tmp_path / "run")] == [0, 1, 2]


def test_the_first_update_compiles_no_program_of_the_updates(home, tmp_path, monkeypatch):
    """A refusal by the compiler comes at the start."""
    compiled = []
    listen = lambda event, seconds, **about: compiled.append(about.get("fun_name"))
    jax.monitoring.register_event_duration_secs_listener(listen)
    real = Learner.train_on

    def train_on(*args, **kwargs):
        assert {"update", "every"} <= set(compiled), compiled
        del compiled[:]
        result = real(*args, **kwargs)
        assert not {"update", "every"} & set(compiled), compiled
        compiled.append("seen")
        return result

    monkeypatch.setattr(Learner, "train_on", train_on)
    settings = {"pretrain__num_steps": 2, "rollout__log_prob_source": "recompute"}
    everything = {"train__num_steps": 1, "dynamic_sampling__enabled": False, "reward__workers": 1}
    run_here(tmp_path / "run", home, **settings, **everything)
    assert "seen" in compiled


def test_a_refusal_by_the_compiler_comes_before_the_base_is_read(directory, home, tmp_path):
    program = mock.Mock()
    program.lower.side_effect = jax.errors.JaxRuntimeError("INTERNAL: RET_CHECK failure")
    with (
        mock.patch.object(step, "jitted_update", return_value=program),
        mock.patch.object(base_model, "load_or_make") as read,
        pytest.raises(RunError, match="do not compile: .*RET_CHECK") as raised,
    ):
        run_here(tmp_path / "run", home, config=config_of(directory))
    assert not raised.value.restart and not read.called


def test_a_scorer_that_judges_no_held_out_response_ends_the_run_before_it_trains(tmp_path, home):
    """And does not stand there as an accuracy of 0 %."""
    scorer = f"{ROOT / 'tests' / 'support' / 'scorers.py'}:broken"
    with pytest.raises(RunError, match="32 of 32 .*ZeroDivisionError.*or that of a source"):
        run_here(tmp_path / "run", home, data__heldout__sums__scorer=scorer, reward__workers=1)
