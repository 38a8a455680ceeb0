"""Where problems come from: data sets of the hub, by name or id, and files."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import huggingface_hub

from dapo_jax.types import UserError

SUFFIXES = (".jsonl", ".parquet")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(/.*)?")


class Dataset(NamedTuple):
    """A data set of the hub that is known by a name of its own."""

    path: str  # owner/name, or owner/name/place
    prompt_key: str
    answer_key: str
    answer_in: Literal["text", "boxed", "####"]
    splits: tuple[str, ...] = ()  # the last is for evaluation; none: all is one

    @property
    def heldout_split(self) -> str | None:
        return self.splits[-1] if self.splits else None


DATASETS = {
    # Its prompts are chats that hold the instruction of the published runs.
    "dapo-math-17k": Dataset(
        "BytedTsinghua-SIA/DAPO-Math-17k", "prompt", "reward_model.ground_truth", "text"
    ),
    # The bare problem, so that the prompt is the config's own; the file repeats each 32 times.
    "aime24": Dataset(
        "BytedTsinghua-SIA/AIME-2024",
        "extra_info.raw_problem",
        "reward_model.ground_truth",
        "text",
    ),
    "aime25": Dataset("math-ai/aime25", "problem", "answer", "text", ("test",)),
    "amc23": Dataset("math-ai/amc23", "question", "answer", "text", ("test",)),
    "gsm8k": Dataset("openai/gsm8k/main", "question", "answer", "####", ("train", "test")),
    "math": Dataset(
        "DigitalLearningGmbH/MATH-lighteval", "problem", "solution", "boxed", ("train", "test")
    ),
    "math500": Dataset("HuggingFaceH4/MATH-500", "problem", "answer", "text", ("test",)),
}


def find_files(path: str, split: str | None, field: str) -> list[Path]:
    """The files of a data set, in the order of their names; those on the hub are downloaded into
    the cache of `huggingface_hub`, once.

    Args:
        path: a name in DATASETS, a file, a directory, or owner/name[/place] on the hub.
        split: a word that the paths of the files have to hold; None: all files.
        field: the config field or flag that gave `path`, for messages.

    Raises:
        UserError: there are no such files, or the hub cannot be reached.
    """
    dataset = DATASETS.get(path)
    if dataset is not None:
        if split is None and len(dataset.splits) > 1:
            raise UserError(
                f"{field}.split: {path!r} has {' and '.join(dataset.splits)}; say which."
            )
        path = dataset.path
    place = Path(path).expanduser()
    if dataset is None and place.is_file():
        if place.suffix not in SUFFIXES:
            raise UserError(
                f"{field}: {place} is neither .jsonl nor .parquet; convert it, or rename it."
            )
        return [place]
    if dataset is None and place.is_dir():
        return _chosen(place, place, split, field)
    if not HUB_ID.fullmatch(path) or (place.suffix in SUFFIXES and path.count("/") < 2):
        raise UserError(
            f"{field}: there is no file {place.absolute()}. Give the path of a file or directory "
            f"of jsonl or parquet, the id of a data set on the hub (owner/name), or one of "
            f"{', '.join(DATASETS)}."
        )
    owner, name, *inside = path.split("/", 2)
    inside = inside[0].rstrip("/") if inside else ""
    snapshot = _download(f"{owner}/{name}", inside, field)
    return _chosen(snapshot / inside, snapshot, split, field)


def _download(repository: str, inside: str, field: str) -> Path:
    patterns = [inside, f"{inside}/*"] if inside else [f"*{suffix}" for suffix in SUFFIXES]
    try:
        return Path(
            huggingface_hub.snapshot_download(
                repository, repo_type="dataset", allow_patterns=patterns
            )
        )
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"{field}: the data set {repository} could not be fetched from the hub: {reason} "
            "Check its name and the network, set HF_TOKEN if it is gated, or give the path of a "
            "file."
        ) from error


def _chosen(place: Path, root: Path, split: str | None, field: str) -> list[Path]:
    """The data files at or below `place` whose path below `root` holds the word `split`."""
    found = [place] if place.is_file() else sorted(place.rglob("*"))
    files = [file for file in found if file.suffix in SUFFIXES]
    word = None if split is None else re.compile(rf"(?<![a-z]){re.escape(split.lower())}(?![a-z])")
    chosen = [
        file
        for file in files
        if word is None or word.search(file.relative_to(root).as_posix().lower())
    ]
    if not chosen:
        raise UserError(
            f"{field}: {_among(files, root)}"
            + ("" if split is None else f", and none has {split!r} in its name ({field}.split)")
            + f". Looked in {place} for {' and '.join(SUFFIXES)}."
        )
    return chosen


def _among(files: Sequence[Path], root: Path) -> str:
    if not files:
        return "there is no data file"
    names = ", ".join(file.relative_to(root).as_posix() for file in files[:8])
    return f"there are {len(files)} data files ({names}{', ...' if len(files) > 8 else ''})"
