"""Export of a checkpoint as a Hugging Face directory, for launch/export.py."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax

from dapo_jax.config import Config, ModelConfig, hf_config
from dapo_jax.data.tokenizer import load_tokenizer, save_tokenizer, stop_tokens
from dapo_jax.models import decoder, hf_weights, peft_adapter
from dapo_jax.models.sharding import fitting, make_mesh
from dapo_jax.runs import run_directory
from dapo_jax.tools import model_card
from dapo_jax.tools.evaluate import load_params
from dapo_jax.types import UserError
from dapo_jax.utils.files import make_writable
from dapo_jax.utils.progress import Progress


def export(
    workdir: Path, step: int | None, output: Path, dtype: str | None, *, adapter: bool = False
) -> str:
    """Writes safetensors with their index, config files, tokenizer and the model card README.md.
    Adapters are merged into the weights.

    Args:
        step: of the checkpoint; None: the newest.
        output: a new or empty directory.
        dtype: of the tensors; None: the run's compute dtype.
        adapter: write the adapters alone, in the format of peft, with the tokenizer.

    Returns:
        A line of text about the files.

    Raises:
        UserError: no such run or checkpoint, or the output cannot be written.
    """
    try:
        config = Config.of_run(run_directory.read_config(workdir / "config.json"))
    except UserError as error:  # a ValueError, too
        raise UserError(
            f"--workdir={workdir} holds a run of another version: {error} Export it with the "
            "version that trained it: git_commit in its config.json."
        ) from error
    except run_directory.UNREADABLE as error:
        raise UserError(f"--workdir={workdir} holds no run: {error}.") from error
    dtype = dtype or config.model.compute_dtype
    if dtype not in ("float32", "bfloat16"):
        raise UserError(f"--dtype={dtype} must be float32 or bfloat16.")
    if adapter and not config.model.lora_rank:
        raise UserError(f"--adapter: {workdir} has config.model.lora_rank 0: it has no adapters.")
    make_writable(output, "--output")
    if any(output.iterdir()):
        raise UserError(f"--output={output} is not empty; choose another directory.")
    tokenizer = load_tokenizer(
        dataclasses.replace(config.model, tokenizer=str(workdir / "tokenizer"))
    )
    # The devices of this machine, which need not be those of the run.
    config = dataclasses.replace(config, mesh=fitting(config.model, jax.device_count()))
    progress = Progress(0)
    mesh = make_mesh(config.mesh)
    # Nothing can be saved half done: signals end the process as usual.
    label, params = load_params(config, workdir, step, mesh, tokenizer, progress, lambda: None)
    if adapter:
        save_tokenizer(tokenizer, output)
        peft_adapter.save(config.model, params, output, dtype)
    else:
        write_directory(config.model, params, tokenizer, output, dtype, _sampling(config))
    model_card.write(output, workdir, label, dtype, library="peft" if adapter else "transformers")
    size = sum(file.stat().st_size for file in output.glob("*.safetensors"))
    return f"{label}: {size / 1e6:,.1f} MB in {dtype} at {output}"


def write_directory(
    model: ModelConfig,
    params: decoder.Params,
    tokenizer: Any,
    output: Path,
    dtype: str,
    sampling: dict[str, Any],
) -> None:
    """Writes a model in Hugging Face format into a directory, adapters merged into its weights.

    Args:
        dtype: of the tensors.
        sampling: values of generation_config.json besides the stop tokens.
    """
    eos = list(stop_tokens(model, tokenizer))
    values = hf_config.to_hf(model, eos=eos, bos=tokenizer.bos_token_id, dtype=dtype)
    hf_weights.save(model, params, output, dtype)
    save_tokenizer(tokenizer, output)
    _write(output / "config.json", values)
    ends = {key: values[key] for key in ("bos_token_id", "eos_token_id")}
    _write(output / "generation_config.json", ends | sampling)


def _sampling(config: Config) -> dict[str, Any]:
    """Returns the sampling of the run's evaluation, for tools that read the directory."""
    evaluation = config.evaluation
    if evaluation.temperature == 0:
        return {"do_sample": False}
    # transformers takes top_k 50 unless it is given.
    sampling = {"do_sample": True, "top_k": 0, "min_p": 0.0}
    return sampling | {"temperature": evaluation.temperature, "top_p": evaluation.top_p}


def _write(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n")
