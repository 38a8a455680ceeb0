"""The compiled programs of a run and what they need: data, engines, learner."""

from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from dapo_jax.config import Config
from dapo_jax.data import ProblemStream
from dapo_jax.learner import Learner
from dapo_jax.problems import load, rubrics
from dapo_jax.progress import Progress
from dapo_jax.rollout.engine import DecoderEngine, EngineSpec
from dapo_jax.sharding import check_batch_shapes, make_mesh
from dapo_jax.tokenizer import load_tokenizer


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
        self.engine = self._engine(config.rollout.temperature, config.rollout.top_p)
        self.evaluation_engine = self._engine(
            config.evaluation.temperature, config.evaluation.top_p
        )
        if config.objective.advantage == "remax":
            self.greedy_engine = self._engine(0.0, 1.0)
        self.learner = Learner(config, self.mesh, self.detokenize, progress.say)

    def _engine(self, temperature: float, top_p: float) -> DecoderEngine:
        c = self.config
        spec = EngineSpec(
            model=c.model,
            layout=c.mesh,
            slots=c.rollout.slots,
            prefill_prompts=c.rollout.prefill_prompts,
            max_prompt_tokens=c.data.max_prompt_tokens,
            max_response_tokens=c.rollout.max_response_tokens,
            stop_tokens=(self.tokenizer.eos_token_id,),
            temperature=temperature,
            top_p=top_p,
        )
        return DecoderEngine(spec, self.mesh)

    def detokenize(self, sequences: Sequence[np.ndarray]) -> list[str]:
        return self.tokenizer.batch_decode(sequences, skip_special_tokens=True)
