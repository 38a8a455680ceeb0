"""Part `numbers`: the programs of a run on this machine's devices against plain NumPy in float64,
or against each other."""

import dataclasses
import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dapo_jax import train_loop
from dapo_jax.config import Config
from dapo_jax.models import log_probs
from dapo_jax.models.attention import kernels, xla
from dapo_jax.models.sharding import fitting, make_mesh
from dapo_jax.rollout import paged, sampling
from dapo_jax.rollout.engine import DecoderEngine
from dapo_jax.tools.bench import Shape, bench_mismatch
from dapo_jax.tools.bench.shapes import bench_engine, bench_model
from dapo_jax.tools.check.findings import Check, Result
from dapo_jax.tools.check.machine import DECODING_BYTES, MODELS, Machine
from dapo_jax.utils.precision import multiply_in

# Largest difference over the largest value, of one program in this dtype.
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
MISMATCH = {"float32": 1e-4, "bfloat16": 0.03}  # nats a token, the mean
POOL_SHARE = 0.4  # of the memory
PAGE_TOKENS, MOST_TOKENS = 32, 4096
# The first two steps of configs/tiny_dapo.py with these changes, on a CPU: see `_tiny_run`.
TINY = {"train.num_steps": 2, "pretrain.num_steps": 200, "evaluation.num_samples": 1}
ON_CPU = {
    "accuracy/sampled": (0.107, 0.080),
    "length/mean": (24.0, 20.1),
    "policy/entropy": (0.353, 0.365),
}
# How far another device may be from it: programs that round otherwise sample some other tokens.
APART = {"accuracy/sampled": 0.05, "length/mean": 4.0, "policy/entropy": 0.08}


def checks(machine: Machine, base: dict[str, Any]) -> dict[str, Check]:
    """Returns the checks of this part by name.

    Args:
        base: the values of configs/tiny_dapo.py.
    """
    dtypes = ("float32",) if machine.is_cpu else ("bfloat16", "float32")
    found: dict[str, Check] = {
        f"attention, {d}, {text}": lambda d=d, window=window: _attention(machine, d, window)
        for d in dtypes
        for text, window in (("packed rows", None), ("sliding window", 200))
    }
    found |= {f"log-probs, {d}": lambda d=d: _log_probs(machine, d) for d in dtypes}
    found["sampling"] = _sampling
    found["paged attention"] = lambda: _paged_attention(machine)
    found |= {
        f"mismatch of rollout and trainer, {d}": lambda d=d: _mismatch(machine, d)
        for d in ("bfloat16", "float32")
    }
    found["tiny run"] = lambda: _tiny_run(base)
    return found


def _worst(apart: dict[str, float]) -> str:
    """Returns the name of the largest difference; NaN is larger than any."""
    return max(apart, key=lambda name: np.inf if np.isnan(apart[name]) else apart[name])


def _compared(pairs: dict[str, tuple[Any, np.ndarray]], tolerance: float, text: str) -> Result:
    """Returns the result of comparing arrays, by name, with what they should be."""
    apart = {
        name: float(np.max(np.abs(np.asarray(x, np.float64) - wanted)) / np.max(np.abs(wanted)))
        for name, (x, wanted) in pairs.items()
    }
    worst = _worst(apart)
    verdict = "ok" if apart[worst] <= tolerance else "wrong"
    text = f"{text}: at most {apart[worst]:.1e} of the largest value apart ({worst})"
    return Result(verdict, f"{text}; tolerance {tolerance:.0e}", apart)


def _attention(machine: Machine, dtype: str, window: int | None) -> Result:
    """Attention of training to packed rows, forward and backward."""
    c = bench_model((2, 512, 4, 2, 512, 512, dtype))
    if window is not None:
        c = dataclasses.replace(c, sliding_window=(window, (0, 1)))
    multiply_in(dtype, machine.platform)
    choice = kernels.choose(c, None)
    B, T, N, K, H = 2, 1024, c.num_heads, c.num_kv_heads, c.head_dim
    rng = np.random.default_rng(0)
    draw = lambda heads: jnp.asarray(rng.standard_normal((B, T, heads, H)), jnp.dtype(dtype))
    q, k, v, d_out = draw(N), draw(K), draw(K), draw(N)
    ends = np.sort(rng.choice(np.arange(1, T), (B, 4)), axis=1)
    segments_BT = np.stack([np.searchsorted(row, np.arange(T), "right") + 1 for row in ends])
    attend = xla.packed(jnp.asarray(segments_BT, jnp.int32), choice)
    program = lambda q, k, v: attend(0, q, k, v, None, window)[0]
    out, pull = jax.vjp(jax.jit(program), q, k, v)
    wanted = _plain_attention(
        segments_BT, window, *(np.asarray(x, np.float64) for x in (q, k, v, d_out))
    )
    names = ("output", "gradient of queries", "gradient of keys", "gradient of values")
    pairs: dict[str, Any] = dict(zip(names, zip((out, *pull(d_out)), wanted)))
    return _compared(pairs, TOLERANCE[dtype], choice.kernel)


