"""Rollouts: what a sample is, what it depends on, and JetStream's contract."""

import functools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.models import decoder, log_probs
from dapo_jax.models.attention import xla
from dapo_jax.models.sharding import copied_bytes, initial_params
from dapo_jax.rollout import slots
from dapo_jax.rollout.sampling import Mode, SamplingParams, _invert, exclude_tokens, sample
from dapo_jax.rollout.slots import NewRequests, Prefix
from dapo_jax.types import Problem, UserError
from dapo_jax.utils.compilations import CompilationCounter
from tests.support.engines import (
    CONFIG,
    EOS,
    KEY,
    assert_all_free,
    complete,
    generate,
    make_engine,
    make_loop,
    make_problems,
    tokens_of,
)
from tests.support.helpers import Sample, make_params, replace_model, rows_of

MOST = CONFIG.rollout.max_response_tokens
GREEDY = SamplingParams(0.0)


@pytest.fixture(scope="module")
def engine():
    """Each sample is a request of its own, and a prompt one page."""
    return make_engine()


@pytest.fixture(scope="module")
def small_pages():
    """The samples of a prompt share its pages. A prompt has up to six."""
    return make_engine(slots=13, page_tokens=4, samples=4, decode_steps=5)


@pytest.fixture(scope="module")
def responses(engine, params, problems):
    return generate(engine, params, problems)[0]


@pytest.fixture(scope="module")
def expected(responses):
    """Their tokens, which no engine, order or company may change."""
    return tokens_of(responses)


@pytest.mark.parametrize(
    "length, changes, message",
    [
        (0, {}, r"problem 7: its prompt has 0 tokens; .* 1 to 24 "),
        (25, {}, r"problem 7: its prompt has 25 tokens; .* 1 to 24 "),
        (5, dict(limits_QG=np.full((1, 4), 33)), r"limits_QG\[0, 0\] is 33 tokens; .* 1 to 32 "),
        (5, dict(limits_QG=np.array([[1, 0, 1, 1]])), r"limits_QG\[0, 1\] is 0 tokens"),
        (
            5,
            dict(sampling=SamplingParams(-1.0)),
            r"temperature must be 0 \(greedy\) or .* got -1.0",
        ),
        (5, dict(sampling=SamplingParams(1e-39)), r"temperature must .* from 1.2e-38; got 1e-39"),
        (5, dict(sampling=SamplingParams(1.0, 0.0)), r"top_p must be in \(0, 1\].* got 0.0"),
        (5, dict(sampling=SamplingParams(1.0, 1.0, -3)), r"top_k must be 0 or more.* got -3"),
        (5, dict(sampling=SamplingParams(min_p_X=1.5)), r"min_p must be from 0 to 1.* got 1.5"),
    ],
)
def test_impossible_requests_are_refused(engine, params, length, changes, message):
    with pytest.raises(UserError, match=message):
        generate(engine, params, [Problem(7, "", (3,) * length, "", "test")], **changes)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_the_trainers(small_pages, params, problems, temperature):
    """Every token, EOS included, under the tempered distribution and under the model itself."""
    request = SamplingParams(temperature)
    responses, _ = generate(small_pages, params, problems, sampling=request)
    if temperature == 1.0:
        for r in (r for row in responses for r in row):
            np.testing.assert_array_equal(r.log_probs, r.model_log_probs)
    for under, name in {1.0: "model_log_probs", temperature: "log_probs"}.items():
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


def test_responses_are_reported_as_they_end(engine, params, problems):
    """Each once, while others are still being generated, and the same as at the end."""
    spell = lambda sequences: [" ".join(map(str, sequence)) for sequence in sequences]
    loop = make_loop(engine, params, problems, detokenize=spell, num_samples=3)
    calls = [output.finished for output in loop.run() if output.finished]
    responses = loop.responses()
    ended = {(problem, sample): response for call in calls for problem, sample, response, _ in call}
    assert len(ended) == sum(len(call) for call in calls) == 3 * len(problems)
    assert len(calls) > 3
    for (problem, number), response in ended.items():
        same = responses[problem][number]
        np.testing.assert_array_equal(response.tokens, same.tokens)
        assert response.text == same.text == spell([response.tokens])[0]


def test_a_loop_can_be_left(engine, params, problems, expected):
    ended = []
    loop = make_loop(engine, params, problems)
    for output in loop.run():
        ended += output.finished
        if len(ended) > 20:
            break
    assert 20 < len(ended) < 80
    responses = tokens_of(loop.responses())
    whole = [q for q, row in enumerate(responses) if row]
    assert 0 < len(whole) < 20 and all(responses[q] == expected[q] for q in whole)


