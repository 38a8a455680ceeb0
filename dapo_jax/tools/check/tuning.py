"""launch/check.py --tune: block sizes of the TPU's attention kernels, measured.

A group of sizes is tried at a time, with the best of the groups before. A size that the compiler
refuses, mostly for lack of vector memory, is passed over.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dapo_jax.config import ModelConfig
from dapo_jax.models.attention import kernels
from dapo_jax.rollout import paged_kernels
from dapo_jax.tools.bench.shapes import bench_model
from dapo_jax.tools.bench.train import median_seconds
from dapo_jax.tools.check.machine import DECODING_BYTES, Machine
from dapo_jax.types import error_line

FILE = "tune.json"
SLOTS, CACHED_TOKENS, PAGE_TOKENS, ROW_TOKENS = 64, 4096, 128, 8192
LEAST_GAIN = 0.02  # share of the default's seconds; what gains less is left at its default

Blocks = tuple[tuple[str, int], ...]
Program = tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...]]


class Group(NamedTuple):
    """Sizes that are tried together."""

    pass_: str  # decode, forward or backward
    candidates: tuple[Mapping[str, int], ...]


def _splash(suffix: str, sizes: Sequence[tuple[int, ...]]) -> tuple[Mapping[str, int], ...]:
    names = (f"splash_q{suffix}", f"splash_kv{suffix}", f"splash_kv{suffix}_compute")
    return tuple(dict(zip(names, of)) for of in sizes)


# By queries: keys fetched, and keys computed at once.
KEYS = {
    256: ((256, 256), (1024, 512)),
    512: ((512, 512), (1024, 512), (1024, 1024), (2048, 512)),
    1024: ((512, 512), (1024, 512), (1024, 1024), (2048, 512), (2048, 1024)),
    2048: ((1024, 512), (2048, 512)),
}
SIZES = tuple((queries, *keys) for queries, of in KEYS.items() for keys in of)
GROUPS = (
    Group("decode", tuple({"paged_kv": tokens} for tokens in (128, 256, 512, 1024, 2048, 4096))),
    Group("decode", tuple({"paged_queries": n} for n in (1, 2, 4, 8))),
    Group("forward", _splash("", SIZES)),
    Group("backward", _splash("_dkv", SIZES)),
    Group("backward", _splash("_dq", sorted({of[:2] for of in SIZES}))),
)


def groups(c: ModelConfig) -> list[Group]:
    """Returns the groups of the kernels that a model has on a TPU."""
    decodes, _ = paged_kernels.choose("auto", "tpu", c, page_tokens=PAGE_TOKENS)
    return [of for of in GROUPS if of.pass_ != "decode" or decodes == "tpu"]


def program(c: ModelConfig, pass_: str, blocks: Blocks) -> Program:
    """Returns the attention of one layer, and the shapes of its arguments.

    Args:
        pass_: "decode": of a token in each of `SLOTS` slots; "forward": of a packed row of
            `ROW_TOKENS`; "backward": with its gradients.
    """
    N, K, H, dtype = c.num_heads, c.num_kv_heads, c.head_dim, jnp.dtype(c.compute_dtype)
    shape = jax.ShapeDtypeStruct
    if pass_ == "decode":
        P = CACHED_TOKENS // PAGE_TOKENS

        def decode(q: jax.Array, pages: jax.Array, table: jax.Array, lengths: jax.Array) -> Any:
            return paged_kernels.tpu_attention(q, pages, table, lengths, None, None, blocks)

        return decode, (
            shape((SLOTS, N, H), dtype),
            shape((1 + SLOTS * P, PAGE_TOKENS, 2 * K, H), dtype),
            shape((SLOTS, P), jnp.int32),
            shape((SLOTS,), jnp.int32),
        )
    choice = kernels.Choice("splash", "tpu", blocks=blocks)

    def forward(q: jax.Array, k: jax.Array, v: jax.Array, segments_BT: jax.Array) -> jax.Array:
        return kernels.attend(choice, segments_BT, q, k, v, None)

    def backward(q: jax.Array, k: jax.Array, v: jax.Array, segments_BT: jax.Array) -> Any:
        total = lambda q, k, v: jnp.sum(forward(q, k, v, segments_BT).astype(jnp.float32))
        return jax.grad(total, (0, 1, 2))(q, k, v)

    rows = [shape((1, ROW_TOKENS, heads, H), dtype) for heads in (N, K, K)]
    return {"forward": forward, "backward": backward}[pass_], (
        *rows,
        shape((1, ROW_TOKENS), jnp.int32),
    )


def values(pass_: str, shapes: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
    """Returns arguments for `program`: sequences of several lengths, each page of its own."""
    arrays = [jnp.ones(x.shape, x.dtype) for x in shapes]
    if pass_ == "decode":
        arrays[2] = 1 + jnp.arange(shapes[2].shape[0] * shapes[2].shape[1]).reshape(arrays[2].shape)
        arrays[3] = jnp.linspace(CACHED_TOKENS // 8, CACHED_TOKENS, SLOTS).astype(jnp.int32)
    else:
        arrays[3] = 1 + jnp.searchsorted(
            jnp.asarray([ROW_TOKENS // 2, 3 * ROW_TOKENS // 4]), jnp.arange(ROW_TOKENS), "right"
        ).astype(jnp.int32).reshape(1, -1)
    return arrays


def measured(
    c: ModelConfig, pass_: str, blocks: Blocks, say: Callable[[str], None]
) -> float | None:
    """Returns the seconds of `program` on this device; None: the compiler refuses it."""
    run, shapes = program(c, pass_, blocks)
    arguments = values(pass_, shapes)
    try:
        compiled = jax.jit(run).lower(*arguments).compile()
    except Exception as error:  # Mosaic's and XLA's own, of several kinds
        say(f"  {dict(blocks)}: {error_line(error)}")
        return None
    return median_seconds(lambda: compiled(*arguments))


def best(
    groups: Sequence[Group], seconds: Callable[[str, Blocks], float | None]
) -> tuple[Blocks, list[dict[str, Any]]]:
    """Returns the fastest sizes, and every measurement. A size that gains less than LEAST_GAIN is
    left at its default.

    Args:
        seconds: of a pass with these blocks; None: they do not work.
    """
    chosen: Blocks = ()
    lines: list[dict[str, Any]] = []
    for group in groups:
        least = seconds(group.pass_, chosen)
        lines.append({"pass": group.pass_, "blocks": dict(chosen), "seconds": least})
        wanted = None if least is None else least * (1 - LEAST_GAIN)
        found = chosen
        for candidate in group.candidates:
            blocks = (*chosen, *candidate.items())
            took = seconds(group.pass_, blocks)
            lines.append({"pass": group.pass_, "blocks": dict(blocks), "seconds": took})
            if took is not None and (wanted is None or took < wanted):
                wanted, found = took, blocks
        chosen = found
    return chosen, lines


def flag(blocks: Blocks) -> str:
    """Returns the flag that sets these sizes in a run's config."""
    return f'--config.model.kernel_blocks="{blocks!r}"'.replace(" ", "")


def tune(machine: Machine, output: Path, say: Callable[[str], None]) -> None:
    """Measures the models that fit this machine, and writes what is best to tune.json.

    Only the TPU's kernels have block sizes; elsewhere there is nothing to do.
    """
    if machine.platform != "tpu":
        say(
            f"nothing to tune here: config.model.kernel_blocks are of TPU kernels, and this is a "
            f"{machine.platform}"
        )
        return
    found = {}
    for name, shape in machine.models(DECODING_BYTES).items():
        c = bench_model(shape)
        blocks, lines = best(groups(c), lambda pass_, blocks, c=c: measured(c, pass_, blocks, say))
        found[name] = {"kernel_blocks": blocks, "measured": lines}
        say(f"{name}: {flag(blocks) if blocks else 'the defaults are the fastest'}")
        content = {"machine": machine.identity(), "models": found}
        (output / FILE).write_text(json.dumps(content, indent=1) + "\n")
