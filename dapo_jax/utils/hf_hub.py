"""Repositories of the Hugging Face hub: in its cache on this machine, and uploads to it."""

import contextlib
import functools
import re
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
        repository: owner/name, or owner/name@revision: a commit, tag or branch of it.
        patterns: names of the files that are needed.

    Raises:
        Exception: any error of the client or of its HTTP and transfer libraries.
    """
    download, files = huggingface_hub.snapshot_download, list(patterns)
    name, revision = _parts(repository)
    which = {"repo_type": repo_type, "revision": revision}
    fetch = functools.partial(download, name, allow_patterns=files, **which)
    limit = huggingface_hub.constants.HF_HUB_ETAG_TIMEOUT
    try:  # a request with a time limit first: those of snapshot_download have none
        huggingface_hub.HfApi().repo_info(name, timeout=limit, **which)
    except Exception:
        with contextlib.suppress(LocalEntryNotFoundError):
            return Path(fetch(local_files_only=True))
        raise
    return Path(fetch())


def reason(error: Exception) -> str:
    """Returns the text of a client's error on one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}".rstrip(".")


def _parts(repository: str) -> tuple[str, str | None]:
    name, _, revision = repository.partition("@")
    return name, revision or None


def is_repository(path: str) -> bool:
    """Returns whether `path` is an owner/name on the hub, which a revision may follow (see
    `snapshot`), and no directory of this machine."""
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
            "Hugging Face format or the id of a repository on the hub (owner/name, or "
            "owner/name@revision)."
        )
    try:
        return _model_snapshot(path, tuple(patterns))
    except Exception as error:
        name, revision = _parts(path)
        command = f"hf download {name}" + (f" --revision {revision}" if revision else "")
        raise UserError(
            f"{field}: there is no directory {place.absolute()}, and {path} could not be "
            f"fetched from the hub ({reason(error)}). Check its name and the network, and set "
            "HF_TOKEN if it is gated or private. Without a network give a directory, made "
            f"elsewhere by: {command} --local-dir DIRECTORY"
        ) from error


@functools.cache  # config.json is read several times: one request, and one time-out without the hub
def _model_snapshot(repository: str, patterns: tuple[str, ...]) -> Path:
    return snapshot(repository, "model", patterns)


def check_upload(repository: str) -> None:
    """Raises UserError unless `repository` is an OWNER/NAME and there is a token to upload with."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise UserError(f"--push_to_hub={repository} must be OWNER/NAME, an id on the hub.")
    if huggingface_hub.get_token() is None:
        raise UserError(
            f"--push_to_hub={repository}: there is no token for the hub. Run hf auth login, or set "
            "HF_TOKEN to one with write access."
        )


def upload(directory: Path, repository: str) -> str:
    """Uploads a directory to a model repository, which is made where it is missing.

    Returns:
        The address of the repository.

    Raises:
        UserError: the hub refused, or cannot be reached.
    """
    api = huggingface_hub.HfApi()
    try:
        url = api.create_repo(repository, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=directory)
    except Exception as error:  # the client's HTTP and transfer libraries have their own errors
        raise UserError(
            f"--push_to_hub={repository}: the upload failed ({reason(error)}). {directory} is "
            f"complete. To try again: hf upload {repository} {directory}"
        ) from error
    return str(url)
