"""Thinking that has not ended after N tokens is ended there: the phrase is in the context, and the
answer is what the policy samples after it."""

import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from dapo_jax.rollout.carry import by_visit, from_json, next_carried, to_json
from dapo_jax.rollout.end_of_thinking import EndOfThinking
from dapo_jax.types import UNFINISHED, Response, UserError
from tests.rollout.test_repetition import COLD, cut, ends_of
from tests.rollout.test_repetition import N as REPEATS
from tests.support.engines import (
    CONFIG,
    EOS,
    complete,
    generate,
    make_engine,
    make_loop,
    streamed,
    tokens_of,
)
from tests.support.helpers import logits_of, tiny_config

N, PHRASE = 9, (20, 6, 7)  # "TFG"
END = EndOfThinking(N, PHRASE, "G")
ROOM = {"page_tokens": 16, "num_pages": 400, "samples": 4, "decode_steps": 4, "resumes": True}


def spell(sequences):
    return ["".join(chr(64 + token) for token in s) for s in sequences]


def forced(full):
    """Whether a response of which all tokens are known is to be cut."""
    goes_on = len(full.tokens) > N
    return goes_on and 7 not in full.tokens[:N].tolist()


@pytest.fixture(scope="module")
def engine():
    return make_engine(**ROOM)


@pytest.fixture(scope="module")
def whole(engine, params, problems):
    """The responses without a phrase."""
    return generate(engine, params, problems)[0]


@pytest.fixture(scope="module")
def expected(engine, params, problems, whole):
    """Tokens: those of whole responses, or what goes on after N of them and the phrase."""
    carried = {
        (problem.id, problem.epoch): {
            g: Response(
                np.array([*full.tokens[:N], *PHRASE], np.int32),
                np.zeros(N + len(PHRASE), np.float32),
                UNFINISHED,
                "",
                np.zeros(N + len(PHRASE), np.int32),
                np.zeros(N + len(PHRASE), np.float32),
            )
            if forced(full)
            else full
            for g, full in enumerate(row)
        }
        for problem, row in zip(problems, whole, strict=True)
    }
    loop = make_loop(engine, params, problems, carried=carried)
    return complete(loop)


def check(loop, expected, whole):
    responses = loop.responses()
    assert tokens_of(responses) == expected
    num = 0
    for row, of_whole in zip(responses, whole, strict=True):
        for response, full in zip(row, of_whole, strict=True):
            sampled = np.ones(len(response.tokens), bool)
            if forced(full):
                assert response.tokens[N : N + 3].tolist() == list(PHRASE)
                sampled[N : N + 3] = False
                num += 1
            assert response.sampled.tolist() == sampled.tolist()
            assert np.isfinite(response.model_log_probs[sampled]).all()
            assert response.finish_reason == ("stop" if response.tokens[-1] == EOS else "length")
            (text,) = spell([response.tokens])
            assert response.text == text
    assert 20 < num < 70
    assert loop.stats.tokens == sum(int(r.sampled.sum()) for row in responses for r in row)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"decode_steps": 3},
        {"decode_steps": 16, "slots": 8},
        {"prefill": 2},
        {"page_tokens": 4, "num_pages": 24},
    ],
)
def test_the_phrase_comes_after_exactly_n_tokens(params, problems, whole, expected, changes):
    """Independent of slots, pages, and of the tokens in a call."""
    loop = make_loop(
        make_engine(**ROOM | changes),
        params,
        problems,
        detokenize=spell,
        end_of_thinking=END,
        stream=True,
    )
    found = streamed(loop)
    check(loop, expected, whole)
    assert (loop.stats.preempted > 0) == (changes.get("num_pages") == 24)
    for q, row in enumerate(expected):
        for g, tokens in enumerate(row):
            assert found[q, g] == (tokens, True)


def test_the_answer_is_sampled_after_prompt_thinking_and_phrase(engine, params, problems):
    """Its log-probs are those of one model pass over the whole sequence."""
    loop = make_loop(engine, params, problems[:6], detokenize=spell, end_of_thinking=END)
    complete(loop)
    responses, num = loop.responses(), 0
    for problem, row in zip(problems, responses):
        for response in row:
            if response.sampled.all():
                continue
            num += 1
            tokens = np.array([*problem.prompt_tokens, *response.tokens])
            log_p = jax.nn.log_softmax(logits_of(CONFIG.model, params, tokens)[:-1])
            own = np.take_along_axis(np.asarray(log_p), tokens[1:, None], 1)[:, 0]
            own = own[len(problem.prompt_tokens) - 1 :]
            answer = response.log_probs[N + len(PHRASE) :]
            assert len(answer) > 0
            np.testing.assert_allclose(answer, own[N + len(PHRASE) :], atol=1e-5)
            np.testing.assert_allclose(response.log_probs[:N], own[:N], atol=1e-5)
    assert num > 5


