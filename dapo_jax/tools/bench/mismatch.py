"""Benchmark of the log-prob mismatch between rollout and trainer, same parameters and tokens."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dapo_jax.models import decoder, log_probs
from dapo_jax.models.sharding import fitting, initial_params, make_mesh
from dapo_jax.rollout.engine import DecoderEngine
from dapo_jax.tools.bench.shapes import Shape, bench_engine, bench_model, generate, random_problems
from dapo_jax.training import packing
from dapo_jax.types import UserError

GSPO_LOW, GSPO_HIGH = 3e-4, 4e-4  # clip bounds of arXiv:2507.18071, section 5.1


def bench_mismatch(shape: Shape) -> dict[str, Any]:
    """Returns |log p_rollout - log p_trainer| over all response tokens in nats (mean, 99th
    percentile, max), the mean signed difference, and the share of responses that GSPO would clip.

    `sensitivity_mean` is the trainer's mismatch with itself when the scales of the layers' first
    norms move by a relative 1e-7. Programs that add in different orders cannot agree better.

    Parameters are random. Packed rows hold two sequences each.
    """
    shape.check()
    if shape.temperature == 0:
        raise UserError("--temperature must be above 0: greedy tokens have no distribution; got 0.")
    c = bench_model(shape)
    layout = fitting(c, jax.device_count())
    mesh = make_mesh(layout)
    params = initial_params(c, layout, mesh, seed=0)
    engine = DecoderEngine(bench_engine(shape, layout), mesh)
    problems = random_problems(shape)
    with engine.weights(params):
        responses, _ = generate(engine, shape, problems, seed=1)
    flat = [r for group in responses for r in group]
    packed = packing.pack(
        [p.prompt_tokens for p in problems for _ in range(shape.group)],
        np.concatenate([r.tokens for r in flat]),
        np.array([len(r.tokens) for r in flat]),
        2 * (shape.prompt_len + shape.gen_len),
    )
    statistics = jax.jit(
        functools.partial(log_probs.row_statistics, c, temperature=shape.temperature)
    )
    log_probs_of = lambda params: packing.take_columns(
        packed, statistics(params, packed.rows).log_prob_BT
    )
    trainers_N = log_probs_of(params)
    unmoved_N, moved_N = (log_probs_of(_with_norms(params, moved)) for moved in (0.0, 1e-7))
    rollouts_N = np.concatenate([r.log_probs for r in flat])
    mismatch_N = np.abs(rollouts_N - trainers_N)
    # GSPO's ratio at the parameters that sampled. Within one program it would be 1.
    ends = np.cumsum([len(r.tokens) for r in flat])[:-1]
    means_R = np.array([x.mean() for x in np.split(trainers_N - rollouts_N, ends)])
    outside_R = (np.exp(means_R) < 1 - GSPO_LOW) | (np.exp(means_R) > 1 + GSPO_HIGH)
    return {
        "mismatch_mean": float(mismatch_N.mean()),
        "mismatch_p99": float(np.quantile(mismatch_N, 0.99)),
        "mismatch_max": float(mismatch_N.max()),
        "gspo_outside_share": float(outside_R.mean()),
        "difference_mean": float((rollouts_N - trainers_N).mean()),
        "sensitivity_mean": float(np.abs(moved_N - unmoved_N).mean()),
        "log_prob_mean": float(rollouts_N.mean()),
        "tokens": len(mismatch_N),
        "device": jax.devices()[0].device_kind,
        "shape": shape._asdict(),
    }


def _with_norms(params: decoder.Params, relative: float) -> decoder.Params:
    """Returns the parameters with the layers' first norms in float32, their scales moved."""
    scale = params["layers"]["attention_norm"].astype(jnp.float32)
    moved = scale * (1 + relative * jax.random.normal(jax.random.key(2), scale.shape))
    return params | {"layers": params["layers"] | {"attention_norm": moved}}
