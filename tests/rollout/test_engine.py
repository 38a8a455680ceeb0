"""Rollouts: what a sample is, that nothing but itself decides it, and JetStream's contract."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.models import decoder, log_probs
from dapo_jax.models.attention import xla
from dapo_jax.models.sharding import copied_bytes, initial_params
from dapo_jax.rollout.sampling import SamplingParams, _invert, sample, truncate
from dapo_jax.types import Problem, UserError
from dapo_jax.utils.compilations import CompilationCounter
from tests.support.engines import (
    CONFIG,
    EOS,
    KEY,
    complete,
    generate,
    make_engine,
    make_loop,
    make_problems,
    tokens_of,
)
from tests.support.helpers import Sample, make_params, replace_model, rows_of


@pytest.fixture(scope="module")
def params():
    return make_params(CONFIG)


@pytest.fixture(scope="module")
def problems():
    return make_problems(20)


def draw(engine, params, problems, num_samples=4, key=KEY):
    return generate(engine, params, problems, num_samples=num_samples, key=key)


@pytest.mark.parametrize(
    "length, changes, message",
    [
        (0, {}, r"problem 7: its prompt has 0 tokens; the engine takes 1 to 24 "),
        (25, {}, r"problem 7: its prompt has 25 tokens; the engine takes 1 to 24 "),
        (5, dict(limits_QG=np.full((1, 2), 33)), r"limits_QG\[0, 0\] is 33 tokens; .* 1 to 32 "),
        (5, dict(limits_QG=np.array([[1, 0]])), r"limits_QG\[0, 1\] is 0 tokens"),
        (5, dict(sampling=SamplingParams(-1.0)), r"temperature \(-1.0\) must be 0 \(greedy\) or"),
        (5, dict(sampling=SamplingParams(1e-39)), r"temperature \(1e-39\) must .* from 1.2e-38"),
        (5, dict(sampling=SamplingParams(1.0, 0.0)), r"top_p \(0.0\) must be in \(0, 1\]"),
        (5, dict(sampling=SamplingParams(1.0, 1.0, -3)), r"top_k \(-3\) must be 0 or more"),
        (5, dict(sampling=SamplingParams(min_p_X=1.5)), r"min_p \(1.5\) must be from 0 to 1"),
    ],
)
def test_what_cannot_be_drawn_is_refused(params, length, changes, message):
    problem = Problem(7, "", (3,) * length, "", "test")
    engine = make_engine()
    with pytest.raises(UserError, match=message):
        generate(engine, params, [problem], num_samples=2, **changes)


def test_what_jetstreams_calls_cannot_do_is_refused(params):
    engine = make_engine(page_tokens=4, num_pages=225)  # 16 slots of 14 pages, and page 0
    loaded = engine.load_params(params)
    for tokens, length in ((25, 25), (5, 0), (5, 6)):
        with pytest.raises(UserError, match=rf"true_length \({length}\) .* max_prefill_length"):
            engine.prefill(params=loaded, padded_tokens=np.full(tokens, 3), true_length=length)
    prefix = engine.prefill(params=loaded, padded_tokens=np.full(5, 3), true_length=5)
    state = engine.insert(prefix, engine.init_decode_state(), slot=15)
    for slot in (-1, 16):
        with pytest.raises(UserError, match=rf"slot \({slot}\) must be from 0 to 15"):
            engine.insert(prefix, state, slot=slot)
    short = make_engine(page_tokens=4, num_pages=224)
    with pytest.raises(UserError, match=r"num_pages \(224\) must be 225 for 16 slots of 56"):
        short.insert(prefix, state, slot=0)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_the_trainers(params, problems, temperature):
    """Every token, EOS included, under the tempered distribution and under the model itself, to
    1e-5."""
    responses, _ = draw(make_engine(temperature=temperature), params, problems)
    for name, under in (("log_probs", temperature), ("model_log_probs", 1.0)):
        samples = [
            Sample(list(p.prompt_tokens), r.tokens, 1.0, getattr(r, name), 0.0)
            for p, row in zip(problems, responses, strict=True)
            for r in row
        ]
        rows = rows_of(samples, 64)
        score = functools.partial(log_probs.row_statistics, CONFIG.model, temperature=under)
        got = jax.jit(score)(params, rows).log_prob_BT
        gap = np.abs(np.asarray(got) - rows.log_prob_old_BT)[rows.mask_BT]
        assert gap.size == sum(len(s.response_tokens) for s in samples)
        assert gap.max() < 1e-5
    ended = [s.response_tokens for s in samples if s.response_tokens[-1] == EOS]
    assert ended and all((tokens[:-1] != EOS).all() for tokens in ended)


def test_responses_are_told_of_as_they_end(params, problems):
    """Each once, while others are still being drawn, and the same as what comes back."""
    spell = lambda sequences: [" ".join(map(str, sequence)) for sequence in sequences]
    loop = make_loop(make_engine(), params, problems, detokenize=spell, num_samples=3)
    calls = [turn.finished for turn in loop.run() if turn.finished]
    responses = loop.responses()
    told = {(problem, sample): response for call in calls for problem, sample, response in call}
    assert len(told) == sum(len(call) for call in calls) == 3 * len(problems)
    assert len(calls) > 3
    for (problem, number), response in told.items():
        same = responses[problem][number]
        np.testing.assert_array_equal(response.tokens, same.tokens)
        assert response.text == same.text == spell([response.tokens])[0]


def test_temperature_zero_takes_the_most_probable_token(params, problems):
    engine = make_engine(temperature=0.0)
    first, again = (draw(engine, params, problems, key=jax.random.key(k))[0] for k in (0, 1))
    assert tokens_of(first) == tokens_of(again), "no key is used"
    assert all(len({tuple(tokens) for tokens in row}) == 1 for row in tokens_of(first))
    logits = jnp.asarray([[0.0, 2.0, 2.0, -1.0]])
    params = SamplingParams(temperature_X=0.0)
    drawn = sample(
        logits, jnp.zeros((1, 2), jnp.uint32), jnp.zeros(1, jnp.int32), params, params.mode
    )
    assert drawn.token_B.tolist() == [1]
    np.testing.assert_allclose(drawn.log_prob_B, jax.nn.log_softmax(logits)[0, 1], rtol=1e-6)


@pytest.mark.parametrize(
    "dtype, mesh",
    [("float32", dict(fsdp=2)), ("bfloat16", dict(fsdp=2)), ("float32", dict(data=2))],
)
def test_weights_stay_where_they_are_or_come_by_one_program(monkeypatch, dtype, mesh):
    """`device_put` takes what is to lie otherwise through the host: it is given none."""
    engine = make_engine(num_devices=2, model=dict(compute_dtype=dtype), **mesh)
    params = initial_params(engine.spec.model, engine.spec.layout, engine.mesh, seed=0)
    put = jax.device_put

    def checked(tree, at):
        same = jax.tree.map(lambda x, at: x.sharding.is_equivalent_to(at, x.ndim), tree, at)
        assert jax.tree.all(same)
        return put(tree, at)

    monkeypatch.setattr(jax, "device_put", checked)
    pointers = lambda x: [part.data.unsafe_buffer_pointer() for part in x.addressable_shards]
    loaded = engine.load_params(params)
    for before, after in zip(*map(jax.tree.leaves, (params, loaded.prefill)), strict=True):
        np.testing.assert_array_equal(np.asarray(after), np.asarray(before.astype(after.dtype)))
        if "data" in mesh:
            assert pointers(before) == pointers(after)
    stacked = loaded.prefill["layers"]
    for i, layer in enumerate(loaded.decode["layers"]):
        for name, x in layer.items():
            np.testing.assert_array_equal(np.asarray(x), np.asarray(stacked[name][i]))
    assert loaded.decode["embed"] is loaded.prefill["embed"]
    layers = 2 * sum(x.nbytes for x in jax.tree.leaves(stacked))
    of_prefill = copied_bytes(loaded.prefill, params)
    assert loaded.copied_bytes(params) == of_prefill + layers
    assert (of_prefill == 0) == ("data" in mesh)


def test_a_call_copies_no_weights():
    """Layers written out are taken out of the stacked ones when parameters are loaded, not at every
    call of decode: with a batch of 1 that would be most of what it reads."""
    engine = make_engine(model=dict(intermediate_size=4096), slots=1, prefill=1)
    shapes = decoder.param_shapes(engine.spec.model)
    compiled = engine.lower(shapes, "decode", engine.spec.params.mode).compile()
    matrix = shapes["layers"]["gate"].size * 4 // engine.spec.model.num_layers
    assert compiled.memory_analysis().temp_size_in_bytes < matrix


def test_finish_reasons(params, problems):
    responses, _ = draw(make_engine(), params, problems)
    reasons = {"stop": 0, "length": 0}
    for r in (r for row in responses for r in row):
        reasons[r.finish_reason] += 1
        if r.truncated:
            assert len(r.tokens) == CONFIG.rollout.max_response_tokens and r.tokens[-1] != EOS
        else:
            assert r.tokens[-1] == EOS
    assert min(reasons.values()) > 0


def test_a_sample_depends_on_nothing_but_itself(params, problems):
    """Slots, prefill batches, neighbours, order and devices do not change a response."""
    expected = tokens_of(draw(make_engine(), params, problems)[0])
    assert tokens_of(draw(make_engine(slots=5, prefill=3), params, problems)[0]) == expected
    backwards = tokens_of(draw(make_engine(), params, problems[::-1])[0])
    assert backwards[::-1] == expected
    assert tokens_of(draw(make_engine(), params, problems[7:9])[0]) == expected[7:9]
    fewer = tokens_of(draw(make_engine(), params, problems, num_samples=2)[0])
    assert fewer == [row[:2] for row in expected]
    for mesh in (dict(data=8), dict(data=2, fsdp=2, tensor=2)):
        engine = make_engine(num_devices=8, **mesh)
        assert tokens_of(draw(engine, params, problems)[0]) == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_drawn_beside_a_sample_does_not_change_a_bit(params, problems, dtype):
    """Responses alone, in another order, and among longer ones: also their log-probs are equal, of
    prompts that are padded to 12 and to 24 tokens, in pages of 4."""
    assert {len(p.prompt_tokens) <= 12 for p in problems} == {True, False}
    engine = make_engine(slots=13, page_tokens=4, model=dict(compute_dtype=dtype))
    whole, _ = draw(engine, params, problems)
    assert len({len(r.tokens) for row in whole for r in row}) > 5
    backwards = draw(engine, params, problems[::-1])[0][::-1]
    alone = [draw(engine, params, [p])[0][0] for p in problems[:4]]
    for expected, got in ((whole, backwards), (whole[:4], alone)):
        for one, other in zip(expected, got, strict=True):
            for a, b in zip(one, other, strict=True):
                np.testing.assert_array_equal(a.tokens, b.tokens)
                np.testing.assert_array_equal(a.log_probs, b.log_probs)


def test_samples_problems_epochs_and_steps_draw_differently(params, problems):
    prompt = problems[3].prompt_tokens
    same = [Problem(0, "", prompt, "", ""), Problem(1, "", prompt, "", ""),
            Problem(0, "", prompt, "", "", epoch=1)]  # fmt: skip
    first = tokens_of(draw(make_engine(), params, same)[0])
    other = tokens_of(draw(make_engine(), params, same, key=jax.random.key(8))[0])
    drawn = [tuple(tokens) for row in first + other for tokens in row]
    assert len(drawn) == 24
    long = [tokens for tokens in drawn if len(tokens) > 2]  # an end at once may come twice
    assert len(set(long)) == len(long) > 15
    # Not only whole responses: first tokens must not be shared by all samples of a prompt either.
    assert all(len({tokens[0] for tokens in row}) > 1 for row in first)


def test_jetstreams_own_calls_give_the_same_tokens(params, problems):
    """prefill, insert, generate and get_result_at_slot alone, as JetStream's drivers use them."""
    engine, problem = make_engine(), problems[5]
    expected = tokens_of(draw(engine, params, [problem])[0])[0]
    key = jax.random.fold_in(jax.random.fold_in(KEY, problem.id), problem.epoch)
    weights = engine.load_params(params)
    state = engine.init_decode_state()
    padded = np.zeros(engine.max_prefill_length, np.int32)
    padded[: len(problem.prompt_tokens)] = problem.prompt_tokens
    prefix = engine.prefill(
        params=weights,
        padded_tokens=padded,
        true_length=len(problem.prompt_tokens),
        key_2=jax.random.key_data(key),
    )
    for slot in range(4):
        state = engine.insert(prefix, state, slot=slot)
    got = [[] for _ in range(4)]
    for _ in range(CONFIG.rollout.max_response_tokens):
        state, results = engine.generate(weights, state)
        results = results.convert_to_numpy()
        for slot in range(4):
            data = results.get_result_at_slot(slot)
            if data.valid[0, 0]:
                got[slot].append(int(data.tokens[0, 0]))
                assert data.lengths[0] == len(got[slot])
        assert not results.get_result_at_slot(9).valid.any()
    assert got == expected
    assert engine.max_concurrent_decodes == 16 and engine.samples_per_slot == 1


