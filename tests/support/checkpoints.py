"""Hugging Face checkpoints for tests, and small models with logits that transformers computed."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save_file

from dapo_jax.config import Config, hf_config
from dapo_jax.models import decoder, hf_weights
from dapo_jax.models.sharding import param_shardings
from tests.support.helpers import make_mesh, tiny_dict

GOLDENS = Path(__file__).parent.parent / "goldens" / "logits.npz"


def config_of(path: Path, **changes: Any) -> Config:
    """Returns the config of a run on the checkpoint in `path`."""
    values = tiny_dict(pretrain=None, model__path=str(path), model__tokenizer="none", **changes)
    values["model"] |= dict.fromkeys(hf_config.FIELDS)
    values["model"] = hf_config.filled(values["model"])
    return Config.from_dict(values)


def load(config: Config, devices: int = 1) -> decoder.Params:
    """Returns the parameters of the config's checkpoint."""
    mesh = make_mesh(config, devices)
    return hf_weights.load(config.model, param_shardings(config.model, config.mesh, mesh))


class Golden(NamedTuple):
    """A small random model and the logits that transformers computes with it, in float32."""

    config: dict[str, Any]  # config.json, as its save_pretrained wrote it
    weights: dict[str, np.ndarray]  # float32, by their names in a checkpoint
    tokens_T: np.ndarray  # int32
    positions_X: np.ndarray  # of the logits
    logits_XV: np.ndarray  # float32


def golden_families() -> list[str]:
    """Returns the names of the goldens."""
    with np.load(GOLDENS) as file:
        return [name.removesuffix(".config") for name in file.files if name.endswith(".config")]


def golden(family: str) -> Golden:
    """Returns a golden, which goldens/make_logits.py wrote."""
    with np.load(GOLDENS) as file:
        entry = lambda name: file[f"{family}.{name}"]
        shapes = json.loads(entry("shapes").item())
        ends = np.cumsum([np.prod(shape) for shape in shapes.values()])
        parts = np.split(entry("weights").astype(np.float32), ends[:-1])
        return Golden(
            json.loads(entry("config").item()),
            {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts)},
            entry("tokens").astype(np.int32),
            entry("positions").astype(np.int32),
            entry("logits"),
        )


def write(place: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    """Writes a checkpoint directory."""
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text(json.dumps(config))
    save_file(tensors, place / "model.safetensors")
