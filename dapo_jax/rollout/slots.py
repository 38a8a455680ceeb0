"""Continuous batching on the device: which sequence is in which slot, and which pages are whose.

Pure functions over the state of one shard of the batch; `engine` compiles them. A prompt, once
prefilled, is an entry: its pages, the hidden state after its last token, and how many samples of
it have not found a slot yet. Every decode step begins by giving free slots to samples that wait,
in the order in which prompts came, so that a slot is empty only when nothing waits: the host, which
sees results late, has no part in it. Samples share the whole pages of their prompt; the last,
partial one is copied, because they write into it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dapo_jax.rollout import paged
from dapo_jax.rollout.sampling import Sampled, SamplingParams
from dapo_jax.types import Array

NEVER = 2**30  # order of an entry from which nothing is to be taken


class Requests(NamedTuple):
    """E prompts: those whose samples wait for slots or are being drawn."""

    table_EP: Array  # int32: pages
    length_E: Array  # tokens
    hidden_ED: Array  # after the last token
    key_E2: Array  # uint32: random key; a sample's is folded from it
    waiting_E: Array  # samples that have found no slot yet
    started_E: Array  # samples that have
    unfinished_E: Array  # samples that have not ended; 0: the entry is free
    order_E: Array  # of arrival
    first_E: Array  # number of the first sample
    sampled_E: Array  # tokens at the end of the prompt that are the beginning of the response
    limit_EG: Array  # most response tokens of each sample
    params: SamplingParams


class DecodeState(NamedTuple):
    """B slots, N pages, E entries."""

    pool: Any  # see `paged`
    free_N: Array  # int32: page numbers, the first `num_free` of them free
    num_free: Array
    clock: Array  # counts arrivals, of entries and of sequences in slots
    requests: Requests
    table_BP: Array
    used_B: Array  # pages of the table
    shared_B: Array  # the first so many of them belong to the entry
    length_B: Array  # tokens in the cache
    sampled_B: Array  # response tokens
    limit_B: Array
    hidden_BD: Array
    key_B2: Array  # of the sample
    active_B: Array  # bool
    request_B: Array
    sample_index_B: Array  # which sample of the entry, from 0
    serial_B: Array  # order in which sequences came into slots
    params: SamplingParams


def empty(
    pool: Any, *, slots: int, requests: int, samples: int, pages: int, table: int, width: int,
    dtype: Any,
) -> DecodeState:  # fmt: skip
    """Nothing in it. Page 0 is nobody's.

    Args:
        samples: of an entry, at most.
        pages: of the pool.
        table: pages of one sequence, at most.
        width: of a hidden state, in `dtype`.
    """
    B, E = slots, requests
    zeros = lambda *shape: jnp.zeros(shape, jnp.int32)
    params = lambda n: SamplingParams(
        jnp.ones(n, jnp.float32), jnp.ones(n, jnp.float32), zeros(n), jnp.zeros(n, jnp.float32)
    )
    return DecodeState(
        pool,
        jnp.arange(pages, dtype=jnp.int32)[::-1],
        jnp.asarray(pages - 1, jnp.int32),
        jnp.asarray(0, jnp.int32),
        Requests(
            zeros(E, table), zeros(E), jnp.zeros((E, width), dtype), jnp.zeros((E, 2), jnp.uint32),
            zeros(E), zeros(E), zeros(E), jnp.full(E, NEVER, jnp.int32), zeros(E), zeros(E),
            zeros(E, samples), params(E),
        ),
        zeros(B, table), zeros(B), zeros(B), zeros(B), zeros(B), zeros(B),
        jnp.zeros((B, width), dtype), jnp.zeros((B, 2), jnp.uint32), jnp.zeros(B, bool),
        jnp.full(B, E, jnp.int32), zeros(B), zeros(B), params(B),
    )  # fmt: skip


def _allocate(state: DecodeState, rank_X: jax.Array, wanted_X: jax.Array) -> tuple[Any, Any, Any]:
    """(pages, whether there was one, the state without them), by rank among the wanted."""
    granted_X = wanted_X & (rank_X < state.num_free)
    place_X = jnp.clip(state.num_free - 1 - rank_X, 0, len(state.free_N) - 1)
    page_X = jnp.where(granted_X, state.free_N[place_X], 0)
    num = jnp.sum(granted_X.astype(jnp.int32))
    return page_X, granted_X, state._replace(num_free=state.num_free - num)


def _release(state: DecodeState, pages: jax.Array, mask: jax.Array) -> DecodeState:
    pages, mask = pages.reshape(-1), mask.reshape(-1)
    place = state.num_free + jnp.cumsum(mask.astype(jnp.int32)) - 1
    place = jnp.where(mask, place, len(state.free_N))
    return state._replace(
        free_N=state.free_N.at[place].set(pages, mode="drop"),
        num_free=state.num_free + jnp.sum(mask.astype(jnp.int32)),
    )


def _rank(mask_X: jax.Array) -> jax.Array:
    return jnp.cumsum(mask_X.astype(jnp.int32)) - 1


class NewRequests(NamedTuple):
    """What the host says of P prefilled prompts that become entries."""

    request_P: Array  # int32; a number beyond the entries skips the prompt
    samples_P: Array
    first_P: Array
    sampled_P: Array
    limit_PG: Array
    params: SamplingParams


def enqueue(
    state: DecodeState, pages: Any, hidden_PD: Any, length_P: Any, key_P2: Any, of: NewRequests,
    page_tokens: int,
) -> DecodeState:  # fmt: skip
    """The state with prefilled prompts as entries. There have to be pages enough.

    Args:
        pages: the prompts' keys and values, as many pages for each, in the layout of the pool.
    """
    e, A = state.requests, page_tokens
    P = len(length_P)
    X = pages[0].shape[1] // P
    kept_P = of.request_P < len(e.length_E)
    wanted_PX = kept_P[:, None] & (jnp.arange(X)[None] < -(-length_P // A)[:, None])
    page, _, state = _allocate(state, _rank(wanted_PX.reshape(-1)), wanted_PX.reshape(-1))
    pool = paged.put(state.pool, page, pages)
    table_PP = jnp.pad(page.reshape(P, X), ((0, 0), (0, e.table_EP.shape[1] - X)))
    put = lambda into, values: into.at[of.request_P].set(values, mode="drop")
    return state._replace(
        pool=pool,
        clock=state.clock + P,
        requests=Requests(
            put(e.table_EP, table_PP),
            put(e.length_E, length_P),
            put(e.hidden_ED, hidden_PD),
            put(e.key_E2, key_P2),
            put(e.waiting_E, of.samples_P),
            put(e.started_E, jnp.zeros_like(of.samples_P)),
            put(e.unfinished_E, of.samples_P),
            put(e.order_E, state.clock + jnp.arange(P, dtype=jnp.int32)),
            put(e.first_E, of.first_P),
            put(e.sampled_E, of.sampled_P),
            put(e.limit_EG, of.limit_PG),
            jax.tree.map(put, e.params, of.params),
        ),
    )


def refill(state: DecodeState, page_tokens: int) -> DecodeState:
    """Free slots given to samples that wait."""
    waiting = jnp.any(~state.active_B) & jnp.any(state.requests.waiting_E > 0)
    return jax.lax.cond(waiting, lambda s: _refill(s, page_tokens), lambda s: s, state)


def _refill(state: DecodeState, A: int) -> DecodeState:
    e = state.requests
    E = len(e.length_E)
    by_order = jnp.argsort(jnp.where(e.waiting_E > 0, e.order_E, NEVER))
    until_E = jnp.cumsum(e.waiting_E[by_order])
    rank_B = _rank(~state.active_B)
    # The sample of that rank is one of the entry that takes the sum of those left beyond it.
    at_B = jnp.minimum(jnp.searchsorted(until_E, rank_B, side="right"), E - 1)
    request_B = by_order[at_B]
    sample_index_B = e.started_E[request_B] + rank_B - (until_E[at_B] - e.waiting_E[request_B])
    # Who is in a slot will soon need a page, and so will who comes.
    active = jnp.sum(state.active_B.astype(jnp.int32))
    enough_B = state.num_free >= active + 2 * (rank_B + 1)
    comes_B = ~state.active_B & (rank_B < until_E[-1]) & enough_B

    length_B = e.length_E[request_B]
    partial_B = comes_B & (length_B % A > 0)
    page_B, _, state = _allocate(state, _rank(partial_B), partial_B)
    table_BP = e.table_EP[request_B]
    last_B1 = (length_B // A)[:, None]
    source_B = jnp.take_along_axis(table_BP, last_B1, axis=1)[:, 0]
    own_BP = (jnp.arange(table_BP.shape[1])[None] == last_B1) & partial_B[:, None]
    table_BP = jnp.where(own_BP, page_B[:, None], table_BP)
    pool = paged.copied(state.pool, source_B, page_B, partial_B)

    def sample_key(key_2: jax.Array, sample: jax.Array) -> jax.Array:
        return jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(key_2), sample))

    key_B2 = jax.vmap(sample_key)(e.key_E2[request_B], e.first_E[request_B] + sample_index_B)
    limit_B = e.limit_EG[request_B, jnp.minimum(sample_index_B, e.limit_EG.shape[1] - 1)]

    def put(values: jax.Array, into: jax.Array) -> jax.Array:
        return jnp.where(comes_B.reshape(-1, *[1] * (into.ndim - 1)), values, into)

    started_E = jnp.zeros(E, jnp.int32).at[request_B].add(comes_B.astype(jnp.int32))
    return state._replace(
        pool=pool,
        clock=state.clock + len(rank_B),
        requests=e._replace(waiting_E=e.waiting_E - started_E, started_E=e.started_E + started_E),
        table_BP=put(table_BP, state.table_BP),
        used_B=put(-(-length_B // A), state.used_B),
        shared_B=put(length_B // A, state.shared_B),
        length_B=put(length_B, state.length_B),
        sampled_B=put(e.sampled_E[request_B], state.sampled_B),
        limit_B=put(limit_B, state.limit_B),
        hidden_BD=put(e.hidden_ED[request_B], state.hidden_BD),
        key_B2=put(key_B2, state.key_B2),
        active_B=state.active_B | comes_B,
        request_B=put(request_B, state.request_B),
        sample_index_B=put(sample_index_B, state.sample_index_B),
        serial_B=put(state.clock + rank_B, state.serial_B),
        params=jax.tree.map(lambda a, b: put(a[request_B], b), e.params, state.params),
    )


def place(
    state: DecodeState, pages: Any, hidden_D: Any, length: Any, key_2: Any, slot: Any,
    of: SamplingParams, limit: int, page_tokens: int,
) -> DecodeState:  # fmt: skip
    """The state with one prefilled prompt in a slot of its own choice; beyond the slots: nowhere.
    What was in the slot is gone. The key is the sample's."""
    B, A = len(state.active_B), page_tokens
    mine_B = jnp.arange(B) == slot
    state = end(state, mine_B & state.active_B)
    X = pages[0].shape[1]
    wanted_X = jnp.any(mine_B) & (jnp.arange(X) < -(-length // A))
    page_X, _, state = _allocate(state, _rank(wanted_X), wanted_X)
    row_P = jnp.pad(page_X, (0, state.table_BP.shape[1] - X))

    def put(values: Any, into: jax.Array) -> jax.Array:
        values = jnp.broadcast_to(jnp.asarray(values, into.dtype), into.shape)
        return jnp.where(mine_B.reshape(-1, *[1] * (into.ndim - 1)), values, into)

    return state._replace(
        pool=paged.put(state.pool, page_X, pages),
        table_BP=put(row_P[None], state.table_BP),
        used_B=put(-(-length // A), state.used_B),
        shared_B=put(0, state.shared_B),
        length_B=put(length, state.length_B),
        sampled_B=put(0, state.sampled_B),
        limit_B=put(limit, state.limit_B),
        hidden_BD=put(hidden_D[None], state.hidden_BD),
        key_B2=put(key_2[None], state.key_B2),
        active_B=state.active_B | mine_B,
        request_B=put(len(state.requests.length_E), state.request_B),
        serial_B=put(state.clock, state.serial_B),
        clock=state.clock + 1,
        params=SamplingParams(*(put(a, jnp.asarray(b)) for a, b in zip(of, state.params))),
    )


def grow(state: DecodeState, page_tokens: int) -> tuple[DecodeState, jax.Array]:
    """(the state with a page for the next token of every slot, which slots go on): where pages are
    short those that came first get them."""
    full_B = state.active_B & (state.length_B == state.used_B * page_tokens)
    earlier_BB = state.serial_B[None, :] < state.serial_B[:, None]
    rank_B = jnp.sum((earlier_BB & full_B[None, :]).astype(jnp.int32), axis=1)
    page_B, granted_B, state = _allocate(state, rank_B, full_B)
    at_BP = jnp.arange(state.table_BP.shape[1])[None] == state.used_B[:, None]
    state = state._replace(
        table_BP=jnp.where(at_BP & granted_B[:, None], page_B[:, None], state.table_BP),
        used_B=state.used_B + granted_B.astype(jnp.int32),
    )
    return state, state.active_B & (~full_B | granted_B)


def advance(
    state: DecodeState, goes_B: jax.Array, sampled: Sampled, hidden_BD: jax.Array, stops: Any
) -> tuple[DecodeState, jax.Array]:
    """(the state after a token of the slots that go on, which of them have ended with it)."""
    step_B = goes_B.astype(jnp.int32)
    count_B = state.sampled_B + step_B
    over_B = jnp.isin(sampled.token_B, stops) | (count_B >= state.limit_B) | ~sampled.finite_B
    over_B = over_B & goes_B
    state = state._replace(
        length_B=state.length_B + step_B,
        sampled_B=count_B,
        hidden_BD=jnp.where(goes_B[:, None], hidden_BD, state.hidden_BD),
    )
    return jax.lax.cond(jnp.any(over_B), end, lambda s, _: s, state, over_B), over_B


def end(state: DecodeState, over_B: jax.Array) -> DecodeState:
    """The state without the sequences in these slots, and without prompts of which none is left."""
    e = state.requests
    column_P = jnp.arange(state.table_BP.shape[1])[None]
    own_BP = (column_P >= state.shared_B[:, None]) & (column_P < state.used_B[:, None])
    state = _release(state, state.table_BP, own_BP & over_B[:, None])
    unfinished_E = e.unfinished_E.at[state.request_B].add(-over_B.astype(jnp.int32), mode="drop")
    return state._replace(
        active_B=state.active_B & ~over_B, requests=e._replace(unfinished_E=unfinished_E)
    )


def close(state: DecodeState, page_tokens: int) -> DecodeState:
    """The state without the prompts of which no sample is left."""
    e = state.requests
    over_E = (e.unfinished_E <= 0) & (e.order_E < NEVER)

    def without(state: DecodeState) -> DecodeState:
        column_P = jnp.arange(e.table_EP.shape[1])[None]
        own_EP = column_P < -(-e.length_E // page_tokens)[:, None]
        state = _release(state, e.table_EP, own_EP & over_E[:, None])
        order_E = jnp.where(over_E, NEVER, e.order_E)
        return state._replace(requests=e._replace(order_E=order_E))

    return jax.lax.cond(jnp.any(over_E), without, lambda s: s, state)


def cancel(
    state: DecodeState, request_W: Any, sample_index_W: Any, page_tokens: int
) -> DecodeState:
    """The state without these samples, where they are still in slots."""
    same_BW = (state.request_B[:, None] == request_W[None]) & (
        state.sample_index_B[:, None] == sample_index_W[None]
    )
    return close(end(state, state.active_B & jnp.any(same_BW, axis=1)), page_tokens)
