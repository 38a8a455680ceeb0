"""Attention in training: each program against a loop over queries, in value and gradient."""

import contextlib
import dataclasses
import functools
import re
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn_library  # no public name
from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dapo_jax.models import decoder, rotary
from dapo_jax.models.attention import cudnn, xla, zigzag
from dapo_jax.models.attention import kernels as attention_kernels
from dapo_jax.models.attention.kernels import Choice
from dapo_jax.models.attention.xla import SharedPrompts
from dapo_jax.models.decoder import NO_WINDOW
from dapo_jax.models.sharding import AXES, AXIS_TYPES, HeadLayout, head_layout, row_sharding
from dapo_jax.setup import RunComponents
from dapo_jax.types import UserError
from dapo_jax.utils.progress import Progress
from tests.support.gpus import lowered_for_an_h100
from tests.support.helpers import replace_model, tiny_config
from tests.support.tpu_interpreter import interpreted

B, T, K, G, H = 2, 21, 2, 2, 8
N, WINDOW = K * G, 4
# Two sequences and padding; one of a single token, one, and no padding.
SEGMENTS = np.repeat([[1, 2, 0], [1, 2, 2]], [8, 9, 4], axis=1).astype(np.int32)
SEGMENTS[1, 1:8] = 2
CONFIG = tiny_config()


class Packed(NamedTuple):
    """Rows, as nested tuples so that they can be cached by."""

    segments: tuple
    prefixes: tuple
    positions: tuple

    @property
    def real(self):
        return np.array(self.segments) > 0

    @property
    def shared(self):
        return SharedPrompts(jnp.asarray(self.prefixes), jnp.asarray(self.positions))


def nested(array):
    return tuple(map(tuple, np.asarray(array).tolist()))


ALONE = Packed(nested(SEGMENTS), nested(SEGMENTS), nested([range(T)] * B))
# One prompt of two responses, and padding; prompts of one response each, the first with two.
SIZES = [5, 6, 7, 3]
SHARED = Packed(
    nested(np.repeat([[1, 2, 3, 0], [1, 2, 3, 4]], SIZES, axis=1)),
    nested(np.repeat([[1, 1, 1, 0], [1, 1, 3, 3]], SIZES, axis=1)),
    nested(
        [
            [*range(5), *range(5, 11), *range(5, 12), *range(3)],
            [*range(5), *range(5, 11), *range(7), *range(7, 10)],
        ]
    ),
)


