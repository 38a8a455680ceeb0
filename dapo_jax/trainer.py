"""The compiled programs of a run and what they need: data, engines, learner."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from dapo_jax import attention_kernels, memory
from dapo_jax.config import Config
from dapo_jax.data import ProblemStream
from dapo_jax.learner import Learner
from dapo_jax.problems import load, rubrics
from dapo_jax.processes import ALONE, Processes
from dapo_jax.progress import Progress
from dapo_jax.rollout.engine import DecoderEngine
from dapo_jax.rollout.spec import engine_spec
from dapo_jax.sharding import (
    check_batch_shapes,
    head_layout,
    make_mesh,
    own_mesh,
    rollout_mesh,
    team_size,
)
from dapo_jax.teams import Team
from dapo_jax.tokenizer import load_tokenizer, stop_tokens


class Trainer:
    """The compiled programs and the host objects of a run."""

    def __init__(self, config: Config, workdir: Path, progress: Progress, them: Processes = ALONE):
        # The least that any process has, so that all lay their arrays out alike.
        each = them.agree(memory.device_bytes(jax.local_devices()))
        least = min((size for size in each if size is not None), default=None)
        config = memory.with_teams(config, jax.devices(), least, progress.say)
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
                config,
                chosen,
                self.tokenizer,
                field=f"config.data.{side}",
                say=progress.say,
                evaluated=side == "heldout",
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
    spec = engine_spec(
        config,
        own.shape,
        max_prompt_tokens,
        stops,
        platform=own.devices.flat[0].platform,
        run_sizes=everywhere.shape,
    )
    return DecoderEngine(spec, own, mesh)
