"""The plan of a run, computed from its config alone: no weights, no data, no accelerator."""

import math
from collections.abc import Mapping
from typing import Any

import jax

from dapo_jax.algorithms.losses import LOSSES
from dapo_jax.config import Config, SourceConfig
from dapo_jax.models import decoder
from dapo_jax.models.sharding import (
    AXES,
    check_batch_shapes,
    check_divides,
    mesh_shape,
)
from dapo_jax.rewards.scorers import load_scorer
from dapo_jax.rewards.types import parse_scorers
from dapo_jax.rollout import memory_budget, prompt_filter
from dapo_jax.training.packing import max_micro_batches


def describe(config: Config) -> str:
    """Model size, mesh, batch arithmetic and memory per device, as text.

    Raises:
        UserError: the batch or the model does not divide over the mesh of the config, or there is
            no such scorer.
    """
    for source in (*config.data.train.values(), *config.data.heldout.values()):
        for name, _ in parse_scorers(source.scorer or config.reward.scorer):
            load_scorer(name)
    sizes = [getattr(config.mesh, axis) for axis in AXES]
    devices = jax.device_count() if -1 in sizes else math.prod(sizes)
    axis_sizes: dict[str, int] = dict(zip(AXES, mesh_shape(config.mesh, devices)))
    check_batch_shapes(config, axis_sizes)
    check_divides(config.model, config.mesh, axis_sizes)
    sections = (
        ("model", _model_lines(config)),
        ("data", _data_lines(config)),
        ("mesh", _mesh_lines(axis_sizes, devices)),
        ("batch of one rollout step", _batch_lines(config)),
        ("objective", _objective_lines(config)),
        ("memory per device", _memory_lines(config, axis_sizes)),
    )
    lines = []
    for title, rows in sections:
        width = max(len(name) for name, _ in rows)
        lines += [title, *(f"  {name.ljust(width)}  {value}" for name, value in rows), ""]
    return "\n".join(lines)


