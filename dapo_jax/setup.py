"""The compiled programs of a run and what they need: data, engines, learner."""

from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from dapo_jax.config import Config
from dapo_jax.data.dataset import load, rubrics
from dapo_jax.data.stream import ProblemStream
from dapo_jax.data.tokenizer import load_tokenizer
from dapo_jax.distributed.process_group import ALONE, ProcessGroup
from dapo_jax.distributed.replica import Replica
from dapo_jax.models.attention import kernels
from dapo_jax.models.sharding import (
    check_batch_shapes,
    head_layout,
    make_mesh,
    num_processes,
)
from dapo_jax.rollout import memory_budget
from dapo_jax.rollout.make_engine import make_engine
from dapo_jax.rollout.spec import EngineSpec
from dapo_jax.training.learner import Learner
from dapo_jax.utils.progress import Progress


class RunComponents:
    """The compiled programs and the host objects of a run."""

    def __init__(
        self, config: Config, workdir: Path, progress: Progress, process_group: ProcessGroup = ALONE
    ):
        # The least that any process has, so that all lay their arrays out alike.
        each = process_group.all_gather(memory_budget.device_bytes(jax.local_devices()))
        least = min((size for size in each if size is not None), default=None)
        config = memory_budget.with_teams(config, jax.devices(), least, progress.say)
        self.config, self.progress = config, progress
        self.mesh = make_mesh(config.mesh)
        check_batch_shapes(config, self.mesh.shape)
        layout = head_layout(config.model, config.mesh, self.mesh)
        share_prompts = config.train.share_prompts
        choice = kernels.choose(config.model, layout, share_prompts=share_prompts)
        save_to = workdir / "tokenizer" if process_group.is_primary else None
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
        progress.say(attention_line(choice, self.engine.spec))
        self.team = Replica(process_group, num_processes(self.engine.mesh))
        self.learner = Learner(config, self.mesh, self.detokenize, progress.say, progress.doing)

    def detokenize(self, sequences: Sequence[np.ndarray]) -> list[str]:
        return self.tokenizer.batch_decode(sequences, skip_special_tokens=True)


def attention_line(choice: kernels.Choice, spec: EngineSpec) -> str:
    """Names the programs that attend, and why one is XLA's on a platform that has a kernel."""
    of = lambda kernel, refused: f"{kernel} ({refused})" if refused else kernel
    training, rollouts = of(choice.kernel, choice.refused), of(spec.kernel, spec.kernel_refused)
    return f"attention on {choice.platform}: training {training}, rollouts {rollouts}"
