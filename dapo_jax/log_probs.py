"""Log-probabilities and entropy from hidden states, in chunks: logits of a whole batch never exist.

The same function serves the update, the recomputation of old log-probs and the tests of rollouts;
`logits` is shared with the sampler.
"""

import jax
import jax.numpy as jnp

from dapo_jax import attention, model
from dapo_jax.config import ModelConfig
from dapo_jax.types import Rows


def logits(hidden_XD: jax.Array, unembed_VD: jax.Array, *, temperature: float) -> jax.Array:
    """Logits [..., V] divided by the sampling temperature; float32, or float64 as hidden_XD is."""
    logits_XV = jnp.einsum(
        "...D,VD->...V",
        hidden_XD,
        unembed_VD.astype(hidden_XD.dtype),
        preferred_element_type=jnp.float64 if hidden_XD.dtype == jnp.float64 else jnp.float32,
    )
    return logits_XV / temperature


def token_log_probs(
    hidden_BTD: jax.Array,
    unembed_VD: jax.Array,
    targets_BT: jax.Array,
    *,
    temperature: float,
    chunk_tokens: int,
) -> tuple[jax.Array, jax.Array]:
    """(log-prob of each target, entropy of its distribution in nats), both float32 [B, T].

    Args:
        hidden_BTD: hidden state that predicts `targets_BT` at the same index.
        temperature: divides the logits, as at sampling.
        chunk_tokens: at most about this many tokens have their logits alive at once, in the
            forward and in the backward pass, which recomputes them.
    """
    B, T, D = hidden_BTD.shape
    # Chunks are cut along T, so that rows stay on their devices.
    C = max(c for c in range(1, T + 1) if T % c == 0 and (c == 1 or c * B <= chunk_tokens))

    @jax.checkpoint
    def one_chunk(hidden_BCD: jax.Array, targets_BC: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits_BCV = logits(hidden_BCD, unembed_VD, temperature=temperature)
        log_probs_BCV = jax.nn.log_softmax(logits_BCV, axis=-1)
        taken_BC = jnp.take_along_axis(log_probs_BCV, targets_BC[..., None], axis=-1)[..., 0]
        return taken_BC, -jnp.sum(jnp.exp(log_probs_BCV) * log_probs_BCV, axis=-1)

    if C == T:
        return one_chunk(hidden_BTD, targets_BT)
    hidden_XBCD = hidden_BTD.reshape(B, T // C, C, D).swapaxes(0, 1)
    targets_XBC = targets_BT.reshape(B, T // C, C).swapaxes(0, 1)
    results = jax.lax.map(lambda chunk: one_chunk(*chunk), (hidden_XBCD, targets_XBC))
    log_prob_BT, entropy_BT = (r.swapaxes(0, 1).reshape(B, T) for r in results)
    return log_prob_BT, entropy_BT


def row_log_probs(
    config: ModelConfig, params: model.Params, rows: Rows, *, temperature: float
) -> tuple[jax.Array, jax.Array]:
    """(log-prob of each token given its segment before it, entropy of that distribution) [B, T].

    The first token of a row has nothing before it and gets 0.
    """
    hidden_BTD, _ = model.hidden_states(
        config, params, rows.tokens_BT, rows.positions_BT, attention.packed(rows.segments_BT)
    )
    # The state at t - 1 predicts the token at t: results are moved to the token they speak of.
    log_prob_BT, entropy_BT = token_log_probs(
        hidden_BTD,
        model.unembedding(params),
        jnp.roll(rows.tokens_BT, -1, axis=1),
        temperature=temperature,
        chunk_tokens=config.log_prob_chunk_tokens,
    )
    move = lambda x_BT: jnp.roll(x_BT, 1, axis=1).at[:, 0].set(0.0)
    return move(log_prob_BT), move(entropy_BT)
