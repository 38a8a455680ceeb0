"""Resumed responses: stored tokens stay, new ones are the new policy's, every token has its
version."""

import functools
import json

import jax
import numpy as np
import pytest

from dapo_jax.models import log_probs
from dapo_jax.rollout.admission import Request, RequestTable
from dapo_jax.rollout.carry import (
    CarriedGroup,
    by_visit,
    max_started,
    next_carried,
    without_stale,
)
from dapo_jax.rollout.dynamic_sampling import DynamicSamplingState, state_from_json, state_to_json
from dapo_jax.types import Problem, Response
from tests.support.engines import CONFIG, KEY, generate, make_engine, make_loop, make_problems
from tests.support.helpers import Sample, make_params, rows_of, tiny_config

NEXT_KEY = jax.random.key(8)


@pytest.fixture(scope="module")
def policies():
    """The parameters of two steps."""
    return make_params(CONFIG), make_params(CONFIG, seed=1)


@pytest.fixture(scope="module")
def problems():
    return make_problems(12)


@pytest.fixture(scope="module")
def engine():
    return make_engine(page_tokens=16, samples=4, num_pages=400, decode_steps=4, resumes=True)


@pytest.mark.parametrize(
    "rate, enabled, number", [(1.0, True, 12), (0.3, True, 42), (0.0, True, 96), (0.3, False, 12)]
)
def test_a_step_begins_what_three_steps_use_up(rate, enabled, number):
    """Four groups a step, of 32 prompts at most; responses may be two steps old."""
    config = tiny_config(rollout__max_staleness=2, dynamic_sampling__enabled=enabled)
    assert max_started(config, rate) == number


def spell(sequences):
    return [" ".join(map(str, sequence)) for sequence in sequences]


def unfinished_after(engine, params, problems, key, num_finished, **more):
    """(problems taken, their responses so far) when the loop is abandoned."""
    loop = make_loop(engine, params, problems, detokenize=spell, key=key, **more)
    finished = 0
    for output in loop.run():
        finished += len(output.finished)
        if finished > num_finished:
            break
    found = loop.unfinished()
    return problems[: len(found)], dict(enumerate(found))


@pytest.fixture(scope="module")
def partial(engine, policies, problems):
    """The responses that step 5 leaves when it is stopped in the middle."""
    left = unfinished_after(engine, policies[0], problems, KEY, 5, step=5)
    return next_carried((), *left, num_tried=0, step=5)


def step_6(partial):
    return dict(detokenize=spell, key=NEXT_KEY, step=6, carried=by_visit(partial))


def assert_begins_with(response, before):
    n = len(before.tokens)
    for name in ("tokens", "log_probs", "model_log_probs"):
        assert getattr(response, name)[:n].tobytes() == getattr(before, name).tobytes()


def test_unfinished_responses_are_beginnings_of_whole_ones(engine, policies, problems, partial):
    whole, _ = generate(engine, policies[0], problems, detokenize=spell)
    finished = unfinished = 0
    for (id, _), responses in partial:
        for sample, response in responses:
            full, n = whole[id][sample], len(response.tokens)
            assert_begins_with(full, response)
            assert response.versions.tolist() == [5] * n
            over = response.finish_reason != "unfinished"
            assert over == (n == len(full.tokens)) and (response.text == full.text) == over
            finished, unfinished = finished + over, unfinished + (not over)
    assert finished > 5 and unfinished > 5


@pytest.fixture(scope="module")
def resumed(engine, policies, problems, partial):
    """(responses, stats, reported ones) of step 6."""
    loop = make_loop(engine, policies[1], problems, **step_6(partial))
    reported = [finished for output in loop.run() for finished in output.finished]
    return loop.responses(), loop.stats, reported


