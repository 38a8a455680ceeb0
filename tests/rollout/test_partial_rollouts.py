"""Responses that go on in the next step: what is kept is as it was, what follows is the new
policy's, and every token knows which policy drew it."""

import functools
import json

import jax
import numpy as np
import pytest

from dapo_jax.models import log_probs
from dapo_jax.rollout.dynamic_sampling import SamplingState, state_from_json, state_to_json
from dapo_jax.rollout.partial_rollouts import Begun, by_visit, next_begun, not_stale
from dapo_jax.types import Problem, Response
from tests.support.engines import CONFIG, KEY, generate, make_engine, make_loop, make_problems
from tests.support.helpers import Sample, make_params, rows_of

NEXT_KEY = jax.random.key(8)


@pytest.fixture(scope="module")
def policies():
    """Those of two steps."""
    return make_params(CONFIG), make_params(CONFIG, seed=1)


@pytest.fixture(scope="module")
def problems():
    return make_problems(12)


@pytest.fixture(scope="module")
def engine():
    return make_engine(page_tokens=16, samples=4, num_pages=400, decode_steps=4, resumes=True)


def spell(sequences):
    return [" ".join(map(str, sequence)) for sequence in sequences]


def draw(engine, params, problems, key, **more):
    return generate(engine, params, problems, detokenize=spell, key=key, **more)


def left_after(engine, params, problems, key, num_ended, **more):
    """What is left of each problem taken when the loop is abandoned."""
    loop = make_loop(engine, params, problems, detokenize=spell, key=key, **more)
    ended = 0
    for turn in loop.turns():
        ended += len(turn.ended)
        if ended > num_ended:
            break
    return loop.unfinished()


@pytest.fixture(scope="module")
def begun(engine, policies, problems):
    """What step 5 leaves of all problems when it is stopped in the middle."""
    left = left_after(engine, policies[0], problems, KEY, 5, step=5)
    return next_begun((), problems[: len(left)], left, decided=0, step=5)


def test_what_is_left_is_what_would_have_been_drawn(engine, policies, problems, begun):
    whole, _ = draw(engine, policies[0], problems, KEY)
    ended = unfinished = 0
    for (id, _), responses in begun:
        for sample, response in responses:
            full, n = whole[id][sample], len(response.tokens)
            assert response.tokens.tolist() == full.tokens[:n].tolist()
            assert response.log_probs.tobytes() == full.log_probs[:n].tobytes()
            assert response.model_log_probs.tobytes() == full.model_log_probs[:n].tobytes()
            assert response.versions.tolist() == [5] * n
            over = response.finish_reason != "unfinished"
            assert over == (n == len(full.tokens)) and (response.text == full.text) == over
            ended, unfinished = ended + over, unfinished + (not over)
    assert ended > 5 and unfinished > 5


@pytest.fixture(scope="module")
def continued(engine, policies, problems, begun):
    """What step 6 makes of it."""
    loop = make_loop(
        engine, policies[1], problems, detokenize=spell, key=NEXT_KEY, step=6,
        begun=by_visit(begun),
    )  # fmt: skip
    told = [ended for turn in loop.turns() for ended in turn.ended]
    return loop.responses(), loop.stats, told


def test_tokens_are_kept_and_those_that_follow_have_their_own_version(continued, begun):
    responses, stats, told = continued
    before = by_visit(begun)
    kept, longer = 0, 0
    for q, row in enumerate(responses):
        assert len(row) == 4
        for s, response in enumerate(row):
            old = before.get((q, 0), {}).get(s)
            if old is None:
                assert response.versions is None
                continue
            n = len(old.tokens)
            kept += n
            assert response.tokens[:n].tobytes() == old.tokens.tobytes()
            assert response.log_probs[:n].tobytes() == old.log_probs.tobytes()
            assert response.model_log_probs[:n].tobytes() == old.model_log_probs.tobytes()
            new = len(response.tokens) - n
            assert response.versions.tolist() == [5] * n + [6] * new
            assert (new > 0) == (old.finish_reason == "unfinished")
            assert response.finish_reason in ("stop", "length")
            assert response.text == spell([response.tokens])[0]
            longer += new > 0
    assert longer > 5
    total = sum(len(r.tokens) for row in responses for r in row)
    assert stats.tokens == total - kept, "only what is drawn now counts"
    places = [(problem, sample) for problem, sample, _ in told]
    assert sorted(places) == [(q, s) for q in range(len(responses)) for s in range(4)]


