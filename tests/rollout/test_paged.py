"""Attention over pages: what it reads and writes, and what is handed to the kernels."""

import contextlib
import dataclasses
import functools
import math
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic import tpu_info  # what lowering asks of the devices; no public name
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu import ragged_paged_attention

from dapo_jax.models import decoder
from dapo_jax.models.attention import kernels as attention_kernels
from dapo_jax.models.attention import xla
from dapo_jax.rollout import gpu_kernel, paged, paged_kernels
from dapo_jax.rollout.engine_config import make_engine_config
from dapo_jax.rollout.programs import Programs, rollout_dtypes
from dapo_jax.rollout.tiles import Tile
from dapo_jax.setup import attention_line
from dapo_jax.tools.bench.mismatch import bench_mismatch
from dapo_jax.tools.bench.shapes import Shape
from dapo_jax.types import Problem, RunError, UserError
from tests.support import engines
from tests.support.engines import CONFIG, generate, make_engine
from tests.support.gpus import lowered_for_an_h100
from tests.support.helpers import make_params
from tests.support.tpu_interpreter import interpreted

# H: the TPU's kernel takes no other; N: pages, the first of them scratch
B, K, G, H, A, P, N = 3, 2, 3, 128, 4, 5, 16
LENGTHS = np.array([0, 9, 18], np.int32)
TILE = Tile(2, 2 * A)  # three sequences make two groups, five pages three tiles
KERNELS = ("xla", "tpu", "gpu")


@pytest.fixture
def problem():
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    table = rng.permutation(np.arange(1, N))[: B * P].reshape(B, P).astype(np.int32)
    k, v = normal(2, 1, (N - 1) * A, K, H), normal(2, 1, (N - 1) * A, K, H)
    return k, v, jnp.asarray(table), normal(B, 1, K * G, H), normal(B, 1, K, H), normal(B, 1, K, H)


def pages_of(layout, k, v):
    return paged.from_dense(layout, (k, v))


def pool_of(layout, k, v):
    return tuple(
        jnp.concatenate([jnp.zeros_like(pages[:, :1]), pages], axis=1)
        for pages in pages_of(layout, k, v)
    )


@pytest.mark.parametrize("kernel", KERNELS)
def test_pages_are_put_and_copied_one_by_one(problem, kernel):
    k, v, *_ = problem
    layout = paged.Layout(kernel, A, "float32")
    pool = pool_of(layout, k, v)
    shapes = layout.pool(dataclasses.replace(CONFIG.model, num_kv_heads=K, head_dim=H), N)
    assert [(x.shape, x.dtype) for x in pool] == [(x.shape, x.dtype) for x in shapes]
    new = tuple(x[:, :3] for x in pages_of(layout, v, k))
    where, source = jnp.array([5, 0, 9]), jnp.array([2, 3, 1])
    wanted = where > 0
    got = paged.put(pool, where, new), paged.copied(pool, source, where, wanted)
    for before, page, put, copied in zip(pool, new, *got, strict=True):
        expected = np.array(before)
        expected[:, [5, 0, 9]] = page
        np.testing.assert_array_equal(put, expected)
        expected = np.array(before)
        expected[:, [5, 9]] = expected[:, [2, 1]]
        np.testing.assert_array_equal(copied, expected)
    # Either would make XLA lay the pool out another way on TPUs, see `paged.put`.
    for program in (
        jax.make_jaxpr(paged.put)(pool, where, new),
        jax.make_jaxpr(paged.copied)(pool, source, where, wanted),
    ):
        assert not {"scatter", "gather"} & set(str(program).replace("[", " ").split())


