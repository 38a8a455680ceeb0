"""Which groups make the batch, and in which order."""

import dataclasses
import json

import numpy as np
import pytest

from dapo_jax.dynamic_sampling import (
    SamplingState,
    round_size,
    sample_batch,
    state_from_json,
    state_to_json,
    stream_batch,
)
from dapo_jax.types import Problem
from tests.helpers import make_group, tiny_config

CONFIG = tiny_config(
    dynamic_sampling__max_rounds=5,
    dynamic_sampling__max_round_prompts=8,
    dynamic_sampling__surplus="carry",
).dynamic_sampling


class World:
    """Problems 0, 1, 2, ... whose groups are all right, all wrong or mixed by `kinds`."""

    def __init__(self, kinds):
        self.kinds, self.next = kinds, 0
        self.rounds = []

    def take(self, n):
        first, self.next = self.next, self.next + n
        return [Problem(i, "", (1,), "", "") for i in range(first, self.next)]

    def sample(self, problems):
        self.rounds.append(len(problems))
        kinds = {"r": [True] * 4, "w": [False] * 4, "m": [True, False, False, True]}
        return [make_group(kinds[self.kinds[p.id % len(self.kinds)]], id=p.id) for p in problems]


def run(kinds, state=None, *, num=4, config=CONFIG):
    world = World(kinds)
    batch, state = sample_batch(
        config,
        state or SamplingState(),
        num_prompts=num,
        seed=0,
        take=world.take,
        sample=world.sample,
    )
    return batch, state, world


def ids(groups):
    return [group.problem.id for group in groups]


def test_only_informative_groups_in_prompt_order():
    batch, _, world = run("rwmmmwwrmmmm")
    assert ids(batch.groups) == [2, 3, 4, 8]
    assert len(batch.sampled) == world.next and batch.rounds == len(world.rounds) > 1


def test_surplus_is_carried_first_or_dropped():
    batch, state, _ = run("m")
    assert ids(batch.groups) == [0, 1, 2, 3] and batch.surplus == 0
    state = SamplingState((make_group([True, False], id=99),) * 6, 1.0)
    batch, after, world = run("m", state)
    assert ids(batch.groups) == [99] * 4 and world.rounds == [] and batch.carried_in == 6
    assert ids(after.carried) == [99, 99] and batch.surplus == 2
    drop = dataclasses.replace(CONFIG, surplus="drop")
    batch, after, _ = run("m", state, config=drop)
    assert after.carried == () and batch.surplus == 2


def test_running_out_of_rounds_returns_what_there_is():
    batch, _, world = run("w")
    assert batch.groups == [] and batch.rounds == CONFIG.max_rounds == len(world.rounds)


def test_switched_off_keeps_everything():
    off = dataclasses.replace(CONFIG, enabled=False)
    batch, _, world = run("rwmw", config=off)
    assert ids(batch.groups) == [0, 1, 2, 3] and world.rounds == [4]


def test_the_filter_looks_at_correctness_not_at_reward():
    """All wrong, of unequal length and so of unequal shaped reward: not informative."""
    group = make_group([False] * 4, lengths=[3, 10, 30, 32], truncated=1)
    verdicts = tuple(v._replace(reward=-1.0 - i) for i, v in enumerate(group.verdicts))
    assert not group._replace(verdicts=verdicts).informative
    assert not make_group([True] * 4).informative and make_group([True, False]).informative


@pytest.mark.parametrize(
    "missing, share, expected",
    [(4, 1.0, 4), (4, 0.5, 8), (3, 0.9, 4), (4, 0.0, 8), (1, 0.01, 8), (1, 1.0, 1)],
)
def test_round_size(missing, share, expected):
    assert round_size(missing, share, 8) == expected


def test_state_survives_json_bit_for_bit():
    group = make_group([True, False])
    odd = np.array([-1 / 3, -1e-30, -123.456], np.float32)
    response = group.responses[0]._replace(log_probs=odd)
    state = SamplingState((group._replace(responses=(response, group.responses[1])),), 0.1 + 0.2)
    back = state_from_json(json.loads(json.dumps(state_to_json(state))))
    assert back.kept_share == state.kept_share
    assert back.carried[0].problem == group.problem and back.carried[0].verdicts == group.verdicts
    assert back.carried[0].responses[0].log_probs.tobytes() == odd.tobytes()
    assert back.carried[0].responses[0].tokens.tolist() == response.tokens.tolist()


def stream(kinds, seed, state=None, *, num=4):
    """A batch of a stream whose groups end in an order of their own, up to six at once."""
    world, rng = World(kinds), np.random.default_rng(seed)
    config = dataclasses.replace(CONFIG, surplus="return")
    begun = []

    def draw(stream, problems):
        drawing, over = [], False
        while not stream.full and not (over and not drawing):
            while len(drawing) < 6 and not over:
                problem = next(problems, "over")
                if problem in (None, "over"):
                    over = problem == "over"
                    break
                begun.append(problem.id)
                drawing.append((len(begun) - 1, problem))
            number, problem = drawing.pop(rng.integers(len(drawing)))
            (group,) = world.sample([problem])
            stream.scored(number, group)

    batch, state = stream_batch(
        config, state or SamplingState(), num_prompts=num, step=1, seed=0, take=world.take,
        position=lambda: world.next, go_back=lambda place: setattr(world, "next", place), draw=draw,
    )  # fmt: skip
    return batch, state, world, begun


@pytest.mark.parametrize("share", [1.0, 0.3])
def test_a_stream_takes_the_first_informative_groups_whatever_ends_first(share):
    expected = [2, 3, 4, 8]
    for seed in range(20):
        batch, state, world, begun = stream("rwmmmwwrmmmm", seed, SamplingState((), share))
        assert ids(batch.groups) == expected and ids(batch.sampled) == list(range(9))
        assert world.next == 9, "the next step begins after the last prompt of this one"
        assert begun == list(range(len(begun))) and batch.returned == len(begun) - 9
        assert state == SamplingState((), 0.5 * 4 / 9 + 0.5 * share)


def test_a_stream_begins_no_more_prompts_than_should_be_needed():
    _, _, _, begun = stream("m", 0)
    assert begun == [0, 1, 2, 3]
    _, _, _, begun = stream("mw", 0, SamplingState((), 0.5))
    assert len(begun) <= 10


def test_a_stream_without_informative_groups_ends():
    batch, _, world, begun = stream("wr", 0)
    assert batch.groups == [] and len(batch.sampled) == world.next == len(begun) == 40