def test_temperature_zero_takes_the_most_probable_token(engine, params, problems):
    first, again = (
        generate(engine, params, problems, sampling=GREEDY, key=jax.random.key(k))[0]
        for k in (0, 1)
    )
    assert tokens_of(first) == tokens_of(again), "no key is used"
    assert all(len({tuple(tokens) for tokens in row}) == 1 for row in tokens_of(first))
    logits = jnp.asarray([[0.0, 2.0, 2.0, -1.0]])
    sampled = sample(
        logits, jnp.zeros((1, 2), jnp.uint32), jnp.zeros(1, jnp.int32), GREEDY, GREEDY.mode
    )
    assert sampled.token_B.tolist() == [1]
    np.testing.assert_allclose(sampled.log_prob_B, jax.nn.log_softmax(logits)[0, 1], rtol=1e-6)


@pytest.mark.parametrize(
    "dtype, mesh",
    [("float32", dict(fsdp=2)), ("bfloat16", dict(fsdp=2)), ("float32", dict(data=2))],
)
def test_weights_stay_where_they_are_or_move_by_one_program(monkeypatch, dtype, mesh):
    """`device_put` takes what is to lie otherwise through the host: it is given none."""
    engine = make_engine(num_devices=2, model=dict(compute_dtype=dtype), **mesh)
    params = initial_params(engine.config.model, engine.config.layout, engine.mesh, seed=0)
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


HEAD = dict(compute_dtype="bfloat16", head_dtype="float32")


@pytest.mark.parametrize(
    "model, axes",
    [
        pytest.param(HEAD | dict(tie_embeddings=False), {}, marks=pytest.mark.slow),
        (HEAD | dict(tie_embeddings=True), {}),
        pytest.param(
            HEAD | dict(tie_embeddings=False), dict(fsdp=1, tensor=2), marks=pytest.mark.slow
        ),
        pytest.param(HEAD | dict(lora_rank=2), {}, marks=pytest.mark.slow),
        (HEAD | dict(lora_rank=2, param_dtype="int8", tie_embeddings=True), {}),
    ],
)
def test_a_head_in_float32_is_read_as_the_trainer_holds_it(model, axes):
    """Its logits are those of float64 of the hidden states in bfloat16, in rollouts and in updates;
    of a head rounded to bfloat16 they are not."""
    devices = axes.get("tensor", 1)
    engine = make_engine(num_devices=devices, model=model, decode_steps=1, **axes)
    c = engine.config.model
    params = initial_params(c, engine.config.layout, engine.mesh, seed=0)
    loaded = engine.load_params(params)
    held = decoder.unembedding(params)
    assert held.dtype == (jnp.bfloat16 if c.lora_rank else jnp.float32)
    np.testing.assert_array_equal(decoder.unembedding(loaded.prefill), held)
    assert c.tie_embeddings or loaded.prefill["embed"].dtype == jnp.bfloat16
    assert loaded.prefill["layers"]["q"].dtype == model.get("param_dtype", "bfloat16")

    def expected(hidden_D, token, head_VD=held):
        z_V = np.asarray(head_VD, np.float64) @ np.asarray(hidden_D, np.float64)
        return z_V[token] - z_V.max() - np.log(np.sum(np.exp(z_V - z_V.max())))

    tokens = [5, 9, 11]
    prefix = engine.prefill(params=loaded, padded_tokens=np.array(tokens), true_length=3)
    state = engine.insert(prefix, engine.init_decode_state(), slot=0)
    hidden_D = prefix.hidden_PD[0, 0]
    assert hidden_D.dtype == jnp.bfloat16
    off = []
    for _ in range(4):
        state, results = engine.generate(loaded, state)
        token = int(results.token_RkB[0, 0, 0])
        found = float(results.log_prob_RkB[0, 0, 0])
        off.append(found - expected(hidden_D, token, held.astype(jnp.bfloat16)))
        assert abs(found - expected(hidden_D, token)) < 1e-5
        tokens.append(token)
        if not bool(state.active_B[0, 0]):
            break
        hidden_D = state.hidden_BD[0, 0]
    assert c.lora_rank or np.abs(off).max() > 1e-4, "or this test cannot fail"

    after = np.array(tokens[1:], np.int32)
    rows = rows_of([Sample(tokens[:1], after, 1.0, np.zeros(len(after), np.float32), 0.0)], 16)
    rows = jax.tree.map(jnp.asarray, rows)
    found_BT = log_probs.row_statistics(c, params, rows, temperature=1.0).log_prob_BT
    hidden_BTD = log_probs.row_hidden(c, params, rows, None)
    for t in range(1, len(tokens)):
        assert abs(float(found_BT[0, t]) - expected(hidden_BTD[0, t - 1], tokens[t])) < 1e-5