def loop(q, k, v, window, rows):
    """softmax(q k / sqrt(H)) v of every query by itself, in float64; zeros for padding."""
    out = np.zeros(q.shape)
    segments, prefixes, positions = rows
    for b, t, n in np.ndindex(B, T, N):
        own = segments[b][t], prefixes[b][t]
        back = [positions[b][t] - positions[b][s] for s in range(T)]
        see = [s for s in range(T) if segments[b][s] in own and 0 <= back[s] < window]
        scores = np.array([q[b, t, n] @ k[b, s, n // G] for s in see]) / np.sqrt(H)
        weights = np.exp(scores - scores.max())
        out[b, t, n] = weights @ v[b, see, n // G] / weights.sum()
    return out * rows.real[:, :, None, None]


@pytest.fixture(scope="module")
def arrays():
    rng = np.random.default_rng(0)
    shapes = (B, T, N, H), (B, T, K, H), (B, T, K, H), (B, T, N, H)
    q, k, v, weights = (rng.standard_normal(shape) for shape in shapes)
    return q, k, v, weights * (SEGMENTS > 0)[:, :, None, None]


@pytest.fixture(scope="module")
def expected(arrays):
    """Of a window: values, and by central differences the derivative along a direction."""

    @functools.cache
    def of(window, rows=ALONE):
        *inputs, weights = arrays
        weights = weights * rows.real[:, :, None, None]
        rng = np.random.default_rng(1)
        directions = [rng.standard_normal(x.shape) for x in inputs]

        def slope(i):
            ends = []
            for step in (1e-5, -1e-5):
                moved = list(inputs)
                moved[i] = moved[i] + step * directions[i]
                ends.append(np.sum(weights * loop(*moved, window, rows)))
            return (ends[0] - ends[1]) / 2e-5

        return loop(*inputs, window, rows), directions, [slope(i) for i in range(3)]

    return of


def check(attend, arrays, expected, window, rows=ALONE, *, atol=2e-6):
    """Value and gradient of `attend`, finite everywhere, and none by way of padding."""
    real = rows.real
    *inputs, weights = (jnp.asarray(x, jnp.float32) for x in arrays)
    weights = jnp.where(real[:, :, None, None], weights, 0.0)
    seen = NO_WINDOW if window is None else window

    def total(*inputs):
        out = attend(0, *inputs, None, window)[0]
        return jnp.sum(weights * out), out

    program = jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))
    (_, out), grads = program(*inputs)
    values, directions, slopes = expected(seen, rows)
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out[real], values[real], rtol=0, atol=atol)
    for grad, direction, slope in zip(grads, directions, slopes, strict=True):
        assert np.isfinite(grad).all() and not np.asarray(grad)[~real].any()
        got = np.sum(np.asarray(grad, np.float64) * direction)
        np.testing.assert_allclose(got, slope, rtol=0, atol=2e-5)


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("rows", [ALONE, SHARED], ids=["alone", "shared"])
def test_xla(monkeypatch, arrays, expected, window, long, rows):
    monkeypatch.setattr(xla, "LEAST_PART", 1)  # four parts, of 6, 6, 6 and 3 tokens
    if long:  # three parts, of 8, 8 and 5, in chunks of 4
        monkeypatch.setattr(xla, "LONG_ROW", T - 1)
        monkeypatch.setattr(xla, "QUERY_CHUNK", 4)
    shared = rows.shared if rows is SHARED else None
    attend = xla.packed(jnp.asarray(rows.segments), shared=shared)
    check(attend, arrays, expected, window, rows)


def test_arithmetic_between_values_in_bfloat16_is_float32():
    """Norms, rotations and scores: each result is off by its own rounding, 2^-8 at most. A weighted
    value has that of its weights, too."""
    rng = np.random.default_rng(2)
    normal = lambda *shape: jnp.asarray(4 * rng.standard_normal(shape), jnp.bfloat16)
    wide = lambda x: np.asarray(x, np.float64)
    x, scale = normal(64, 256), normal(256)
    wanted = wide(x) / np.sqrt(np.mean(wide(x) ** 2, axis=-1, keepdims=True)) * wide(scale)
    np.testing.assert_allclose(wide(decoder.rms_norm(x, scale, 0.0)), wanted, rtol=1.01 * 2**-8)
    q, places = normal(1, 512, 1, 8), jnp.arange(512)[None]
    angles = rotary.rotary_angles(places, 8, 10_000.0, None)
    sin, cos = map(wide, angles)
    a, b = np.split(wide(q), 2, axis=-1)
    turned = np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    found = wide(rotary.rotate(q, angles))
    np.testing.assert_allclose(found, turned, rtol=1.01 * 2**-8, atol=1e-5)
    q, k, v = (normal(2, 21, 2, 8) for _ in range(3))
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((21, 21), bool)), (2, 21, 21))
    found = wide(xla.dot_product_attention(q, k, v, mask))
    exact = xla.dot_product_attention(*(x.astype(jnp.float32) for x in (q, k, v)), mask)
    assert np.abs(found - wide(exact)).max() < 2**-7 * np.abs(wide(v)).max()


@pytest.mark.parametrize("context", [1, 2])
def test_gradients_of_keys_and_values_are_added_up_in_float32(monkeypatch, context):
    """A bfloat16 model with 128 chunks of queries. Query t sees t + 1 keys alike, and its gradient
    is 0.3 (t + 1): each query adds 0.3 to that of the first value."""
    monkeypatch.setattr(xla, "LONG_ROW", 64)
    monkeypatch.setattr(xla, "QUERY_CHUNK", 4)
    tokens = 512
    choice = xla.XLA if context == 1 else Choice("xla", layout=layout_over(1, 1, context, 1))
    attend = xla.packed(jnp.ones((1, tokens), jnp.int32), choice)
    q = jnp.ones((1, tokens, 1, 8), jnp.bfloat16)
    first = zigzag.to_zigzag(q.at[:, 1:].set(0), context)
    slope_BT = zigzag.to_zigzag(0.3 * jnp.arange(1.0, tokens + 1)[None], context)

    def total(k, v):
        out = attend(0, q, k, v, None, None)[0].astype(jnp.float32)
        return jnp.sum(slope_BT[..., None, None] * out)

    of_k, of_v = jax.jit(jax.grad(total, (0, 1)))(0 * q, first)
    np.testing.assert_allclose(of_v[0, 0].astype(jnp.float32), 0.3 * tokens, rtol=0.01)
    # Only the first value is not 0: with share p of it a query adds 0.3 (1 - p) for each of 8.
    shares = 1 / np.arange(1, tokens + 1)
    wanted = 8 * 0.3 / np.sqrt(8) * np.sum(1 - shares)
    np.testing.assert_allclose(of_k[0, 0].astype(jnp.float32), wanted, rtol=0.01)