def num_params(config: Config) -> int:
    """Parameters of the model."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(decoder.param_shapes(config.model)))


def _model_lines(config: Config) -> list[tuple[str, str]]:
    m = config.model
    return [
        ("weights", m.path or ("random" if config.pretrain is None else "made by this run")),
        ("parameters", f"{num_params(config):,}"),
        (
            "layers x hidden size",
            f"{m.num_layers} x {m.hidden_size}, feed-forward {m.intermediate_size}",
        ),
        ("heads", f"{m.num_heads} query, {m.num_kv_heads} key-value, of {m.head_dim}"),
        ("vocabulary", f"{m.vocab_size:,}" + (", tied" if m.tie_embeddings else "")),
        ("dtypes", f"{m.param_dtype} parameters, {m.compute_dtype} compute"),
    ]


def _data_lines(config: Config) -> list[tuple[str, str]]:
    def told(name: str, source: SourceConfig) -> str:
        parts = [source.path if source.split is None else f"{source.path} ({source.split})"]
        if source.weight is not None:
            parts.append(f"weight {source.weight:g}")
        parts.append(f"scored by {source.scorer or config.reward.scorer}")
        return f"{name}: " + ", ".join(parts)

    return [
        (side, told(name, source))
        for side in ("train", "heldout")
        for name, source in getattr(config.data, side).items()
    ]


def _mesh_lines(axis_sizes: dict[str, int], devices: int) -> list[tuple[str, str]]:
    return [
        ("devices", f"{devices}"),
        ("axes", " x ".join(f"{name} {size}" for name, size in axis_sizes.items())),
    ]


def _batch_lines(config: Config) -> list[tuple[str, str]]:
    t, r, d = config.train, config.rollout, config.dynamic_sampling
    responses = t.prompts_per_step * r.group_size
    updates = t.prompts_per_step // t.prompts_per_update
    sampled = (
        f"up to {d.max_prompts:,} prompts, until {t.prompts_per_step:,} are informative"
        if d.enabled
        else "off"
    )
    return [
        ("prompts", f"{t.prompts_per_step:,}"),
        ("responses", f"{t.prompts_per_step:,} x {r.group_size} = {responses:,}"),
        (
            "response tokens",
            f"at most {responses:,} x {r.max_response_tokens:,} = "
            f"{responses * r.max_response_tokens:,}",
        ),
        ("dynamic sampling", sampled),
        (
            "prefilter",
            f"up to {prompt_filter.MAX_SKIPS:,} prompts left out in a step, at first 1 - "
            f"{prompt_filter.INITIAL_PROBABILITY:g}^z of those that taught nothing z times in a row"
            if d.prefilter
            else "off",
        ),
        (
            "mini-batch",
            f"{t.prompts_per_update:,} prompts = {t.prompts_per_update * r.group_size:,} responses",
        ),
        ("updates per rollout step", f"{updates}"),
        (
            "rows",
            f"{t.row_tokens:,} tokens, {t.rows_per_micro_batch:,} to a micro-batch, at most "
            f"{max_micro_batches(config):,} micro-batches to an update",
        ),
        ("rollout steps", f"{t.num_steps:,} = {t.num_steps * updates:,} updates"),
    ]


def _objective_lines(config: Config) -> list[tuple[str, str]]:
    o, p, r = config.objective, config.optimizer, config.reward
    overlong = (
        f"linear over the last {r.overlong_buffer_tokens:,} of "
        f"{config.rollout.max_response_tokens:,} tokens, to -{r.overlong_penalty:g}"
        if r.overlong_buffer_tokens
        else "off"
    )
    return [
        (
            "loss",
            _named(
                o.loss,
                {name: getattr(o, name) for name in LOSSES[o.loss].clips} | o.loss_args,
            ),
        ),
        ("aggregation", o.aggregation),
        ("overlong punishment", overlong),
        ("overlong filtering", "on" if o.overlong_filter else "off"),
        ("advantage", _named(o.advantage, o.advantage_args)),
        (
            "KL to the base",
            f"{o.kl_coefficient:g} ({o.kl_estimator})" if o.kl_coefficient else "none",
        ),
        (
            "KL in the reward",
            f"{o.reward_kl_coefficient:g} ({o.reward_kl_estimator})"
            + (f", towards {o.reward_kl_target:g}" if o.reward_kl_target else "")
            if o.reward_kl_coefficient
            else "none",
        ),
        ("entropy bonus", f"{o.entropy_coefficient:g}" if o.entropy_coefficient else "none"),
        ("rollout correction", _correction(config)),
        (
            "AdamW",
            f"rate {p.learning_rate:g} after {p.warmup_steps} steps of warm-up, then "
            + (
                "constant"
                if p.final_rate_share is None
                else f"cosine to {p.final_rate_share:g} of it"
            )
            + f", weight decay {p.weight_decay:g}, betas {p.beta1:g} {p.beta2:g}"
            + f", norm {p.max_grad_norm:g}, moments in {p.moments_dtype}",
        ),
    ]


def _named(name: str, parameters: Mapping[str, Any]) -> str:
    return ", ".join([name, *(f"{key} {value}" for key, value in parameters.items())])


def _correction(config: Config) -> str:
    c = config.correction
    if c is None:
        return "none"
    parts = [f"{c.policy} policy"]
    if c.importance != "none":
        floor = "" if c.importance_floor is None else f" from {c.importance_floor:g}"
        parts.append(f"{c.importance} importance weights{floor} up to {c.importance_cap:g}")
    parts += [f"reject by {name} outside {floor}..{cap:g}" for name, floor, cap in c.reject]
    if c.sequence_mask_delta is not None:
        parts.append(f"sequence mask {c.sequence_mask_delta:g}")
    return ", ".join(parts)


def _memory_lines(config: Config, axis_sizes: dict[str, int]) -> list[tuple[str, str]]:
    held, r = memory_budget.held(config, axis_sizes), config.rollout
    tokens = config.data.max_prompt_tokens + r.max_response_tokens
    notes = {"KV cache": f"{r.slots:,} slots of up to {tokens:,} tokens on all devices"}
    if r.cache_gib is not None:
        notes["KV cache"] += f", config.rollout.cache_gib {r.cache_gib:g}"
    line = lambda name, size: (name, _size(size) + (f"   {notes[name]}" if name in notes else ""))
    lines = [line(*item) for item in held.always.items()]
    lines += [line(*item) for item in held.rollout.items()]
    lines.append(("together, drawing", _size(held.rollout_bytes)))
    lines += [line(*item) for item in held.update.items()]
    note = "without what is drawn with; activations not counted"
    lines.append(("together, updating", f"{_size(held.update_bytes)}   {note}"))
    return lines


def _size(num_bytes: int) -> str:
    return memory_budget.size_text(num_bytes).rjust(12)
