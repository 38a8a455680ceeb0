"""Which mesh shapes and remat policies fit, best first.

All are ranked by arithmetic, which costs nothing. Those that seem to fit are compiled, the fastest
first, until a few do.
"""

import dataclasses
import math
import time
import typing
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dapo_jax.config import Config, MeshConfig, ModelConfig
from dapo_jax.models import decoder
from dapo_jax.models.attention import xla as attention
from dapo_jax.models.sharding import AXES, axes_of, bytes_per_device, param_specs, parts_of
from dapo_jax.tools.plan import chips, estimate, plan
from dapo_jax.training.packing import max_micro_batches
from dapo_jax.types import UserError

# The arithmetic is rough: what seems to need so much more than there is may still fit.
SLACK = 1.25
WANTED = 3  # candidates that fit
REMAT = typing.get_args(typing.get_type_hints(ModelConfig)["remat"])


class Candidate(NamedTuple):
    """A mesh and remat policy with what arithmetic says of its training program."""

    config: Config
    bytes: float  # of a device, and what the run holds beside it
    seconds: float | None  # expected, of the longest mini-batch; None: no rates
    link_seconds: float | None  # of links alone

    @property
    def name(self) -> str:
        m = self.config.mesh
        return f"{_shape(m.fsdp, m.context, m.tensor)}, remat {self.config.model.remat}"


def _shape(fsdp: int, context: int, tensor: int) -> str:
    between = f" x context {context}" if context > 1 else ""
    return f"fsdp {fsdp}{between} x tensor {tensor}"


