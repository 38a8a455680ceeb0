"""Continuous batching on the device: which sample is in which slot, and who owns which page.

Pure functions over the state of one shard of the batch; `programs` compiles them. A prefilled
prompt is a request: its pages, the hidden state after its last token, its samples that wait for a
slot. Before every token, free slots go to waiting samples in order of arrival. The host, which
reads results late, has no part in it: a slot is empty only when nothing waits.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dapo_jax.rollout import paged
from dapo_jax.rollout.engine_config import EngineConfig
from dapo_jax.rollout.sampling import Sampled, SamplingParams
from dapo_jax.types import Array

NEVER = 2**30  # order of arrival of a free request


class Prefix(NamedTuple):
    """P prefilled prompts; outside the programs every array has a leading axis for the shards."""

    pages: tuple[Array, ...]  # [L, P * pages, ...] each, in the pool's layout
    hidden_PD: Array  # after the last token
    length_P: Array  # tokens
    key_P2: Array  # uint32: the prompt's random key; each sample's key is folded from it


class NewRequests(NamedTuple):
    """Requests to open for P prefilled prompts; every array has a leading axis for the shards."""

    request_P: Array  # int32: number of the request to fill; beyond the last one skips the prompt
    num_samples_P: Array
    first_sample_P: Array  # number of the first sample, part of its random key
    sampled_P: Array  # tokens at the end of the prompt that begin the response
    limit_PG: Array  # most response tokens of each sample
    params: SamplingParams

    @classmethod
    def none(cls, c: EngineConfig, num_prompts: int, params: SamplingParams) -> "NewRequests":
        """Returns NumPy arrays that skip every prompt; the caller fills in the ones to insert."""
        shape = c.shards, num_prompts
        zeros = lambda: np.zeros(shape, np.int32)
        limits = np.full((*shape, c.samples), c.max_response_tokens, np.int32)
        nowhere = zeros() + np.int32(c.requests)
        return cls(nowhere, zeros(), zeros(), zeros(), limits, params.full(shape))


class Requests(NamedTuple):
    """E prompts with samples that wait for slots or are in slots."""

    table_EJ: Array  # int32: pages
    length_E: Array  # tokens
    hidden_ED: Array
    key_E2: Array
    waiting_E: Array  # samples without a slot so far
    started_E: Array  # samples that got one
    unfinished_E: Array  # samples that have not ended; 0: the request is free
    order_E: Array  # of arrival
    first_sample_E: Array
    sampled_E: Array
    limit_EG: Array
    params: SamplingParams


class DecodeState(NamedTuple):
    """B slots, U pages, E requests."""

    pool: Any  # see `paged`
    free_U: Array  # int32: page numbers, the first `num_free` of them free
    num_free: Array
    clock: Array  # counts arrivals of requests, and of sequences in slots
    requests: Requests
    table_BJ: Array
    used_B: Array  # pages of the table
    shared_B: Array  # leading pages that belong to the request
    length_B: Array  # tokens in the cache
    sampled_B: Array  # response tokens
    limit_B: Array
    hidden_BD: Array
    key_B2: Array  # of the sample
    active_B: Array  # bool
    request_B: Array
    sample_index_B: Array  # place among the request's samples
    serial_B: Array  # order in which sequences came into slots
    params: SamplingParams


def empty(c: EngineConfig) -> DecodeState:
    """Returns the state of a shard whose slots, requests and pages are free. Page 0 is scratch."""
    B, E, J, U = c.slots // c.shards, c.requests, c.table_pages, c.shard_pages
    zeros = lambda *shape: jnp.zeros(shape, jnp.int32)

    def counts(of: Any, n: int) -> dict[str, Any]:
        return {name: zeros(n) for name in of._fields if name.endswith(("_B", "_E"))}

    hidden = lambda n: jnp.zeros((n, c.model.hidden_size), c.model.compute_dtype)
    keys = lambda n: jnp.zeros((n, 2), jnp.uint32)
    params = lambda n: jax.tree.map(jnp.asarray, SamplingParams().full(n))
    requests = counts(Requests, E) | {
        "table_EJ": zeros(E, J),
        "hidden_ED": hidden(E),
        "key_E2": keys(E),
        "order_E": jnp.full(E, NEVER, jnp.int32),
        "limit_EG": zeros(E, c.samples),
        "params": params(E),
    }
    slots = counts(DecodeState, B) | {
        "table_BJ": zeros(B, J),
        "hidden_BD": hidden(B),
        "key_B2": keys(B),
        "active_B": jnp.zeros(B, bool),
        "request_B": jnp.full(B, E, jnp.int32),
        "params": params(B),
    }
    return DecodeState(
        pool=jax.tree.map(jnp.zeros_like, c.pool_layout.pool(c.model, U)),
        free_U=jnp.arange(U, dtype=jnp.int32)[::-1],
        num_free=jnp.asarray(U - 1, jnp.int32),
        clock=zeros(),
        requests=Requests(**requests),
        **slots,
    )


def _allocate(state: DecodeState, rank_X: jax.Array, wanted_X: jax.Array) -> tuple[Any, Any, Any]:
    """Returns (pages, whether each was granted, the state without them), by rank of the wanted."""
    granted_X = wanted_X & (rank_X < state.num_free)
    place_X = jnp.clip(state.num_free - 1 - rank_X, 0, len(state.free_U) - 1)
    page_X = jnp.where(granted_X, state.free_U[place_X], 0)
    num = jnp.sum(granted_X.astype(jnp.int32))
    return page_X, granted_X, state._replace(num_free=state.num_free - num)


def _release(state: DecodeState, pages: jax.Array, mask: jax.Array) -> DecodeState:
    pages, mask = pages.reshape(-1), mask.reshape(-1)
    place = jnp.where(mask, state.num_free + _rank(mask), len(state.free_U))
    return state._replace(
        free_U=state.free_U.at[place].set(pages, mode="drop"),
        num_free=state.num_free + jnp.sum(mask.astype(jnp.int32)),
    )


def _rank(mask_X: jax.Array) -> jax.Array:
    return jnp.cumsum(mask_X.astype(jnp.int32)) - 1


def insert(state: DecodeState, prefix: Prefix, new: NewRequests, page_tokens: int) -> DecodeState:
    """Inserts prefilled prompts as requests whose samples wait; what a request held before ends.

    The pool must have pages for them.
    """
    E, P = len(state.requests.length_E), len(prefix.length_P)
    replaced_E = jnp.zeros(E, bool).at[new.request_P].set(True, mode="drop")
    state = end(state, state.active_B & replaced_E[state.request_B])
    unfinished_E = jnp.where(replaced_E, 0, state.requests.unfinished_E)
    state = state._replace(requests=state.requests._replace(unfinished_E=unfinished_E))
    state = close(state, page_tokens)

    X = prefix.pages[0].shape[1] // P
    used_P = -(-prefix.length_P // page_tokens)
    wanted_PX = (new.request_P < E)[:, None] & (jnp.arange(X)[None] < used_P[:, None])
    page, _, state = _allocate(state, _rank(wanted_PX.reshape(-1)), wanted_PX.reshape(-1))
    requests = Requests(
        table_EJ=jnp.pad(page.reshape(P, X), ((0, 0), (0, state.table_BJ.shape[1] - X))),
        length_E=prefix.length_P,
        hidden_ED=prefix.hidden_PD,
        key_E2=prefix.key_P2,
        waiting_E=new.num_samples_P,
        started_E=jnp.zeros_like(new.num_samples_P),
        unfinished_E=new.num_samples_P,
        order_E=state.clock + jnp.arange(P, dtype=jnp.int32),
        first_sample_E=new.first_sample_P,
        sampled_E=new.sampled_P,
        limit_EG=new.limit_PG,
        params=new.params,
    )
    put = lambda into, values: into.at[new.request_P].set(values, mode="drop")
    return state._replace(
        pool=paged.put(state.pool, page, prefix.pages),
        clock=state.clock + P,
        requests=jax.tree.map(put, state.requests, requests),
    )


def refill(state: DecodeState, page_tokens: int) -> DecodeState:
    """Gives free slots to waiting samples."""
    waiting = jnp.any(~state.active_B) & jnp.any(state.requests.waiting_E > 0)
    return jax.lax.cond(waiting, lambda s: _refill(s, page_tokens), lambda s: s, state)


def _refill(state: DecodeState, page_tokens: int) -> DecodeState:
    e = state.requests
    E = len(e.length_E)
    by_order = jnp.argsort(jnp.where(e.waiting_E > 0, e.order_E, NEVER))
    until_E = jnp.cumsum(e.waiting_E[by_order])
    rank_B = _rank(~state.active_B)
    # Free slot i goes to the first request whose cumulative count of waiting samples exceeds i.
    at_B = jnp.minimum(jnp.searchsorted(until_E, rank_B, side="right"), E - 1)
    request_B = by_order[at_B]
    sample_index_B = e.started_E[request_B] + rank_B - (until_E[at_B] - e.waiting_E[request_B])
    # Every sequence in a slot soon needs a page, a new one two.
    active = jnp.sum(state.active_B.astype(jnp.int32))
    enough_B = state.num_free >= active + 2 * (rank_B + 1)
    comes_B = ~state.active_B & (rank_B < until_E[-1]) & enough_B

    # Samples share the whole pages of their prompt and write into copies of the last, partial one.
    length_B = e.length_E[request_B]
    partial_B = comes_B & (length_B % page_tokens > 0)
    page_B, _, state = _allocate(state, _rank(partial_B), partial_B)
    table_BJ = e.table_EJ[request_B]
    last_B1 = (length_B // page_tokens)[:, None]
    source_B = jnp.take_along_axis(table_BJ, last_B1, axis=1)[:, 0]
    own_BJ = (jnp.arange(table_BJ.shape[1])[None] == last_B1) & partial_B[:, None]
    table_BJ = jnp.where(own_BJ, page_B[:, None], table_BJ)
    pool = paged.copied(state.pool, source_B, page_B, partial_B)

    def sample_key(key_2: jax.Array, sample: jax.Array) -> jax.Array:
        return jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(key_2), sample))

    came = {
        "table_BJ": table_BJ,
        "used_B": -(-length_B // page_tokens),
        "shared_B": length_B // page_tokens,
        "length_B": length_B,
        "sampled_B": e.sampled_E[request_B],
        "limit_B": e.limit_EG[request_B, jnp.minimum(sample_index_B, e.limit_EG.shape[1] - 1)],
        "hidden_BD": e.hidden_ED[request_B],
        "key_B2": jax.vmap(sample_key)(
            e.key_E2[request_B], e.first_sample_E[request_B] + sample_index_B
        ),
        "request_B": request_B,
        "sample_index_B": sample_index_B,
        "serial_B": state.clock + rank_B,
        "params": jax.tree.map(lambda x: x[request_B], e.params),
    }

    def put(values: jax.Array, into: jax.Array) -> jax.Array:
        return jnp.where(comes_B.reshape(-1, *[1] * (into.ndim - 1)), values, into)

    slots = jax.tree.map(put, came, {name: getattr(state, name) for name in came})
    started_E = jnp.zeros(E, jnp.int32).at[request_B].add(comes_B.astype(jnp.int32))
    return state._replace(
        pool=pool,
        clock=state.clock + jnp.sum(comes_B.astype(jnp.int32)),
        requests=e._replace(waiting_E=e.waiting_E - started_E, started_E=e.started_E + started_E),
        active_B=state.active_B | comes_B,
        **slots,
    )


def grow(state: DecodeState, page_tokens: int) -> tuple[DecodeState, jax.Array]:
    """Returns (the state with a page for the next token of each slot, which slots can continue).

    Where pages are short, the sequences that came first get them.
    """
    full_B = state.active_B & (state.length_B == state.used_B * page_tokens)
    earlier_BB = state.serial_B[None, :] < state.serial_B[:, None]
    rank_B = jnp.sum((earlier_BB & full_B[None, :]).astype(jnp.int32), axis=1)
    page_B, granted_B, state = _allocate(state, rank_B, full_B)
    at_BJ = jnp.arange(state.table_BJ.shape[1])[None] == state.used_B[:, None]
    state = state._replace(
        table_BJ=jnp.where(at_BJ & granted_B[:, None], page_B[:, None], state.table_BJ),
        used_B=state.used_B + granted_B.astype(jnp.int32),
    )
    return state, state.active_B & (~full_B | granted_B)


def advance(
    state: DecodeState, goes_B: jax.Array, sampled: Sampled, hidden_BD: jax.Array, stops: Any
) -> tuple[DecodeState, jax.Array]:
    """Returns (the state after one token of the slots that continue, which of them ended)."""
    step_B = goes_B.astype(jnp.int32)
    count_B = state.sampled_B + step_B
    over_B = jnp.isin(sampled.token_B, stops) | (count_B >= state.limit_B) | ~sampled.finite_B
    over_B = over_B & goes_B
    state = state._replace(
        length_B=state.length_B + step_B,
        sampled_B=count_B,
        hidden_BD=jnp.where(goes_B[:, None], hidden_BD, state.hidden_BD),
    )
    return end(state, over_B), over_B


def end(state: DecodeState, over_B: jax.Array) -> DecodeState:
    """Ends the sequences in these slots and frees their own pages."""

    def ended(state: DecodeState) -> DecodeState:
        e, place_J = state.requests, jnp.arange(state.table_BJ.shape[1])[None]
        own_BJ = (place_J >= state.shared_B[:, None]) & (place_J < state.used_B[:, None])
        state = _release(state, state.table_BJ, own_BJ & over_B[:, None])
        less_B = -over_B.astype(jnp.int32)
        unfinished_E = e.unfinished_E.at[state.request_B].add(less_B, mode="drop")
        return state._replace(
            active_B=state.active_B & ~over_B, requests=e._replace(unfinished_E=unfinished_E)
        )

    return jax.lax.cond(jnp.any(over_B), ended, lambda s: s, state)


def close(state: DecodeState, page_tokens: int) -> DecodeState:
    """Frees the requests, and their pages, whose samples have all ended."""
    e = state.requests
    over_E = (e.unfinished_E <= 0) & (e.order_E < NEVER)

    def closed(state: DecodeState) -> DecodeState:
        place_J = jnp.arange(e.table_EJ.shape[1])[None]
        own_EJ = place_J < -(-e.length_E // page_tokens)[:, None]
        state = _release(state, e.table_EJ, own_EJ & over_E[:, None])
        return state._replace(requests=e._replace(order_E=jnp.where(over_E, NEVER, e.order_E)))

    return jax.lax.cond(jnp.any(over_E), closed, lambda s: s, state)


def cancel(state: DecodeState, request_W: Any, index_W: Any, page_tokens: int) -> DecodeState:
    """Ends these samples, by request and sample index, where they are still in slots."""
    request_BW = state.request_B[:, None] == request_W[None]
    index_BW = state.sample_index_B[:, None] == index_W[None]
    gone_B = state.active_B & jnp.any(request_BW & index_BW, axis=1)
    return close(end(state, gone_B), page_tokens)