def test_slots_stay_busy_and_nothing_recompiles(params, problems):
    engine = make_engine()
    many = [p._replace(id=i) for i, p in enumerate(problems * 4)]
    draw(engine, params, problems)
    counter = CompilationCounter()
    _, stats = draw(engine, params, many, num_samples=3)
    assert counter.count == 0
    assert stats.busy_slots / stats.slots_offered > 0.85
    assert stats.sampled == stats.tokens and 0.5 < stats.sampled / stats.capacity <= 1.0
    assert stats.tokens == sum(len(t) for row in tokens_of(draw(engine, params, many, 3)[0])
                               for t in row)  # fmt: skip


def test_sampling_frequencies_and_log_probs():
    logits = jnp.log(jnp.array([0.5, 0.25, 0.15, 0.1]))
    B = 4000
    keys = jax.vmap(lambda i: jax.random.key_data(jax.random.fold_in(KEY, i)))(jnp.arange(B))
    for top_p, expected in ((1.0, [0.5, 0.25, 0.15, 0.1]), (0.7, [2 / 3, 1 / 3, 0, 0])):
        logits_BV = jnp.broadcast_to(logits, (B, 4))
        params = SamplingParams(top_p_X=top_p)
        drawn = sample(logits_BV, keys, jnp.zeros(B, jnp.int32), params, params.mode)
        tokens = np.asarray(drawn.token_B)
        np.testing.assert_allclose(np.bincount(tokens, minlength=4) / B, expected, atol=0.03)
        np.testing.assert_allclose(np.exp(drawn.log_prob_B), np.array(expected)[tokens], rtol=1e-5)
        model_probs = np.array([0.5, 0.25, 0.15, 0.1])[tokens]
        np.testing.assert_allclose(np.exp(drawn.model_log_prob_B), model_probs, rtol=1e-5)


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.75, 0.9, 0.999])
def test_nucleus_is_the_smallest_set(top_p):
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((50, 11)).astype(np.float32) * 2
    kept = np.isfinite(truncate(jnp.asarray(logits), SamplingParams(top_p_X=top_p)))
    for row, keep in zip(logits, kept, strict=True):
        p = np.exp(row.astype(np.float64)) / np.exp(row.astype(np.float64)).sum()
        order = np.argsort(-p)
        n = int(np.searchsorted(np.cumsum(p[order]), top_p)) + 1
        assert set(np.flatnonzero(keep)) == set(order[:n])


