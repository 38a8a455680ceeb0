"""Log-probabilities and entropy from hidden states, in chunks: logits of a batch never exist.

The update, the recomputation of old log-probs and the tests of rollouts call `row_statistics`.
The vocabulary is a loop over parts, and within a part the tokens a loop over chunks, with the
running sums of `chunked_softmax`. The backward pass computes the logits again, part by part. On a
mesh each device goes through its own shard of the vocabulary for its own tokens.

Tokens outside the mask cost no logits: they are sorted last, and chunks without a trained token are
skipped.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from dapo_jax.config import ModelConfig
from dapo_jax.models import chunked_softmax, decoder
from dapo_jax.models.attention import kernels, xla, zigzag
from dapo_jax.models.sharding import HeadLayout, row_sharding
from dapo_jax.types import Rows
from dapo_jax.utils.precision import columns_first, sum_dtype


class TokenStatistics(NamedTuple):
    """Statistics of the distribution that each target was sampled from, float32 [B, T]."""

    log_prob_BT: jax.Array  # of the target
    entropy_BT: jax.Array  # in nats
    # Sum over the vocabulary of the squared probabilities, without a gradient; None: not asked for.
    collision_BT: jax.Array | None = None


class _Plan(NamedTuple):
    """Static settings."""

    temperature: float
    chunk_tokens: int
    layout: HeadLayout | None
    frozen: bool = False  # the unembedding needs no gradient
    collision: bool = False
    exact: bool = False


class _Slopes(NamedTuple):
    """Derivatives of the loss by each statistic [B, T]; None: the loss does not read it."""

    log_prob: jax.Array | None
    entropy: jax.Array | None


class _Residuals(NamedTuple):
    """Values of each token [B, T] for the backward pass."""

    log_total: jax.Array  # log sum exp z
    entropy: jax.Array


def token_statistics(
    hidden_BTD: Float[Array, "B T D"],
    unembed_VD: Float[Array, "V D"],
    targets_BT: Int[Array, "B T"],
    *,
    temperature: float,
    chunk_tokens: int,
    layout: HeadLayout | None = None,
    wanted_BT: Bool[Array, "B T"] | None = None,
    collision: bool = False,
    exact: bool = False,
) -> TokenStatistics:
    """Returns the log-prob of each target and the entropy of its distribution.

    Args:
        hidden_BTD: hidden state that predicts `targets_BT` at the same index.
        temperature: divides the logits, as at sampling.
        chunk_tokens: tokens of a device whose logits are alive at once, forward and backward, of
            `chunked_softmax.VOCAB_CHUNK` columns.
        layout: where the arrays lie on a mesh. None: the compiler decides, which is right on any
            mesh but gathers the unembedding.
        wanted_BT: where it is False the results are finite and meaningless; None: all are wanted.
        collision: ask for `collision_BT`, too.
        exact: round no factor of the logits, see `chunked_softmax.logits`, nor the gradient by
            the logits, which is rounded to the dtype of hidden_BTD otherwise.
    """
    if layout is not None and layout.mesh.size == 1:
        layout = None
    plan = _Plan(temperature, chunk_tokens, layout, collision=collision, exact=exact)
    return _statistics(plan, hidden_BTD, unembed_VD, targets_BT, wanted_BT)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _statistics(plan: _Plan, *inputs: Any) -> TokenStatistics:
    return _on_mesh(plan, _forward)(*inputs)[0]


def _statistics_forward(plan: _Plan, *primals: Any) -> tuple[TokenStatistics, Any]:
    inputs = jax.tree.map(lambda primal: primal.value, primals)
    statistics, residuals = _on_mesh(plan, _forward)(*inputs)
    is_trained = () if primals[1].perturbed else None  # in the structure: it is static
    return statistics, (inputs, residuals, is_trained)


def _statistics_backward(plan: _Plan, saved: Any, cotangents: TokenStatistics) -> Any:
    inputs, residuals, is_trained = saved
    plan = plan._replace(frozen=is_trained is None)
    # A statistic that no loss reads costs no gradient.
    unread = lambda x: isinstance(x, jax.custom_derivatives.SymbolicZero)
    *read, collision = cotangents
    assert collision is None or unread(collision), "no gradient of the collision probability"
    slopes = _Slopes(*(None if unread(x) else x for x in read))
    d_hidden_BTD, d_unembed_VD = _on_mesh(plan, _backward)(*inputs, residuals, slopes)
    return d_hidden_BTD, d_unembed_VD, None, None


_statistics.defvjp(_statistics_forward, _statistics_backward, symbolic_zeros=True)


def _on_mesh(plan: _Plan, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `_forward` or `_backward` as a function of the arrays of all devices."""
    local, layout = functools.partial(function, plan), plan.layout
    if layout is None:
        return local
    rows, unembed = layout.rows, layout.unembed
    hidden = PartitionSpec(*rows, *[None] * (3 - len(rows)))
    outs = (hidden, unembed) if function is _backward else rows

    def mapped(*arguments: Any) -> Any:
        ins = (hidden, unembed, *[rows] * (len(arguments) - 2))
        program = jax.shard_map(
            local, mesh=layout.mesh, in_specs=ins, out_specs=outs, check_vma=False
        )
        return program(*arguments)

    return mapped


