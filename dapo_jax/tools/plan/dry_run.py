"""The plan of launch/train.py --dry_run: sizes, mesh, batch arithmetic and memory, from the config.

It needs no weights, no data and no accelerator.
"""

import dataclasses
import math
from typing import Any

import jax

from dapo_jax.config import Config
from dapo_jax.data.dataset import check_scorers
from dapo_jax.models import decoder
from dapo_jax.models.sharding import AXES, check_batch_shapes, check_divides, mesh_shape
from dapo_jax.rollout import memory_budget
from dapo_jax.tools.plan.estimate import adapters
from dapo_jax.training.packing import max_micro_batches

Lines = list[tuple[str, str]]


def describe(config: Config) -> str:
    """Returns model size, mesh, batch arithmetic, objective and memory per device as text, for each
    stage.

    Raises:
        UserError: the batch or the model does not divide over the config's mesh, or a scorer is
            unknown.
    """
    text = _describe(config.at(1))
    for first, changes in config.stages:
        changed = ", ".join(f"{name} {value!r}" for name, value in changes.items())
        text += f"\nFROM STEP {first} ON: {changed}\n\n{_describe(config.at(first))}"
    return text


def _describe(config: Config) -> str:
    check_scorers(config)
    sizes = [getattr(config.mesh, axis) for axis in AXES]
    devices = jax.device_count() if -1 in sizes else math.prod(sizes)
    axis_sizes: dict[str, int] = dict(zip(AXES, mesh_shape(config.mesh, devices)))
    check_batch_shapes(config, axis_sizes)
    check_divides(config.model, config.mesh, axis_sizes)
    axes = " x ".join(f"{name} {size}" for name, size in axis_sizes.items())
    sections = {
        "model": _model_lines(config),
        "data": _data_lines(config),
        "mesh": [("devices", f"{devices}"), ("axes", axes)],
        "batch of one rollout step": _batch_lines(config),
        "objective": _objective_lines(config),
        "memory per device": _memory_lines(config, axis_sizes),
    }
    text = []
    for title, lines in sections.items():
        width = max(len(name) for name, _ in lines)
        text += [title, *(f"  {name.ljust(width)}  {value}" for name, value in lines), ""]
    return "\n".join(text)


def _model_lines(config: Config) -> Lines:
    m = config.model
    parameters = sum(math.prod(x.shape) for x in jax.tree.leaves(decoder.param_shapes(m)))
    dtypes = f"{m.param_dtype} parameters, {m.compute_dtype} compute"
    trained = []
    if m.lora_rank:
        dtypes = f"{m.trained_dtype} adapters, {m.base_dtype} base and compute"
        if m.matrix_dtype == "int8":
            dtypes += ", the base's matrices int8"
        trained = [("trained", f"{adapters(m):,} in adapters of rank {m.lora_rank}")]
    if m.head_dtype is not None:
        dtypes += f", {m.head_dtype} products with the head"
    layers = f"{m.num_layers} x {m.hidden_size}, feed-forward {m.intermediate_size}"
    return [
        ("weights", m.path or ("random" if config.pretrain is None else "made by this run")),
        ("parameters", f"{parameters:,}"),
        *trained,
        ("layers x hidden size", layers),
        ("heads", f"{m.num_heads} query, {m.num_kv_heads} key-value, of {m.head_dim}"),
        ("vocabulary", f"{m.vocab_size:,}" + (", tied" if m.tie_embeddings else "")),
        ("dtypes", dtypes),
    ]


def _data_lines(config: Config) -> Lines:
    lines = []
    for side in ("train", "heldout"):
        for name, source in getattr(config.data, side).items():
            place = source.path + ("" if source.split is None else f" ({source.split})")
            weight = "" if source.weight is None else f", weight {source.weight:g}"
            scorer = source.scorer or config.reward.scorer
            lines.append((side, f"{name}: {place}{weight}, scored by {scorer}"))
    return lines


def _batch_lines(config: Config) -> Lines:
    t, r, d = config.train, config.rollout, config.dynamic_sampling
    responses = t.prompts_per_step * r.group_size
    updates = t.prompts_per_step // t.prompts_per_update
    until = f"up to {d.max_prompts:,} prompts, until {t.prompts_per_step:,}"
    return [
        ("prompts", f"{t.prompts_per_step:,}"),
        ("responses", f"{t.prompts_per_step:,} x {r.group_size} = {responses:,}"),
        ("response tokens", f"at most {responses:,} x {r.max_response_tokens:,}"),
        ("dynamic sampling", f"{until} are informative" if d.enabled else "off"),
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


def _objective_lines(config: Config) -> Lines:
    groups = {"objective": config.objective, "correction": config.correction}
    groups |= {"optimizer": config.optimizer}
    return [(name, _fields(group)) for name, group in groups.items() if group is not None]


def _fields(group: Any) -> str:
    values = ((field.name, getattr(group, field.name)) for field in dataclasses.fields(group))
    return ", ".join(f"{name} {value}" for name, value in values if value not in (None, 0, {}, ()))


def _memory_lines(config: Config, axis_sizes: dict[str, int]) -> Lines:
    held, r = memory_budget.held(config, axis_sizes), config.rollout
    on_gpu = memory_budget.held(config, axis_sizes, platform="gpu").rollout_bytes
    tokens = config.data.max_prompt_tokens + r.max_response_tokens
    slots = f"{r.slots:,} slots of up to {tokens:,} tokens on all devices"
    lines = [
        *held.always.items(),
        *held.rollout.items(),
        ("together, in rollouts", held.rollout_bytes),
        *held.update.items(),
        ("together, in updates", held.update_bytes),
    ]
    notes = {"KV cache": slots, "together, in updates": "without activations"}
    if on_gpu > held.rollout_bytes:
        more = f"{memory_budget.size_text(on_gpu)} on a GPU: decoding has the layers once more"
        notes["together, in rollouts"] = more
    size = lambda number: memory_budget.size_text(number).rjust(12)
    return [
        (name, size(number) + (f"   {notes[name]}" if name in notes else ""))
        for name, number in lines
    ]
