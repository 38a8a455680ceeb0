"""The loop: sample, score, filter, update, evaluate, save. See README for the trace.

Everything random is a function of `config.seed`, the rollout step and the problem, so that a run
stopped anywhere and started again goes on as if it had never stopped.
"""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from dapo_jax.config import Config
from dapo_jax.data.dataset import rubrics
from dapo_jax.distributed.preemption import StopSignals
from dapo_jax.distributed.process_group import ALONE, ProcessGroup
from dapo_jax.evaluation.majority_vote import equivalences
from dapo_jax.evaluation.metrics import evaluate
from dapo_jax.rewards.pool import RewardPool
from dapo_jax.rewards.types import Rubric
from dapo_jax.rollout import memory_budget, prompt_filter
from dapo_jax.rollout import metrics as rollout_metrics
from dapo_jax.rollout.admission import GenerationRequest
from dapo_jax.rollout.collector import RolloutCollector
from dapo_jax.rollout.dynamic_sampling import (
    Batch,
    SamplingState,
    commit,
    open_queue,
    state_from_json,
    state_to_json,
    take_informative,
)
from dapo_jax.rollout.sampling import SamplingParams
from dapo_jax.runs import run_directory
from dapo_jax.runs.checkpoint import Checkpoints
from dapo_jax.runs.run_directory import RunDirectory
from dapo_jax.setup import RunComponents
from dapo_jax.training import base_model, metrics
from dapo_jax.training.batch import adapted_kl_coefficient, shaped_rewards
from dapo_jax.training.learner import RunState, state_shapes
from dapo_jax.types import Group, RunError, StopRequested
from dapo_jax.utils.compilations import CompilationCounter
from dapo_jax.utils.profiling import traced
from dapo_jax.utils.progress import Progress, duration
from dapo_jax.utils.telemetry import Telemetry
from dapo_jax.utils.watchdog import Watchdog

# Names of the streams of randomness, folded into the seed's key.
ROLLOUT_KEY, EVALUATION_KEY, BASELINE_KEY = 1, 2, 3


class HostState(NamedTuple):
    """What the loop remembers besides the train state; saved with it."""

    data: dict[str, Any]  # position in the stream of problems
    sampling: SamplingState
    base_accuracy: float
    accuracy: float  # of the last evaluation
    reward_kl_coefficient: float  # of the next step; adapts where the config says so
    seconds: float  # worked so far, over all starts of the run
    updated_steps: int  # rollout steps that made an update: where the schedules are
    base_seconds: float  # to make or read the base model

    def to_json(self) -> dict[str, Any]:
        return self._asdict() | {"sampling": state_to_json(self.sampling)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "HostState":
        return cls(**values)._replace(sampling=state_from_json(values["sampling"]))


def train(config: Config, workdir: Path, process_group: ProcessGroup = ALONE) -> int | None:
    """Runs the config in `workdir`, from the beginning or from its newest checkpoint.

    Args:
        process_group: the processes of the run. All call this; the primary writes and prints.

    Returns:
        The number of the signal that stopped the run, whichever process got it, or None when it
        reached its last step.

    Raises:
        UserError: for what the user can mend.
        RunError, CheckpointError: for what went wrong on the way; nothing saved is lost.
    """
    begun = time.monotonic()
    apart = config.checkpoint.directory is not None
    # The base model, if it is made, and checkpoints are all that other processes read there.
    if not apart or config.pretrain is not None:
        process_group.check_place(workdir)
    directory = RunDirectory(workdir, config, writes=process_group.is_primary)
    progress = Progress(config.train.num_steps, 0, quiet=not process_group.is_primary)
    r = config.rollout
    with (
        StopSignals(progress, process_group) as signals,
        Watchdog(
            r.watchdog_seconds,
            progress.say,
            most=r.watchdog_limit_seconds,
            give_up=process_group.give_up,
        ) as watch,
        _reward_pool(config) as pool,
        Checkpoints(
            run_directory.checkpoints(workdir, run_directory.frozen(config)),
            keep_newest=config.checkpoint.keep_newest,
            keep_best=config.checkpoint.keep_best,
            say=progress.say,
            num_bytes=sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state_shapes(config))),
            all_gather=process_group.all_gather,
        ) as checkpoints,
    ):
        progress.watch = watch.moved
        run = TrainLoop(
            config, workdir, directory, progress, signals, pool, checkpoints, watch, begun
        )
        try:
            run.start()
            while run.step < config.train.num_steps:
                steps = config.log.profile_steps
                with traced(workdir, run.step + 1, steps, progress, run.writes_a_trace):
                    run.one_step()
                if run.step in steps:  # or who is done first counts as idle in the next step
                    process_group.all_gather(None, watch.waiting_for)
            run.finish()
        except StopRequested:
            run.save()
            checkpoints.wait()
            done = f"after step {run.step}" if run.step >= 0 else "before the first step"
            progress.say(f"stopped {done}; the same command goes on from there")
        finally:
            directory.close()
    return next(
        (number for number in process_group.all_gather(signals.received) if number is not None),
        None,
    )


