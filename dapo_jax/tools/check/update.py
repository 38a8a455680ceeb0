"""Part `update`: tokens per second, share of the chip's operations, and memory of updates."""

import math
from typing import Any

from dapo_jax.models.sharding import AXES
from dapo_jax.rollout.memory_budget import held
from dapo_jax.tools.bench import TrainShape, bench_train
from dapo_jax.tools.bench.memory import peaks
from dapo_jax.tools.bench.shapes import bench_model
from dapo_jax.tools.bench.train import train_config
from dapo_jax.tools.check.findings import Check, Result, Store
from dapo_jax.tools.check.machine import TRAINING_BYTES, Machine, judged
from dapo_jax.tools.plan import estimate

ROWS, ROWS_ON_CPU = (4096, 16_384), (256, 512)  # tokens
MFU = 0.3  # less is called slow


def checks(machine: Machine, store: Store, base: dict[str, Any]) -> dict[str, Check]:
    """Returns the checks of this part by name, in the order of the memory that they need.

    Args:
        base: the values of configs/tiny_dapo.py.
    """
    rows = ROWS_ON_CPU if machine.is_cpu else ROWS
    found: dict[str, Check] = {}
    for name, model in machine.models(TRAINING_BYTES).items():
        for tokens in rows:
            shape = _shape(model, machine, tokens)
            run = lambda shape=shape: _update(machine, store, shape, base)
            found[f"{name}, rows of {tokens:,}"] = run
    return found


def _shape(model: tuple, machine: Machine, row: int) -> TrainShape:
    return TrainShape(
        *model, batch=2 * machine.devices, row_len=row, prompt_len=row // 8, lengths="longtail",
        packed=True, micro_batch=machine.devices, runs=3,
        remat="dots" if machine.is_cpu else "full",
    )  # fmt: skip


def _update(machine: Machine, store: Store, shape: TrainShape, base: dict[str, Any]) -> Result:
    before = peaks()["peak_device_mb"]
    found = bench_train(shape, base)
    c = bench_model(shape, shape.remat)
    m = estimate.matrices(c)
    per_second = found["tokens_per_second"]
    mean = found["tokens"] / found["responses"]  # of a sequence
    # 6 for each parameter and token, and causal attention: docs/plan.md.
    by_parameters = 6.0 * (m.layers + m.head)
    with_attention = by_parameters + 3 * estimate.attention_flops(c, mean / 2)
    figures: dict[str, Any] = {
        "tokens_per_second": per_second,
        "compile_seconds": found["compile_seconds"],
        "padding_share": found["padding_fraction"],
        "compiled_mb": found["compiled_mb"],
    }
    config = train_config(shape, base)
    sizes = {axis: getattr(config.mesh, axis) for axis in AXES}
    # The plan's arithmetic, which leaves out activations; its other figure is the compiler's.
    figures["planned_mb"] = planned = round(held(config, sizes).update_bytes / 1e6, 1)
    text = f"{per_second:,.0f} tokens/s, compiled in {found['compile_seconds']:.0f} s"
    # The devices' counter never falls: it is this update's only where it rose.
    peak = found["peak_device_mb"]
    if peak is not None and before is not None and peak > before:
        figures["peak_device_mb"] = peak
        apart = peak / found["compiled_mb"] - 1
        text += f", {peak / 1e3:.1f} GB in use ({100 * apart:+.0f} % from the compiler's figure;"
        text += f" the plan has {planned / 1e3:.1f} GB without activations)"
    flops, _ = machine.rates(store)
    if flops is None:
        return Result("ok", f"{text}; rates are not known without the part `device`", figures)
    work = estimate.batch_work(
        config,
        sizes,
        machine.platform,
        "train",
        micro_batches=shape.batch / config.train.rows_per_micro_batch,
        sequence_tokens=mean,
    )
    seconds = found["tokens"] / per_second
    figures["products_share"] = work.flops * math.prod(sizes.values()) / seconds / flops
    figures["mfu"] = share = per_second * with_attention / flops
    figures["mfu_parameters"] = per_second * by_parameters / flops
    text += f", MFU {100 * share:.0f} %"
    return judged(share, MFU, machine, text, figures)
