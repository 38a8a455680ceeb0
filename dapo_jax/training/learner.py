"""The learner: one pass of updates over the scored groups of a rollout step.

`dapo_jax.train_loop` calls `Learner.train_on`. Rewards and advantages are of the whole batch,
which is then cut into mini-batches, one optimiser step each.
"""

import collections
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dapo_jax.algorithms import advantages, aggregation, entropy
from dapo_jax.algorithms.kl import reward_kl
from dapo_jax.config import Config
from dapo_jax.models import decoder, lora
from dapo_jax.models.sharding import BATCH_AXES, parts_of, row_sharding, to_host, with_shardings
from dapo_jax.training import critic, metrics, packing
from dapo_jax.training import step as train_step
from dapo_jax.training.batch import (
    TokenColumns,
    estimate_advantages,
    kept_lengths,
    make_samples,
    with_corrections,
)
from dapo_jax.training.optimizer import learning_rate
from dapo_jax.training.packing import take_columns
from dapo_jax.training.schedule import Schedule
from dapo_jax.types import Group, Rows, RunError, Samples
from dapo_jax.utils.heap import trim_after_compilations
from dapo_jax.utils.precision import multiply_in
from dapo_jax.utils.random_streams import named_generator

MAX_NONFINITE_UPDATES = 3  # skipped updates in a row that end the run


class LearnerState(NamedTuple):
    """Arrays that the updates of a run change; saved in its checkpoints."""

    policy: train_step.TrainState
    critic: train_step.TrainState | None

    @property
    def saved(self) -> "LearnerState":
        """The state as a checkpoint holds it."""
        return self._replace(policy=self.policy.saved)


class MiniBatch(NamedTuple):
    """A slice of the batch with its packed rows."""

    responses: slice
    tokens: slice
    packed: packing.Packed


class _Updates(NamedTuple):
    """The updates of one rollout step."""

    policy: list[train_step.UpdateMetrics]
    critic: list[critic.CriticMetrics]
    kept_tokens: int  # trained tokens of all updates, after corrections
    empty: int  # mini-batches without such a token


def _init_state(config: Config, params: decoder.Params) -> LearnerState:
    value_model = None if config.critic is None else critic.init_state(config, params)
    return LearnerState(train_step.init_state(config, params), value_model)


def state_shapes(config: Config) -> LearnerState:
    """Returns shapes and dtypes of the state of a run."""
    params = decoder.param_shapes(config.model)
    return jax.eval_shape(functools.partial(_init_state, config), params)


