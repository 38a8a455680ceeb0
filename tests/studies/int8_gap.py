"""What an int8 base costs: its log-probs beside those of the same model in float32 and bfloat16.

Command: python -m tests.studies.int8_gap --model=DIRECTORY

The texts are 64 solved held-out word problems, as plain text. For each way of holding the layers'
matrices, in nats a token: mean and largest difference of the log-prob of the text's own token from
float32's, and the mean KL divergence of the two distributions.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

from configs import smollm2_word_problems
from dapo_jax.config import Config
from dapo_jax.data import word_problems
from dapo_jax.data.tokenizer import load_tokenizer
from dapo_jax.models import chunked_softmax, decoder, lora, pretrained
from dapo_jax.models.attention import xla
from dapo_jax.models.sharding import make_mesh

# Of the matrices, and of the arithmetic.
WAYS = {
    "float32": ("float32", "float32"),
    "bfloat16": ("float32", "bfloat16"),
    "int8, float32": ("int8", "float32"),
    "int8, bfloat16": ("int8", "bfloat16"),
}


def log_probs(config, mesh, texts):
    """[[tokens, vocabulary]] in float32."""
    c = config.model
    params = jax.device_get(pretrained.load(c, config.mesh, mesh, seed=0))
    params = lora.join(*jax.device_put(lora.split(params)))

    @jax.jit
    def of_text(params, tokens_T):
        T = len(tokens_T)
        hidden_BTD, _ = decoder.bind(c, params)(
            tokens_T[None], jnp.arange(T)[None], xla.packed(jnp.ones((1, T), jnp.int32))
        )
        unembedding = decoder.unembedding(params)
        logits = chunked_softmax.logits(hidden_BTD[0], unembedding, temperature=1.0)
        return jax.nn.log_softmax(logits.astype(jnp.float32), -1)

    longest = max(map(len, texts))  # padding comes after a text, and changes nothing in it
    padded = lambda text: np.asarray(text + [0] * (longest - len(text)), np.int32)
    return [np.asarray(of_text(params, padded(text)))[: len(text)] for text in texts]


def main(model):
    values = smollm2_word_problems.get_config("lora")
    values.model.update(path=model, tokenizer=model)
    texts = None
    exact = None
    for name, (param_dtype, compute_dtype) in WAYS.items():
        values.model.update(param_dtype=param_dtype, compute_dtype=compute_dtype)
        config = Config.from_dict(values.to_dict())
        if texts is None:
            tokenizer = load_tokenizer(config.model)
            solved = word_problems.generate_solved(64, levels=(1, 2), heldout=True, seed=0)
            texts = [tokenizer.encode(f"{prompt}\n{answer}") for prompt, answer in solved]
        found = log_probs(config, make_mesh(config.mesh, jax.devices()[:1]), texts)
        if exact is None:
            exact = found
            continue
        own = lambda x, text: np.take_along_axis(x[:-1], np.asarray(text)[1:, None], -1)
        gaps = [np.abs(own(x, t) - own(y, t)) for x, y, t in zip(found, exact, texts, strict=True)]
        gaps = np.concatenate(gaps)
        kl = [np.sum(np.exp(y) * (y - x), -1) for x, y in zip(found, exact, strict=True)]
        print(
            f"{name:15} {len(gaps):,} tokens: {gaps.mean():.4f} mean, {gaps.max():.3f} largest, "
            f"{np.concatenate(kl).mean():.5f} KL",
            flush=True,
        )


if __name__ == "__main__":
    (flag,) = sys.argv[1:]
    main(flag.removeprefix("--model="))
