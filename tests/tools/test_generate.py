"""launch/generate.py: samples, their log-probs, streaming, files of prompts and refusals."""

import json
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

import dapo_jax
from dapo_jax.config import hf_config
from dapo_jax.models import hf_weights
from dapo_jax.rollout import scheduler
from dapo_jax.tools import generate, prompt_file
from dapo_jax.types import UserError
from tests.conftest import ROOT
from tests.models.test_hf_weights import BASE, data
from tests.support import checkpoints
from tests.support.helpers import logits_of
from tests.support.hub import Hub, hub_environment
from tests.support.problems import CHAT_TEMPLATE, character_tokenizer
from tests.support.runs import call_main, load_launcher

main = load_launcher("generate")
VOCAB = 127  # of the tokenizer: a token for every character


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A random model that writes characters, peaked enough for a nucleus to leave tokens out."""
    place = tmp_path_factory.mktemp("model")
    values = BASE | {"vocab_size": VOCAB, "eos_token_id": 126}
    (place / "config.json").write_text(json.dumps(values))
    rng = np.random.default_rng(0)
    shapes = hf_weights.expected_shapes(checkpoints.config_of(place).model)
    tensors = {name: rng.standard_normal(s, np.float32) * 0.4 for name, s in shapes.items()}
    checkpoints.write(place, values, tensors)
    character_tokenizer(CHAT_TEMPLATE).save_pretrained(str(place))
    return place


def call(capsys, place, *arguments):
    return call_main(capsys, main, f"--model={place}", "--max_new_tokens=12", *arguments)


def sampled(capsys, place, *arguments):
    status, out, err = call(capsys, place, "--json", *arguments)
    assert status == 0, err
    return json.loads(out)


def kept_log_probs(logits_V, temperature, top_p=1.0, top_k=None, min_p=0.0):
    """log-probs [V] of the top k, of these the nucleus, of these min-p, written from their
    definitions; -inf outside."""
    logits_V = logits_V.astype(np.float64) / temperature
    order = np.argsort(-logits_V)[:top_k]
    p_X = np.exp(logits_V[order] - logits_V.max())
    p_X /= p_X.sum()
    number = 1 + int(np.searchsorted(np.cumsum(p_X), top_p)) if top_p < 1 else len(p_X)
    number = sum(p >= min_p * p_X[0] for p in p_X[:number])
    found_V = np.full(len(logits_V), -np.inf)
    found_V[order[:number]] = np.log(p_X[:number] / p_X[:number].sum())
    return found_V


@pytest.mark.parametrize(
    "temperature, kept",
    [(0.7, dict(top_p=1.0)), (1.3, dict(top_p=0.9, top_k=20, min_p=0.2))],
)
def test_samples_come_from_the_distribution_that_their_log_probs_say(
    capsys, place, temperature, kept
):
    said = [f"--{name}={value}" for name, value in kept.items()]
    flags = ("--prompt=What?", f"--temperature={temperature}", *said, "--seed=3")
    said = sampled(capsys, place, *flags)
    assert said["prompt_token_ids"] == [ord(c) for c in "^What?"] and len(said["samples"]) == 4
    config = checkpoints.config_of(place)
    params = checkpoints.load(config)
    for one in said["samples"]:
        tokens = said["prompt_token_ids"] + one["token_ids"]
        logits_TV = logits_of(config.model, params, tokens)
        first = len(said["prompt_token_ids"])
        columns = (one["token_ids"], one["log_probs"], one["model_log_probs"])
        for t, (token, log_prob, of_model) in enumerate(zip(*columns, strict=True)):
            expected_V = kept_log_probs(logits_TV[first + t - 1], temperature, **kept)
            assert abs(log_prob - expected_V[token]) < 1e-5
            assert abs(of_model - kept_log_probs(logits_TV[first + t - 1], 1.0)[token]) < 1e-5
        # The tokenizer has no other characters, and leaves "!" and "~", pad and end, out.
        printed = [10, *range(32, 33), *range(34, 126)]
        text = "".join(chr(token) for token in one["token_ids"] if token in printed)
        assert one["text"] == text
        ended = one["token_ids"][-1] == 126
        assert one["finish_reason"] == ("stop" if ended else "length")
        assert ended or len(one["token_ids"]) == 12
    texts = [one["text"] for one in said["samples"]]
    assert len(set(texts)) == 4
    status, out, _ = call(capsys, place, *flags)
    expected = "".join(f"--- {n} of 4\n{text}\n" for n, text in enumerate(texts, 1))
    assert status == 0 and out == expected, "streamed is the same"
    other = sampled(capsys, place, *flags[:-1], "--seed=4")
    assert not {one["text"] for one in other["samples"]} & set(texts)


def test_the_watchdog_reports_a_long_silence(capsys, place, monkeypatch):
    """On standard error, so that the samples stay as they are."""
    expected = call(capsys, place, "--prompt=What?", "--num_samples=1")[1]
    monkeypatch.setattr(generate, "WATCHDOG_SECONDS", 0.001)
    status, out, err = call(capsys, place, "--prompt=What?", "--num_samples=1")
    assert status == 0 and out == expected
    assert re.search("nothing has moved for .*; waiting for the device", err)


def test_characters_of_several_tokens_are_held_until_they_are_whole():
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    from dapo_jax.data.tokenizer import text_stream

    byte_of = {f"<0x{byte:02X}>": byte for byte in range(256)}
    backend = Tokenizer(models.BPE(byte_of, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    step = text_stream(PreTrainedTokenizerFast(tokenizer_object=backend))
    pieces = [step(byte) for byte in "aé答b".encode()]
    assert pieces == ["a", "", "é", "", "", "答", "b"]


def test_stop_tokens_are_those_of_the_generation_config(capsys, place, tmp_path):
    flags = ("--prompt=What?", "--num_samples=1", "--seed=1")
    (before,) = sampled(capsys, place, *flags)["samples"]
    third = before["token_ids"][2]
    other = tmp_path / "model"
    shutil.copytree(place, other)
    stops = lambda eos: (other / "generation_config.json").write_text(
        json.dumps({"eos_token_id": eos})
    )
    stops([126, third])
    (after,) = sampled(capsys, other, *flags)["samples"]
    end = before["token_ids"].index(third) + 1
    assert after["token_ids"] == before["token_ids"][:end]
    assert after["finish_reason"] == "stop"
    for eos, message in (
        ("x", "generation_config.json has eos_token_id = 'x'"),
        ([VOCAB], r"stop_token_ids must be in the vocabulary: from 0 to 126"),
    ):
        stops(eos)
        status, _, err = call(capsys, other, *flags)
        assert status == 2 and re.search(message, err), err


def test_strings_end_a_sample(capsys, place):
    flags = ("--prompt=What?", "--num_samples=4", "--seed=1")
    before = sampled(capsys, place, *flags)["samples"]
    string = before[0]["text"][3:5]
    assert len(string) == 2
    for stop in (json.dumps(["never", string]), string):
        after = sampled(capsys, place, *flags, f"--stop={stop}")["samples"]
        for old, new in zip(before, after, strict=True):
            place_in_text = old["text"].find(string)
            if place_in_text < 0:
                assert new == old
                continue
            assert new["text"] == old["text"][: place_in_text + 2]
            assert new["token_ids"] == old["token_ids"][: len(new["token_ids"])]
            assert new["log_probs"] == old["log_probs"][: len(new["token_ids"])]
            assert new["finish_reason"] == "stop"
        assert len(after[0]["token_ids"]) < len(before[0]["token_ids"])


def test_chat_and_greedy(capsys, place):
    said = sampled(capsys, place, "--prompt=1+1?", "--chat", "--temperature=0", "--num_samples=2")
    assert said["prompt"] == "[system]default[user]1+1?[assistant]~"
    first, second = said["samples"]
    assert first == second
    said = sampled(capsys, place, "--prompt=1+1?", "--chat", "--system_prompt=Be brief.")
    assert said["prompt"] == "[system]Be brief.[user]1+1?[assistant]~"


def test_a_file_of_prompts_goes_on_where_it_was_stopped(capsys, place, tmp_path, monkeypatch):
    prompts, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    messages = [{"role": "user", "content": "hm"}]
    lines = [{"prompt": "a", "id": 7}, {"prompt_token_ids": [65, 66]}, {"prompt": messages}]
    lines += [{"prompt": f"p{i}"} for i in range(9)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = (f"--prompts={prompts}", f"--output={out}", "--num_samples=3", "--chat", "--slots=4")
    status, _, err = call(capsys, place, *flags)
    assert status == 0 and "36 of 36 samples" in err
    whole = out.read_text()
    found = [json.loads(line) for line in whole.splitlines()]
    assert [{k: v for k, v in line.items() if k in given} for line, given in zip(found, lines)] == (
        lines
    )
    assert all(len(line["samples"]) == 3 for line in found)
    assert found[1]["prompt_token_ids"] == [65, 66]

    out.write_text(whole[: int(len(whole) * 0.4)])  # killed in the middle of a line
    run = scheduler.GenerationLoop.run

    def interrupted(loop):
        for output in run(loop):
            if output.finished:
                signal.raise_signal(signal.SIGTERM)
            yield output

    monkeypatch.setattr(scheduler.GenerationLoop, "run", interrupted)
    status, _, err = call(capsys, place, *flags)
    assert status == 128 + signal.SIGTERM and "of 12 prompts were done before" in err
    monkeypatch.undo()
    assert whole.startswith(out.read_text()) and out.read_text() != whole
    status, _, _ = call(capsys, place, *flags)
    assert status == 0 and out.read_text() == whole
    status, _, err = call(capsys, place, *flags)
    assert status == 0 and "12 of 12 prompts were done before" in err
    status, _, err = call(capsys, place, *flags, "--seed=1")
    assert status == 2 and "holds other results than this command's" in err
    assert out.read_text() == whole


@pytest.mark.parametrize("content", ['{"a": 1}', '{"a": 1}\n{"b"', '{"prompt": "a"}\n'])
def test_a_file_that_is_not_its_own_output_is_left_as_it_is(capsys, place, tmp_path, content):
    prompts = tmp_path / "in.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    other = tmp_path / "notes.json"
    other.write_text(content)
    status, _, err = call(capsys, place, f"--prompts={prompts}", f"--output={other}")
    assert status == 2 and "holds other results than this command's" in err
    assert other.read_text() == content


def test_lines_end_at_newlines_alone(tmp_path):
    """A text in JSON may hold the separators U+2028 and U+0085; blank lines count as lines."""
    file = tmp_path / "in.jsonl"
    file.write_text('{"prompt": "a\u2028b\u0085c"}\r\n\n{"prompt": "d"}\n', encoding="utf-8")
    assert [line["prompt"] for line in prompt_file.read_prompts(file)] == ["a\u2028b\u0085c", "d"]
    file.write_text('{"prompt": "a"}\n\n\n{\n')
    with pytest.raises(UserError, match="line 4: an object with"):
        prompt_file.read_prompts(file)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("", "one of --prompt, --prompt_token_ids and --prompts is needed"),
        ("--prompt=a --prompt_token_ids=1", "one of --prompt"),
        ("--prompt_token_ids=1,b", "--prompt_token_ids=1,b must be integers"),
        ("--prompt_token_ids=127", "token 127 is not in the vocabulary"),
        ("--prompts=x.jsonl", "--prompts=.* and --output="),
        ("--prompts=none.jsonl --output=o", "--prompts=none.jsonl cannot be read"),
        ("--prompt=a --top_p=0", r"--top_p must be in \(0, 1\].* got 0"),
        ("--prompt=a --top_k=-1", "--top_k must be 0 .*; got -1"),
        ("--prompt=a --top_k=2147483648", r"--top_k must be .* below 2\*\*31.* got 2147483648"),
        ("--prompt=a --min_p=2", "--min_p must be from 0 to 1.* got 2"),
        ("--prompt=a --temperature=-1", "--temperature must be 0"),
        ("--prompt=a --num_samples=0", "--num_samples must be above 0; got 0"),
        ("--prompt=a --seed=4294967296", r"--seed must be from 0 to 2\*\*32 - 1.* got 4294967296"),
        ("--prompt=a --dtype=float16", "--dtype must be float32 or bfloat16; got 'float16'"),
        ("--prompt=a --system_prompt=b", "--system_prompt is written by .*: give --chat too"),
        ("--prompt=a --samples=3", "samples.*Flags: --model"),
        ('--prompt=a --stop=["a",""]', "--stop must be a text, or a JSON list of texts"),
    ],
)
def test_a_wrong_command_is_refused(capsys, place, arguments, message):
    status, out, err = call(capsys, place, *arguments.split())
    assert status == 2 and out == "" and re.search(message, err), err


@pytest.mark.parametrize(
    "prompt, message",
    [
        ("\ud83d", "holds half of a surrogate pair"),
        ([{"role": "user", "content": "a"}], "must be a text or a list of token ids; got"),
        (None, "prompt 1 must be a text or a list of token ids; got None"),
    ],
)
def test_a_prompt_of_another_kind_is_named(place, prompt, message):
    with pytest.raises(UserError, match=message):
        dapo_jax.generate(place, [prompt])


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[" * 100_000,
        "3",
        "{}",
        '{"prompt": 3}',
        '{"prompt": []}',
        '{"prompt_token_ids": [1.5]}',
        '{"prompt_token_ids": []}',
        '{"prompt": [{"role": "user"}]}',
    ],
)
def test_a_wrong_line_is_named(capsys, place, tmp_path, line):
    file = tmp_path / "in.jsonl"
    file.write_text('{"prompt": "a"}\n' + line)
    status, _, err = call(capsys, place, f"--prompts={file}", f"--output={tmp_path / 'out.jsonl'}")
    assert status == 2 and "line 2: an object with" in err
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.slow
def test_stories260k_by_the_engine_and_after_export(capsys, tmp_path):
    """A trained model: the greedy tokens of its own program, before and after export."""
    place = data("weights", "stories260K")
    expected = json.loads((place / "expected_greedy.json").read_text())
    prompt, greedy = expected["prompt_ids"], expected["greedy_ids"]
    assert greedy[: len(prompt)] == prompt and len(greedy) > 100
    config = checkpoints.config_of(place)
    written = tmp_path / "exported"
    written.mkdir()
    hf_weights.save(config.model, checkpoints.load(config), written, "float32")
    values = hf_config.to_hf(config.model, eos=[2], bos=1, dtype="float32")
    (written / "config.json").write_text(json.dumps(values))
    flags = [f"--prompt_token_ids={','.join(map(str, prompt))}", "--temperature=0", "--json"]
    flags += ["--num_samples=1", f"--max_new_tokens={len(greedy) - len(prompt)}"]
    for model in (place, written):
        assert main(["program", f"--model={model}", *flags]) == 0
        (sample,) = json.loads(capsys.readouterr().out)["samples"]
        assert sample["token_ids"] == greedy[len(prompt) :]


@pytest.mark.slow
def test_a_model_of_the_hub_is_fetched_once(place, tmp_path):
    """config.json, weights, generation config and tokenizer, and nothing else; then the cache."""
    files = {file.name: file.read_bytes() for file in place.iterdir()}
    files |= {"generation_config.json": b'{"eos_token_id": [126, 125]}', "README.md": b"about"}
    files |= {"pytorch_model.bin": b"not ours", "original/consolidated.pth": b"nor this"}
    files |= {"consolidated.safetensors": b"twice", "checkpoint-1/model.safetensors": b"older"}

    def ask(url, model):
        environment = hub_environment(url, tmp_path)
        command = [sys.executable, str(ROOT / "launch" / "generate.py"), f"--model={model}"]
        command += ["--prompt=a", "--json", "--max_new_tokens=2", "--num_samples=1"]
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    with Hub({}, models={"own/model": files, "own/private": files}, private="own/private") as hub:
        first = ask(hub.url, "own/model")
        assert first.returncode == 0, first.stderr
        wanted = {"config.json", "generation_config.json", "model.safetensors"}
        wanted |= {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
        fetched = [name for name in hub.downloads if name.startswith("own/model:")]
        assert {name.removeprefix("own/model:") for name in fetched} <= wanted
        assert len(set(fetched)) == len(fetched) >= 5
        refused = ask(hub.url, "own/private")
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    assert re.search(r"own/private could not be fetched .*401.*HF_TOKEN", refused.stderr)
    down = ask(hub.url, "own/model")
    assert down.stdout == first.stdout, "from the cache, where the hub is down"
    assert "Retry" not in down.stderr, "nor is it waited for"
