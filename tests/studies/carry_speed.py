"""Rollout steps in the modes "sync" and "carry", in turn, on the model of launch/bench.py.

Command: python -m tests.studies.carry_speed [--slots=32] [--staleness=2] [--steps=6] [--update]

Lengths are log-normal with sigma 1, cut at 16 times the median of 32 tokens; groups of 8 to 16
prompts a step, all of them kept; the two modes train on the same prompts with the same lengths. A
step is the rollout, with --update also a training step on its groups. One line of JSON.
"""

import dataclasses
import json
import statistics
import sys
import time

import jax
import numpy as np

from dapo_jax.config import Config
from dapo_jax.models.sharding import initial_params, make_mesh
from dapo_jax.rewards.pool import Scored
from dapo_jax.rewards.types import Rubric, Score
from dapo_jax.rollout.admission import GenerationSettings
from dapo_jax.rollout.collector import RolloutCollector
from dapo_jax.rollout.dynamic_sampling import DynamicSamplingState, commit, open_queue, take_kept
from dapo_jax.rollout.engine import DecoderEngine
from dapo_jax.rollout.engine_config import make_engine_config
from dapo_jax.rollout.prompt_queue import ProblemList
from dapo_jax.training.learner import Learner
from dapo_jax.training.schedule import Schedule
from dapo_jax.types import Problem
from tests.support.helpers import tiny_config

GROUP, BATCH, PROMPT, MEDIAN, MOST = 8, 16, 32, 32, 512
RUBRICS = {"": Rubric((("first", 1.0),), 1.0, -1.0)}
MODEL = dict(
    num_layers=4, hidden_size=256, num_heads=4, num_kv_heads=2, head_dim=64,
    intermediate_size=1024, vocab_size=512, remat="dots",
)  # fmt: skip


class Pool:
    """Verdicts at once: a response is right by the parity of its tokens."""

    def submit(self, tasks):
        return tasks

    def give_up(self):
        pass

    def ready(self, tasks):
        return True

    def collect(self, tasks):
        return [Scored((Score(sum(task.token_ids) % 2 == 0),), 0.0) for task in tasks]


def config_of(mode: str, slots: int, staleness: int) -> Config:
    config = tiny_config(
        **{f"model__{name}": value for name, value in MODEL.items()},
        data__max_prompt_tokens=PROMPT,
        rollout__max_staleness=staleness if mode == "carry" else 0,
        rollout__group_size=GROUP,
        rollout__max_response_tokens=MOST,
        rollout__slots=slots,
        rollout__prefill_prompts=8,
        rollout__decode_steps=8,
        rollout__page_tokens=32,
        rollout__log_prob_source="rollout",
        dynamic_sampling__enabled=False,
        train__prompts_per_step=BATCH,
        train__prompts_per_update=BATCH,
        train__row_tokens=PROMPT + MOST,
        train__rows_per_micro_batch=4,
    )
    return dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, data=1, fsdp=1))


class Run:
    """A run in one mode."""

    def __init__(self, mode: str, slots: int, staleness: int, steps: int, *, update: bool):
        self.config = config = config_of(mode, slots, staleness)
        mesh = make_mesh(config.mesh, jax.devices()[:1])
        platform = mesh.devices.flat[0].platform
        self.engine = DecoderEngine(
            make_engine_config(config, mesh.shape, PROMPT, stop_tokens=(), platform=platform), mesh
        )
        detokenize = lambda sequences: [""] * len(sequences)
        self.learner = Learner(config, mesh, detokenize, print)
        params = initial_params(config.model, config.mesh, mesh, seed=0)
        self.learner_state = self.learner.init_state(params)
        self.update = update
        rng = np.random.default_rng(0)
        count = (steps + 2 + staleness) * BATCH
        raw = np.exp(rng.standard_normal((count, GROUP)))
        self.lengths = np.clip(np.ceil(MEDIAN * raw), 1, MOST).astype(int)
        tokens = lambda: tuple(rng.integers(1, 512, PROMPT).tolist())
        self.data = ProblemList([Problem(i, "", tokens(), "", "") for i in range(count)])
        request = GenerationSettings(GROUP)
        self.collector = RolloutCollector(self.engine, Pool(), RUBRICS, detokenize, request)
        self.state, self.step = DynamicSamplingState(), 0

    def one_step(self) -> tuple[float, int]:
        """Returns (seconds, tokens of the groups)."""
        start, config, self.step = time.perf_counter(), self.config, self.step + 1
        limits = self.lengths[self.data.get_state() :]
        self.collector.settings = GenerationSettings(GROUP, limits_QG=limits)
        prompts = open_queue(config, self.state, self.data, step=self.step)
        with self.engine.weights(self.learner_state.policy.params):
            outcomes = self.collector.outcomes(prompts, jax.random.key(self.step), step=self.step)
            taken = take_kept(outcomes)
        batch, self.state = commit(config, self.state, prompts, taken, self.step)
        assert len(batch.groups) == BATCH
        if self.update:
            schedule = Schedule(self.step - 1, 0.0, 0.0)
            self.learner_state, *_ = self.learner.train_on(
                self.learner_state, schedule, batch.groups, self.step
            )
            jax.block_until_ready(self.learner_state)
        tokens = sum(len(r.tokens) for group in batch.groups for r in group.responses)
        return time.perf_counter() - start, tokens


def main(slots: int, staleness: int, steps: int, *, update: bool) -> None:
    warm_up = 1 + staleness  # carried responses of every age, and every program compiled
    make = lambda mode: Run(mode, slots, staleness, steps + warm_up, update=update)
    runs = {mode: make(mode) for mode in ("sync", "carry")}
    found: dict[str, list] = {mode: [] for mode in runs}
    for _ in range(warm_up):
        for run in runs.values():
            run.one_step()
    for run in runs.values():
        run.collector.take_stats()
    for _ in range(steps):
        for mode, run in runs.items():
            found[mode].append(run.one_step())
    numbers = {}
    for mode, run in runs.items():
        stats, _ = run.collector.take_stats()
        numbers[mode] = {
            "seconds": [round(seconds, 3) for seconds, _ in found[mode]],
            "tokens": [tokens for _, tokens in found[mode]],
            "slots_busy": round(stats.sampled / stats.could_sample, 4),
            "tokens_discarded": stats.discarded,
        }
    # Of all steps together: a carried step has tokens of the steps before.
    total = {mode: sum(seconds for seconds, _ in of) for mode, of in found.items()}
    ratio = total["carry"] / total["sync"]
    of_steps = [b / a for (a, _), (b, _) in zip(found["sync"], found["carry"])]
    print(
        json.dumps(
            {
                "slots": slots,
                "max_staleness": staleness,
                "update": update,
                **numbers,
                "ratio": round(ratio, 3),
                "median_of_ratios": round(statistics.median(of_steps), 3),
            }
        )
    )


if __name__ == "__main__":
    given = dict(argument.lstrip("-").partition("=")[::2] for argument in sys.argv[1:])
    number = lambda name, default: int(given.get(name, default))
    main(
        number("slots", 32),
        number("staleness", 2),
        number("steps", 6),
        update="update" in given,
    )
