"""Paged attention of one query a sequence on NVIDIA GPUs: a Pallas kernel, lowered to Triton.

Each program attends with the queries of one kv head of one sequence to one part of its tokens
(flash-decoding: https://pytorch.org/blog/flash-decoding); parts are joined by their log-sum-exps.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

# Keys of a block, warps and stages of a program: of those measured on an H200 (docs/rollout.md) the
# fastest for 640 tokens.
KEYS, WARPS, STAGES = 64, 4, 2
QUERIES = 16  # at least, as rows of a product of Triton; fewer are padded
# A long sequence is cut into parts of at most this many tokens; and there are at least so many
# programs, if there are tokens for them, to give each of 132 processors some.
PART_TOKENS, LEAST_PROGRAMS = 2048, 528
MASKED = -1e30


def parts(sequences_and_heads: int, tokens: int) -> int:
    """Returns the parts that the tokens of each sequence are cut into.

    Args:
        sequences_and_heads: programs without any cut.
        tokens: of the longest sequence that the page table holds.
    """
    wanted = max(-(-tokens // PART_TOKENS), -(-LEAST_PROGRAMS // sequences_and_heads))
    return min(wanted, -(-tokens // KEYS))


def paged_attention(
    q_BKGH: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    table_BJ: jax.Array,
    lengths_B: jax.Array,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Returns softmax(q k^T / sqrt(H)) v of the first `lengths_B` tokens of each page list.

    Args:
        q_BKGH: G queries for each kv head.
        k_pages, v_pages: [pages, K, page, H].
        table_BJ: the pages of each sequence, in order.
        lengths_B: at least 1.
        interpret: run the kernel's steps as JAX operations, on a CPU.
    """
    B, K, G, H = q_BKGH.shape
    A, J = k_pages.shape[2], table_BJ.shape[1]
    S = parts(B * K, J * A)
    part = -(-J * A // (S * KEYS)) * KEYS
    Q = max(QUERIES, pl.next_power_of_2(G))
    # Exponentials to base 2 are one instruction.
    q_BKQH = (q_BKGH * (H**-0.5 * math.log2(math.e))).astype(q_BKGH.dtype)
    q_BKQH = jnp.pad(q_BKQH, ((0, 0), (0, 0), (0, Q - G), (0, 0)))
    rows = lambda pages: pages.reshape(-1, H)
    of_head = lambda b, k, s: (b, k, 0, 0)
    of_part = lambda b, k, s: (s, b, k, 0)
    whole = pl.BlockSpec((k_pages.size // H, H), lambda b, k, s: (0, 0))
    sums = jax.ShapeDtypeStruct((S, B, K, Q), jnp.float32)
    out_SBKQH, log_sum_SBKQ = pl.pallas_call(
        functools.partial(_attend, page_tokens=A, kv_heads=K, part_tokens=part),
        grid=(B, K, S),
        in_specs=[
            pl.BlockSpec((None, None, Q, H), of_head),
            whole,
            whole,
            pl.BlockSpec((None, J), lambda b, k, s: (b, 0)),
            pl.BlockSpec((None,), lambda b, k, s: (b,)),
        ],
        out_specs=[
            pl.BlockSpec((None, None, None, Q, H), lambda b, k, s: (s, b, k, 0, 0)),
            pl.BlockSpec((None, None, None, Q), of_part),
        ],
        out_shape=[jax.ShapeDtypeStruct((S, B, K, Q, H), jnp.float32), sums],
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=STAGES),
        interpret=interpret,
        name="paged_attention",
    )(q_BKQH, rows(k_pages), rows(v_pages), table_BJ, lengths_B)
    out, log_sum = out_SBKQH[:, :, :, :G], log_sum_SBKQ[:, :, :, :G, None]
    if S == 1:
        return out[0].astype(q_BKGH.dtype)
    weights = jnp.exp2(log_sum - jnp.max(log_sum, axis=0, keepdims=True))
    joined = jnp.sum(out * weights, axis=0) / jnp.sum(weights, axis=0)
    return joined.astype(q_BKGH.dtype)


def _attend(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    table_ref: Any,
    length_ref: Any,
    out_ref: Any,
    log_sum_ref: Any,
    *,
    page_tokens: int,
    kv_heads: int,
    part_tokens: int,
) -> None:
    """One program: the softmax over a part of the tokens, and its log-sum-exp (base 2)."""
    head, part = pl.program_id(1), pl.program_id(2)
    length = length_ref[...]
    start = part * part_tokens
    end = jnp.minimum(length, start + part_tokens)
    q_QH = q_ref[...]
    Q, H = q_QH.shape

    def block(i: jax.Array, carry: Any) -> Any:
        sum_QH, most_Q, total_Q = carry
        token_T = start + i * KEYS + jnp.arange(KEYS, dtype=jnp.int32)
        # Beyond the end the last token is read, and not used.
        token_T = jnp.minimum(token_T, end - 1)
        page_T = table_ref[token_T // page_tokens]
        row_T = (page_T * kv_heads + head) * page_tokens + token_T % page_tokens
        k_TH, v_TH = k_ref[row_T, :], v_ref[row_T, :]
        score_QT = triton.dot(q_QH, k_TH.T)
        seen_T = start + i * KEYS + jnp.arange(KEYS, dtype=jnp.int32) < end
        score_QT = jnp.where(seen_T[None], score_QT, MASKED)
        now_Q = jnp.maximum(most_Q, jnp.max(score_QT, axis=1))
        weight_QT = jnp.exp2(score_QT - now_Q[:, None])
        before_Q = jnp.exp2(most_Q - now_Q)
        sum_QH = sum_QH * before_Q[:, None] + triton.dot(weight_QT.astype(v_TH.dtype), v_TH)
        return sum_QH, now_Q, total_Q * before_Q + jnp.sum(weight_QT, axis=1)

    zeros = jnp.zeros((Q, H), jnp.float32)
    none = jnp.full(Q, MASKED, jnp.float32), jnp.zeros(Q, jnp.float32)
    num = pl.cdiv(jnp.maximum(end - start, 0), KEYS)
    sum_QH, most_Q, total_Q = jax.lax.fori_loop(0, num, block, (zeros, *none))
    # A part without tokens has a sum of 0 and the least log-sum-exp: it joins with weight 0.
    total_Q = jnp.maximum(total_Q, 1e-30)
    out_ref[...] = sum_QH / total_Q[:, None]
    log_sum_ref[...] = most_Q + jnp.log2(total_Q)
