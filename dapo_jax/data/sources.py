"""Sources of problems: data sets of the hub, by name or id, and files."""

import re
from pathlib import Path
from typing import Literal, NamedTuple

from dapo_jax.data.records import Columns
from dapo_jax.types import UserError
from dapo_jax.utils import hf_hub

SUFFIXES = (".jsonl", ".parquet")
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*(@[\w.-]+)?(/.*)?")


class Dataset(NamedTuple):
    """A data set of the hub with a short name."""

    path: str  # owner/name, or owner/name/directory
    prompt_key: str
    answer_key: str
    answer_in: Literal["text", "boxed", "####"]
    splits: tuple[str, ...] = ()  # the last is for evaluation

    @property
    def heldout_split(self) -> str | None:
        return self.splits[-1] if self.splits else None


DATASETS = {
    # Its prompts are chats with the instruction of the published runs.
    "dapo-math-17k": Dataset(
        "BytedTsinghua-SIA/DAPO-Math-17k", "prompt", "reward_model.ground_truth", "text"
    ),
    # The bare problem, to be put into the config's own template; the file repeats each 32 times.
    "aime24": Dataset(
        "BytedTsinghua-SIA/AIME-2024", "extra_info.raw_problem", "reward_model.ground_truth", "text"
    ),
    "aime25": Dataset("math-ai/aime25", "problem", "answer", "text", ("test",)),
    "amc23": Dataset("math-ai/amc23", "question", "answer", "text", ("test",)),
    "gsm8k": Dataset("openai/gsm8k/main", "question", "answer", "####", ("train", "test")),
    "math": Dataset(
        "DigitalLearningGmbH/MATH-lighteval", "problem", "solution", "boxed", ("train", "test")
    ),
    "math500": Dataset("HuggingFaceH4/MATH-500", "problem", "answer", "text", ("test",)),
}


def columns(path: str, prompt_key: str | None, answer_key: str | None) -> Columns:
    """Returns the columns of a source: the given ones, else those of a name in DATASETS."""
    dataset = DATASETS.get(path)
    if dataset is None:
        return Columns(prompt_key, answer_key, None)
    # How the answer is written is known for the data set's own column only.
    answer_in = dataset.answer_in if answer_key is None else None
    return Columns(prompt_key or dataset.prompt_key, answer_key or dataset.answer_key, answer_in)


def find_files(path: str, split: str | None, field: str) -> list[Path]:
    """Returns the files of a data set, in the order of their names; files of the hub are downloaded
    once, into the cache of `huggingface_hub`.

    Args:
        path: a name in DATASETS, a file, a directory, or owner/name[/directory] on the hub.
        split: a word in the paths of the files; None: all files.
        field: the config field or flag that gave `path`, for messages.

    Raises:
        UserError: there are no such files, or the hub cannot be reached.
    """
    split = split or None  # "": None, on a command line
    dataset = DATASETS.get(path)
    if dataset is not None and split is None and len(dataset.splits) > 1:
        raise UserError(f"{field}.split: {path!r} has {' and '.join(dataset.splits)}; say which.")
    place = None if dataset is not None else _on_disk(path, field)
    if place is not None:
        return _chosen(place, place.parent if place.is_file() else place, split, field)
    owner, name, *inside = (path if dataset is None else dataset.path).split("/", 2)
    repository, inside = f"{owner}/{name}", inside[0].rstrip("/") if inside else ""
    try:
        below = f"{inside}/" if inside else ""
        patterns = [inside, *(f"{below}*{suffix}" for suffix in SUFFIXES)]
        snapshot = hf_hub.snapshot(repository, "dataset", patterns)
    except Exception as error:  # the client's HTTP and transfer libraries have their own errors
        absent = "" if dataset is not None else f"there is no file {Path(path).absolute()}, and "
        raise UserError(
            f"{field}: {absent}the data set {repository} could not be fetched from the hub "
            f"({hf_hub.reason(error)}). Check its name and the network, set HF_TOKEN if it is "
            "gated or private, or give the path of a file."
        ) from error
    return _chosen(snapshot / inside, snapshot, split, field)


def _on_disk(path: str, field: str) -> Path | None:
    """Returns the data file or directory of that name; None where only the hub can have it."""
    try:
        place = Path(path).expanduser()
        is_file, is_directory = place.is_file(), bool(path) and place.is_dir()
    except (OSError, RuntimeError) as error:  # no permission, a long name, an unknown user's home
        raise UserError(f"{field}: {path!r} cannot be looked up: {error}.") from error
    if is_file and place.suffix not in SUFFIXES:
        raise UserError(
            f"{field}: {place} is neither .jsonl nor .parquet; convert it, or rename it."
        )
    if is_file or is_directory:
        return place
    if HUB_ID.fullmatch(path) and not (place.suffix in SUFFIXES and path.count("/") < 2):
        return None
    raise UserError(
        f"{field}: there is no file {place.absolute()}. Give the path of a file or directory of "
        f"jsonl or parquet, the id of a data set on the hub (owner/name), or one of "
        f"{', '.join(DATASETS)}."
    )


def _chosen(place: Path, root: Path, split: str | None, field: str) -> list[Path]:
    """Returns the data files at or below `place` whose path below `root` has the word `split`."""
    # Hidden ones are no data: checkpoints of Jupyter, attributes of macOS.
    hidden = lambda file: any(part.startswith(".") for part in file.relative_to(place).parts)
    found = [place] if place.is_file() else sorted(f for f in place.rglob("*") if not hidden(f))
    # Links to nothing are kept: reading them is an error.
    files = [file for file in found if file.suffix in SUFFIXES and not file.is_dir()]
    if split is None:
        chosen, hint = files, ""
    else:
        word = re.compile(rf"(?<![a-z]){re.escape(split.lower())}(?![a-z])")
        chosen = [file for file in files if word.search(_below(file, root).lower())]
        hint = f", and none has {split!r} in its name ({field}.split='' takes them all)"
    if not chosen:
        names = ", ".join(_below(file, root) for file in files[:8])
        more = ", ..." if len(files) > 8 else ""
        there = f"there are {len(files)} data files ({names}{more})" if files else ""
        raise UserError(
            f"{field}: {there or 'there is no data file'}{hint}. Looked in {place} for "
            f"{' and '.join(SUFFIXES)}."
        )
    return chosen


def _below(file: Path, root: Path) -> str:
    return file.relative_to(root).as_posix()
