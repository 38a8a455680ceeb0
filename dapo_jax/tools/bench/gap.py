"""How far the rollout's log-probs are from the trainer's, for the same parameters and tokens."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dapo_jax.models import decoder, log_probs
from dapo_jax.models.sharding import fitting, initial_params, make_mesh
from dapo_jax.rollout import scheduler
from dapo_jax.rollout.admission import GenerationRequest
from dapo_jax.rollout.engine import DecoderEngine
from dapo_jax.tools.bench.shapes import Shape, bench_engine_config, bench_model, random_problems
from dapo_jax.training import packing
from dapo_jax.types import UserError

GSPO_LOW, GSPO_HIGH = 3e-4, 4e-4  # clip bounds of arXiv:2507.18071, section 5.1


def bench_gap(shape: Shape) -> dict[str, Any]:
    """|log p_rollout - log p_trainer| over all response tokens: mean, 99th percentile, max; and the
    mean of the difference with its sign, in nats; and the share of responses that GSPO would clip.

    Beside it, `sensitivity_mean`: how far the trainer's log-probs are from themselves when the
    scales of the layers' first norms move by a relative 1e-7, less than the order of a float32 sum
    does. Two programs that add in different orders cannot agree better.

    The model is as `model.init_params` makes it. Responses are drawn as in training and scored in
    packed rows of two sequences each, as in training.
    """
    shape.check()
    if shape.temperature == 0:
        raise UserError(
            "--temperature must be above 0: a greedy token is drawn from no distribution; got 0."
        )
    c = bench_model(shape)
    layout = fitting(c, jax.device_count())
    mesh = make_mesh(layout)
    params = initial_params(c, layout, mesh, seed=0)
    engine_config = bench_engine_config(shape, layout, kernel="xla")
    engine = DecoderEngine(engine_config, mesh)
    problems = random_problems(shape)
    with engine.weights(params):
        responses, _ = scheduler.generate(
            engine,
            problems,
            lambda sequences: [""] * len(sequences),
            jax.random.key(1),
            GenerationRequest(shape.group),
        )
    flat = [r for row in responses for r in row]
    packed = packing.pack(
        [p.prompt_tokens for p in problems for _ in range(shape.group)],
        np.concatenate([r.tokens for r in flat]),
        np.array([len(r.tokens) for r in flat]),
        2 * (shape.prompt_len + shape.gen_len),
    )
    score = jax.jit(functools.partial(log_probs.row_statistics, c, temperature=shape.temperature))
    scored = lambda params: packing.take_columns(packed, score(params, packed.rows).log_prob_BT)
    trainers_M = scored(params)
    unmoved_M, moved_M = (scored(_with_norms(params, relative)) for relative in (0.0, 1e-7))
    rollouts_M = np.concatenate([r.log_probs for r in flat])
    gap_M = np.abs(rollouts_M - trainers_M)
    # GSPO's ratio at the parameters that sampled, which in one program would be 1.
    ends = np.cumsum([len(r.tokens) for r in flat])[:-1]
    means_R = np.array([x.mean() for x in np.split(trainers_M - rollouts_M, ends)])
    outside_R = (np.exp(means_R) < 1 - GSPO_LOW) | (np.exp(means_R) > 1 + GSPO_HIGH)
    return {
        "gap_mean": float(gap_M.mean()),
        "gap_p99": float(np.quantile(gap_M, 0.99)),
        "gap_max": float(gap_M.max()),
        "gspo_outside_share": float(outside_R.mean()),
        "difference_mean": float((rollouts_M - trainers_M).mean()),
        "sensitivity_mean": float(np.abs(moved_M - unmoved_M).mean()),
        "log_prob_mean": float(rollouts_M.mean()),
        "tokens": len(gap_M),
        "device": jax.devices()[0].device_kind,
        "shape": shape._asdict(),
    }


def _with_norms(params: decoder.Params, relative: float) -> decoder.Params:
    """The parameters with the first norm of each layer in float32, each scale moved by so much."""
    scale = params["layers"]["attention_norm"].astype(jnp.float32)
    moved = scale * (1 + relative * jax.random.normal(jax.random.key(2), scale.shape))
    return params | {"layers": params["layers"] | {"attention_norm": moved}}