@pytest.mark.parametrize("mesh", [{}, dict(data=2)])
def test_where_pages_are_short_sequences_wait_and_go_on_with_the_same_tokens(
    params, problems, mesh
):
    """And every page comes back."""
    roomy = make_engine(page_tokens=4, samples=4)
    expected = tokens_of(draw(roomy, params, problems)[0])
    shards = mesh.get("data", 1)
    least = 1 + 6 + roomy.spec.table_pages + 2
    engine = make_engine(
        page_tokens=4, samples=4, num_pages=(least + 6) * shards, num_devices=shards, **mesh
    )
    assert engine.spec.shard_pages == least + 6 < roomy.spec.shard_pages / 3
    run = make_loop(engine, params, problems)
    assert complete(run) == expected
    assert run.stats.preempted > 0
    assert np.asarray(run.state.num_free).tolist() == [engine.spec.shard_pages - 1] * shards
    pages = np.sort(np.asarray(run.state.free_N)[:, : engine.spec.shard_pages - 1], axis=1)
    assert (pages == np.arange(1, engine.spec.shard_pages)).all(), "each of them once"


def test_no_prompt_is_claimed_before_it_can_be_handed_over(params):
    """Another process could draw it."""
    engine = make_engine(prefill=4, samples=4, slots=16)
    run = make_loop(engine, params, make_problems(30))
    for _ in run.run():
        if run.table.waiting.sum() >= 16 and not run.admission.exhausted:
            assert not run.admission.queue


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize("tokens", [21, 24])
def test_the_pool_is_as_good_as_one_without_bounds(params, samples, tokens):
    """Prompts and responses at their longest, of prompts of which one sample each is left, or all:
    not a slot waits for a page."""
    most = CONFIG.rollout.max_response_tokens
    rng = np.random.default_rng(1)
    problems = [
        Problem(i, "", tuple(rng.integers(3, 32, tokens).tolist()), "", "test") for i in range(40)
    ]
    # Every prompt has one sample that goes on to the end.
    limits = np.where((np.arange(samples) == 0) | (np.arange(40)[:, None] >= 30), most, 1)

    def drawn(num_pages):
        engine = make_engine(
            page_tokens=4, samples=samples, num_pages=num_pages, prefill=4, stop_tokens=()
        )
        _, stats = generate(engine, params, problems, num_samples=samples, limits_QG=limits)
        return engine.spec, stats

    spec, found = drawn(None)
    assert found == drawn(10 * spec.shard_pages)[1]
    assert found.preempted == 0 and found.busy_slots >= 0.95 * found.slots_offered