def candidates(
    config: Config, target: chips.Target, *, response_tokens: int, prompt_tokens: int
) -> tuple[list[Candidate], list[str]]:
    """(all that divide, fastest first; why the other shapes do not).

    Rows of a micro-batch are fewer by as much as rows are cut; they, slots and prompts of a prefill
    become the nearest multiple of the shards where they are not one.
    """
    devices = len(target.devices)
    found, refused = [], []
    for tensor in (n for n in range(1, devices + 1) if devices % n == 0):
        for context in _contexts(config, devices // tensor):
            fsdp = devices // tensor // context
            try:
                on_mesh = _on_mesh(config, fsdp, context, tensor, target)
            except UserError as error:  # for all of them, as parameters lie over both alike
                refused.append(f"{_shape(fsdp, context, tensor)}: {error}")
                break
            for remat in REMAT:
                changed = dataclasses.replace(
                    on_mesh, model=dataclasses.replace(config.model, remat=remat)
                )
                found.append(_by_arithmetic(changed, target, prompt_tokens + response_tokens))
    # Of those as fast, by the arithmetic, the one that receives least: not all of that is hidden
    # behind products.
    return sorted(found, key=lambda c: (c.seconds or 0.0, c.link_seconds or 0.0, c.bytes)), refused


def _contexts(config: Config, devices: int) -> list[int]:
    """Sizes of the context axis: 1, twice that and so on, and the config's own, where they divide
    the devices, and rows into the parts that `row_order` wants; 1 alone where attention takes no
    other (see `attention_kernels.choose`)."""
    rules = dict(config.mesh.rules)
    if config.model.attention == "flash" or rules.get("heads") != rules.get("kv_heads"):
        return [1]
    doubled = [2**n for n in range(devices.bit_length())]
    sizes = sorted({*doubled, max(1, config.mesh.context)})
    cuts = lambda n: n == 1 or config.train.row_tokens % (2 * n) == 0
    return [n for n in sizes if devices % n == 0 and cuts(n)]


def search(
    config: Config,
    target: chips.Target,
    wanted: tuple[str, ...],
    say: Callable[[str], None],
    *,
    response_tokens: int,
    prompt_tokens: int,
    enough: int = WANTED,
) -> dict[str, Any]:
    """What was tried, best first.

    Args:
        wanted: the programs that have to fit.
        enough: candidates that fit, after which no more are compiled.

    Returns:
        `fits` whether one does, `hbm_bytes`, `programs` of the best, `found` with name, mesh,
        remat, changes, and of those that were compiled the `plan` of each, and `refused`.
    """
    lengths = dict(response_tokens=response_tokens, prompt_tokens=prompt_tokens)
    ranked, refused = candidates(config, target, **lengths)
    hbm = target.hbm_bytes
    likely = [c for c in ranked if hbm is None or c.bytes <= SLACK * hbm] or sorted(
        ranked, key=lambda c: c.bytes
    )[:1]
    rows, fitting, begun = [], 0, time.monotonic()
    say(
        f"{len(ranked)} candidates, {len(refused)} mesh shapes do not divide, {len(likely)} may "
        f"fit by arithmetic; compiling until {enough} do"
    )
    for number, candidate in enumerate(likely):
        if fitting == enough:
            break
        left = ""
        if number:
            each = (time.monotonic() - begun) / number
            left = f", about {each * (len(likely) - number):.0f} s left at most"
        say(f"candidate {number + 1} of at most {len(likely)}: {candidate.name}{left}")
        found = plan.plan(candidate.config, target, wanted, say, **lengths)
        rows.append(_row(config, candidate, found))
        fitting += found["fits"]
    left_out = [c for c in ranked if c not in likely[: len(rows)]]
    speed = lambda row: (row["seconds"] or 0.0, row["link_seconds"] or 0.0)
    rows.sort(key=lambda row: (not row["plan"]["fits"], *speed(row)))
    programs = rows[0]["plan"]["programs"] if rows else {}
    rows += [_row(config, c, None) for c in left_out]
    return {
        "fits": fitting > 0,
        "hbm_bytes": hbm,
        "programs": programs,
        "found": rows,
        "refused": refused,
    }


def describe(result: Mapping[str, Any]) -> str:
    """The result of `search` as text."""
    hbm = result["hbm_bytes"]
    lines = [f"memory of a device: {'not known' if hbm is None else f'{hbm / chips.GIB:.2f} GiB'}"]
    compiled = [row for row in result["found"] if row["plan"] is not None]
    fitting = [row for row in compiled if row["plan"]["fits"]]
    lines.append("Compiled, and it fits, fastest first (longest mini-batch, expected):")
    lines += [_line(row) for row in fitting] or ["  none"]
    lines += ["Compiled, and it does not fit:"] if len(compiled) > len(fitting) else []
    lines += [_line(row) for row in compiled if row not in fitting]
    lines.append("By arithmetic alone, not compiled:")
    lines += [_line(row) for row in result["found"] if row["plan"] is None] or ["  none"]
    lines += ["Mesh shapes that do not divide:"] if result["refused"] else []
    return "\n".join([*lines, *(f"  {text}" for text in result["refused"])])


def _line(row: Mapping[str, Any]) -> str:
    seconds = "time unknown"
    if row["seconds"] is not None:
        seconds = f"{row['seconds']:.4g} s ({row['link_seconds']:.3g} s of links)"
    changes = "".join(f" --{name}={value}" for name, value in row["changes"].items())
    return f"  {row['name']}: {row['bytes'] / chips.GIB:.1f} GiB, {seconds};{changes}"


def _row(config: Config, c: Candidate, found: Mapping[str, Any] | None) -> dict[str, Any]:
    size = c.bytes
    if found is not None:
        size = max(map(plan.need, found["programs"].values()))
    return {
        "name": c.name,
        "mesh": {axis: getattr(c.config.mesh, axis) for axis in AXES},
        "remat": c.config.model.remat,
        "changes": _changes(config, c.config),
        "bytes": size,
        "seconds": c.seconds,
        "link_seconds": c.link_seconds,
        "plan": found,
    }  # fmt: skip


def _changes(before: Config, after: Config) -> dict[str, Any]:
    """The fields of a candidate that are not the config's."""
    found = {}
    for group in ("mesh", "model", "train", "rollout"):
        old, new = getattr(before, group), getattr(after, group)
        for field in dataclasses.fields(new):
            value = getattr(new, field.name)
            if value != getattr(old, field.name):
                found[f"config.{group}.{field.name}"] = value
    return found


def _on_mesh(config: Config, fsdp: int, context: int, tensor: int, target: chips.Target) -> Config:
    """The config on a mesh of this shape, drawn by as many devices together as it takes there.

    Raises:
        UserError: an axis of a parameter is not divisible.
    """
    sizes = {"data": 1, "fsdp": fsdp, "context": context, "tensor": tensor}
    layout = dataclasses.replace(config.mesh, **sizes)

    def check(shape: jax.ShapeDtypeStruct, spec: jax.sharding.PartitionSpec) -> None:
        for size, axis in zip(shape.shape, spec):
            if size % parts_of(axis, sizes):
                raise UserError(f"{' x '.join(axes_of(axis))} does not divide {size}")

    shapes = decoder.param_shapes(config.model)
    jax.tree.map(check, shapes, param_specs(config.model, layout))
    up = lambda n, parts: n + -n % parts
    t, r = config.train, config.rollout
    # What the axis is for: a device with less of a row at once.
    rows = max(1, t.rows_per_micro_batch * max(1, config.mesh.context) // context)
    train = dataclasses.replace(t, rows_per_micro_batch=up(rows, fsdp))

    def drawn_by(together: int, layout: MeshConfig) -> Config:
        shards = max(1, fsdp * context * tensor // together)
        rollout = dataclasses.replace(
            r, slots=up(r.slots, shards), prefill_prompts=up(r.prefill_prompts, shards)
        )
        return dataclasses.replace(config, mesh=layout, train=train, rollout=rollout)

    # First with slots for the most shards that there can be, then for those that there are.
    most = drawn_by(layout.rollout_tensor or tensor, layout)
    found = plan.with_teams(most, target, lambda _: None).mesh
    return drawn_by(found.rollout_tensor or tensor, found)


def _by_arithmetic(config: Config, target: chips.Target, sequence_tokens: int) -> Candidate:
    """Memory: parameters, moments and the sum of gradients, and the rollout's copy or what the
    layers keep for the backward pass, and the scores of one layer's attention, if XLA's. Time: the
    update of the most micro-batches, see `estimate.batch_work`.
    """
    c, t, m, chip = config.model, config.train, config.mesh, target.chip
    shapes, specs = decoder.param_shapes(c), param_specs(c, m)
    sizes = {axis: getattr(m, axis) for axis in AXES}
    like = lambda dtype: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), shapes)
    held = lambda tree: bytes_per_device(tree, specs, sizes)
    state = held(shapes) + held(like(jnp.float32))
    state += 2 * held(like(jnp.dtype(config.optimizer.moments_dtype)))
    width = jnp.dtype(c.compute_dtype).itemsize
    number = sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))
    copy = number * width / (m.rollout_tensor or m.tensor)
    rows = t.rows_per_micro_batch / (m.data * m.fsdp)
    tokens, T = rows * t.row_tokens / m.context, t.row_tokens
    attended, ff = c.num_heads * c.head_dim / m.tensor, c.intermediate_size / m.tensor
    products = (
        2 * attended + 2 * c.num_kv_heads * c.head_dim / m.tensor + 2 * ff + 2 * c.hidden_size
    )
    kept = {
        "none": products + 2 * c.hidden_size + ff,
        "dots": products,
        "dots_no_batch": products - attended,
        "attention_mlp": attended + 2 * ff,
        "attention": attended,
        "full": 0.0,
    }[c.remat] + c.hidden_size
    platform = target.devices[0].platform
    queries = T / m.context if T <= attention.LONG_ROW else attention.QUERY_CHUNK
    xla = estimate.kernel(config, platform) == "xla" or platform == "cpu"
    scores = rows * c.num_heads / m.tensor * queries * T * (4 + width) if xla else 0.0
    of_scores = c.num_layers if c.remat in ("none", "dots") else 1
    layers = c.num_layers * tokens * kept * width + of_scores * scores
    layers += tokens * (products + c.hidden_size) * width  # of the one that is computed
    work = estimate.batch_work(
        config, sizes, platform, "train",
        micro_batches=max_micro_batches(config), sequence_tokens=sequence_tokens,
    )  # fmt: skip
    time = estimate.expected(work, chip)
    seconds, links = (None, None) if time is None else (time.longest, time.links)
    return Candidate(config, state + max(copy, layers), seconds, links)
