"""Supervised fine-tuning, for launch/sft.py: minimises the loss of `training.supervised`.

The mini-batch of a step is a function of `config.seed` and the step alone, so a run that was
stopped resumes bit for bit.
"""

import contextlib
import dataclasses
import functools
import math
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from dapo_jax.config.checks import require
from dapo_jax.config.sft import SftConfig
from dapo_jax.data import examples as data
from dapo_jax.data.examples import Example
from dapo_jax.data.tokenizer import load_tokenizer
from dapo_jax.distributed.preemption import StopSignals
from dapo_jax.distributed.process_group import ALONE, ProcessGroup
from dapo_jax.models import decoder, lora, pretrained
from dapo_jax.models.sharding import (
    BATCH_AXES,
    check_row_shapes,
    initial_params,
    make_mesh,
    parts_of,
    to_host,
    with_shardings,
)
from dapo_jax.runs import integrity, run_directory
from dapo_jax.runs.checkpoint import Checkpoints
from dapo_jax.runs.run_directory import RunDirectory
from dapo_jax.tools.export import write_directory
from dapo_jax.training import packing, supervised
from dapo_jax.training import step as train_step
from dapo_jax.training.optimizer import learning_rate
from dapo_jax.training.step import TrainState
from dapo_jax.types import Rows, StopRequested, UserError
from dapo_jax.utils.heap import trim_after_compilations
from dapo_jax.utils.precision import multiply_in
from dapo_jax.utils.profiling import traced
from dapo_jax.utils.progress import Column, Progress, duration
from dapo_jax.utils.random_streams import named_generator
from dapo_jax.utils.watchdog import WATCHDOG_SECONDS, Watchdog

COLUMNS = (
    Column("epoch", 7, "data/epoch", ".2f"),
    Column("loss", 8, "loss/train", ".4f"),
    Column("held-out", 9, "loss/heldout", ".4f"),
    Column("tok/s", 7, "perf/tokens_per_second", ".0f"),
    Column("s/step", 7, "time/step", ".1f"),
)
MODEL = "model"  # in the run directory; `hf_hub.model_directory` knows it


def fine_tune(config: SftConfig, workdir: Path, process_group: ProcessGroup = ALONE) -> int | None:
    """Runs the config in `workdir`, from the beginning or from its newest checkpoint.

    Args:
        process_group: the processes of the run. All call this; the primary writes and prints.

    Returns:
        The number of the signal that stopped the run, or None when it reached its last step.

    Raises:
        UserError: a mistake that the user can mend.
        RunError, CheckpointError: the run failed; what is saved is intact.
    """
    begun, primary = time.monotonic(), process_group.is_primary
    run_directory.check_processes(cast(Any, config), process_group)
    if config.checkpoint.directory is None:
        process_group.check_place(workdir)
    progress = Progress(0, quiet=not primary, columns=COLUMNS)
    with (
        StopSignals(progress, process_group) as signals,
        Watchdog(WATCHDOG_SECONDS, progress.say) as watchdog,
    ):
        progress.watch = watchdog.moved
        progress.doing("loading tokenizer and examples")
        tokenizer = load_tokenizer(config.model)
        examples = load_examples(config, tokenizer, progress)
        config = with_num_steps(config, len(examples.train))
        assert config.train.num_steps is not None
        progress.num_steps = config.train.num_steps
        like_run = cast(Any, config)  # it has the sections that a run directory reads
        with (
            contextlib.closing(
                RunDirectory(workdir, like_run, writes=primary, say=progress.say)
            ) as directory,
            Checkpoints(
                run_directory.checkpoints(workdir, run_directory.frozen(like_run)),
                keep_newest=config.checkpoint.keep_newest,
                keep_best=0,
                say=progress.say,
                num_bytes=sum(
                    x.size * x.dtype.itemsize for x in jax.tree.leaves(state_shapes(config).saved)
                ),
                all_gather=process_group.all_gather,
                completed=directory.note_saved,
            ) as checkpoints,
        ):
            checkpoints.check_writable()
            run = FineTuning(config, examples, progress, signals, directory, checkpoints, begun)
            run.run(tokenizer)
    return signals.received_by_any()


def state_shapes(config: SftConfig) -> TrainState:
    """Returns shapes and dtypes of the state of a run."""
    new_state = functools.partial(train_step.model_state, config.optimizer)
    return jax.eval_shape(new_state, decoder.param_shapes(config.model))


class Examples(NamedTuple):
    train: list[Example]
    heldout: list[Example]  # may be empty


