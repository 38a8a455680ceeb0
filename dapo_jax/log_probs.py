"""Log-probabilities and entropy from hidden states, in chunks: logits of a whole batch never exist.

The same function serves the update, the recomputation of old log-probs and the tests of rollouts;
`logits` is shared with the sampler.
"""

from typing import NamedTuple

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


class TokenStatistics(NamedTuple):
    """Of the distribution that each target was drawn from, float32 [B, T]."""

    log_prob_BT: jax.Array  # of the target
    entropy_BT: jax.Array  # in nats
    kl_BT: jax.Array  # KL(distribution || reference), exact, in nats; 0 without a reference


def token_statistics(
    hidden_BTD: jax.Array,
    unembed_VD: jax.Array,
    targets_BT: jax.Array,
    *,
    temperature: float,
    chunk_tokens: int,
    reference: tuple[jax.Array, jax.Array] | None = None,
) -> TokenStatistics:
    """Log-prob of each target, entropy of its distribution and its KL to a reference.

        KL_t = sum_v p_v (log p_v - log q_v)

    Args:
        hidden_BTD: hidden state that predicts `targets_BT` at the same index.
        temperature: divides the logits, the reference's too, as at sampling.
        chunk_tokens: at most about this many tokens have their logits alive at once, in the
            forward and in the backward pass, which recomputes them.
        reference: hidden states [B, T, D'] and unembedding [V, D'] of the reference; no gradient.
    """
    B, T, _ = hidden_BTD.shape
    # Chunks are cut along T, so that rows stay on their devices.
    C = max(c for c in range(1, T + 1) if T % c == 0 and (c == 1 or c * B <= chunk_tokens))

    @jax.checkpoint
    def one_chunk(
        hidden_BCD: jax.Array, targets_BC: jax.Array, reference_BCD: jax.Array | None
    ) -> TokenStatistics:
        logits_BCV = logits(hidden_BCD, unembed_VD, temperature=temperature)
        log_probs_BCV = jax.nn.log_softmax(logits_BCV, axis=-1)
        probs_BCV = jnp.exp(log_probs_BCV)
        taken_BC = jnp.take_along_axis(log_probs_BCV, targets_BC[..., None], axis=-1)[..., 0]
        kl_BC = jnp.zeros_like(taken_BC)
        if reference is not None:
            assert reference_BCD is not None
            reference_BCV = logits(reference_BCD, reference[1], temperature=temperature)
            reference_BCV = jax.nn.log_softmax(jax.lax.stop_gradient(reference_BCV), axis=-1)
            kl_BC = jnp.sum(probs_BCV * (log_probs_BCV - reference_BCV), axis=-1)
        return TokenStatistics(taken_BC, -jnp.sum(probs_BCV * log_probs_BCV, axis=-1), kl_BC)

    reference_BTD = None if reference is None else reference[0]
    if C == T:
        return one_chunk(hidden_BTD, targets_BT, reference_BTD)
    cut = lambda x: x.reshape(B, T // C, C, *x.shape[2:]).swapaxes(0, 1)
    chunks = jax.tree.map(cut, (hidden_BTD, targets_BT, reference_BTD))
    results = jax.lax.map(lambda chunk: one_chunk(*chunk), chunks)
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(B, T), results)


def row_statistics(
    config: ModelConfig,
    params: model.Params,
    rows: Rows,
    *,
    temperature: float,
    reference: model.Params | None = None,
) -> TokenStatistics:
    """`TokenStatistics` of each token given its segment before it [B, T].

    The first token of a row has nothing before it and gets 0.

    Args:
        reference: parameters of the same architecture for the exact KL, or None.
    """
    attend = attention.packed(rows.segments_BT)
    hidden = lambda p: model.hidden_states(config, p, rows.tokens_BT, rows.positions_BT, attend)[0]
    # The state at t - 1 predicts the token at t: results are moved to the token they speak of.
    statistics = token_statistics(
        hidden(params),
        model.unembedding(params),
        jnp.roll(rows.tokens_BT, -1, axis=1),
        temperature=temperature,
        chunk_tokens=config.log_prob_chunk_tokens,
        reference=None if reference is None else (hidden(reference), model.unembedding(reference)),
    )
    return TokenStatistics(*(to_own_token(x_BT) for x_BT in statistics))


def to_own_token(x_BT: jax.Array) -> jax.Array:
    """What a position says of the next token, moved to that token; 0 for the first of a row."""
    return jnp.roll(x_BT, 1, axis=1).at[:, 0].set(0.0)