def test_a_call_copies_no_weights():
    """Decoding reads layers of their own. Slices of the stacked ones would be copied at every call:
    with a batch of 1 that would be most of what it reads."""
    engine = make_engine(model=dict(intermediate_size=4096), slots=1, prefill=1)
    shapes = decoder.param_shapes(engine.config.model)
    compiled = engine.lower(shapes, "decode", engine.config.params.mode).compile()
    matrix = shapes["layers"]["gate"].size * 4 // engine.config.model.num_layers
    assert compiled.memory_analysis().temp_size_in_bytes < matrix


def test_finish_reasons(responses):
    reasons = {"stop": 0, "length": 0}
    for r in (r for row in responses for r in row):
        reasons[r.finish_reason] += 1
        if r.truncated:
            assert len(r.tokens) == MOST and r.tokens[-1] != EOS
        else:
            assert r.tokens[-1] == EOS
    assert min(reasons.values()) > 0


def test_a_sample_depends_on_nothing_else(engine, small_pages, params, problems, expected):
    """Slots, pages, prefill batches, neighbours, order and devices do not change a response."""
    sampled = lambda engine, problems: tokens_of(generate(engine, params, problems)[0])
    assert sampled(small_pages, problems) == expected
    assert sampled(engine, problems[::-1])[::-1] == expected
    assert sampled(engine, problems[7:9]) == expected[7:9]
    fewer = generate(engine, params, problems, num_samples=2)[0]
    assert tokens_of(fewer) == [row[:2] for row in expected]
    several = make_engine(num_devices=4, data=2, tensor=2)
    assert sampled(several, problems[:10]) == expected[:10]
    # Rules that lay heads over the rows' axis: in rollouts a device has all heads of its slots.
    rules = dict(CONFIG.mesh.rules) | dict(embed=None, heads="fsdp", kv_heads="fsdp")
    layout = replace(CONFIG.mesh, data=1, fsdp=2, rules=tuple(rules.items()))
    over_slots = make_engine(num_devices=2, layout=layout)
    assert sampled(over_slots, problems[:10]) == expected[:10]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_neighbours_do_not_change_a_bit(small_pages, params, problems, dtype):
    """Responses alone and in another order: their log-probs are equal too, of prompts that are
    padded to 12 and to 24 tokens."""
    assert {len(p.prompt_tokens) <= 12 for p in problems[:8]} == {True, False}
    engine = small_pages
    if dtype != "float32":
        engine = make_engine(slots=13, page_tokens=4, model=dict(compute_dtype=dtype))
    whole, _ = generate(engine, params, problems)
    assert len({len(r.tokens) for row in whole for r in row}) > 5
    backwards = generate(engine, params, problems[::-1])[0][::-1]
    alone = [generate(engine, params, [p])[0][0] for p in problems[:4]]
    for one, other in (*zip(whole, backwards, strict=True), *zip(whole[:4], alone, strict=True)):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a.tokens, b.tokens)
            np.testing.assert_array_equal(a.log_probs, b.log_probs)


def test_samples_problems_epochs_and_steps_differ(engine, params, problems):
    prompt = problems[3].prompt_tokens
    same = [Problem(id, "", prompt, "", "", epoch=epoch) for id, epoch in ((0, 0), (1, 0), (0, 1))]
    first, other = (
        tokens_of(generate(engine, params, same, key=key)[0]) for key in (KEY, jax.random.key(8))
    )
    sampled = [tuple(tokens) for row in first + other for tokens in row]
    assert len(sampled) == 24
    long = [tokens for tokens in sampled if len(tokens) > 2]  # an end at once may come twice
    assert len(set(long)) == len(long) > 15
    # Not only whole responses: first tokens must not be shared by all samples of a prompt either.
    assert all(len({tokens[0] for tokens in row}) > 1 for row in first)