@pytest.mark.parametrize(
    "kernel, window, blocks",
    [
        *((kernel, None, ()) for kernel in KERNELS),
        ("xla", 6, ()),
        ("tpu", 6, ()),
        ("tpu", None, (("paged_kv", A), ("paged_queries", 2))),  # a page at a time
    ],
)
def test_a_token_attends_to_its_own_pages_and_is_kept_there(problem, kernel, window, blocks):
    """Against attention over each whole sequence. Kernels are interpreted."""
    k, v, table, q, k_new, v_new = problem
    layout = paged.Layout(kernel, A, "float32", blocks=blocks)
    goes = jnp.array([True, True, False])
    attend = paged.decoding(layout, table, jnp.asarray(LENGTHS), goes, TILE)
    before = pool_of(layout, k, v)
    with interpreted() if kernel == "tpu" else contextlib.nullcontext():
        out, after = attend(1, q, k_new, v_new, before, window)
    k, v, k_new, v_new = map(np.array, (k, v, k_new, v_new))
    for b in (0, 1):
        own = (np.asarray(table)[b][:, None] - 1) * A + np.arange(A)
        k_S, v_S = (x[1, 0, own.reshape(-1)] for x in (k, v))
        k_S[LENGTHS[b]], v_S[LENGTHS[b]] = k_new[b, 0], v_new[b, 0]
        back = LENGTHS[b] - np.arange(P * A)
        seen = (back >= 0) & (back < (window or 10**6))
        expected = xla.dot_product_attention(
            q[b : b + 1],
            jnp.asarray(k_S)[None],
            jnp.asarray(v_S)[None],
            jnp.asarray(seen)[None, None],
        )
        np.testing.assert_allclose(out[b], expected[0], rtol=0, atol=2e-6)
    # Only the new tokens of active slots have changed the pages, in their layer.
    owners = {int(table[b, LENGTHS[b] // A]) for b in (0, 1)}
    for old, new in zip(before, after, strict=True):
        changed = np.asarray(old != new).any(axis=tuple(range(2, old.ndim)))
        assert set(np.flatnonzero(changed[1])) == owners | {0} and not changed[0].any()


def softmax_of_pages(q_BKGH, pages, table, lengths):
    """One query after the other, in float64."""
    out = np.zeros(q_BKGH.shape)
    for b, k, g in np.ndindex(q_BKGH.shape[:3]):
        keys, values = (
            np.concatenate([np.asarray(x, np.float64)[page, k] for page in table[b]])[: lengths[b]]
            for x in pages
        )
        scores = keys @ q_BKGH[b, k, g] / np.sqrt(q_BKGH.shape[-1])
        weights = np.exp(scores - scores.max())
        out[b, k, g] = weights @ values / weights.sum()
    return out


@pytest.mark.parametrize(
    "part_tokens, least_programs, parts", [(2048, 1, 1), (128, 1, 3), (2048, 64, 5)]
)
@pytest.mark.parametrize("queries", [3, 20])
def test_parts_of_a_sequence_are_joined(
    monkeypatch, part_tokens, least_programs, parts, queries, page=8, head=16
):
    """Of 320 tokens at most: parts of 64 and more, whole, begun, of one token and empty."""
    monkeypatch.setattr(gpu_kernel, "PART_TOKENS", part_tokens)
    monkeypatch.setattr(gpu_kernel, "LEAST_PROGRAMS", least_programs)
    lengths = np.array([1, 64, 65, 129, 200, 320], np.int32)
    rows, of_each = len(lengths), 320 // page
    assert gpu_kernel.parts(2 * rows, 320) == parts
    rng = np.random.default_rng(0)
    # Large scores: parts differ in their largest.
    q = 10 * rng.standard_normal((rows, 2, queries, head))
    pages = [rng.standard_normal((1 + rows * of_each, 2, page, head)) for _ in "kv"]
    table = rng.permutation(np.arange(1, 1 + rows * of_each)).reshape(rows, of_each)
    out = gpu_kernel.paged_attention(
        jnp.float32(q),
        *map(jnp.float32, pages),
        jnp.asarray(table, jnp.int32),
        jnp.asarray(lengths),
        interpret=True,
    )
    np.testing.assert_allclose(out, softmax_of_pages(q, pages, table, lengths), rtol=0, atol=1e-5)


def test_the_gpus_kernel_is_lowered_to_triton():
    """For CUDA; the compiler behind is not there."""
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    integers = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    pages = of(30, 2, 32, 128)
    with lowered_for_an_h100():
        traced = jax.jit(gpu_kernel.paged_attention).trace(
            of(4, 2, 6, 128), pages, pages, integers(4, 7), integers(4)
        )
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @__gpu$xla.gpu.triton") == 1


@pytest.mark.parametrize(
    "blocks, sizes",
    [
        ((), {"num_kv_pages_per_block": 8, "num_queries_per_block": 1}),
        (
            (("paged_kv", 64), ("paged_queries", 2)),
            {"num_kv_pages_per_block": 2, "num_queries_per_block": 2},
        ),
        ((("paged_queries", 16),), {"num_kv_pages_per_block": 8, "num_queries_per_block": 4}),
    ],
)
def test_blocks_of_a_config_reach_the_kernel(monkeypatch, blocks, sizes):
    """Of a table of 8 pages of 32 tokens, and of 4 slots."""
    handed = {}
    monkeypatch.setattr(
        ragged_paged_attention,
        "ragged_paged_attention",
        lambda q, *_, **given: handed.update(given) or q,
    )
    q, pages = jnp.zeros((4, 4, 128)), jnp.zeros((9, 32, 4, 128))
    table, lengths = jnp.zeros((4, 8), jnp.int32), jnp.ones(4, jnp.int32)
    paged_kernels.tpu_attention(q, pages, table, lengths, None, None, blocks)
    assert sizes.items() <= handed.items()


@pytest.mark.parametrize("kernel", ["tpu", "gpu"])
def test_a_kernel_does_not_read_what_was_last_in_an_empty_slot(monkeypatch, problem, kernel):
    handed = []

    def attention(q, pages, table, lengths, *_):
        handed.append(lengths.tolist())
        return q

    monkeypatch.setattr(paged_kernels, f"{kernel}_attention", attention)
    k, v, table, q, k_new, v_new = problem
    layout = paged.Layout(kernel, A, "float32")
    goes = jnp.array([True, True, False])
    attend = paged.decoding(layout, table, jnp.asarray(LENGTHS), goes, TILE)
    attend(1, q, k_new, v_new, pool_of(layout, k, v), None)
    assert handed == [[LENGTHS[0] + 1, LENGTHS[1] + 1, 1]]


@pytest.mark.parametrize("kernel", ["xla", "gpu"])
def test_non_finite_keys_and_values_are_not_cached(problem, kernel):
    """The output for that token is NaN, and no other."""
    k, v, table, q, k_new, v_new = problem
    layout = paged.Layout(kernel, A, "float32")
    goes, lengths = jnp.array([True, True, False]), jnp.asarray(LENGTHS)
    attend = paged.decoding(layout, table, lengths, goes, TILE)
    expected, _ = attend(1, q, k_new, v_new, pool_of(layout, k, v), None)
    k_new, v_new = k_new.at[0, 0, 0, 1].set(jnp.inf), v_new.at[2].set(jnp.nan)
    out, after = attend(1, q, k_new, v_new, pool_of(layout, k, v), None)
    assert all(np.isfinite(x).all() for x in after)
    np.testing.assert_array_equal(out[1], expected[1])
    heads = q.shape[2] // k_new.shape[2]
    assert np.isnan(out[0, 0, :heads]).all() and np.isnan(out[2]).all()
    np.testing.assert_array_equal(out[0, 0, heads:], expected[0, 0, heads:])


@pytest.mark.parametrize("kernel", ["tpu", "gpu"])
def test_at_the_last_page_of_a_pool_a_kernel_attends_as_xla_does(problem, kernel):
    k, v, table, *_ = problem
    layout = paged.Layout(kernel, A, "float32")
    before = pool_of(layout, k, v)
    last = jnp.array([1, N - 1], jnp.int32)
    with interpreted() if kernel == "tpu" else contextlib.nullcontext():
        difference, after = paged.page_difference(layout, before, last, K * G, table, TILE)
    assert 0 < difference < 2e-6
    for old, new in zip(before, after, strict=True):
        changed = np.asarray(old != new).any(axis=tuple(range(2, old.ndim)))
        np.testing.assert_array_equal(np.argwhere(changed[:, 1:]), [[1, N - 2]])


def small_engine(num_devices=1, **axes):
    return make_engine(
        num_devices=num_devices, prefill=4, slots=12, page_tokens=16, kernel="gpu", **axes
    )


def test_an_engine_on_an_accelerator_checks_the_last_page_at_its_start():
    """On four devices with the heads over two."""
    engine, lines = small_engine(4, fsdp=2, tensor=2), []
    params = engine.load_params(make_params(CONFIG))
    engine.warm_up(params, (), say=lines.append)
    assert not lines, "on CPU"
    engine._mesh = SimpleNamespace(devices=np.array([SimpleNamespace(platform="cuda")]))
    engine.warm_up(params, (), say=lines.append)
    (line,) = lines
    assert re.match(r"paged attention \(gpu\) agrees with XLA's at the last page of the KV", line)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda q, pages, table, *more: (q, pages, table - 1, *more),  # the page before it
        lambda q, pages, table, lengths, *more: (q, pages, table, lengths - 1, *more),
        lambda q, *more: (q * jnp.nan, *more),
    ],
)
def test_a_kernel_that_misses_the_last_page_ends_the_run(monkeypatch, wrong):
    right = paged_kernels.gpu_attention
    monkeypatch.setattr(paged_kernels, "gpu_attention", lambda *given: right(*wrong(*given)))
    Programs.cache_clear()
    engine = small_engine()
    with pytest.raises(RunError, match=r"\(gpu\) differs by .*Set config\.rollout\.kernel='xla'"):
        engine.check_pool(engine.init_decode_state())
    Programs.cache_clear()


def test_rounding_to_bfloat16_is_no_difference():
    pages = jax.eval_shape(lambda: jnp.zeros((2, N, 2, 32, 64), jnp.bfloat16))
    layout = paged.Layout("gpu", 32, "bfloat16")
    pool = (jnp.zeros(pages.shape, pages.dtype),) * 2
    table, last = jnp.zeros((4, 3), jnp.int32), jnp.array([1, N - 1], jnp.int32)
    difference, _ = paged.page_difference(layout, pool, last, 16, table, TILE)
    assert 1e-4 < difference < paged.MAX_DIFFERENCE / 2


def test_the_memory_of_a_page():
    c = dataclasses.replace(CONFIG.model, num_layers=3, num_kv_heads=2, head_dim=8)
    of = lambda kernel, dtype: paged.page_bytes(c, paged.Layout(kernel, 4, dtype))
    values = 3 * 4 * 2 * 2 * 8  # layers, tokens, keys and values, heads, numbers of each
    assert of("xla", "float32") == of("tpu", "float32") == 4 * values
    assert of("gpu", "bfloat16") == 2 * values


def tokens(num_devices=1, **changes):
    """Of one prompt with two samples, over two pages and a half: 14 + 6 tokens, 8 to a page."""
    model = dict(head_dim=H, num_layers=1)
    engine = make_engine(
        num_devices=num_devices,
        prefill=1,
        model=model,
        slots=2,
        samples=2,
        page_tokens=8,
        max_response_tokens=6,
        decode_steps=3,
        stop_tokens=(),
        **changes,
    )
    params = make_params(dataclasses.replace(CONFIG, model=engine.config.model))
    problem = Problem(0, "", tuple(range(3, 17)), "", "test")
    return engines.tokens_of(generate(engine, params, [problem], num_samples=2)[0])


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["tpu", "gpu"])
def test_a_kernel_generates_the_same_tokens(kernel):
    """With the heads over two devices, except where jax 0.12 partitions no interpreted kernel that
    is local to one axis of a mesh."""
    devices = 1 if kernel == "tpu" and jax.__version_info__ > (0, 11) else 2
    with interpreted() if kernel == "tpu" else contextlib.nullcontext():
        assert tokens(devices, tensor=devices, kernel=kernel) == tokens()


