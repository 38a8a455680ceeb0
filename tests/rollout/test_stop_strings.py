"""Stop strings: a response ends with the token that completes one; nothing else changes."""

import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.rollout.stop_strings import first_completions, tail_tokens
from tests.support.engines import (
    CONFIG,
    EOS,
    assert_all_free,
    complete,
    generate,
    make_engine,
    make_loop,
    make_problems,
    streamed,
    tokens_of,
)

_rng = np.random.default_rng(1)
# Each token's text: some have none, some several letters; the end of sequence is special.
PIECES = ["".join(_rng.choice(list("abcd"), n)) for n in _rng.integers(0, 4, 32)]
PIECES[EOS] = ""
STOPS = ("abca", "dd", "bab")


def spell(sequences):
    return ["".join(PIECES[token] for token in sequence) for sequence in sequences]


def cut(tokens, stops=STOPS):
    """The shortest beginning whose text holds a string, or all of it."""
    for n in range(1, len(tokens) + 1):
        if any(stop in spell([tokens[:n]])[0] for stop in stops):
            return tokens[:n]
    return tokens


@pytest.fixture(scope="module")
def engine():
    """Fewer request slots than problems, so that each is used several times."""
    engine = make_engine(slots=8, prefill=2, samples=4, decode_steps=4)
    assert engine.config.requests == 10
    return engine


def run(engine, params, problems, stops=STOPS, detokenize=spell, **more):
    return generate(engine, params, problems, detokenize=detokenize, stop_strings=stops, **more)


@pytest.fixture(scope="module")
def whole(engine, params, problems):
    """The responses without stop strings."""
    return run(engine, params, problems, ())[0]


def assert_cut(responses, whole, stops=STOPS):
    for row, full_row in zip(responses, whole, strict=True):
        for response, full in zip(row, full_row, strict=True):
            expected = cut(full.tokens.tolist(), stops)
            assert response.tokens.tolist() == expected
            n = len(expected)
            assert response.log_probs.tobytes() == full.log_probs[:n].tobytes()
            assert response.text == spell([expected])[0]
            stopped = any(stop in response.text for stop in stops)
            assert response.finish_reason == ("stop" if stopped else full.finish_reason)


def test_a_response_ends_with_the_token_that_completes_a_string(engine, params, problems, whole):
    """Tokens sampled after it are mixed up with nothing that takes its slot."""
    loop = make_loop(engine, params, problems, detokenize=spell, stop_strings=STOPS, stream=True)
    found = streamed(loop)
    responses, stats = loop.responses(), loop.stats
    assert_cut(responses, whole)
    shorter = [
        len(r.tokens) < len(f.tokens) for rs, fs in zip(responses, whole) for r, f in zip(rs, fs)
    ]
    assert 20 < sum(shorter) < 80
    assert stats.tokens == sum(len(r.tokens) for row in responses for r in row)
    assert found == {
        (q, g): (response.tokens.tolist(), True)
        for q, row in enumerate(responses)
        for g, response in enumerate(row)
    }


def test_at_every_place_of_a_call(engine, params, problems, whole):
    """Two prompts fill the slots: all start with a call, so that the place in it is known."""
    places = set()
    for stops in (("dd",), ("ab",), ("ca",), ("bab",)):
        responses, _ = run(engine, params, problems[:2], stops)
        assert_cut(responses, whole[:2], stops)
        most = CONFIG.rollout.max_response_tokens
        stopped = [r.tokens for row in responses for r in row if r.tokens[-1] != EOS]
        places |= {len(tokens) % 4 for tokens in stopped if len(tokens) < most}
    assert places == {0, 1, 2, 3}


def test_a_string_with_the_last_token_allowed_stops_too(engine, params, problems, whole):
    expected = [[cut(tokens) for tokens in row] for row in tokens_of(whole)]
    limits = np.array([[len(tokens) for tokens in row] for row in expected])
    responses, _ = run(engine, params, problems, limits_QG=limits)
    assert_cut(responses, whole)


