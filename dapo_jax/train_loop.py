"""The training loop: sample, score, filter, update, evaluate, save.

`launch/train.py` calls `train`; README has the trace of a step. Everything random is a function of
`config.seed`, the rollout step and the problem, so a run that was stopped resumes bit for bit.
"""

import contextlib
import dataclasses
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from dapo_jax.config import Config
from dapo_jax.distributed.preemption import StopSignals
from dapo_jax.distributed.process_group import ALONE, ProcessGroup
from dapo_jax.evaluation.metrics import evaluate
from dapo_jax.rewards.pool import RewardPool
from dapo_jax.rollout import memory_budget
from dapo_jax.rollout import metrics as rollout_metrics
from dapo_jax.rollout.collector import RolloutCollector
from dapo_jax.rollout.dynamic_sampling import (
    Batch,
    DynamicSamplingState,
    commit,
    open_queue,
    take_kept,
)
from dapo_jax.rollout.pass_rates import pass_rate_of
from dapo_jax.runs import integrity, run_directory
from dapo_jax.runs.checkpoint import Checkpoints
from dapo_jax.runs.run_directory import RunDirectory
from dapo_jax.setup import GREEDY, HostState, RunComponents, RunState, reward_pool
from dapo_jax.training import (
    LearnerState,
    Schedule,
    shaped_rewards,
    state_bytes,
)
from dapo_jax.types import Group, RunError, StopRequested, UserError
from dapo_jax.utils.compilations import CompilationCounter
from dapo_jax.utils.heap import trim_heap
from dapo_jax.utils.profiling import traced
from dapo_jax.utils.progress import Progress, duration
from dapo_jax.utils.telemetry import Telemetry
from dapo_jax.utils.watchdog import WATCHDOG_SECONDS, Watchdog

KEEP_BEST = 1  # checkpoint, by held-out avg@k, besides the newest
# Names of the streams of randomness, folded into the seed's key.
ROLLOUT_KEY, EVALUATION_KEY, BASELINE_KEY = 1, 2, 3


def train(config: Config, workdir: Path, process_group: ProcessGroup = ALONE) -> int | None:
    """Runs the config in `workdir`, from the beginning or from its newest checkpoint.

    Args:
        process_group: the processes of the run. All call this; the primary writes and prints.

    Returns:
        The number of the signal that stopped the run, whichever process got it, or None when it
        reached its last step.

    Raises:
        UserError: a mistake that the user can mend.
        RunError, CheckpointError: the run failed; what is saved is intact.
    """
    started = time.monotonic()
    run_directory.check_processes(config, process_group)
    # All processes read from `workdir` the base model that one of them made, and checkpoints unless
    # config.checkpoint.directory is set.
    if config.checkpoint.directory is None or config.pretrain is not None:
        process_group.check_place(workdir)
    primary, limit = process_group.is_primary, config.rollout.watchdog_limit_seconds
    progress = Progress(config.train.num_steps, quiet=not primary)
    say, give_up = progress.say, process_group.give_up
    with (
        contextlib.closing(RunDirectory(workdir, config, writes=primary, say=say)) as directory,
        StopSignals(progress, process_group) as signals,
        Watchdog(WATCHDOG_SECONDS, say, most=limit, give_up=give_up) as watchdog,
        reward_pool(config) as pool,
        Checkpoints(
            run_directory.checkpoints(workdir, run_directory.frozen(config)),
            keep_newest=config.checkpoint.keep_newest,
            keep_best=KEEP_BEST,
            say=say,
            num_bytes=state_bytes(config),
            all_gather=process_group.all_gather,
            completed=directory.note_saved,
        ) as checkpoints,
    ):
        checkpoints.check_writable()
        progress.watch = watchdog.moved
        telemetry = Telemetry(progress, watchdog, signals.check)
        TrainLoop(config, directory, telemetry, signals, pool, checkpoints, started).run()
    return signals.received_by_any()


class Stage(NamedTuple):
    """The config, components and collector of a stage; without `config.stages` there is one."""

    config: Config
    components: RunComponents
    collector: RolloutCollector


