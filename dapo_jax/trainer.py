"""The compiled programs of a run and what they need: engines, update, scoring, data."""

from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from dapo_jax import batching, metrics, model, train_step
from dapo_jax.config import Config
from dapo_jax.data import ProblemStream
from dapo_jax.problems import load_problems
from dapo_jax.progress import Progress
from dapo_jax.rollout.engine import DecoderEngine, EngineSpec
from dapo_jax.samples import training_samples
from dapo_jax.sharding import batch_sharding, check_batch_shapes, make_mesh
from dapo_jax.tokenizer import load_tokenizer
from dapo_jax.types import Group, Rows, RunError

# Rows [M, B, T] of a mini-batch on the device, and how many of the M are used.
MicroBatches = tuple[Rows, np.int32]


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

    def init_state(self, params: model.Params) -> train_step.TrainState:
        """The train state of a base model; its parameters are copied, for updates donate them."""
        init = jax.jit(
            lambda params: train_step.init_state(self.config, jax.tree.map(jnp.copy, params)),
            out_shardings=train_step.state_shardings(self.config, self.mesh),
        )
        return init(params)

    def update_on(
        self, state: train_step.TrainState, groups: Sequence[Group], step: int
    ) -> tuple[train_step.TrainState, dict[str, float]]:
        """The state after one pass over the groups in mini-batches, and the step's numbers."""
        t, rate = self.config.train, train_step.learning_rate(self.config.optimizer, step)
        order = np.random.default_rng([self.config.seed, step]).permutation(len(groups))
        mini_batches = []
        used_rows = padding = 0
        for start in range(0, len(groups), t.prompts_per_update):
            chosen = [groups[i] for i in order[start : start + t.prompts_per_update]]
            rows = batching.pack(training_samples(self.config, chosen, step), t.row_tokens)
            used_rows += len(rows.tokens_BT)
            padding += int((rows.segments_BT == 0).sum())
            mini_batches.append(self._micro_batches(rows))
        # Old and reference log-probs belong to the parameters before the first of the updates.
        numbers: dict[str, float] = {}
        if self.config.rollout.log_prob_source == "recompute":
            mini_batches, numbers = self._recompute_old(state.params, mini_batches)
        if self.reference is not None:
            mini_batches = [
                (rows._replace(log_prob_ref_BT=self.score(self.reference, rows, n)), n)
                for rows, n in mini_batches
            ]
        results = []
        for rows, n in mini_batches:
            state, result = self.update(state, rows, n, np.float32(rate))
            results.append(result)
        numbers = metrics.update_metrics(results) | numbers
        numbers["optimizer/learning_rate"] = rate
        numbers["batch/padding_share"] = padding / max(1, used_rows * t.row_tokens)
        self._check_skipped(results, step)
        return state, numbers

    def _micro_batches(self, rows: Rows) -> MicroBatches:
        B = self.config.train.rows_per_micro_batch
        stacked = batching.to_micro_batches(
            rows, rows_per_micro_batch=B, num_micro_batches=batching.max_micro_batches(self.config)
        )
        used = batching.used_micro_batches(len(rows.tokens_BT), B)
        on_mesh = jax.device_put(stacked, batch_sharding(self.mesh, batch_dim=1))
        return on_mesh, np.int32(used)

    def _recompute_old(
        self, params: model.Params, mini_batches: list[MicroBatches]
    ) -> tuple[list[MicroBatches], dict[str, float]]:
        """Rows with old log-probs from the training program, and the gap to the rollout's."""
        replaced, gaps = [], []
        for rows, n in mini_batches:
            old_MBT = self.score(params, rows, n)
            fresh_MBT = np.asarray(rows.mask_BT) & (np.asarray(rows.lag_BT) == 0)
            gap_MBT = np.abs(np.asarray(old_MBT) - np.asarray(rows.log_prob_old_BT))
            gaps.append(gap_MBT[fresh_MBT])
            replaced.append((rows._replace(log_prob_old_BT=old_MBT), n))
        gap = np.concatenate(gaps) if gaps else np.zeros(0)
        if not len(gap):
            return replaced, {}
        return replaced, {
            "rollout/log_prob_gap_mean": float(gap.mean()),
            "rollout/log_prob_gap_max": float(gap.max()),
        }

    def _check_skipped(self, results: Sequence[train_step.UpdateMetrics], step: int) -> None:
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