def load_examples(config: SftConfig, tokenizer: Any, progress: Progress) -> Examples:
    """Returns the examples of a run; raises UserError as `data.examples.load`."""
    d = config.data
    train = data.load(config, d.train, tokenizer, field="config.data.train", say=progress.say)
    if d.heldout_share > 0:
        train, heldout = data.split_heldout(train, d.heldout_share)
        progress.say(f"{len(heldout):,} of these examples are held out")
        return Examples(train, heldout)
    field, say = "config.data.heldout", progress.say
    return Examples(train, data.load(config, d.heldout, tokenizer, field=field, say=say))


def with_num_steps(config: SftConfig, num_examples: int) -> SftConfig:
    """Returns the config with the `num_steps` that complete its `num_epochs`.

    Raises:
        UserError: the rate is to fall after the warm-up, which takes all steps.
    """
    t, o = config.train, config.optimizer
    if t.num_epochs is not None:
        num_steps = math.ceil(t.num_epochs * num_examples / t.examples_per_update)
        t = dataclasses.replace(t, num_steps=num_steps, num_epochs=None)
    assert t.num_steps is not None
    wanted = f"below {t.num_steps}, the run's steps, for a rate that falls to final_rate_share"
    ok = o.final_rate_share is None or o.warmup_steps < t.num_steps
    require(ok, "optimizer.warmup_steps", o.warmup_steps, wanted)
    return dataclasses.replace(config, train=t)


