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
CONFIDENT, PERIODIC = ("confident", 5), ("periodic", 9)
RULES = pytest.mark.parametrize("rule", [CONFIDENT, PERIODIC], ids=lambda rule: rule[0])


def holds(rule, tokens, log_probs):
    """The rule as it is written, at the end of these tokens."""
    kind, n = rule
    if len(tokens) < n:
        return False
    if kind == "confident":
        return all(np.exp(float(log_prob)) > 0.99 for log_prob in log_probs[-n:])
    y = tokens[-n:]
    return any(all(y[i] == y[i - p] for i in range(p, n)) for p in range(1, n + 1) if 4 * p <= n)


def expected_length(rule, tokens, log_probs):
    """The length with which the rule holds first; None: it never does."""
    tokens = np.asarray(tokens).tolist()
    lengths = range(1, len(tokens) + 1)
    return next((n for n in lengths if holds(rule, tokens[:n], log_probs[:n])), None)


def random_responses(rng, num, length):
    """Tokens and log-probs with many repetitions that begin, break and begin again.

    The tokens' bytes resemble each other, as those of neighbouring tokens overlap.
    """
    alphabet = np.array([0, 1, 256, 257, 0x01010101, 0x01010100], np.int32)[: rng.integers(2, 7)]
    tokens, log_probs = np.zeros((num, length), np.int32), np.zeros((num, length), np.float32)
    for row in tokens:
        at = 0
        while at < length:
            piece = rng.choice(alphabet, rng.integers(1, 9))
            if at and rng.random() < 0.3:  # the old period goes on, after one wrong token
                piece = row[max(0, at - rng.integers(1, 9)) : at].copy()
            some = np.tile(piece, 1 + rng.integers(8))[: length - at]
            row[at : at + len(some)] = some
            at += len(some)
    surely = rng.random((num, length)) < rng.choice([0.6, 0.9])
    log_probs[:] = np.where(surely, np.log(0.9901), np.log(0.9899))
    return tokens, log_probs


@pytest.mark.parametrize("kind", ["confident", "periodic"])
def test_the_first_token_at_which_the_rule_holds(kind):
    """Whatever comes in one call, and wherever responses are stored and resumed."""
    rng, lengths = np.random.default_rng(0), []
    for trial in range(150):
        rule = kind, int(rng.integers(4 if kind == "periodic" else 1, 34))
        tokens, log_probs = random_responses(rng, 6, 90)
        expected = [expected_length(rule, *one) for one in zip(tokens, log_probs)]
        at = lambda x: x.reshape(2, 3, *x.shape[1:])  # as the engine's, with several axes
        filled = np.full_like(tokens, -1), np.zeros_like(log_probs)
        detector = RepetitionDetector(rule, *map(at, filled))
        before, found = np.zeros(6, np.int32), {}
        detector.run_X[:] = detector.period_X[:] = 3  # of what was in these places before
        for i in range(6):
            detector.begin(divmod(i, 3), 0)
        while (before < 90).any():
            after = np.minimum(90, before + rng.integers(0, 12, 6)).astype(np.int32)
            for i, (old, new) in enumerate(zip(before, after)):
                for into, whole in zip(filled, (tokens, log_probs)):
                    into[i, old:new] = whole[i, old:new]
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
    """0.99 itself is not above it; N // 4 is the longest period."""
    ends = lambda rule, tokens, log_probs: RepetitionDetector(
        rule, np.array([tokens], np.int32), np.array([log_probs], np.float32)
    ).advance(np.array([0]), np.array([len(tokens)]))
    above, at = np.log(0.991), np.log(0.99)
    assert ends(("confident", 3), [5] * 9, [above, above, at - 1e-6] * 3) == {}
    assert ends(("confident", 3), [5] * 4, [np.nan, above, above, above]) == {(0,): 4}
    assert ends(("confident", 3), [5] * 4, [-np.inf, above, np.nan, above]) == {}
    anything = [0.0] * 40
    assert ends(("periodic", 12), [7, 8, 9] * 4, anything[:12]) == {(0,): 12}
    assert ends(("periodic", 12), [1, 7, 8, 9] * 8, anything[:32]) == {}
    assert ends(("periodic", 16), [1, 7, 8, 9] * 8, anything[:32]) == {(0,): 16}
    assert ends(("periodic", 4), [6, 7, 7, 7, 7], anything[:5]) == {(0,): 5}


def test_a_token_costs_the_same_in_long_responses():
    """Of 4,000 tokens, the candidate's period is looked for at every N // 4 only."""
    rng, looks = np.random.default_rng(0), []
    tokens = np.tile(rng.integers(0, 9, 250), 16).astype(np.int32)[None]
    tokens[:, 2500] += 1
    detector = RepetitionDetector(("periodic", 3000), tokens, np.zeros(tokens.shape, np.float32))
    real = detector._find_period
    detector._find_period = lambda place, length: looks.append(length) or real(place, length)
    for n in range(0, 4000, 16):
        assert detector.advance(np.array([n]), np.array([n + 16])) == {}
    assert looks == [750, 1500, 3000, 3750]


def cut(rule, full):
    """(tokens, finish reason) of a response of which all tokens are known."""
    length = expected_length(rule, full.tokens, full.log_probs)
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


