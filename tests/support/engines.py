"""A small engine, and what tests generate with it."""

import dataclasses
from typing import Any

import jax
import numpy as np

from dapo_jax.models.sharding import AXES
from dapo_jax.rollout.admission import GenerationSettings
from dapo_jax.rollout.engine import DecoderEngine
from dapo_jax.rollout.engine_config import EngineConfig
from dapo_jax.rollout.sampling import SamplingParams
from dapo_jax.rollout.scheduler import GenerationLoop
from dapo_jax.types import Problem
from tests.support.helpers import make_mesh, replace_model, tiny_config

CONFIG = tiny_config()
EOS = 1
KEY = jax.random.key(7)


def make_engine(*, num_devices=1, prefill=8, model=None, **changes):
    """An engine of the test model.

    Args:
        changes: sizes of mesh axes, and other fields of the engine config.
    """
    axes = {axis: changes.pop(axis) for axis in AXES if axis in changes}
    fields: dict[str, Any] = {
        "model": replace_model(CONFIG, **(model or {})),
        "layout": dataclasses.replace(CONFIG.mesh, **axes),
        "slots": 16,
        "prefill_prompts": prefill,
        "max_prompt_tokens": CONFIG.data.max_prompt_tokens,
        "max_response_tokens": CONFIG.rollout.max_response_tokens,
        "stop_tokens": (EOS,),
        "params": SamplingParams(),
    }
    engine_config = EngineConfig(**(fields | changes))
    config = dataclasses.replace(CONFIG, mesh=engine_config.layout)
    return DecoderEngine(engine_config, make_mesh(config, num_devices))


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
    engine, params, problems, *, detokenize=no_text, key=KEY, step=0, carried=None, **request
):
    """A generation loop over the problems, 4 samples each unless the request says otherwise."""
    asked = GenerationSettings(**({"num_samples": 4} | request))
    with engine.weights(params):
        return GenerationLoop(
            engine, iter(problems), detokenize, key, asked, step=step, carried=carried
        )


def generate(engine, params, problems, **more):
    """(responses to each problem, stats)."""
    loop = make_loop(engine, params, problems, **more)
    for _ in loop.run():
        pass
    return loop.responses(), loop.stats


def streamed(loop):
    """Runs a loop that streams to its end; returns (tokens, whether the last came) by problem and
    sample."""
    found = {}
    for output in loop.run():
        for problem, sample, tokens, last in output.tokens:
            before, over = found.get((problem, sample), ([], False))
            assert tokens and not over
            found[problem, sample] = (before + tokens, last)
    return found


def assert_all_free(loop, pages):
    """Each page of each shard is free once; the scratch page is not counted."""
    assert np.asarray(loop.state.num_free).tolist() == [pages - 1] * len(loop.state.num_free)
    free = np.sort(np.asarray(loop.state.free_U)[:, : pages - 1], axis=1)
    assert (free == np.arange(1, pages)).all()


def complete(loop):
    for _ in loop.run():
        pass
    return tokens_of(loop.responses())
