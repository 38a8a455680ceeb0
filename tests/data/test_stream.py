"""The stream of problems: epochs, the mixture of sources, and going on from a state."""

import collections
import json
import multiprocessing
import threading

import grain
import pytest

from dapo_jax.data.stream import ProblemStream
from dapo_jax.types import Problem, UserError

WEIGHTS = {"a": 1.0, "b": 2.5, "c": 0.25}


def make_problems(num, source="test", first=0):
    return [Problem(first + i, f"p{i}", (i, i + 1), str(i), source) for i in range(num)]


def make_sources(**nums):
    """Problems of several sources, numbered across them."""
    problems = []
    for source, num in nums.items():
        problems += make_problems(num, source, len(problems))
    return problems


def take_ids(stream, n):
    return [problem.id for problem in stream.take(n)]


def test_epochs_are_different_permutations():
    stream = ProblemStream(make_problems(20), 3)
    epochs = [take_ids(stream, 20) for _ in range(5)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert len(set(map(tuple, [*epochs, range(20)]))) == 6


def test_take_continues_whatever_the_portions():
    problems = make_problems(7)
    whole, parts = ProblemStream(problems, 0), ProblemStream(problems, 0)
    assert whole.take(20) == [p for n in (3, 0, 9, 1, 7) for p in parts.take(n)]
    (only,) = make_problems(1)
    visits = [only._replace(epoch=epoch) for epoch in range(3)]
    assert ProblemStream([only], 0).take(3) == visits


def test_order_depends_on_the_seed():
    orders = [take_ids(ProblemStream(make_problems(20), seed), 60) for seed in (0, 1, 2, 2**40)]
    assert take_ids(ProblemStream(make_problems(20), 1), 60) == orders[1]
    # No epoch of one seed is an epoch of another either.
    epochs = [tuple(order[i : i + 20]) for order in orders for i in (0, 20, 40)]
    assert len(set(epochs)) == 12


@pytest.mark.parametrize("seed", [0, 7])
def test_one_source_has_the_order_it_had_before_there_were_several(seed):
    """A run of a single source is what it was: its checkpoints and its figures."""
    before = grain.MapDataset.source(range(30)).seed(seed).shuffle().repeat()
    wanted = [int(before[i]) for i in range(70)]
    assert take_ids(ProblemStream(make_problems(30), seed), 70) == wanted
    assert take_ids(ProblemStream(make_problems(30), seed, {"test": 0.3}), 70) == wanted
    mixed = ProblemStream(make_sources(test=30, more=12), seed)
    assert [p.id for p in mixed.take(140) if p.source == "test"] == wanted


def test_sources_take_turns_by_weight():
    problems = make_sources(a=1000, b=500, c=2000)
    taken = ProblemStream(problems, 0, WEIGHTS).take(3000)
    counts = collections.Counter(problem.source for problem in taken)
    for source, weight in WEIGHTS.items():
        assert abs(counts[source] / 3000 - weight / 3.75) < 0.01 * weight / 3.75
    # In turns, so that every batch is mixed: b, which has two thirds, is in every ten.
    assert all("b" in {p.source for p in taken[i : i + 10]} for i in range(0, 3000, 10))


def test_without_weights_sources_take_equal_turns():
    taken = ProblemStream(make_sources(a=300, b=200, c=100), 0).take(600)
    assert collections.Counter(p.source for p in taken) == {"a": 200, "b": 200, "c": 200}


def test_every_source_has_epochs_of_its_own():
    """Its n problems once each as epoch 0, then once each as epoch 1, however the others fare."""
    nums = {"a": 30, "b": 40, "c": 50}
    problems = make_sources(**nums)
    taken = ProblemStream(problems, 4, WEIGHTS).take(400)
    for source, num in nums.items():
        visits = [p for p in taken if p.source == source]
        of_source = {p.id for p in problems if p.source == source}
        for epoch in range(len(visits) // num):
            part = visits[epoch * num : (epoch + 1) * num]
            assert {p.id for p in part} == of_source and {p.epoch for p in part} == {epoch}
        rest = visits[len(visits) // num * num :]
        assert len({p.id for p in rest}) == len(rest)
    epochs = {source: max(p.epoch for p in taken if p.source == source) for source in nums}
    assert epochs == {"a": 3, "b": 6, "c": 0}
    assert {problem._replace(epoch=0) for problem in taken} <= set(problems)


def test_sources_of_one_length_have_different_orders():
    taken = ProblemStream(make_sources(a=20, b=20), 0).take(40)
    a, b = ([p.prompt for p in taken if p.source == source] for source in "ab")
    assert sorted(a) == sorted(b) and a != b


@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize("taken", [0, 7, 100])
def test_state_continues_exactly(taken, weights):
    problems = make_sources(a=45) if weights is None else make_sources(a=30, b=40, c=50)
    stream = ProblemStream(problems, 5, weights)
    stream.take(taken)
    state = json.loads(json.dumps(stream.get_state()))
    expected = stream.take(60)
    stream.set_state(state)
    assert stream.take(60) == expected
    resumed = ProblemStream(problems, 5, weights)
    resumed.take(2)
    resumed.set_state(state)
    assert resumed.get_state() == state
    assert resumed.take(60) == expected


OTHER_METADATA = [p._replace(metadata={"x": 1}) for p in make_sources(a=7, b=3)]


@pytest.mark.parametrize(
    "problems, seed, weights, field",
    [
        (make_sources(a=7, b=3), 6, {"a": 1.0, "b": 2.0}, "config.seed"),
        (make_sources(a=7, b=4), 5, {"a": 1.0, "b": 2.0}, "config.data"),
        (make_sources(a=3, b=7), 5, {"a": 1.0, "b": 2.0}, "config.data"),
        (make_sources(a=7, c=3), 5, {"a": 1.0, "c": 2.0}, "config.data"),
        (make_sources(a=7, b=3), 5, {"a": 1.0, "b": 3.0}, "config.data"),
        (make_sources(a=7, b=3), 5, None, "config.data"),
        (OTHER_METADATA, 5, {"a": 1.0, "b": 2.0}, "config.data"),
    ],
)
def test_state_of_other_data_is_refused(problems, seed, weights, field):
    state = ProblemStream(make_sources(a=7, b=3), 5, {"a": 1.0, "b": 2.0}).get_state()
    stream = ProblemStream(problems, seed, weights)
    before = stream.get_state()
    with pytest.raises(UserError, match=f"^{field}: .*Restore {field} and its files"):
        stream.set_state(state)
    assert stream.get_state() == before
    same = ProblemStream(make_sources(a=7, b=3), 5, {"b": 2.0, "a": 1.0})
    same.set_state(state)


def test_every_process_sees_this_order_without_threads():
    """Whatever its hash seed: a run resumed elsewhere continues here."""
    problems = [problem._replace(source="ab"[problem.id % 2]) for problem in make_problems(20)]
    before = threading.active_count()
    stream = ProblemStream(problems, 11, {"a": 2.0, "b": 1.0})  # kept, and its threads with it
    wanted = [6, 2, 19, 16, 8, 15, 12, 10, 9, 18, 4, 1, 14, 0, 3, 6, 10, 5, 2, 0, 7, 4, 8, 11, 16]
    assert take_ids(stream, 25) == wanted
    assert threading.active_count() == before and not multiprocessing.active_children()