@pytest.mark.parametrize(
    "choice, window",
    [
        (Choice("splash"), None),
        (Choice("splash", window=WINDOW, every_layer=True), WINDOW),
        (Choice("flash"), None),
    ],
)
def test_kernels(arrays, expected, choice, window):
    """Interpreted. Rows and heads are filled up to the kernels' blocks."""
    check(xla.packed(jnp.asarray(SEGMENTS), choice), arrays, expected, window)


@pytest.fixture
def cudnn_here(monkeypatch):
    """In cuDNN's place: what its documentation says of its arguments, in plain JAX. What is of no
    segment it leaves as it finds it, in values and gradients: here that is not a number."""

    @jax.custom_vjp
    def dirty(x, own):
        return x

    to_nan = lambda own, x: jnp.where(own[:, :, None, None], x, jnp.nan)
    dirty.defvjp(lambda x, own: (x, own), lambda own, gradient: (to_nan(own, gradient), None))

    def attend(q, k, v, *, q_seqlen, kv_seqlen, q_offsets, kv_offsets, scale, mask_type):
        assert mask_type == cudnn_library.MaskType.PADDING_CAUSAL
        at = jnp.arange(q.shape[1])[None, None]
        own = (
            lambda first, length: (  # [B, M, T]
                (first[:, :-1, None] <= at) & (at < first[:, :-1, None] + length[:, :, None])
            )
        )
        of_q, of_k = own(q_offsets, q_seqlen), own(kv_offsets, kv_seqlen)
        same = jnp.einsum("bmt,bms->bts", of_q.astype(int), of_k.astype(int)) > 0
        see = same & (at.swapaxes(1, 2) >= at)
        real_q, real_k = jnp.any(of_q, axis=1), jnp.any(of_k, axis=1)
        q, k, v = dirty(q * scale * q.shape[-1] ** 0.5, real_q), dirty(k, real_k), dirty(v, real_k)
        return to_nan(real_q, xla.dot_product_attention(q, k, v, see))

    monkeypatch.setattr(cudnn_library, "dot_product_attention", attend)


def test_cudnn(arrays, expected, cudnn_here):
    check(xla.packed(jnp.asarray(SEGMENTS), Choice("cudnn")), arrays, expected, None)


def test_cudnn_on_a_mesh(arrays, expected, cudnn_here):
    layout = layout_over(2, 1, 1, 2)
    attend = xla.packed(jnp.asarray(SEGMENTS), Choice("cudnn", layout=layout))
    check(attend, arrays, expected, None)


def test_cudnn_gives_no_number_for_more_segments_than_its_bound(monkeypatch, arrays, cudnn_here):
    """The second row has two; numbers there would be wrong."""
    monkeypatch.setattr(cudnn, "most_segments", lambda row_tokens: 1)
    q, k, v, _ = (jnp.asarray(x, jnp.float32) for x in arrays)
    segments = np.where(np.arange(B)[:, None] == 0, SEGMENTS == 1, SEGMENTS).astype(np.int32)
    out = cudnn.attend(jnp.asarray(segments), q, k, v)
    assert np.isfinite(out[0]).all() and np.isnan(out[1]).all()


