"""Published data sets and a published tokenizer, where they are at hand."""

import dataclasses
import fnmatch
import gzip
import json
import shutil

import pytest
from transformers import AutoTokenizer

from dapo_jax.config import SourceConfig
from dapo_jax.data import prompts, sources
from dapo_jax.data.dataset import prepare
from dapo_jax.data.tokenizer import arithmetic_tokenizer
from dapo_jax.utils import hf_hub
from tests.support.helpers import SHARED, source_dict
from tests.support.problems import FIELD


def shared_file(*parts):
    file = SHARED.joinpath("data", *parts)
    if not file.exists():
        pytest.skip(f"the real data is not there: {file}")
    return file


@pytest.fixture(scope="session")
def qwen(tmp_path_factory):
    """The tokenizer of Qwen2.5, instruct."""
    source = shared_file("tokenizers", "qwen2.5", "tokenizer.json.gz")
    directory = tmp_path_factory.mktemp("qwen")
    with gzip.open(source) as packed, (directory / "tokenizer.json").open("wb") as file:
        shutil.copyfileobj(packed, file)
    settings = source.with_name("tokenizer_config.instruct.json")
    shutil.copy(settings, directory / "tokenizer_config.json")
    return AutoTokenizer.from_pretrained(str(directory))


def prepare_real(config, tmp_path, path, tokenizer=None, **fields):
    """With a tokenizer the prompts are chats; without one they are counted in words of no use,
    which is quick."""
    data = dataclasses.replace(config.data, chat=tokenizer is not None, max_prompt_tokens=2048)
    tokenizer = tokenizer or arithmetic_tokenizer()
    source = SourceConfig(**source_dict(str(path), **fields))
    return prepare(dataclasses.replace(config, data=data), "real", source, tokenizer, FIELD)


def test_the_published_training_data(config, tmp_path):
    """DAPO-Math-17k in its own schema: 17,290 distinct texts; 732 of them differ from another in
    white space only: 16,921 distinct prompts, 15 of them with two answers."""
    file = shared_file("dapo_math", "dapo_math_17k_upstream_schema.parquet")
    found = prepare_real(config, tmp_path, file)
    counts = dict(records=17_917, unusable=0, repeated=996, conflicting=15, overlong=0, truncated=0)
    assert found.counts == counts | {"problems": 16_906}
    first = found.problems[0]
    assert first.prompt.startswith("Solve the following math problem step by step. The last line")
    assert first.answer == "34" and first.metadata is not None
    assert first.metadata["extra_info"]["index"] == "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"
    assert prepare_real(config, tmp_path, file) == found, "from the cache"


def test_the_published_benchmark(config, tmp_path, qwen):
    """AIME 2024 as the reference evaluates it: each problem 32 times."""
    file = shared_file("aime", "aime-2024.parquet")
    found = prepare_real(config, tmp_path, file, qwen)
    assert (
        found.describe() == "30 problems of 960 records (30 distinct prompts, 32 records of each)"
    )
    golden = json.loads(shared_file("tokenizers", "qwen2.5", "golden_encodings.json").read_text())
    case = golden["chat"][0]
    (same,) = [p for p in found.problems if case["messages"][0]["content"] in p.prompt]
    assert (same.prompt, same.prompt_tokens) == (case["rendered"], tuple(case["ids"]))
    keys = {"prompt_key": "extra_info.raw_problem", "answer_key": "reward_model.ground_truth"}
    bare = prepare_real(config, tmp_path, file, qwen, **keys)
    assert len(bare.problems) == 30
    assert not any("step by step" in problem.prompt for problem in bare.problems)


def test_encodings_of_a_real_tokenizer(qwen):
    golden = json.loads(shared_file("tokenizers", "qwen2.5", "golden_encodings.json").read_text())
    texts = [case["text"] for case in golden["cases"]]
    assert prompts.encode(qwen, texts, chat=False) == [tuple(c["ids"]) for c in golden["cases"]]
    for case in golden["chat"]:
        messages = [(message["role"], message["content"]) for message in case["messages"]]
        settings = {"template": None, "chat": True, "system_prompt": None}
        text = prompts.render(qwen, messages, **settings)
        assert text == case["rendered"]
        assert prompts.encode(qwen, [text], chat=True) == [tuple(case["ids"])]


DAPO = "dapo_math/dapo_math_17k_upstream_schema.parquet"
AIME = "aime/aime-2024.parquet"
MATH500 = "\\left( 3, \\frac{\\pi}{2} \\right)"


@pytest.mark.parametrize(
    "parts, num_rows, num_unusable, prompt, answer",
    [
        # Two rows have lost their answers on the way to verl.
        (("math", "verl_math_train.parquet"), 7500, 2, "Let \\[f(x) = ", "0"),
        (("eval", "qwen_minerva_math_test.jsonl"), 272, 0, "Each of the two Magellan", "1.6"),
    ],
)
def test_real_files_of_every_shape(config, tmp_path, parts, num_rows, num_unusable, prompt, answer):
    found = prepare_real(config, tmp_path, shared_file(*parts))
    assert (found.counts["records"], found.counts["unusable"]) == (num_rows, num_unusable)
    assert len(found.problems) > 0.99 * num_rows
    assert found.problems[0].prompt.startswith(prompt) and found.problems[0].answer == answer
    assert not any("\\boxed" in problem.answer for problem in found.problems)


@pytest.mark.parametrize(
    "name, split, inside, local, num_problems, prompt, answer",
    [
        ("dapo-math-17k", None, "data/x.parquet", DAPO, 50, "Solve the following", "34"),
        ("aime24", None, "data/x.parquet", AIME, 30, "Find the largest possible real part", "540"),
        ("gsm8k", "test", "main/test.jsonl", "gsm8k/test.jsonl", 1319, "Janet’s", "18"),
        ("math500", None, "test.jsonl", "math/math500.jsonl", 500, "Convert", MATH500),
        ("amc23", "test", "test.jsonl", "eval/qwen_amc23_test.jsonl", 40, "Cities", "27"),
    ],
)
def test_data_sets_by_name(
    config, tmp_path, monkeypatch, name, split, inside, local, num_problems, prompt, answer
):
    """Their columns, in files of the schema that they have on the hub."""
    file = tmp_path / "snapshot" / inside
    file.parent.mkdir(parents=True)
    file.symlink_to(shared_file(local))
    asked = []

    def snapshot(repository, repo_type, patterns):
        asked.append((repository, repo_type))
        assert any(fnmatch.fnmatch(inside, pattern) for pattern in patterns)
        return tmp_path / "snapshot"

    monkeypatch.setattr(hf_hub, "snapshot", snapshot)
    found = prepare_real(config, tmp_path, name, split=split, num_problems=num_problems)
    assert len(found.problems) == num_problems and found.counts["unusable"] == 0
    assert found.problems[0].prompt.startswith(prompt) and found.problems[0].answer == answer
    assert asked == [("/".join(sources.DATASETS[name].path.split("/")[:2]), "dataset")]


def test_the_prompt_of_the_published_data_is_ours():
    """What base models without a chat template are given is what every row holds."""
    head, tail = prompts.DAPO_TEMPLATE.split("{prompt}")
    file = shared_file("dapo_math", "dapo_math_17k_sample14_true_uuid.jsonl")
    for line in file.read_text().splitlines():
        ((_, content),) = [(m["role"], m["content"]) for m in json.loads(line)["prompt"]]
        assert content.startswith(head) and content.endswith(tail)