@dataclasses.dataclass
class TrainLoop:
    """Moves the state of a run from step to step, and logs and saves it."""

    config: Config  # of the run; `stage.config` has the fields of the current stage
    directory: RunDirectory
    telemetry: Telemetry
    signals: StopSignals
    pool: RewardPool
    checkpoints: Checkpoints
    started: float  # `time.monotonic()` at the start of the program
    saved_step: int = -1
    save_seconds: float = 0.0  # that the loop waited for the last save
    updated: bool = False  # since this start of the run

    def __post_init__(self) -> None:
        # When the run would have begun, had all its starts been one; as `time.monotonic`.
        self.begun = self.started
        self.process_group = self.signals.process_group
        self.compilations = CompilationCounter()
        self.accuracy_name = f"eval/avg@{self.config.evaluation.num_samples}"

    def run(self) -> None:
        """Runs all steps that are left; where a stop is requested, saves the last completed one."""
        telemetry, steps = self.telemetry, self.config.log.profile_steps
        try:
            state = self.start()
        except StopRequested:
            telemetry.say("stopped while starting; the same command starts again")
            return
        try:
            self.signals.check_together(telemetry.waiting_for)
            while state.step < self.config.train.num_steps:
                state = self._enter_stage(state)
                number, place = state.step + 1, self.directory.path
                with traced(place, number, steps, telemetry.progress, self._writes_a_trace):
                    state = self.one_step(state)
                # All processes wait here for the last one, which may still write its trace.
                self.signals.check_together(telemetry.waiting_for)
            self.finish(state)
        except StopRequested:
            self.save(state)
            self.checkpoints.wait()
            telemetry.say(f"stopped after step {state.step}; the same command resumes there")

    def start(self) -> RunState:
        """Restores the newest checkpoint, or makes the base model and evaluates it."""
        telemetry = self.telemetry
        self.stage = self._make_stage(max(self.checkpoints.steps, default=0) + 1)
        run = self.stage.components
        telemetry.phase("looking for a checkpoint")
        restored, base, base_seconds = self._restore(), None, 0.0
        if restored is None:
            self.directory.check_never_saved(self.checkpoints.directory)
        if restored is None or run.learner.needs_base:
            telemetry.phase("loading or making the base model")
            check_stop = telemetry.watchdog.moving(self.signals.check_together)
            base, base_seconds = run.load_base(self.config, self.directory.path, check_stop)
        found = integrity.fingerprint(base) if run.learner.needs_base else None
        if restored is not None and found is not None:
            place = self.checkpoints.directory
            run_directory.check_base(found, restored.host.base, self.config.model.path, place)
        learner = run.learner.start(base, None if restored is None else restored.learner)
        telemetry.phase("compiling the programs of the rollout")
        run.warm_up(learner.policy.all_params)
        self.directory.rewind(-1 if restored is None else restored.step)
        if restored is None:
            return self._evaluate_base(learner, base_seconds, found)
        return restored._replace(learner=learner)

    def _make_stage(self, step: int) -> Stage:
        """Returns the stage of a rollout step, the programs of its updates compiled.

        At the start of a run, weights are loaded and tokens sampled after this: a refusal by the
        compiler comes within minutes.
        """
        config, telemetry = self.config.at(step), self.telemetry
        telemetry.phase("loading tokenizer and problems")
        run = RunComponents(config, self.directory.path, telemetry.progress, self.process_group)
        self._check_stages(run, after=step)
        collector = run.collector(
            run.train_rubrics,
            config.rollout.group_size,
            run.train_sampling,
            self.pool,
            telemetry,
            end_repetition=config.rollout.end_repetition,
        )
        telemetry.phase("compiling the programs of the update")
        run.learner.compile()
        return Stage(config, run, collector)

    def _check_stages(self, run: RunComponents, after: int) -> None:
        """Raises UserError for a stage that the run could not enter, days before it begins."""
        for first, _ in self.config.stages:
            if first <= after:
                continue
            try:
                run.check_stage(self.config.at(first))
            except UserError as error:
                what = f"config.stages: the stage from step {first} on"
                raise UserError(f"{what}: {error}") from error

    def _enter_stage(self, state: RunState) -> RunState:
        """Replaces the components where the next step is of another stage; keeps the state."""
        step = state.step + 1
        if self.config.at(step) != self.stage.config:
            self.save(state)  # whatever happens while the new programs are compiled
            reference = self.stage.components.learner.reference
            del self.stage  # before the next one takes memory
            self.stage = self._make_stage(step)
            run = self.stage.components
            run.learner.reference = reference
            run.stream.set_state(state.host.data)
            self.telemetry.phase("compiling the programs of the rollout")
            run.warm_up(state.learner.policy.all_params)
        for first, changes in self.config.stages:
            if first == step:
                changed = ", ".join(f"{name} {value!r}" for name, value in changes.items())
                self.telemetry.say(f"step {step} begins a stage: {changed}")
                # Other limits or another temperature sampled what is carried.
                sampling = state.host.sampling._replace(carried=())
                host = state.host._replace(
                    sampling=sampling, schedule=state.host.schedule.in_stage(changes)
                )
                state = state._replace(host=host)
        return state

    def _restore(self) -> RunState | None:
        """Returns the state of the newest checkpoint. Restoring needs only shapes of the state."""
        found = self.checkpoints.restore(self.stage.components.learner.state_like().saved)
        if found is None:
            return None
        step, learner, values = found
        place = self.checkpoints.directory
        run_directory.check_same(values.pop("config"), self.config, place, step)
        run_directory.check_not_past(step, self.config, place)
        host = HostState.from_json(values)
        self.stage.components.stream.set_state(host.data)
        if host.heldout != self.stage.components.heldout_digest:
            raise UserError(
                f"config.data.heldout: the problems are not those on which the run in {place} was "
                "evaluated so far. Restore their files, or choose another --workdir."
            )
        self.begun -= host.seconds
        self.saved_step = self.telemetry.progress.first_step = step
        self.telemetry.say(f"resuming after step {step} of {self.config.train.num_steps}")
        return RunState(step, learner, host)

    def _evaluate_base(
        self, learner: LearnerState, base_seconds: float, base: str | None
    ) -> RunState:
        """Evaluates the base model: step 0 of a new run."""
        begun = time.monotonic()
        numbers = {"step": 0} | self._evaluate(0, learner)
        numbers["perf/compilations"] = self.compilations.count
        numbers["time/step"] = time.monotonic() - begun
        accuracy = numbers[self.accuracy_name]
        host = self.stage.components.first_host_state(accuracy, base_seconds, base)
        if measured := host.sampling.pass_rates:
            self.directory.save_pass_rates(0, [[id, *visit] for id, (visit,) in measured.items()])
        return self._complete(RunState(0, learner, host), numbers)

    def one_step(self, state: RunState) -> RunState:
        """Runs one rollout step: samples a batch, updates, evaluates, logs and saves."""
        (config, run, collector), telemetry = self.stage, self.telemetry
        step, learner, host = state.step + 1, state.learner, state.host
        before = self._begin(step)
        key = self._key(ROLLOUT_KEY, step)
        prompts = open_queue(
            config,
            host.sampling,
            run.problems_in_band(host.sampling),
            step=step,
            share=(run.replica.index, run.replica.count),
            group=self.process_group,
        )
        with (
            run.engine.weights(learner.policy.all_params, telemetry) as weights,
            self.process_group.stop_together(telemetry.waiting_for),
        ):
            copied_bytes = weights.copied_bytes(learner.policy.all_params)
            outcomes = collector.outcomes(prompts, key, step=step)
            taken = take_kept(outcomes)
        del weights  # the update needs their memory
        batch, sampling = commit(config, host.sampling, prompts, taken, step)
        numbers = self._sampling_metrics(step, batch, sampling)
        numbers["perf/weights_bytes"] = copied_bytes
        groups = self._groups_to_train(batch.groups, step)
        groups, baselines = self._with_baselines(groups, learner, step)
        schedule = host.schedule
        with telemetry.timer("update"):
            if groups:  # from here on the parameters before the update are gone: it donates them
                learner, schedule, more = self._update(state, groups, baselines)
                numbers |= more
        if self._is_evaluated(step):
            with telemetry.timer("evaluation"):
                numbers |= self._evaluate(step, learner)
        self._save_rollouts(batch, step)
        host = host._replace(
            data=run.stream.get_state(),
            sampling=sampling,
            accuracy=numbers.get(self.accuracy_name, host.accuracy),
            schedule=schedule,
        )
        return self._complete(RunState(step, learner, host), numbers | self._measured(before))

    def finish(self, state: RunState) -> None:
        """Writes the summary and the page of plots."""
        if self.saved_step != state.step:
            self.save(state)
        self.checkpoints.wait()
        seconds = time.monotonic() - self.begun
        if state.step == self.telemetry.progress.first_step:  # a finished run, started again
            seconds = state.host.seconds
        base, final = state.host.base_accuracy, state.host.accuracy
        summary = {"base_accuracy": base, "final_accuracy": final, "steps": state.step}
        summary |= {"seconds": seconds, "base_seconds": state.host.base_seconds}
        self.directory.save_summary(summary)
        self.directory.close()
        if not self.process_group.is_primary:
            return
        from dapo_jax.runs.report import page  # here: matplotlib takes a second to load

        place = page.write_report(self.directory.path)
        self.telemetry.say(
            f"held-out accuracy {100 * base:.1f} % -> {100 * final:.1f} % in {state.step} steps, "
            f"{duration(seconds)}\nthe run on one page: {place}"
        )

    def save(self, state: RunState) -> None:
        """Saves the state, unless it is saved. Step 0 of a model that has a path is not saved: its
        parameters are those of the path."""
        self.telemetry.watchdog.limited = False  # until the next step: storage may be slow
        first = 1 if self.config.model.path is not None else 0
        if state.step < first or self.saved_step == state.step:
            return
        start = time.monotonic()
        self.telemetry.phase(f"step {state.step}: saving")
        host = state.host._replace(seconds=start - self.begun)
        self.checkpoints.save(
            state.step,
            state.learner.saved,
            host.to_json() | {"config": run_directory.frozen(self.config)},
            accuracy=host.accuracy if self._is_evaluated(state.step) else None,
        )
        self.saved_step = state.step
        self.save_seconds = time.monotonic() - start

    def _complete(self, state: RunState, numbers: dict[str, Any]) -> RunState:
        """Logs a completed step and saves it when it is due; returns its state.

        Metrics are checked and on disk before the checkpoint, so `time/checkpoint` of a step is the
        time of the save before it.
        """
        step, every = state.step, self.config.checkpoint.every_steps
        numbers["time/checkpoint"], self.save_seconds = self.save_seconds, 0.0
        self.directory.log(numbers)
        self.telemetry.progress.step(numbers)
        if step % every == 0 or step == self.config.train.num_steps:
            self.save(state)
        return state

    def _begin(self, step: int) -> dict[str, float]:
        """Begins to time a step; returns the counters that `_measured` compares with."""
        self.telemetry.watchdog.limited = True
        self.telemetry.phase(f"step {step}: sampling")
        self.telemetry.take_seconds()
        trim_heap()  # of the step before: each phase has arrays of other sizes
        return self._counters()

    def _counters(self) -> dict[str, float]:
        counters: dict[str, float] = {"time/step": time.monotonic()}
        counters["perf/reward_pools_replaced"] = self.pool.replaced
        return counters | {"perf/compilations": self.compilations.count}

    def _measured(self, before: dict[str, float]) -> dict[str, float]:
        """Returns times and counts of the step that began with these counters."""
        seconds = self.telemetry.take_seconds()
        numbers = {f"time/{name}": value for name, value in seconds.items()}
        if (peak := memory_budget.peak_bytes(jax.local_devices())) is not None:
            numbers["perf/device_peak_bytes"] = peak
        return numbers | {name: now - before[name] for name, now in self._counters().items()}

    def _key(self, stream: int, step: int) -> jax.Array:
        """Returns the random key of a step, by the stream of randomness."""
        return jax.random.fold_in(jax.random.fold_in(self.stage.components.key, stream), step)

    def _sampling_metrics(
        self, step: int, batch: Batch, sampling: DynamicSamplingState
    ) -> dict[str, Any]:
        """Returns the numbers of the step's rollout; every process must call it.

        Args:
            sampling: the state after the batch.
        """
        (config, run, collector), telemetry = self.stage, self.telemetry
        telemetry.phase(f"step {step}: {len(batch.groups)} groups sampled")
        numbers: dict[str, Any] = {"step": step}
        numbers |= rollout_metrics.sampling_metrics(
            batch,
            ends_repetition=config.rollout.end_repetition is not None,
            ends_thinking=config.rollout.end_of_thinking is not None,
        )
        if config.data.pass_rate_band is not None:
            outside = run.outside_band(sampling)
            numbers["sampling/problems_outside_band"] = len(outside)
        rollout_metrics.check_finite(batch.sampled)
        if faults := rollout_metrics.scorer_faults(batch.sampled):
            telemetry.say(f"  warning: step {step}: {faults}")
        if config.rollout.carries:
            numbers |= rollout_metrics.carry_metrics(batch, step)
        stats, seconds = collector.take_stats()
        for name, value in seconds.items():
            telemetry.add_seconds(name, value)
        return numbers | rollout_metrics.rollout_metrics(stats, seconds, run.replica.count)

    def _update(
        self, state: RunState, groups: list[Group], baselines: list[float] | None
    ) -> tuple[LearnerState, Schedule, dict[str, float]]:
        """Trains on the groups; returns the state of the learner, the schedule of the next step and
        the numbers of the updates."""
        step = state.step + 1
        self.telemetry.phase(f"step {step}: updating")
        trim_heap()
        learner, schedule, numbers = self.stage.components.learner.train_on(
            state.learner, state.host.schedule, groups, step, baselines=baselines
        )
        if not self.updated:
            self.updated = True
            numbers["time/first_update"] = time.monotonic() - self.started
        rewards = [shaped_rewards(self.stage.config, group) for group in groups]
        return learner, schedule, numbers | {"reward/mean": float(np.mean(rewards))}

    def _save_rollouts(self, batch: Batch, step: int) -> None:
        self.telemetry.phase(f"step {step}: writing rollouts and metrics")
        rewards = [shaped_rewards(self.stage.config, group) for group in batch.sampled]
        most = self.config.log.rollouts_per_step
        self.directory.save_rollouts(step, batch.sampled, rewards, most)
        visits = ((group.problem.id, pass_rate_of(group)) for group in batch.sampled)
        self.directory.save_pass_rates(step, [[id, *visit] for id, visit in visits if visit])

    def _with_baselines(
        self, groups: list[Group], learner: LearnerState, step: int
    ) -> tuple[list[Group], list[float] | None]:
        """Returns (groups, baselines): for ReMax the shaped reward of a greedy response to each
        group's prompt, for other advantages None. A group whose greedy response has no verdict, or
        is invalid, has no baseline and is left out."""
        config, run, _ = self.stage
        if not groups or not config.objective.reads("baselines_R"):
            return groups, None
        self.telemetry.phase(f"step {step}: greedy baselines of {len(groups)} prompts")
        ends = config.rollout.end_repetition  # as of the responses that it is a baseline of
        greedy = run.collector(
            run.train_rubrics, 1, GREEDY, self.pool, self.telemetry, end_repetition=ends
        )
        problems = [group.problem for group in groups]
        with run.engine.weights(learner.policy.all_params, self.telemetry):
            scored = greedy.collect(problems, self._key(BASELINE_KEY, step), step=step)
        self.telemetry.add_seconds("rollout", sum(greedy.seconds.values()))
        judged = [
            (group, float(shaped_rewards(config, of_greedy)[0]))
            for group, of_greedy in zip(groups, scored, strict=True)
            if not (of_greedy.verdicts[0].failed or of_greedy.responses[0].invalid)
        ]
        if dropped := len(groups) - len(judged):
            self.telemetry.say(f"  warning: step {step}: {dropped} groups without a baseline")
        return [group for group, _ in judged], [baseline for _, baseline in judged]

    def _groups_to_train(self, groups: list[Group], step: int) -> list[Group]:
        """Returns the groups to train on: all of them, or of a short batch all or none, as
        `dynamic_sampling.exhausted` asks.

        Raises:
            RunError: the batch is short and `exhausted` is "stop".
        """
        config = self.stage.config
        wanted, d = config.train.prompts_per_step, config.dynamic_sampling
        if len(groups) == wanted:
            return groups
        what = f"step {step}: {len(groups)} of {wanted} groups from {d.max_prompts} prompts"
        if d.exhausted == "stop":
            raise RunError(
                f"{what}, and config.dynamic_sampling.exhausted is 'stop'. Raise max_prompts, add "
                "harder or easier problems, or set exhausted to 'train' or 'skip'."
            )
        train = bool(groups) and d.exhausted == "train"
        self.telemetry.say(f"  warning: {what}; {'training on those' if train else 'no update'}")
        return groups if train else []

    def _is_evaluated(self, step: int) -> bool:
        last = step == self.config.train.num_steps
        return last or step % self.config.evaluation.every_steps == 0

    def _evaluate(self, step: int, learner: LearnerState) -> dict[str, float]:
        """Returns the metrics of the held-out problems, and stores some responses."""
        run, num_samples = self.stage.components, self.config.evaluation.num_samples
        self.telemetry.phase(f"step {step}: evaluating on {len(run.heldout)} problems")
        trim_heap()
        # An update before it cannot be repeated, so a stop waits for the end of the evaluation.
        telemetry = self.telemetry if step == 0 else self.telemetry.without_stop()
        collector = run.collector(
            run.heldout_rubrics, num_samples, run.eval_sampling, self.pool, telemetry
        )
        with run.engine.weights(learner.policy.all_params):
            numbers, groups = evaluate(collector, run.heldout, self._key(EVALUATION_KEY, step))
        self.directory.save_heldout(step, groups)
        if faults := rollout_metrics.scorer_faults(groups):
            self.telemetry.say(f"  warning: step {step}, held-out problems: {faults}")
        return numbers

    def _writes_a_trace(self) -> None:
        self.telemetry.watchdog.limited = False  # until the next step: a trace takes long to write
        self.telemetry.watchdog.moved("the trace of the step to be written")
