"""The components of a run, and its state between two steps, for `dapo_jax.train_loop`."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from dapo_jax.config import Config
from dapo_jax.data.dataset import check_scorers, load, rubrics
from dapo_jax.data.stream import ProblemStream, digest_of
from dapo_jax.data.tokenizer import load_tokenizer, stop_tokens
from dapo_jax.distributed.process_group import ALONE, ProcessGroup
from dapo_jax.distributed.replica import Replica
from dapo_jax.evaluation.majority_vote import equivalences
from dapo_jax.models.attention import kernels
from dapo_jax.models.sharding import check_batch_shapes, head_layout, make_mesh, num_processes
from dapo_jax.rewards.pool import RewardPool
from dapo_jax.rewards.types import Rubric
from dapo_jax.rollout import memory_budget, pass_rates
from dapo_jax.rollout.admission import GenerationSettings
from dapo_jax.rollout.collector import RolloutCollector
from dapo_jax.rollout.dynamic_sampling import DynamicSamplingState, state_from_json, state_to_json
from dapo_jax.rollout.end_of_thinking import EndOfThinking
from dapo_jax.rollout.engine import make_engine, run_engine_config
from dapo_jax.rollout.engine_config import EngineConfig
from dapo_jax.rollout.sampling import SamplingParams
from dapo_jax.training import Learner, LearnerState, Schedule, base_model
from dapo_jax.types import RunError, UserError
from dapo_jax.utils.progress import Progress
from dapo_jax.utils.telemetry import Telemetry

GREEDY = SamplingParams(temperature_X=0.0)  # of ReMax's baselines


class HostState(NamedTuple):
    """Host values of a run between steps; saved with the arrays of the learner."""

    data: dict[str, Any]  # position in the stream of problems
    sampling: DynamicSamplingState
    base_accuracy: float
    accuracy: float  # of the last evaluation
    schedule: Schedule  # of the next step
    seconds: float  # worked until the last save, over all starts of the run
    base_seconds: float  # to make or read the base model
    heldout: str  # SHA-256 of the held-out problems
    base: str | None = None  # fingerprint of the base model, where a resumed run reads it again

    def to_json(self) -> dict[str, Any]:
        values = self._asdict() | {"sampling": state_to_json(self.sampling)}
        del values["schedule"]
        return values | self.schedule._asdict()

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "HostState":
        """Raises UserError for values that another version of the code has saved."""
        if values.keys() != {*cls._fields, *Schedule._fields} - {"schedule"}:
            raise UserError(
                "the newest checkpoint was saved by another version of this code. Use that version "
                "(config.json has the commit), or choose another --workdir."
            )
        schedule = Schedule(*(values[name] for name in Schedule._fields))
        others = {name: x for name, x in values.items() if name not in Schedule._fields}
        others["sampling"] = state_from_json(values["sampling"])
        return cls(schedule=schedule, **others)


class RunState(NamedTuple):
    """State of a run between two rollout steps: all that the next step depends on."""

    step: int  # rollout steps completed; 0: the base model is evaluated
    learner: LearnerState
    host: HostState


class RunComponents:
    """The host objects and compiled programs of a run; its state is elsewhere."""

    def __init__(
        self, config: Config, workdir: Path, progress: Progress, process_group: ProcessGroup = ALONE
    ):
        # The least memory of any process, so that all choose the same layout of their arrays.
        each = process_group.all_gather(memory_budget.device_bytes(jax.local_devices()))
        self.memory_bytes = min((size for size in each if size is not None), default=None)
        config = self._with_replica_size(config, progress.say)
        self.config, self.process_group, self.say = config, process_group, progress.say
        self.mesh = make_mesh(config.mesh)
        check_batch_shapes(config, self.mesh.shape)
        choice = self._training_kernel(config)
        save_to = workdir / "tokenizer" if process_group.is_primary else None
        self.tokenizer = load_tokenizer(config.model, save_to=save_to)
        train, heldout = config.data.train, config.data.heldout
        problems = load(config, train, self.tokenizer, field="config.data.train", say=progress.say)
        field, say = "config.data.heldout", progress.say
        self.heldout = load(
            config,
            heldout,
            self.tokenizer,
            field=field,
            say=say,
            warns_of_changed=True,
            training=problems,
        )
        self.train_rubrics, self.heldout_rubrics = rubrics(config, train), rubrics(config, heldout)
        # Pass rates that launch/evaluate.py measured before the run.
        self.measured: pass_rates.PassRates = {}
        for name, source in train.items():
            if source.pass_rates is not None:
                of_source = [problem for problem in problems if problem.source == name]
                field = f"config.data.train.{name}.pass_rates"
                found = pass_rates.measured(source.pass_rates, of_source, field)
                count = f"{len(found)} of {len(of_source)} problems"
                progress.say(f"train.{name}: pass rates of {count}")
                self.measured |= found
        weights = {name: source.weight or 0.0 for name, source in train.items()}
        self.stream = ProblemStream(problems, config.seed, weights)
        self.heldout_digest = digest_of(self.heldout).hexdigest()
        digests = {"training": self.stream.digest, "held-out": self.heldout_digest}
        process_group.check_equal({f"SHA-256 of the {n} problems": x for n, x in digests.items()})
        self.key = jax.random.key(config.seed)
        self.train_sampling = SamplingParams.of(config.rollout)
        self.eval_sampling = SamplingParams.of(config.evaluation)
        self.end_of_thinking = EndOfThinking.of(config.rollout, self.tokenizer)
        self.engine = make_engine(
            config,
            self.mesh,
            stop_tokens(config.model, self.tokenizer),
            max_prompt_tokens=config.data.max_prompt_tokens,
        )
        progress.say(attention_line(choice, self.engine.config))
        self.replica = Replica(process_group, num_processes(self.engine.mesh))
        self.learner = Learner(config, self.mesh, self.detokenize, progress.say, progress.doing)
        if process_group.count > 1:
            progress.say(process_group.described())
        sizes = " x ".join(f"{name} {size}" for name, size in self.mesh.shape.items())
        devices = self.mesh.devices
        kind = devices.flat[0].device_kind
        progress.say(f"{devices.size} {kind} device(s), mesh {sizes}; run directory {workdir}")

    def _with_replica_size(self, config: Config, say: Callable[[str], None]) -> Config:
        return memory_budget.with_replica_size(config, jax.devices(), self.memory_bytes, say)

    def _training_kernel(self, config: Config) -> kernels.Choice:
        layout = head_layout(config.model, config.mesh, self.mesh)
        share_prompts = config.train.share_prompts
        return kernels.choose(config.model, layout, share_prompts=share_prompts)

    def check_stage(self, config: Config) -> None:
        """Raises UserError if a later stage, with this config, could not begin on these devices."""
        config = self._with_replica_size(config, lambda _: None)
        check_batch_shapes(config, self.mesh.shape)
        self._training_kernel(config)
        run_engine_config(config, self.mesh, (), max_prompt_tokens=config.data.max_prompt_tokens)
        EndOfThinking.of(config.rollout, self.tokenizer)

    def load_base(
        self, config: Config, workdir: Path, check_stop: Callable[[], None]
    ) -> tuple[Any, float]:
        """Returns the parameters of the base model, and the seconds that it took to make.

        Args:
            config: of the run, with its stages: all have one base.
        """
        return base_model.load_or_make(
            config,
            self.mesh,
            self.tokenizer,
            workdir / "base",
            say=self.say,
            check_stop=check_stop,
            process_group=self.process_group,
        )

    def warm_up(self, params: Any) -> None:
        """Compiles the programs of the rollouts."""
        samplings = [self.train_sampling, self.eval_sampling]
        if self.config.objective.reads("baselines_R"):
            samplings.append(GREEDY)
        modes = dict.fromkeys(sampling.mode for sampling in samplings)
        r, loaded = self.config.rollout, self.engine.load_params(params)
        cancels = bool(r.stop_strings) or r.end_repetition is not None
        self.engine.warm_up(loaded, modes, cancels=cancels, say=self.say)

    def first_host_state(self, accuracy: float, base_seconds: float, base: str | None) -> HostState:
        """Returns the host state of a new run whose base model has this accuracy."""
        return HostState(
            data=self.stream.get_state(),
            sampling=DynamicSamplingState(pass_rates=self.measured),
            base_accuracy=accuracy,
            accuracy=accuracy,
            schedule=Schedule.first(self.config.objective),
            seconds=0.0,
            base_seconds=base_seconds,
            heldout=self.heldout_digest,
            base=base,
        )

    def collector(
        self,
        rubrics: Mapping[str, Rubric],
        num_samples: int,
        sampling: SamplingParams,
        pool: RewardPool,
        telemetry: Telemetry,
        *,
        end_repetition: int | None = None,
    ) -> RolloutCollector:
        """Returns a collector of groups of `num_samples` responses."""
        settings = GenerationSettings(
            num_samples,
            sampling,
            self.config.rollout.stop_strings,
            end_repetition,
            end_of_thinking=self.end_of_thinking,
        )
        return RolloutCollector(
            self.engine,
            pool,
            rubrics,
            self.detokenize,
            settings,
            replica=self.replica,
            telemetry=telemetry,
        )

    def problems_in_band(self, sampling: DynamicSamplingState) -> ProblemStream:
        """Returns the stream of problems without those that are passed over.

        Raises:
            RunError: fewer problems are left than a batch has.
        """
        passed_over, wanted = self.outside_band(sampling), self.config.train.prompts_per_step
        if passed_over and self.stream.num_problems - len(passed_over) < wanted:
            raise RunError(
                f"{len(passed_over)} of the {self.stream.num_problems} problems of "
                "config.data.train have a pass rate outside of config.data.pass_rate_band "
                f"{self.config.data.pass_rate_band}, and the others fill no batch of "
                f"config.train.prompts_per_step ({wanted}). The checkpoints are intact. Start a "
                "new run from the last one, with more problems or a wider band."
            )
        return self.stream.without(passed_over)

    def outside_band(self, sampling: DynamicSamplingState) -> frozenset[int]:
        """Returns the ids of the problems that are passed over, see `data.pass_rate_band`."""
        band = self.config.data.pass_rate_band
        return frozenset() if band is None else pass_rates.outside(sampling.pass_rates, band)

    def detokenize(self, sequences: Sequence[np.ndarray]) -> list[str]:
        return self.tokenizer.batch_decode(sequences, skip_special_tokens=True)


def reward_pool(config: Config) -> RewardPool:
    """Returns workers with every scorer of the run's training and held-out responses.

    Raises:
        UserError: a scorer cannot be loaded.
    """
    check_scorers(config)
    train, heldout = rubrics(config, config.data.train), rubrics(config, config.data.heldout)
    named = {name for rubric in (*train.values(), *heldout.values()) for name in rubric.names}
    r = config.reward
    scorers = named | equivalences(heldout)
    return RewardPool(scorers, workers=r.workers, timeout_seconds=r.timeout_seconds)


def attention_line(choice: kernels.Choice, engine_config: EngineConfig) -> str:
    """Returns a line with the attention kernels, and why XLA's attention replaces a kernel."""
    of = lambda kernel, refused: f"{kernel} ({refused})" if refused else kernel
    training = of(choice.kernel, choice.refused)
    rollouts = of(engine_config.kernel, engine_config.kernel_refused)
    return f"attention on {choice.platform}: training {training}, rollouts {rollouts}"
