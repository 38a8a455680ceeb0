"""Small supervised runs for tests."""

import contextlib
import io
from pathlib import Path
from typing import Any
from unittest import mock

import jax

from dapo_jax.config.sft import SftConfig
from dapo_jax.data import arithmetic
from dapo_jax.data.tokenizer import arithmetic_tokenizer
from dapo_jax.models.sharding import make_mesh
from dapo_jax.tools import sft
from tests.support.helpers import dotted, tiny_dict, with_fields
from tests.support.problems import write_rows
from tests.support.runs import programs

SUMS = [(2, 3), (4, 5, 6), (7, 1), (9, 9, 2), (3, 3), (8, 2, 4), (5, 1), (6, 6, 6), (1, 2), (4, 4)]


def sums_rows() -> list[dict[str, Any]]:
    """Ten prompts with written responses, in the words of the arithmetic tokenizer."""
    return [
        {"prompt": arithmetic.prompt_text(terms), "response": f"Answer: {sum(terms)}"}
        for terms in SUMS
    ]


def sft_dict(place: Path, **overrides: Any) -> dict[str, Any]:
    """A supervised config on a file in `place`, which is written; keys as `group__field`."""
    arithmetic_tokenizer().save_pretrained(str(place / "tokenizer"))
    file = write_rows(place / "sums.jsonl", sums_rows())
    model = tiny_dict()["model"] | {"tokenizer": str(place / "tokenizer")}
    values: dict[str, Any] = {
        "model": model,
        "data": {"chat": False, "train": {"sums": {"path": str(file)}}, "heldout_share": 0.2},
        "optimizer": {"learning_rate": 1e-2, "warmup_steps": 2},
        "train": {
            "num_steps": 6,
            "examples_per_update": 4,
            "row_tokens": 48,
            "rows_per_micro_batch": 2,
        },
        "evaluation": {"every_steps": 2},
        "checkpoint": {"every_steps": 2, "keep_newest": 9},
    }
    return with_fields(values, dotted(overrides))


def sft_config(place: Path, **overrides: Any) -> SftConfig:
    """The same, checked."""
    return SftConfig.from_dict(sft_dict(place, **overrides))


def fine_tune_here(
    workdir: Path, home: Path, config: SftConfig, *, devices: int = 1
) -> tuple[int | None, str]:
    """Fine-tunes in this process. Returns the signal that stopped the run, and what it printed."""
    jax.config.update("jax_compilation_cache_dir", programs(home))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    out = io.StringIO()
    with (
        mock.patch.object(sft, "make_mesh", lambda mesh: make_mesh(mesh, jax.devices()[:devices])),
        jax.numpy_dtype_promotion("standard"),
        contextlib.redirect_stdout(out),
    ):
        return sft.fine_tune(config, workdir), out.getvalue()