def _forward(
    plan: _Plan,
    hidden_BTD: jax.Array,
    unembed_VD: jax.Array,
    targets_BT: jax.Array,
    wanted_BT: jax.Array | None,
) -> tuple[TokenStatistics, _Residuals]:
    """Returns the statistics of the tokens of one device, and the residuals."""
    parts = chunked_softmax.VocabParts(unembed_VD, plan.temperature, plan.layout, exact=plan.exact)
    order = _Order(plan, wanted_BT)
    tokens = order.chunks((hidden_BTD, targets_BT))

    def add_part(sums: chunked_softmax.Sums, part: Any) -> tuple[chunked_softmax.Sums, None]:
        start, unembed_PD = part[0], parts.gather(part[1])

        def add_chunk(sums: chunked_softmax.Sums, chunk: Any) -> chunked_softmax.Sums:
            hidden_XD, targets_X = chunk
            logits_XP = parts.logits(hidden_XD, unembed_PD, start)
            return chunked_softmax.add_part(sums, logits_XP, parts.targets(targets_X, start))

        add_wanted = order.where_wanted(add_chunk, lambda sums, _: sums)
        return jax.lax.map(lambda x: add_wanted(x[2], *x[:2]), (sums, tokens, order.wanted)), None

    shape, dtype = tokens[1].shape, sum_dtype(hidden_BTD)
    sums = chunked_softmax.empty_sums(shape, dtype, squares=plan.collision)
    sums, _ = jax.lax.scan(add_part, sums, parts.each)
    sums = chunked_softmax.sum_shards(sums, parts.axis)
    log_total = jnp.log(sums.total)
    log_prob, entropy = sums.target - sums.top - log_total, log_total - sums.spread / sums.total
    collision = None if sums.squares is None else sums.squares / sums.total**2
    statistics = TokenStatistics(log_prob, entropy, collision)
    found = statistics, _Residuals(log_total + sums.top, entropy)
    if order.wanted is not None:  # a skipped chunk has no sum to take the logarithm of
        seen_X1 = order.wanted[:, None]
        found = jax.tree.map(lambda x: jnp.where(seen_X1, x, jnp.zeros_like(x)), found)
    return jax.tree.map(functools.partial(order.join, shape=targets_BT.shape), found)


