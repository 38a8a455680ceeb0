"""A plan as text: memory as compiled, and the estimate by arithmetic. Also tables for the tools."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dapo_jax.config import Config
from dapo_jax.rollout.memory_budget import size_text
from dapo_jax.tools.plan import chips, estimate, plan

GIB = chips.GIB


def describe(config: Config, result: Mapping[str, Any]) -> str:
    """Returns the result of `plan.plan` as text."""
    chip, hbm, mesh = result["chip"], result["hbm_bytes"], result["mesh"]
    memory = "memory not known" if hbm is None else f"{hbm / GIB:.2f} GiB each"
    axes = " x ".join(f"{name} {size}" for name, size in mesh.items())
    lines = [
        f"{result['devices']} {chip['name']} ({memory}), mesh {axes}, rollouts by replicas of "
        f"{result['rollout_tensor']}, remat {result['remat']}",
        "",
        "Compiled: per device",
        *_memory(result),
        "",
        f"Rates of a {chip['name']!r} are not known here: no estimate of time"
        if chip["flops"] is None
        else f"Rates of a {chip['name']} as stated ({chip['source']}): {chip['flops'] / 1e12:.0f} "
        f"TFLOP/s bfloat16, memory {chip['memory_rate'] / 1e9:,.0f} GB/s, links "
        f"{chip['link_rate'] / 1e9:,.0f} GB/s in",
        "",
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


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the rows as lines with aligned columns, the first of them to the left."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for first, *rest in rows:
        cells = [first.ljust(widths[0]), *map(str.rjust, rest, widths[1:])]
        lines.append("  " + "  ".join(cells).rstrip())
    return lines


def markdown_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns the lines of a Markdown table."""
    line = lambda cells: f"| {' | '.join(cells)} |"
    return [line(titles), "|" + "---|" * len(titles), *map(line, rows)]


def _scaled(number: float) -> str:
    """Returns a number with a prefix: 6.397e16 is 63.97 P."""
    for power, prefix in ((15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if number >= 10**power:
            return f"{number / 10**power:.4g} {prefix}"
    return f"{number:.4g}"


def number_text(number: float) -> str:
    """Returns a number to three digits, or to the unit from 100 on."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def seconds_text(number: float | None) -> str:
    """Returns seconds as text; None: not known."""
    return "unknown" if number is None else f"{number_text(number)} s"


def _memory(result: Mapping[str, Any]) -> list[str]:
    titles = ("program", "arguments", "temporary", "peak", "also held", "together", "compiled in")
    rows: list[Sequence[str]] = [titles]
    hbm = result["hbm_bytes"]
    for name, n in result["programs"].items():
        sizes = [n[f"{key}_bytes"] for key in ("argument", "temp", "peak", "held")]
        whole = plan.need(n)
        share = "" if hbm is None else f" = {100 * whole / hbm:.0f} %"
        seconds = f"{n['compile_seconds']:.0f} s" if n["compile_seconds"] else "not compiled"
        seconds += ", refused" if n["refused"] and n["compile_seconds"] else ""
        rows.append((name, *map(size_text, sizes), size_text(whole) + share, seconds))
    held = {k: v for n in result["programs"].values() for k, v in n["held"].items()}
    parts = ", ".join(f"{name} {size_text(size)}" for name, size in held.items())
    return [*columns(rows), f"  also held (arithmetic) by the run while programs run: {parts}"]


def _step(config: Config, result: Mapping[str, Any]) -> list[str]:
    s, t = result["step"], config.train
    flops = s["tokens"] * result["model_flops_per_token"] / result["devices"]
    titles = ("program", "calls", "FLOP", "bytes", "received", "at best", "estimate", "bound by")
    rows: list[Sequence[str]] = [titles]
    for name, part in s["parts"].items():
        costs = (part["flops"], part["memory_bytes"], part["received_bytes"])
        times = (part["seconds_at_best"], part["seconds"])
        texts = (f"{part['calls']:,}", *map(_scaled, costs), *map(seconds_text, times))
        rows.append((name, *texts, part["bound"] or "unknown"))
    lines = [
        f"Arithmetic of one step, prompts of {s['prompt_tokens']:,} and responses of "
        f"{s['response_tokens']:,} tokens",
        f"  {t.prompts_per_step:,} prompts x {config.rollout.group_size} = {s['responses']:,} "
        f"responses, {s['tokens']:,} tokens; {s['updates']} updates of {s['rows_per_update']:,} "
        f"rows of {t.row_tokens:,} = {s['micro_batches_per_update']:,} micro-batches of "
        f"{t.rows_per_micro_batch}",
        f"  training needs {_scaled(flops)}FLOP a device if nothing is computed twice "
        f"({estimate.product_passes(config.model):.0f} for each parameter and token, and causal "
        "attention)",
        "",
        "Estimate of one step, by arithmetic; costs are of a device and a call",
        *columns(rows),
    ]
    if s["seconds"] is not None:
        lines.append(f"  one step: {s['seconds']:,.0f} s; at best {s['seconds_at_best']:,.0f} s")
    return [*lines, f"  assumed, not measured: {s['assumptions']}"]