def test_programs_of_gpus_are_lowered(monkeypatch):
    """For CUDA, forward and backward: the compiler behind is not there."""
    monkeypatch.setattr(cudnn_library, "check_cudnn_version", lambda: 91900)
    monkeypatch.setattr(cudnn_library, "check_compute_capability", lambda least: True)
    monkeypatch.setattr(cudnn_library, "is_cuda_compute_capability_equal", lambda other: False)
    of = lambda heads: jax.ShapeDtypeStruct((1, 256, heads, 64), jnp.bfloat16)
    segments = jnp.ones((1, 256), jnp.int32)

    def calls(kernel):
        choice = Choice(kernel, "gpu")
        total = lambda q, k, v: jnp.sum(
            attention_kernels.attend(choice, segments, q, k, v, None).astype(jnp.float32)
        )
        # Pallas asks for the kind of GPU; cuDNN's attention refuses one that is not there.
        with lowered_for_an_h100() if kernel == "flash" else contextlib.nullcontext():
            traced = jax.jit(jax.grad(total, (0, 1, 2))).trace(of(4), of(2), of(2))
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
        return set(re.findall(r"custom_call @([\w$.]+)", text))

    assert calls("cudnn") >= {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"}
    assert calls("flash") == {"__gpu$xla.gpu.triton"}


def test_layers_slide_by_their_own_window_on_a_mesh(arrays, expected):
    """Which layer slides is an array inside the scan over layers; rows lie over four devices, heads
    over two."""
    layout = layout_over(2, 2, 1, 2)
    choice = Choice("splash", window=WINDOW, layout=layout)
    twice = lambda x: jnp.concatenate([x, x])  # four rows
    *inputs, weights = (jnp.asarray(x, jnp.float32) for x in arrays)
    at = NamedSharding(layout.mesh, PartitionSpec(*layout.rows, "tensor"))
    segments = jax.device_put(twice(jnp.asarray(SEGMENTS)), row_sharding(layout.mesh))

    @jax.jit
    def program(window, *inputs):
        def total(*inputs):
            out = xla.packed(segments, choice)(0, *inputs, None, window)[0]
            return jnp.sum(twice(weights) * out), out

        return jax.value_and_grad(total, (0, 1, 2), has_aux=True)(*inputs)

    real = SEGMENTS > 0
    for window in (WINDOW, NO_WINDOW):
        (_, out), grads = program(
            jnp.int32(window), *(jax.device_put(twice(x), at) for x in inputs)
        )
        values, directions, slopes = expected(window)
        np.testing.assert_allclose(out[:B][real], values[real], rtol=0, atol=2e-6)
        np.testing.assert_array_equal(out[:B], out[B:])
        for grad, direction, slope in zip(grads, directions, slopes, strict=True):
            got = np.sum(np.asarray(grad[:B], np.float64) * direction)
            np.testing.assert_allclose(got, slope, rtol=0, atol=2e-5)


@pytest.mark.parametrize("sliding", [False, True])
def test_a_remat_policy_that_keeps_attention_runs_its_kernel_once(arrays, sliding):
    """Also where a branch decides whether the layer slides, with a kernel for each."""
    layout = layout_over(1, 1, 1, 2)
    choice = Choice("splash", window=WINDOW if sliding else None, layout=layout)
    q, k, v, _ = (jnp.asarray(x, jnp.float32) for x in arrays)
    attend = xla.packed(jnp.asarray(SEGMENTS), choice)

    def layer(x, window):
        return attend(0, x, k, v, None, window)[0], None

    def passes(remat):
        """Forward kernels, each a loop where they are interpreted, in a gradient through layers
        that are scanned as the decoder does."""
        kept = decoder.rematerialised(layer, remat)
        total = lambda q: jnp.sum(jax.lax.scan(kept, q, jnp.array([WINDOW, NO_WINDOW]))[0])
        lines = jax.jit(jax.grad(total)).lower(q).compile().as_text().splitlines()
        return sum(" while(" in line and "splash_mha_fwd" in line for line in lines)

    kernels = 2 if sliding else 1
    assert passes("attention") == passes("attention_mlp") == kernels
    assert passes("full") == 2 * kernels


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize(
    "kernel, long, rows",
    [
        ("xla", False, ALONE),
        ("xla", True, ALONE),
        ("xla", False, SHARED),
        ("xla", True, SHARED),
        ("splash", False, ALONE),
    ],
    ids=["xla", "xla-long", "xla-shared", "xla-long-shared", "splash"],
)
def test_tokens_of_a_row_on_several_devices(
    monkeypatch, arrays, expected, kernel, long, rows, window, context=3
):
    """Each attends with its own queries."""
    if long:  # in chunks of 3, of 8 tokens
        monkeypatch.setattr(xla, "LONG_ROW", T - 1)
        monkeypatch.setattr(xla, "QUERY_CHUNK", 3)
    choice = Choice(kernel, window=window, every_layer=True, layout=layout_over(1, 1, context, 2))
    filled = lambda x: jnp.pad(x, ((0, 0), (0, 24 - T), *[(0, 0)] * (x.ndim - 2)))
    in_zigzag = lambda x: zigzag.to_zigzag(filled(x), context)

    def attend(layer, q, k, v, cache, window):
        shared = jax.tree.map(in_zigzag, rows.shared) if rows is SHARED else None
        found = xla.packed(in_zigzag(jnp.asarray(rows.segments)), choice, shared)
        out, cache = found(layer, *map(in_zigzag, (q, k, v)), cache, window)
        return zigzag.to_rows(out, context)[:, :T], cache

    check(attend, arrays, expected, window, rows)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_devices_see_as_much_of_a_row(parts):
    order = zigzag.order(24, parts)
    seen = (order + 1).reshape(parts, -1).sum(axis=1)
    assert sorted(order.tolist()) == list(range(24)) and len(set(seen)) == 1
    x = jnp.arange(2 * 24 * 3).reshape(2, 24, 3)
    np.testing.assert_array_equal(zigzag.to_zigzag(x, parts), x[:, order])
    np.testing.assert_array_equal(zigzag.to_rows(x[:, order], parts), x)


def test_sliding_layers_of_rows_on_several_devices():
    """Whole blocks, and an array that names the sliding layers, equal XLA on one device."""
    rng = np.random.default_rng(0)
    shapes = [(1, 256, heads, 8) for heads in (2, 1, 1, 2)]
    *inputs, weights = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)
    segments = jnp.asarray(np.repeat([[1, 2, 3, 0]], [100, 60, 90, 6], axis=1))
    weights = jnp.where((segments > 0)[:, :, None, None], weights, 0.0)

    def found(choice, window):
        def total(*inputs):
            in_zigzag = lambda x: zigzag.to_zigzag(x, choice.context)
            attend = xla.packed(in_zigzag(segments), choice)
            out = attend(0, *map(in_zigzag, inputs), None, window)[0]
            return jnp.sum(in_zigzag(weights) * out)

        return jax.jit(jax.value_and_grad(total, (0, 1, 2)))(*inputs)

    over = Choice("splash", window=40, layout=layout_over(1, 1, 2, 1))
    for window in (40, NO_WINDOW):
        here, there = found(xla.XLA, window), found(over, jnp.int32(window))
        for a, b in zip(jax.tree.leaves(here), jax.tree.leaves(there), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=2e-5)


