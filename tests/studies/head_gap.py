"""What a float32 head changes in bfloat16: rollout beside update, and the head rounded or not.

Command: python -m tests.studies.head_gap --model=DIRECTORY

The engine samples 4 responses of 48 tokens to each of 8 held-out word problems at temperature 1,
and the training forward pass scores them. For each head, in nats a token: mean and largest gap of
the two log-probs, and the correlation of the two probabilities (arXiv:2506.13585, figure 3). Last,
how far the training pass with a rounded head is from the one that reads the head as it is held.

Published weights are in bfloat16, and rounding changes nothing in them. So the second model has
every matrix moved by 0.1 % at random, which stands for weights that training has moved.
"""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np

from configs import smollm2_word_problems
from dapo_jax.config import Config
from dapo_jax.data import word_problems
from dapo_jax.data.tokenizer import load_tokenizer
from dapo_jax.models import log_probs, pretrained
from dapo_jax.models.sharding import make_mesh
from dapo_jax.rollout.engine import DecoderEngine
from dapo_jax.rollout.engine_config import EngineConfig
from dapo_jax.rollout.sampling import SamplingParams
from dapo_jax.types import Problem
from tests.support.engines import generate
from tests.support.helpers import Sample, rows_of

PROMPTS, SAMPLES, TOKENS = 8, 4, 48


def moved(params):
    """Every matrix off by 0.1 %, half a step of bfloat16."""
    keys = iter(jax.random.split(jax.random.key(1), len(jax.tree.leaves(params))))
    noise = lambda x: x * (1 + 1e-3 * jax.random.normal(next(keys), x.shape, x.dtype))
    return jax.tree.map(noise, params)


def scored(c, params, rows):
    score = functools.partial(log_probs.row_statistics, c, temperature=1.0)
    rows = jax.tree.map(jnp.asarray, rows)
    return np.asarray(jax.jit(score)(params, rows).log_prob_BT)[np.asarray(rows.mask_BT)]


def main(model):
    values = smollm2_word_problems.get_config()
    values.model.update(path=model, tokenizer=model, compute_dtype="bfloat16")
    config = Config.from_dict(values.to_dict())
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    tokenizer = load_tokenizer(config.model)
    solved = word_problems.generate_solved(PROMPTS, levels=(1, 2), heldout=True, seed=0)
    prompts = [tuple(tokenizer.encode(prompt)) for prompt, _ in solved]
    problems = [Problem(i, "", prompt, "", "test") for i, prompt in enumerate(prompts)]
    published = pretrained.load(config.model, config.mesh, mesh, seed=0)
    for weights, params in (("published", published), ("moved", moved(published))):
        heads = {h: dataclasses.replace(config.model, head_dtype=h) for h in (None, "float32")}
        for head, c in heads.items():
            engine_config = EngineConfig(
                model=c,
                layout=config.mesh,
                slots=PROMPTS * SAMPLES,
                prefill_prompts=PROMPTS,
                max_prompt_tokens=max(map(len, prompts)),
                max_response_tokens=TOKENS,
                stop_tokens=(2,),
                params=SamplingParams(),
            )
            responses, _ = generate(
                DecoderEngine(engine_config, mesh), params, problems, num_samples=SAMPLES
            )
            samples = [
                Sample(list(prompt), r.tokens, 1.0, r.log_probs, 0.0)
                for prompt, row in zip(prompts, responses, strict=True)
                for r in row
            ]
            rows = rows_of(samples, 256)
            rollout, update = rows.log_prob_old_BT[rows.mask_BT], scored(c, params, rows)
            gap = np.abs(rollout - update)
            alike = np.corrcoef(np.exp(rollout), np.exp(update))[0, 1]
            print(
                f"{weights:10} head {head or 'bfloat16'}: {gap.size:,} tokens, gap "
                f"{gap.mean():.5f} mean, {gap.max():.4f} largest, correlation {alike:.6f}",
                flush=True,
            )
        rounded = np.abs(update - scored(heads[None], params, rows))
        print(f"{weights:10} rounding the head: {rounded.mean():.5f} mean, {rounded.max():.4f}")


if __name__ == "__main__":
    (flag,) = sys.argv[1:]
    main(flag.removeprefix("--model="))
