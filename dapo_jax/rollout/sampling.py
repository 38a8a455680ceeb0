"""Token sampling, with the log-prob of each token under the distribution it was sampled from."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dapo_jax.types import UserError

CHUNK = 128  # neighbouring tokens that `_invert` sums first


class Mode(NamedTuple):
    """The features that a sampler is compiled with: those that the requests of a call need."""

    greedy: bool = False  # some temperature is 0
    tempered: bool = False  # some temperature is neither 0 nor 1
    top_k: bool = False  # some top_k excludes tokens
    top_p: bool = False
    min_p: bool = False

    @property
    def excludes_tokens(self) -> bool:
        return self.top_k or self.top_p or self.min_p


class SamplingParams(NamedTuple):
    """Sampling parameters of X requests: arrays, or numbers for all of them."""

    temperature_X: Any = 1.0  # 0: greedy
    top_p_X: Any = 1.0  # 1: all
    top_k_X: Any = 0  # 0: all
    min_p_X: Any = 0.0  # 0: all

    @classmethod
    def of(cls, source: Any) -> "SamplingParams":
        """Returns the numbers of a config or a request, defaults where it has no such field."""
        given = cls._field_defaults.items()
        return cls(*(getattr(source, name.removesuffix("_X"), value) for name, value in given))

    def full(self, shape: Any) -> "SamplingParams":
        """Returns NumPy arrays of these numbers: int32 or float32, as their defaults are."""
        defaults = self._field_defaults.values()
        dtypes = (np.int32 if isinstance(value, int) else np.float32 for value in defaults)
        return SamplingParams(*(np.full(shape, value, d) for value, d in zip(self, dtypes)))

    @property
    def mode(self) -> Mode:
        """The features that a sampler needs for these numbers."""
        greedy = bool(self.temperature_X == 0)
        if greedy:
            return Mode(greedy=True)
        tempered = bool(self.temperature_X != 1)
        top_p, top_k, min_p = (a != b for a, b in zip(self[1:], SamplingParams()[1:]))
        return Mode(False, tempered, bool(top_k), bool(top_p), bool(min_p))

    def check(self) -> None:
        """Raises UserError that names the flag of a number outside its range."""
        t, p, k, m = self
        # Some devices take a smaller float32 for 0.
        least = float(np.finfo(np.float32).tiny)
        for ok, name, value, wanted in (
            (t == 0 or least <= t < math.inf, "temperature", t, f"0 (greedy) or from {least:.2g}"),
            (0 < p <= 1, "top_p", p, "in (0, 1]; 1 keeps all"),
            (0 <= k < 2**31, "top_k", k, "0 or more and below 2**31; 0 keeps all"),
            (0 <= m <= 1, "min_p", m, "from 0 to 1; 0 keeps all"),
        ):
            if not ok:
                raise UserError(f"--{name} must be {wanted}; got {value}.")


class Sampled(NamedTuple):
    """A token of each of B rows of logits."""

    token_B: jax.Array  # int32
    log_prob_B: jax.Array  # float32, under the distribution that the token was sampled from
    model_log_prob_B: jax.Array  # under softmax(logits)
    finite_B: jax.Array  # bool: whether the logits are finite


def exclude_tokens(logits_BV: jax.Array, params: SamplingParams, mode: Mode) -> jax.Array:
    """Sets the logits of excluded tokens to -inf: by top-k, then the nucleus, then min-p.

    top-k keeps the k most probable tokens. The nucleus (arXiv:1904.09751, section 3.1) is the
    smallest set of most probable tokens whose probabilities sum to `top_p` or more. min-p
    (arXiv:2407.01082) keeps the tokens at least `min_p` times as probable as the most probable
    one. A token exactly as probable as the last one kept is kept too.
    """
    column = lambda x: jnp.broadcast_to(jnp.asarray(x), logits_BV.shape[:1])[:, None]
    order_BV = _sortable(logits_BV)

    def threshold(enough, weights_BV: jax.Array) -> jax.Array:
        # Finds the least probable token kept bit by bit, in 32 passes over the vocabulary. Sorting
        # 152k logits takes many times as long.
        def refine(i: jax.Array, found_B1: jax.Array) -> jax.Array:
            candidate_B1 = found_B1 | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
            above_BV = jnp.where(order_BV >= candidate_B1, weights_BV, 0)
            return jnp.where(
                enough(jnp.sum(above_BV, axis=-1, keepdims=True)), candidate_B1, found_B1
            )

        return jax.lax.fori_loop(0, 32, refine, jnp.zeros_like(order_BV[:, :1]))

    kept_BV = jnp.ones(logits_BV.shape, bool)
    if mode.top_k:
        top_k_B1 = column(params.top_k_X)
        one_BV = jnp.ones(logits_BV.shape, jnp.int32)
        kept_BV = order_BV >= threshold(lambda count: count >= top_k_B1, one_BV)
        kept_BV = kept_BV | (top_k_B1 <= 0)
    probs_BV = jax.nn.softmax(jnp.where(kept_BV, logits_BV, -jnp.inf), axis=-1)
    if mode.top_p:
        top_p_B1 = column(params.top_p_X)
        nucleus_BV = order_BV >= threshold(lambda share: share >= top_p_B1, probs_BV)
        kept_BV = kept_BV & (nucleus_BV | (top_p_B1 >= 1))
    if mode.min_p:
        least_B1 = column(params.min_p_X) * jnp.max(probs_BV, axis=-1, keepdims=True)
        kept_BV = kept_BV & (probs_BV >= least_B1)
    return jnp.where(kept_BV, logits_BV, -jnp.inf)


def _sortable(x: jax.Array) -> jax.Array:
    """float32 as uint32 in the same order: sets the top bit, or flips all bits where negative."""
    bits, top = jax.lax.bitcast_convert_type(x, jnp.uint32), jnp.uint32(1 << 31)
    bits = jnp.where(bits == top, 0, bits)  # -0.0 becomes 0.0, its equal; XLA drops `x + 0.0`
    return jnp.where(bits >= top, ~bits, bits | top)


def sample(
    logits_BV: jax.Array,
    keys_B2: jax.Array,
    positions_B: jax.Array,
    params: SamplingParams,
    mode: Mode,
) -> Sampled:
    """Samples a token of each row from softmax(logits / temperature), excluded tokens aside.

    Args:
        logits_BV: float32, of the model itself.
        keys_B2: uint32 key data of each sample.
        positions_B: index of the token in its response. The token's random key is
            fold_in(sample key, position), in any slot and at any time.
        params: of each row.
        mode: what `params` need at least; static.
    """
    B = logits_BV.shape[0]
    temperature_B = jnp.broadcast_to(jnp.asarray(params.temperature_X, jnp.float32), (B,))
    shaped_BV = logits_BV
    if mode.tempered:
        # Less the highest first: a low temperature makes logits so large that rounding decides.
        below_BV = logits_BV - jnp.max(logits_BV, axis=-1, keepdims=True)
        shaped_BV = below_BV / jnp.where(temperature_B > 0, temperature_B, 1.0)[:, None]
    if mode.excludes_tokens:
        shaped_BV = exclude_tokens(shaped_BV, params, mode)

    def uniform(key_2: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(key_2), position)
        return jax.random.uniform(key)

    uniform_B = jax.vmap(uniform)(keys_B2, positions_B)
    token_B, lse_B = _invert(shaped_BV, uniform_B)
    plain = not (mode.tempered or mode.excludes_tokens)
    model_lse_B = lse_B if plain else jax.nn.logsumexp(logits_BV, axis=-1)
    if mode.greedy:
        best_B = jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
        greedy_B = temperature_B == 0
        token_B = jnp.where(greedy_B, best_B, token_B)
        shaped_BV = jnp.where(greedy_B[:, None], logits_BV, shaped_BV)
        lse_B = jnp.where(greedy_B, model_lse_B, lse_B)
    taken = lambda x_BV: jnp.take_along_axis(x_BV, token_B[:, None], axis=-1)[:, 0]
    log_prob_B = taken(shaped_BV) - lse_B
    model_log_prob_B = log_prob_B if plain else taken(logits_BV) - model_lse_B
    return Sampled(token_B, log_prob_B, model_log_prob_B, jnp.isfinite(model_lse_B))


def _invert(logits_BV: jax.Array, uniform_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(tokens int32 [B], logsumexp [B]): the first token whose cumulative probability exceeds a
    uniform number. Sums of CHUNK neighbours find its chunk, so no sum runs over the vocabulary."""
    B, V = logits_BV.shape
    highest_B1 = jnp.max(logits_BV, axis=-1, keepdims=True)
    weights_BV = jnp.exp(logits_BV - highest_B1)
    weights_BXC = jnp.pad(weights_BV, ((0, 0), (0, -V % CHUNK))).reshape(B, -1, CHUNK)
    sums_BX = jnp.sum(weights_BXC, axis=-1)

    def first_above(cumulative_BX: jax.Array, weights_BX: jax.Array, at_B: jax.Array) -> jax.Array:
        # XLA adds up in blocks, and rounding can raise the sum where the weight is 0.
        cumulative_BX = jnp.where(weights_BX > 0, cumulative_BX, 0)
        # Below the total, despite rounding, or none could be above. Above 0, or a random number of
        # 0 would take the first token, however improbable.
        total_B = jnp.max(cumulative_BX, axis=-1)
        below_B = jnp.clip(at_B, total_B * 2.0**-24, total_B * (1 - 2.0**-23))
        return jnp.argmax(cumulative_BX > below_B[:, None], axis=-1)

    until_BX = jnp.cumsum(sums_BX, axis=-1)
    total_B = until_BX[:, -1]
    at_B = uniform_B * total_B
    chunk_B = first_above(until_BX, sums_BX, at_B)
    before_B = jnp.take_along_axis(until_BX - sums_BX, chunk_B[:, None], axis=-1)[:, 0]
    inside_BC = jnp.take_along_axis(weights_BXC, chunk_B[:, None, None], axis=1)[:, 0]
    cumulative_BC = jnp.cumsum(inside_BC, axis=-1)
    token_B = chunk_B * CHUNK + first_above(cumulative_BC, inside_BC, at_B - before_B)
    return token_B.astype(jnp.int32), highest_B1[:, 0] + jnp.log(total_B)


@jax.jit
def problem_keys(key_2: jax.Array, ids_RP2: jax.Array) -> jax.Array:
    """Returns the step's key folded with the id and the epoch of each problem, uint32 [R, P, 2]."""

    def fold(id_2: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(key_2), id_2[0])
        return jax.random.key_data(jax.random.fold_in(key, id_2[1]))

    return jax.vmap(jax.vmap(fold))(ids_RP2)
