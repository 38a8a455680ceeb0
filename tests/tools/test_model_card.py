"""The model card of an export, and its upload to a hub on loopback."""

import json
import subprocess
import sys

import pytest
import yaml

from dapo_jax.tools import model_card
from dapo_jax.utils import hf_hub
from tests.conftest import ROOT
from tests.support.helpers import tiny_config
from tests.support.hub import Hub, hub_environment
from tests.support.runs import load_launcher

HOME = "/home/someone/private dir"
STEPS = [
    {"step": 0, "eval/avg@4": 0.25, "eval/interval_low": 0.125, "eval/interval_high": 0.5},
    {"step": 2, "eval/avg@4": 0.5, "eval/interval_low": 0.375, "eval/interval_high": 0.625},
    {"step": 3, "reward/mean": 0.5},
    {"step": 4, "eval/avg@4": 1.0, "eval/interval_low": 1.0, "eval/interval_high": 1.0},
]
for numbers in STEPS:
    if "eval/avg@4" in numbers:
        numbers["eval/pass@4"] = numbers["eval/avg@4"] / 2


def card_of(command="train.py --config=configs/tiny_dapo.py", label="a_run, step 3", **overrides):
    frozen = {
        "config": json.loads(json.dumps(tiny_config(**overrides).to_dict())),
        "versions": {"python": "3.11.7", "jax": "0.10.2"},
        "git_commit": "c0ffee",
        "command": command,
    }
    return model_card.card(frozen, STEPS, label, "bfloat16")


def front_matter_of(card):
    start, values, _ = card.split("---\n", 2)
    assert start == ""
    return yaml.safe_load(values)


def test_a_card_says_what_was_trained_how_and_what_came_of_it():
    card = card_of(
        "/x/launch/train.py --config=configs/tiny_dapo.py --config.seed=3 --workdir=/x/y"
    )
    assert front_matter_of(card) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["dapo_jax", "dapo", "reinforcement-learning", "jax"],
    }
    for text in (
        "# a_run\n",
        "made by the project, a supervised fit of 100 steps",
        "dapo_jax (commit `c0ffee`, python 3.11.7, jax 0.10.2): rollout step 3 of 3, tensors in bf",
        "| Clip-Higher | on | `clip_low` 0.2, `clip_high` 0.28 |\n",
        "| Dynamic sampling | on | at most 32 prompts a step |\n",
        "| Token-level policy gradient loss | on | aggregation `token-mean` |\n",
        "| Overlong reward shaping | on | punishment over the last 8 tokens |\n",
        "no KL term",
        # At the exported step there is no evaluation, and step 4 is later.
        "| held-out | | base model | step 2 |\n|---|---|---|---|\n"
        "| sums | avg@4 | 25.0 % [12.5, 50.0] | 50.0 % [37.5, 62.5] |\n"
        "| sums | pass@4 | 12.5 % | 25.0 % |\n",
        "4 responses to each problem, temperature 1, top-p 1; in brackets the 95 % bootstrap",
        "    python launch/train.py --config=configs/tiny_dapo.py --config.seed=3 "
        "--workdir=runs/a_run\n"
        "    python launch/evaluate.py --config=configs/tiny_dapo.py --config.seed=3 "
        "--workdir=runs/a_run\n",
    ):
        assert text in card, text
    block = card.split("```json\n")[1].split("```")[0]
    assert json.loads(block) == json.loads(json.dumps(tiny_config().to_dict()))


@pytest.mark.parametrize(
    "given, flags",
    [
        ("--config configs/tiny_dapo.py", "--config=configs/tiny_dapo.py"),
        ("--config=a.py --config.seed 1 --model X", "--config=a.py --config.seed=1 --model=X"),
    ],
)
def test_a_card_repeats_flags_that_were_given_with_a_blank(given, flags):
    card = card_of(f"/x/launch/train.py {given} --workdir /x/y")
    assert f"python launch/train.py {flags} --workdir=runs/a_run\n" in card


def test_the_method_of_a_staged_run_is_that_of_the_exported_step():
    stages = ((3, {"rollout.group_size": 6}), (5, {"rollout.group_size": 8}))
    card = card_of(stages=stages)
    assert "A rollout step in the stage of step 3: " in card and ", 6 responses each" in card


def test_a_card_of_grpo_has_its_techniques_off():
    card = card_of(
        objective__clip_high=0.2,
        objective__aggregation="seq-mean-token-mean",
        objective__kl_coefficient=0.04,
        objective__kl_estimator="k3",
        objective__top_entropy_share=0.2,
        dynamic_sampling__enabled=False,
        reward__overlong_buffer_tokens=0,
        reward__overlong_penalty=0.0,
    )
    assert [line.split(" | ")[1] for line in card.splitlines() if " | o" in line] == ["off"] * 4
    assert "KL to the base model in the loss 0.04" in card
    assert "nats per token" not in card
    assert "Loss `ppo-clip` on the 20 % of tokens of highest entropy, advantage" in card
    adapted = card_of(objective__entropy_adaptation=(0.2, 0.005))
    assert (
        "no KL term; entropy bonus at 0.2 nats per token and below, its coefficient from 0 in "
        "steps of 0.005. A rollout step:"
    ) in adapted