SHAPE = Shape(2, 32, 4, 2, 48, 64, "float32", 3, 4, 12, 20, "uniform", 0, 8, 8, 1.0, 1.0, 1)


@pytest.mark.slow
def test_the_mismatch_of_rollout_and_trainer_is_float32_rounding():
    found = bench_mismatch(SHAPE)
    assert found["mismatch_mean"] < 1e-6 and found["mismatch_max"] < 1e-5
    assert found["tokens"] == 3 * 4 * 20
    assert 0 < found["mismatch_mean"] <= found["mismatch_p99"] <= found["mismatch_max"]


def choose(wanted, platform, page_tokens=32, heads_parts=1, **model):
    fields = {"compute_dtype": "bfloat16", "head_dim": 128} | model
    c = dataclasses.replace(CONFIG.model, **fields)
    return paged_kernels.choose(
        wanted, platform, c, page_tokens=page_tokens, heads_parts=heads_parts
    )


def test_the_kernel_is_the_platforms_where_it_takes_the_model():
    own = {"tpu": "tpu", "gpu": "gpu", "cuda": "gpu", "cpu": "xla"}
    for platform, kernel in own.items():
        assert choose("auto", platform) == (kernel, None)
        assert choose("xla", platform, head_dim=64) == ("xla", None), "asked for"
        sliding = choose("auto", platform, sliding_window=(4, (0,)))
        assert sliding[0] == "xla" and (sliding[1] is None) == (platform == "cpu")
    assert (
        choose("auto", "gpu", page_tokens=24)[0] == choose("auto", "gpu", head_dim=96)[0] == "xla"
    )


