"""What the engine is told, and what goes into its programs and comes out of them."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from dapo_jax.config import Config, MeshConfig, ModelConfig
from dapo_jax.models.sharding import BATCH_AXES, parts_of
from dapo_jax.rollout import kernels, paged
from dapo_jax.rollout.sampling import SamplingParams
from dapo_jax.types import Array, UserError

PREFILL_CHUNK_TOKENS = 512  # of a prompt, at most, that are prefilled at once


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """All that the compiled programs depend on besides the mesh."""

    model: ModelConfig
    layout: MeshConfig
    slots: int  # over all shards
    prefill_prompts: int  # over all shards
    max_prompt_tokens: int
    max_response_tokens: int
    stop_tokens: tuple[int, ...]
    params: SamplingParams  # of requests that do not say
    samples: int = 1  # of one prompt that share its pages
    page_tokens: int = 32
    num_pages: int | None = None  # over all shards; None: no sequence ever waits for one
    decode_steps: int = 8  # tokens a call
    prefill_chunk_tokens: int = PREFILL_CHUNK_TOKENS
    kernel: kernels.Kernel = "xla"
    kernel_refused: str | None = None  # why "auto" is XLA on a platform that has a kernel
    resumes: bool = False  # whether many samples come one by one, with what was drawn of them

    @property
    def shards(self) -> int:
        return math.prod((self.layout.data, self.layout.fsdp))

    @property
    def max_tokens(self) -> int:
        return self.max_prompt_tokens + self.max_response_tokens

    @property
    def table_pages(self) -> int:
        """Of one sequence at its longest."""
        return -(-self.max_tokens // self.page_tokens)

    @property
    def requests(self) -> int:
        """Of one shard: a batch of prompts beyond the slots, of which each may hold the last sample
        of a prompt of its own; two where a prompt is one sample, see `ahead`. With fewer, slots are
        empty because stragglers keep all entries."""
        B, P = self.slots // self.shards, self.prefill_prompts // self.shards
        return B + P + P // self.samples + B * self.resumes

    @property
    def max_in_flight(self) -> int:
        """Samples of all shards that are on the device at most, when there are prompts for more:
        two batches of prompts beyond the slots. What is begun early is begun for nothing when the
        batch is full, and no other process can draw it."""
        return self.slots + 2 * self.prefill_prompts * self.samples

    @property
    def cancelled(self) -> int:
        """Samples of one shard that a call of `cancel` names, at most: all that are in slots."""
        return self.slots // self.shards

    @property
    def shard_pages(self) -> int:
        """Of one shard, page 0 included."""
        if self.num_pages is not None:
            return self.num_pages // self.shards
        B, pages = self.slots // self.shards, lambda tokens: -(-tokens // self.page_tokens)
        # A sample shares the whole pages of its prompt and owns those from there on, unless it was
        # inserted by itself; one that comes asks for two more, see `slots.refill`.
        own = pages(self.max_response_tokens) + 1
        shared = self.requests * pages(self.max_prompt_tokens)
        return 1 + max(B * (own + 2) + shared, B * (self.table_pages + 2))

    @property
    def pool_layout(self) -> paged.Layout:
        heads_axis = dict(self.layout.rules)["kv_heads"]
        return paged.Layout(self.kernel, self.page_tokens, self.model.compute_dtype, heads_axis)

    def pages_bytes(self, number: int) -> int:
        """What so many pages take of a device, in all layers."""
        heads_parts = getattr(self.layout, self.pool_layout.heads_axis or "", 1)
        return number * paged.page_bytes(self.model, self.pool_layout) // heads_parts


def make_engine_config(
    config: Config,
    sizes: Mapping[str, int],
    max_prompt_tokens: int,
    stop_tokens: tuple[int, ...],
    *,
    platform: str,
    run_sizes: Mapping[str, int] | None = None,
) -> EngineConfig:
    """What the engine of a config is like on a mesh.

    Args:
        sizes: of the axes of the mesh that this process draws on.
        platform: of its devices, as JAX calls it.
        run_sizes: of the mesh that all draw on, see `sharding.rollout_mesh`; None: the same.

    Raises:
        UserError: the KV cache of `config.rollout.cache_gib` does not hold one sequence, or
            `config.rollout.kernel` is not for these devices or this model.
    """
    r = config.rollout
    parts = parts_of(BATCH_AXES, run_sizes or sizes) // parts_of(BATCH_AXES, sizes)
    pages: Any = {
        "page_tokens": r.page_tokens,
        "heads_parts": parts_of(dict(config.mesh.rules)["kv_heads"], sizes),
    }
    engine_config = EngineConfig(
        model=config.model,
        layout=dataclasses.replace(config.mesh, **sizes),
        slots=r.slots // parts,
        prefill_prompts=r.prefill_prompts // parts,
        max_prompt_tokens=max_prompt_tokens,
        max_response_tokens=r.max_response_tokens,
        stop_tokens=stop_tokens,
        params=SamplingParams.of(r),
        samples=r.group_size,
        page_tokens=r.page_tokens,
        decode_steps=r.decode_steps,
        kernel=kernels.choose(r.kernel, platform, config.model, **pages),
        kernel_refused=kernels.fallback(r.kernel, platform, config.model, **pages),
    )
    if r.cache_gib is not None:
        engine_config = dataclasses.replace(
            engine_config, num_pages=_num_pages(engine_config, r.cache_gib)
        )
    if config.dynamic_sampling.partial_rollouts:
        # Prompts with what was drawn before are longer than those that the pool was sized for.
        pages = engine_config.num_pages or engine_config.shard_pages * engine_config.shards
        engine_config = dataclasses.replace(engine_config, num_pages=pages, resumes=True)
    return engine_config


def _num_pages(c: EngineConfig, cache_gib: float) -> int | None:
    """Pages over all shards that the memory of each device holds; None if that is enough anyway."""
    page = c.pages_bytes(1)
    pages = int(cache_gib * 2**30 / page)
    prompt = -(-c.max_prompt_tokens // c.page_tokens)
    least = 1 + prompt + c.table_pages + 2
    if pages < least:
        raise UserError(
            f"config.rollout.cache_gib ({cache_gib:g}) holds {pages} pages of "
            f"{c.page_tokens} tokens, {page:,} bytes each on a device. One prompt of "
            f"{c.max_prompt_tokens} tokens and one sequence of {c.max_tokens} need {least}: "
            f"set it to {least * page / 2**30:.3g} or more, or make them shorter."
        )
    return None if pages >= c.shard_pages else pages * c.shards


def bucket_sizes(most: int) -> tuple[int, ...]:
    """Numbers of pages up to `most`, each about half of the next. Each has its program of prefill,
    so that below three there is no other: it would save little."""
    sizes = [most]
    while -(-sizes[0] // 2) >= 3:
        sizes.insert(0, -(-sizes[0] // 2))
    return tuple(sizes)


class Prefix(NamedTuple):
    """Prefilled prompts; a leading axis for the shards."""

    pages: tuple[Array, ...]  # [R, L, P * pages, ...] each: see `paged`
    hidden_RPD: Array  # after the last token
    length_RP: Array
    key_RP2: Array  # uint32: random keys of the prompts, from which those of samples are folded


class DecodeOutput(NamedTuple):
    """What a call of `decode` drew: R shards, at most k tokens in each of B slots."""

    token_RkB: Any
    log_prob_RkB: Any  # under the distribution that it was drawn from
    model_log_prob_RkB: Any  # under the untempered model
    flags_RkB: Any  # VALID, OVER, NOT_FINITE
    request_RkB: Any  # of the sample
    sample_index_RkB: Any
    waiting_Rk: Any  # samples that had found no slot when the token was drawn
    free_R: Any  # pages left


VALID, OVER, NOT_FINITE = 1, 2, 4