def test_jetstreams_own_calls_give_the_same_tokens(engine, params, problems, expected):
    """prefill, insert, generate and get_result_at_slot alone, as JetStream's drivers use them; a
    prompt inserted where another is generated takes its place."""
    key = jax.random.fold_in(jax.random.fold_in(KEY, problems[5].id), problems[5].epoch)
    weights, state = engine.load_params(params), engine.init_decode_state()
    padded = np.zeros(engine.max_prefill_length, np.int32)
    padded[: len(problems[5].prompt_tokens)] = problems[5].prompt_tokens
    other = engine.prefill(params=weights, padded_tokens=padded + 3, true_length=24)
    prefix = engine.prefill(
        params=weights,
        padded_tokens=padded,
        true_length=len(problems[5].prompt_tokens),
        key_2=jax.random.key_data(key),
    )
    for slot in (15, 3, 0):
        state = engine.insert(other, state, slot=slot)
    state, results = engine.generate(weights, state)
    assert results.convert_to_numpy().get_result_at_slot(3).valid.all()
    for slot in range(4):
        state = engine.insert(prefix, state, slot=slot)
    got = [[] for _ in range(4)]
    for _ in range(MOST // engine.config.decode_steps):
        state, results = engine.generate(weights, state)
        results.copy_to_host_async()
        results = results.convert_to_numpy()
        for slot in range(4):
            data = results.get_result_at_slot(slot)
            assert data.tokens.shape == data.valid.shape == (1, 8)
            got[slot] += data.tokens[data.valid > 0].tolist()
            if data.valid.any():
                assert data.lengths[0] == len(got[slot])
        assert not results.get_result_at_slot(9).valid.any()
    assert got == expected[5]
    assert engine.max_concurrent_decodes == 16 and engine.samples_per_slot == 1
    free = np.asarray(engine.insert(prefix, state, slot=15).num_free)
    assert free == engine.config.shard_pages - 2, "replaced and ended prompts gave up their pages"


def test_a_cancellation_on_one_shard_does_not_delay_preemption_on_another(monkeypatch, params):
    """One response of the first shard is ended after each call, as by a stop string. Sequences of
    the second wait for pages in two calls in a row, the second made before the first is read."""
    pages = 61
    engine = make_engine(
        prefill=2,
        page_tokens=4,
        num_pages=2 * pages,
        decode_steps=4,
        stop_tokens=(),
        num_devices=2,
        data=2,
    )
    problems = [Problem(i, "", tuple(range(3, 9)), "", "test") for i in range(60)]
    loop = make_loop(engine, params, problems, num_samples=1)
    rules, call, moves = loop._apply_rules, engine.generate, []

    def with_an_end(before_REG, *arguments):
        ended, thinking = rules(before_REG, *arguments)
        for e, g in np.argwhere(loop.table.count[0] > before_REG[0])[:1].tolist():
            ended[0, e, g] = "stop"
        return ended, thinking

    def recorded(*arguments):
        busy = bool(loop.table.unfinished[1].any())
        state, output = call(*arguments)
        moves.append("m" if not busy or bool((output.flags_RkB[1] > 0).any()) else "w")
        return state, output

    monkeypatch.setattr(loop, "_apply_rules", with_an_end)
    monkeypatch.setattr(engine, "generate", recorded)
    complete(loop)
    waits = [len(run) for run in "".join(moves).split("m")]
    assert loop.stats.preempted > 0 and max(waits) <= 3
    assert_all_free(loop, pages)


def test_what_jetstreams_calls_cannot_do_is_refused(engine, params):
    loaded = engine.load_params(params)
    for tokens, length in ((25, 25), (5, 0), (5, 6)):
        with pytest.raises(UserError, match=rf"true_length \({length}\) .* max_prefill_length"):
            engine.prefill(params=loaded, padded_tokens=np.full(tokens, 3), true_length=length)
    state = engine.init_decode_state()
    for slot in (-1, 16):
        with pytest.raises(UserError, match=rf"slot \({slot}\) must be from 0 to 15"):
            engine.insert(None, state, slot=slot)
    with pytest.raises(UserError, match="num_pages must be None.* got 224"):
        make_engine(num_pages=224).insert(None, state, slot=0)


def test_slots_stay_busy_and_nothing_recompiles(engine, params, problems):
    many = [p._replace(id=i) for i, p in enumerate(problems * 4)]
    generate(engine, params, problems)
    counter = CompilationCounter()
    responses, stats = generate(engine, params, many, num_samples=3)
    assert counter.count == 0
    assert stats.busy_slots / stats.slots_offered > 0.85
    assert stats.sampled == stats.tokens and 0.5 < stats.sampled / stats.could_sample <= 1.0
    assert stats.tokens == sum(len(tokens) for row in tokens_of(responses) for tokens in row)


def test_a_process_whose_first_prompts_come_late_compiles_nothing_then(params, problems):
    """The keys of problems are on the devices in shapes that no other test has."""
    engine = make_engine(num_devices=2, data=2, prefill=10, slots=10)
    engine.warm_up(engine.load_params(params), [SamplingParams().mode], say=print)
    step_key = jax.random.fold_in(KEY, 3)
    counter = CompilationCounter()
    generate(engine, params, problems, key=step_key)
    assert counter.count == 0


def test_short_pages_change_no_token(params, problems, expected):
    """Sequences wait for pages, are preempted and resumed; then every page is free again."""
    pages = 1 + 3 + 7 + 2 + 2  # a prompt, a sequence, and a few more
    assert pages < make_engine(page_tokens=8, samples=4).config.shard_pages / 3
    engine = make_engine(page_tokens=8, samples=4, num_pages=2 * pages, num_devices=2, data=2)
    run = make_loop(engine, params, problems[:5])
    assert complete(run) == expected[:5]
    assert run.stats.preempted > 0
    assert_all_free(run, pages)


def test_no_prompt_is_claimed_before_it_can_be_handed_over(small_pages, params):
    """Another process could generate it."""
    padded_alike = [p for p in make_problems(60) if len(p.prompt_tokens) <= 12]
    run = make_loop(small_pages, params, padded_alike)
    for _ in run.run():
        if run.table.unfinished.sum() >= 13 and not run.admission.exhausted:
            assert not run.admission.queue


@pytest.mark.parametrize("samples, tokens", [(1, 24), (4, 21)])
def test_an_unbounded_pool_is_large_enough(monkeypatch, samples, tokens):
    """The longest prompts and responses, with one sample of each prompt left, or all of them: no
    slot is empty, or waits for a page, while samples wait."""
    rng = np.random.default_rng(1)
    problems = [
        Problem(i, "", tuple(rng.integers(3, 32, tokens).tolist()), "", "test") for i in range(40)
    ]
    # Every prompt has one sample that goes on to the end.
    limits = np.where((np.arange(samples) == 0) | (np.arange(40)[:, None] >= 30), MOST, 1)
    config = replace(CONFIG, model=replace_model(CONFIG, num_layers=1))
    engine = make_engine(
        model=dict(num_layers=1), page_tokens=4, samples=samples, prefill=4, stop_tokens=()
    )
    outputs, call = [], engine.generate

    def recorded(*arguments):
        state, output = call(*arguments)
        outputs.append(output)
        return state, output

    monkeypatch.setattr(engine, "generate", recorded)
    _, stats = generate(
        engine, make_params(config), problems, num_samples=samples, limits_QG=limits
    )
    assert stats.preempted == 0 and stats.busy_slots >= 0.95 * stats.slots_offered
    busy_k = np.concatenate([(np.asarray(o.flags_RkB[0]) > 0).sum(axis=1) for o in outputs])
    waiting_k = np.concatenate([np.asarray(o.waiting_Rk[0]) for o in outputs])
    assert (busy_k[waiting_k > 0] == 16).all() and (waiting_k > 0).sum() > 30
    assert min(int(o.free_R[0]) for o in outputs) > 0


@pytest.mark.parametrize("chunk_pages, wanted", [(1, {1}), (2, {2}), (4, {3})])
def test_long_prompts_in_chunks_are_the_same(engine, params, monkeypatch, chunk_pages, wanted):
    """Prompts of 3 pages and of 5. Chunks are no smaller where they do not divide the prompt: the
    last one reaches beyond."""
    sizes, prefilling = set(), xla.prefilling

    def recorded(start, num):
        sizes.add(num)
        return prefilling(start, num)

    monkeypatch.setattr(xla, "prefilling", recorded)
    chunked = make_engine(page_tokens=5, prefill_chunk_tokens=5 * chunk_pages, slots=12)
    assert chunked.prompt_pages == (3, 5)
    for tokens in (11, 24):
        prompt = np.random.default_rng(tokens).integers(3, 32, tokens)
        whole, parts = (
            e.prefill(params=e.load_params(params), padded_tokens=prompt, true_length=tokens)
            for e in (engine, chunked)
        )
        np.testing.assert_allclose(parts.hidden_PD, whole.hidden_PD, rtol=0, atol=1e-5)
        for a, b in zip(parts.pages, whole.pages, strict=True):
            # [1, L, pages, K, page, H]: tokens side by side.
            a, b = (np.moveaxis(np.asarray(x)[0], 2, 1) for x in (a, b))
            a, b = (x.reshape(*x.shape[:2], -1, x.shape[-1])[:, :, :tokens] for x in (a, b))
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
    assert sizes - {32} == {5 * pages for pages in wanted}


def test_limits_and_problems_that_come_later(engine, params, problems, expected):
    source = (p for problem in problems for p in (None, problem, None))
    limits = 1 + (np.arange(len(problems))[:, None] + np.arange(4)) % 9
    responses, stats = generate(engine, params, source, limits_QG=limits)
    for q, row in enumerate(tokens_of(responses)):
        for s, tokens in enumerate(row):
            assert tokens == expected[q][s][: 1 + (q + s) % 9]
    assert stats.tokens == sum(len(t) for row in tokens_of(responses) for t in row)


def test_logits_that_are_not_numbers_end_the_response(engine, params, problems):
    broken = params | {"embed": params["embed"].at[31].set(jnp.nan)}
    responses, _ = generate(engine, broken, problems[:3])
    every = [response for row in responses for response in row]
    assert [r.finish_reason for r in every] == ["invalid"] * 12
    assert all(len(r.tokens) == 1 and r.log_probs[0] == 0 for r in every)


def test_logits_that_are_not_numbers_end_no_other_response(problems):
    """The embedding of one token is not finite. Where it is in a prompt or sampled, neighbours,
    idle slots and later owners of its pages stay as they are."""
    broken = make_params(replace(CONFIG, model=replace_model(CONFIG, tie_embeddings=False)))
    broken = broken | {"embed": broken["embed"].at[31].set(jnp.nan)}
    innocent = [p for p in problems if 31 not in p.prompt_tokens][:8]
    prompts = [(31,), (3, 4, 31, 5), (3, 31, *range(3, 23))]
    faulty = [Problem(90 + i, "", tokens, "", "test") for i, tokens in enumerate(prompts)]
    engine = make_engine(
        model=dict(tie_embeddings=False),
        slots=4,
        samples=4,
        page_tokens=4,
        prefill_chunk_tokens=8,
        params=GREEDY,
    )
    alone, _ = generate(engine, broken, innocent)
    together, _ = generate(engine, broken, [*faulty, *innocent])
    assert tokens_of(together[3:]) == tokens_of(alone)
    assert {r.finish_reason for row in together[:3] for r in row} == {"invalid"}
    assert all(len(r.tokens) == 1 for row in together[:3] for r in row)
    for response in (r for row in alone for r in row):
        assert (response.finish_reason == "invalid") == (31 in response.tokens[:-1])
    invalid = sum(response.invalid for row in alone for response in row)
    assert 0 < invalid < 32, "some sample the token themselves, at once or later"


def test_sampling_frequencies_and_log_probs():
    logits = jnp.log(jnp.array([0.5, 0.25, 0.15, 0.1]))
    B = 4000
    keys = jax.vmap(lambda i: jax.random.key_data(jax.random.fold_in(KEY, i)))(jnp.arange(B))
    for top_p, expected in ((1.0, [0.5, 0.25, 0.15, 0.1]), (0.7, [2 / 3, 1 / 3, 0, 0])):
        logits_BV = jnp.broadcast_to(logits, (B, 4))
        params = SamplingParams(top_p_X=top_p)
        sampled = sample(logits_BV, keys, jnp.zeros(B, jnp.int32), params, params.mode)
        tokens = np.asarray(sampled.token_B)
        np.testing.assert_allclose(np.bincount(tokens, minlength=4) / B, expected, atol=0.03)
        np.testing.assert_allclose(
            np.exp(sampled.log_prob_B), np.array(expected)[tokens], rtol=1e-5
        )
        model_probs = np.array([0.5, 0.25, 0.15, 0.1])[tokens]
        np.testing.assert_allclose(np.exp(sampled.model_log_prob_B), model_probs, rtol=1e-5)


@pytest.mark.parametrize("temperature", [1e-6, 1e-8, 1e-20, 1.2e-38])
def test_a_temperature_near_zero_samples_the_most_probable_token(temperature):
    rows = np.random.default_rng(0).standard_normal((64, 1000)) * 3 + 20
    rows[:, 7] = 40.0
    params = SamplingParams(temperature)
    params.check()
    keys = jnp.arange(128, dtype=jnp.uint32).reshape(64, 2)
    logits, first = jnp.asarray(rows, jnp.float32), jnp.zeros(64, jnp.int32)
    sampled = jax.jit(sample, static_argnums=4)(logits, keys, first, params, params.mode)
    assert sampled.token_B.tolist() == [7] * 64
    assert sampled.log_prob_B.tolist() == [0.0] * 64


invert, truncated = jax.jit(_invert), jax.jit(exclude_tokens, static_argnums=2)


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.75, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("top_k, min_p", [(0, 0.0), (3, 0.0), (1, 0.0), (0, 0.2), (4, 0.3)])
def test_truncation(top_k, top_p, min_p):
    """Written from the definitions: top-k, of the rest the nucleus, of that min-p."""
    logits = np.random.default_rng(0).standard_normal((50, 11)).astype(np.float32) * 2
    params = SamplingParams(1.0, top_p, top_k, min_p)
    kept = np.isfinite(truncated(jnp.asarray(logits), params.full(50), params.mode))
    for row, keep in zip(logits.astype(np.float64), kept, strict=True):
        order = np.argsort(-row)[: top_k or None]
        p = np.exp(row[order]) / np.exp(row[order]).sum()
        n = len(p) if top_p == 1 else int(np.searchsorted(np.cumsum(p), top_p)) + 1
        expected = {v for v, x in zip(order[:n], p[:n]) if x >= min_p * p[0]}
        assert set(np.flatnonzero(keep)) == expected


@pytest.mark.parametrize(
    "params, passes",
    [((1.0, 1.0, 0, 0.1), 0), ((0.6, 0.7), 1), ((0.6, 1.0, 20), 1), ((0.6, 0.95, 20), 2)],
)
def test_only_what_is_asked_for_is_searched(params, passes):
    """Each search goes 32 times through the vocabulary."""
    params = SamplingParams(*params)
    assert params.mode.excludes_tokens
    logits = jax.ShapeDtypeStruct((4, 300), jnp.float32)
    traced = str(jax.make_jaxpr(lambda x: exclude_tokens(x, params, params.mode))(logits))
    assert len(re.findall(r"\b(?:scan|while)\[", traced)) == passes


def test_samples_that_wait_for_pages_do_not_move_the_clock():
    """It orders requests and sequences in 30 bits; a long evaluation makes millions of steps."""
    c = make_engine(slots=8, prefill=2, page_tokens=4, samples=4, num_pages=12).config
    new = jax.tree.map(lambda x: jnp.asarray(x[0]), NewRequests.none(c, 2, SamplingParams()))
    new = new._replace(
        request_P=jnp.arange(2, dtype=jnp.int32), num_samples_P=jnp.full(2, 4, jnp.int32)
    )
    pages = tuple(jnp.zeros(x.shape, x.dtype) for x in c.pool_layout.pool(c.model, 4))
    hidden = jnp.zeros((2, c.model.hidden_size))
    prefix = Prefix(pages, hidden, jnp.full(2, 5, jnp.int32), jnp.zeros((2, 2), jnp.uint32))
    state = slots.refill(slots.insert(slots.empty(c), prefix, new, 4), 4)
    working, waiting = int(state.active_B.sum()), int(state.requests.waiting_E.sum())
    assert 0 < working < 8 and waiting == 8 - working
    serials = state.serial_B[state.active_B].tolist()
    assert len(set(serials)) == working and max(serials) < state.clock
    for _ in range(3):
        later = slots.refill(state, 4)
        assert later.clock == state.clock and int(later.requests.waiting_E.sum()) == waiting


def test_a_token_without_probability_is_never_sampled():
    """Whatever the random number: at both ends of its range, and where sums round."""
    logits = np.full((6, 300), -np.inf, np.float32)
    logits[0, 299] = logits[1, 0] = logits[2, 128] = logits[3, 127] = 0
    logits[4, [5, 140, 299]] = [0, -20, -40]
    logits[5] = np.where(np.arange(300) % 7 == 3, np.arange(300) * 0.1, -np.inf)
    for uniform in (0.0, 1e-30, 0.3, 0.999999, 1 - 2.0**-24, 1.0):
        tokens, lse = invert(jnp.asarray(logits), jnp.full(6, uniform, jnp.float32))
        assert np.isfinite(logits[np.arange(6), np.asarray(tokens)]).all(), uniform
    np.testing.assert_allclose(lse, np.log(np.exp(logits).sum(1)), rtol=1e-5, atol=1e-6)


def test_an_excluded_token_is_never_sampled_where_sums_round():
    """50 of 152k tokens are left. Sums of such a row rise by rounding where no token is."""
    rng, V = np.random.default_rng(0), 151_936
    logits = np.full(V, -np.inf)
    logits[rng.choice(V, 50, replace=False)] = rng.standard_normal(50) * 2
    until = np.cumsum(np.exp(logits[np.isfinite(logits)]))
    near = np.round(until[:-1, None] / until[-1] * 2**23) + np.arange(-3, 4)
    row_1V = jnp.asarray(logits, jnp.float32)[None]
    one = lambda uniform: invert(row_1V, uniform[None])[0][0]
    tokens = jax.lax.map(one, jnp.asarray(near.ravel() / 2**23, jnp.float32))
    assert np.isfinite(logits[np.asarray(tokens)]).all()


@pytest.mark.parametrize(
    "likely, at, wanted",
    [
        ([200], 0.0, 200),  # at both ends of the range of the random number
        ([200], 1 - 2.0**-24, 200),
        ([3, 200], 0.0, 3),  # half each: 0.5 is the sum of the first chunk,
        ([3, 200], 0.49, 3),  # and the next begins with improbable tokens
        ([3, 200], 0.5, 200),
        ([3, 200], 0.51, 200),
    ],
)
def test_no_random_number_samples_an_improbable_token(likely, at, wanted):
    """All but one or two of 300 tokens have a log-prob of -60."""
    logits = np.full((1, 300), -60.0, np.float32)
    logits[0, likely] = 0.0
    token, _ = invert(jnp.asarray(logits), jnp.array([at], jnp.float32))
    assert token.tolist() == [wanted]


def test_a_shard_without_samples_does_not_wait_for_another_shard(params):
    """A shard has pages for one prompt and one sequence. One response is long, five are short."""
    pages = 1 + 6 + 14 + 2
    engine = make_engine(
        slots=4,
        prefill=2,
        page_tokens=4,
        num_pages=2 * pages,
        decode_steps=1,
        stop_tokens=(),
        num_devices=2,
        data=2,
    )
    problems = [Problem(i, "", tuple(range(3, 27)), "", "test") for i in range(6)]
    limits = np.array([[MOST], *[[1]] * 5])
    loop = make_loop(engine, params, problems, num_samples=1, limits_QG=limits)
    order = [finished.prompt for output in loop.run() for finished in output.finished]
    assert order == [1, 2, 3, 4, 5, 0]
    assert_all_free(loop, pages)


@pytest.mark.parametrize("params", [SamplingParams(top_k_X=1), SamplingParams(top_p_X=0.3)])
def test_a_token_as_probable_as_the_last_one_kept_is_kept(params):
    """0.0 and -0.0 are one number, in a compiled program too."""
    logits = jnp.array([[0.0, -0.0, -5.0], [-0.0, 0.0, -5.0]])
    kept = np.isfinite(truncated(logits, params.full(2), params.mode))
    assert kept.tolist() == [[True, True, False]] * 2


def test_each_row_has_its_own_parameters():
    """A sampler has the features of all rows of a call. Each row is as in a call of its own."""
    every = [SamplingParams(), GREEDY, SamplingParams(0.7), SamplingParams(min_p_X=0.3)]
    every += [SamplingParams(top_k_X=2), SamplingParams(top_p_X=0.5)]
    rows = np.random.default_rng(0).standard_normal((50 * len(every), 20)) * 2
    keys = jax.vmap(lambda i: jax.random.key_data(jax.random.fold_in(KEY, i)))(
        jnp.arange(len(rows))
    )
    logits, first = jnp.asarray(rows, jnp.float32), jnp.zeros(len(rows), jnp.int32)
    columns = (np.tile(column, 50) for column in zip(*every))
    full = SamplingParams(*columns)
    full = SamplingParams(*(x.astype(y.dtype) for x, y in zip(full, SamplingParams().full(1))))
    together = sample(logits, keys, first, full, Mode(*[True] * 5))
    for i, params in enumerate(every):
        own = slice(i, None, len(every))
        alone = sample(logits[own], keys[own], first[own], params, params.mode)
        np.testing.assert_array_equal(together.token_B[own], alone.token_B)
        np.testing.assert_allclose(together.log_prob_B[own], alone.log_prob_B, atol=1e-5)
        np.testing.assert_allclose(
            together.model_log_prob_B[own], alone.model_log_prob_B, atol=1e-5
        )
    # At top-p 1 a token is kept however improbable, also next to a row with less.
    params = SamplingParams(top_p_X=np.array([1.0, 0.5], np.float32))
    kept = truncated(jnp.array([[0.0, -30.0], [0.0, -30.0]]), params, Mode(top_p=True))
    assert np.isfinite(kept).tolist() == [[True, True], [True, False]]


def test_where_pages_are_short_the_sequences_that_came_first_get_them():
    c = make_engine(slots=4, prefill=2, page_tokens=4, samples=4, num_pages=12).config
    state = slots.empty(c)
    state = state._replace(
        active_B=jnp.ones(4, bool),
        length_B=jnp.full(4, 4, jnp.int32),  # the only page of each is full
        used_B=jnp.ones(4, jnp.int32),
        serial_B=jnp.array([7, 3, 5, 9], jnp.int32),
        num_free=jnp.int32(2),
    )
    after, continues_B = slots.grow(state, 4)
    assert continues_B.tolist() == [False, True, True, False]
    assert after.used_B.tolist() == [1, 2, 2, 1] and int(after.num_free) == 0


def test_prompts_of_other_lengths_keep_their_place(small_pages, params):
    """Padded to 12 tokens or to 24: the next batch begins with the first prompt that waits."""
    problems = [Problem(i, "", (3,) * n, "", "test") for i, n in enumerate((5, 20, 21, 6, 22))]
    admission = make_loop(small_pages, params, problems).admission
    admission.take(5)
    batch = admission._next_batch([list(range(10))], np.zeros(1, bool))
    assert [request.number for _, _, request in batch] == [0, 3]
    assert [request.number for request in admission.queue] == [1, 2, 4]


def test_a_batch_of_prompts_is_shared_by_the_shards(params, problems):
    """Each goes where there is least to do, those of the same batch included."""
    engine = make_engine(num_devices=2, data=2)
    admission = make_loop(engine, params, problems[:4], num_samples=1).admission
    admission.take(4)
    batch = admission._next_batch([[0, 1, 2, 3], [0, 1, 2, 3]], np.zeros(2, bool))
    assert [(shard, slot) for shard, slot, _ in batch] == [(0, 0), (1, 0), (0, 1), (1, 1)]
