"""The plan of a run: its programs compiled for a target, and an estimate of one step."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dapo_jax.config import Config
from dapo_jax.models.sharding import make_mesh
from dapo_jax.rollout import memory_budget
from dapo_jax.tools.plan import chips, compiled, estimate, programs
from dapo_jax.types import UserError

GIB = chips.GIB


def plan(
    config: Config,
    target: chips.Target,
    wanted: Sequence[str],
    say: Callable[[str], None],
    *,
    response_tokens: int,
    prompt_tokens: int,
) -> dict[str, Any]:
    """Returns the compiled memory of the programs, per device, and an estimate of a step.

    Args:
        wanted: names of `programs.names`.
        say: receives the progress.
        response_tokens, prompt_tokens: mean lengths of the estimated step.

    Returns:
        `fits`, `hbm_bytes`, `chip`, `devices`, `mesh`, `rollout_tensor`, `remat`, `programs` (see
        `compiled.measure`), `step` (see `estimate.step`), with decode among the programs
        `slots_that_fit`, and where they do not fit `needs_more_bytes` and `remedy`.

    Raises:
        UserError: the mesh does not fit the devices, or the config the mesh; or "weights" alone is
            wanted and the run has no such program.
    """
    config = with_replicas(config, target, say)
    mesh = make_mesh(config.mesh, target.devices)
    chip, hbm = target.chip, target.hbm_bytes
    known = programs.programs(config, mesh)
    if list(wanted) == ["weights"] and "weights" not in known:
        raise UserError("--program=weights: this run has none, rollouts read the trainer's arrays.")
    if not known.keys() & set(wanted):
        raise UserError(f"--program={wanted[0]}: this run has none; it has {', '.join(known)}.")
    wanted = [name for name in wanted if name in known]
    found = {}
    for number, name in enumerate(wanted, 1):
        least = known[name].argument_bytes + sum(known[name].held.values())
        if hbm is not None and least > hbm:
            found[name] = compiled.too_large(known[name])
            say(f"{name} is not compiled: its arguments exceed the memory")
            continue
        say(f"compiling {name} for {mesh.size} {chip.name} ({number} of {len(wanted)})")
        found[name] = compiled.measure(known[name])
    most = max(map(need, found.values()))
    lengths = dict(response_tokens=response_tokens, prompt_tokens=prompt_tokens)
    result: dict[str, Any] = {
        "fits": most <= (hbm or most) and not any(n["refused"] for n in found.values()),
        "hbm_bytes": hbm,
        "chip": chip._asdict(),
        "devices": mesh.size,
        "mesh": dict(mesh.shape),
        "rollout_tensor": config.mesh.rollout_tensor or mesh.shape["tensor"],
        "remat": config.model.remat,
        "programs": found,
        "model_flops_per_token": estimate.model_flops(config, prompt_tokens + response_tokens),
        "step": estimate.step(config, mesh.shape, chip, **lengths),
    }
    if "decode" in found and hbm is not None:
        engine = programs.engine_of(config, mesh)
        pool, decode = programs.pool_bytes(engine), found["decode"]
        free = hbm - need(decode) + pool
        if engine.kernel == "xla":
            # XLA's attention gathers pages: its temporaries grow with the pool.
            both = free + decode["temp_bytes"]
            free = int(both * pool / (pool + decode["temp_bytes"]))
        result["slots"] = config.rollout.slots
        result["tokens_per_slot"] = engine.max_tokens
        result["slots_that_fit"] = programs.slots_that_fit(config, mesh, free)
    if not result["fits"]:
        result["needs_more_bytes"] = 0 if hbm is None else max(0, most - hbm)
        result["remedy"] = remedy(result)
    return result


def with_replicas(config: Config, target: chips.Target, say: Callable[[str], None]) -> Config:
    """Returns the config with the replica size that a run on the target would choose. A config that
    does not fit is not refused, since the plan shows by how much."""
    # A run does not know the memory of CPUs.
    known = None if target.devices[0].platform == "cpu" else target.hbm_bytes
    return memory_budget.with_replica_size(config, target.devices, known, say, refuse=False)


def need(numbers: Mapping[str, Any]) -> int:
    """Returns the bytes of a device while a program runs."""
    return numbers["peak_bytes"] + numbers["held_bytes"]


def remedy(result: Mapping[str, Any]) -> str:
    """Returns by how much the worst program is too large, its parts, and what reduces it."""
    name, worst = max(result["programs"].items(), key=lambda item: need(item[1]))
    parts = {"arguments": worst["argument_bytes"], "temporaries": worst["temp_bytes"]}
    parts |= worst["held"]
    made_of = ", ".join(f"{part} {size / GIB:.2f}" for part, size in parts.items())
    reason = f" ({worst['refused']})" if worst["refused"] else ""
    if name in estimate.BATCHED:
        remat = "" if result["remat"] == "full" else "config.model.remat='full', "
        helps = (
            f"{remat}fewer config.train.rows_per_micro_batch, a shorter config.train.row_tokens, "
            "or more devices on config.mesh.fsdp or config.mesh.tensor"
        )
    elif name == "weights":
        helps = "a larger config.mesh.rollout_tensor, or more devices"
    else:
        fit = result.get("slots_that_fit") or result.get("slots", 0)
        slots = f"config.rollout.slots={fit}"
        if fit >= result.get("slots", 0):  # not known, or they fit where this program does not run
            slots = "fewer config.rollout.slots"
        prompts = "fewer config.rollout.prefill_prompts, " if name != "decode" else ""
        helps = f"{prompts}{slots} or a larger config.mesh.rollout_tensor"
    least = "" if worst["compile_seconds"] else "at least "
    more = f"{least}{result['needs_more_bytes'] / GIB:.2f} GiB more than there are"
    return (
        f"{name} needs {more}: {made_of} GiB{reason}. What would help: {helps}. --search tries "
        "meshes and remat."
    )
