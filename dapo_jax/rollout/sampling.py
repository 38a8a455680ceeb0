"""Drawing tokens, with the log-prob of each under the distribution it was drawn from."""

import jax
import jax.numpy as jnp


def keep_top_p(logits_BV: jax.Array, top_p: float) -> jax.Array:
    """Logits outside the nucleus set to -inf.

    The nucleus is the smallest set of most probable tokens whose probabilities sum to `top_p` or
    more; a token exactly as probable as the last one in it is kept too.

    Source: arXiv:1904.09751, section 3.1.
    """
    # The least probable token of the nucleus is found bit by bit, which takes 32 passes over the
    # vocabulary; to sort 152k logits takes many times as long.
    probs_BV = jax.nn.softmax(logits_BV, axis=-1)
    order_BV = _in_order(logits_BV)

    def refine(i: jax.Array, threshold_B: jax.Array) -> jax.Array:
        candidate_B = threshold_B | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        above_BV = jnp.where(order_BV >= candidate_B[:, None], probs_BV, 0.0)
        return jnp.where(jnp.sum(above_BV, axis=-1) >= top_p, candidate_B, threshold_B)

    zeros_B = jnp.zeros(logits_BV.shape[0], jnp.uint32)
    threshold_B = jax.lax.fori_loop(0, 32, refine, zeros_B)
    return jnp.where(order_BV >= threshold_B[:, None], logits_BV, -jnp.inf)


def _in_order(x: jax.Array) -> jax.Array:
    """float32 as uint32 in the same order: 0 and more gain the top bit, of others all bits turn."""
    bits = jax.lax.bitcast_convert_type(x + 0.0, jnp.uint32)  # -0.0 becomes 0.0, its equal
    top = jnp.uint32(1 << 31)
    return jnp.where(bits >= top, ~bits, bits | top)


def sample(
    logits_BV: jax.Array,
    keys_B2: jax.Array,
    positions_B: jax.Array,
    *,
    top_p: float,
    greedy: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """(tokens int32 [B], their float32 log-probs [B]) drawn from softmax(logits), nucleus kept.

    Args:
        logits_BV: float32, already divided by the temperature.
        keys_B2: uint32 key data of each sample.
        positions_B: index of the token in its response; the key of the draw is
            fold_in(sample key, position), whichever slot and moment it happens in.
        top_p: in (0, 1]; 1 keeps every token.
        greedy: take the most probable token, the first of equals; no key is used, and the log-prob
            is the one under softmax(logits).
    """
    if greedy:
        tokens_B = jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
        log_probs_BV = jax.nn.log_softmax(logits_BV, axis=-1)
        return tokens_B, jnp.take_along_axis(log_probs_BV, tokens_B[:, None], axis=-1)[:, 0]
    if top_p < 1.0:
        logits_BV = keep_top_p(logits_BV, top_p)
    log_probs_BV = jax.nn.log_softmax(logits_BV, axis=-1)

    def draw(key_2: jax.Array, position: jax.Array, log_probs_V: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(key_2), position)
        return jax.random.categorical(key, log_probs_V)

    tokens_B = jax.vmap(draw)(keys_B2, positions_B, log_probs_BV).astype(jnp.int32)
    return tokens_B, jnp.take_along_axis(log_probs_BV, tokens_B[:, None], axis=-1)[:, 0]
