"""Files of a data set: by name, path, split; from a hub on loopback, and from its cache."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dapo_jax.data.sources import DATASETS, find_files
from dapo_jax.types import UserError
from tests.conftest import ROOT
from tests.support.hub import COMMIT, Hub, SilentHub, hub_environment

FIELD = "config.data.train.sums"


def make_files(directory, *names):
    for name in names:
        file = directory / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    return directory


def names_of(files, root):
    return [file.relative_to(root).as_posix() for file in files]


@pytest.mark.parametrize("name", ["a.jsonl", "b.parquet", "latest"])
def test_a_file_is_itself(tmp_path, monkeypatch, name):
    make_files(tmp_path / "home", "a.jsonl", "b.parquet", "latest/c.jsonl")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    wanted = [tmp_path / "home" / name] if "." in name else [tmp_path / "home/latest/c.jsonl"]
    for path in (f"{tmp_path}/home/{name}", f"~/{name}", f"home/{name}", f"./home/../home/{name}"):
        found = find_files(path, None, FIELD)
        assert [file.resolve() for file in found] == wanted


def test_a_file_on_disk_comes_before_one_of_the_hub(tmp_path, monkeypatch):
    make_files(tmp_path, "openai/gsm8k/main/x.jsonl")
    monkeypatch.chdir(tmp_path)
    assert names_of(find_files("openai/gsm8k", None, FIELD), Path()) == [
        "openai/gsm8k/main/x.jsonl"
    ]


TEST_FILES = ["a/Test-0.parquet", "data/test/x.jsonl", "my_test_1.jsonl", "train+test.jsonl"]
OTHERS = ["data/test/x.jsonl", "my_test_1.jsonl", "testing.jsonl", "train+test.jsonl"]
NO_DATA = ["README.md", "test.json", "test.jsonl.gz", "b.jsonl.d/notes.txt"]
NO_DATA += [".ipynb_checkpoints/test-checkpoint.jsonl", "data/._test.jsonl"]


@pytest.mark.parametrize(
    "split, wanted",
    [
        (None, [TEST_FILES[0], "a/latest.jsonl", "b.jsonl", "b2.jsonl", *OTHERS]),
        ("test", TEST_FILES),
        ("TEST", TEST_FILES),
        ("latest", ["a/latest.jsonl"]),
        ("train", ["train+test.jsonl"]),
        ("train+test", ["train+test.jsonl"]),
        ("b", ["b.jsonl", "b2.jsonl"]),
    ],
)
def test_a_directory_is_all_its_data_files_or_those_of_a_split(tmp_path, split, wanted):
    """In the order of their names; a split is a word of the path below the directory."""
    names = ("a/latest.jsonl", "b.jsonl", "b2.jsonl", *OTHERS, *NO_DATA)
    place = make_files(tmp_path / "test", TEST_FILES[0], *names)
    (place / "test.jsonl").mkdir()
    (place / "test.parquet").mkdir()
    assert names_of(find_files(str(place), split, FIELD), place) == wanted


@pytest.mark.parametrize(
    "path, split, wanted",
    [
        ("gsm8k", None, r"sums\.split: 'gsm8k' has train and test; say which"),
        ("gsm8k", "", r"sums\.split: 'gsm8k' has train and test; say which"),
        ("absent.jsonl", None, r"there is no file /.*/absent\.jsonl\. .*owner/name.*gsm8k, math"),
        ("absent/absent.parquet", None, r"there is no file /.*/absent/absent\.parquet\. Give"),
        ("absent", None, r"there is no file /.*/absent\. Give the path"),
        ("/absent/absent", None, r"there is no file /absent/absent\. Give the path"),
        ("./absent", None, r"there is no file /.*/absent\. Give the path"),
        ("../absent/absent", None, r"there is no file /.*/\.\./absent/absent\. Give the path"),
        ("a/*.jsonl", None, r"there is no file /.*/a/\*\.jsonl\. Give the path"),
        ("", None, "there is no file /"),
        ("a\0b", None, "there is no file /"),
        ("some/" + 300 * "x", None, r"'some/xx+' cannot be looked up: .*File name too long"),
        ("~no_such_user/a.jsonl", None, "'~no_such_user/a.jsonl' cannot be looked up"),
        ("notes.txt", None, r"notes\.txt is neither \.jsonl nor \.parquet; convert it, or"),
        ("a.jsonl", "train", r"none has 'train' in its name \(.*split='' takes them all"),
        ("empty", None, r"there is no data file\. Looked in empty for \.jsonl and \.parquet"),
        ("some", "test", r"2 data files \(a\.jsonl, sub/b\.parquet\), and none has 'test' in its"),
        ("many", "test", r"there are 9 data files \(0\.jsonl, .*, 7\.jsonl, \.\.\.\), and none"),
    ],
)
def test_what_is_not_there_is_reported(tmp_path, monkeypatch, path, split, wanted):
    make_files(tmp_path, "notes.txt", "a.jsonl", "empty/notes.txt", "some/a.jsonl")
    make_files(tmp_path, "some/sub/b.parquet", *(f"many/{i}.jsonl" for i in range(9)))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=wanted) as error:
        find_files(path, split, FIELD)
    assert str(error.value).startswith(FIELD)


def test_named_data_sets():
    """Their splits; the last one is for evaluation."""
    splits = {"gsm8k": ("train", "test"), "math": ("train", "test")}
    splits |= dict.fromkeys(("aime25", "amc23", "math500"), ("test",))
    splits |= dict.fromkeys(("dapo-math-17k", "aime24"), ())
    assert {name: dataset.splits for name, dataset in DATASETS.items()} == splits
    for name, dataset in DATASETS.items():
        assert dataset.heldout_split == ("test" if splits[name] else None)
        assert dataset.answer_in in ("text", "boxed", "####")
        assert len(dataset.path.split("/")) in (2, 3)


# Every call in one process: how it went, as JSON, and how long it took.
CALLS = """
import json, sys, time
from dapo_jax.data.sources import find_files
from dapo_jax.types import UserError
answers = []
for path, split in json.loads(sys.argv[1]):
    start = time.monotonic()
    try:
        answer = [str(file) for file in find_files(path, split, "config.data.train.sums")]
    except UserError as error:
        answer = str(error)
    answers.append((answer, time.monotonic() - start))