def _plain_attention(
    segments_BT: np.ndarray,
    window: int | None,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    d_out: np.ndarray,
) -> tuple[np.ndarray, ...]:
    """Returns causal attention within segments and its gradients w.r.t. q, k and v."""
    G, (T, H) = q.shape[2] // k.shape[2], (q.shape[1], q.shape[3])
    k_all, v_all = np.repeat(k, G, axis=2), np.repeat(v, G, axis=2)
    back_TT = np.arange(T)[:, None] - np.arange(T)[None]
    seen_BTT = (segments_BT[:, :, None] == segments_BT[:, None]) & (back_TT >= 0)
    if window is not None:
        seen_BTT &= back_TT < window
    scores = np.einsum("btnh,bsnh->bnts", q, k_all) * H**-0.5
    scores = np.where(seen_BTT[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    d_weights = np.einsum("btnh,bsnh->bnts", d_out, v_all)
    mean = np.sum(d_weights * weights, axis=-1, keepdims=True)
    d_scores = weights * (d_weights - mean) * H**-0.5
    to_kv = lambda x: x.reshape(*x.shape[:2], -1, G, H).sum(axis=3)
    return (
        np.einsum("bnts,bsnh->btnh", weights, v_all),
        np.einsum("bnts,bsnh->btnh", d_scores, k_all),
        to_kv(np.einsum("bnts,btnh->bsnh", d_scores, q)),
        to_kv(np.einsum("bnts,btnh->bsnh", weights, d_out)),
    )


def _log_probs(machine: Machine, dtype: str) -> Result:
    """Log-probs and entropy of chunks, and the gradient of the log-probs."""
    multiply_in(dtype, machine.platform)
    T, D, V = 512, 256, 10_000
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.standard_normal((1, T, D)), jnp.dtype(dtype))
    unembed = jnp.asarray(rng.standard_normal((V, D)) * D**-0.5, jnp.dtype(dtype))
    targets, d_T = rng.integers(0, V, (1, T)), rng.standard_normal((1, T))

    def program(hidden: jax.Array, unembed: jax.Array) -> Any:
        return log_probs.token_statistics(
            hidden, unembed, jnp.asarray(targets), temperature=1.0, chunk_tokens=128
        )

    found, pull = jax.vjp(jax.jit(program), hidden, unembed)
    weight = jnp.asarray(d_T, jnp.float32)
    d_hidden, d_unembed = pull(log_probs.TokenStatistics(weight, jnp.zeros_like(weight)))
    h, w = np.asarray(hidden[0], np.float64), np.asarray(unembed, np.float64)
    z = h @ w.T
    log_p = z - np.log(np.exp(z).sum(axis=1, keepdims=True))
    p, rows = np.exp(log_p), np.arange(T)
    d_z = -d_T[0][:, None] * p
    d_z[rows, targets[0]] += d_T[0]
    pairs = {
        "log-probs": (found.log_prob_BT[0], log_p[rows, targets[0]]),
        "entropy": (found.entropy_BT[0], -(p * log_p).sum(axis=1)),
        "gradient of hidden states": (d_hidden[0], d_z @ w),
        "gradient of the unembedding": (d_unembed, d_z.T @ h),
    }
    return _compared(pairs, TOLERANCE[dtype], f"vocabulary of {V:,}")


def _sampling() -> Result:
    """Frequencies of sampled tokens against their probabilities, plain, tempered and with top-p."""
    V, num = 50, 40_000
    logits = np.random.default_rng(0).standard_normal(V).astype(np.float32) * 2
    keys = jax.random.key_data(jax.random.split(jax.random.key(1), num))
    apart = {}
    for name, params in {
        "plain": sampling.SamplingParams(),
        "temperature 0.6": sampling.SamplingParams(temperature_X=0.6),
        "top-p 0.8": sampling.SamplingParams(top_p_X=0.8),
    }.items():
        program = jax.jit(functools.partial(sampling.sample, mode=params.mode))
        rows = jnp.broadcast_to(logits, (num, V))
        token_B = program(rows, keys, jnp.zeros(num, jnp.int32), params.full(num)).token_B
        p = np.exp(logits.astype(np.float64) / params.temperature_X)
        p /= p.sum()
        order = np.argsort(-p)
        kept = order[: np.searchsorted(np.cumsum(p[order]), params.top_p_X) + 1]
        expected = np.zeros(V)
        expected[kept] = num * p[kept] / p[kept].sum()
        counts = np.bincount(np.asarray(token_B), minlength=V)
        outside, degrees = counts[expected == 0].sum(), len(kept) - 1
        chi = np.sum((counts[kept] - expected[kept]) ** 2 / expected[kept])
        # Deviations of the chi-square from its mean, as a normal number.
        apart[name] = np.inf if outside else float((chi - degrees) / np.sqrt(2 * max(1, degrees)))
    worst = max(apart, key=lambda name: apart[name])
    verdict = "ok" if apart[worst] < 6 else "wrong"
    text = f"{num:,} tokens each: chi-square at most {apart[worst]:.1f} deviations above its mean"
    return Result(verdict, f"{text} ({worst}); tolerance 6", apart)


def _paged_attention(machine: Machine) -> Result:
    """Attention over the first and the last page, in the first and the last layer, of a pool as
    large as a run's."""
    name = list(machine.models(DECODING_BYTES))[-1]
    shape = _shape((*MODELS[name], machine.dtype))
    c, layout = bench_model(shape), fitting(bench_model(shape), machine.devices)
    page_bytes = 2 * c.num_layers * c.num_kv_heads * c.head_dim * PAGE_TOKENS
    page_bytes *= np.dtype(jnp.dtype(c.compute_dtype)).itemsize
    tokens = MOST_TOKENS if not machine.is_cpu else 512
    budget = 2**28 if machine.is_cpu else POOL_SHARE * (machine.memory_bytes or 2**30)
    most = int(budget) // page_bytes
    slots = max(1, min(256, most // (tokens // PAGE_TOKENS)))
    shape = shape._replace(slots=slots * machine.devices, gen_len=tokens - shape.prompt_len)
    engine = DecoderEngine(bench_engine(shape, layout), make_mesh(layout))
    state, pages = engine.init_decode_state(), engine.config.shard_pages
    apart = {}
    for layer, page in (
        (0, 1),
        (c.num_layers - 1, 1),
        (0, pages - 1),
        (c.num_layers - 1, pages - 1),
    ):
        state, difference = engine.pool_difference(state, layer, page)
        apart[f"layer {layer}, page {page}"] = difference
    worst = _worst(apart)
    verdict = "ok" if apart[worst] <= paged.MAX_DIFFERENCE else "wrong"
    gib = pages * page_bytes / 2**30
    kernel, refused = engine.config.kernel, engine.config.kernel_refused
    text = f"{kernel}, {name}, {pages:,} pages ({gib:.1f} GiB): at most {apart[worst]:.1e} apart"
    text += f" ({worst}); tolerance {paged.MAX_DIFFERENCE:.0e}"
    return Result(verdict, text + (f"; {refused}" if refused else ""), apart)


def _mismatch(machine: Machine, dtype: str) -> Result:
    """Log-probs of sampled tokens by the rollout and by the trainer."""
    model = MODELS["small"] if machine.is_cpu else (4, 512, 4, 2, 1024, 4096)
    found = bench_mismatch(_shape((*model, dtype)))
    mean, largest = found["mismatch_mean"], found["mismatch_max"]
    text = f"{mean:.1e} nats a token in the mean, {largest:.1e} at most"
    verdict = "ok" if mean <= MISMATCH[dtype] else "wrong"
    figures = {
        name: found[name] for name in ("mismatch_mean", "mismatch_p99", "mismatch_max", "tokens")
    }
    return Result(verdict, f"{text}; tolerance {MISMATCH[dtype]:.0e}", figures)


def _shape(model: tuple) -> Shape:
    """Returns small work for a model as `bench_model` takes it."""
    return Shape(
        *model, prompts=4, group=8, prompt_len=64, gen_len=64, lengths="uniform",
        slots=32, decode_steps=8, page_tokens=PAGE_TOKENS, temperature=1.0, top_p=1.0, runs=1,
    )  # fmt: skip


def _tiny_run(base: dict[str, Any]) -> Result:
    """The first two steps of configs/tiny_dapo.py, on a base model of 200 steps, against those of a
    CPU (2 cores, jax 0.10.2)."""
    values = {name: dict(of) if isinstance(of, dict) else of for name, of in base.items()}
    for field, value in TINY.items():
        section, name = field.split(".")
        values[section][name] = value
    config = Config.from_dict(values)
    with tempfile.TemporaryDirectory() as place:
        train_loop.train(config, Path(place))
        text = (Path(place) / "metrics.jsonl").read_text()
    lines = [line for line in map(json.loads, text.splitlines()) if line["step"] > 0]
    figures = {f"{name}, step {line['step']}": line[name] for line in lines for name in APART}
    apart = {
        name: np.max([abs(line[name] - wanted) for line, wanted in zip(lines, ON_CPU[name])])
        for name in APART
    }
    wrong = [name for name in APART if not apart[name] <= APART[name]]
    text = ", ".join(
        f"{name} {apart[name]:.3g} apart (tolerance {APART[name]:g})" for name in APART
    )
    return Result("wrong" if wrong else "ok", text, figures)