LONG = 768  # tokens of a row, in blocks of 128
# Sequences that end within blocks and with one, of a token, within one block, and over several;
# padding last: within a block, of three, and of all.
LENGTHS = [[100, 1, 155, 60, 300, 122, 30], [1, 90, 231, 61, 7, 378], [768]]
# Other blocks than 128 for some: of every pass, and of keys computed in parts.
UNLIKE = (
    ("splash_kv", 256),
    ("splash_kv_compute", 128),
    ("splash_q_dkv", 256),
    ("splash_kv_dq", 512),
)


MANY_BLOCKS = {
    # Blocks of parts of 192 tokens lie over two.
    f"{name}-{window}-{context}-cpu": (blocks, window, context, "cpu")
    for name, blocks in (("alike", ()), ("unlike", UNLIKE))
    for window in (None, 150)
    for context in (1, 2)
}
# As on a TPU: what is fetched meanwhile is done, too.
ON_TPU = {"alike-None-1-tpu": ((), None, 1, "tpu"), "unlike-150-1-tpu": (UNLIKE, 150, 1, "tpu")}


@pytest.mark.parametrize(
    "blocks, window, context, platform",
    [pytest.param(*case, id=name) for name, case in MANY_BLOCKS.items()]
    + [pytest.param(*case, id=name, marks=pytest.mark.slow) for name, case in ON_TPU.items()],
)
def test_rows_of_many_blocks(monkeypatch, blocks, window, context, platform):
    """Rows with blocks of their own to pass over, as XLA attends."""
    monkeypatch.setattr(attention_kernels, "SPLASH_BLOCK", 128)
    rng = np.random.default_rng(0)
    shapes = [(len(LENGTHS), LONG, heads, 8) for heads in (N, K, K, N)]
    *inputs, weights = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)
    segments = jnp.asarray([np.repeat([*range(1, len(x)), 0], x) for x in LENGTHS], jnp.int32)
    real = segments > 0
    weights = jnp.where(real[:, :, None, None], weights, 0.0)

    def found(choice):
        def total(*inputs):
            in_zigzag = lambda x: zigzag.to_zigzag(x, choice.context)
            attend = xla.packed(in_zigzag(segments), choice)
            out = attend(0, *map(in_zigzag, inputs), None, window)[0]
            out = zigzag.to_rows(out, choice.context)
            return jnp.sum(weights * out), out

        return jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))(*inputs)

    layout = layout_over(1, 1, context, 1)
    (_, here), of_here = found(xla.XLA)
    choice = Choice("splash", platform, window, window is not None, layout, blocks=blocks)
    with interpreted() if platform == "tpu" else contextlib.nullcontext():
        (_, there), of_there = jax.block_until_ready(found(choice))
    assert np.isfinite(there).all()
    np.testing.assert_allclose(here[real], there[real], rtol=0, atol=2e-6)
    for a, b in zip(of_here, of_there, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5)


