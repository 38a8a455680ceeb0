"""The loop: sample, score, filter, update, evaluate, save. See README for the trace.

Everything random is a function of `config.seed`, the rollout step and the problem, so that a run
stopped anywhere and started again goes on as if it had never stopped.
"""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from dapo_jax import base, maintenance, memory, metrics, prefilter, run_directory
from dapo_jax.checkpoint import Checkpoints
from dapo_jax.compilations import CompilationCounter
from dapo_jax.config import Config
from dapo_jax.drawing import Drawing
from dapo_jax.dynamic_sampling import (
    SamplingState,
    sample_batch,
    state_from_json,
    state_to_json,
    stream_batch,
)
from dapo_jax.evaluate import evaluate
from dapo_jax.learner import RunState, state_shapes
from dapo_jax.problems import rubrics
from dapo_jax.processes import ALONE, Processes
from dapo_jax.profiling import traced
from dapo_jax.progress import Progress, duration
from dapo_jax.reward_pool import RewardPool
from dapo_jax.rollout.sampling import SamplingParams
from dapo_jax.run_directory import RunDirectory
from dapo_jax.samples import adapted_kl_coefficient, shaped_rewards
from dapo_jax.stop_signals import StopSignals
from dapo_jax.trainer import Trainer
from dapo_jax.types import Group, RunError, StopRequested
from dapo_jax.votes import equivalences
from dapo_jax.watchdog import Watchdog

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
    base_seconds: float  # to make or read the base model

    def to_json(self) -> dict[str, Any]:
        return self._asdict() | {"sampling": state_to_json(self.sampling)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "HostState":
        return cls(**values)._replace(sampling=state_from_json(values["sampling"]))


def train(config: Config, workdir: Path, them: Processes = ALONE) -> int | None:
    """Runs the config in `workdir`, from the beginning or from its newest checkpoint.

    Args:
        them: the processes of the run, all of which call this; the first writes and shows.

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
        them.check_place(workdir)
    directory = RunDirectory(workdir, config, writes=them.first)
    progress = Progress(config.train.num_steps, 0, quiet=not them.first)
    r = config.rollout
    with (
        StopSignals(progress, them) as signals,
        maintenance.Notices(signals.notice, maintenance.metadata_host()),
        Watchdog(
            r.watchdog_seconds,
            progress.say,
            most=r.watchdog_limit_seconds,
            # A process alone may be stopped for a while by who watches it (Ctrl-Z).
            hang_factor=r.watchdog_hang_factor if them.count > 1 else 0.0,
            others_compile=them.others_compile,
            give_up=them.give_up,
        ) as watch,
        _reward_pool(config, watch.lives) as pool,
        Checkpoints(
            run_directory.checkpoints(workdir, run_directory.frozen(config)),
            keep_newest=config.checkpoint.keep_newest,
            keep_best=config.checkpoint.keep_best,
            say=progress.say,
            num_bytes=sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state_shapes(config))),
            agree=them.agree,
        ) as checkpoints,
    ):
        progress.watch, them.sign = watch.moved, watch.sign
        run = _Run(config, workdir, directory, progress, signals, pool, checkpoints, watch, begun)
        try:
            run.start()
            while run.step < config.train.num_steps:
                steps = config.log.profile_steps
                with traced(workdir, run.step + 1, steps, progress, run.writes_a_trace):
                    run.one_step()
                if run.step in steps:  # or who is done first counts as idle in the next step
                    them.agree(None, watch.waiting_for)
            run.finish()
        except StopRequested:
            run.save()
            checkpoints.wait()
            done = f"after step {run.step}" if run.step >= 0 else "before the first step"
            progress.say(f"stopped {done}; the same command goes on from there")
        finally:
            directory.close()
    return next((number for number in them.agree(signals.received) if number is not None), None)


def _reward_pool(config: Config, waiting: Callable[[], None]) -> RewardPool:
    """Workers for all that a response of the run may be put to."""
    train, heldout = rubrics(config, config.data.train), rubrics(config, config.data.heldout)
    named = {name for rubric in (*train.values(), *heldout.values()) for name in rubric.names}
    r = config.reward
    return RewardPool(
        named | equivalences(heldout),
        workers=r.workers,
        timeout_seconds=r.timeout_seconds,
        waiting=waiting,
    )


class _Run:
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
        self.them = signals.them
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
        self.trainer = trainer = Trainer(self.config, self.workdir, self.progress, self.them)
        devices = trainer.mesh.devices
        if self.them.count > 1:
            self.progress.say(self.them.described())
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
        with self.watch.loading():
            resumed = self._restore()
            base_seconds = 0.0
            if not resumed or trainer.learner.needs_reference:
                base_seconds = self._load_base(resumed)
        assert self.state is not None
        self.progress.doing("compiling the programs of the rollout")
        modes = dict.fromkeys(sampling.mode for sampling in self._samplings())
        cancels = bool(self.config.rollout.stop_strings)
        loaded = trainer.engine.load_params(self.state.policy.params)
        trainer.engine.warm_up(loaded, modes, cancels=cancels)
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
                prefilter=prefilter.initial_state(self.config.dynamic_sampling.prefilter)
            ),
            base_accuracy=accuracy,
            accuracy=accuracy,
            reward_kl_coefficient=self.config.objective.reward_kl_coefficient,
            seconds=0.0,
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
        params, about = base.load_or_make(
            self.config,
            self.trainer.mesh,
            self.trainer.tokenizer,
            self.workdir / "base",
            say=self.progress.say,
            check_stop=self.watch.moving(self.signals.check_together),
            them=self.them,
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
        """One rollout step: sample until the batch is full, update, evaluate, log, save."""
        assert self.state is not None and self.host is not None
        trainer, config, step = self.trainer, self.config, self.step + 1
        self.watch.moved(f"step {step}: parameters for the rollout")
        self.watch.limited = True
        begun, compiled = time.monotonic(), self.compilations.count
        drawing = self._drawing(ROLLOUT_KEY, step)
        clock, replaced = drawing.clock, self.pool.replaced
        jax.block_until_ready(drawing.params)
        clock["weights"] = time.monotonic() - begun
        copied = drawing.params.copied_bytes(self.state.policy.params)
        d = config.dynamic_sampling
        if d.enabled and d.surplus == "return":
            batch, sampling = stream_batch(
                d,
                self.host.sampling,
                num_prompts=config.train.prompts_per_step,
                step=step,
                seed=config.seed,
                take=trainer.stream.take,
                position=trainer.stream.get_state,
                go_back=trainer.stream.set_state,
                draw=drawing.draw,
                team=trainer.team,
            )
        else:
            batch, sampling = sample_batch(
                d,
                self.host.sampling,
                num_prompts=config.train.prompts_per_step,
                seed=config.seed,
                take=trainer.stream.take,
                sample=drawing.sample,
            )
        stats, rolling = drawing.stats_of_all(), max(clock["rollout"], 1e-9)
        self.progress.doing(f"step {step}: {len(batch.groups)} groups sampled")
        del drawing  # and with it the rollout's copy of the parameters: the update needs the memory
        numbers: dict[str, Any] = {"step": step} | metrics.sampling_metrics(batch)
        if faults := metrics.scorer_faults(batch.sampled):
            self.progress.say(f"  warning: step {step}: {faults}")
        if self.host.sampling.prefilter is not None:
            numbers |= metrics.prefilter_metrics(batch, self.host.sampling.prefilter)
        if d.partial_rollouts:
            numbers |= metrics.partial_metrics(batch, step)
        groups = self._groups_to_train(batch.groups, step)
        baselines = self._greedy_rewards(groups, step, clock) if groups else None
        kl_coefficient = self.host.reward_kl_coefficient
        start = time.monotonic()
        if groups:
            first, self.updated = not self.updated, True
            self.progress.doing(f"step {step}: updating")
            rewards = [shaped_rewards(config, group) for group in groups]
            numbers["reward/mean"] = float(np.mean(rewards))
            self.state, more = trainer.learner.train_on(
                self.state, groups, step, kl_coefficient=kl_coefficient, baselines=baselines
            )
            numbers |= more
            if first:
                numbers["time/first_update"] = time.monotonic() - self.started
            kl_coefficient = self._next_kl_coefficient(kl_coefficient, numbers, groups)
        clock["update"] = time.monotonic() - start
        if self._is_evaluated(step):
            start = time.monotonic()
            numbers |= self._evaluate(step)
            clock["evaluation"] = time.monotonic() - start
        self.watch.step_done()
        self.watch.moved(f"step {step}: writing what was drawn and measured", measured=False)
        self.directory.save_rollouts(
            step,
            batch.sampled,
            [shaped_rewards(config, group) for group in batch.sampled],
            config.log.rollouts_per_step,
        )
        self.host = self.host._replace(
            data=trainer.stream.get_state(),
            sampling=sampling,
            accuracy=self._accuracy(numbers),
            reward_kl_coefficient=kl_coefficient,
        )
        numbers |= {f"time/{name}": seconds for name, seconds in clock.items()}
        numbers["perf/weights_bytes"] = copied
        numbers["perf/tokens_per_second"] = stats.tokens / rolling
        numbers["perf/idle_share"] = min(1.0, stats.idle_seconds / (trainer.team.count * rolling))
        if stats.slots_offered:
            numbers["perf/slot_occupancy"] = stats.busy_slots / stats.slots_offered
        if stats.could_draw:
            numbers["perf/slot_utilisation"] = stats.drawn / stats.could_draw
        numbers |= {"rollout/preempted": stats.preempted, "rollout/invalid": stats.invalid}
        numbers["perf/reward_pools_replaced"] = self.pool.replaced - replaced
        if (peak := memory.peak_bytes(jax.local_devices())) is not None:
            numbers["perf/device_peak_bytes"] = peak
        numbers["perf/compilations"] = self.compilations.count - compiled
        numbers["time/step"] = time.monotonic() - begun
        self._complete(step, numbers)

    def writes_a_trace(self) -> None:
        """Before it does, which takes as long as it takes."""
        self.watch.limited = False  # until the next step
        self.watch.moved(f"step {self.step}: the trace to be written", measured=False)

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
        if not self.them.first:
            return
        from dapo_jax import report  # here, because matplotlib takes a second to load

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

    def _greedy_rewards(
        self, groups: Sequence[Group], step: int, clock: dict[str, float]
    ) -> list[float] | None:
        """Shaped reward of the greedy response to the prompt of each group; None unless the
        advantage asks for it."""
        if self.config.objective.advantage != "remax":
            return None
        drawing = self._drawing(BASELINE_KEY, step)
        scored = drawing.greedy([group.problem for group in groups], self._samplings()[2])
        clock["rollout"] += drawing.clock["rollout"]
        return [float(shaped_rewards(self.config, group)[0]) for group in scored]

    def _drawing(self, stream: int, step: int) -> Drawing:
        """What draws with the parameters there are now.

        Args:
            stream: of randomness.
        """
        assert self.state is not None
        trainer = self.trainer
        return Drawing(
            trainer,
            self.pool,
            trainer.engine.load_params(self.state.policy.params),
            key=jax.random.fold_in(jax.random.fold_in(trainer.key, stream), step),
            step=step,
            progress=self.progress,
            check_stop=self.signals.check,
            watch=self.watch,
        )

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
        """The groups, or none of them, when dynamic sampling ran out of rounds."""
        wanted = self.config.train.prompts_per_step
        if len(groups) == wanted:
            return groups
        d = self.config.dynamic_sampling
        what = f"step {step}: {len(groups)} of {wanted} groups after {d.max_rounds} sampling rounds"
        if d.exhausted == "stop":
            raise RunError(
                f"{what}, and config.dynamic_sampling.exhausted is 'stop'. Allow more rounds, add "
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
        self.progress.doing(f"step {step}: evaluating on {len(self.trainer.heldout)} problems")
        key = jax.random.fold_in(jax.random.fold_in(self.trainer.key, EVALUATION_KEY), step)
        return evaluate(
            self.trainer.engine,
            self.trainer.engine.load_params(self.state.policy.params),
            self.trainer.heldout,
            self.trainer.detokenize,
            self.pool,
            self.trainer.heldout_rubrics,
            num_samples=self.config.evaluation.num_samples,
            sampling=self._samplings()[1],
            stop_strings=self.config.rollout.stop_strings,
            key=key,
            # After an update there is no way back to the step before: a stop waits for the end of
            # the evaluation. The base can be evaluated again.
            check_stop=self.signals.check if step == 0 else lambda: None,
            watch=self.watch,
            team=self.trainer.team,
        )

    def _accuracy(self, numbers: dict[str, Any]) -> float:
        """Held-out avg@k of this step, or of the last one that was evaluated."""
        name = f"eval/avg@{self.config.evaluation.num_samples}"
        if name in numbers:
            return numbers[name]
        assert self.host is not None
        return self.host.accuracy