def test_stored_tokens_stay_and_new_ones_have_their_own_version(resumed, partial):
    responses, stats, reported = resumed
    before = by_visit(partial)
    kept = longer = 0
    for q, group in enumerate(responses):
        assert len(group) == 4
        for s, response in enumerate(group):
            old = before.get((q, 0), {}).get(s)
            if old is None:
                assert response.versions is None
                continue
            n, new = len(old.tokens), len(response.tokens) - len(old.tokens)
            assert_begins_with(response, old)
            assert response.versions.tolist() == [5] * n + [6] * new
            assert (new > 0) == (old.finish_reason == "unfinished")
            assert response.finish_reason in ("stop", "length")
            assert response.text == spell([response.tokens])[0]
            kept, longer = kept + n, longer + (new > 0)
    assert longer > 5
    total = sum(len(r.tokens) for group in responses for r in group)
    assert stats.tokens == total - kept, "only new tokens count"
    places = [(finished.prompt, finished.sample) for finished in reported]
    assert sorted(places) == [(q, s) for q in range(len(responses)) for s in range(4)]


def test_log_probs_are_those_of_the_policy_that_sampled_the_token(resumed, policies, problems):
    pairs = [(p, r) for p, group in zip(problems, resumed[0], strict=True) for r in group]

    def packed(column):
        return rows_of(
            [Sample(list(p.prompt_tokens), r.tokens, 1.0, column(r), 0.0) for p, r in pairs], 64
        )

    rows = packed(lambda r: r.log_probs)
    all_new = lambda r: np.full(len(r.tokens), 6.0)
    versions = packed(lambda r: all_new(r) if r.versions is None else r.versions).log_prob_old_BT
    score = jax.jit(functools.partial(log_probs.row_statistics, CONFIG.model, temperature=1.0))
    of_5, of_6 = (
        np.abs(np.asarray(score(params, rows).log_prob_BT) - rows.log_prob_old_BT)
        for params in policies
    )
    for own, other, step in ((of_5, of_6, 5), (of_6, of_5, 6)):
        mine = rows.mask_BT & (versions == step)
        assert mine.sum() > 100 and own[mine].max() < 1e-5 < 0.1 < other[mine].max()