@pytest.mark.parametrize(
    "platform, model, why",
    [
        ("tpu", {"head_dim": 64}, "the tpu kernel takes a config.model.head_dim of 128"),
        ("cuda", {"compute_dtype": "float32"}, "the gpu kernel takes config.model.compute"),
    ],
)
def test_a_fall_back_to_xla_has_a_reason(platform, model, why):
    kernel, refused = choose("auto", platform, **model)
    assert kernel == "xla" and refused is not None and refused.startswith(why)
    c = dataclasses.replace(CONFIG.model, **{"compute_dtype": "bfloat16", "head_dim": 128} | model)
    rollout = dataclasses.replace(CONFIG.rollout, kernel="auto", page_tokens=32)
    config = dataclasses.replace(CONFIG, model=c, rollout=rollout)
    one = dict.fromkeys(("data", "fsdp", "context", "tensor"), 1)
    engine_config = make_engine_config(config, one, 16, (1,), platform=platform)
    line = attention_line(attention_kernels.Choice("splash", platform), engine_config)
    assert line == f"attention on {platform}: training splash, rollouts xla ({refused})"


@pytest.mark.parametrize(
    "kernel, model",
    [
        ("xla", dict(head_dim=64)),
        ("xla", dict(head_dim=192)),
        ("xla", dict(head_dim=256)),
        ("xla", dict(num_heads=12, num_kv_heads=6)),
        ("tpu", dict(num_heads=12, num_kv_heads=6, heads_parts=3)),
        ("tpu", dict(num_heads=16, num_kv_heads=8)),
        ("tpu", dict(num_heads=16, num_kv_heads=8, compute_dtype="float32")),
        ("xla", dict(num_heads=8, num_kv_heads=8, compute_dtype="float32")),
        ("tpu", dict(num_heads=8, num_kv_heads=8, compute_dtype="float32", heads_parts=2)),
        ("tpu", dict(num_heads=8, num_kv_heads=8)),
        ("xla", dict(num_heads=48, num_kv_heads=12)),
        ("tpu", dict(num_heads=48, num_kv_heads=12, heads_parts=12)),
        ("tpu", dict(num_heads=32, num_kv_heads=8, page_tokens=512)),
        ("xla", dict(num_heads=32, num_kv_heads=8, page_tokens=1024)),
        ("tpu", dict(num_heads=32, num_kv_heads=8, page_tokens=1024, heads_parts=2)),
        ("tpu", dict(num_heads=32, num_kv_heads=4, heads_parts=8)),  # the mesh is refused, later
    ],
)
def test_the_tpus_kernel_takes_the_heads_that_it_was_compiled_with(kernel, model):
    """As libtpu compiled it, or not, for v4, v5e, v5p and v6e."""
    assert choose("auto", "tpu", **model)[0] == kernel


