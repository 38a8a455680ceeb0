"""Memory of the 1.5B's update of rows of 16,384 tokens on an H200, compiled without one.

    uv sync --extra cuda      # Python 3.12
    JAX_PLATFORMS=cpu python -m tests.studies.gpu_memory          # as rows are packed
    JAX_PLATFORMS=cpu python -m tests.studies.gpu_memory 128      # at most 128 sequences in a row

It prints GB as compiled, for two kinds of remat, without and with the memory of cuDNN's backward
pass: only cuDNN knows it, and is not asked without a device. For a bound of M sequences in a row of
T tokens, N query heads of size H, it holds float32 sums for queries, and bfloat16 gradients of keys
and values for each query head: 8 M T N H bytes.
"""

import sys
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from jax._src.cudnn import fused_attention_stablehlo as library
from jax.experimental import topologies
from jax.sharding import Mesh

import dapo_jax
from dapo_jax.models.attention import cudnn
from dapo_jax.models.sharding import AXES
from dapo_jax.tools.bench.train import TrainShape, train_config
from dapo_jax.tools.check.machine import MODELS
from dapo_jax.tools.plan import programs

ROW_TOKENS = 16_384
# What XLA asks of a GPU that is not there (openxla/xla, xla/backends/gpu/target_config).
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 device_memory_size: 151397597184
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  name: "NVIDIA H200" driver_version: "13.0.0" runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0" dnn_version: "9.10.0"
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 } device_description_str: "NVIDIA H200"
"""


def pretend(workspace_bytes: int) -> None:
    """Has JAX's calls of cuDNN take a GPU for granted, and hand over a workspace of this size."""
    found: Any = library
    real: Any = getattr(found.ir, "real", found.ir)
    sized = lambda shape, dtype: real.RankedTensorType.get(
        (workspace_bytes,) if tuple(shape) == (0,) else shape, dtype
    )
    names = {name: getattr(real, name) for name in dir(real) if not name.startswith("__")}

    class RankedTensorType(real.RankedTensorType):
        get = staticmethod(sized)

    found.ir = SimpleNamespace(**names | {"RankedTensorType": RankedTensorType, "real": real})
    found.check_cudnn_version = lambda: 91900
    found.check_compute_capability = lambda least: True
    found.is_cuda_compute_capability_equal = lambda other: False


def compiled_bytes(remat: str, device: Any) -> int:
    """Returns what the compiler says that the update needs."""
    jax.clear_caches()
    model = (*MODELS["1.5B"], "bfloat16")
    shape = TrainShape(
        *model, batch=2, row_len=ROW_TOKENS, prompt_len=ROW_TOKENS // 8, lengths="longtail",
        packed=True, micro_batch=1, runs=1, remat=remat,
    )  # fmt: skip
    config = train_config(shape, dapo_jax.load_config("configs/tiny_dapo.py").to_dict())
    mesh = Mesh(np.array([device]).reshape(1, 1, 1, 1), AXES)
    memory = programs.programs(config, mesh)["train"].lower().compile().memory_analysis()
    new = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes + new


def main() -> None:
    if len(sys.argv) > 1:
        cudnn.most_segments = lambda row_tokens: int(sys.argv[1])
    most = cudnn.most_segments(ROW_TOKENS)
    _, _, heads, _, *_ = MODELS["1.5B"]
    workspace = 8 * most * ROW_TOKENS * heads * 128
    topology = topologies.get_topology_desc("h200", "cuda", target_config=H200, topology="1x1x1")
    print(f"jax {jax.__version__}, {most} sequences in a row, cuDNN's {workspace / 1e9:.1f} GB")
    for remat in ("full", "dots_no_batch"):
        found = []
        for size in (0, workspace):
            pretend(size)
            found.append(compiled_bytes(remat, topology.devices[0]) / 1e9)
        print(f"{remat:>14}: {found[0]:.1f} GB, with cuDNN's {found[1]:.1f}", flush=True)


if __name__ == "__main__":
    main()
