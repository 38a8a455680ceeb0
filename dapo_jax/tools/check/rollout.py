"""Part `rollout`: tokens per second of generation, and what a decode call spends its time on."""

from typing import Any

import jax
import jax.numpy as jnp

from dapo_jax.config import ModelConfig
from dapo_jax.models.sharding import fitting, initial_params, make_mesh
from dapo_jax.rollout.engine import DecoderEngine
from dapo_jax.tools.bench import Shape, bench_rollout
from dapo_jax.tools.bench.shapes import bench_engine, bench_model, generate, random_problems
from dapo_jax.tools.check.findings import Check, Result, Store
from dapo_jax.tools.check.machine import DECODING_BYTES, Machine, judged
from dapo_jax.tools.check.trace import traced
from dapo_jax.tools.plan import estimate

SEQUENCES = (1, 64, 256)  # at once
BOUND_SHARE = 0.5  # of what products and memory allow, from 64 sequences on; less is called slow
JUDGED_FROM = 64
OPERATIONS = 10


def checks(machine: Machine, store: Store) -> dict[str, Check]:
    """Returns the checks of this part by name."""
    found: dict[str, Check] = {}
    for name, model in machine.models(DECODING_BYTES).items():
        for n in SEQUENCES:
            shape = _shape(model, machine, n)
            found[f"{name}, {n} sequences"] = lambda shape=shape: _decode(machine, store, shape)
    last = list(machine.models(DECODING_BYTES).values())[:2][-1:]
    for model in last:
        found["operations"] = lambda model=model: _operations(_shape(model, machine, SEQUENCES[1]))
    return found


def _shape(model: tuple, machine: Machine, sequences: int) -> Shape:
    prompt, response = (32, 64) if machine.is_cpu else (512, 256)
    group = min(8, sequences)
    return Shape(
        *model, prompts=sequences // group, group=group, prompt_len=prompt, gen_len=response,
        lengths="uniform", slots=sequences, decode_steps=8, page_tokens=32,
        temperature=1.0, top_p=1.0, runs=3,
    )  # fmt: skip


def _decode(machine: Machine, store: Store, shape: Shape) -> Result:
    found = bench_rollout(shape)
    c, n = bench_model(shape), shape.prompts * shape.group
    seconds = found["seconds_per_call"]["decode"] / shape.decode_steps
    prefill = found["seconds_by_phase"]["prefill"] + found["seconds_by_phase"]["insert"]
    figures: dict[str, Any] = {
        "tokens_per_second": found["tokens_per_second"],
        "decode_tokens_per_second": n / seconds,
        "prefill_tokens_per_second": shape.prompts * shape.prompt_len / prefill,
        "peak_device_mb": found["peak_device_mb"],
        "compilations": found["compilations"],
    }
    text = f"{n / seconds:,.0f} tokens/s decoded, {found['tokens_per_second']:,.0f} over all"
    if found["compilations"]:
        return Result("wrong", f"{text}; it compiled {found['compilations']} times more", figures)
    flops, rate = machine.rates(store)
    if flops is None or rate is None:
        return Result("ok", f"{text}; rates are not known without the part `device`", figures)
    operations, read = decode_work(c, shape, machine.devices)
    share = max(operations / flops, read / rate) / seconds
    figures["share_of_bound"] = share
    if n >= JUDGED_FROM:
        figures["memory_share"] = read / rate / seconds
    text += f", {100 * share:.0f} % of what products and memory allow"
    if n < JUDGED_FROM:
        return Result("ok", text, figures)
    return judged(share, BOUND_SHARE, machine, text, figures)


def decode_work(c: ModelConfig, shape: Shape, num_devices: int) -> tuple[float, float]:
    """Returns the operations of one token in all slots, and the bytes of weights and cache that all
    devices read for it, in the middle of the responses. Each replica reads the weights."""
    m, n = estimate.matrices(c), shape.prompts * shape.group
    cached = n * (shape.prompt_len + shape.gen_len / 2)
    operations = 2 * n * (m.layers + m.head) + estimate.attention_flops(c, cached)
    width = jnp.dtype(c.compute_dtype).itemsize
    of_token = 2 * c.num_layers * c.num_kv_heads * c.head_dim * width
    replicas = num_devices // fitting(c, num_devices).tensor
    return operations, replicas * estimate.weight_bytes(c) + cached * of_token


def _operations(shape: Shape) -> Result:
    """The operations that take longest in a rollout, and the share of time without any."""
    c = bench_model(shape)
    layout = fitting(c, jax.device_count())
    mesh = make_mesh(layout)
    shape = shape._replace(gen_len=32)
    engine = DecoderEngine(bench_engine(shape, layout), mesh)
    params = initial_params(c, layout, mesh, seed=0)
    problems = random_problems(shape)

    run = lambda: generate(engine, shape, problems, seed=0)
    with engine.weights(params):
        run()
        trace = traced(run)
    longest = trace.longest(OPERATIONS)
    most = ", ".join(f"{one['name']} {one['seconds']:.3f} s" for one in longest[:3])
    text = f"of {trace.seconds:.2f} s idle {100 * trace.idle_share:.0f} %; longest: {most}"
    if not longest:
        return Result("not run", "the profiler saw no operation of a device")
    return Result("ok", text, {"idle_share": trace.idle_share, "longest": longest})
