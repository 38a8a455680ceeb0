"""Part `device`: rates of products, of memory and of copies, and the kernels that runs will use."""

import jax
import jax.numpy as jnp
import numpy as np

from dapo_jax.models.attention import kernels
from dapo_jax.rollout import paged_kernels
from dapo_jax.tools.bench.shapes import bench_model
from dapo_jax.tools.bench.train import median_seconds, product_seconds
from dapo_jax.tools.check.findings import Check, Result
from dapo_jax.tools.check.machine import DECODING_BYTES, Machine, judged
from dapo_jax.utils.precision import multiply_in

PRODUCTS_SHARE, MEMORY_SHARE = 0.6, 0.6  # of the stated rates; less is called slow
PAGE_TOKENS = 32


def checks(machine: Machine) -> dict[str, Check]:
    """Returns the checks of this part by name."""
    return {
        **{f"products, {d}": lambda d=d: _products(machine, d) for d in ("bfloat16", "float32")},
        "memory": lambda: _memory(machine),
        **({} if machine.is_cpu else {"copies": _copies}),  # CPUs share the host's memory
        **{
            f"kernels, {name}": lambda shape=shape: _kernels(shape)
            for name, shape in machine.models(DECODING_BYTES).items()
        },
    }


def _products(machine: Machine, dtype: str) -> Result:
    size = 1024 if machine.is_cpu else 8192
    multiply_in(dtype, machine.platform)
    rate = 2 * size**3 / product_seconds(size, size, size, dtype)
    figures = {"size": size, "flops": rate}
    text = f"{rate / 1e12:.3g} TFLOP/s"
    if machine.chip.flops is None or dtype != "bfloat16":
        return Result("ok", f"{text}; no stated rate to compare with", figures)
    share = rate / machine.chip.flops
    text += f", {100 * share:.0f} % of the stated rate"
    return judged(share, PRODUCTS_SHARE, machine, text, figures | {"share": share})


def _memory(machine: Machine) -> Result:
    size = (1 << 26) if machine.is_cpu else (1 << 29)
    x = jnp.ones(size, jnp.float32)
    more = jax.jit(lambda x: x + 1)
    rate = 2 * 4 * size / median_seconds(lambda: more(x))
    figures = {"array_bytes": 4 * size, "bytes_per_second": rate}
    text = f"{rate / 1e9:,.0f} GB/s read and written"
    if machine.chip.memory_rate is None:
        return Result("ok", f"{text}; no stated rate to compare with", figures)
    share = rate / machine.chip.memory_rate
    text += f", {100 * share:.0f} % of the stated rate"
    return judged(share, MEMORY_SHARE, machine, text, figures | {"share": share})


def _copies() -> Result:
    host = np.ones(1 << 26, np.float32)
    there = jax.device_put(host)
    # A new array each time: one that was read before keeps its copy on the host.
    arrays = iter([jax.block_until_ready(there + i) for i in range(6)])
    to_device = host.nbytes / median_seconds(lambda: jax.device_put(host))
    to_host = host.nbytes / median_seconds(lambda: np.asarray(next(arrays)))
    text = f"{to_device / 1e9:.1f} GB/s to the device, {to_host / 1e9:.1f} GB/s from it"
    return Result("ok", text, {"to_device": to_device, "to_host": to_host})


def _kernels(shape: tuple) -> Result:
    c = bench_model(shape)
    rollout, passed = paged_kernels.choose(
        "auto", jax.default_backend(), c, page_tokens=PAGE_TOKENS
    )
    training = kernels.choose(c, None)
    figures = {"rollout": rollout, "training": training.kernel}
    reasons = "; ".join(x for x in (passed, training.refused) if x)
    text = f"rollout {rollout}, training {training.kernel}"
    return Result("ok", f"{text} ({reasons})" if reasons else text, figures)
