"""The engine's config: all that its compiled programs depend on besides the mesh."""

import dataclasses
import math
from collections.abc import Mapping

from dapo_jax.config import Config, MeshConfig, ModelConfig
from dapo_jax.models.sharding import BATCH_AXES, parts_of
from dapo_jax.rollout import paged, paged_kernels
from dapo_jax.rollout.sampling import SamplingParams
from dapo_jax.types import UserError

PREFILL_CHUNK_TOKENS = 512  # most tokens of a prompt that are prefilled at once


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Sizes, layout and kernel of an engine."""

    model: ModelConfig
    layout: MeshConfig
    slots: int  # over all shards
    prefill_prompts: int  # over all shards
    max_prompt_tokens: int
    max_response_tokens: int
    stop_tokens: tuple[int, ...]
    params: SamplingParams  # of requests without their own
    samples: int = 1  # most samples of a request: they share the pages of its prompt
    page_tokens: int = 32
    num_pages: int | None = None  # over all shards; None: no sequence ever waits for a page
    decode_steps: int = 8  # tokens a call
    prefill_chunk_tokens: int = PREFILL_CHUNK_TOKENS
    kernel: paged_kernels.Kernel = "xla"
    kernel_refused: str | None = None  # why "auto" is XLA on a platform that has a kernel
    resumes: bool = False  # whether many requests are one sample each, resumed with its tokens

    @property
    def shards(self) -> int:
        return self.layout.data * self.layout.fsdp

    @property
    def shard_slots(self) -> int:
        return self.slots // self.shards

    @property
    def max_tokens(self) -> int:
        return self.max_prompt_tokens + self.max_response_tokens

    @property
    def table_pages(self) -> int:
        """Pages in one sequence's page table."""
        return self.pages(self.max_tokens)

    @property
    def requests(self) -> int:
        """Requests of one shard: one for each slot, and a batch of prompts beyond the slots.

        Each slot may hold the last sample of a prompt of its own. With fewer requests, slots would
        be empty because stragglers keep all of them. Where a prompt is one sample, two batches are
        in flight, see `max_in_flight`.
        """
        B, P = self.shard_slots, self.prefill_prompts // self.shards
        return B + P + P // self.samples + B * self.resumes

    @property
    def max_in_flight(self) -> int:
        """Most samples of all shards on the device: two batches of prompts beyond the slots.

        Samples started early are lost when the batch is full, and no other process can take them.
        """
        return self.slots + 2 * self.prefill_prompts * self.samples

    @property
    def shard_pages(self) -> int:
        """Pages of one shard, page 0 included."""
        if self.num_pages is not None:
            return self.num_pages // self.shards
        # A sample shares the whole pages of its prompt and owns those from there on. One that comes
        # asks for two more, see `slots.refill`.
        own = self.pages(self.max_response_tokens) + 1
        shared = self.requests * self.pages(self.max_prompt_tokens)
        return 1 + self.shard_slots * (own + 2) + shared

    @property
    def heads_axis(self) -> str | None:
        """The mesh axis that the kv heads of a shard lie over; None: a device has all of them."""
        return _heads_axis(self.layout)

    @property
    def pool_layout(self) -> paged.Layout:
        c = self.model
        return paged.Layout(
            self.kernel, self.page_tokens, c.compute_dtype, self.heads_axis, c.kernel_blocks
        )

    def pages(self, tokens: int) -> int:
        """Returns the number of pages that hold so many tokens."""
        return -(-tokens // self.page_tokens)

    def pages_bytes(self, number: int) -> int:
        """Returns the bytes of so many pages on a device, in all layers."""
        heads_parts = getattr(self.layout, self.heads_axis or "", 1)
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
    """Returns the engine config of a run on a mesh.

    Args:
        sizes: axis sizes of the mesh that this process generates on.
        platform: of its devices, as JAX calls it.
        run_sizes: axis sizes of all processes' mesh, see `sharding.rollout_mesh`; None: the same.

    Raises:
        UserError: the KV cache of `config.rollout.cache_gib` does not hold one sequence, or
            `config.rollout.kernel` is not for these devices or this model.
    """
    r = config.rollout
    parts = parts_of(BATCH_AXES, run_sizes or sizes) // parts_of(BATCH_AXES, sizes)
    heads_parts = parts_of(_heads_axis(config.mesh), sizes)
    kernel, refused = paged_kernels.choose(
        r.kernel, platform, config.model, page_tokens=r.page_tokens, heads_parts=heads_parts
    )
    made = EngineConfig(
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
        kernel=kernel,
        kernel_refused=refused,
    )
    if r.cache_gib is not None:
        made = dataclasses.replace(made, num_pages=_num_pages(made, r.cache_gib))
    if config.rollout.resumes:
        # The pool is sized for prompts without the tokens that were sampled before.
        pages = made.num_pages or made.shard_pages * made.shards
        made = dataclasses.replace(made, num_pages=pages, resumes=True)
    return made


def _heads_axis(layout: MeshConfig) -> str | None:
    axis = dict(layout.rules)["kv_heads"]
    return None if axis in BATCH_AXES else axis  # a shard of the batch has all heads


def _num_pages(c: EngineConfig, cache_gib: float) -> int | None:
    """Pages over all shards that each device's memory holds; None where that is always enough."""
    page = c.pages_bytes(1)
    pages = math.floor(cache_gib * 2**30 / page)
    least = 1 + c.pages(c.max_prompt_tokens) + c.table_pages + 2
    if pages < least:
        needed = math.ceil(1000 * least * page / 2**30) / 1000  # rounded up: it has to be enough
        raise UserError(
            f"config.rollout.cache_gib ({cache_gib:g}) holds {pages} pages of "
            f"{c.page_tokens} tokens, {page:,} bytes each on a device. One prompt of "
            f"{c.max_prompt_tokens} tokens and one sequence of {c.max_tokens} need {least}: "
            f"set it to {needed} or more, or make them shorter."
        )
    return None if pages >= c.shard_pages else pages * c.shards


def bucket_sizes(most: int) -> tuple[int, ...]:
    """Returns the numbers of pages that prompts are padded to: up to `most`, each half of the next.

    Each has a prefill program of its own. Below three a smaller one would save little.
    """
    sizes = [most]
    while -(-sizes[0] // 2) >= 3:
        sizes.insert(0, -(-sizes[0] // 2))
    return tuple(sizes)
