"""Search for the mesh shapes and remat policies that fit, best first.

Arithmetic, which costs nothing, ranks all of them. The shapes that seem to fit are then compiled,
the fastest first, until a few do fit.
"""

import dataclasses
import typing
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from dapo_jax.config import Config, MeshConfig, ModelConfig
from dapo_jax.models.attention import xla as attention
from dapo_jax.models.sharding import AXES, check_divides
from dapo_jax.rollout import memory_budget
from dapo_jax.tools.plan import chips, estimate, plan
from dapo_jax.training.packing import max_micro_batches
from dapo_jax.types import UserError

SLACK = 1.25  # times the memory: the arithmetic is rough, and what seems too large may fit
WANTED = 3  # candidates that fit
REMAT = typing.get_args(typing.get_type_hints(ModelConfig)["remat"])


class Candidate(NamedTuple):
    """A mesh and remat policy, with the arithmetic of its training program."""

    config: Config
    bytes: float  # of a device
    seconds: float | None  # of the longest mini-batch, expected; None: no rates
    link_seconds: float | None  # of links alone

    @property
    def name(self) -> str:
        return f"{_shape(self.config.mesh)}, remat {self.config.model.remat}"


def _shape(m: MeshConfig) -> str:
    context = f" x context {m.context}" if m.context > 1 else ""
    return f"fsdp {m.fsdp}{context} x tensor {m.tensor}"


