"""How a run starts: what it compiles and reads, in which order, and how much memory it holds."""

import gc
import json

import jax
import pytest

from dapo_jax import train
from dapo_jax.config import Config, hf_config
from dapo_jax.data.tokenizer import load_tokenizer, stop_tokens
from dapo_jax.models import hf_weights
from dapo_jax.runs.checkpoint import Checkpoints
from dapo_jax.training import base_model
from dapo_jax.training.learner import Learner
from dapo_jax.types import RunError
from tests.support.helpers import make_params, tiny_config, tiny_dict
from tests.support.runs import metrics_of

pytestmark = pytest.mark.usefixtures("standard_promotion")
SETTINGS = {
    "train__num_steps": 1,
    "evaluation__every_steps": 100,
    "reward__workers": 1,
    # Parameters are to be most of what lies on the device.
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
    """Bytes of all arrays there are."""
    gc.collect()
    return sum(x.nbytes for x in jax.live_arrays())


@pytest.fixture
def events(monkeypatch):
    """What starts of runs did: (name, copies of the parameters that lay on the device then)."""
    found, before = [], held()
    num_bytes = sum(x.nbytes for x in jax.tree.leaves(make_params(tiny_config(**SETTINGS))))

    def told(place, name, label, after=False):
        real = getattr(place, name)

        def call(*args, **kwargs):
            if not after:
                found.append((label, (held() - before) / num_bytes))
            result = real(*args, **kwargs)
            if after:
                found.append((label, (held() - before) / num_bytes))
            return result

        monkeypatch.setattr(place, name, call)

    told(Learner, "compile", "compile")
    told(base_model, "load_or_make", "read base", after=True)
    told(Checkpoints, "restore", "restore", after=True)
    told(Checkpoints, "save", "save")
    told(train.TrainLoop, "_evaluate", "evaluate")
    told(train.TrainLoop, "one_step", "step")
    return found


def labels(events):
    return [name for name, _ in events]


def test_a_start_compiles_first_and_a_resumed_one_reads_no_base(
    directory, tmp_path, events, monkeypatch
):
    """In copies of the parameters: a state of Adam is three. Before, a resumed start held 7 (the
    base, a fresh state and the restored one), and the first evaluation 4."""
    progress = tmp_path / "progress"  # what launch/restart.sh reads
    monkeypatch.setenv("DAPO_PROGRESS", str(progress))
    train.train(config_of(directory), tmp_path / "run")
    assert progress.read_text() == "1\n"
    assert labels(events) == [
        "compile", "restore", "read base", "evaluate", "step", "evaluate", "save",
    ]  # fmt: skip
    assert dict(events)["read base"] < 1.1
    assert all(copies < 3.2 for _, copies in events), events
    assert not (tmp_path / "run" / "checkpoints" / "0").exists()
    events.clear()
    train.train(config_of(directory, train__num_steps=2), tmp_path / "run")
    assert labels(events)[:3] == ["compile", "restore", "step"]
    assert all(copies < 3.2 for _, copies in events), events
    assert [numbers["step"] for numbers in metrics_of(tmp_path / "run")] == [0, 1, 2]


def test_a_resumed_start_reads_the_base_where_it_is_the_reference(directory, tmp_path, events):
    settings = {"objective__kl_coefficient": 0.1, "objective__kl_estimator": "k3"}
    train.train(config_of(directory, **settings), tmp_path / "run")
    events.clear()
    train.train(config_of(directory, train__num_steps=2, **settings), tmp_path / "run")
    assert labels(events)[:4] == ["compile", "restore", "read base", "step"]
    assert all(copies < 4.2 for _, copies in events), events


@pytest.mark.parametrize("settings", [{}, {"rollout__log_prob_source": "recompute"}])
def test_the_first_update_compiles_no_program_of_the_updates(tmp_path, settings, monkeypatch):
    """A refusal by the compiler comes at the start."""
    compiled = []
    listen = lambda event, seconds, **about: compiled.append(about.get("fun_name"))
    jax.monitoring.register_event_duration_secs_listener(listen)
    real = Learner.train_on

    def train_on(*args, **kwargs):
        del compiled[:]
        result = real(*args, **kwargs)
        assert not {"update", "every"} & set(compiled), compiled
        compiled.append("seen")
        return result

    monkeypatch.setattr(Learner, "train_on", train_on)
    short = {"pretrain__num_steps": 2, "train__num_steps": 1}
    everything = {"dynamic_sampling__enabled": False, "reward__workers": 1}
    train.train(tiny_config(**short, **everything, **settings), tmp_path / "run")
    assert "seen" in compiled


def test_a_refusal_by_the_compiler_comes_before_the_base_is_read(directory, tmp_path, monkeypatch):
    def refuse(learner):
        raise jax.errors.JaxRuntimeError("INTERNAL: RET_CHECK failure")

    def read(*args, **kwargs):
        pytest.fail("the base was read")

    monkeypatch.setattr(Learner, "compile", refuse)
    monkeypatch.setattr(base_model, "load_or_make", read)
    with pytest.raises(RunError, match="do not compile: .*RET_CHECK") as told:
        train.train(config_of(directory), tmp_path / "run")
    assert not told.value.restart
