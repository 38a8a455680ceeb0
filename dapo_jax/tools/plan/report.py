"""A plan as text: memory as compiled, and an estimate by arithmetic."""

from collections.abc import Mapping
from typing import Any

from dapo_jax.config import Config
from dapo_jax.rollout.memory_budget import size_text as _size
from dapo_jax.tools.plan import chips, plan

GIB = chips.GIB


def describe(config: Config, result: Mapping[str, Any]) -> str:
    """The result of `plan.plan` as text."""
    chip, hbm = result["chip"], result["hbm_bytes"]
    memory = "memory not known" if hbm is None else f"{hbm / GIB:.2f} GiB each"
    lines = [
        f"{result['devices']} {chip['name']} ({memory}), mesh {_mesh(result['mesh'])}, "
        f"drawing by {result['rollout_tensor']} together, remat {result['remat']}",
        "",
        "Compiled: per device",
        *_memory(result),
        "",
        *_rates(chip),
        *_step(config, result),
        "",
    ]
    if "slots_that_fit" in result:
        lines.append(
            f"Arithmetic: {result['slots_that_fit']:,} slots of {result['tokens_per_slot']:,} "
            f"tokens fit (the config has {result['slots']:,})"
        )
    fits = "it fits" if result["fits"] else f"it does not fit: {result['remedy']}"
    return "\n".join([*lines, fits])


def _seconds(number: float | None) -> str:
    if number is None:
        return "unknown"
    return f"{number:,.0f} s" if number >= 100 else f"{number:.3g} s"


def _scaled(number: float) -> str:
    """With a thousand's prefix: 6.397e16 is 64 P."""
    for power, prefix in ((15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if number >= 10**power:
            return f"{number / 10**power:.4g} {prefix}"
    return f"{number:.4g}"


def _mesh(shape: Mapping[str, int]) -> str:
    return " x ".join(f"{name} {size}" for name, size in shape.items())


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows)]
    form = lambda row: "  ".join(
        text.ljust(width) if number == 0 else text.rjust(width)
        for number, (text, width) in enumerate(zip(row, widths))
    )
    return ["  " + form(row).rstrip() for row in rows]


def _memory(result: Mapping[str, Any]) -> list[str]:
    rows: list[tuple[str, ...]] = [
        ("program", "arguments", "temporary", "peak", "held beside", "together", "compiled in")
    ]
    hbm = result["hbm_bytes"]
    for name, n in result["programs"].items():
        sizes = [n[f"{key}_bytes"] for key in ("argument", "temp", "peak", "held")]
        whole = plan.need(n)
        share = "" if hbm is None else f" = {100 * whole / hbm:.0f} %"
        seconds = f"{n['compile_seconds']:.0f} s" + (", refused" if n["refused"] else "")
        seconds = seconds if n["compile_seconds"] else "not compiled"
        rows.append((name, *map(_size, sizes), f"{_size(whole)}{share}", seconds))
    held = {k: v for n in result["programs"].values() for k, v in n["held"].items()}
    beside = ", ".join(f"{name} {_size(size)}" for name, size in held.items())
    start = result["start"]
    made_of = ", ".join(f"{name} {_size(size)}" for name, size in start.items())
    return [
        *_table(rows),
        f"  start (arithmetic), before the first rollout: {_size(sum(start.values()))}: {made_of}",
        f"  held beside (arithmetic): what else the run keeps: {beside}",
    ]


def _rates(chip: Mapping[str, Any]) -> list[str]:
    if chip["flops"] is None:
        return [f"Rates of a {chip['name']!r} are not known here: no estimate of time", ""]
    return [
        f"Rates of a {chip['name']} as stated ({chip['source']}): {chip['flops'] / 1e12:.0f} "
        f"TFLOP/s bfloat16, memory {chip['memory_rate'] / 1e9:,.0f} GB/s, links "
        f"{chip['link_rate'] / 1e9:,.0f} GB/s in",
        "",
    ]


def _step(config: Config, result: Mapping[str, Any]) -> list[str]:
    s, t, d = result["step"], config.train, result["devices"]
    flops = s["tokens"] * result["model_flops_per_token"]
    lines = [
        f"Arithmetic of one step, prompts of {s['prompt_tokens']:,} and responses of "
        f"{s['response_tokens']:,} tokens",
        f"  {t.prompts_per_step:,} prompts x {config.rollout.group_size} = {s['responses']:,} "
        f"responses, {s['tokens']:,} tokens; {s['updates']} updates of {s['rows_per_update']:,} "
        f"rows of {t.row_tokens:,} = {s['micro_batches_per_update']:,} micro-batches of "
        f"{t.rows_per_micro_batch}",
        f"  training needs {_scaled(flops / d)}FLOP a device if nothing is computed twice "
        "(6 for each parameter and token, and causal attention)",
    ]
    rows: list[tuple[str, ...]] = [
        ("program", "calls", "FLOP", "bytes", "received", "at best", "estimate", "bound by")
    ]
    for name, part in s["parts"].items():
        costs = (part["flops"], part["memory_bytes"], part["received_bytes"])
        rows.append(
            (name, f"{part['calls']:,}", *map(_scaled, costs), _seconds(part["seconds_at_best"]),
             _seconds(part["seconds"]), part["bound"] or "unknown")
        )  # fmt: skip
    lines += ["", "Estimate of one step, by arithmetic; costs are of a device and a call"]
    lines += _table(rows)
    if s["seconds"] is not None:
        lines.append(f"  one step: {s['seconds']:,.0f} s; at best {s['seconds_at_best']:,.0f} s")
    return [*lines, f"  assumed, not measured: {s['assumptions']}"]
