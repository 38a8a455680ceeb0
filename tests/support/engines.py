"""A small engine, and what tests ask of it."""

import dataclasses

import jax
import numpy as np

from dapo_jax.rollout.admission import GenerationRequest
from dapo_jax.rollout.engine import DecoderEngine
from dapo_jax.rollout.sampling import SamplingParams
from dapo_jax.rollout.scheduler import GenerationLoop
from dapo_jax.rollout.spec import EngineSpec
from dapo_jax.types import Problem
from tests.support.helpers import make_mesh, replace_model, tiny_config

CONFIG = tiny_config()
EOS = 1
KEY = jax.random.key(7)


def make_engine(
    *, slots=16, prefill=8, temperature=1.0, top_p=1.0, num_devices=1, samples=1, page_tokens=32,
    num_pages=None, decode_steps=8, prefill_chunk_tokens=512, continued=False,
    stop_tokens=(EOS,), model=None, **mesh,
):  # fmt: skip
    layout = dataclasses.replace(CONFIG.mesh, **mesh)
    spec = EngineSpec(
        model=replace_model(CONFIG, **(model or {})),
        layout=layout,
        slots=slots,
        prefill_prompts=prefill,
        max_prompt_tokens=CONFIG.data.max_prompt_tokens,
        max_response_tokens=CONFIG.rollout.max_response_tokens,
        stop_tokens=stop_tokens,
        params=SamplingParams(temperature, top_p),
        samples=samples,
        page_tokens=page_tokens,
        num_pages=num_pages,
        decode_steps=decode_steps,
        prefill_chunk_tokens=prefill_chunk_tokens,
        continued=continued,
    )
    return DecoderEngine(spec, make_mesh(dataclasses.replace(CONFIG, mesh=layout), num_devices))


def make_problems(number):
    """Prompts of 1 to 24 random tokens."""
    rng = np.random.default_rng(0)
    return [
        Problem(i, "", tuple(rng.integers(3, 32, rng.integers(1, 25)).tolist()), "", "test")
        for i in range(number)
    ]


def tokens_of(responses):
    return [[r.tokens.tolist() for r in row] for row in responses]


def no_text(sequences):
    return [""] * len(sequences)


def make_loop(
    engine, params, problems, *, detokenize=no_text, num_samples=4, key=KEY, step=0, partial=None,
    **request,
):  # fmt: skip
    """A generation loop over the problems; it holds the parameters."""
    request = GenerationRequest(num_samples, **request)
    with engine.weights(params):
        return GenerationLoop(
            engine, iter(problems), detokenize, key, request, step=step, partial=partial
        )


def generate(engine, params, problems, **more):
    """(responses to each problem, stats)."""
    loop = make_loop(engine, params, problems, **more)
    for _ in loop.run():
        pass
    return loop.responses(), loop.stats


def complete(loop):
    for _ in loop.run():
        pass
    return tokens_of(loop.responses())
