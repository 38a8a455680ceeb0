"""How long things take at best, and a guess of how long they take: what is not compiled fact.

The roofline of a program is the longest of three times: its matrix products at the chip's peak, its
bytes at the rate of memory, and what it receives from other chips at the rate of all their links.
Nothing is faster. An estimate of a step is its rooflines divided by `UTILISATION`.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dapo_jax import attention_kernels, model
from dapo_jax.batching import max_micro_batches
from dapo_jax.config import Config, ModelConfig, RolloutConfig
from dapo_jax.planning.chips import Chip
from dapo_jax.planning.programs import Cache, scoring_passes
from dapo_jax.rollout import paged
from dapo_jax.rollout.programs import rollout_dtypes
from dapo_jax.rollout.spec import PREFILL_CHUNK_TOKENS

UTILISATION = 0.5  # assumed share of the roofline; not measured on any of these chips
ROW_FILL = 0.95  # assumed share of a packed row that holds tokens
SLOTS_BUSY = 0.9  # assumed share of the slots that hold a sequence while responses wait


class Roofline(NamedTuple):
    """Seconds of one call; None: the chip's rates, or the program's costs, are not known."""

    compute: float
    memory: float
    links: float

    @property
    def seconds(self) -> float:
        return max(self)

    @property
    def bound(self) -> str:
        return self._fields[self.index(self.seconds)]


def roofline(
    numbers: Mapping[str, Any],
    chip: Chip,
    trips: float | None = None,
    *,
    more_flops: float = 0.0,
    more_bytes: float = 0.0,
) -> Roofline | None:
    """Of one call of a program.

    Args:
        numbers: of `compiled.measure`.
        trips: micro-batches or tokens of the call; None: the most.
        more_flops, more_bytes: of kernels that do not say what they cost.
    """
    if chip.flops is None or chip.memory_rate is None or chip.link_rate is None:
        return None
    if not numbers["loops_counted"]:
        return None
    less = 0.0 if trips is None else numbers["trips"] - trips
    cost = lambda name: numbers[name] - less * numbers["each_trip"][name]
    return Roofline(
        (cost("flops") + more_flops) / chip.flops,
        (cost("bytes_accessed") + more_bytes) / chip.memory_rate,
        cost("wire_bytes") / chip.link_rate,
    )


def model_flops(config: Config, sequence_tokens: float) -> float:
    """Operations that training on one token needs, nothing computed twice:

        6 (parameters of matrix products) + 6 L N H S,   S the length of its sequence

    the second for causal attention: a token sees half of its sequence.
    """
    c = config.model
    layer = c.width * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
    layer += 3 * c.width * c.ff_width
    products = c.num_layers * layer + c.vocab_size * c.width
    attention = c.num_layers * c.num_heads * c.head_dim * sequence_tokens
    return 6.0 * (products + attention)


def _attention_flops(c: ModelConfig, sequence_tokens: float) -> float:
    """Of causal attention for one token of a sequence, forward."""
    return 2.0 * c.num_layers * c.num_heads * c.head_dim * sequence_tokens


def _kernel_flops(config: Config, chip: Chip, sequence_tokens: float, program: str) -> float:
    """Of a kernel's attention for one token of packed rows that are full of sequences of this many
    tokens S: forward, in an update also backward (seven products to the two of forward, as queries'
    gradients and those of keys each begin with the scores), and forward again unless remat keeps
    what the kernel gives: `dots` knows no kernels, and what flash attention gives has no name to be
    kept by.

    Flash attention computes all blocks of a row below the diagonal. Splash attention does those
    that a sequence touches, S / b + 1 of b tokens as sequences begin anywhere in one: so, a block
    that two share counted once, S^2 / 2 + 3 S b / 2 pairs a sequence; and no more than a row.
    """
    c, row = config.model, config.train.row_tokens
    kernel = c.attention if c.attention != "auto" else attention_kernels.KERNELS[chip.platform]
    if kernel == "flash":
        met = row + attention_kernels.FLASH_BLOCK
    else:
        full, block = attention_kernels.splash_size(row)
        met = min(sequence_tokens + 3 * block, full + block)
    passes = 1.0
    if program in ("train", "critic_train"):
        named = c.remat in ("attention", "attention_mlp") and kernel != "flash"
        passes = 1 + 3.5 + (0 if c.remat == "none" or named else 1)
    return passes * _attention_flops(c, met)


def decode_token(
    config: Config, chip: Chip, devices: int, *, slots: int, live: float, cached_tokens: float
) -> Roofline:
    """Of one token in all slots of one shard, by arithmetic: nothing is compiled. The weights are
    read once and the cache of every sequence; links are left out.

    Args:
        devices: that draw together.
        slots: all are computed, whether they hold a sequence or not.
        live: those that do.
        cached_tokens: in all of them together.
    """
    products = slots * model_flops(config, 0) / 3
    seen = 2 * cached_tokens / max(live, 1)  # causal attention sees half of a row on average
    flops = products + live * _attention_flops(config.model, seen)
    read = weight_bytes(config.model) + cached_tokens * token_bytes(config.model, config.rollout)
    return _split(chip, devices, flops, read)


def prefill_call(
    config: Config, chip: Chip, devices: int, *, prompts: int, prompt_tokens: int
) -> Roofline:
    """Of one call of prefill of one shard, by arithmetic as above.

    Args:
        prompt_tokens: to which prompts are padded.
    """
    tokens = prompts * prompt_tokens
    flops = tokens * model_flops(config, 0) / 3
    flops += tokens * _attention_flops(config.model, prompt_tokens)
    chunks = math.ceil(prompt_tokens / PREFILL_CHUNK_TOKENS)
    read = chunks * weight_bytes(config.model) + tokens * token_bytes(config.model, config.rollout)
    return _split(chip, devices, flops, read)


def _split(chip: Chip, devices: int, flops: float, read: float) -> Roofline:
    assert chip.flops is not None and chip.memory_rate is not None
    return Roofline(flops / devices / chip.flops, read / devices / chip.memory_rate, 0.0)


@functools.cache
def weight_bytes(c: ModelConfig) -> int:
    """Of the parameters that a decode step reads: as decoding has them, and of an embedding that is
    not the unembedding too no more than a few rows."""
    shapes: Any = jax.eval_shape(
        lambda params: rollout_dtypes(params, jnp.dtype(c.compute_dtype)), model.param_shapes(c)
    )
    size = lambda x: x.size * x.dtype.itemsize
    whole = sum(map(size, jax.tree.leaves(shapes)))
    return whole - (0 if c.tie_embeddings else size(shapes["embed"]))


@functools.cache
def token_bytes(c: ModelConfig, r: RolloutConfig) -> float:
    """Of keys and values of one token in all layers."""
    layout = paged.Layout("xla", r.page_tokens, c.compute_dtype, r.cache_dtype, None)
    return paged.page_bytes(c, layout) / r.page_tokens


def _group_tokens(config: Config, prompt_tokens: int, response_tokens: int) -> int:
    """Of the G responses to a prompt, with the prompt as often as it is in rows."""
    t, G = config.train, config.rollout.group_size
    copies = G
    if t.share_prompts:  # once in each row that the group needs; all but its last token is shared
        copies = min(G, math.ceil(G * (response_tokens + 1) / (t.row_tokens - prompt_tokens + 1)))
    return G * (response_tokens + 1) + copies * (prompt_tokens - 1)


def step(
    config: Config,
    programs: Mapping[str, Mapping[str, Any]],
    chip: Chip,
    devices: int,
    cache: Cache,
    *,
    response_tokens: int,
    prompt_tokens: int,
) -> dict[str, Any]:
    """An RL step for responses and prompts of these mean lengths: batch arithmetic, and seconds of
    each part at the roofline and as estimated; `assumptions` says what they rest on.

    Responses of prompts that dynamic sampling leaves out are not in it.
    """
    t, r = config.train, config.rollout
    responses = t.prompts_per_step * r.group_size
    tokens = t.prompts_per_step * _group_tokens(config, prompt_tokens, response_tokens)
    updates = t.prompts_per_step // t.prompts_per_update
    rows = math.ceil(tokens / updates / (t.row_tokens * ROW_FILL))
    micro = min(math.ceil(rows / t.rows_per_micro_batch), max_micro_batches(config))
    decoded = responses * response_tokens / (r.slots * SLOTS_BUSY)
    calls = max(decoded, r.max_response_tokens) / r.decode_steps
    times = {
        "weights": 1,
        "prefill": math.ceil(t.prompts_per_step / r.prefill_prompts),
        "decode": calls,
        "old_logprobs": scoring_passes(config) * updates,
        "train": updates,
        "critic_values": updates,
        "critic_train": updates,
    }
    parts = {}
    for name, number in times.items():
        if name not in programs or not number:
            continue
        batched = name not in ("prefill", "decode")
        kernels = programs[name]["uncounted_kernels"]
        more_flops = more_bytes = 0.0
        if kernels and name == "decode":
            held = config.rollout.slots / cache.shards * (prompt_tokens + response_tokens / 2)
            more_bytes = r.decode_steps * held * cache.slot_bytes / cache.slot_tokens
        elif kernels and batched:
            row = t.rows_per_micro_batch * t.row_tokens * micro / devices
            sequence = prompt_tokens + response_tokens
            more_flops = row * _kernel_flops(config, chip, sequence, name)
        one = roofline(
            programs[name],
            chip,
            micro if batched else None,
            more_flops=more_flops,
            more_bytes=more_bytes,
        )
        if one is None:
            continue
        at_best = number * one.seconds
        parts[name] = {
            "calls": number, "bound": one.bound, "roofline_seconds": at_best,
            "seconds": at_best / UTILISATION,
        }  # fmt: skip
    wanted = {"prefill", "decode", "train"} | (
        {"old_logprobs"} if scoring_passes(config) else set()
    )
    whole = wanted <= parts.keys()
    seconds = sum(part["seconds"] for part in parts.values())
    return {
        "response_tokens": response_tokens,
        "prompt_tokens": prompt_tokens,
        "responses": responses,
        "tokens": tokens,
        "updates": updates,
        "rows_per_update": rows,
        "micro_batches_per_update": micro,
        "parts": parts,
        "roofline_seconds": sum(p["roofline_seconds"] for p in parts.values()) if whole else None,
        "seconds": seconds if whole else None,
        "assumptions": (
            f"{UTILISATION:.0%} of the roofline; rows {ROW_FILL:.0%} full; {SLOTS_BUSY:.0%} of "
            f"the slots busy, and one response of {r.max_response_tokens:,} tokens to wait for; "
            "no time for rewards, the host, evaluation or checkpoints, nor for prompts that "
            "dynamic sampling leaves out; attention of kernels that do not say what they cost by "
            "its arithmetic, in training block by block over sequences of equal length"
        ),
    }