def test_slots_devices_and_preemption_do_not_matter(resumed, policies, problems, partial):
    shards = dict(num_devices=2, data=2, num_pages=12 * 2, slots=10, prefill=2)
    other = make_engine(page_tokens=16, samples=4, resumes=True, **shards)
    responses, stats = generate(other, policies[1], problems, **step_6(partial))
    assert stats.preempted > 0
    for ours, theirs in zip(resumed[0], responses, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a.tokens.tolist() == b.tokens.tolist() and a.finish_reason == b.finish_reason
            assert str(a.versions) == str(b.versions)


def test_requests_are_put_together_once(monkeypatch, engine, policies, problems, partial):
    """The tokens of a long response are copied where it is prefilled, not where its pages are
    counted: a batch is chosen among hundreds."""
    read, tokens = [], Request.tokens.fget
    count = lambda request: read.append(request) or tokens(request)
    monkeypatch.setattr(Request, "tokens", property(count))
    loop = make_loop(engine, policies[1], problems, **step_6(partial))
    for _ in loop.run():
        pass
    assert 0 < len(read) == loop.admission.arrivals


def test_requests_of_one_sample_lie_together_in_memory(engine):
    """NumPy asks for pages of 2 MiB: far apart, 64 KiB of a resumed response take one each."""
    table = RequestTable(engine.config, keep_calls=True)
    assert table.calls is not None and table.tokens.shape[2] == 4
    for array in (table.tokens, table.log_probs, table.model_log_probs, table.calls):
        assert array[0, :, 0].flags.c_contiguous


def test_a_response_is_resumed_more_than_once(engine, policies, problems, partial):
    old = by_visit(partial)
    left = unfinished_after(engine, policies[1], problems, NEXT_KEY, 14, step=6, carried=old)
    again = next_carried(partial, *left, num_tried=1, step=6)
    assert (0, 0) not in by_visit(again), "its prompt is used up"
    seen = {tuple(sorted(set(r.versions.tolist()))) for group in again for _, r in group.responses}
    assert seen >= {(5,), (5, 6)}
    for visit, responses in again:
        for sample, response in responses:
            assert (np.diff(response.versions) >= 0).all()
            assert len(response.versions) == len(response.tokens) == len(response.log_probs)
            if sample in old.get(visit, {}):
                assert_begins_with(response, old[visit][sample])


def response(versions, reason="unfinished"):
    n = len(versions)
    tokens, log_probs = np.arange(n, dtype=np.int32), np.full(n, -1 / 3, np.float32)
    return Response(tokens, log_probs, reason, "", np.array(versions, np.int32))


def test_groups_with_a_stale_response_are_discarded():
    old = (
        CarriedGroup((1, 0), ((0, response([3, 4])), (2, response([4])))),
        CarriedGroup((2, 0), ((1, response([3], "stop")),)),
    )
    same, none = without_stale(old, step=4, max_staleness=1)
    assert same == old and none == 0
    fresh, num_stale = without_stale(old, step=5, max_staleness=1)
    assert fresh == () and num_stale == 3, "a group goes as a whole, its younger responses too"
    young = CarriedGroup((3, 0), ((0, response([4, 5])),))
    assert without_stale((*old, young), step=5, max_staleness=1) == ((young,), 3)
    assert without_stale(old, step=5, max_staleness=2) == (old, 0)


def test_the_next_step_finds_responses_beyond_the_batch_and_those_not_reached():
    visits = [(4, 1), (5, 0), (6, 0), (7, 0), (8, 0), (9, 0)]
    before = [CarriedGroup(visit, ((0, response([1])),)) for visit in visits]
    problems = [Problem(i, "", (1,), "", "") for i in (5, 6, 7, 8, 9)]
    fresh = response([0, 0], "stop")._replace(versions=None)
    invalid = fresh._replace(finish_reason="invalid")
    # 5 and 6 are used up, 8 has begun and has nothing to keep, 9 and 4 have not begun.
    left = {1: {0: fresh}, 2: {1: response([1, 2]), 0: fresh}, 3: {0: invalid, 1: response([])}}
    found = next_carried(before, problems, left, num_tried=2, step=2)
    samples = [(visit, [s for s, _ in responses]) for visit, responses in found]
    assert samples == [((7, 0), [0, 1]), ((9, 0), [0]), ((4, 1), [0])], "older epochs come first"
    versions = [r.versions.tolist() for _, r in found[0].responses]
    assert versions == [[2, 2], [1, 2]]


def test_the_state_survives_json_bit_for_bit(partial):
    state = DynamicSamplingState(informative_rate=0.1 + 0.2, carried=partial)
    back = state_from_json(json.loads(json.dumps(state_to_json(state))))
    assert back.informative_rate == state.informative_rate
    for (visit, ours), (same_visit, theirs) in zip(partial, back.carried, strict=True):
        assert visit == same_visit
        for (sample, a), (same, b) in zip(ours, theirs, strict=True):
            assert sample == same and a.finish_reason == b.finish_reason and a.text == b.text
            for name in ("tokens", "log_probs", "model_log_probs", "versions"):
                x, y = getattr(a, name), getattr(b, name)
                assert x.dtype == y.dtype and x.tobytes() == y.tobytes()


def test_a_second_visit_is_used_up_and_carried_by_its_own_epoch():
    before = [CarriedGroup((5, 1), ((0, response([1])),))]
    problems = [Problem(id, "", (1,), "", "", epoch=1) for id in (5, 6)]
    found = next_carried(before, problems, {1: {0: response([2])}}, num_tried=1, step=2)
    assert [visit for visit, _ in found] == [(6, 1)]


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_visit_resumes_the_responses_of_its_own_epoch(engine, policies, problems, partial, epoch):
    second = [problem._replace(epoch=1) for problem in problems[:4]]
    carried = {(id, epoch): responses for (id, _), responses in by_visit(partial).items()}
    loop = make_loop(engine, policies[1], second, **step_6(partial) | {"carried": carried})
    for _ in loop.run():
        pass
    resumed = {
        (q, s)
        for q, group in enumerate(loop.responses())
        for s, found in enumerate(group)
        if found.versions is not None
    }
    stored = {(id, s) for (id, _), of in carried.items() for s in of if id < 4}
    assert len(stored) > 5 and resumed == (stored if epoch else set())