def candidates(
    config: Config, target: chips.Target, *, response_tokens: int, prompt_tokens: int
) -> tuple[list[Candidate], list[str]]:
    """Returns (all that divide, fastest first; why the other shapes do not).

    A micro-batch has fewer rows where rows are cut. Rows, slots and prompts of a prefill become the
    next multiple of the shards.
    """
    devices = len(target.devices)
    found, refused = [], []
    for tensor in (n for n in range(1, devices + 1) if devices % n == 0):
        for context in _contexts(config, devices // tensor):
            fsdp = devices // tensor // context
            sizes = {"data": 1, "fsdp": fsdp, "context": context, "tensor": tensor}
            mesh = dataclasses.replace(config.mesh, **sizes)
            try:
                check_divides(config.model, mesh, sizes)
            except UserError as error:  # for every context, as parameters lie over both alike
                refused.append(f"{_shape(mesh)}: {error}")
                break
            on_mesh = _on_mesh(config, mesh, target)
            held = memory_budget.held(on_mesh, sizes).update_bytes
            copy, _ = memory_budget.rollout_copy_and_cache(on_mesh, sizes)
            for remat in REMAT:
                model = dataclasses.replace(config.model, remat=remat)
                changed = dataclasses.replace(on_mesh, model=model)
                layers, time = _by_arithmetic(changed, target, prompt_tokens + response_tokens)
                seconds, links = (None, None) if time is None else (time.longest, time.links)
                found.append(Candidate(changed, held + max(copy, layers), seconds, links))
    # Of equally fast ones, the one that receives least: products do not hide all of that.
    return sorted(found, key=lambda c: (c.seconds or 0.0, c.link_seconds or 0.0, c.bytes)), refused


def _contexts(config: Config, devices: int) -> list[int]:
    """Returns the powers of two and the config's own size that divide the devices and the rows; 1
    alone where attention takes no other (see `attention.kernels.choose`)."""
    rules = dict(config.mesh.rules)
    of_rows = config.model.attention in ("cudnn", "flash")
    if of_rows or rules.get("heads") != rules.get("kv_heads"):
        return [1]
    sizes = sorted({*(2**n for n in range(devices.bit_length())), max(1, config.mesh.context)})
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
    """Returns the candidates, best first.

    Args:
        wanted: the programs that have to fit.
        enough: number of candidates that fit, after which no more are compiled.

    Returns:
        `fits`, `hbm_bytes`, `programs` of the best, `refused`, and `found`: name, mesh, remat,
        changes, and the `plan` of each one compiled.
    """
    lengths = dict(response_tokens=response_tokens, prompt_tokens=prompt_tokens)
    ranked, refused = candidates(config, target, **lengths)
    if not ranked:
        reasons = "".join(f"\n  {reason}" for reason in refused[:8])
        raise UserError(f"--search: no mesh of these devices divides the run:{reasons}")
    hbm = target.hbm_bytes
    likely = [c for c in ranked if hbm is None or c.bytes <= SLACK * hbm] or [
        min(ranked, key=lambda c: c.bytes)
    ]
    compiled, fitting = [], 0
    say(
        f"{len(ranked)} candidates, {len(refused)} mesh shapes do not divide, {len(likely)} may "
        f"fit by arithmetic; compiling until {enough} do"
    )
    for number, candidate in enumerate(likely, 1):
        if fitting == enough:
            break
        say(f"candidate {number} of at most {len(likely)}: {candidate.name}")
        found = plan.plan(candidate.config, target, wanted, say, **lengths)
        compiled.append(_row(config, candidate, found))
        fitting += found["fits"]
    rest = [_row(config, c, None) for c in ranked if c not in likely[: len(compiled)]]
    compiled.sort(key=lambda row: not row["plan"]["fits"])
    return {
        "fits": fitting > 0,
        "hbm_bytes": hbm,
        "programs": compiled[0]["plan"]["programs"],
        "found": compiled + rest,
        "refused": refused,
    }


def describe(result: Mapping[str, Any]) -> str:
    """Returns the result of `search` as text."""
    hbm = result["hbm_bytes"]
    found: dict[str, list[str]] = {
        "Compiled, and it fits, fastest first (longest mini-batch, expected):": [],
        "Compiled, and it does not fit:": [],
        "By arithmetic alone, not compiled:": [],
    }
    fits, too_large, arithmetic = found.values()
    for row in result["found"]:
        seconds = "time unknown"
        if row["seconds"] is not None:
            seconds = f"{row['seconds']:.4g} s ({row['link_seconds']:.3g} s of links)"
        flags = "".join(f" --{name}={value}" for name, value in row["changes"].items())
        of = arithmetic if row["plan"] is None else fits if row["plan"]["fits"] else too_large
        of.append(f"{row['name']}: {row['bytes'] / chips.GIB:.1f} GiB, {seconds};{flags}")
    found["Mesh shapes that do not divide:"] = result["refused"]
    lines = [f"memory of a device: {'not known' if hbm is None else f'{hbm / chips.GIB:.2f} GiB'}"]
    for title, texts in found.items():
        lines += [title, *(f"  {text}" for text in texts or ["none"])]
    return "\n".join(lines)


def _row(config: Config, c: Candidate, found: Mapping[str, Any] | None) -> dict[str, Any]:
    size = c.bytes if found is None else max(map(plan.need, found["programs"].values()))
    changes = {
        f"config.{group}.{field}": value
        for group in ("mesh", "model", "train", "rollout")
        for field, value in vars(getattr(c.config, group)).items()
        if value != getattr(getattr(config, group), field)
    }
    return {
        "name": c.name,
        "mesh": {axis: getattr(c.config.mesh, axis) for axis in AXES},
        "remat": c.config.model.remat,
        "changes": changes,
        "bytes": size,
        "seconds": c.seconds,
        "link_seconds": c.link_seconds,
        "plan": found,
    }


def _on_mesh(config: Config, mesh: MeshConfig, target: chips.Target) -> Config:
    """Returns the config on a mesh, with the replica size that a run would choose there."""
    t, r = config.train, config.rollout
    up = lambda n, parts: n + -n % parts
    # A device has less of a row at once, which is the purpose of the context axis.
    rows = max(1, t.rows_per_micro_batch * max(1, config.mesh.context) // mesh.context)
    train = dataclasses.replace(t, rows_per_micro_batch=up(rows, mesh.fsdp))
    devices = mesh.fsdp * mesh.context * mesh.tensor

    def with_slots(mesh: MeshConfig) -> Config:
        shards = max(1, devices // (mesh.rollout_tensor or mesh.tensor))
        rollout = dataclasses.replace(
            r, slots=up(r.slots, shards), prefill_prompts=up(r.prefill_prompts, shards)
        )
        return dataclasses.replace(config, mesh=mesh, train=train, rollout=rollout)

    # First with slots for the most shards there can be, then for those chosen.
    return with_slots(plan.with_replicas(with_slots(mesh), target, lambda _: None).mesh)


def _by_arithmetic(
    config: Config, target: chips.Target, sequence_tokens: int
) -> tuple[float, estimate.Seconds | None]:
    """Returns (bytes that the layers keep for the backward pass, with XLA's attention scores;
    expected times of the update of the most micro-batches)."""
    c, t, m = config.model, config.train, config.mesh
    sizes = {axis: getattr(m, axis) for axis in AXES}
    width = jnp.dtype(c.compute_dtype).itemsize
    rows, T = t.rows_per_micro_batch / (m.data * m.fsdp), t.row_tokens
    tokens = rows * T / m.context
    attended, ff = c.num_heads * c.head_dim / m.tensor, c.intermediate_size / m.tensor
    products = 2 * (attended + c.num_kv_heads * c.head_dim / m.tensor + ff + c.hidden_size)
    kept = (
        c.hidden_size
        + {
            "none": products + 2 * c.hidden_size + ff,
            "dots": products,
            "dots_no_batch": products - attended,
            "attention_mlp": attended + 2 * ff,
            "attention": attended,
            "full": 0.0,
        }[c.remat]
    )
    layers = (c.num_layers * kept + products + c.hidden_size) * tokens * width
    platform = target.devices[0].platform
    if estimate.kernel(config, platform) == "xla":
        queries = T / m.context if T <= attention.LONG_ROW else attention.QUERY_CHUNK
        scores = rows * c.num_heads / m.tensor * queries * T * (4 + width)
        layers += scores * (c.num_layers if c.remat in ("none", "dots") else 1)
    micro = max_micro_batches(config)
    lengths = dict(micro_batches=micro, sequence_tokens=sequence_tokens)
    work = estimate.batch_work(config, sizes, platform, "train", **lengths)
    return layers, estimate.expected(work, estimate.with_dtype(target.chip, config.model))
