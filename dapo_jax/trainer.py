"""The compiled programs of a run and what they need: engines, update, scoring, data."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dapo_jax import aggregation, batching, critic, metrics, model, objective, train_step
from dapo_jax.batching import take_columns
from dapo_jax.config import Config
from dapo_jax.data import ProblemStream
from dapo_jax.policy_losses import COVARIANCE_LOSSES
from dapo_jax.problems import load_problems
from dapo_jax.progress import Progress
from dapo_jax.rollout.engine import DecoderEngine, EngineSpec
from dapo_jax.samples import estimate_advantages, finished_columns, kept_lengths, make_samples
from dapo_jax.sharding import batch_sharding, check_batch_shapes, make_mesh
from dapo_jax.tokenizer import load_tokenizer
from dapo_jax.types import Group, Rows, RunError, Samples

# Rows [M, B, T] of a mini-batch on the device, and how many of the M are used.
MicroBatches = tuple[Rows, np.int32]


class RunState(NamedTuple):
    """What the updates of a run change; saved in its checkpoints."""

    policy: train_step.TrainState
    critic: train_step.TrainState | None


class _Cut(NamedTuple):
    """One mini-batch of a batch: which responses and tokens, and their rows."""

    responses: slice
    tokens: slice
    packed: batching.Packed
    micro_batches: Any  # MicroBatches for scoring before the update, or None


class Trainer:
    """The compiled programs and the host objects of a run."""

    def __init__(self, config: Config, workdir: Path, progress: Progress):
        self.config, self.progress = config, progress
        self.mesh = make_mesh(config.mesh)
        check_batch_shapes(config, self.mesh.shape["data"], self.mesh.shape["fsdp"])
        self.tokenizer = load_tokenizer(config.model, save_to=workdir / "tokenizer")
        train, self.heldout, notes = load_problems(config, self.tokenizer)
        for note in notes:
            progress.say(note)
        self.stream = ProblemStream(train, config.seed)
        self.key = jax.random.key(config.seed)
        self.engine = self._engine(config.rollout.temperature, config.rollout.top_p)
        self.evaluation_engine = self._engine(
            config.evaluation.temperature, config.evaluation.top_p
        )
        self.update = train_step.compile_update(config, self.mesh)
        self.score = train_step.compile_scoring(config, self.mesh)
        self.reference: model.Params | None = None
        o, c = config.objective, config.correction
        self.needs_reference = o.kl_coefficient > 0 or o.reward_kl_coefficient > 0
        self.needs_reference_log_probs = o.reward_kl_coefficient > 0 or (
            o.kl_coefficient > 0 and o.kl_estimator != "full"
        )
        # Log-probs of a whole mini-batch at the very parameters of its gradient.
        self.needs_current = o.loss in COVARIANCE_LOSSES or (
            c is not None and c.policy == "current"
        )
        self.needs_scoring = (
            self.needs_current
            or self.needs_reference_log_probs
            or config.critic is not None
            or config.rollout.log_prob_source == "recompute"
        )
        if config.critic is not None:
            self.critic_optimizer = critic.optimizer_config(config)
            self.values = critic.compile_values(config, self.mesh)
            self.update_critic = critic.compile_update(config, self.mesh)
        if o.advantage == "remax":
            self.greedy_engine = self._engine(0.0, 1.0)

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

    def init_state(self, params: model.Params) -> RunState:
        """The state of a base model; its parameters are copied, for updates donate them."""
        config, mesh = self.config, self.mesh
        policy = jax.jit(
            lambda params: train_step.init_state(config, jax.tree.map(jnp.copy, params)),
            out_shardings=train_step.state_shardings(config, mesh),
        )(params)
        if config.critic is None:
            return RunState(policy, None)
        value_model = jax.jit(
            lambda params: critic.init_state(config, params),
            out_shardings=critic.state_shardings(config, mesh),
        )(params)
        return RunState(policy, value_model)

    def update_on(
        self,
        state: RunState,
        groups: Sequence[Group],
        step: int,
        *,
        kl_coefficient: float,
        baselines: Sequence[float] | None = None,
    ) -> tuple[RunState, dict[str, float]]:
        """The state after one pass over the groups in mini-batches, and the step's numbers.

        Args:
            kl_coefficient: of the KL in the reward, for this step.
            baselines: reward of the greedy response to the prompt of each group, for ReMax.
        """
        config, t = self.config, self.config.train
        order = np.random.default_rng([config.seed, step]).permutation(len(groups))
        samples = make_samples(config, [groups[i] for i in order], step, self.detokenize)
        cuts = self._cut(samples)
        # Old, reference and value columns belong to the parameters before the first update.
        columns, numbers = self._columns(state, samples, cuts)
        kl_penalty_N = None
        if config.objective.reward_kl_coefficient > 0:
            kl_N = self._reward_kl(samples, columns)
            numbers["reward/kl"] = float(kl_N[columns["mask_BT"]].mean())
            numbers["reward/kl_coefficient"] = kl_coefficient
            kl_penalty_N = kl_coefficient * kl_N
        baselines_R = None
        if baselines is not None:
            baselines_R = np.asarray(baselines, np.float64)[order][samples.groups_R]
        advantages = estimate_advantages(
            config,
            samples,
            kl_penalty_N=kl_penalty_N,
            values_N=columns.get("value_old_BT"),
            baselines_R=baselines_R,
        )
        columns["advantage_BT"] = advantages.advantage_N
        if advantages.return_N is not None:
            columns["return_BT"] = advantages.return_N
        numbers |= metrics.advantage_metrics(columns)

        rate = train_step.learning_rate(config.optimizer, step, t.num_steps)
        results, critic_results, kept = [], [], []
        policy, critic_state = state
        for number, cut in enumerate(cuts):
            mine = {name: column[cut.tokens] for name, column in columns.items()}
            lengths_R = samples.lengths_R[cut.responses]
            log_prob_N = samples.log_prob_N[cut.tokens]
            priority_N = np.random.default_rng([config.seed, step, number]).random(len(log_prob_N))
            current_N = None
            if self.needs_current:
                current_N = take_columns(cut.packed, self.score(policy.params, *cut.micro_batches))
            mine = finished_columns(
                config, mine, lengths_R, log_prob_N, current_N=current_N, priority_N=priority_N
            )
            kept.append((mine["mask_BT"].sum(), columns["mask_BT"][cut.tokens].sum()))
            weights = aggregation.aggregate(
                kept_lengths(mine["mask_BT"], lengths_R),
                samples.groups_R[cut.responses],
                aggregation=config.objective.aggregation,
                max_response_tokens=config.rollout.max_response_tokens,
            )
            mine["weight_BT"] = mine["mask_BT"] * np.repeat(weights.numerator_R, lengths_R)
            rows, n = self._micro_batches(batching.fill(cut.packed, **mine))
            denominator = np.float32(weights.denominator)
            if critic_state is not None:
                critic_rate = train_step.learning_rate(self.critic_optimizer, step, t.num_steps)
                critic_state, result = self.update_critic(
                    critic_state, rows, n, denominator, np.float32(critic_rate)
                )
                critic_results.append(result)
            if config.critic is None or step > config.critic.head_start_steps:
                full = config.objective.kl_estimator == "full"
                policy, result = self.update(
                    policy,
                    rows,
                    n,
                    denominator,
                    np.float32(rate),
                    self.reference if full else None,
                )
                results.append(result)
        numbers = metrics.update_metrics(results) | numbers
        if critic_results:
            numbers |= metrics.critic_metrics(critic_results)
        numbers["optimizer/learning_rate"] = rate
        if config.correction is not None:
            trained = sum(before for _, before in kept)
            numbers["correction/rejected_share"] = 1 - sum(k for k, _ in kept) / max(1, trained)
        used_rows = sum(len(cut.packed.rows.tokens_BT) for cut in cuts)
        padding = sum(int((cut.packed.rows.segments_BT == 0).sum()) for cut in cuts)
        numbers["batch/padding_share"] = padding / max(1, used_rows * t.row_tokens)
        self._check_skipped([*results, *critic_results], step)
        return RunState(policy, critic_state), numbers

    def _cut(self, samples: Samples) -> list[_Cut]:
        """The mini-batches, packed."""
        P = self.config.train.prompts_per_update
        ends_R = np.cumsum(samples.lengths_R)
        cuts = []
        for first in range(0, int(samples.groups_R.max(initial=-1)) + 1, P):
            at = np.flatnonzero((samples.groups_R >= first) & (samples.groups_R < first + P))
            responses = slice(int(at[0]), int(at[-1]) + 1)
            tokens = slice(
                int(ends_R[responses.start] - samples.lengths_R[responses.start]),
                int(ends_R[responses.stop - 1]),
            )
            packed = batching.pack(
                samples.prompts[responses],
                samples.tokens_N[tokens],
                samples.lengths_R[responses],
                self.config.train.row_tokens,
            )
            micro_batches = self._micro_batches(packed.rows) if self.needs_scoring else None
            cuts.append(_Cut(responses, tokens, packed, micro_batches))
        return cuts

    def _columns(
        self, state: RunState, samples: Samples, cuts: Sequence[_Cut]
    ) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        """Columns of tokens that the batch is trained on, before its advantages, and what was
        noticed on the way."""
        trained_N = np.repeat(samples.trained_R, samples.lengths_R)
        columns = {
            "mask_BT": trained_N,
            "lag_BT": np.repeat(samples.lag_R, samples.lengths_R),
            "log_prob_old_BT": samples.log_prob_N,
        }

        def scored(program: Callable[..., Any], params: Any) -> np.ndarray:
            # All calls are on their way before the first result is waited for.
            results = [program(params, *cut.micro_batches) for cut in cuts]
            parts = [take_columns(cut.packed, x) for cut, x in zip(cuts, results)]
            return np.concatenate([np.zeros(0, np.float32), *parts])

        numbers: dict[str, float] = {}
        if self.config.rollout.log_prob_source == "recompute":
            columns["log_prob_old_BT"] = scored(self.score, state.policy.params)
            numbers = metrics.mismatch_metrics(samples, columns["log_prob_old_BT"])
        if self.needs_reference_log_probs:
            columns["log_prob_ref_BT"] = scored(self.score, self.reference)
        if state.critic is not None:
            columns["value_old_BT"] = scored(self.values, state.critic.params)
        return columns, numbers

    def _reward_kl(self, samples: Samples, columns: dict[str, np.ndarray]) -> np.ndarray:
        """KL estimate of each trained token against the reference, for its reward; else 0."""
        estimator = self.config.objective.reward_kl_estimator
        assert estimator is not None
        kl_BT = objective.kl_estimate(
            jnp.asarray(columns["log_prob_old_BT"]),
            jnp.asarray(columns["log_prob_ref_BT"]),
            jnp.asarray(columns["mask_BT"]),
            estimator=estimator,
        )
        return np.asarray(kl_BT, np.float64)

    def _micro_batches(self, rows: Rows) -> MicroBatches:
        B = self.config.train.rows_per_micro_batch
        stacked = batching.to_micro_batches(
            rows, rows_per_micro_batch=B, num_micro_batches=batching.max_micro_batches(self.config)
        )
        used = batching.used_micro_batches(len(rows.tokens_BT), B)
        on_mesh = jax.device_put(stacked, batch_sharding(self.mesh, batch_dim=1))
        return on_mesh, np.int32(used)

    def _check_skipped(self, results: Sequence[Any], step: int) -> None:
        limit = self.config.optimizer.max_nonfinite_updates
        in_a_row = max((int(result.skipped) for result in results), default=0)
        if in_a_row >= limit:
            raise RunError(
                f"The gradient was not finite in {in_a_row} updates in a row, at step {step} "
                f"(config.optimizer.max_nonfinite_updates is {limit}). The parameters were left as "
                "they were and the checkpoints before this step are intact. A lower "
                "config.optimizer.learning_rate, or float32 in config.model.compute_dtype, is the "
                "usual remedy."
            )
        if in_a_row:
            self.progress.say(
                f"  warning: non-finite gradient, {in_a_row} update(s) skipped at step {step}"
            )
