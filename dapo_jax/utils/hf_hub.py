"""Repositories of the Hugging Face hub, in its cache on this machine."""

import contextlib
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import huggingface_hub
from huggingface_hub.errors import LocalEntryNotFoundError

from dapo_jax.types import UserError


def snapshot(
    repository: str, repo_type: Literal["dataset", "model"], patterns: Sequence[str]
) -> Path:
    """Returns the directory of a repository in the cache, updated if the hub answers.

    Downloads show their progress and resume where they were stopped.

    Args:
        patterns: names of the files that are needed.

    Raises:
        Exception: any error of the client or of its HTTP and transfer libraries.
    """
    download, files = huggingface_hub.snapshot_download, list(patterns)
    fetch = functools.partial(download, repository, repo_type=repo_type, allow_patterns=files)
    limit = huggingface_hub.constants.HF_HUB_ETAG_TIMEOUT
    try:  # a request with a time limit first: those of snapshot_download have none
        huggingface_hub.HfApi().repo_info(repository, repo_type=repo_type, timeout=limit)
    except Exception:
        with contextlib.suppress(LocalEntryNotFoundError):
            return Path(fetch(local_files_only=True))
        raise
    return Path(fetch())


def reason(error: Exception) -> str:
    """Returns the text of a client's error on one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}".rstrip(".")


def is_repository(path: str) -> bool:
    """Returns whether `path` is the id of a repository, and no directory of this machine."""
    looks_so = path.count("/") == 1 and not path.startswith((".", "/", "~"))
    return looks_so and not Path(path).is_dir()


def model_directory(path: str, patterns: Sequence[str], field: str = "config.model.path") -> Path:
    """Returns the directory of a model: `path` itself, `path`/model where that holds one, as in the
    directory of a supervised run, or that of the hub's repository.

    Args:
        field: the config field or flag that holds `path`, for errors.

    Raises:
        UserError: there is neither such a directory nor such a repository.
    """
    place = Path(path).expanduser()
    inner = place / "model"
    if (inner / "config.json").is_file() and not any(place.glob("*.safetensors")):
        return inner
    if place.is_dir():
        return place
    if not is_repository(path):
        raise UserError(
            f"{field}: there is no directory {place.absolute()}. Give a directory in "
            "Hugging Face format or the id of a repository on the hub (owner/name)."
        )
    try:
        return snapshot(path, "model", patterns)
    except Exception as error:
        raise UserError(
            f"{field}: there is no directory {place.absolute()}, and {path} could not be "
            f"fetched from the hub ({reason(error)}). Check its name and the network, and set "
            "HF_TOKEN if it is gated or private. Without a network give a directory, made "
            f"elsewhere by: hf download {path} --local-dir DIRECTORY"
        ) from error