def _backward(
    plan: _Plan,
    hidden_BTD: jax.Array,
    unembed_VD: jax.Array,
    targets_BT: jax.Array,
    wanted_BT: jax.Array | None,
    residuals: _Residuals,
    slopes: _Slopes,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the gradients of hidden states and unembedding, None where frozen, of one device.

        dz_v = g ([v = target] - p_v) - e p_v (log p_v + H)

    Args:
        slopes: g and e.
    """
    dtype = sum_dtype(hidden_BTD)
    B, T, D = hidden_BTD.shape
    parts = chunked_softmax.VocabParts(unembed_VD, plan.temperature, plan.layout, exact=plan.exact)
    order = _Order(plan, wanted_BT)
    tokens = order.chunks((hidden_BTD, targets_BT, residuals, slopes))
    # Of products with the gradient with respect to the logits.
    precision = jax.lax.Precision.HIGHEST if plan.exact else None
    factor = dtype if plan.exact else hidden_BTD.dtype
    product = functools.partial(jnp.einsum, precision=precision, preferred_element_type=dtype)

    def add_part(d_hidden: jax.Array, part: Any) -> tuple[jax.Array, jax.Array | None]:
        start, unembed_PD = part[0], parts.gather(part[1])
        weights_PD = unembed_PD.astype(factor)

        def add_chunk(carry: tuple[Any, jax.Array], i: jax.Array, chunk: Any) -> Any:
            d_unembed_PD, d_hidden = carry
            hidden_XD, targets_X, kept, slopes = chunk
            log_p_XP = parts.logits(hidden_XD, unembed_PD, start) - kept.log_total[:, None]
            pull_XP = jnp.zeros((len(targets_X), 1), dtype)  # towards p, per unit of p
            d_logits_XP = pull_XP
            if slopes.log_prob is not None:
                g_X1 = slopes.log_prob.astype(dtype)[:, None]
                target_X1 = parts.targets(targets_X, start)[:, None]
                at_target_XP = jnp.arange(parts.size)[None] == target_X1
                d_logits_XP = jnp.where(at_target_XP, g_X1, jnp.zeros_like(g_X1))
                pull_XP = -g_X1
            if slopes.entropy is not None:
                e_X1 = slopes.entropy.astype(dtype)[:, None]
                pull_XP = pull_XP - e_X1 * (log_p_XP + kept.entropy[:, None])
            d_logits_XP = (d_logits_XP + jnp.exp(log_p_XP) * pull_XP) / plan.temperature
            d_logits_XP = d_logits_XP.astype(factor)
            if not plan.frozen:
                d_unembed_PD = d_unembed_PD + product(
                    "XP,XD->PD", columns_first(d_logits_XP), hidden_XD.astype(factor)
                )
            # Into the whole array: a chunk handed in and out would be copied.
            d_hidden = d_hidden.at[i].add(product("XP,PD->XD", d_logits_XP, weights_PD))
            return d_unembed_PD, d_hidden

        add_wanted = order.where_wanted(add_chunk, lambda carry, *_: carry)
        (d_unembed_PD, d_hidden), _ = jax.lax.scan(
            lambda carry, x: (add_wanted(x[0], carry, *x[1:]), None),
            (None if plan.frozen else jnp.zeros((parts.size, D), dtype), d_hidden),
            (order.wanted, jnp.arange(len(d_hidden)), tokens),
        )
        if plan.frozen:
            return d_hidden, None
        return d_hidden, parts.reduce(d_unembed_PD).astype(unembed_VD.dtype)

    d_hidden = jnp.zeros(tokens[0].shape, dtype)
    d_hidden, d_unembed = jax.lax.scan(add_part, d_hidden, parts.each)
    if parts.axis is not None:
        d_hidden = jax.lax.psum(d_hidden, parts.axis)
    d_hidden_BTD = order.join(d_hidden, shape=(B, T, D)).astype(hidden_BTD.dtype)
    if d_unembed is None:
        return d_hidden_BTD, None
    return d_hidden_BTD, d_unembed.reshape(-1, unembed_VD.shape[1])[: len(unembed_VD)]


class _Order:
    """The tokens of one device in chunks, wanted ones first."""

    def __init__(self, plan: _Plan, wanted_BT: jax.Array | None):
        self.chunk_tokens, self.wanted, self.order_X = plan.chunk_tokens, None, None
        if wanted_BT is not None and wanted_BT.size > plan.chunk_tokens:
            self.order_X = jnp.argsort(~wanted_BT.reshape(-1))  # stable
            self.wanted = jnp.any(self.chunks(wanted_BT), axis=1)  # any token of each chunk

    def chunks(self, of_tokens: Any) -> Any:
        """Returns arrays [B, T, ...] as [chunks, X, ...]."""

        def split(x: jax.Array) -> jax.Array:
            x = x.reshape(-1, *x.shape[2:])
            size = chunked_softmax.chunk_size(len(x), self.chunk_tokens)
            return chunked_softmax.in_chunks(x if self.order_X is None else x[self.order_X], size)

        return jax.tree.map(split, of_tokens)

    def join(self, x: jax.Array, *, shape: tuple[int, ...]) -> jax.Array:
        """The inverse of `chunks` for one array."""
        B, T, *rest = shape
        x = x.reshape(-1, *rest)[: B * T]
        if self.order_X is not None:
            x = jnp.zeros_like(x).at[self.order_X].set(x, unique_indices=True)
        return x.reshape(shape)

    def where_wanted(self, function: Callable[..., Any], other: Callable[..., Any]) -> Any:
        """Returns `function` with the chunk's `wanted` in front; where it is False, `other`."""
        if self.wanted is None:
            return lambda _, *arguments: function(*arguments)
        return lambda wanted, *arguments: jax.lax.cond(wanted, function, other, *arguments)


def row_statistics(
    config: ModelConfig,
    params: decoder.Params,
    rows: Rows,
    *,
    temperature: float,
    layout: HeadLayout | None = None,
    share_prompts: bool = False,
    collision: bool = False,
) -> TokenStatistics:
    """Returns the statistics [B, T] of each token of `rows.mask_BT` given its segment before it.

    The statistics of other tokens are meaningless.

    Args:
        layout, collision: see `token_statistics`.
        share_prompts: see `row_hidden`.
    """
    context = 1 if layout is None else layout.context
    # The state at t - 1 predicts the token at t: results are moved to the token they are of.
    of_next = lambda x_BT: zigzag.to_zigzag(jnp.roll(x_BT, -1, axis=1), context)
    statistics = token_statistics(
        row_hidden(config, params, rows, layout, share_prompts=share_prompts),
        decoder.unembedding(params),
        of_next(rows.tokens_BT),
        temperature=temperature,
        chunk_tokens=config.log_prob_chunk_tokens,
        layout=layout,
        wanted_BT=of_next(rows.mask_BT),
        collision=collision,
        exact=config.head_dtype is not None,
    )
    return jax.tree.map(lambda x_BT: to_own_token(zigzag.to_rows(x_BT, context)), statistics)


def row_hidden(
    config: ModelConfig,
    params: decoder.Params,
    rows: Rows,
    layout: HeadLayout | None,
    *,
    share_prompts: bool = False,
) -> Float[Array, "B T D"]:
    """Returns hidden states of packed rows; over several devices a row is in zig-zag order.

    Args:
        share_prompts: responses share their prompts in `rows`, see `Rows.prefixes_BT`.
    """
    choice = kernels.choose(config, layout, share_prompts=share_prompts)
    in_zigzag = functools.partial(zigzag.to_zigzag, parts=choice.context)
    tokens_BT, positions_BT = in_zigzag(rows.tokens_BT), in_zigzag(rows.positions_BT)
    shared = None
    if share_prompts:
        shared = xla.SharedPrompts(in_zigzag(rows.prefixes_BT), positions_BT)
    attend = xla.packed(in_zigzag(rows.segments_BT), choice, shared)
    if layout is not None and layout.mesh.size > 1:
        # The embedding whole along its width: looked up in shards of it, XLA would bring the
        # tokens of all rows to every device.
        whole = NamedSharding(layout.mesh, PartitionSpec(layout.unembed[0], None))
        embed_VD = jax.lax.with_sharding_constraint(params["embed"], whole)
        params = params | {"embed": embed_VD}
        # Or with context above 2 XLA would look up the tokens of two devices on each.
        tokens_BT = jax.lax.with_sharding_constraint(tokens_BT, row_sharding(layout.mesh))
    model = decoder.bind(config, params)
    return model(tokens_BT, positions_BT, attend, context=choice.context)[0]


def to_own_token(x_BT: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """Moves values of the next token to that token; 0 for the first of a row."""
    return jnp.roll(x_BT, 1, axis=1).at[:, 0].set(0.0)