@pytest.mark.parametrize(
    "arguments, fields, message",
    [
        (("gpu", "cpu"), {}, r"rollout\.kernel 'gpu' needs a gpu; the devices are 'cpu'.*'auto'"),
        (("tpu", "gpu"), {}, r"rollout\.kernel 'tpu' needs a tpu; the devices are 'gpu'"),
        (
            ("tpu", "tpu"),
            {"sliding_window": (4, (0,))},
            r"does not take config\.model\.sliding_window",
        ),
        (("tpu", "tpu"), {"head_dim": 64}, r"config\.model\.head_dim of 128.*got 64.*'auto'"),
        (
            ("tpu", "tpu"),
            {"num_heads": 12, "num_kv_heads": 6},
            r"config\.model\.num_kv_heads on a device; got 6.*'auto'",
        ),
        (("gpu", "gpu"), {"head_dim": 96}, r"config\.model\.head_dim of 16.*got 96.*'auto'"),
        (("gpu", "gpu"), {"compute_dtype": "float32"}, r"compute_dtype 'bfloat16' only; got 'flo"),
        (("gpu", "gpu"), {"page_tokens": 24}, r"config\.rollout\.page_tokens; got 24"),
        (("tpu", "tpu"), {"page_tokens": 2048}, r"rollout\.page_tokens of 1024 at most; got 2048"),
    ],
)
def test_impossible_kernels_are_refused(arguments, fields, message):
    with pytest.raises(UserError, match=message):
        choose(*arguments, **fields)