print(json.dumps(answers))
"""


def ask(url, home, *calls, **env):
    """The answers of `find_files` to (path, split) in a process that has this hub and this cache:
    paths below the snapshot, or the message of an error; and the longest time that one took."""
    environment = hub_environment(url, home, JAX_PLATFORMS="cpu") | env
    command = [sys.executable, "-c", CALLS, json.dumps(calls)]
    options: dict[str, Any] = {"cwd": ROOT, "env": environment, "timeout": 100}
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr
    answers, seconds = zip(*json.loads(done.stdout))
    root = home / "hub" / "datasets--{}" / "snapshots" / COMMIT
    relative = []
    for (path, _), answer in zip(calls, answers):
        if isinstance(answer, list):
            full = DATASETS[path].path if path in DATASETS else path
            owner, name = full.replace("@v1.0", "").split("/")[:2]
            below = Path(str(root).format(f"{owner}--{name}"))
            assert all(Path(file).read_text() for file in answer), "there, and readable"
            answer = names_of(map(Path, answer), below)
        relative.append(answer)
    return relative, max(seconds)


FILES = {
    "README.md": b"about",
    "train.jsonl": b"1",
    "data/train-00000.parquet": b"2",
    "data/test-00000.parquet": b"3",
    "data/deep/er.jsonl": b"4",
    "data/huge.bin": b"5",
    "images/1.png": b"6",
}
GSM8K = {"main/train-0.parquet": b"1", "main/test-0.parquet": b"2", "socratic/test-0.parquet": b"3"}
TRAIN, TEST = "data/train-00000.parquet", "data/test-00000.parquet"


def test_the_hub_is_asked_once_and_then_the_cache(tmp_path):
    everything = ["data/deep/er.jsonl", TEST, TRAIN, "train.jsonl"]
    answers = {
        ("own/data", None): everything,
        ("own/data", "test"): [TEST],
        ("own/data/data", None): everything[:3],
        ("own/data/data/", "train"): [TRAIN],
        ("own/data/train.jsonl", None): ["train.jsonl"],
        ("gsm8k", "test"): ["main/test-0.parquet"],
        ("own/part/data/deep", None): ["data/deep/er.jsonl"],
        ("own/part/train.jsonl", None): ["train.jsonl"],
        ("own/part@v1.0/data/deep", None): ["data/deep/er.jsonl"],
    }
    calls, wanted = list(answers), list(answers.values())
    with Hub({"own/data": FILES, "own/part": FILES, "openai/gsm8k": GSM8K}) as hub:
        found, _ = ask(hub.url, tmp_path, *calls)
        assert found == wanted
        # Each file once, and none that is not data, nor of another part than is asked for.
        assert sorted(hub.downloads) == [
            "openai/gsm8k:main/test-0.parquet",
            "openai/gsm8k:main/train-0.parquet",
            *(f"own/data:{name}" for name in wanted[0]),
            "own/part:data/deep/er.jsonl",
            "own/part:train.jsonl",
        ]
        assert "GET /api/datasets/own/part/revision/v1.0" in hub.asked
        hub.asked.clear()
        found, _ = ask(hub.url, tmp_path, *calls, ("own/none", None), HF_HUB_OFFLINE="1")
        assert found[:-1] == wanted and not hub.asked, "offline is offline"
        assert "own/none could not be fetched" in found[-1] and "HF_HUB_OFFLINE" in found[-1]
    more = ("own/none", "own/part", "openai/gsm8k/socratic")
    found, seconds = ask(hub.url, tmp_path, *calls, *((path, None) for path in more))
    assert found[: len(wanted)] == wanted, "from the cache, where the hub is down"
    for path, message in zip(more, found[len(wanted) :]):
        repository = path.removesuffix("/socratic")
        wanted_text = f"the data set {repository} could not be fetched from the hub (ConnectError: "
        assert isinstance(message, str) and wanted_text in message, "and never a part for the whole"
    assert seconds < 20


def test_what_the_hub_does_not_give_is_reported(tmp_path):
    datasets = {"own/gated": FILES, "own/private": FILES, "own/broken": FILES, "own/data": FILES}
    refused = {"gated": "own/gated", "private": "own/private", "broken": "own/broken"}
    paths = ("own/none", "own/gated", "own/private", "own/broken", "math500", "own--it/data")
    calls = [*((path, None) for path in paths), ("own/data", "validation")]
    calls += [("own/data/none", None), ("own/data/README.md", None)]
    with Hub(datasets, **refused) as hub:
        messages, seconds = ask(hub.url, tmp_path, *calls)
        assert all(f"{method} /" in str(hub.asked) for method in ("GET", "HEAD"))
    for (path, _), message in zip(calls, messages):
        assert isinstance(message, str) and message.startswith("config.data.train.sums: "), path
        if "own/data" not in path:
            repository = DATASETS[path].path if path in DATASETS else path
            absent = "" if path in DATASETS else f"there is no file {ROOT}/{path}, and "
            wanted_text = (
                f"{FIELD}: {absent}the data set {repository} could not be fetched from the hub ("
            )
            assert message.startswith(wanted_text) and ".)" not in message
            for remedy in ("Check its name", "the network", "HF_TOKEN", "the path of a file"):
                assert remedy in message
            assert "\n" not in message and len(message) < 600
    none, gated, private, broken, named, invalid, split, place, readme = messages
    assert "Repository Not Found" in none and "Repository Not Found" in named
    assert "gated" in gated and "403" in gated
    assert "Repository Not Found" in private and "401" in private
    assert "501" in broken
    assert "own--it/data" in invalid
    assert "there are 4 data files" in split and "none has 'validation'" in split
    assert "there is no data file" in place and "there is no data file" in readme
    assert seconds < 20


def test_a_hub_that_never_answers_is_given_up(tmp_path):
    with SilentHub() as hub:
        start = time.monotonic()
        (message,), _ = ask(hub.url, tmp_path, ("own/data", None), HF_HUB_ETAG_TIMEOUT="1")
        assert "own/data could not be fetched from the hub (ReadTimeout" in message
        assert time.monotonic() - start < 60