def state_bytes(config: Config) -> int:
    """Returns the bytes of a checkpoint of the state."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state_shapes(config).saved))


class Learner:
    """The updates of a run: compiled programs and the arithmetic around them.

    Args:
        detokenize: token sequences to texts.
        say: prints a line above the progress display.
        doing: shows the current phase.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        detokenize: Callable[[Sequence[np.ndarray]], list[str]],
        say: Callable[[str], None],
        doing: Callable[[str], None] = lambda _: None,
    ):
        trim_after_compilations()
        multiply_in(config.model.compute_dtype, mesh.devices.flat[0].platform)
        self.config, self.mesh, self.detokenize = config, mesh, detokenize
        self.say, self.doing = say, doing
        # The trained parameters of the base model, where the objective needs them.
        self.reference: decoder.Params | None = None
        # Jitted; see `compile`.
        self.update: Any = train_step.jitted_update(config, mesh)
        self.log_probs: Any = train_step.jitted_statistic(config, mesh)
        self.collision: Any = train_step.jitted_statistic(config, mesh, statistic="collision")
        self.entropy: Any = train_step.jitted_statistic(config, mesh, statistic="entropy")
        if config.critic is not None:
            self.critic_optimizer = critic.optimizer_config(config)
            self.values: Any = critic.jitted_values(config, mesh)
            self.update_critic: Any = critic.jitted_update(config, mesh)
        o = config.objective
        self.needs_reference, self.needs_current = o.reads_reference, config.reads_current_log_probs
        self.needs_energy, self.needs_entropy = o.reads("energy_M"), o.reads_entropy
        self.needs_base = self.needs_reference or config.model.lora_rank > 0  # to resume
        self.adapts_entropy = o.entropy_adaptation is not None
        self.needs_log_probs = (
            config.rollout.log_prob_source == "recompute"
            or self.needs_current
            or self.needs_reference
            or (self.needs_energy and config.rollout.carries)
        )

    def _shardings(self) -> LearnerState:
        config, mesh = self.config, self.mesh
        value_model = None if config.critic is None else critic.state_shardings(config, mesh)
        return LearnerState(train_step.state_shardings(config, mesh), value_model)

    def state_like(self) -> LearnerState:
        """Returns shapes, dtypes and shardings of the state."""
        return with_shardings(state_shapes(self.config), self._shardings())

    def compile(self) -> None:
        """Compiles every program of `train_on`, which then compiles none.

        Raises:
            RunError: the compiler refuses a program.
        """
        config, t = self.config, self.config.train
        state, rows_at = self.state_like(), row_sharding(self.mesh, batch_dim=1)
        shape = packing.max_micro_batches(config), t.rows_per_micro_batch, t.row_tokens
        rows = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(shape, x.dtype, sharding=rows_at),
            packing.empty_rows(1, 1),
        )
        integer, real = (jax.ShapeDtypeStruct((), dtype) for dtype in (np.int32, np.float32))
        compiled = lambda program, *args: program.lower(*args).compile()
        try:
            coefficient = real if self.adapts_entropy else None
            self.update = compiled(
                self.update, state.policy, rows, integer, real, real, coefficient
            )
            if self.needs_log_probs:
                self.log_probs = compiled(self.log_probs, state.policy.all_params, rows, integer)
            if self.needs_energy:
                self.collision = compiled(self.collision, state.policy.all_params, rows, integer)
            if self.needs_entropy:
                self.entropy = compiled(self.entropy, state.policy.all_params, rows, integer)
            if state.critic is not None:
                self.values = compiled(self.values, state.critic.params, rows, integer)
                self.update_critic = compiled(
                    self.update_critic, state.critic, rows, integer, real, real
                )
        except jax.errors.JaxRuntimeError as error:
            raise RunError(f"the programs of the update do not compile: {error}") from error

    def start(self, base: decoder.Params | None, restored: LearnerState | None) -> LearnerState:
        """Returns the state to start from: the restored one, else that of the base model. The base
        becomes the reference where the objective needs one.

        Args:
            base: may be None where there is a restored state and not `needs_base`. Its memory is
                taken over unless it is the reference.
            restored: as a checkpoint holds it, see `LearnerState.saved`.
        """
        trained, frozen = (None, None) if base is None else lora.split(base)
        if self.needs_reference:
            # The reference of adapters is the base without them: no second copy of it.
            off = jax.jit(lora.switched_off, out_shardings=self._shardings().policy.params)
            self.reference = trained if frozen is None else off(trained)
        if restored is not None:
            return restored._replace(policy=restored.policy._replace(frozen=frozen))
        return self.init_state(base, donate=frozen is not None or not self.needs_reference)

    def init_state(self, params: decoder.Params | None, *, donate: bool = False) -> LearnerState:
        """Returns the state of a base model.

        Args:
            donate: whether the state takes over the buffers of the parameters. Otherwise it has a
                copy, because updates donate them.
        """
        own = (lambda x: x) if donate else jnp.copy
        return jax.jit(
            lambda params: _init_state(self.config, jax.tree.map(own, params)),
            out_shardings=self._shardings(),
            donate_argnums=0 if donate else (),
        )(params)

    def train_on(
        self,
        state: LearnerState,
        schedule: Schedule,
        groups: Sequence[Group],
        step: int,
        *,
        baselines: Sequence[float] | None = None,
    ) -> tuple[LearnerState, Schedule, dict[str, float]]:
        """Returns the state after one pass over the groups in mini-batches, the schedule of the
        next step, and the metrics.

        A mini-batch without a trained token makes no update: momentum and weight decay alone would
        move the parameters.

        Args:
            schedule: of this step; learning rates and the critic's head start advance with the
                steps that made an update.
            baselines: reward of the greedy response to the prompt of each group, for ReMax.

        Raises:
            RunError: too many updates in a row had no finite gradient.
        """
        config, num_steps = self.config, self.config.train.num_steps
        head_start = 0 if config.critic is None else config.critic.head_start_steps
        # Position in the policy's learning-rate schedule: from 1, and below in the critic's head
        # start.
        policy_step = schedule.updated_steps + 1 - head_start
        order = np.random.default_rng([config.seed, step]).permutation(len(groups))
        samples = make_samples(config, [groups[i] for i in order], step, self.detokenize)
        baselines_R = None
        if baselines is not None:
            baselines_R = np.asarray(baselines, np.float64)[order][samples.groups_R]
        mini_batches = self._cut(samples)
        columns, numbers = self._forward_pass(state, samples, mini_batches)
        numbers |= metrics.staleness_metrics(samples)
        kl_M = self._reward_kl(samples, columns)
        kl_penalty_M = None if kl_M is None else schedule.reward_kl_coefficient * kl_M
        columns = self._with_advantages(samples, columns, kl_penalty_M, baselines_R)
        numbers |= metrics.advantage_metrics(columns)

        kl = None if kl_M is None else _mean(kl_M[columns.mask_M])
        if kl is not None:
            numbers["reward/kl"] = kl
            numbers["reward/kl_coefficient"] = schedule.reward_kl_coefficient
        # In the critic's head start the policy is not updated, so neither its entropy bonus nor the
        # KL in its reward adapts.
        entropy_old = None
        if self.adapts_entropy and policy_step > 0 and columns.mask_M.any():
            assert columns.entropy_M is not None
            entropy_old = _mean(columns.entropy_M[columns.mask_M])
            numbers["policy/entropy_old"] = entropy_old
            numbers["policy/entropy_coefficient"] = schedule.entropy_coefficient

        rate = critic_rate = None
        if policy_step > 0:
            rate = learning_rate(config.optimizer, policy_step, num_steps - head_start)
        if state.critic is not None:
            critic_rate = learning_rate(
                self.critic_optimizer, schedule.updated_steps + 1, num_steps
            )
        state, updates = self._update_each(
            state,
            samples,
            mini_batches,
            columns,
            step,
            rate=rate,
            critic_rate=critic_rate,
            entropy_coefficient=self._entropy_coefficient(schedule, entropy_old),
        )
        results = [*updates.policy, *updates.critic]
        self._check_skipped(results, step)
        has_mismatch = config.rollout.log_prob_source == "rollout"
        numbers |= metrics.update_metrics(updates.policy, has_mismatch=has_mismatch)
        numbers |= metrics.critic_metrics(updates.critic)
        numbers["optimizer/learning_rate"] = rate if rate and numbers["optimizer/updates"] else 0.0
        numbers["optimizer/empty_updates"] = updates.empty
        if config.correction is not None:
            trained = max(1, int(columns.mask_M.sum()))
            numbers["correction/rejected_share"] = 1 - updates.kept_tokens / trained
        segments = [batch.packed.rows.segments_BT for batch in mini_batches]
        padding, total = sum((s == 0).sum() for s in segments), sum(s.size for s in segments)
        numbers["batch/padding_share"] = float(padding / max(1, total))
        schedule = schedule.after(
            config.objective,
            updated=any(not result.skipped for result in results),
            num_responses=len(samples.lengths_R),
            kl=kl if policy_step > 0 and columns.mask_M.any() else None,
            entropy=entropy_old,
        )
        return state, schedule, numbers

    def _update_each(
        self,
        state: LearnerState,
        samples: Samples,
        mini_batches: Sequence[MiniBatch],
        columns: TokenColumns,
        step: int,
        *,
        rate: float | None,
        critic_rate: float | None,
        entropy_coefficient: np.float32 | None,
    ) -> tuple[LearnerState, _Updates]:
        """Updates the models on one mini-batch after another.

        Args:
            rate, critic_rate: learning rates of the policy and the critic; None: no update of it.
            entropy_coefficient: None: the config's.
        """
        policy, value_model = state
        results, critic_results, kept, empty = [], [], 0, 0
        in_flight: collections.deque[tuple[int, Any]] = collections.deque()

        def wait(most: int) -> None:
            while len(in_flight) > most:
                number, computed = in_flight.popleft()
                jax.block_until_ready(computed)
                self.doing(f"step {step}: {number + 1} of {len(mini_batches)} updates made")

        for number, batch in enumerate(mini_batches):
            random = named_generator("clip-cov", self.config.seed, step, number)
            rows, denominator = self._finish(policy, samples, batch, columns, random)
            tokens = int(rows.mask_BT.sum())
            kept += tokens
            if not tokens:
                empty += 1
                continue
            wait(most=1)  # one is computed while the next one's rows are sent, as in `forward`
            on_mesh, n = self._micro_batches(rows)
            result = critic_result = None
            if critic_rate is not None:
                value_model, critic_result = self.update_critic(
                    value_model, on_mesh, n, denominator, np.float32(critic_rate)
                )
                critic_results.append(critic_result)
            if rate is not None:
                policy, result = self.update(
                    policy, on_mesh, n, denominator, np.float32(rate), entropy_coefficient
                )
                results.append(result)
            in_flight.append((number, (critic_result, result)))
        wait(most=0)
        updates = _Updates(results, critic_results, kept, empty)
        return LearnerState(policy, value_model), updates

    def _entropy_coefficient(
        self, schedule: Schedule, entropy_old: float | None
    ) -> np.float32 | None:
        """Returns the coefficient of the entropy bonus; None where it does not adapt."""
        adaptation = self.config.objective.entropy_adaptation
        if adaptation is None:
            return None
        if entropy_old is None:
            return np.float32(0.0)
        target, _ = adaptation
        coefficient = schedule.entropy_coefficient
        return np.float32(
            entropy.applied_entropy_coefficient(coefficient, entropy_old, target=target)
        )

    def _cut(self, samples: Samples) -> list[MiniBatch]:
        """Returns the packed mini-batches: slices, as a group's responses are adjacent."""
        P = self.config.train.prompts_per_update
        offsets = np.concatenate([[0], np.cumsum(samples.lengths_R)])
        num_groups = int(samples.groups_R.max(initial=-1)) + 1
        bounds = np.searchsorted(samples.groups_R, [*range(0, num_groups, P), num_groups])
        mini_batches = []
        for first, last in itertools.pairwise(bounds):
            responses, tokens = slice(first, last), slice(offsets[first], offsets[last])
            packed = packing.pack(
                samples.prompts[responses],
                samples.tokens_M[tokens],
                samples.lengths_R[responses],
                self.config.train.row_tokens,
                rows_per_micro_batch=self.config.train.rows_per_micro_batch,
                shards=parts_of(BATCH_AXES, self.mesh.shape),
                share_prompts=self.config.train.share_prompts,
            )
            mini_batches.append(MiniBatch(responses, tokens, packed))
        return mini_batches

    def _forward_pass(
        self, state: LearnerState, samples: Samples, mini_batches: Sequence[MiniBatch]
    ) -> tuple[TokenColumns, dict[str, float]]:
        """Returns the columns that depend on the parameters before the first update (old and
        reference log-probs, values, entropies, where needed), and the mismatch to the rollout's
        log-probs."""

        def forward(program: Callable[..., jax.Array], params: Any) -> np.ndarray:
            # One mini-batch is computed while the next one's rows are sent. More would hold memory
            # of the devices.
            parts, waiting = [np.zeros(0, np.float32)], collections.deque()
            for number, batch in enumerate([*mini_batches, None]):
                if batch is not None:
                    waiting.append(
                        (batch, program(params, *self._micro_batches(batch.packed.rows)))
                    )
                if number > 0:
                    computed, result = waiting.popleft()
                    parts.append(take_columns(computed.packed, to_host(result)))
                    self.doing(
                        f"log-probs of {number} of {len(mini_batches)} mini-batches computed"
                    )
            return np.concatenate(parts)

        numbers: dict[str, float] = {}
        old_M, recomputed_M = samples.log_prob_M, None
        if self.config.rollout.log_prob_source == "recompute":
            old_M = recomputed_M = forward(self.log_probs, state.policy.all_params)
            if not self.config.rollout.excludes_tokens:  # else they are of two distributions
                numbers = metrics.mismatch_metrics(samples, recomputed_M)
                numbers |= metrics.stale_mismatch_metrics(samples, recomputed_M)
            c = self.config.correction
            if c is None or c.policy != "proximal":
                # The ratio of a stale token is to the policy that sampled it.
                old_M = np.where(samples.staleness_M == 0, recomputed_M, samples.log_prob_M)
        found: dict[str, np.ndarray] = {}
        if self.needs_reference:
            assert self.reference is not None
            reference = lora.join(self.reference, state.policy.frozen)
            found["log_prob_ref_M"] = forward(self.log_probs, reference)
        if state.critic is not None:
            found["value_old_M"] = forward(self.values, state.critic.params)
        if self.needs_entropy:
            found["entropy_M"] = forward(self.entropy, state.policy.all_params)
        if self.needs_energy:
            # Both of the policy before the update, also where another one sampled a stale token.
            own_M = recomputed_M
            if own_M is None:
                carries = self.config.rollout.carries
                own_M = forward(self.log_probs, state.policy.all_params) if carries else old_M
            collision_M = forward(self.collision, state.policy.all_params)
            found["energy_M"] = advantages.token_energy(own_M, collision_M)
        columns = TokenColumns(
            samples.trained_M,
            log_prob_old_M=old_M,
            staleness_M=samples.staleness_M,
            recomputed_M=recomputed_M,
            **found,
        )
        return columns, numbers

    def _reward_kl(self, samples: Samples, columns: TokenColumns) -> np.ndarray | None:
        """Returns the KL to the reference that each token's reward is charged [M], nats; None: the
        reward has none."""
        objective = self.config.objective
        if objective.reward_kl_coefficient == 0:
            return None
        assert columns.log_prob_ref_M is not None
        kl_M = reward_kl(
            columns.log_prob_old_M, columns.log_prob_ref_M, estimator=objective.kl_estimator
        )
        # Responses that only count in the baseline of their group are charged it too.
        counted_M = np.repeat(samples.trained_R | samples.counted_R, samples.lengths_R)
        return np.where(counted_M & samples.sampled_M, kl_M, 0.0)

    def _with_advantages(
        self,
        samples: Samples,
        columns: TokenColumns,
        kl_penalty_M: np.ndarray | None,
        baselines_R: np.ndarray | None,
    ) -> TokenColumns:
        """Returns the columns with advantages, and returns where there is a critic."""
        found = estimate_advantages(
            self.config,
            samples,
            kl_penalty_M=kl_penalty_M,
            values_M=columns.value_old_M,
            baselines_R=baselines_R,
            energy_M=columns.energy_M,
        )
        return columns._replace(advantage_M=found.advantage_M, return_M=found.return_M)

    def _finish(
        self,
        policy: train_step.TrainState,
        samples: Samples,
        batch: MiniBatch,
        columns: TokenColumns,
        random: np.random.Generator,
    ) -> tuple[Rows, np.float32]:
        """Returns the complete rows of a mini-batch and the denominator of its loss."""
        lengths_R = samples.lengths_R[batch.responses]
        current_M = None
        if self.needs_current:
            current = self.log_probs(policy.all_params, *self._micro_batches(batch.packed.rows))
            current_M = take_columns(batch.packed, to_host(current))
            self.doing("updating; the log-probs of each mini-batch are computed first")
        mine = with_corrections(
            self.config,
            columns.part(batch.tokens),
            lengths_R,
            samples.log_prob_M[batch.tokens],
            current_M=current_M,
            priority_M=random.random(int(lengths_R.sum())),
        )
        weights = aggregation.aggregate(
            kept_lengths(mine.mask_M, lengths_R),
            samples.groups_R[batch.responses],
            aggregation=self.config.objective.aggregation,
            max_response_tokens=self.config.rollout.max_response_tokens,
        )
        mine = mine._replace(weight_M=mine.mask_M * np.repeat(weights.numerator_R, lengths_R))
        return packing.fill(batch.packed, **mine.of_rows()), np.float32(weights.denominator)

    def _micro_batches(self, rows: Rows) -> train_step.MicroBatches:
        return train_step.micro_batches_on(
            self.mesh,
            rows,
            rows_per_micro_batch=self.config.train.rows_per_micro_batch,
            num_micro_batches=packing.max_micro_batches(self.config),
        )

    def _check_skipped(self, results: Sequence[Any], step: int) -> None:
        in_a_row = 0
        for result in results:
            in_a_row = max(in_a_row, int(result.skipped))
        if in_a_row >= MAX_NONFINITE_UPDATES:
            raise RunError(
                f"The gradient was not finite in {in_a_row} updates in a row, at step {step} "
                f"({MAX_NONFINITE_UPDATES} are too many). The parameters were left as "
                "they were and the checkpoints before this step are intact. A lower "
                "config.optimizer.learning_rate, or float32 in config.model.compute_dtype, is the "
                "usual remedy."
            )
        if in_a_row:
            self.say(f"  warning: non-finite gradient, {in_a_row} update(s) skipped at step {step}")


def _mean(x_n: np.ndarray) -> float:
    """Returns the mean in float64; 0 of no values."""
    return float(x_n.mean(dtype=np.float64)) if len(x_n) else 0.0