def test_log_probs_are_those_of_the_policy_that_drew_the_token(continued, policies, problems):
    rows = rows_of(
        [
            Sample(list(p.prompt_tokens), r.tokens, 1.0, r.log_probs, 0.0)
            for p, row in zip(problems, continued[0], strict=True) for r in row
        ], 64,
    )  # fmt: skip
    version = rows_of(
        [
            Sample(
                list(p.prompt_tokens), r.tokens, 1.0,
                np.full(len(r.tokens), 6.0) if r.versions is None else r.versions, 0.0,
            )
            for p, row in zip(problems, continued[0], strict=True) for r in row
        ], 64,
    ).log_prob_old_BT  # fmt: skip
    score = jax.jit(functools.partial(log_probs.row_statistics, CONFIG.model, temperature=1.0))
    gap = [
        np.abs(np.asarray(score(params, rows).log_prob_BT) - rows.log_prob_old_BT)
        for params in policies
    ]
    for own, other, step in ((gap[0], gap[1], 5), (gap[1], gap[0], 6)):
        mine = rows.mask_BT & (version == step)
        assert mine.sum() > 100 and own[mine].max() < 1e-5 < 0.1 < other[mine].max()


def test_how_they_go_on_depends_on_what_there_is_and_on_nothing_else(
    continued, policies, problems, begun
):
    """Not on slots, devices, or on pages running short meanwhile."""
    expected = [[(r.tokens.tolist(), r.finish_reason) for r in row] for row in continued[0]]
    versions = lambda rows: [
        None if r.versions is None else r.versions.tolist() for row in rows for r in row
    ]
    preempted = 0
    for settings in (
        dict(slots=5, prefill=3, num_pages=400),
        dict(num_pages=14 * 2, num_devices=2, data=2),
    ):
        other = make_engine(page_tokens=16, samples=4, resumes=True, **settings)
        responses, stats = draw(
            other, policies[1], problems, NEXT_KEY, step=6, begun=by_visit(begun)
        )
        assert [[(r.tokens.tolist(), r.finish_reason) for r in row] for row in responses] == (
            expected
        )
        assert versions(responses) == versions(continued[0])
        preempted += stats.preempted
    assert preempted > 0


def test_a_response_may_go_on_more_than_once(engine, policies, problems, begun):
    """Stopped again at once, what is left has all its versions."""
    left = left_after(engine, policies[1], problems, NEXT_KEY, 14, step=6, begun=by_visit(begun))
    again = next_begun(begun, problems[: len(left)], left, decided=1, step=6)
    assert (0, 0) not in by_visit(again), "its turn has come"
    seen = {tuple(sorted(set(r.versions.tolist()))) for b in again for _, r in b.responses}
    assert seen >= {(5,), (5, 6)}
    old = by_visit(begun)
    for visit, responses in again:
        for sample, response in responses:
            assert (np.diff(response.versions) >= 0).all()
            assert len(response.versions) == len(response.tokens) == len(response.log_probs)
            before = old.get(visit, {}).get(sample)
            if before is not None:
                assert response.tokens[: len(before.tokens)].tolist() == before.tokens.tolist()


def response(versions, reason="unfinished"):
    n = len(versions)
    return Response(
        np.arange(n, dtype=np.int32), np.full(n, -1 / 3, np.float32), reason, "",
        np.array(versions, np.int32),
    )  # fmt: skip


def test_what_is_too_old_is_drawn_afresh():
    old = (
        Begun((1, 0), ((0, response([3, 4])), (2, response([4])))),
        Begun((2, 0), ((1, response([3], "stop")),)),
    )
    same, none = not_stale(old, step=4, max_staleness=1)
    assert same == old and none == 0
    young, dropped = not_stale(old, step=5, max_staleness=1)
    assert dropped == 2 and [(b.visit, [s for s, _ in b.responses]) for b in young] == [
        ((1, 0), [2])
    ]
    assert not_stale(old, step=5, max_staleness=2) == (old, 0)


def test_what_the_next_step_finds():
    """Of prompts beyond the batch and of those whose turn has not come; never one invalid."""
    before = (Begun((7, 0), ((0, response([1])),)), Begun((9, 1), ((0, response([1])),)))
    taken = [Problem(i, "", (1,), "", "") for i in (6, 7, 8)]
    fresh = response([0, 0], "stop")._replace(versions=None)
    drawn = [{0: fresh}, {1: response([1, 2]), 0: fresh}, {0: fresh._replace(
        finish_reason="invalid")}]  # fmt: skip
    found = next_begun(before, taken, drawn, decided=1, step=2)
    assert [(b.visit, [s for s, _ in b.responses]) for b in found] == [
        ((7, 0), [0, 1]),
        ((9, 1), [0]),
    ]
    assert found[0].responses[0][1].versions.tolist() == [2, 2]
    assert found[0].responses[1][1].versions.tolist() == [1, 2]


def test_the_state_survives_json_bit_for_bit(begun):
    state = SamplingState(informative_rate=0.1 + 0.2, begun=begun)
    back = state_from_json(json.loads(json.dumps(state_to_json(state))))
    assert [b.visit for b in back.begun] == [b.visit for b in begun]
    for (_, ours), (_, theirs) in zip(begun, back.begun, strict=True):
        for (sample, a), (same, b) in zip(ours, theirs, strict=True):
            assert sample == same and a.finish_reason == b.finish_reason and a.text == b.text
            for x, y in (
                (a.tokens, b.tokens),
                (a.log_probs, b.log_probs),
                (a.versions, b.versions),
            ):
                assert x.dtype == y.dtype and x.tobytes() == y.tobytes()
