"""Log-probs and entropy against sums over the vocabulary; no array as large as logits."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dapo_jax.models import chunked_softmax, log_probs, sharding
from dapo_jax.models.sharding import AXES, AXIS_TYPES, HeadLayout, row_sharding
from dapo_jax.training import packing
from tests.support.helpers import make_mesh, make_params, tiny_config

B, T, D, V = 4, 24, 8, 64


def arrays(dtype, vocab=V):
    """Hidden states and unembedding, targets, and weights of the statistics."""
    rng = np.random.default_rng(3)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)
    inputs = normal(B, T, D), 2 * normal(vocab, D)
    return inputs, jnp.asarray(rng.integers(0, vocab, (B, T))), normal(2, B, T)


def weighted(statistics, weights):
    """A loss that reads both statistics, and the statistics."""
    return sum(jnp.sum(w * x) for w, x in zip(weights, statistics, strict=True)), statistics


def plain(hidden, unembed, targets, weights):
    log_p = jax.nn.log_softmax(jnp.einsum("btd,vd->btv", hidden, unembed) / 0.7)
    of_target = jnp.take_along_axis(log_p, targets[..., None], -1)[..., 0]
    return weighted((of_target, -jnp.sum(jnp.exp(log_p) * log_p, -1)), weights)


def ours(hidden, unembed, targets, weights, layout=None, wanted=None, exact=False):
    statistics = functools.partial(
        log_probs.token_statistics,
        targets_BT=targets,
        temperature=0.7,
        chunk_tokens=5,
        layout=layout,
        wanted_BT=wanted,
        exact=exact,
    )
    return weighted(jax.checkpoint(statistics)(hidden, unembed)[:2], weights)


def some_tokens(number):
    """So many tokens [B, T], anywhere."""
    wanted = np.zeros(B * T, bool)
    wanted[np.random.default_rng(4).permutation(B * T)[:number]] = True
    return jnp.asarray(wanted.reshape(B, T))


def with_gradient(f):
    return jax.value_and_grad(f, argnums=(0, 1), has_aux=True)


@pytest.mark.parametrize("dtype, tolerance", [(np.float64, 1e-12), (np.float32, 1e-5)])
@pytest.mark.parametrize("part", [64, 16, 15, 1])
def test_parts_of_the_vocabulary_change_nothing(monkeypatch, part, dtype, tolerance):
    """Also where parts have to be filled up: 64 columns in parts of 13."""
    with jax.enable_x64(True):
        exact, targets, weights = arrays(np.float64)
        (_, expected), expected_grads = with_gradient(plain)(*exact, targets, weights)
        monkeypatch.setattr(chunked_softmax, "VOCAB_CHUNK", part)
        inputs, _, weights = arrays(dtype)
        (_, found), grads = jax.jit(with_gradient(ours))(*inputs, targets, weights)
    for x, y in zip((*found, *grads), (*expected, *expected_grads)):
        assert x.dtype == dtype
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance * np.abs(y).max())


@pytest.mark.parametrize("number", [43, B * T])
@pytest.mark.parametrize("part", [64, 15])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 1, 1, 2), (1, 2, 2, 2)])
def test_collision_probabilities_are_sums_of_squares(monkeypatch, number, part, shape):
    """On one device and on several, with parts of the vocabulary that are filled up."""
    monkeypatch.setattr(chunked_softmax, "VOCAB_CHUNK", part)
    mesh = jax.make_mesh(
        shape, AXES, devices=jax.devices()[: math.prod(shape)], axis_types=AXIS_TYPES
    )
    layout = HeadLayout(mesh, row_sharding(mesh).spec, PartitionSpec("tensor", "fsdp"))
    wanted = some_tokens(number)
    (hidden, unembed), targets, _ = arrays(np.float32)
    program = functools.partial(
        log_probs.token_statistics,
        temperature=0.7,
        chunk_tokens=5,
        layout=layout,
        collision=True,
    )
    found = jax.jit(program)(hidden, unembed, targets, wanted_BT=wanted)
    logits = np.einsum("btd,vd->btv", hidden, unembed) / 0.7
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    expected = (weights**2).sum(axis=-1) / weights.sum(axis=-1) ** 2
    np.testing.assert_allclose(found.collision_BT[wanted], expected[wanted], rtol=1e-5)


@pytest.mark.parametrize("number", [0, 1, 40, 43, B * T])
def test_unwanted_tokens_change_nothing(number):
    """Of 96 tokens in chunks of 5, wherever they are."""
    wanted = some_tokens(number)
    with jax.enable_x64(True):
        inputs, targets, weights = arrays(np.float64)
        weights = jnp.where(wanted, weights, 0.0)
        (_, expected), expected_grads = with_gradient(plain)(*inputs, targets, weights)
        program = jax.jit(with_gradient(lambda *arguments: ours(*arguments, wanted=wanted)))
        (_, found), grads = program(*inputs, targets, weights)
    for x, y in zip(found, expected):
        np.testing.assert_allclose(x[wanted], y[wanted], rtol=1e-12, atol=1e-12)
        assert np.isfinite(x).all()
    for x, y in zip(grads, expected_grads):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12)


def test_chunks_without_a_wanted_token_are_skipped():
    """40 of 96 tokens fill 8 chunks of 5: the hidden states of the others are not looked at."""
    wanted = some_tokens(40)
    (hidden, unembed), targets, weights = arrays(np.float32)
    weights = jnp.where(wanted, weights, 0.0)
    program = jax.jit(with_gradient(lambda *arguments: ours(*arguments, wanted=wanted)))
    expected = program(jnp.where(wanted[..., None], hidden, 0.0), unembed, targets, weights)
    broken = jnp.where(wanted[..., None], hidden, jnp.nan)
    (_, found), grads = program(broken, unembed, targets, weights)
    for x, y in zip(found, expected[0][1]):
        np.testing.assert_array_equal(x[wanted], y[wanted])
    for x, y in zip(grads, expected[1]):
        np.testing.assert_array_equal(x, y)
        assert np.isfinite(x).all()


@pytest.mark.parametrize(
    "length, most, size",
    [
        (22_528, 4096, 3840),  # tokens of a long row: 6 parts
        (38_016, 4096, 3840),  # a quarter of Qwen2.5's vocabulary: 10
        (22_528, 1100, 1024),  # not between tiles at most 1,100
        (3000, 4096, 3000),
        (4096, 1024, 1024),
        (100, 30, 25),  # too small to matter
        (1, 1, 1),
    ],
)
def test_large_chunks_are_multiples_of_a_tpu_tile(length, most, size):
    assert chunked_softmax.chunk_size(length, most) == size


def head_in_float64(hidden_BTD, unembed_VD, targets_BT, weights, temperature):
    """Log-probs, entropies and the gradients of their weighted sum by both factors, token by
    token, from the definition."""
    h_BTD, w_VD = np.asarray(hidden_BTD, np.float64), np.asarray(unembed_VD, np.float64)
    log_prob, entropy = np.zeros((B, T)), np.zeros((B, T))
    d_h, d_w = np.zeros_like(h_BTD), np.zeros_like(w_VD)
    for b, t in np.ndindex(B, T):
        z_V = w_VD @ h_BTD[b, t] / temperature
        log_p_V = z_V - z_V.max() - np.log(np.sum(np.exp(z_V - z_V.max())))
        p_V, target = np.exp(log_p_V), int(targets_BT[b, t])
        log_prob[b, t], entropy[b, t] = log_p_V[target], -np.sum(p_V * log_p_V)
        d_V = float(weights[0, b, t]) * ((np.arange(len(p_V)) == target) - p_V)
        d_V -= float(weights[1, b, t]) * p_V * (log_p_V + entropy[b, t])
        d_h[b, t] = w_VD.T @ d_V / temperature
        d_w += np.outer(d_V, h_BTD[b, t]) / temperature
    return log_prob, entropy, d_h, d_w


@pytest.mark.parametrize("held", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [None, (1, 2, 1, 4), (2, 1, 2, 2)])
def test_an_exact_head_rounds_nothing(monkeypatch, shape, held):
    """With hidden states in bfloat16: the logits, what is made of them and the gradients are those
    of float64. Rounding the head or the gradient by the logits would be off a hundred times as far.

    A head in bfloat16 is the frozen one of adapters."""
    monkeypatch.setattr(chunked_softmax, "VOCAB_CHUNK", 16)
    (hidden, unembed), targets, weights = arrays(np.float32)
    hidden, unembed = hidden.astype(jnp.bfloat16), unembed.astype(held)
    z = np.asarray(hidden, np.float64) @ np.asarray(unembed, np.float64).T
    expected = head_in_float64(hidden, unembed, targets, weights, 0.7)
    layout = None
    if shape is not None:
        mesh = jax.make_mesh(shape, AXES, axis_types=AXIS_TYPES)
        layout = HeadLayout(mesh, row_sharding(mesh).spec, PartitionSpec("tensor", "fsdp"))

    def errors(exact):
        """Of the logits, log-probs, entropies and both gradients, of the largest of each."""
        loss = functools.partial(ours, layout=layout, exact=exact)
        (_, found), grads = jax.jit(with_gradient(loss))(hidden, unembed, targets, weights)
        assert grads[0].dtype == hidden.dtype and grads[1].dtype == unembed.dtype
        logits = chunked_softmax.logits(hidden, unembed, temperature=1.0, exact=exact)
        pairs = zip((logits, *found, *grads), (z, *expected), strict=True)
        return [np.abs(np.asarray(x, np.float64) - y).max() / np.abs(y).max() for x, y in pairs]

    exact, rounded = errors(True), errors(False)
    print(exact, rounded)
    assert max(exact[:3]) < 1e-5
    assert exact[3] < 2**-8, "the gradient by the hidden states is in bfloat16"
    assert exact[4] < (1e-5 if held == "float32" else 2**-8)
    if held == "float32":
        assert min(rounded[:3] + rounded[4:]) > 1e-3
    else:  # every product of two in bfloat16 is exact already
        assert max(rounded[:3]) < 1e-5


def test_a_statistic_that_no_loss_reads_costs_no_gradient():
    (hidden, unembed), targets, _ = arrays(np.float32)

    def operations(read):
        def f(hidden):
            found = log_probs.token_statistics(
                hidden, unembed, targets, temperature=0.7, chunk_tokens=99
            )
            metric = found.entropy_BT if read else jax.lax.stop_gradient(found.entropy_BT)
            return jnp.sum(found.log_prob_BT + metric)

        return len(str(jax.make_jaxpr(jax.grad(f))(hidden)).splitlines())

    assert operations(read=False) < operations(read=True) - 2


SHAPE = re.compile(r"\b(?:f32|bf16|f64)\[([0-9,]+)\]")


def sizes(text):
    """Elements of every array of floats named in a compiled program."""
    return [1] + [int(np.prod([int(n) for n in dims.split(",")])) for dims in SHAPE.findall(text)]


@pytest.mark.parametrize("shape, number", [((2, 2, 1, 2), B * T), ((1, 2, 2, 2), 37)])
def test_over_a_mesh_neither_logits_nor_the_unembedding_are_gathered(monkeypatch, shape, number):
    monkeypatch.setattr(chunked_softmax, "VOCAB_CHUNK", 16)
    mesh = jax.make_mesh(shape, AXES, axis_types=AXIS_TYPES)
    rows, unembed = row_sharding(mesh).spec, PartitionSpec("tensor", "fsdp")
    layout = HeadLayout(mesh, rows, unembed)
    inputs, targets, weights = arrays(np.float32)
    at = [NamedSharding(mesh, spec) for spec in (rows, unembed)]
    inputs = [jax.device_put(x, spec) for x, spec in zip(inputs, at)]
    targets, wanted = (jax.device_put(x, at[0]) for x in (targets, some_tokens(number)))
    weights = jnp.where(wanted, weights, 0.0)
    program = jax.jit(
        with_gradient(lambda *arguments: ours(*arguments, layout=layout, wanted=wanted)),
        out_shardings=((None, None), tuple(at)),
    )
    compiled = program.lower(*inputs, targets, weights).compile()
    (_, found), grads = compiled(*inputs, targets, weights)
    (_, expected), expected_grads = with_gradient(plain)(*inputs, targets, weights)
    found, expected = ([jnp.where(wanted, x, 0.0) for x in of] for of in (found, expected))
    for x, y in zip((*found, *grads), (*expected, *expected_grads)):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5 * np.abs(y).max())
    text = compiled.as_text() or ""
    gathers = [line for line in text.splitlines() if re.search(r"= .*all-gather", line)]
    tokens = B * T // 4  # of a device; 25 in its five chunks of 5
    # A part of the unembedding is gathered over its width (fsdp), and nothing else is.
    assert gathers and all(max(sizes(line)) <= 16 * D for line in gathers), gathers
    reduced = [line for line in text.splitlines() if re.search(r"= .*all-reduce\(", line)]
    assert reduced and all(max(sizes(line)) <= (tokens + 1) * D for line in reduced), reduced
    largest = max(sizes(text))
    assert largest < tokens * V // 2, f"an array of {largest} elements: as large as logits"


@pytest.mark.parametrize("shape, part", [((2, 1, 1, 4), 7), ((1, 2, 2, 2), 12), ((1, 1, 1, 8), 3)])
def test_parts_that_are_filled_up_on_a_mesh(monkeypatch, shape, part):
    """Each device has 16, 32 or 8 columns in parts of 6, 11 or 3. The last part has columns that
    are no token: they carry the numbers of the next device's first tokens."""
    monkeypatch.setattr(chunked_softmax, "VOCAB_CHUNK", part)
    mesh = jax.make_mesh(shape, AXES, axis_types=AXIS_TYPES)
    layout = HeadLayout(mesh, row_sharding(mesh).spec, PartitionSpec("tensor", "fsdp"))
    inputs, _, weights = arrays(np.float32)
    targets = jnp.arange(B * T).reshape(B, T) % V  # every token
    (_, found), grads = jax.jit(with_gradient(functools.partial(ours, layout=layout)))(
        *inputs, targets, weights
    )
    (_, expected), expected_grads = with_gradient(plain)(*inputs, targets, weights)
    for x, y in zip((*found, *grads), (*expected, *expected_grads)):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5 * np.abs(y).max())


