"""A response that repeats itself ends at the token at which the rule holds first, and nothing else
changes."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.rollout.carry import by_visit, from_json, next_carried, to_json
from dapo_jax.rollout.jetstream import NOT_FINITE, OVER
from dapo_jax.rollout.repetition import RepetitionDetector
from dapo_jax.rollout.sampling import SamplingParams
from tests.support.engines import EOS, complete, generate, make_engine, make_loop, streamed

COLD = SamplingParams(temperature_X=0.35)
N = 5


def expected_length(log_probs, n):
    """The length with which n tokens in a row first had a probability above 0.99; or None."""
    sure = np.exp(np.asarray(log_probs, np.float64)) > 0.99
    return next((end for end in range(n, len(sure) + 1) if sure[end - n : end].all()), None)


def test_the_first_token_at_which_the_rule_holds():
    """Whatever comes in one call, and wherever responses are stored and resumed."""
    rng, lengths = np.random.default_rng(0), []
    for trial in range(150):
        n = int(rng.integers(1, 34))
        sure = rng.random((6, 90)) < rng.choice([0.6, 0.9])
        log_probs = np.where(sure, np.log(0.9901), np.log(0.9899)).astype(np.float32)
        expected = [expected_length(row, n) for row in log_probs]
        at = lambda x: x.reshape(2, 3, *x.shape[1:])  # as the engine's, with several axes
        filled = np.zeros_like(log_probs)
        detector = RepetitionDetector(n, at(filled))
        before, found = np.zeros(6, np.int32), {}
        detector.run_X[:] = 3  # of what was in these places before
        for i in range(6):
            detector.begin(divmod(i, 3), 0)
        while (before < 90).any():
            after = np.minimum(90, before + rng.integers(0, 12, 6)).astype(np.int32)
            for i, (old, new) in enumerate(zip(before, after)):
                filled[i, old:new] = log_probs[i, old:new]
            for place, length in detector.advance(at(before), at(after)).items():
                found.setdefault(place[0] * 3 + place[1], length)
            before = after
            if trial % 2:
                for i in np.flatnonzero(rng.random(6) < 0.3).tolist():
                    detector.begin(divmod(i, 3), int(before[i]))
        assert [found.get(i) for i in range(6)] == expected
        lengths += expected
    assert 100 < sum(length is not None for length in lengths) < 800


def test_the_rule_at_its_edges():
    """0.99 itself is not above it."""
    ends = lambda n, log_probs: RepetitionDetector(n, np.array([log_probs], np.float32)).advance(
        np.array([0]), np.array([len(log_probs)])
    )
    above, at = np.log(0.991), np.log(0.99)
    assert ends(3, [above, above, at - 1e-6] * 3) == {}
    assert ends(3, [np.nan, above, above, above]) == {(0,): 4}
    assert ends(3, [-np.inf, above, np.nan, above]) == {}
    # A token that was given, among those that are known already.
    row = np.array([[above, above, np.nan, above, above, above]], np.float32)
    detector = RepetitionDetector(3, row)
    detector.begin((0,), 4)
    assert detector.advance(np.array([4]), np.array([6])) == {(0,): 6}


def cut(full, n=N):
    """(tokens, finish reason) of a response of which all tokens are known."""
    length = expected_length(full.log_probs, n)
    if length is None or (length == len(full.tokens) and full.tokens[-1] == EOS):
        return full.tokens.tolist(), full.finish_reason
    return full.tokens[:length].tolist(), "repetition"


@pytest.fixture(scope="module")
def cold():
    """Makes engines that sample at a low temperature."""
    return lambda **changes: make_engine(**{"samples": 4, "params": COLD, **changes})


@pytest.fixture(scope="module")
def whole(cold, params, problems):
    """The responses that nothing ends early."""
    return generate(cold(), params, problems)[0]


def ends_of(responses):
    return [[(r.tokens.tolist(), r.finish_reason) for r in row] for row in responses]


@pytest.mark.parametrize("changes", [{"decode_steps": 3}, {"slots": 8, "prefill": 2}, {}])
def test_a_response_ends_at_that_token(cold, params, problems, whole, changes):
    """Independent of the tokens in a call and of slots. Tokens sampled after it are mixed up with
    nothing that takes its slot."""
    loop = make_loop(cold(**changes), params, problems, end_repetition=N, stream=True)
    found = streamed(loop)
    expected = [[cut(full) for full in row] for row in whole]
    responses = loop.responses()
    assert ends_of(responses) == expected
    assert 10 < sum(reason == "repetition" for row in expected for _, reason in row) < 75
    assert all(r.truncated for row in responses for r in row if r.finish_reason == "repetition")
    for q, row in enumerate(responses):
        for g, response in enumerate(row):
            n = len(response.tokens)
            np.testing.assert_allclose(response.log_probs, whole[q][g].log_probs[:n], atol=1e-5)
            assert found[q, g] == (response.tokens.tolist(), True)
    assert loop.stats.tokens == sum(len(r.tokens) for row in responses for r in row)


def test_preempted_and_resumed_where_pages_are_short(cold, params, problems, whole):
    engine = cold(page_tokens=4, num_pages=24, decode_steps=4)
    loop = make_loop(engine, params, problems, end_repetition=N)
    complete(loop)
    assert loop.stats.preempted > 0
    assert ends_of(loop.responses()) == [[cut(full) for full in row] for row in whole]
    assert np.asarray(loop.state.num_free).tolist() == [23]


def test_carried_responses_end_at_the_same_token(cold, params, problems, whole):
    """Wherever they were cut, and stored between."""
    engine = cold(page_tokens=16, num_pages=400, decode_steps=4, resumes=True)
    for calls in (2, 4, 5):
        loop = make_loop(engine, params, problems, carried={}, end_repetition=N)
        while loop.num_calls < calls + 2:
            loop.step()
        found = dict(enumerate(loop.unfinished(calls)))
        kept = next_carried((), problems[: len(found)], found, num_tried=0, step=0)
        reasons = {r.finish_reason for group in kept for _, r in group.responses}
        assert "unfinished" in reasons and (calls < 4 or "repetition" in reasons)
        carried = by_visit(from_json(json.loads(json.dumps(to_json(kept)))))
        loop = make_loop(engine, params, problems, carried=carried, end_repetition=N)
        complete(loop)
        assert ends_of(loop.responses()) == [[cut(full) for full in row] for row in whole]


@pytest.mark.parametrize("stop", ["G", "ZZZZ", "ZZZZZ"])  # most repeat Z
def test_stop_strings_and_repetition_end_a_response(cold, params, problems, whole, stop):
    """What comes first ends the response; both at one token: it ended by itself."""
    spell = lambda sequences: ["".join(chr(64 + token) for token in s) for s in sequences]

    def ends(full):
        tokens, reason = cut(full)
        (text,) = spell([tokens])
        return (tokens[: text.find(stop) + len(stop)], "stop") if stop in text else (tokens, reason)

    expected = [[ends(full) for full in row] for row in whole]
    responses, _ = generate(
        cold(decode_steps=4),
        params,
        problems,
        detokenize=spell,
        stop_strings=(stop,),
        end_repetition=N,
    )
    assert ends_of(responses) == expected
    reasons = {reason for row in expected for _, reason in row}
    assert "stop" in reasons and ("repetition" in reasons) == (stop == "G")


def test_the_probability_is_the_policys_where_the_sampler_leaves_tokens_out(params, problems):
    """With top-k 1, each token is certain under the distribution that it is sampled from."""
    engine = make_engine(samples=4, params=SamplingParams(top_k_X=1))
    responses, _ = generate(engine, params, problems[:4], end_repetition=3)
    whole, _ = generate(engine, params, problems[:4])
    assert all((r.log_probs == 0).all() for row in whole for r in row)
    assert all((r.model_log_probs < np.log(0.9)).any() for row in whole for r in row)
    assert ends_of(responses) == ends_of(whole)


def test_a_stop_token_ends_a_response_by_itself(cold, params, problems, whole):
    """Also where the rule holds with it."""
    stop = next(cut(r, 1)[0][-1] for r in whole[0] if cut(r, 1)[1] == "repetition")
    engine = cold(decode_steps=4, stop_tokens=(stop,))
    responses, _ = generate(engine, params, problems, end_repetition=1)
    every = [response for row in responses for response in row]
    surely = [r for r in every if r.tokens[-1] == stop and r.log_probs[-1] > np.log(0.99)]
    assert len(surely) > 5 and {r.finish_reason for r in surely} == {"stop"}
    assert "repetition" in {r.finish_reason for r in every}


def test_a_token_without_a_meaning_repeats_nothing(cold, params, problems, whole, monkeypatch):
    """Had the logits of the token with which the rule holds not been finite."""
    engine = cold(decode_steps=4)
    expected = [[cut(full) for full in row] for row in whole]
    limits = np.array([[len(tokens) for tokens, _ in row] for row in expected])
    real = engine.generate

    def generated(*args):
        state, output = real(*args)
        flags = output.data[..., 1]
        return state, output.replace(
            data=output.data.at[..., 1].set(jnp.where(flags & OVER, flags | NOT_FINITE, flags))
        )

    monkeypatch.setattr(engine, "generate", generated)
    responses, _ = generate(engine, params, problems, end_repetition=N, limits_QG=limits)
    assert {r.finish_reason for row in responses for r in row} == {"invalid"}
    assert [[r.tokens.tolist() for r in row] for row in responses] == [
        [tokens for tokens, _ in row] for row in expected
    ]