@pytest.mark.slow
def test_with_preemption(params, problems, whole):
    """On two shards with few pages; every page is free at the end."""
    shards, pages = 2, 11
    engine = make_engine(
        page_tokens=16, samples=4, num_pages=pages * shards, num_devices=shards, data=shards
    )
    preempted = 0
    for stops in (STOPS, ("abcab",), ("dd",)):
        loop = make_loop(engine, params, problems, detokenize=spell, stop_strings=stops)
        expected = [[cut(tokens, stops) for tokens in row] for row in tokens_of(whole)]
        assert complete(loop) == expected
        assert loop.stats.tokens == sum(len(tokens) for row in expected for tokens in row)
        preempted += loop.stats.preempted
        assert_all_free(loop, pages)
    assert preempted > 0


@pytest.mark.parametrize("pages, calls", [(12, 2), pytest.param(10, 10, marks=pytest.mark.slow)])
def test_pages_freed_by_the_last_cancellation_are_used(params, pages, calls):
    """A string ends every sequence in one read while others wait for pages: no results will report
    the free pages."""
    engine = make_engine(
        slots=8, page_tokens=8, samples=4, num_pages=pages, decode_steps=4, stop_tokens=()
    )
    long = [problem for problem in make_problems(60) if len(problem.prompt_tokens) > 16][:6]
    found = False
    at_once = lambda sequences: ["x" if found and len(tokens) else "" for tokens in sequences]
    loop = make_loop(engine, params, long, detokenize=at_once, stop_strings=("x",))
    for call in range(1000):
        if not loop.has_work():
            break
        found = call == calls
        loop.step()
        if found:
            assert loop.admission.queue and not loop.table.unfinished.any()
    assert not loop.has_work() and [len(done) for done in loop.done] == [4] * 6
    assert np.asarray(loop.state.num_free).tolist() == [pages - 1]


def test_only_the_ends_are_decoded_and_nothing_without_strings(engine, params, problems, whole):
    lengths = []

    def counted(sequences):
        lengths.extend(map(len, sequences))
        return spell(sequences)

    run(engine, params, problems, (), counted)
    assert sorted(lengths) == sorted(len(r.tokens) for row in whole for r in row)
    lengths.clear()
    nowhere = ("zz",)
    run(engine, params, problems, nowhere, counted)
    ended = sorted(len(r.tokens) for row in whole for r in row)
    for length in ended:
        lengths.remove(length)
    assert 0 < max(lengths) <= tail_tokens(nowhere) + engine.config.decode_steps < max(ended)


def test_invalid_tokens_complete_nothing(engine, params, problems):
    broken = params | {"embed": params["embed"].at[31].set(jnp.nan)}
    always = lambda sequences: ["x" if len(sequence) else "" for sequence in sequences]
    responses, stats = run(engine, broken, problems[:2], ("x",), always)
    assert [r.finish_reason for row in responses for r in row] == ["invalid"] * 8
    assert stats.tokens == 8


def test_the_end_is_long_enough_for_characters_of_several_bytes():
    """Tokens of one byte each, as of a byte-level tokenizer for rare characters."""
    decode = lambda sequences: [bytes(s.tolist()).decode(errors="replace") for s in sequences]
    text = "Ω" * 30 + "答案🙂"
    tokens = np.frombuffer(text.encode() + b" and so on", np.uint8)
    n = len(text.encode())
    for first_new in (n - 1, n - 3, n - 10):
        assert first_completions(["答案🙂"], decode, [tokens], [first_new]) == [n]
    assert first_completions(["no", " and"], decode, [tokens, tokens[: n + 3]], [n, n]) == [
        n + 4,
        None,
    ]


def test_tokens_without_text_may_stand_in_a_string():
    decode = lambda sequences: ["".join(chr(t) for t in s if t) for s in sequences]
    tokens = np.array([97, 0, 0, 0, 0, 98, 99])
    assert first_completions(["ab"], decode, [tokens], [5]) == [6]