def test_memory_follows_tokens_and_not_tokens_times_vocabulary(monkeypatch):
    monkeypatch.setattr(chunked_softmax, "VOCAB_CHUNK", 512)
    struct = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    f = lambda h, w, t: jnp.sum(
        log_probs.token_statistics(h, w, t, temperature=1.0, chunk_tokens=64).log_prob_BT
    )
    shapes = struct(4, 128, 16), struct(8192, 16), jax.ShapeDtypeStruct((4, 128), jnp.int32)
    compiled = jax.jit(jax.grad(f, argnums=(0, 1))).lower(*shapes).compile()
    memory = compiled.memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < 4 * 512 * 8192 / 8


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 2, 1, 2)])
def test_the_gradient_of_a_frequent_token_is_added_up_in_float32(sizes):
    """In bfloat16 it is the sum of what its occurrences give if each has a row of its own."""
    rows, length = 4, 128
    config = tiny_config(model__vocab_size=rows * length, model__compute_dtype="bfloat16")
    layout = dataclasses.replace(config.mesh, **dict(zip(AXES, sizes, strict=True)))
    mesh = make_mesh(dataclasses.replace(config, mesh=layout), int(np.prod(sizes)))
    params = make_params(config)
    params["embed"] = jnp.tile(params["embed"][:1], (rows * length, 1))
    params = jax.device_put(params, sharding.param_shardings(config.model, layout, mesh))
    heads = sharding.head_layout(config.model, layout, mesh)
    wanted = np.random.default_rng(6).standard_normal((rows, length, config.model.hidden_size)) + 1
    empty = packing.empty_rows(rows, length)._replace(
        positions_BT=np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
        segments_BT=np.ones((rows, length), np.int32),
    )

    @jax.jit
    @jax.grad
    def gradient(params, packed):
        hidden = log_probs.row_hidden(config.model, params, packed, heads)
        return jnp.sum(hidden.astype(jnp.float32) * wanted.astype(np.float32))

    own = np.arange(rows * length, dtype=np.int32).reshape(rows, length)
    gradients = [gradient(params, empty._replace(tokens_BT=x))["embed"] for x in (own, 0 * own)]
    of_each, of_one = (np.asarray(x, np.float64) for x in gradients)
    np.testing.assert_allclose(of_one[0], of_each.sum(0), atol=1e-5 * np.abs(of_one[0]).max())
    assert not of_one[1:].any()
