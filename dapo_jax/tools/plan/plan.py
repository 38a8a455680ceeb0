"""A run's programs compiled for devices that need not be there, and what follows for the run."""

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
    """Memory of the programs, per device, as compiled, and an estimate of a step by arithmetic.

    Args:
        wanted: names of `programs.names`.
        say: told what is being compiled.
        response_tokens, prompt_tokens: mean lengths of the step that is estimated.

    Returns:
        `fits`, `hbm_bytes`, `chip`, `devices`, `mesh`, `rollout_tensor`, `start` (see
        `programs.start_bytes`), `programs` with
        argument_bytes, temp_bytes, peak_bytes, compile_seconds and more of each (see
        `compiled.measure`), `step` (see `estimate.step`), where decode is among them
        `slots_that_fit`, and where they do not fit `needs_more_bytes` and `remedy`.

    Raises:
        UserError: the mesh does not fit the devices, or the config the mesh; or "weights" alone is
            wanted where there is no such program.
    """
    config = with_teams(config, target, say)
    mesh = make_mesh(config.mesh, target.devices)
    chip, hbm = target.chip, target.hbm_bytes
    known = programs.programs(config, mesh)
    if list(wanted) == ["weights"] and "weights" not in known:
        raise UserError(
            "--program=weights: there is none here, rollouts read the trainer's own arrays."
        )
    wanted = [name for name in wanted if name in known]
    found = {}
    for number, name in enumerate(wanted, 1):
        least = known[name].argument_bytes + sum(known[name].held.values())
        if hbm is not None and least > hbm:
            found[name] = compiled.too_large(known[name])
            say(f"{name} is not compiled: what it is given is more than the memory")
            continue
        spent = sum(numbers["compile_seconds"] for numbers in found.values())
        so_far = f", {spent:.0f} s so far" if found else ""
        say(f"compiling {name} for {mesh.size} {chip.name} ({number} of {len(wanted)}{so_far})")
        found[name] = compiled.measure(known[name])
    cache = programs.cache(config, mesh)
    start = programs.start_bytes(config, mesh)
    needs = [sum(start.values()), *map(need, found.values())]
    result: dict[str, Any] = {
        "fits": max(needs) <= (hbm or max(needs)) and not any(n["refused"] for n in found.values()),
        "hbm_bytes": hbm,
        "chip": chip._asdict(),
        "devices": mesh.size,
        "mesh": dict(mesh.shape),
        "rollout_tensor": config.mesh.rollout_tensor or mesh.shape["tensor"],
        "remat": config.model.remat,
        "start": start,
        "programs": found,
        "model_flops_per_token": estimate.model_flops(config, prompt_tokens + response_tokens),
        "step": estimate.step(
            config,
            mesh.shape,
            chip,
            response_tokens=response_tokens,
            prompt_tokens=prompt_tokens,
        ),
    }
    if "decode" in found and hbm is not None:
        free = hbm - need(found["decode"]) + cache.pool_bytes
        result["slots"] = config.rollout.slots
        result["tokens_per_slot"] = cache.slot_tokens
        result["slots_that_fit"] = programs.slots_that_fit(config, mesh, free)
    if not result["fits"]:
        result["needs_more_bytes"] = 0 if hbm is None else max(0, max(needs) - hbm)
        result["remedy"] = remedy(config, result)
    return result


def with_teams(config: Config, target: chips.Target, say: Callable[[str], None]) -> Config:
    """`memory_budget.with_replica_size` for devices that need not be there. A config that does not
    fit is compiled all the same."""
    # Of CPUs a run does not know the memory.
    known = None if target.devices[0].platform == "cpu" else target.hbm_bytes
    return memory_budget.with_replica_size(config, target.devices, known, say, refuse=False)


def need(numbers: Mapping[str, Any]) -> int:
    """Bytes of a device while a program runs: its own, and what the run holds beside it."""
    return numbers["peak_bytes"] + numbers["held_bytes"]


def remedy(config: Config, result: Mapping[str, Any]) -> str:
    """By how much the worst program is too large, of what, and what would make it smaller."""
    hbm, shape, over = result["hbm_bytes"], result["mesh"], result["needs_more_bytes"]
    name, worst = max(result["programs"].items(), key=lambda item: need(item[1]))
    parts = {"arguments": worst["argument_bytes"], "temporaries": worst["temp_bytes"]}
    parts |= worst["held"]
    made_of = ", ".join(f"{part} {size / GIB:.2f}" for part, size in parts.items())
    reason = f" ({worst['refused']})" if worst["refused"] else ""
    if hbm is not None and not worst["refused"] and worst["peak_bytes"] <= hbm:
        reason = "; alone it would fit, what the run holds beside it does not"
    largest = max(parts, key=lambda part: parts[part])
    t, shards = config.train, shape["data"] * shape["fsdp"]
    training = name in estimate.BATCHED
    ways = []
    if training and config.model.remat != "full":
        ways.append("config.model.remat='full' (layers computed again in the backward pass)")
    if (training or name == "weights") and config.optimizer.moments_dtype != "bfloat16":
        ways.append("config.optimizer.moments_dtype='bfloat16'")
    if training and t.rows_per_micro_batch > shards:
        ways.append(f"config.train.rows_per_micro_batch={shards} (one row a shard)")
    slots = result.get("slots_that_fit", 0) if name == "decode" else None
    if slots:
        ways.append(f"config.rollout.slots={slots} or a config.rollout.cache_gib")
    by_heads = slots == 0 or name in ("weights", "prefill", "prefill_preempted")
    if largest == "temporaries" or by_heads:
        ways.append(
            "a larger config.mesh.tensor (heads, feed-forward)"
            if training
            else "a larger config.mesh.rollout_tensor (the rollout's parameters, heads, cache)"
        )
    if training:
        ways.append("more devices on config.mesh.fsdp (parameters and optimiser)")
        if largest == "temporaries":
            ways.append("a shorter config.train.row_tokens with shorter responses")
    least = "at least " if not worst["compile_seconds"] else ""
    text = f"{name} needs {least}{over / GIB:.2f} GiB more than there are: {made_of} GiB{reason}."
    return f"{text} What would help: {'; '.join(ways)}. --search tries meshes and remat."
