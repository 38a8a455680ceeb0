"""Adapters as peft keeps them: adapter_config.json and adapter_model.safetensors in a directory.

peft (https://github.com/huggingface/peft) computes x W + (alpha / r) (x A^T) B^T with A [r, in] and
B [out, r]. `config.model.path` may be such a directory, or a repository on the hub.
"""

import functools
import json
from pathlib import Path
from typing import Any

from dapo_jax.config import ModelConfig, hf_config
from dapo_jax.models import decoder, hf_weights, int8, lora
from dapo_jax.models.hf_weights import Tensor
from dapo_jax.utils import hf_hub

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # of every tensor


def tensors(c: ModelConfig) -> dict[str, Tensor]:
    """Returns the source of each part of our adapters by its name, as `hf_weights.tensors`."""
    found, sources = {}, hf_weights.tensors(c)
    for name, num_in in int8.INPUT_AXES.items():
        (out, into), linear = sources[f"layers.{name}"].shape, sources[f"layers.{name}"].name
        module, rank = PREFIX + linear.removesuffix(".weight"), c.lora_rank
        a, b = f"{module}.lora_A.weight", f"{module}.lora_B.weight"
        found[f"layers.{name}_lora_a"] = Tensor(a, (rank, into), (1, 0), (num_in, 0))
        found[f"layers.{name}_lora_b"] = Tensor(b, (out, rank), (1, 0), (1, 0))
    return found


def load(c: ModelConfig, params: decoder.Params, shardings: decoder.Params) -> decoder.Params:
    """Returns the parameters with the adapters of `c.path`. A matrix that has none there keeps the
    one that it has.

    Args:
        params: of the whole model, with new adapters.

    Raises:
        UserError: the files are missing or damaged, or hold other adapters.
    """
    assert c.path is not None
    directory = hf_hub.model_directory(c.path, [hf_config.ADAPTER, WEIGHTS])
    stored = hf_weights.header(directory / WEIGHTS)
    sources = {
        ours: tensor
        for ours, tensor in tensors(c).items()
        if any(tensor.name.format(i=i) in stored for i in range(c.num_layers))
    }
    shapes = {name: tensor.shape for name, tensor in stored.items()}
    hf_weights.check_shapes(hf_weights.shapes_of(sources, c.num_layers), shapes, directory)
    names = {ours.removeprefix("layers.") for ours in sources}
    of = lambda tree: {"layers": {name: tree["layers"][name] for name in names}}
    found = hf_weights.read_arrays(sources, stored, of(decoder.param_shapes(c)), of(shardings))
    return lora.join(found, params)


def save(c: ModelConfig, params: decoder.Params, directory: Path, dtype: str) -> None:
    """Writes the adapters of these parameters.

    Args:
        dtype: of the tensors: "float32" or "bfloat16".
    """
    sources = hf_weights.each_tensor(tensors(c), c.num_layers)
    array = functools.partial(hf_weights.array_of, params)
    hf_weights.write_arrays(array, sources, directory / WEIGHTS, dtype)
    linear = [tensor.name for ours, tensor in hf_weights.tensors(c).items() if _is_adapted(ours)]
    base, revision = None if c.path is None else hf_config.base_path(c.path), None
    if base is not None and hf_hub.is_repository(base):
        base, _, revision = base.partition("@")
    elif base is not None:  # peft knows no run directory of launch/sft.py
        base = str(hf_hub.model_directory(base, ()))
    values: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision or None,
        "r": c.lora_rank,
        "lora_alpha": c.lora_alpha,
        "target_modules": [name.split(".")[-2] for name in linear],
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
    }
    (directory / hf_config.ADAPTER).write_text(json.dumps(values, indent=2) + "\n")


def _is_adapted(ours: str) -> bool:
    return ours.removeprefix("layers.") in int8.INPUT_AXES
