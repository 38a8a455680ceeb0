"""Log-probabilities and entropy from hidden states, in chunks: logits of a whole batch never exist.

The same function serves the update, the recomputation of old log-probs and the tests of rollouts;
`logits` is shared with the sampler.

The vocabulary is gone through part by part, and within each part the tokens chunk by chunk, with
sums as of a softmax that runs: forward, per token, the largest logit z so far, sum exp(z - top) and
a few more. What is kept for the backward pass is of the size of tokens; it computes the logits
again, part by part, and from them the gradients of hidden states and of that part of the
unembedding. On a mesh each device goes through its own part of the vocabulary for its own tokens;
sums of the size of tokens are exchanged, logits are not, and the unembedding only along its width.

Prompts, padding and what is left out of the loss cost no logits, where there is more than one
chunk: tokens that nobody asks for are put behind the others, and chunks of nothing else are passed
over.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from dapo_jax.config import ModelConfig
from dapo_jax.models import chunked_softmax, decoder
from dapo_jax.models.attention import kernels, xla, zigzag
from dapo_jax.models.sharding import HeadLayout
from dapo_jax.types import Rows
from dapo_jax.utils.precision import columns_first, sum_dtype


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
    layout: HeadLayout | None = None,
    wanted_BT: jax.Array | None = None,
) -> TokenStatistics:
    """Log-prob of each target, entropy of its distribution and its KL to a reference.

        KL_t = sum_v p_v (log p_v - log q_v)

    Args:
        hidden_BTD: hidden state that predicts `targets_BT` at the same index.
        temperature: divides the logits, the reference's too, as at sampling.
        chunk_tokens: of a device at most this many tokens have their logits alive at once, those
            of `vocabulary.VOCAB_CHUNK` columns, in the forward and in the backward pass.
        reference: hidden states [B, T, D'] and unembedding [V, D'] of the reference; no gradient.
        layout: where the arrays lie on a mesh, the reference's as the others; None: the compiler
            decides, right on any mesh but with the unembedding gathered where it is cut in parts.
        wanted_BT: what the others get is finite and not to be read; None: all are wanted.
    """
    if layout is not None and layout.mesh.size == 1:
        layout = None
    return _statistics(
        _Plan(temperature, chunk_tokens, layout),
        hidden_BTD,
        unembed_VD,
        targets_BT,
        reference,
        wanted_BT,
    )


class _Plan(NamedTuple):
    """What is known before anything is computed."""

    temperature: float
    chunk_tokens: int
    layout: HeadLayout | None


class _Slopes(NamedTuple):
    """Derivatives of the loss by each of the statistics [B, T]; None: the loss does not read it."""

    log_prob: jax.Array | None
    entropy: jax.Array | None
    kl: jax.Array | None


class _Kept(NamedTuple):
    """Per token [B, T] for the backward pass."""

    log_total: jax.Array  # log sum exp z
    entropy: jax.Array
    log_total_ref: jax.Array | None
    kl: jax.Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _statistics(
    plan: _Plan,
    hidden_BTD: jax.Array,
    unembed_VD: jax.Array,
    targets_BT: jax.Array,
    reference: Any,
    wanted_BT: jax.Array | None,
) -> TokenStatistics:
    return _on_mesh(plan, _forward)(hidden_BTD, unembed_VD, targets_BT, reference, wanted_BT)[0]


def _statistics_forward(plan: _Plan, *primals: Any) -> tuple[TokenStatistics, Any]:
    inputs = jax.tree.map(lambda primal: primal.value, primals)
    statistics, kept = _on_mesh(plan, _forward)(*inputs)
    return statistics, (inputs, kept)


def _statistics_backward(plan: _Plan, residuals: Any, cotangents: TokenStatistics) -> Any:
    inputs, kept = residuals
    # Nothing is paid for the gradient of what no loss reads.
    unread = lambda x: isinstance(x, jax.custom_derivatives.SymbolicZero)
    slopes = _Slopes(*(None if unread(x) else x for x in cotangents))
    d_hidden_BTD, d_unembed_VD = _on_mesh(plan, _backward)(*inputs, kept, slopes)
    return d_hidden_BTD, d_unembed_VD, None, None, None


_statistics.defvjp(_statistics_forward, _statistics_backward, symbolic_zeros=True)


def _on_mesh(plan: _Plan, function: Callable[..., Any]) -> Callable[..., Any]:
    """(hidden, unembed, targets, reference, *arrays [B, T] or None) -> what `_forward` or
    `_backward` give, each device of the layout at its own tokens and part of the vocabulary."""
    local = functools.partial(function, plan)
    layout = plan.layout
    if layout is None:
        return local
    rows, unembed = layout.rows, layout.unembed
    hidden = PartitionSpec(*rows, *[None] * (3 - len(rows)))
    outs = (hidden, unembed) if function is _backward else rows

    def mapped(*arguments: Any) -> Any:
        reference_at = None if arguments[3] is None else (hidden, unembed)
        ins = (hidden, unembed, rows, reference_at, *[rows] * (len(arguments) - 4))
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
    reference: Any,
    wanted_BT: jax.Array | None,
) -> tuple[TokenStatistics, _Kept]:
    """The statistics of the tokens of one device, and what the backward pass needs of them."""
    dtype = sum_dtype(hidden_BTD)
    parts = chunked_softmax.Parts(
        unembed_VD, reference and reference[1], plan.temperature, plan.layout
    )
    order = _Order(plan, wanted_BT)
    tokens = order.chunks((hidden_BTD, targets_BT, reference and reference[0]))

    def add_part(sums: chunked_softmax.Sums, part: Any) -> tuple[chunked_softmax.Sums, None]:
        start, unembed_PD, ref_PD = parts.whole(part)

        def add_chunk(sums: chunked_softmax.Sums, chunk: Any) -> chunked_softmax.Sums:
            hidden_CD, targets_C, ref_CD = chunk
            logits_CP = parts.logits(hidden_CD, unembed_PD, start)
            ref_CP = None if ref_CD is None else parts.logits(ref_CD, ref_PD, start)
            return chunked_softmax.add(sums, logits_CP, parts.targets(targets_C, start), ref_CP)

        add_wanted = order.where_wanted(add_chunk, lambda sums, _: sums)
        return jax.lax.map(lambda x: add_wanted(x[2], *x[:2]), (sums, tokens, order.each)), None

    sums = chunked_softmax.no_sums(tokens[1].shape, dtype, reference=reference is not None)
    sums, _ = jax.lax.scan(add_part, sums, parts.each)
    sums = chunked_softmax.over_shards(sums, parts.axis)
    log_total = jnp.log(sums.total)
    log_prob, entropy = sums.taken - sums.top - log_total, log_total - sums.spread / sums.total
    log_total, log_total_ref, kl = log_total + sums.top, None, jnp.zeros_like(log_prob)
    if sums.reference is not None:
        log_total_ref = jnp.log(sums.reference.total) + sums.reference.top
        kl = sums.reference.apart / sums.total - log_total + log_total_ref
    found = TokenStatistics(log_prob, entropy, kl), _Kept(log_total, entropy, log_total_ref, kl)
    if order.each is not None:  # of what was passed over there is nothing to take the logarithm of
        seen_C1 = order.each[:, None]
        found = jax.tree.map(lambda x: jnp.where(seen_C1, x, jnp.zeros_like(x)), found)
    return jax.tree.map(functools.partial(order.joined, shape=targets_BT.shape), found)


def _backward(
    plan: _Plan,
    hidden_BTD: jax.Array,
    unembed_VD: jax.Array,
    targets_BT: jax.Array,
    reference: Any,
    wanted_BT: jax.Array | None,
    kept: _Kept,
    slopes: _Slopes,
) -> tuple[jax.Array, jax.Array]:
    """Gradients of hidden states and unembedding, of one device, from those of the statistics.

        dz_v = g ([v = target] - p_v) - e p_v (log p_v + H) + k p_v (log p_v - log q_v - KL)

    Args:
        slopes: g, e and k.
    """
    dtype = sum_dtype(hidden_BTD)
    B, T, D = hidden_BTD.shape
    parts = chunked_softmax.Parts(
        unembed_VD, reference and reference[1], plan.temperature, plan.layout
    )
    order = _Order(plan, wanted_BT)
    tokens = order.chunks((hidden_BTD, targets_BT, reference and reference[0], kept, slopes))

    def add_part(d_hidden: jax.Array, part: Any) -> tuple[jax.Array, jax.Array]:
        start, unembed_PD, ref_PD = parts.whole(part)
        weights_PD = unembed_PD.astype(hidden_BTD.dtype)

        def add_chunk(carry: tuple[jax.Array, jax.Array], i: jax.Array, chunk: Any) -> Any:
            d_unembed_PD, d_hidden = carry
            hidden_CD, targets_C, ref_CD, kept, slopes = chunk
            log_p_CP = parts.logits(hidden_CD, unembed_PD, start) - kept.log_total[:, None]
            pull_CP = jnp.zeros((len(targets_C), 1), dtype)  # towards p, per unit of p
            d_logits_CP = pull_CP
            if slopes.log_prob is not None:
                g_C1 = slopes.log_prob.astype(dtype)[:, None]
                here_C1 = parts.targets(targets_C, start)[:, None]
                at_target_CP = jnp.arange(parts.size)[None] == here_C1
                d_logits_CP = jnp.where(at_target_CP, g_C1, jnp.zeros_like(g_C1))
                pull_CP = -g_C1
            if slopes.entropy is not None:
                e_C1 = slopes.entropy.astype(dtype)[:, None]
                pull_CP = pull_CP - e_C1 * (log_p_CP + kept.entropy[:, None])
            if slopes.kl is not None and kept.log_total_ref is not None:
                k_C1 = slopes.kl.astype(dtype)[:, None]
                log_q_CP = parts.logits(ref_CD, ref_PD, start) - kept.log_total_ref[:, None]
                pull_CP = pull_CP + k_C1 * (log_p_CP - log_q_CP - kept.kl[:, None])
            d_logits_CP = (d_logits_CP + jnp.exp(log_p_CP) * pull_CP) / plan.temperature
            d_logits_CP = d_logits_CP.astype(hidden_CD.dtype)
            product = functools.partial(jnp.einsum, preferred_element_type=dtype)
            d_unembed_PD = d_unembed_PD + product(
                "CP,CD->PD", columns_first(d_logits_CP), hidden_CD
            )
            # In the whole array: a chunk handed in and out would be copied.
            d_hidden = d_hidden.at[i].add(product("CP,PD->CD", d_logits_CP, weights_PD))
            return d_unembed_PD, d_hidden

        add_wanted = order.where_wanted(add_chunk, lambda carry, *_: carry)
        (d_unembed_PD, d_hidden), _ = jax.lax.scan(
            lambda carry, x: (add_wanted(x[0], carry, *x[1:]), None),
            (jnp.zeros((parts.size, D), dtype), d_hidden),
            (order.each, jnp.arange(len(d_hidden)), tokens),
        )
        return d_hidden, parts.own(d_unembed_PD).astype(unembed_VD.dtype)

    d_hidden = jnp.zeros(tokens[0].shape, dtype)
    d_hidden, d_unembed = jax.lax.scan(add_part, d_hidden, parts.each)
    if parts.axis is not None:
        d_hidden = jax.lax.psum(d_hidden, parts.axis)
    d_hidden_BTD = order.joined(d_hidden, shape=(B, T, D)).astype(hidden_BTD.dtype)
    return d_hidden_BTD, d_unembed.reshape(-1, unembed_VD.shape[1])[: len(unembed_VD)]


class _Order:
    """The tokens of one device in chunks, those first that are wanted."""

    def __init__(self, plan: _Plan, wanted_BT: jax.Array | None):
        self.chunk_tokens, self.each, self.order_X = plan.chunk_tokens, None, None
        if wanted_BT is not None and wanted_BT.size > plan.chunk_tokens:
            self.order_X = jnp.argsort(~wanted_BT.reshape(-1))  # stable
            # Of each chunk, whether there is anything in it.
            self.each = jnp.any(self.chunks(wanted_BT), axis=1)

    def chunks(self, of_tokens: Any) -> Any:
        """Arrays [B, T, ...] as [chunks, C, ...]."""

        def cut(x: jax.Array) -> jax.Array:
            x = x.reshape(-1, *x.shape[2:])
            size = chunked_softmax.even_part(len(x), self.chunk_tokens)
            return chunked_softmax.cut(x if self.order_X is None else x[self.order_X], size)

        return jax.tree.map(cut, of_tokens)

    def joined(self, x: jax.Array, *, shape: tuple[int, ...]) -> jax.Array:
        """The other way round."""
        B, T, *rest = shape
        x = x.reshape(-1, *rest)[: B * T]
        if self.order_X is not None:
            x = jnp.zeros_like(x).at[self.order_X].set(x, unique_indices=True)
        return x.reshape(shape)

    def where_wanted(self, function: Callable[..., Any], other: Callable[..., Any]) -> Any:
        """(an element of `each`, *arguments) -> `function` of them, or `other` if it is False."""
        if self.each is None:
            return lambda _, *arguments: function(*arguments)
        return lambda wanted, *arguments: jax.lax.cond(wanted, function, other, *arguments)


def row_statistics(
    config: ModelConfig,
    params: decoder.Params,
    rows: Rows,
    *,
    temperature: float,
    reference: decoder.Params | None = None,
    layout: HeadLayout | None = None,
    share_prompts: bool = False,
) -> TokenStatistics:
    """`TokenStatistics` of each token of `rows.mask_BT` given its segment before it [B, T].

    What the others get is not to be read.

    Args:
        reference: parameters of the same architecture for the exact KL, or None.
        layout: see `token_statistics`.
        share_prompts: see `row_hidden`.
    """
    hidden = lambda p: row_hidden(config, p, rows, layout, share_prompts=share_prompts)
    parts = 1 if layout is None else layout.context
    # The state at t - 1 predicts the token at t: results are moved to the token they speak of.
    of_next = lambda x_BT: zigzag.to_devices(jnp.roll(x_BT, -1, axis=1), parts)
    statistics = token_statistics(
        hidden(params),
        decoder.unembedding(params),
        of_next(rows.tokens_BT),
        temperature=temperature,
        chunk_tokens=config.log_prob_chunk_tokens,
        reference=None
        if reference is None
        else (hidden(reference), decoder.unembedding(reference)),
        layout=layout,
        wanted_BT=of_next(rows.mask_BT),
    )
    own = lambda x_BT: to_own_token(zigzag.to_rows(x_BT, parts))
    return TokenStatistics(*map(own, statistics))


def row_hidden(
    config: ModelConfig,
    params: decoder.Params,
    rows: Rows,
    layout: HeadLayout | None,
    *,
    share_prompts: bool = False,
) -> jax.Array:
    """Hidden states of packed rows [B, T, D], before the token that each predicts; where the tokens
    of a row lie over devices, in the order of `row_order`.

    Args:
        share_prompts: `rows.prefixes_BT` says something.
    """
    choice = kernels.choose(config, layout, share_prompts=share_prompts)
    parts = choice.context
    of_devices = functools.partial(zigzag.to_devices, parts=parts)
    shared, positions_BT = None, of_devices(rows.positions_BT)
    if share_prompts:
        shared = xla.SharedPrompts(of_devices(rows.prefixes_BT), positions_BT)
    return decoder.hidden_states(
        config,
        _looked_up(config, params, layout),
        of_devices(rows.tokens_BT),
        positions_BT,
        xla.packed(of_devices(rows.segments_BT), choice, shared),
        parts=parts,
    )[0]


def _looked_up(
    config: ModelConfig, params: decoder.Params, layout: HeadLayout | None
) -> decoder.Params:
    """The parameters with the embedding, in the compute dtype, whole along its width.

    Looked up in parts of its width, the tokens of all rows would come out in those parts, which XLA
    does not bring to the devices of the rows but by giving every device all of them.
    """
    if layout is None or layout.mesh.size == 1:
        return params
    whole = NamedSharding(layout.mesh, PartitionSpec(layout.unembed[0], None))
    embed_VD = params["embed"].astype(config.compute_dtype)
    return params | {"embed": jax.lax.with_sharding_constraint(embed_VD, whole)}


def to_own_token(x_BT: jax.Array) -> jax.Array:
    """What a position says of the next token, moved to that token; 0 for the first of a row."""
    return jnp.roll(x_BT, 1, axis=1).at[:, 0].set(0.0)