def _reward_pool(config: Config) -> RewardPool:
    """Workers for all that a response of the run may be put to."""
    train, heldout = rubrics(config, config.data.train), rubrics(config, config.data.heldout)
    named = {name for rubric in (*train.values(), *heldout.values()) for name in rubric.names}
    r = config.reward
    return RewardPool(
        named | equivalences(heldout),
        workers=r.workers,
        timeout_seconds=r.timeout_seconds,
    )


class _Counters(NamedTuple):
    """Counts at the beginning of a step."""

    start: float  # seconds
    compilations: int
    pools_replaced: int


class TrainLoop:
    """The state of a run between steps, and what moves it."""

    def __init__(
        self,
        config: Config,
        workdir: Path,
        directory: RunDirectory,
        progress: Progress,
        signals: StopSignals,
        pool: RewardPool,
        checkpoints: Checkpoints,
        watch: Watchdog,
        begun: float,
    ):
        self.config, self.workdir, self.directory = config, workdir, directory
        self.progress, self.signals, self.pool = progress, signals, pool
        self.process_group = signals.process_group
        self.telemetry = Telemetry(progress, watch, signals.check)
        self.checkpoints, self.watch, self.begun = checkpoints, watch, begun
        self.started = begun  # of this start; `begun` is earlier by what was worked in those before
        self.step = -1  # rollout steps completed; -1: not even the base is evaluated
        self.saved_step = -1
        self.save_seconds = 0.0  # that the loop waited for the last save
        self.updated = False  # since this start of the run
        self.state: RunState | None = None
        self.host: HostState | None = None

    def start(self) -> None:
        """Restores the newest checkpoint, or makes the base model and evaluates it."""
        self.compilations = CompilationCounter()
        self.progress.doing("loading tokenizer and problems")
        self.trainer = trainer = RunComponents(
            self.config, self.workdir, self.progress, self.process_group
        )
        self.collector = self._collector(
            trainer.train_rubrics, self.config.rollout.group_size, self._samplings()[0]
        )
        devices = trainer.mesh.devices
        if self.process_group.count > 1:
            self.progress.say(self.process_group.described())
        self.progress.say(
            f"{devices.size} {devices.flat[0].device_kind} device(s), mesh "
            + " x ".join(f"{name} {size}" for name, size in trainer.mesh.shape.items())
        )
        # Before anything is read or sampled: what a compiler refuses is known within minutes.
        self.progress.doing("compiling the programs of the update")
        try:
            trainer.learner.compile()
        except jax.errors.JaxRuntimeError as error:
            raise RunError(f"the programs of the update do not compile: {error}") from error
        with self.process_group.loading():
            resumed = self._restore()
            base_seconds = 0.0
            if not resumed or trainer.learner.needs_reference:
                base_seconds = self._load_base(resumed)
        assert self.state is not None
        self.progress.doing("compiling the programs of the rollout")
        modes = dict.fromkeys(sampling.mode for sampling in self._samplings())
        cancels = bool(self.config.rollout.stop_strings)
        loaded = trainer.engine.load_params(self.state.policy.params)
        trainer.engine.warm_up(loaded, modes, cancels=cancels, say=self.progress.say)
        del loaded  # or it would lie next to the copy that the evaluation makes
        if resumed:
            return
        self.directory.rewind(-1)
        begun = time.monotonic()
        numbers = {"step": 0} | self._evaluate(0)
        numbers["perf/compilations"] = self.compilations.count
        numbers["time/step"] = time.monotonic() - begun
        accuracy = self._accuracy(numbers)
        self.host = HostState(
            data=trainer.stream.get_state(),
            sampling=SamplingState(
                prefilter=(
                    prompt_filter.initial_state()
                    if self.config.dynamic_sampling.prefilter
                    else None
                )
            ),
            base_accuracy=accuracy,
            accuracy=accuracy,
            reward_kl_coefficient=self.config.objective.reward_kl_coefficient,
            seconds=0.0,
            updated_steps=0,
            base_seconds=base_seconds,
        )
        self._complete(0, numbers)

    def _restore(self) -> bool:
        """Takes up the run after its newest checkpoint; False if there is none. Only shapes of the
        state are needed for it."""
        self.progress.doing("looking for a checkpoint")
        restored = self.checkpoints.restore(self.trainer.learner.state_like())
        if restored is None:
            return False
        self.step, self.state, values = restored
        config = values.pop("config", None)  # older ones have none
        if config is not None:
            run_directory.check_same(config, self.config, self.checkpoints.directory)
        run_directory.check_not_past(self.step, self.config, self.checkpoints.directory)
        self.host = HostState.from_json(values)
        self.begun -= self.host.seconds
        self.saved_step = self.step
        self.trainer.stream.set_state(self.host.data)
        self.directory.rewind(self.step)
        self.progress.first_step = self.step
        self.progress.say(f"resuming after step {self.step} of {self.config.train.num_steps}")
        return True

    def _load_base(self, resumed: bool) -> float:
        """Reads or makes the base model: the reference, where there is one, and unless the run is
        resumed the first state. Returns the seconds that it took to make."""
        self.progress.doing("loading or making the base model")
        learner = self.trainer.learner
        params, about = base_model.load_or_make(
            self.config,
            self.trainer.mesh,
            self.trainer.tokenizer,
            self.workdir / "base",
            say=self.progress.say,
            check_stop=self.watch.moving(self.signals.check_together),
            process_group=self.process_group,
        )
        if learner.needs_reference:
            learner.reference = params
        if not resumed:
            self.state = learner.init_state(params, donate=not learner.needs_reference)
        return about["seconds"]

    def _samplings(self) -> list[SamplingParams]:
        """Of training, of evaluation, and of baselines where the advantage has them."""
        r, e = self.config.rollout, self.config.evaluation
        found = [SamplingParams.of(r), SamplingParams.of(e)]
        greedy = self.config.objective.advantage == "remax"
        return [*found, SamplingParams(temperature_X=0.0)] if greedy else found

    def one_step(self) -> None:
        """Runs one rollout step: sample until the batch is full, update, evaluate, log, save."""
        assert self.state is not None and self.host is not None
        config, run, telemetry, step = self.config, self.trainer, self.telemetry, self.step + 1
        counters = self._begin(step)
        key = self._key(ROLLOUT_KEY, step)
        prompts = open_queue(
            config, self.host.sampling, run.stream, step=step, group=self.process_group
        )
        params = self.state.policy.params
        with (
            run.engine.weights(params, telemetry) as weights,
            self.process_group.stop_together(telemetry.waiting_for),
        ):
            copied_bytes = weights.copied_bytes(params)
            outcomes = self.collector.groups(prompts, key, step=step)
            taken = take_informative(outcomes, config.train.prompts_per_step)
        del weights, params  # the update needs the memory and donates the parameters
        batch, sampling = commit(config, self.host.sampling, prompts, taken, step)
        numbers = {"step": step, "perf/weights_bytes": copied_bytes}
        numbers |= self._sampling_metrics(batch, step)
        groups = self._groups_to_train(batch.groups, step)
        baselines = self._greedy_rewards(groups, step) if groups else None
        kl_coefficient = self.host.reward_kl_coefficient
        with telemetry.timer("update"):
            if groups:
                numbers |= self._update(groups, baselines, step)
                kl_coefficient = self._next_kl_coefficient(kl_coefficient, numbers, groups)
        if self._is_evaluated(step):
            with telemetry.timer("evaluation"):
                numbers |= self._evaluate(step)
        self._save_rollouts(batch, step)
        self.host = self.host._replace(
            data=run.stream.get_state(),
            sampling=sampling,
            accuracy=self._accuracy(numbers),
            reward_kl_coefficient=kl_coefficient,
            updated_steps=self.host.updated_steps + metrics.made_an_update(numbers),
        )
        self._complete(step, numbers | self._counted(counters))

    def writes_a_trace(self) -> None:
        """Before it does, which takes as long as it takes."""
        self.watch.limited = False  # until the next step
        self.watch.moved(f"step {self.step}: the trace to be written")

    def finish(self) -> None:
        """Writes the summary and the page of plots."""
        assert self.host is not None
        if self.saved_step != self.step:
            self.save()
        self.checkpoints.wait()
        summary = {
            "base_accuracy": self.host.base_accuracy,
            "final_accuracy": self.host.accuracy,
            "steps": self.step,
            "seconds": time.monotonic() - self.begun,
            "base_seconds": self.host.base_seconds,
        }
        self.directory.save_summary(summary)
        self.directory.close()
        if not self.process_group.is_primary:
            return
        from dapo_jax.runs.report import (
            page as report,  # here, because matplotlib takes a second to load
        )

        page = report.write_report(self.workdir)
        self.progress.say(
            f"held-out accuracy {100 * self.host.base_accuracy:.1f} % -> "
            f"{100 * self.host.accuracy:.1f} % in {self.step} steps, "
            f"{duration(summary['seconds'])}\nthe run on one page: {page}"
        )

    def save(self) -> None:
        """Saves the last completed step, unless that is done. Step 0 of a model that has a path is
        not saved: its parameters are those of the path."""
        self.watch.limited = False  # until the next step: storage may be slow
        first = 1 if self.config.model.path is not None else 0
        if self.step < first or self.saved_step == self.step:
            return
        assert self.state is not None and self.host is not None
        start = time.monotonic()
        self.progress.doing(f"step {self.step}: saving")
        self.host = self.host._replace(seconds=start - self.begun)
        evaluated = self._is_evaluated(self.step)
        self.checkpoints.save(
            self.step,
            self.state,
            self.host.to_json() | {"config": run_directory.frozen(self.config)},
            accuracy=self.host.accuracy if evaluated else None,
        )
        self.saved_step = self.step
        self.save_seconds = time.monotonic() - start

    def _complete(self, step: int, numbers: dict[str, Any]) -> None:
        """Logs a step that is done, and saves it when it is time.

        In this order: of a step that is saved, the metrics are on disk and finite. The line of a
        step tells what the save before it took.
        """
        self.step = step
        numbers["time/checkpoint"], self.save_seconds = self.save_seconds, 0.0
        self.directory.log(numbers)
        if place := os.environ.get("DAPO_PROGRESS"):  # see launch/restart.sh
            Path(place).write_text(f"{step}\n")
        self.progress.step(numbers)
        if step % self.config.checkpoint.every_steps == 0 or step == self.config.train.num_steps:
            self.save()
        self.signals.check_together(self.watch.waiting_for)

    def _begin(self, step: int) -> "_Counters":
        """Begins to time and count a step."""
        self.watch.limited = True
        self.telemetry.phase(f"step {step}: sampling")
        self.telemetry.take_seconds()
        return _Counters(time.monotonic(), self.compilations.count, self.pool.replaced)

    def _counted(self, since: "_Counters") -> dict[str, float]:
        """Returns what the step took."""
        numbers: dict[str, float] = {
            f"time/{name}": value for name, value in self.telemetry.take_seconds().items()
        }
        if (peak := memory_budget.peak_bytes(jax.local_devices())) is not None:
            numbers["perf/device_peak_bytes"] = peak
        numbers["perf/reward_pools_replaced"] = self.pool.replaced - since.pools_replaced
        numbers["perf/compilations"] = self.compilations.count - since.compilations
        numbers["time/step"] = time.monotonic() - since.start
        return numbers

    def _key(self, stream: int, step: int) -> jax.Array:
        """Returns the random key of a step's rollouts, by the stream of randomness."""
        return jax.random.fold_in(jax.random.fold_in(self.trainer.key, stream), step)

    def _collector(
        self, rubrics: Mapping[str, Rubric], num_samples: int, sampling: SamplingParams
    ) -> RolloutCollector:
        run = self.trainer
        request = GenerationRequest(num_samples, sampling, self.config.rollout.stop_strings)
        return RolloutCollector(
            run.engine, self.pool, rubrics, run.detokenize, request,
            replica=run.team, telemetry=self.telemetry,
        )  # fmt: skip

    def _sampling_metrics(self, batch: Batch, step: int) -> dict[str, Any]:
        """Returns the numbers of the step's rollout; every process must call it."""
        assert self.host is not None
        self.telemetry.phase(f"step {step}: {len(batch.groups)} groups sampled")
        numbers: dict[str, Any] = rollout_metrics.sampling_metrics(batch)
        rollout_metrics.check_finite(batch.sampled)
        if faults := rollout_metrics.scorer_faults(batch.sampled):
            self.telemetry.say(f"  warning: step {step}: {faults}")
        if self.host.sampling.prefilter is not None:
            numbers |= rollout_metrics.prefilter_metrics(batch, self.host.sampling.prefilter)
        if self.config.dynamic_sampling.partial_rollouts:
            numbers |= rollout_metrics.partial_metrics(batch, step)
        stats, seconds = self.collector.take_stats()
        for name, value in seconds.items():
            self.telemetry.add_seconds(name, value)
        return numbers | rollout_metrics.rollout_metrics(stats, seconds, self.trainer.team.count)

    def _update(
        self, groups: list[Group], baselines: list[float] | None, step: int
    ) -> dict[str, float]:
        """Trains on the groups; returns the numbers of the updates."""
        assert self.state is not None and self.host is not None
        first = "" if self.updated else ", its programs compiled first"
        self.telemetry.phase(f"step {step}: updating{first}")
        self.state, numbers = self.trainer.learner.train_on(
            self.state,
            groups,
            step,
            updated_steps=self.host.updated_steps,
            kl_coefficient=self.host.reward_kl_coefficient,
            baselines=baselines,
        )
        if not self.updated:
            self.updated = True
            numbers["time/first_update"] = time.monotonic() - self.started
        rewards = [shaped_rewards(self.config, group) for group in groups]
        return numbers | {"reward/mean": float(np.mean(rewards))}

    def _save_rollouts(self, batch: Batch, step: int) -> None:
        self.telemetry.phase(f"step {step}: writing rollouts and metrics")
        self.directory.save_rollouts(
            step,
            batch.sampled,
            [shaped_rewards(self.config, group) for group in batch.sampled],
            self.config.log.rollouts_per_step,
        )

    def _greedy_rewards(self, groups: Sequence[Group], step: int) -> list[float] | None:
        """Returns the shaped reward of the greedy response to each group's prompt; None unless the
        advantage asks for it."""
        assert self.state is not None
        if self.config.objective.advantage != "remax":
            return None
        self.telemetry.phase(f"step {step}: greedy baselines of {len(groups)} prompts")
        greedy = self._collector(self.trainer.train_rubrics, 1, self._samplings()[2])
        with self.trainer.engine.weights(self.state.policy.params, self.telemetry):
            scored = greedy.collect(
                [group.problem for group in groups], self._key(BASELINE_KEY, step), step=step
            )
        self.telemetry.add_seconds("rollout", sum(greedy.seconds.values()))
        return [float(shaped_rewards(self.config, group)[0]) for group in scored]

    def _next_kl_coefficient(
        self, coefficient: float, numbers: dict[str, Any], groups: Sequence[Group]
    ) -> float:
        """The coefficient of the KL in the reward for the step after this one."""
        o = self.config.objective
        if o.reward_kl_target is None or "reward/kl" not in numbers:
            return coefficient
        assert o.reward_kl_horizon is not None
        return adapted_kl_coefficient(
            coefficient,
            numbers["reward/kl"],
            target=o.reward_kl_target,
            horizon=o.reward_kl_horizon,
            num_responses=sum(len(group.responses) for group in groups),
        )

    def _groups_to_train(self, groups: list[Group], step: int) -> list[Group]:
        """The groups, or none of them, when dynamic sampling ran out of prompts."""
        wanted = self.config.train.prompts_per_step
        if len(groups) == wanted:
            return groups
        d = self.config.dynamic_sampling
        tried = d.max_rounds * d.max_round_prompts
        what = f"step {step}: {len(groups)} of {wanted} groups from {tried} prompts"
        if d.exhausted == "stop":
            raise RunError(
                f"{what}, and config.dynamic_sampling.exhausted is 'stop'. Raise max_rounds, add "
                "harder or easier problems, or set it to 'train' or 'skip'."
            )
        train = bool(groups) and d.exhausted == "train"
        self.progress.say(f"  warning: {what}; {'training on those' if train else 'no update'}")
        return groups if train else []

    def _is_evaluated(self, step: int) -> bool:
        last = step == self.config.train.num_steps
        return last or step % self.config.evaluation.every_steps == 0

    def _evaluate(self, step: int) -> dict[str, float]:
        assert self.state is not None
        run, num_samples = self.trainer, self.config.evaluation.num_samples
        self.telemetry.phase(f"step {step}: evaluating on {len(run.heldout)} problems")
        collector = self._collector(run.heldout_rubrics, num_samples, self._samplings()[1])
        if step > 0:
            # After an update there is no way back to the step before: a stop waits for the end of
            # the evaluation. The base can be evaluated again.
            collector.telemetry = self.telemetry.without_stop()
        with run.engine.weights(self.state.policy.params):
            return evaluate(collector, run.heldout, self._key(EVALUATION_KEY, step))

    def _accuracy(self, numbers: dict[str, Any]) -> float:
        """Held-out avg@k of this step, or of the last one that was evaluated."""
        name = f"eval/avg@{self.config.evaluation.num_samples}"
        if name in numbers:
            return numbers[name]
        assert self.host is not None
        return self.host.accuracy
