"""The gradient of a mini-batch against a plain one in float64: every sequence by itself, whole
scores, whole logits, one device, autodiff.

In float64 what differs is an error, not rounding, which leaves 2e-15 of an array's largest entry.
In float32 rounding alone leaves some 1e-6 (docs/log.md).
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.models import chunked_softmax, decoder, lora, sharding
from dapo_jax.models.attention import kernels, xla
from dapo_jax.models.rotary import rotary_angles
from dapo_jax.training import packing, step
from dapo_jax.types import Rows
from tests.support.helpers import (
    in_float64,
    in_groups,
    make_mesh,
    make_params,
    random_samples,
    replace_model,
    rows_of,
)
from tests.training.test_step import CONFIG

LONGEST, DENOMINATOR = 48, 3.0


class Way(NamedTuple):
    """How it is computed; plainly, where nothing is said."""

    row_tokens: int = 64
    alone: bool = False  # each sequence in a row of its own
    backwards: bool = False  # the order of the sequences
    share_prompts: bool = False
    rows: int = 8  # to a micro-batch
    mesh: tuple[int, ...] = (1, 1, 1, 1)
    vocab: str | None = None  # axis of the vocabulary
    chunk_tokens: int = 16384
    vocab_chunk: int = 4096
    query_chunk: int | None = None  # rows are long ones, and so many queries attend at once
    attention: str = "xla"
    remat: str = "none"


WAYS = {
    "alone": Way(alone=True, row_tokens=96, rows=1),
    "chunks": Way(rows=3, chunk_tokens=16, vocab_chunk=12, query_chunk=24, remat="full"),
    "shared": Way(share_prompts=True, backwards=True, rows=1, chunk_tokens=50, remat="dots"),
    "fsdp-tensor": Way(mesh=(2, 2, 1, 2), vocab="tensor", chunk_tokens=32, vocab_chunk=12),
    # Each device has 16 columns in parts of 6. The last part is padded.
    "filled-up": Way(mesh=(2, 2, 1, 2), vocab="tensor", chunk_tokens=32, vocab_chunk=6),
    "context-shared": Way(
        mesh=(1, 2, 2, 2), vocab="tensor", share_prompts=True, chunk_tokens=32, remat="attention"
    ),
    "context-long": Way(mesh=(1, 1, 8, 1), rows=2, query_chunk=4, remat="attention_mlp"),
    "splash": Way(attention="splash", backwards=True, rows=3, remat="attention"),
    "splash-context": Way(attention="splash", mesh=(1, 2, 2, 2), chunk_tokens=32),
}
IN_FLOAT64 = [name for name, way in WAYS.items() if way.attention == "xla"]  # kernels: float32
IN_FLOAT32 = ["chunks", "fsdp-tensor", "splash", "splash-context"]


@pytest.fixture(scope="module")
def params():
    return make_params(CONFIG)


@pytest.fixture(scope="module")
def samples():
    return in_groups(random_samples(np.random.default_rng(0), 12), 4)


@pytest.fixture(scope="module")
def expected(params, samples):
    rows = joined([rows_of([sample], LONGEST) for sample in samples])
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        loss = lambda params, rows: plain_loss(params, rows) / DENOMINATOR
        return jax.device_get(jax.jit(jax.grad(loss))(*in_float64((params, rows))))


def plain_loss(params, rows):
    """Numerator of the loss, from rows of one sequence each."""
    m, o = CONFIG.model, CONFIG.objective
    rms = lambda x: jnp.sqrt((x * x).mean(-1, keepdims=True) + m.rms_norm_eps)
    norm = lambda x, scale: x / rms(x) * scale
    # Angles are float32 whatever else is.
    sin_cos = rotary_angles(jnp.arange(LONGEST)[None], m.head_dim, m.rope_theta, None)
    sin, cos = (x.astype(jnp.float64) for x in sin_cos)

    def turned(x):
        a, b = x[..., : m.head_dim // 2], x[..., m.head_dim // 2 :]
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    x = params["embed"][rows.tokens_BT]
    for i in range(m.num_layers):
        w = {name: value[i] for name, value in params["layers"].items()}
        y = norm(x, w["attention_norm"])
        q, k, v = (jnp.einsum("btd,dnh->btnh", y, w[n]) + w[n + "_bias"] for n in "qkv")
        k, v = (jnp.repeat(z, m.num_heads // m.num_kv_heads, axis=2) for z in (k, v))
        scores = jnp.einsum("btnh,bsnh->bnts", turned(q), turned(k)) / np.sqrt(m.head_dim)
        scores = jnp.where(jnp.tri(LONGEST, dtype=bool), scores, -np.inf)
        attended = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)
        x = x + jnp.einsum("btnh,nhd->btd", attended, w["o"])
        y = norm(x, w["mlp_norm"])
        x = x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"]
    logits = norm(x, params["final_norm"]) @ params["embed"].T / CONFIG.rollout.temperature

    log_p = jax.nn.log_softmax(logits)[:, :-1]  # of the token after
    entropy = -(jnp.exp(log_p) * log_p).sum(-1)
    log_p = jnp.take_along_axis(log_p, rows.tokens_BT[:, 1:, None], axis=-1)[..., 0]
    advantage = rows.advantage_BT[:, 1:]
    ratio = jnp.exp(log_p - rows.log_prob_old_BT[:, 1:])
    clipped = jnp.clip(ratio, 1 - o.clip_low, 1 + o.clip_high)
    objective = jnp.minimum(ratio * advantage, clipped * advantage)
    if o.clip_dual is not None:
        dual = jnp.maximum(objective, o.clip_dual * advantage)
        objective = jnp.where(advantage < 0, dual, objective)
    kl = jnp.minimum(jnp.exp(-log_p) - 1 + log_p, 10.0)  # of a reference with log-prob 0
    loss = -rows.correction_BT[:, 1:] * objective + o.kl_coefficient * kl
    loss = loss - o.entropy_coefficient * entropy
    return jnp.where(rows.mask_BT[:, 1:], rows.weight_BT[:, 1:] * loss, 0.0).sum()


def gradient(way, dtype, params, samples, monkeypatch, **model):
    """By the package, of the same samples and the trained parameters."""
    monkeypatch.setattr(chunked_softmax, "VOCAB_CHUNK", way.vocab_chunk)
    monkeypatch.setattr(kernels, "KERNELS", {"cpu": way.attention})
    if way.query_chunk is not None:
        monkeypatch.setattr(xla, "LONG_ROW", way.query_chunk)
        monkeypatch.setattr(xla, "QUERY_CHUNK", way.query_chunk)
    changed = replace_model(
        CONFIG,
        compute_dtype=dtype,
        remat=way.remat,
        log_prob_chunk_tokens=way.chunk_tokens,
        **{"param_dtype": dtype} | model,
    )
    rules = (("vocab", way.vocab), *CONFIG.mesh.rules[1:])
    sizes = dict(zip(sharding.AXES, way.mesh, strict=True))
    config = dataclasses.replace(
        CONFIG,
        model=changed,
        mesh=dataclasses.replace(CONFIG.mesh, rules=rules, **sizes),
        train=dataclasses.replace(CONFIG.train, share_prompts=way.share_prompts),
    )

    samples = samples[::-1] if way.backwards else samples
    each = [[sample] for sample in samples] if way.alone else [samples]
    rows = joined([rows_of(s, way.row_tokens, share_prompts=way.share_prompts) for s in each])
    used = packing.used_micro_batches(len(rows.tokens_BT), way.rows)
    rows = packing.to_micro_batches(rows, rows_per_micro_batch=way.rows, num_micro_batches=used + 1)
    denominator = np.asarray(DENOMINATOR, dtype)
    if dtype == "float64":
        params, rows = in_float64((params, rows))
    mesh = make_mesh(config, int(np.prod(way.mesh)))
    params = jax.device_put(params, sharding.param_shardings(config.model, config.mesh, mesh))
    rows = jax.device_put(rows, sharding.row_sharding(mesh, batch_dim=1))
    run = jax.jit(functools.partial(step.gradient, config, mesh=mesh))
    trained, frozen = lora.split(params)
    return jax.device_get(run(trained, rows, np.int32(used), denominator, frozen=frozen)[0])


def joined(rows):
    return Rows(*(np.concatenate(column) for column in zip(*rows, strict=True)))


def assert_close(expected, found, tolerance, dtype):
    for x, y in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        assert x.dtype == np.float64 and y.dtype == np.dtype(dtype)
        np.testing.assert_allclose(y, x, rtol=0, atol=tolerance * np.abs(x).max())


@pytest.mark.parametrize("name", IN_FLOAT64)
def test_gradient_in_float64(monkeypatch, params, samples, expected, name):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        found = gradient(WAYS[name], "float64", params, samples, monkeypatch)
    assert_close(expected, found, 1e-13, "float64")


@pytest.mark.parametrize("name", IN_FLOAT32)
def test_gradient_in_float32(monkeypatch, params, samples, expected, name):
    found = gradient(WAYS[name], "float32", params, samples, monkeypatch)
    assert_close(expected, found, 1e-5, "float32")


def random_way(rng):
    """Any mesh, packing, cut and remat."""
    choose = lambda *values: values[rng.integers(len(values))]
    mesh = choose(
        (1, 1, 1, 1), (2, 2, 1, 2), (1, 2, 2, 2), (4, 1, 1, 2), (1, 1, 8, 1), (1, 4, 2, 1)
    )
    return Way(
        row_tokens=choose(64, 96),
        backwards=choose(False, True),
        share_prompts=choose(False, True),
        rows=mesh[0] * mesh[1] * choose(1, 2),
        mesh=mesh,
        vocab=choose(None, "tensor") if mesh[3] > 1 else None,
        chunk_tokens=choose(16, 50, 16384),
        vocab_chunk=choose(6, 12, 4096),
        remat=choose("none", "dots", "dots_no_batch", "attention_mlp", "attention", "full"),
    )


def check_adapters(seed, samples, monkeypatch):
    """The gradient of adapters, computed in a random way, is that of the merged weights
    W + (alpha / rank) A B by the chain rule. W is in int8 with every other seed."""
    rng = np.random.default_rng(seed)
    way, rank, alpha = random_way(rng), int(rng.integers(1, 5)), float(rng.uniform(1, 9))
    model = {"lora_rank": rank, "lora_alpha": alpha}
    if seed % 2:
        model["param_dtype"] = "int8"
    params = decoder.init_params(replace_model(CONFIG, **model), jax.random.key(seed))
    trained, frozen = lora.split(jax.device_get(params))
    drawn = lambda x: (rng.standard_normal(x.shape) / 6).astype(np.float32)
    trained = jax.tree.map(drawn, trained)  # B too, which begins with 0

    def loss(trained, frozen, rows):
        layers = dict(frozen["layers"])
        for name in ("q", "k", "v", "o", "gate", "up", "down"):
            if seed % 2:
                scale, of_inputs = layers.pop(f"{name}_scale"), 2 if name == "o" else 1
                scale = scale.reshape(len(scale), *[1] * of_inputs, *scale.shape[1:])
                assert layers[name].dtype == np.int8
                layers[name] = layers[name].astype(scale.dtype) * scale
            a, b = (trained["layers"][f"{name}_lora_{part}"] for part in "ab")
            flat = jnp.einsum(
                "lir,lro->lio", a.reshape(len(a), -1, rank), b.reshape(len(b), rank, -1)
            )
            layers[name] = layers[name] + alpha / rank * flat.reshape(layers[name].shape)
        return plain_loss(frozen | {"layers": layers}, rows) / DENOMINATOR

    rows = joined([rows_of([sample], LONGEST) for sample in samples])
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        wide = in_float64((trained, frozen, rows))
        expected = jax.device_get(jax.jit(jax.grad(loss))(*wide))
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        params = lora.join(trained, frozen)
        found = gradient(way, "float64", params, samples, monkeypatch, **model)
    assert_close(expected, found, 1e-13, "float64")


@pytest.mark.parametrize("seed", range(3))
def test_gradient_of_adapters_in_float64(monkeypatch, samples, seed):
    """Twenty seeds: tests/studies/lora_gradients.py."""
    check_adapters(seed, samples, monkeypatch)
