"""Stages: fields that change at a rollout step, in one run that resumes bit for bit."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

from dapo_jax.rollout.engine_config import make_engine_config
from dapo_jax.train_loop import TrainLoop
from dapo_jax.training.schedule import Schedule
from dapo_jax.types import RunError, UserError
from tests.algorithms.test_policy_losses import configured
from tests.end_to_end.test_runs import CARRY
from tests.support.helpers import tiny_config
from tests.support.runs import metrics_of, params_at, rollouts_of, run_here

LONGER = {"rollout.max_response_tokens": 40, "train.row_tokens": 72}
COOLER = {"rollout.temperature": 0.5, "rollout.group_size": 6}
STAGES = (
    (2, LONGER),
    (4, COOLER | {"objective.clip_high": 0.4, "objective.reward_kl_coefficient": 0.01}),
)
RUN = {
    "objective__reward_kl_coefficient": 0.1,
    "stages": STAGES,
    "train__num_steps": 5,
    "evaluation__every_steps": 5,
    "checkpoint__keep_newest": 10,
    "dynamic_sampling__enabled": False,
}


def test_changes_add_up_from_stage_to_stage():
    config = tiny_config(**RUN)
    base = tiny_config(**RUN | {"stages": ()})
    assert config.at(1) == base
    of = lambda step: (
        config.at(step).rollout.max_response_tokens,
        config.at(step).train.row_tokens,
        config.at(step).rollout.temperature,
        config.at(step).objective.clip_high,
    )
    assert [of(step) for step in range(1, 6)] == [
        (32, 64, 1.0, 0.28),
        (40, 72, 1.0, 0.28),
        (40, 72, 1.0, 0.28),
        (40, 72, 0.5, 0.4),
        (40, 72, 0.5, 0.4),
    ]
    third = config.at(3)
    assert dataclasses.replace(third, rollout=base.rollout, train=base.train) == base
    assert type(config).from_dict(config.to_dict()) == config


def test_a_stage_sets_the_coefficients_that_it_names():
    schedule = Schedule(7, 0.2, 0.3)
    assert schedule.in_stage({"rollout.temperature": 0.5}) == schedule
    changes = {"objective.entropy_coefficient": 0.0}
    assert schedule.in_stage(changes) == Schedule(7, 0.2, 0.0)
    assert schedule.in_stage({"objective.reward_kl_coefficient": 0.1}) == Schedule(7, 0.1, 0.3)


def test_a_stage_changes_one_argument_of_a_method():
    stages = (
        (2, {"objective.loss_args.tau_positive": 2.0}),
        (3, {"objective.loss": "dro", "objective.loss_args.dro_beta": 0.5}),
    )
    args = {"tau_positive": 1.0, "tau_negative": 1.5}
    config = tiny_config(**configured("sapo") | {"objective__loss_args": args}, stages=stages)
    found = [dict(config.at(step).objective.loss_args) for step in (1, 2, 3)]
    assert found == [args, args | {"tau_positive": 2.0}, {"dro_beta": 0.5}]


def test_a_stage_of_another_method_begins_with_its_own_arguments():
    changes = {"objective.advantage": "opo", "objective.loss": "gspo"}
    changes["objective.clip_dual"] = None
    of = tiny_config(stages=((2, changes),)).at(2).objective
    assert (of.advantage, dict(of.advantage_args)) == ("opo", {})
    changes = {"objective.advantage_args": {"normalise_std": False}, "objective.advantage": "grpo"}
    of = tiny_config(stages=((2, changes), (3, {"objective.advantage": "grpo"}))).at(3).objective
    assert not of.advantage_args["normalise_std"], "the same method keeps them"


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (((1, {}),), "from step 1 on must begin after step 1"),
        (((3, {}), (3, {})), "from step 3 on must begin after step 3"),
        (((2, {"reward.workers": 8}),), "cannot change 'reward.workers'"),
        (((2, {"model.lora_rank": 8}),), "cannot change 'model.lora_rank'"),
        (((2, {"temperature": 0.5}),), "cannot change 'temperature'"),
        (((2, {"rollout": 0.5}),), "cannot change 'rollout'. A stage changes fields, such as"),
        (((2, {3: 0.5}),), "cannot change 3. A stage changes fields, such as"),
        (((2, {"rollout.heat": 0.5}),), "from step 2 on: config.rollout.heat is not a field"),
        (((2, {"rollout.temperature": -1.0}),), "from step 2 on: config.rollout.temperature must"),
        (
            ((2, {"rollout.max_response_tokens": 60}),),
            r"from step 2 on: config.train.row_tokens \(64\) is shorter",
        ),
        (
            ((2, {"objective.kl_coefficient": 0.1, "objective.kl_estimator": "k3"}),),
            "cannot change config.objective.kl_coefficient from 0.0 to 0.1",
        ),
    ],
)
def test_mistakes_name_the_stage_and_the_field(stages, message):
    with pytest.raises(UserError, match=f"config.stages: the stage .*{message}"):
        tiny_config(stages=stages)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, home):
    workdir = tmp_path_factory.mktemp("stages") / "whole"
    return workdir, run_here(workdir, home, **RUN)[1]


def test_every_step_has_the_fields_of_its_stage(whole):
    workdir, out = whole
    longest = [numbers["length/max"] for numbers in metrics_of(workdir)[1:]]
    assert longest[0] == 32 and longest[1] == longest[2] == 40, longest
    assert "step 2 begins a stage: rollout.max_response_tokens 40, train.row_tokens 72" in out
    fourth = "rollout.temperature 0.5, rollout.group_size 6, objective.clip_high 0.4, objective.re"
    assert f"step 4 begins a stage: {fourth}" in out
    coefficients = [numbers["reward/kl_coefficient"] for numbers in metrics_of(workdir)[1:]]
    assert coefficients == [0.1, 0.1, 0.1, 0.01, 0.01]
    entropy = [numbers["policy/entropy"] for numbers in metrics_of(workdir)[1:]]
    lines = (workdir / "pass_rates.jsonl").read_text().splitlines()
    visits = [json.loads(line)["visits"] for line in lines]
    assert [{of[3] for of in step} for step in visits] == [{4}, {4}, {4}, {6}, {6}]
    assert entropy[3] < 0.8 * entropy[2], "the temperature has no effect"


@pytest.mark.parametrize("stop", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_run_resumes_in_its_stage(whole, stop, tmp_path, home):
    """Stopped where the next step begins a stage: at 1 and at 3. The base is made or found again:
    that of the first step, although the stage has longer responses."""
    workdir = tmp_path / "parts"
    run_here(workdir, home, **RUN | {"train__num_steps": stop})
    shutil.rmtree(workdir / "base")
    run_here(workdir, home, **RUN)
    assert rollouts_of(workdir) == rollouts_of(whole[0])
    jax.tree.map(np.testing.assert_array_equal, params_at(workdir, 5), params_at(whole[0], 5))


@pytest.mark.slow
def test_a_stage_begins_with_new_responses_where_they_are_carried(tmp_path, home):
    settings = RUN | CARRY | {"evaluation__every_steps": 5}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_here(whole, home, **settings)
    carried = [numbers["carry/tokens_kept"] for numbers in metrics_of(whole)[1:]]
    ages = [numbers["batch/staleness_max"] for numbers in metrics_of(whole)[1:]]
    assert carried[0] > 0 and carried[2] > 0, carried
    assert ages[1] == ages[3] == 0 < max(ages), ages
    run_here(parts, home, **settings | {"train__num_steps": 3})
    run_here(parts, home, **settings)
    assert rollouts_of(parts) == rollouts_of(whole)


def test_a_stage_that_cannot_begin_ends_the_run_at_its_start(tmp_path, home):
    """One prompt of 24 tokens and a sequence fit the cache in the first stage alone."""
    config = tiny_config(**RUN, rollout__page_tokens=16)
    sizes = {"data": 1, "fsdp": 1, "context": 1, "tensor": 1}
    page = make_engine_config(config, sizes, 24, (1,), platform="cpu").pages_bytes(1)
    pages = lambda tokens: 1 + 2 + -(-(24 + tokens) // 16) + 2
    cache = (pages(32) + 0.5) * page / 2**30
    assert pages(32) < pages(80)
    settings = {"rollout__page_tokens": 16, "rollout__cache_gib": cache}
    longer = {"rollout.max_response_tokens": 80, "train.row_tokens": 112}
    message = r"config.stages: the stage from step 2 on: config.rollout.cache_gib"
    with pytest.raises(UserError, match=message):
        run_here(tmp_path / "run", home, **RUN | settings | {"stages": ((2, longer),)})
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_stage_whose_phrase_the_tokenizer_lacks_ends_the_run_at_its_start(tmp_path, home):
    stages = ((2, {"rollout.end_of_thinking": (4, "</think>")}),)
    with pytest.raises(
        UserError, match="config.stages: the stage from step 2 on: .*end_of_thinking"
    ):
        run_here(tmp_path / "run", home, **RUN | {"stages": stages})
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_the_step_before_a_stage_is_saved(tmp_path, home, monkeypatch):
    """Whatever happens while the stage's programs are compiled."""
    make = TrainLoop._make_stage

    def fails(loop, step):
        if step == 2:
            raise RunError("refused by the compiler")
        return make(loop, step)

    monkeypatch.setattr(TrainLoop, "_make_stage", fails)
    with pytest.raises(RunError, match="refused"):
        run_here(tmp_path / "run", home, **RUN | {"checkpoint__every_steps": 5})
    assert (tmp_path / "run" / "checkpoints" / "1").exists()


@pytest.mark.slow
def test_later_stages_may_change_and_earlier_ones_may_not(whole, tmp_path, home):
    workdir = tmp_path / "changed"
    run_here(workdir, home, **RUN | {"train__num_steps": 3})
    other = (*STAGES[:1], (5, {"rollout.temperature": 0.7}))
    run_here(workdir, home, **RUN | {"stages": other, "train__num_steps": 4})
    with pytest.raises(UserError, match="config.stages"):
        run_here(workdir, home, **RUN | {"stages": ((2, {"rollout.temperature": 0.7}),)})
