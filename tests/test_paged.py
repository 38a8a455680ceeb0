"""Attention over pages: what it reads and writes, and what is handed to the TPU's kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu import ragged_paged_attention as kernel_module
from jax.experimental.pallas.ops.tpu.ragged_paged_attention.kernel import (
    ref_ragged_paged_attention,
)

from dapo_jax import attention
from dapo_jax.rollout import paged

B, K, G, H, A, P, N = 3, 2, 3, 16, 4, 5, 16  # N: pages, of which the first is nobody's
LENGTHS = np.array([0, 9, 18], np.int32)


@pytest.fixture
def problem():
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    table = rng.permutation(np.arange(1, N))[: B * P].reshape(B, P).astype(np.int32)
    k, v = draw(2, 1, (N - 1) * A, K, H), draw(2, 1, (N - 1) * A, K, H)
    return k, v, jnp.asarray(table), draw(B, 1, K * G, H), draw(B, 1, K, H), draw(B, 1, K, H)


def pool_of(layout, k, v):
    pages = paged.from_dense(layout, k, v)
    return jnp.concatenate([jnp.zeros_like(pages[:, :1]), pages], axis=1)


@pytest.mark.parametrize("kernel", ["xla", "tpu"])
def test_pages_are_put_and_copied_one_by_one(problem, kernel):
    k, v, *_ = problem
    layout = paged.Layout(kernel, A, "float32")
    pool, new = pool_of(layout, k, v), paged.from_dense(layout, v, k)[:, :3]
    where, source = jnp.array([5, 0, 9]), jnp.array([2, 0, 1])
    expected = np.array(pool)
    expected[:, [5, 0, 9]] = new
    np.testing.assert_array_equal(paged.put(pool, where, new), expected)
    expected = np.array(pool)
    expected[:, [5, 9]] = expected[:, [2, 1]]
    np.testing.assert_array_equal(paged.copied(pool, source, where), expected)
    # Either would make XLA lay the pool out another way on TPUs, see `paged.put`.
    for program in (
        jax.make_jaxpr(paged.put)(pool, where, new),
        jax.make_jaxpr(paged.copied)(pool, source, where),
    ):
        assert not {"scatter", "gather"} & set(str(program).replace("[", " ").split())


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("kernel", ["xla", "tpu"])
def test_a_token_attends_to_its_own_pages_and_is_kept_there(monkeypatch, problem, kernel, window):
    """Against attention over each sequence laid out whole. The TPU's kernel is stood in for by
    JAX's own statement of what it computes: interpret mode does not take it (jax 0.10.2, "no
    attribute 'indices'")."""

    def stated(q, pages, lengths, table, starts, num, *, sm_scale, sliding_window, **blocks):
        return ref_ragged_paged_attention(
            q, pages, lengths, table, starts, num, sm_scale=sm_scale, sliding_window=sliding_window
        )

    monkeypatch.setattr(kernel_module, "ragged_paged_attention", stated)
    k, v, table, q, k_new, v_new = problem
    layout = paged.Layout(kernel, A, "float32")
    goes = jnp.array([True, True, False])
    attend = paged.decoding(layout, table, jnp.asarray(LENGTHS), goes)
    before = pool_of(layout, k, v)
    out, after = attend(1, q, k_new, v_new, before, window)
    for b in (0, 1):
        own = (np.asarray(table)[b][:, None] - 1) * A + np.arange(A)
        k_S, v_S = (np.array(x)[1, 0, own.reshape(-1)] for x in (k, v))
        k_S[LENGTHS[b]], v_S[LENGTHS[b]] = k_new[b, 0], v_new[b, 0]
        back = LENGTHS[b] - np.arange(P * A)
        seen = (back >= 0) & (back < (window or 10**6))
        expected = attention.dot_product_attention(
            q[b : b + 1],
            jnp.asarray(k_S)[None],
            jnp.asarray(v_S)[None],
            jnp.asarray(seen)[None, None],
        )
        np.testing.assert_allclose(out[b], expected[0], rtol=0, atol=2e-6)
    # Of what is in the pages only the new tokens of those that go on have changed, in their layer.
    changed = np.asarray(before != after).any(axis=tuple(range(2, before.ndim)))
    owners = {int(table[b, LENGTHS[b] // A]) for b in (0, 1)}
    assert set(np.flatnonzero(changed[1])) == owners | {0} and not changed[0].any()