def test_long_prompts_in_chunks_are_the_same(params, problems):
    expected = tokens_of(draw(make_engine(), params, problems)[0])
    chunked = make_engine(page_tokens=8, prefill_chunk_tokens=8)
    assert tokens_of(draw(chunked, params, problems)[0]) == expected


@pytest.mark.parametrize("chunk_pages, wanted", [(2, {2}), (4, {3})])
def test_chunks_are_no_smaller_where_they_do_not_divide_the_prompt(
    params, problems, monkeypatch, chunk_pages, wanted
):
    """Prompts of 3 pages and 5; the last chunk reaches beyond."""
    sizes, prefilling = set(), xla.prefilling

    def told(start, num):
        sizes.add(num // 5)
        return prefilling(start, num)

    monkeypatch.setattr(xla, "prefilling", told)
    chunked = make_engine(page_tokens=5, prefill_chunk_tokens=5 * chunk_pages, slots=12)
    assert chunked.prompt_pages == (3, 5)
    expected = tokens_of(draw(make_engine(), params, problems)[0])
    sizes.clear()
    assert tokens_of(draw(chunked, params, problems)[0]) == expected
    assert sizes == wanted


def test_limits_and_problems_that_come_later(params, problems):
    engine = make_engine(samples=2, decode_steps=3)
    expected = tokens_of(draw(make_engine(), params, problems)[0])
    source = (p for problem in problems for p in (None, problem, None))
    limits = 1 + (np.arange(len(problems))[:, None] + np.arange(4)) % 9
    responses, stats = generate(engine, params, source, limits_QG=limits)
    for q, row in enumerate(tokens_of(responses)):
        for s, tokens in enumerate(row):
            assert tokens == expected[q][s][: 1 + (q + s) % 9]
    assert stats.tokens == sum(len(t) for row in tokens_of(responses) for t in row)


def test_when_it_is_enough_the_rest_is_left(params, problems):
    engine, told = make_engine(), []
    loop = make_loop(engine, params, problems)
    for turn in loop.run():
        told += turn.finished
        if len(told) > 20:
            break
    responses = loop.responses()
    expected = tokens_of(draw(engine, params, problems)[0])
    assert 20 < len(told) < 80
    complete = [q for q, row in enumerate(responses) if row]
    assert 0 < len(complete) < 20
    for q in complete:
        assert tokens_of(responses)[q] == expected[q]


def test_logits_that_are_not_numbers_end_the_response(params, problems):
    broken = params | {"embed": params["embed"].at[31].set(jnp.nan)}
    responses, stats = draw(make_engine(), broken, problems[:3])
    every = [response for row in responses for response in row]
    assert [r.finish_reason for r in every] == ["invalid"] * 12 and stats.invalid == 12
    assert all(len(r.tokens) == 1 and r.log_probs[0] == 0 for r in every)


@pytest.mark.parametrize(
    "changes",
    [dict(page_tokens=4, prefill_chunk_tokens=8), dict(slots=4, samples=4, page_tokens=4)],
)
def test_logits_that_are_not_numbers_end_no_other_response(problems, changes):
    """A token whose embedding is not finite, in a prompt or drawn: what else is drawn beside it,
    in idle slots' company or on pages that were its own, stays as it is."""
    broken = make_params(replace(CONFIG, model=replace_model(CONFIG, tie_embeddings=False)))
    broken = broken | {"embed": broken["embed"].at[31].set(jnp.nan)}
    innocent = [p for p in problems if 31 not in p.prompt_tokens][:8]
    prompts = [(31,), (3, 4, 31, 5), (3, 31, *range(3, 23))]
    faulty = [Problem(90 + i, "", tokens, "", "test") for i, tokens in enumerate(prompts)]
    engine = make_engine(model=dict(tie_embeddings=False), temperature=0.0, **changes)
    alone, before = draw(engine, broken, innocent)
    beside, after = draw(engine, broken, [*faulty, *innocent])
    assert tokens_of(beside[3:]) == tokens_of(alone)
    assert {r.finish_reason for row in beside[:3] for r in row} == {"invalid"}
    assert all(len(r.tokens) == 1 for row in beside[:3] for r in row)
    assert after.invalid == before.invalid + 12
    for response in (r for row in alone for r in row):
        assert (response.finish_reason == "invalid") == (31 in response.tokens[:-1])
    assert 0 < before.invalid < 32, "some draw the token themselves, at once or later"


@pytest.mark.parametrize("top_k, top_p, min_p", [(3, 1.0, 0.0), (1, 1.0, 0.0), (0, 1.0, 0.2),
                                                (5, 0.8, 0.0), (4, 0.9, 0.3)])  # fmt: skip
def test_what_is_left_out(top_k, top_p, min_p):
    """Written from the definitions: top-k, of the rest the nucleus, of that min-p."""
    logits = np.random.default_rng(0).standard_normal((50, 11)).astype(np.float32) * 2
    column = lambda x: jnp.full(50, x)
    params = SamplingParams(1.0, column(top_p), column(top_k), column(min_p))
    kept = np.isfinite(truncate(jnp.asarray(logits), params))
    for row, keep in zip(logits.astype(np.float64), kept, strict=True):
        order = np.argsort(-row)[: top_k or None]
        p = np.exp(row[order]) / np.exp(row[order]).sum()
        n = len(p) if top_p == 1 else int(np.searchsorted(np.cumsum(p), top_p)) + 1
        expected = {v for v, x in zip(order[:n], p[:n]) if x >= min_p * p[0]}
        assert set(np.flatnonzero(keep)) == expected


def test_a_token_without_probability_is_never_drawn():
    """Whatever the random number: at both ends of its range, and where sums round."""
    logits = np.full((6, 300), -np.inf, np.float32)
    logits[0, 299] = logits[1, 0] = logits[2, 128] = logits[3, 127] = 0
    logits[4, [5, 140, 299]] = [0, -20, -40]
    logits[5] = np.where(np.arange(300) % 7 == 3, np.arange(300) * 0.1, -np.inf)
    for uniform in (0.0, 1e-30, 0.3, 0.999999, 1 - 2.0**-24, 1.0):
        tokens, lse = _invert(jnp.asarray(logits), jnp.full(6, uniform, jnp.float32))
        assert np.isfinite(logits[np.arange(6), np.asarray(tokens)]).all(), uniform
    np.testing.assert_allclose(lse, np.log(np.exp(logits).sum(1)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("at", [0.0, 1 - 2.0**-24])
def test_a_random_number_at_the_end_of_its_range_draws_no_improbable_token(at):
    """Of 300 tokens the first and the last have log-prob -60 and the 200th nearly all."""
    logits = np.full((1, 300), -60.0, np.float32)
    logits[0, 200] = 0.0
    token, _ = _invert(jnp.asarray(logits), jnp.array([at], jnp.float32))
    assert token.tolist() == [200]


def test_a_random_number_between_two_chunks_draws_no_improbable_token():
    """Tokens 3 and 200 have half each: 0.5 is what the first chunk sums to, and the next begins
    with tokens of log-prob -60."""
    logits = np.full((1, 300), -60.0, np.float32)
    logits[0, [3, 200]] = 0.0
    for at, wanted in ((0.0, 3), (0.49, 3), (0.5, 200), (0.51, 200)):
        token, _ = _invert(jnp.asarray(logits), jnp.array([at], jnp.float32))
        assert token.tolist() == [wanted]