def fewer_blocks(static, runs_in, *, forward):
    """(block mask, data next) of a mask info, a block at a time in the kernel's order.

    Args:
        static: what any row computes, [i, j].
        runs_in: (i, block of the other side) -> whether any of their segments may be the same.
    """
    mask, name = (np.array(x, np.int64) for x in static)
    run = np.zeros(mask.shape, bool)
    for i in range(len(mask)):
        could = [j for j in range(mask.shape[1]) if mask[i, j] > 0]
        own = [j for j in could if runs_in(i, name[i, j])]
        if forward and not own:
            own = could[:1]
        run[i, own] = True
    named, following = np.empty_like(name), name[0, 0]
    for i, j in reversed(list(np.ndindex(mask.shape))):
        if run[i, j]:
            following = name[i, j]
        named[i, j] = following
    return np.where(run, mask, 0), named


def random_segments(rng, tokens):
    """A packed row: sequences of any length, some numbers without a token, padding or none."""
    longest = rng.choice([3, 200, 2000])
    lengths = rng.integers(0, longest, 2 * tokens // longest + 2)
    lengths[rng.random(len(lengths)) < 0.2] = 0
    row = np.repeat(np.arange(1, len(lengths) + 1), lengths)[:tokens]
    return np.pad(row, (0, tokens - len(row))).astype(np.int32)


@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("blocks", [2, 5, 44])  # 44: of rows of 22,528 tokens, as the 32B packs
def test_blocks_of_random_rows_are_those_of_a_loop_over_them(monkeypatch, blocks, window):
    monkeypatch.setattr(attention_kernels, "SPLASH_BLOCK", 128)
    rng = np.random.default_rng(blocks)
    tokens = 128 * blocks
    choice = Choice("splash", window=window, every_layer=window is not None)
    (of_any_row,) = attention_kernels._splash_kernels(choice, tokens, 1)
    infos = jax.jit(
        lambda segments: [
            (info.block_mask, info.data_next)
            for kernel in [
                attention_kernels._within_segments(of_any_row, SegmentIds(segments, segments))
            ]
            for info in (kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info)
        ]
    )
    for segments in [np.zeros(tokens, np.int32), *(random_segments(rng, tokens) for _ in range(8))]:
        held = [block[block > 0] for block in segments.reshape(blocks, -1)]

        def meet(i, j, held=held):
            a, b = held[i], held[j]
            return bool(len(a) and len(b) and a.min() <= b.max() and b.min() <= a.max())

        for name, found in zip(("fwd", "dq", "dkv"), infos(segments), strict=True):
            info = getattr(of_any_row, f"{name}_mask_info")
            turned = (lambda x: np.asarray(x)[0].T) if name == "dkv" else lambda x: np.asarray(x)[0]
            static = turned(info.block_mask), turned(info.data_next)
            wanted = fewer_blocks(static, meet, forward=name == "fwd")
            for is_, should in zip(found, wanted, strict=True):
                np.testing.assert_array_equal(turned(is_), should)
        assert [x.dtype for x in found] == [info.block_mask.dtype, info.data_next.dtype]


def test_blocks_of_a_config_are_those_of_the_kernel():
    """Rows have whole blocks of each size: of 1,300 tokens two of 1,024, and 16 of 128."""
    blocks = (("splash_q", 1024), ("splash_kv_dkv", 2048), ("splash_kv_dkv_compute", 256))
    model = {"model__kernel_blocks": blocks, "model__compute_dtype": "bfloat16"}
    choice = attention_kernels.choose(tiny_config(**model).model, on("tpu"))
    (kernel,) = attention_kernels._splash_kernels(choice._replace(layout=None), 1300, 1)
    sizes = kernel.kwargs["block_sizes"]
    assert (sizes.block_q, sizes.block_q_dkv, sizes.block_q_dq) == (1024, 512, 512)
    assert (sizes.block_kv, sizes.block_kv_compute, sizes.block_kv_dq) == (512, 512, 512)
    assert (sizes.block_kv_dkv, sizes.block_kv_dkv_compute) == (1536, 256)
    shape = lambda info: np.asarray(info.block_mask).shape
    assert shape(kernel.fwd_mask_info) == (1, 2, 3)
    assert shape(kernel.dkv_mask_info) == (1, 4, 1)
    assert shape(kernel.dq_mask_info) == (1, 4, 3)


def test_rows_of_more_blocks_than_int32_numbers_are_refused():
    """1,300 x 1,300 blocks of 1,300 names are more than 2^31."""
    blocks = np.ones((1, 1300, 1300), np.int8)
    info = SimpleNamespace(block_mask=blocks, data_next=np.zeros(blocks.shape, np.int16))
    of_queries, of_keys = ("q", "q_dq", "q_dkv"), ("kv", "kv_dq", "kv_dkv")
    sizes = SimpleNamespace(**{f"block_{name}": 128 for name in of_queries + of_keys})
    kernel = SimpleNamespace(kwargs={"block_sizes": sizes}, fwd_mask_info=info)
    segments = jax.ShapeDtypeStruct((128 * 1300,), jnp.int32)
    row = lambda segments: attention_kernels._within_segments(
        kernel, SegmentIds(segments, segments)
    )
    with pytest.raises(UserError, match="1300 x 1300 blocks"):
        jax.eval_shape(row, segments)


def layout_over(*sizes):
    """A layout over so many devices of each axis, heads over tensor."""
    devices = np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes)
    mesh = Mesh(devices, AXES, axis_types=AXIS_TYPES)
    return HeadLayout(mesh, row_sharding(mesh).spec, PartitionSpec(), "tensor", "tensor")