@pytest.mark.parametrize("mesh", [{}, dict(tensor=2), dict(fsdp=2, tensor=2)])
def test_decoding_with_the_tpus_kernel_is_lowered_on_every_mesh(mesh, monkeypatch):
    """Its kernel leaves nothing to the compiler's partitioner, also not axes of one device. Nothing
    is compiled: that takes libtpu, see `launch/plan.py`."""
    v5p = functools.partial(pltpu.get_tpu_info_for_chip, pltpu.ChipVersion.TPU_V5P, 1)
    monkeypatch.setitem(tpu_info.registry, "cpu", v5p)
    wide = dict(head_dim=H, hidden_size=256, intermediate_size=256, compute_dtype="bfloat16")
    engine = make_engine(
        num_devices=math.prod(mesh.values()), model=wide, page_tokens=64, kernel="tpu", **mesh
    )
    programs, c = engine._programs, engine.config.model
    params = jax.eval_shape(functools.partial(rollout_dtypes, c), decoder.param_shapes(c))
    params = programs.for_decoding(params, lambda x: jax.eval_shape(decoder.unstacked, x))
    params, state = (
        jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), *given)
        for given in (
            (params, programs.decode_params_at),
            (jax.eval_shape(programs.init), programs.state_at),
        )
    )
    traced = programs.decode(engine.config.params.mode).trace(params, state)
    assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()
