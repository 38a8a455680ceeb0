"""Times attention of the 1.5B's shape (12 heads, 2 kv heads, 128, bfloat16) on one GPU.

    python -m tests.studies.gpu_attention

- Over pages, as decoding attends: 256 sequences of 640 and of 4,096 tokens, for some block sizes of
  `rollout/gpu_kernel.py`, besides a gather of the pages (XLA).
- In training: a row of 8,192 and of 16,384 tokens, of 1 and of 8 sequences, by cuDNN with several
  bounds on the number of sequences, and by JAX's flash attention.

Without a GPU it runs the smallest shapes, with kernels interpreted: for errors, not for times.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dapo_jax.models.attention import cudnn, kernels
from dapo_jax.rollout import gpu_kernel

N, K, H, PAGE = 12, 2, 128, 32
ON_GPU = jax.default_backend() != "cpu"
RUNS, LOOPS = (7, 16) if ON_GPU else (1, 1)
BLOCKS = (  # keys, warps, stages
    (64, 4, 2), (64, 4, 3), (64, 4, 4), (64, 2, 3), (64, 8, 3), (32, 4, 4), (32, 2, 4), (128, 4, 3),
    (128, 8, 2), (16, 1, 6),
)  # fmt: skip


def seconds(program: Callable[..., Any], *arguments: Any) -> float:
    """The median of some calls, after one that compiles."""
    jax.block_until_ready(program(*arguments))
    found = []
    for _ in range(RUNS):
        start = time.perf_counter()
        jax.block_until_ready(program(*arguments))
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def gathered(q: Any, k_pages: Any, v_pages: Any, table: Any, lengths: Any) -> jax.Array:
    """The same attention over a copy of the pages."""
    whole = lambda pages: pages[table].swapaxes(1, 2).reshape(len(q), K, -1, H)
    scores = jnp.einsum("bkgh,bksh->bkgs", q, whole(k_pages), preferred_element_type=jnp.float32)
    seen = jnp.arange(scores.shape[-1])[None, None, None] < lengths[:, None, None, None]
    weights = jax.nn.softmax(jnp.where(seen, scores * H**-0.5, -1e30), axis=-1)
    return jnp.einsum("bkgs,bksh->bkgh", weights.astype(q.dtype), whole(v_pages))


def over_pages(sequences: int, tokens: int) -> None:
    """Prints microseconds of one layer, and the rate at which keys and values are read."""
    used = -(-tokens // PAGE)
    normal = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
    k_pages, v_pages = (normal(i, 1 + sequences * used, K, PAGE, H) for i in (0, 1))
    q = normal(2, sequences, K, N // K, H)
    order = np.random.default_rng(0).permutation(sequences * used).reshape(sequences, used)
    given = k_pages, v_pages, jnp.asarray(1 + order, jnp.int32), jnp.full(sequences, tokens)
    size = 2 * sequences * tokens * K * H * 2
    expected = jax.jit(gathered)(q, *given)

    def line(name: str, attend: Callable[..., jax.Array]) -> None:
        apart = float(jnp.max(jnp.abs(jax.jit(attend)(q, *given) - expected)))
        again = lambda q, *given: jax.lax.fori_loop(0, LOOPS, lambda _, q: attend(q, *given), q)
        took = seconds(jax.jit(again), q, *given) / LOOPS
        print(f"{name:>32}: {1e6 * took:.0f} us, {size / took / 1e9:,.0f} GB/s, {apart:.1e} apart")

    print(f"{sequences} sequences of {tokens:,} tokens, one layer")
    line("gather", gathered)
    for gpu_kernel.KEYS, gpu_kernel.WARPS, gpu_kernel.STAGES in BLOCKS if ON_GPU else BLOCKS[:1]:
        name = f"keys {gpu_kernel.KEYS}, warps {gpu_kernel.WARPS}, stages {gpu_kernel.STAGES}"
        # A new function for each, as the program is cached by it.
        line(name, lambda *given: gpu_kernel.paged_attention(*given, interpret=not ON_GPU))


def in_training(tokens: int, sequences: int) -> None:
    """Prints milliseconds of the forward pass, and of both."""
    normal = lambda seed, heads: jax.random.normal(
        jax.random.key(seed), (1, tokens, heads, H), jnp.bfloat16
    )
    arrays = normal(0, N), normal(1, K), normal(2, K)
    segments = jnp.repeat(jnp.arange(1, sequences + 1, dtype=jnp.int32), tokens // sequences)[None]
    default = cudnn.most_segments
    print(f"a row of {tokens:,} tokens, {sequences} sequences")
    for kernel, most in (("cudnn", 32), ("cudnn", 128), ("cudnn", 256), ("flash", None)):
        if most is not None:
            cudnn.most_segments = lambda row_tokens, most=most: most
        choice = kernels.Choice(kernel, jax.default_backend())
        attend = lambda *x, choice=choice: kernels.attend(choice, segments, *x, None)
        total = lambda *x, attend=attend: jnp.sum(attend(*x).astype(jnp.float32))
        forward, both = jax.jit(attend), jax.jit(jax.grad(total, (0, 1, 2)))
        times = [1e3 * seconds(program, *arrays) for program in (forward, both)]
        name = kernel if most is None else f"{kernel}, bound {most}"
        print(f"{name:>32}: forward {times[0]:.2f} ms, with backward {times[1]:.2f} ms")
    cudnn.most_segments = default


if __name__ == "__main__":
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    for tokens in (640, 4096) if ON_GPU else (96,):
        over_pages(256 if ON_GPU else 2, tokens)
    for tokens, sequences in ((8192, 1), (8192, 8), (16_384, 1), (16_384, 8)) if ON_GPU else ():
        in_training(tokens, sequences)