@RULES
@pytest.mark.parametrize("changes", [{"decode_steps": 3}, {"slots": 8, "prefill": 2}, {}])
def test_a_response_ends_at_that_token(cold, params, problems, whole, rule, changes):
    """Independent of the tokens in a call and of slots. Tokens sampled after it are mixed up with
    nothing that takes its slot."""
    loop = make_loop(cold(**changes), params, problems, end_repetition=rule, stream=True)
    found = streamed(loop)
    expected = [[cut(rule, full) for full in row] for row in whole]
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


@RULES
def test_preempted_and_resumed_where_pages_are_short(cold, params, problems, whole, rule):
    engine = cold(page_tokens=4, num_pages=24, decode_steps=4)
    loop = make_loop(engine, params, problems, end_repetition=rule)
    complete(loop)
    assert loop.stats.preempted > 0
    assert ends_of(loop.responses()) == [[cut(rule, full) for full in row] for row in whole]
    assert np.asarray(loop.state.num_free).tolist() == [23]


@RULES
def test_carried_responses_end_at_the_same_token(cold, params, problems, whole, rule):
    """Wherever they were cut, and stored between."""
    engine = cold(page_tokens=16, num_pages=400, decode_steps=4, resumes=True)
    for calls in (2, 4, 5):
        loop = make_loop(engine, params, problems, carried={}, end_repetition=rule)
        while loop.num_calls < calls + 2:
            loop.step()
        found = dict(enumerate(loop.unfinished(calls)))
        kept = next_carried((), problems[: len(found)], found, num_tried=0, step=0)
        reasons = {r.finish_reason for group in kept for _, r in group.responses}
        assert "unfinished" in reasons and (calls < 4 or "repetition" in reasons)
        carried = by_visit(from_json(json.loads(json.dumps(to_json(kept)))))
        loop = make_loop(engine, params, problems, carried=carried, end_repetition=rule)
        complete(loop)
        assert ends_of(loop.responses()) == [[cut(rule, full) for full in row] for row in whole]


@pytest.mark.parametrize("stop", ["G", "ZZZZ", "ZZZZZ"])  # most repeat Z
def test_stop_strings_and_repetition_end_a_response(cold, params, problems, whole, stop):
    """What comes first ends the response; both at one token: it ended by itself."""
    spell = lambda sequences: ["".join(chr(64 + token) for token in s) for s in sequences]

    def ends(full):
        tokens, reason = cut(CONFIDENT, full)
        (text,) = spell([tokens])
        return (tokens[: text.find(stop) + len(stop)], "stop") if stop in text else (tokens, reason)

    expected = [[ends(full) for full in row] for row in whole]
    responses, _ = generate(
        cold(decode_steps=4),
        params,
        problems,
        detokenize=spell,
        stop_strings=(stop,),
        end_repetition=CONFIDENT,
    )
    assert ends_of(responses) == expected
    reasons = {reason for row in expected for _, reason in row}
    assert "stop" in reasons and ("repetition" in reasons) == (stop == "G")


def test_the_probability_is_the_policys_where_the_sampler_leaves_tokens_out(params, problems):
    """With top-k 1, each token is certain under the distribution that it is sampled from."""
    engine = make_engine(samples=4, params=SamplingParams(top_k_X=1))
    responses, _ = generate(engine, params, problems[:4], end_repetition=("confident", 3))
    whole, _ = generate(engine, params, problems[:4])
    assert all((r.log_probs == 0).all() for row in whole for r in row)
    assert all((r.model_log_probs < np.log(0.9)).any() for row in whole for r in row)
    assert ends_of(responses) == ends_of(whole)


def test_a_stop_token_ends_a_response_by_itself(cold, params, problems, whole):
    """Also where the rule holds with it."""
    rule, full = ("confident", 1), whole[0]
    stop = next(cut(rule, r)[0][-1] for r in full if cut(rule, r)[1] == "repetition")
    engine = cold(decode_steps=4, stop_tokens=(stop,))
    responses, _ = generate(engine, params, problems, end_repetition=rule)
    every = [response for row in responses for response in row]
    surely = [r for r in every if r.tokens[-1] == stop and r.log_probs[-1] > np.log(0.99)]
    assert len(surely) > 5 and {r.finish_reason for r in surely} == {"stop"}
    assert "repetition" in {r.finish_reason for r in every}


def test_a_token_without_a_meaning_repeats_nothing(cold, params, problems, whole, monkeypatch):
    """Had the logits of the token with which the rule holds not been finite."""
    engine, rule = cold(decode_steps=4), PERIODIC
    expected = [[cut(rule, full) for full in row] for row in whole]
    limits = np.array([[len(tokens) for tokens, _ in row] for row in expected])
    real = engine.generate

    def generated(*args):
        state, output = real(*args)
        flags = output.data[..., 1]
        return state, output.replace(
            data=output.data.at[..., 1].set(jnp.where(flags & OVER, flags | NOT_FINITE, flags))
        )

    monkeypatch.setattr(engine, "generate", generated)
    responses, _ = generate(engine, params, problems, end_repetition=rule, limits_QG=limits)
    assert {r.finish_reason for row in responses for r in row} == {"invalid"}
    assert [[r.tokens.tolist() for r in row] for row in responses] == [
        [tokens for tokens, _ in row] for row in expected
    ]
