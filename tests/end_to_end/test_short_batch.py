"""Parts of the training loop: short batches, random keys, the accuracy of a checkpoint."""

import contextlib
import functools
import types

import jax
import pytest

from dapo_jax import train_loop
from dapo_jax.rollout.dynamic_sampling import DynamicSamplingState
from dapo_jax.setup import HostState
from dapo_jax.train_loop import TrainLoop
from dapo_jax.training.schedule import Schedule
from dapo_jax.types import RunError
from tests.support.helpers import make_group, tiny_config


def train_on(num_groups, exhausted):
    """(groups trained on, lines said) by a step that found `num_groups` of the 4 groups wanted."""
    said = []
    config = tiny_config(dynamic_sampling__exhausted=exhausted, train__prompts_per_step=4)
    shown = types.SimpleNamespace(say=said.append)
    stage = types.SimpleNamespace(config=config)
    loop = types.SimpleNamespace(stage=stage, progress=shown, telemetry=shown)
    groups = [make_group([True, False], id=i) for i in range(num_groups)]
    return TrainLoop._groups_to_train(loop, groups, 7), said  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("exhausted, trained", [("train", 3), ("skip", 0)])
def test_a_short_batch_is_trained_on_or_skipped(exhausted, trained):
    groups, said = train_on(3, exhausted)
    assert len(groups) == trained
    assert said == [
        "  warning: step 7: 3 of 4 groups from 32 prompts; "
        + ("training on those" if trained else "no update")
    ]


def test_a_short_batch_stops_the_run():
    with pytest.raises(RunError, match=r"step 7: 3 of 4 .*exhausted is 'stop'.*max_prompts"):
        train_on(3, "stop")


@pytest.mark.parametrize("exhausted", ["train", "skip", "stop"])
def test_a_full_batch_is_trained_on(exhausted):
    groups, said = train_on(4, exhausted)
    assert len(groups) == 4 and not said


def test_a_group_without_a_greedy_baseline_is_left_out():
    """The second greedy response has no verdict, the third has logits that are no numbers."""
    groups = [make_group([True, False], id=i) for i in range(4)]
    right, unjudged, invalid, wrong = (make_group([i < 3], id=i) for i in range(4))
    verdict = unjudged.verdicts[0]._replace(note="timeout")
    response = invalid.responses[0]._replace(finish_reason="invalid")
    greedy = [
        right,
        unjudged._replace(verdicts=(verdict,)),
        invalid._replace(responses=(response,)),
        wrong,
    ]
    collector = types.SimpleNamespace(seconds={}, collect=lambda *_, **__: greedy)
    engine = types.SimpleNamespace(weights=lambda *_: contextlib.nullcontext())
    run = types.SimpleNamespace(
        engine=engine, train_rubrics={}, collector=lambda *_, **__: collector
    )
    said = []
    quiet = lambda *_: None
    loop = types.SimpleNamespace(
        stage=(tiny_config(objective__advantage="remax"), run, None),
        pool=None,
        telemetry=types.SimpleNamespace(say=said.append, phase=quiet, add_seconds=quiet),
        _key=quiet,
    )
    learner = types.SimpleNamespace(policy=types.SimpleNamespace(all_params=None))
    with_baselines = TrainLoop._with_baselines
    kept, baselines = with_baselines(loop, groups, learner, 7)  # pyright: ignore[reportArgumentType]
    assert [group.problem.id for group in kept] == [0, 3] and baselines == [1.0, -1.0]
    assert said == ["  warning: step 7: 2 groups without a baseline"]


def test_a_step_without_groups_makes_no_update():
    groups, said = train_on(0, "train")
    assert not groups
    assert said == ["  warning: step 7: 0 of 4 groups from 32 prompts; no update"]


def test_a_checkpoint_has_the_accuracy_of_its_own_evaluation_or_none():
    """Evaluated are every second step and the last."""
    saved = []
    checkpoints = types.SimpleNamespace(
        save=lambda step, *_, accuracy: saved.append((step, accuracy))
    )
    for step in (2, 3, 4, 5):
        config = tiny_config(train__num_steps=5, evaluation__every_steps=2)
        watched = types.SimpleNamespace(watchdog=types.SimpleNamespace(), phase=lambda _: None)
        loop = types.SimpleNamespace(
            config=config, saved_step=-1, begun=0.0, telemetry=watched, checkpoints=checkpoints
        )
        loop._is_evaluated = functools.partial(TrainLoop._is_evaluated, loop)
        host = HostState(
            {}, DynamicSamplingState(), 0.1, 0.5, Schedule(step, 0.0, 0.0), 0.0, 0.0, ""
        )
        learner = types.SimpleNamespace(saved=None)
        state = types.SimpleNamespace(step=step, learner=learner, host=host)
        for _ in range(2):  # a step that is saved is not saved again
            TrainLoop.save(loop, state)
    assert saved == [(2, 0.5), (3, None), (4, 0.5), (5, 0.5)]


def test_every_stream_of_randomness_has_a_key_for_every_step():
    components = types.SimpleNamespace(key=jax.random.key(0))
    loop = types.SimpleNamespace(stage=types.SimpleNamespace(components=components))
    streams = (train_loop.ROLLOUT_KEY, train_loop.EVALUATION_KEY, train_loop.BASELINE_KEY)
    keys = {
        tuple(jax.random.key_data(TrainLoop._key(loop, stream, step)).tolist())
        for stream in streams
        for step in range(4)
    }
    assert len(keys) == 12
