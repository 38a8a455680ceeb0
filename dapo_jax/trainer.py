"""The compiled programs of a run and what they need: data, engines, learner."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from dapo_jax.config import Config
from dapo_jax.data import ProblemStream
from dapo_jax.learner import Learner
from dapo_jax.problems import load, rubrics
from dapo_jax.progress import Progress
from dapo_jax.rollout.engine import DecoderEngine, EngineSpec
from dapo_jax.sharding import check_batch_shapes, make_mesh
from dapo_jax.tokenizer import load_tokenizer, stop_tokens


class Trainer:
    """The compiled programs and the host objects of a run."""

    def __init__(self, config: Config, workdir: Path, progress: Progress):
        self.config, self.progress = config, progress
        self.mesh = make_mesh(config.mesh)
        check_batch_shapes(config, self.mesh.shape["data"], self.mesh.shape["fsdp"])
        self.tokenizer = load_tokenizer(config.model, save_to=workdir / "tokenizer")
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
        engine = functools.partial(
            make_engine,
            config,
            self.mesh,
            self.tokenizer,
            max_prompt_tokens=config.data.max_prompt_tokens,
        )
        r, e = config.rollout, config.evaluation
        self.engine = engine(temperature=r.temperature, top_p=r.top_p)
        self.evaluation_engine = engine(temperature=e.temperature, top_p=e.top_p)
        if config.objective.advantage == "remax":
            self.greedy_engine = engine(temperature=0.0, top_p=1.0)
        self.learner = Learner(config, self.mesh, self.detokenize, progress.say)

    def detokenize(self, sequences: Sequence[np.ndarray]) -> list[str]:
        return self.tokenizer.batch_decode(sequences, skip_special_tokens=True)


def make_engine(
    config: Config,
    mesh: Mesh,
    tokenizer: Any,
    *,
    max_prompt_tokens: int,
    temperature: float,
    top_p: float,
) -> DecoderEngine:
    """The engine that draws responses of the config's model."""
    spec = EngineSpec(
        model=config.model,
        layout=config.mesh,
        slots=config.rollout.slots,
        prefill_prompts=config.rollout.prefill_prompts,
        max_prompt_tokens=max_prompt_tokens,
        max_response_tokens=config.rollout.max_response_tokens,
        stop_tokens=stop_tokens(config.model, tokenizer),
        temperature=temperature,
        top_p=top_p,
    )
    return DecoderEngine(spec, mesh)