class ExampleOrder:
    """An endless stream of the indices of `num` examples. Every epoch is a permutation of them, a
    function of the seed."""

    def __init__(self, num: int, seed: int):
        self.num, self.seed = num, seed
        self.permutation = functools.lru_cache(maxsize=2)(self._permutation)

    def __getitem__(self, place: int) -> int:
        return int(self.permutation(place // self.num)[place % self.num])

    def _permutation(self, epoch: int) -> np.ndarray:
        return named_generator("sft-order", self.seed, epoch).permutation(self.num)


def most_rows(lengths: Sequence[int], examples_per_update: int, row_tokens: int) -> int:
    """Returns a number of rows in which every mini-batch of an `ExampleOrder` fits.

    Args:
        lengths: of all examples.
    """
    # Of each in one mini-batch, which may hold the ends of two epochs.
    copies = math.ceil((examples_per_update - 1) / len(lengths)) + 1
    longest = sorted([*lengths] * copies, reverse=True)[:examples_per_update]
    return packing.most_rows(longest, row_tokens)


def pack(
    examples: Sequence[Example], row_tokens: int, rows_per_micro_batch: int, shards: int = 1
) -> packing.Packed:
    """Returns packed rows whose mask is that of the trained tokens; arguments as `packing.pack`."""
    packed = packing.pack(
        [example.prompt for example in examples],
        np.concatenate([example.response for example in examples]),
        np.array([len(example.response) for example in examples]),
        row_tokens,
        rows_per_micro_batch=rows_per_micro_batch,
        shards=shards,
    )
    trained_M = np.concatenate([example.trained for example in examples])
    return packed._replace(rows=packing.fill(packed, mask_BT=trained_M))


class HostState(NamedTuple):
    """Host values of a run; saved with the arrays."""

    base_loss: float | None  # held-out, before the first step
    loss: float | None  # held-out, of the last evaluation
    seconds: float  # worked until the last save, over all starts of the run


@dataclasses.dataclass
class FineTuning:
    """Moves the state of a run from step to step, and logs and saves it."""

    config: SftConfig
    examples: Examples
    progress: Progress
    signals: StopSignals
    directory: RunDirectory
    checkpoints: Checkpoints
    begun: float  # `time.monotonic()` at the start, earlier by the work of earlier starts

    def __post_init__(self) -> None:
        config = self.config
        self.mesh = mesh = make_mesh(config.mesh)
        t, model = config.train, config.model
        check_row_shapes(t.rows_per_micro_batch, t.row_tokens, mesh.shape)
        trim_after_compilations()
        multiply_in(model.compute_dtype, mesh.devices.flat[0].platform)
        self.update: Any = supervised.jitted_update(model, config.mesh, config.optimizer, mesh)
        self.log_probs = train_step.jitted_log_probs(
            model, config.mesh, mesh, temperature=1.0, share_prompts=False
        )
        self.state_at = train_step.model_state_shardings(model, config.mesh, config.optimizer, mesh)
        self.order = ExampleOrder(len(self.examples.train), config.seed)
        lengths = [example.length for example in self.examples.train]
        most = most_rows(lengths, t.examples_per_update, t.row_tokens)
        self.num_micro_batches = packing.used_micro_batches(most, t.rows_per_micro_batch)
        self.heldout = None
        if self.examples.heldout:
            self.heldout = self._packed(self.examples.heldout)
        self.identity = data.fingerprint([*self.examples.train, *self.examples.heldout])
        self.base: str | None = None  # its fingerprint, where a resumed run reads it again
        self.saved_step = 0  # the base model is not saved
        self.save_seconds = 0.0  # that the loop waited for the last save

    def run(self, tokenizer: Any) -> None:
        """Runs all steps that are left; where a stop is requested, saves the last completed one."""
        config, progress = self.config, self.progress
        assert config.train.num_steps is not None
        sizes = " x ".join(f"{name} {size}" for name, size in self.mesh.shape.items())
        kind, place = self.mesh.devices.flat[0].device_kind, self.directory.path
        progress.say(f"{self.mesh.devices.size} {kind} device(s), mesh {sizes}; {place}")
        try:
            step, state, host = self._start()
        except StopRequested:
            progress.say("stopped while starting; the same command starts again")
            return
        if self.directory.writes:  # that of fewer steps
            shutil.rmtree(place / MODEL, ignore_errors=True)
        try:
            while step < config.train.num_steps:
                self.signals.check_together()
                steps = config.log.profile_steps
                with traced(place, step + 1, steps, progress, lambda: None):
                    state, host = self._one_step(step + 1, state, host)
                step += 1
                if step % config.checkpoint.every_steps == 0 or step == config.train.num_steps:
                    self._save(step, state, host)
        except StopRequested:
            self._save(step, state, host)
            self.checkpoints.wait()
            progress.say(f"stopped after step {step}; the same command resumes there")
            return
        self.checkpoints.wait()
        self._finish(step, state.all_params, host, tokenizer)

    def _start(self) -> tuple[int, TrainState, HostState]:
        """Restores the newest checkpoint, or loads the base model and evaluates it."""
        config, progress, directory = self.config, self.progress, self.directory
        new_state = functools.partial(train_step.model_state, config.optimizer)
        like = with_shardings(state_shapes(config), self.state_at)
        progress.doing("looking for a checkpoint")
        found = self.checkpoints.restore(like.saved)
        if found is not None:
            step, state, values = found
            place, like_run = self.checkpoints.directory, cast(Any, config)
            run_directory.check_same(values["config"], like_run, place, step)
            run_directory.check_not_past(step, like_run, place)
            if values["data"] != self.identity:
                raise UserError(
                    f"config.data: the examples are not those of the run in {place}. Restore "
                    "their files, or choose another --workdir."
                )
            host = HostState(**values["host"])
            self.begun -= host.seconds
            self.saved_step = progress.first_step = step
            if config.model.lora_rank:
                base = self._base()
                self.base = integrity.fingerprint(base)
                run_directory.check_base(self.base, values["base"], config.model.path, place)
                state = state._replace(frozen=lora.split(base)[1])
            directory.rewind(step)
            progress.say(f"resuming after step {step} of {config.train.num_steps}")
            return step, state, host
        directory.check_never_saved(self.checkpoints.directory)
        progress.doing("loading the base model")
        make = jax.jit(new_state, out_shardings=self.state_at, donate_argnums=0)
        base = self._base()
        if config.model.lora_rank:
            self.base = integrity.fingerprint(base)
        state = make(base)
        directory.rewind(-1)
        start = time.monotonic()
        numbers = self._evaluate(state)
        loss = numbers.get("loss/heldout")
        self._log({"step": 0, **numbers, "time/step": time.monotonic() - start})
        return 0, state, HostState(loss, loss, 0.0)

    def _base(self) -> decoder.Params:
        c, layout, seed, say = (
            self.config.model,
            self.config.mesh,
            self.config.seed,
            self.progress.say,
        )
        if c.path is None:
            say("base model: random parameters, from config.seed")
            return initial_params(c, layout, self.mesh, seed)
        check_stop = self.signals.check_together
        return pretrained.load(c, layout, self.mesh, seed, say=say, check_stop=check_stop)

    def _one_step(
        self, step: int, state: TrainState, host: HostState
    ) -> tuple[TrainState, HostState]:
        """Makes one update, evaluates where it is time, and logs."""
        config, start = self.config, time.monotonic()
        t, num_steps = config.train, config.train.num_steps
        assert num_steps is not None
        self.progress.doing(f"step {step}: updating")
        rows = self._packed(self.mini_batch(step)).rows
        trained = int(rows.mask_BT.sum())
        rate = learning_rate(config.optimizer, step, num_steps)
        state, result = self.update(
            state,
            *self._micro_batches(rows, self.num_micro_batches),
            np.float32(trained),
            np.float32(rate),
        )
        tokens = int((rows.segments_BT > 0).sum())
        numbers = {"step": step, "loss/train": float(result.loss)}  # waits for the update
        update_seconds = time.monotonic() - start
        numbers |= {
            "data/epoch": step * t.examples_per_update / len(self.examples.train),
            "batch/tokens_trained": trained,
            "batch/padding_share": 1 - tokens / rows.tokens_BT.size,
            "optimizer/grad_norm": float(result.grad_norm),
            "optimizer/learning_rate": rate,
            "perf/tokens_per_second": tokens / update_seconds,
            "time/update": update_seconds,
            "time/checkpoint": self.save_seconds,  # of the save before it
        }
        if step % config.evaluation.every_steps == 0 or step == num_steps:
            numbers |= self._evaluate(state)
            host = host._replace(loss=numbers.get("loss/heldout"))
        self.save_seconds = 0.0
        self._log(numbers | {"time/step": time.monotonic() - start})
        return state, host

    def mini_batch(self, step: int) -> list[Example]:
        """Returns the examples of a step, from 1 on: a function of the seed and the step alone."""
        N = self.config.train.examples_per_update
        return [self.examples.train[self.order[i]] for i in range((step - 1) * N, step * N)]

    def _packed(self, examples: Sequence[Example]) -> packing.Packed:
        t, shards = self.config.train, parts_of(BATCH_AXES, self.mesh.shape)
        return pack(examples, t.row_tokens, t.rows_per_micro_batch, shards)

    def _micro_batches(self, rows: Rows, num: int) -> tuple[Rows, np.int32]:
        """Returns the rows as `num` micro-batches on the devices, and how many hold data."""
        B = self.config.train.rows_per_micro_batch
        return train_step.micro_batches_on(
            self.mesh, rows, rows_per_micro_batch=B, num_micro_batches=num
        )

    def _evaluate(self, state: TrainState) -> dict[str, float]:
        """Returns the held-out loss in nats per token, where examples are held out."""
        if self.heldout is None:
            return {}
        self.progress.doing("evaluating the held-out loss")
        rows, B = self.heldout.rows, self.config.train.rows_per_micro_batch
        num = packing.used_micro_batches(len(rows.tokens_BT), B)
        log_probs = to_host(self.log_probs(state.all_params, *self._micro_batches(rows, num)))
        log_prob_M = packing.take_columns(self.heldout, log_probs)
        mask_M = packing.take_columns(self.heldout, rows.mask_BT)
        return {"loss/heldout": -float(log_prob_M[mask_M].mean(dtype=np.float64))}

    def _log(self, numbers: dict[str, Any]) -> None:
        self.directory.log(numbers)
        self.progress.step(numbers)

    def _save(self, step: int, state: TrainState, host: HostState) -> None:
        if step == self.saved_step:
            return
        start = time.monotonic()
        self.progress.doing(f"step {step}: saving")
        values = host._replace(seconds=start - self.begun)._asdict()
        config = run_directory.frozen(cast(Any, self.config))
        record = {"host": values, "data": self.identity, "base": self.base, "config": config}
        self.checkpoints.save(step, state.saved, record, accuracy=None)
        self.saved_step, self.save_seconds = step, time.monotonic() - start

    def _finish(self, step: int, params: decoder.Params, host: HostState, tokenizer: Any) -> None:
        """Writes the model and the summary."""
        model, place = self.config.model, self.directory.path / MODEL
        self.progress.doing("writing the model")
        if self.signals.process_group.count > 1:
            params = jax.tree.map(to_host, params)
        if self.directory.writes:
            temporary = place.with_name(f".{MODEL}.tmp")
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            sampling = {"do_sample": True, "top_k": 0}  # transformers takes top_k 50 without it
            write_directory(model, params, tokenizer, temporary, model.trained_dtype, sampling)
            shutil.rmtree(place, ignore_errors=True)
            temporary.rename(place)
        seconds = time.monotonic() - self.begun
        self.directory.save_summary(
            {"base_loss": host.base_loss, "final_loss": host.loss, "steps": step}
            | {"seconds": seconds, "examples": len(self.examples.train)}
        )
        text = "" if host.loss is None else f"held-out loss {host.base_loss:.4f} -> {host.loss:.4f}"
        self.progress.say(f"{text or 'done'} in {step} steps, {duration(seconds)}\nmodel: {place}")
