"""The compiled programs of a run and what they need: data, engines, learner."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from dapo_jax import attention_kernels
from dapo_jax.config import Config
from dapo_jax.data import ProblemStream
from dapo_jax.learner import Learner
from dapo_jax.problems import load, rubrics
from dapo_jax.processes import ALONE, Processes
from dapo_jax.progress import Progress
from dapo_jax.rollout import kernels
from dapo_jax.rollout.engine import DecoderEngine
from dapo_jax.rollout.paged import page_bytes
from dapo_jax.rollout.sampling import SamplingParams
from dapo_jax.rollout.spec import EngineSpec
from dapo_jax.sharding import (
    batch_shards,
    check_batch_shapes,
    head_layout,
    make_mesh,
    own_mesh,
    rollout_mesh,
    team_size,
)
from dapo_jax.teams import Team
from dapo_jax.tokenizer import load_tokenizer, stop_tokens
from dapo_jax.types import UserError


class Trainer:
    """The compiled programs and the host objects of a run."""

    def __init__(self, config: Config, workdir: Path, progress: Progress, them: Processes = ALONE):
        self.config, self.progress = config, progress
        self.mesh = make_mesh(config.mesh)
        check_batch_shapes(config, self.mesh.shape)
        layout = head_layout(config.model, config.mesh, self.mesh)
        share_prompts = config.train.share_prompts
        attention_kernels.choose(config.model, layout, share_prompts=share_prompts)
        save_to = workdir / "tokenizer" if them.first else None
        self.tokenizer = load_tokenizer(config.model, save_to=save_to)
        d = config.data
        sides = {"train": d.train, "heldout": d.heldout}
        problems = {
            side: load(
                config, chosen, self.tokenizer, field=f"config.data.{side}", say=progress.say
            )
            for side, chosen in sides.items()
        }
        self.heldout = problems["heldout"]
        self.train_rubrics, self.heldout_rubrics = (
            rubrics(config, chosen) for chosen in sides.values()
        )
        weights = {name: source.weight or 0.0 for name, source in d.train.items()}
        self.stream = ProblemStream(problems["train"], config.seed, weights)
        self.key = jax.random.key(config.seed)
        self.engine = make_engine(
            config, self.mesh, self.tokenizer, max_prompt_tokens=config.data.max_prompt_tokens
        )
        self.team = Team(them, team_size(self.engine.mesh))
        self.learner = Learner(config, self.mesh, self.detokenize, progress.say, progress.doing)

    def detokenize(self, sequences: Sequence[np.ndarray]) -> list[str]:
        return self.tokenizer.batch_decode(sequences, skip_special_tokens=True)


def make_engine(
    config: Config,
    mesh: Mesh,
    tokenizer: Any,
    *,
    max_prompt_tokens: int,
) -> DecoderEngine:
    """The engine that draws responses of the config's model, as `config.rollout` says unless a
    request says otherwise. Of several processes each has one, on its own devices, with its share of
    the slots; or those that draw together have one.

    Raises:
        UserError: the KV cache of `config.rollout.cache_gib` does not hold one sequence.
    """
    stops = stop_tokens(config.model, tokenizer)
    everywhere = rollout_mesh(mesh, config.mesh.rollout_tensor)
    own = own_mesh(everywhere)
    spec = engine_spec(config, own, max_prompt_tokens, stops, everywhere)
    return DecoderEngine(spec, own, mesh)


def engine_spec(
    config: Config,
    mesh: Mesh,
    max_prompt_tokens: int,
    stop_tokens: tuple[int, ...],
    run_mesh: Mesh | None = None,
) -> EngineSpec:
    """What the engine of a config is like on a mesh.

    Args:
        mesh: that this process draws on.
        run_mesh: that all draw on, see `sharding.rollout_mesh`; None: `mesh` is all of it.

    Raises:
        UserError: the KV cache of `config.rollout.cache_gib` does not hold one sequence, or
            `config.rollout.kernel` is not for these devices or this model.
    """
    r = config.rollout
    parts = batch_shards(run_mesh or mesh) // batch_shards(mesh)
    kv_axis = dict(config.mesh.rules)["kv_heads"]
    spec = EngineSpec(
        model=config.model,
        layout=dataclasses.replace(config.mesh, **mesh.shape),
        slots=r.slots // parts,
        prefill_prompts=r.prefill_prompts // parts,
        max_prompt_tokens=max_prompt_tokens,
        max_response_tokens=r.max_response_tokens,
        stop_tokens=stop_tokens,
        params=SamplingParams.of(r),
        samples=r.group_size,
        page_tokens=r.page_tokens,
        decode_steps=r.decode_steps,
        prefill_chunk_tokens=r.prefill_chunk_tokens,
        kernel=kernels.choose(
            r.kernel,
            mesh.devices.flat[0].platform,
            config.model,
            page_tokens=r.page_tokens,
            cache_dtype=r.cache_dtype,
            heads_parts=mesh.shape[kv_axis] if kv_axis else 1,
        ),
        cache_dtype=r.cache_dtype,
    )
    if r.cache_gib is not None:
        spec = dataclasses.replace(spec, num_pages=_num_pages(spec, mesh, r.cache_gib))
    if config.dynamic_sampling.partial_rollouts:
        # Prompts with what was drawn before are longer than those that the pool was sized for.
        pages = spec.num_pages or spec.shard_pages * spec.shards
        spec = dataclasses.replace(spec, num_pages=pages, continued=True)
    return spec


def _num_pages(spec: EngineSpec, mesh: Mesh, cache_gib: float) -> int | None:
    """Pages over all shards that the memory of each device holds; None if that is enough anyway."""
    kv_axis = dict(spec.layout.rules)["kv_heads"]
    page = page_bytes(spec.model, spec.pool_layout) // (mesh.shape[kv_axis] if kv_axis else 1)
    pages = int(cache_gib * 2**30 / page)
    prompt = -(-spec.max_prompt_tokens // spec.page_tokens)
    least = 1 + prompt + spec.table_pages + 2
    if pages < least:
        raise UserError(
            f"config.rollout.cache_gib ({cache_gib:g}) holds {pages} pages of "
            f"{spec.page_tokens} tokens, {page:,} bytes each on a device. One prompt of "
            f"{spec.max_prompt_tokens} tokens and one sequence of {spec.max_tokens} need {least}: "
            f"set it to {least * page / 2**30:.3g} or more, or make them shorter."
        )
    return None if pages >= spec.shard_pages else pages * spec.shards