def on(platform, heads="tensor", kv_heads="tensor", context=1):
    """A layout over devices of a platform that is not there, such as "cuda 9.0"."""
    device = SimpleNamespace(platform=platform.split()[0])
    if " " in platform:  # NVIDIA's generation, as JAX gives it
        device.compute_capability = platform.split()[1]
    shape = {"context": context}
    mesh = SimpleNamespace(devices=np.array([device] * 2), size=2, shape=shape)
    return HeadLayout(mesh, PartitionSpec(("data", "fsdp")), PartitionSpec(), heads, kv_heads)


@pytest.mark.parametrize(
    "platform, changes, chosen",
    [
        ("cpu", {}, "xla"),
        ("tpu", {}, "splash"),
        ("cuda 9.0", {"compute_dtype": "bfloat16", "head_dim": 64}, "cudnn"),
        ("cuda 10.3", {"compute_dtype": "bfloat16", "head_dim": 64}, "cudnn"),
        ("cuda 8.6", {"compute_dtype": "bfloat16", "head_dim": 64}, "flash"),
        ("rocm", {"compute_dtype": "bfloat16", "head_dim": 64}, "flash"),
        (
            "cuda 9.0",
            {"compute_dtype": "bfloat16", "head_dim": 64, "attention": "flash"},
            "flash",
        ),
        ("cuda 9.0", {"head_dim": 64}, "xla"),  # float32
        ("cuda 8.6", {"head_dim": 64}, "xla"),
        ("cuda 9.0", {"compute_dtype": "bfloat16", "head_dim": 320}, "xla"),
        ("cuda 9.0", {"compute_dtype": "bfloat16", "head_dim": 20}, "xla"),
        ("cuda 8.6", {"compute_dtype": "bfloat16", "head_dim": 20}, "flash"),
        ("tpu", {"attention": "xla"}, "xla"),
    ],
)
def test_the_kernel_of_the_platform_is_chosen(platform, changes, chosen):
    assert attention_kernels.choose(replace_model(CONFIG, **changes), on(platform)).kernel == chosen


def test_a_gpu_that_is_to_repeat_its_bits_attends_by_flash(monkeypatch):
    bits = lambda attention: (
        attention_kernels.choose(
            replace_model(CONFIG, compute_dtype="bfloat16", head_dim=64, attention=attention),
            on("cuda 9.0"),
        ).kernel
    )
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=d --xla_gpu_deterministic_ops=true")
    assert (bits("auto"), bits("cudnn")) == ("flash", "cudnn")
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=false")
    assert (bits("auto"), bits("flash")) == ("cudnn", "flash")


