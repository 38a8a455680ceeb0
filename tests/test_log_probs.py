"""The exact KL to a reference, against a sum over the vocabulary in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax import log_probs


def distribution(hidden, unembed, temperature):
    z = np.einsum("btd,vd->btv", hidden, unembed) / temperature
    p = np.exp(z - z.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


@pytest.mark.parametrize("chunk_tokens", [1, 7, 10**6])
def test_full_kl_is_the_sum_over_the_vocabulary(chunk_tokens):
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        hidden, unembed = rng.standard_normal((2, 6, 5)), rng.standard_normal((11, 5))
        ref_hidden, ref_unembed = rng.standard_normal((2, 6, 3)), rng.standard_normal((11, 3))
        targets = jnp.asarray(rng.integers(0, 11, (2, 6)))

        def total(hidden, unembed, ref_hidden, ref_unembed):
            statistics = log_probs.token_statistics(
                hidden, unembed, targets, temperature=0.7, chunk_tokens=chunk_tokens,
                reference=(ref_hidden, ref_unembed),
            )  # fmt: skip
            return jnp.sum(statistics.kl_BT), statistics.kl_BT

        arguments = [jnp.asarray(x) for x in (hidden, unembed, ref_hidden, ref_unembed)]
        (_, kl), grads = jax.value_and_grad(total, argnums=(0, 1, 2, 3), has_aux=True)(*arguments)
        p = distribution(hidden, unembed, 0.7)
        q = distribution(ref_hidden, ref_unembed, 0.7)
        each = (p * (np.log(p) - np.log(q))).sum(-1)
        np.testing.assert_allclose(kl, each, rtol=1e-10)
        assert (each > 0).all()
        # d KL / d logits = p (log p - log q - KL), divided by the temperature.
        slope = p * (np.log(p) - np.log(q) - each[..., None]) / 0.7
        by_hand = np.einsum("btv,vd->btd", slope, unembed)
        np.testing.assert_allclose(grads[0], by_hand, rtol=1e-8, atol=1e-12)
        np.testing.assert_allclose(grads[1], np.einsum("btv,btd->vd", slope, hidden), atol=1e-10)
        assert not grads[2].any() and not grads[3].any(), "the reference takes no gradient"


def test_the_kl_to_itself_is_zero():
    x = jnp.asarray(np.random.default_rng(1).standard_normal((1, 4, 5)), jnp.float32)
    unembed = jnp.asarray(np.random.default_rng(2).standard_normal((9, 5)), jnp.float32)
    kl_BT = log_probs.token_statistics(
        x, unembed, jnp.zeros((1, 4), jnp.int32), temperature=1.0, chunk_tokens=2,
        reference=(x, unembed),
    ).kl_BT  # fmt: skip
    np.testing.assert_allclose(kl_BT, 0.0, atol=1e-7)