def test_carried_responses_get_the_phrase_once(params, problems, whole, expected):
    """Wherever they were cut, however late, and stored between."""
    engine = make_engine(**ROOM | {"decode_steps": 3})  # token N is the last of its call
    cut_before, cut_after = 0, 0
    for calls in (2, 3, 4, 6):
        asked = {"detokenize": spell, "end_of_thinking": END}
        every = []
        for later in (1, 2, 20):
            loop = make_loop(engine, params, problems, carried={}, **asked)
            while loop.num_calls < calls + later:
                loop.step()
            found = dict(enumerate(loop.unfinished(calls)))
            kept = next_carried((), problems[: len(found)], found, num_tried=0, step=0)
            every.append(json.dumps(to_json(kept)))
        assert every[0] == every[1] == every[2]
        sampled = sum(int(r.sampled.sum()) for group in kept for _, r in group.responses)
        assert loop.stats.tokens == sampled and loop.stats.discarded > 0
        for group in kept:
            for sample, response in group.responses:
                n, full = len(response.tokens), whole[group.visit[0]][sample]
                given = int((~response.sampled).sum())
                assert given == (len(PHRASE) if forced(full) and n >= N else 0)
                assert response.finish_reason != UNFINISHED or n < N or n >= N + given
                cut_before += given == 0 and forced(full)
                cut_after += given > 0 and response.finish_reason == UNFINISHED
        carried = by_visit(from_json(json.loads(every[0])))
        loop = make_loop(engine, params, problems, carried=carried, **asked)
        complete(loop)
        responses = loop.responses()
        assert tokens_of(responses) == expected
        given = [[int((~r.sampled).sum()) for r in row] for row in responses]
        assert given == [[3 * forced(full) for full in row] for row in whole]
    assert cut_before > 0 and cut_after > 0


def test_what_ends_a_response_first(engine, params, problems, whole, expected):
    """A stop string within N tokens ends the response; one after them, where there is the phrase,
    was never sampled. After the phrase the rules hold as before it."""
    stop = "L"
    responses, _ = generate(
        engine, params, problems, detokenize=spell, end_of_thinking=END, stop_strings=(stop,)
    )
    ends_at = lambda tokens: tokens.index(12) + 1 if 12 in tokens else len(tokens)
    assert tokens_of(responses) == [[t[: ends_at(t)] for t in row] for row in expected]
    firsts = [ends_at(t) for row in expected for t in row]
    assert min(firsts) < N and max(firsts) > N + len(PHRASE)


def test_the_count_of_confident_tokens_starts_again_after_the_phrase(params, problems):
    asked = {"detokenize": spell, "end_of_thinking": END}
    engine = make_engine(**ROOM | {"params": COLD})
    whole, _ = generate(engine, params, problems, **asked)
    responses, _ = generate(engine, params, problems, end_repetition=REPEATS, **asked)
    assert ends_of(responses) == [[cut(full) for full in row] for row in whole]
    certain = lambda full: full._replace(log_probs=np.nan_to_num(full.log_probs))
    differ = [cut(full) != cut(certain(full)) for row in whole for full in row]
    assert any(differ), "of a count that the phrase does not end"


def test_a_stop_string_that_reaches_into_the_phrase_is_none(params, problems, whole, expected):
    """Its text was given in part: whether it begins in the thinking or ends in the answer."""
    letters = [chr(64 + token) for token in range(32)]
    reaching = [f"{letter}TFG" for letter in letters] + [f"TFG{letter}" for letter in letters]
    texts = spell([full.tokens for row in whole for full in row])
    answers = spell([tokens[N + len(PHRASE) :] for row in expected for tokens in row])
    assert not any(stop in text for stop in reaching for text in (*texts, *answers))
    for engine in (make_engine(**ROOM), make_engine(**ROOM | {"page_tokens": 4, "num_pages": 24})):
        responses, _ = generate(
            engine,
            params,
            problems,
            detokenize=spell,
            end_of_thinking=END,
            stop_strings=(*reaching, "L"),
        )
        ends_at = lambda tokens: tokens.index(12) + 1 if 12 in tokens else len(tokens)
        assert tokens_of(responses) == [[t[: ends_at(t)] for t in row] for row in expected]


def test_a_limit_without_room_for_an_answer_has_no_phrase(engine, params, problems, whole):
    limits = np.full((len(problems), 4), N + len(PHRASE))
    responses, _ = generate(
        engine, params, problems, detokenize=spell, end_of_thinking=END, limits_QG=limits
    )
    cut = [[r.tokens.tolist()[: N + len(PHRASE)] for r in row] for row in whole]
    assert tokens_of(responses) == cut


def test_a_phrase_that_the_tokenizer_does_not_keep_is_refused():
    from dapo_jax.data.tokenizer import arithmetic_tokenizer

    tokenizer = arithmetic_tokenizer()
    of = lambda phrase: EndOfThinking.of(
        tiny_config(rollout__end_of_thinking=(5, phrase)).rollout, tokenizer
    )
    end = of("\nAnswer: ")
    assert end is not None and end.closing == "Answer:" and end.after_tokens == 5
    assert tokenizer.decode(end.phrase) == "\nAnswer: " and len(end.phrase) == 2
    assert EndOfThinking.of(tiny_config().rollout, tokenizer) is None
    for phrase in ("</think>", "Time! Answer: ", "\nAnswer: <eos>"):
        with pytest.raises(UserError, match=r"end_of_thinking\[1\] .* phrase that the tokenizer"):
            of(phrase)
    special = SimpleNamespace(
        encode=lambda text, **_: [5], decode=lambda *_, **__: "", unk_token_id=None
    )
    with pytest.raises(UserError, match="last word that is no special"):
        EndOfThinking.of(CONFIG.rollout.__class__(end_of_thinking=(5, "</think>")), special)