def test_a_card_names_hub_ids_and_no_path_of_the_machine():
    source = {"split": "train", "weight": 1.0}
    train = {
        "gsm": source | {"path": "gsm8k"},
        "own": source | {"path": "own/data/deep"},
        "file": source | {"path": f"{HOME}/problems.jsonl"},
    }
    overrides = {"pretrain": None, "data__train": train, "checkpoint__directory": "gs://secret/run"}
    overrides["reward__scorer"] = f"math_dapo + 0.1 * {HOME.split(' ')[0]}/own.py:form"
    command = (
        f"'{HOME}/launch/train.py' --config={HOME.split()[0]}/mine.py:a '--workdir={HOME}/run'"
    )
    model = {"model__path": "Qwen/Qwen2.5-0.5B", "model__tokenizer": f"{HOME}/tokenizer"}
    card = card_of(command, **overrides, **model)
    values = front_matter_of(card)
    assert values["base_model"] == "Qwen/Qwen2.5-0.5B"
    assert values["datasets"] == ["openai/gsm8k", "own/data"]
    assert "[Qwen/Qwen2.5-0.5B](https://huggingface.co/Qwen/Qwen2.5-0.5B)" in card
    assert "python launch/train.py --config=mine.py:a --workdir=runs/a_run\n" in card
    assert "math_dapo + 0.1 * own.py:form" in card
    for kept in ('"path": "problems.jsonl"', '"directory": "run"', '"tokenizer": "tokenizer"'):
        assert kept in card, kept
    other = card_of(command, label=f"{HOME}/run, step 2", **overrides, model__path=f"{HOME}/base")
    assert "base_model" not in front_matter_of(other) and "the directory `base`" in other
    for text in (card, other):
        assert not {word for word in ("someone", "private", "secret", "/home") if word in text}
    assert "was started from Python" in card_of("/usr/lib/ipykernel_launcher.py -f /home/k.json")


def test_a_card_without_an_evaluation_says_so():
    assert "not been evaluated at this step" in card_of(label="a_run, step 1")


@pytest.mark.parametrize("repository, wanted", [
    ("a model", "must be OWNER/NAME"), ("own/model", "there is no token for the hub. Run hf auth")
])  # fmt: skip
def test_an_upload_that_cannot_be_is_refused_before_the_export(
    tmp_path, monkeypatch, capsys, repository, wanted
):
    monkeypatch.setattr(hf_hub.huggingface_hub, "get_token", lambda: None)
    flags = [f"--workdir={tmp_path / 'none'}", f"--output={tmp_path / 'out'}"]
    assert load_launcher("export")(["export.py", *flags, f"--push_to_hub={repository}"]) == 2
    assert f"error: --push_to_hub={repository}" in (said := capsys.readouterr().err)
    assert wanted in said and not (tmp_path / "out").exists()


def test_a_step_below_0_is_refused(tmp_path, capsys):
    flags = [f"--workdir={tmp_path}", f"--output={tmp_path / 'out'}", "--step=-3"]
    assert load_launcher("export")(["export.py", *flags]) == 2
    assert "--step must be 0 or more; got -3" in capsys.readouterr().err


def test_a_directory_is_uploaded_with_the_token_and_a_refusal_is_reported(tmp_path):
    files = {"README.md": b"# card\n", "model.safetensors": bytes(range(256)), "a/b.json": b"{}"}
    for name, content in files.items():
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).write_bytes(content)
    program = "import sys; from pathlib import Path; from dapo_jax.utils import hf_hub; "
    program += "print(hf_hub.upload(Path(sys.argv[1]), sys.argv[2]))"

    def upload(url, repository):
        environment = hub_environment(url, tmp_path, HF_TOKEN="hf_tok")
        command = [sys.executable, "-c", program, str(tmp_path / "out"), repository]
        return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)

    models = {"own/model": {}}
    with Hub({}, models=models, broken="own/broken", token="hf_tok") as hub:
        done = upload(hub.url, "own/model")
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"{hub.url}/own/model\n"
        failed = upload(hub.url, "own/broken")
    assert models["own/model"] == files
    assert failed.returncode == 1
    wanted = "--push_to_hub=own/broken: the upload failed (HfHubHTTPError: "
    assert wanted in failed.stderr and "hf upload own/broken" in failed.stderr


def test_ctrl_c_ends_an_export(tmp_path, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("dapo_jax.tools.export.export", interrupted)
    flags = [f"--workdir={tmp_path}", f"--output={tmp_path / 'hf'}"]
    assert load_launcher("export")(["export.py", *flags]) == 130
    assert "stopped; empty --output" in capsys.readouterr().err