def test_a_fall_back_to_xla_says_why():
    refused = lambda layout, **changes: (
        attention_kernels.choose(replace_model(CONFIG, **changes), layout).refused
    )
    assert refused(on("cuda 9.0")).startswith("cudnn takes config.model.compute_dtype 'bfloat16'")
    assert refused(on("cuda 8.6")).startswith("flash takes config.model.compute_dtype 'bfloat16'")
    assert refused(on("tpu", kv_heads=None)).startswith("splash needs config.mesh.rules")
    assert refused(on("cpu")) is None and refused(on("tpu")) is None
    assert refused(on("cuda"), attention="xla") is None, "asked for"


def test_windows_are_those_of_the_layers_that_slide():
    sliding = lambda *layers: replace_model(CONFIG, sliding_window=(5, layers))
    of = lambda model: attention_kernels.choose(model, on("tpu"))[2:4]
    assert of(CONFIG.model) == (None, False)
    assert of(sliding(1)) == (5, False) and of(sliding(0, 1)) == (5, True)
    unaligned = on("tpu", kv_heads=None)
    assert attention_kernels.choose(CONFIG.model, unaligned).kernel == "xla"


@pytest.mark.parametrize(
    "layout, changes, said",
    [
        (on("cpu"), {"attention": "splash"}, "config.model.attention 'splash' is a kernel for oth"),
        (on("tpu"), {"attention": "flash"}, "other devices; these are 'tpu'. Set it to 'auto'"),
        (on("cuda 9.0"), {"attention": "cudnn"}, "compute_dtype 'bfloat16' only; got 'float32'"),
        (on("cuda 8.6"), {"attention": "flash"}, "compute_dtype 'bfloat16' only; got 'float32'"),
        (on("cuda 8.6"), {"attention": "cudnn"}, "other devices; these are 'cuda'. Set it to"),
        (on("tpu", kv_heads=None), {"attention": "splash"}, "go to 'tensor' and None"),
        (on("cuda", context=2), {"attention": "flash"}, "needs whole rows; got config.mesh.con"),
        (on("cuda 9.0", context=2), {"attention": "cudnn"}, "needs whole rows; got config.mesh.c"),
        (
            on("cuda 9.0"),
            {"attention": "cudnn", "compute_dtype": "bfloat16", "head_dim": 20},
            "takes a multiple of 8 as config.model.head_dim; got 20",
        ),
        (
            on("cuda"),
            {"attention": "flash", "sliding_window": (5, (0,))},
            "does not take config.model.sliding_window. Set it to 'auto' or 'xla'",
        ),
    ],
)
def test_a_kernel_that_does_not_take_the_model_is_refused(layout, changes, said):
    with pytest.raises(UserError, match=said):
        attention_kernels.choose(replace_model(CONFIG, **changes), layout)


def test_shared_prompts_are_for_xla():
    kernel = lambda model: (
        attention_kernels.choose(model, on("tpu"), share_prompts=True).kernel == "xla"
    )
    assert kernel(CONFIG.model)
    with pytest.raises(UserError, match="'splash' knows .* which config.train.share_prompts needs"):
        kernel(replace_model(CONFIG, attention="splash"))


def test_tokens_over_devices_need_heads_on_one_axis():
    with pytest.raises(UserError, match=r"config.mesh.context \(2\) needs .* to 'tensor' and None"):
        attention_kernels.choose(CONFIG.model, on("cpu", kv_heads=None, context=2))


def test_a_run_refuses_it_before_it_begins(tmp_path):
    with pytest.raises(UserError, match="config.model.attention 'flash' is a kernel for other dev"):
        RunComponents(tiny_config(model__attention="flash"), tmp_path, Progress(0))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("axis, size", [("fsdp", (1, 2, 1, 1)), ("data", (2, 1, 1, 1))])
def test_heads_over_an_axis_of_the_rows_are_whole_in_attention(arrays, expected, axis, size):
    """Their matrices lie there, and are gathered on use."""
    rules = dict.fromkeys(dict(CONFIG.mesh.rules)) | {"heads": axis, "kv_heads": axis}
    config = dataclasses.replace(CONFIG.mesh, rules=tuple(rules.items()))
    layout = head_layout(CONFIG.model, config, layout_over(*size).mesh)
    assert layout.heads is layout.kv_heads is None
    attend = xla.packed(jnp.asarray(SEGMENTS), Choice("splash", layout=layout))
    check(attend, arrays, expected, None)
