"""What a user sees who gets something wrong: the field, the value, the remedy; no traceback."""

import dataclasses
import errno
import json
import os
import re
import subprocess
import sys
import textwrap
import typing
from pathlib import Path

import jax
import pytest

from configs import tiny, tiny_dapo
from configs.tiny import METHODS
from dapo_jax.algorithms.losses import LOSSES
from dapo_jax.config import Config, cli, schema
from dapo_jax.config.cli import parse
from dapo_jax.config.hf_config import to_hf
from dapo_jax.runs.checkpoint import CheckpointError
from dapo_jax.types import RunError, UserError
from tests.conftest import ROOT
from tests.support.helpers import source_dict, tiny_config, tiny_dict
from tests.support.runs import load_launcher, write_config

train = load_launcher("train")
TINY = "--config=configs/tiny_dapo.py"
FILES = {file.stem for file in (ROOT / "configs").glob("[a-z]*.py")}
CONFIGS = sorted(f"{name}.py" for name in FILES - {"tiny"}) + [f"tiny.py:{m}" for m in METHODS]


def call(capsys, *arguments, main=train):
    status = main(["program", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return status, out, err


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "--config is needed"),
        (["--config=configs/none.py"], r"no such file. The project has configs/.*tiny_dapo.py"),
        ([TINY, "--workdri=x"], r"workdri.*Flags: --config"),
        ([TINY, "stray"], "'stray' is not a flag"),
        ([TINY, "--config.train.nmu_steps=3"], "nmu_steps"),
        ([TINY, "--config.train.num_steps=three"], "three"),
        ([TINY, "--config.train.num_steps=0"], r"config\.train\.num_steps must be greater than 0"),
        (
            [TINY, "--config.objective.clip_low=1.5"],
            r"config\.objective\.clip_low must be in \(0, 1\]",
        ),
        ([TINY, "--config.rollout.top_p=1.5"], r"config\.rollout\.top_p must be in \(0, 1\]"),
        ([TINY, "--config.objective.aggregation=mean"], r"aggregation must be one of 'token-mean'"),
        ([TINY, "--config.rollout.top_p=0.9"], r"log_prob_source to 'recompute', or top_p to 1"),
        ([TINY, "--config.rollout.top_k=5"], r"log_prob_source to 'recompute', or top_k to 0"),
        ([TINY, "--config.rollout.min_p=0.1"], r"log_prob_source to 'recompute', or min_p to 0"),
        ([TINY, "--config.rollout.min_p=2"], r"config\.rollout\.min_p must be from 0 to 1"),
        ([TINY, "--config.rollout.top_k=-1"], r"config\.rollout\.top_k must be 0 or more"),
        ([TINY, "--config.rollout.group_size=1"], r"group_size of at least 2: a group of one"),
        (
            [
                TINY,
                *(f"--config.dynamic_sampling.{f}" for f in ("enabled=0", "prefilter=1")),
            ],
            r"prefilter needs config\.dynamic_sampling\.enabled",
        ),
        ([TINY, "--config.train.prompts_per_update=5"], r"prompts_per_update \(5\) must divide"),
        ([TINY, "--config.train.row_tokens=50"], r"row_tokens \(50\) is shorter .* Set it to 96"),
        ([TINY, "--config.reward.overlong_penalty=0.0"], "both 0 .* or both positive"),
        ([TINY, "--config.reward.overlong_buffer_tokens=72"], "must be less"),
        ([TINY, "--config.model.path=here"], r"config\.model\.path: there is no directory"),
        ([TINY, "--config.data.train.sums.prompt_key=x"], r"sums\.prompt_key is not read when"),
        (
            [TINY, "--config.mesh.data=3", "--dry_run"],
            r"micro_batch \(16\) must be a multiple .* 18",
        ),
        ([TINY, "--config.seed=-1"], r"config\.seed must be 0 or more"),
        ([TINY, "--config.reward.scorer=boxd", "--dry_run"], "'boxd' is not one of exact_match,"),
        ([TINY, "--coordinator_timeout=0"], "--coordinator_timeout must be above 0 seconds; got 0"),
        ([TINY, "--coordinator_timeout=-5"], "--coordinator_timeout must be above 0 .* got -5"),
        *(
            (
                [TINY, f"--coordinator_address={a}", "--num_processes=2", "--process_id=0"],
                f"--coordinator_address must be HOST:PORT, of process 0; got '{a}'",
            )
            for a in ("garbage", ":9", "host:", "host:99999", "host:x")
        ),
        ([TINY, "--config.seed=None"], r"config\.seed must be int; got None"),
        ([TINY, "--config.model=None"], r"config\.model must be a group of fields, not None"),
        ([TINY, "--config.train.nmu_steps=None"], r"config\.train\.nmu_steps is not a field"),
        ([TINY, "--config.seed.x=None"], r"config\.seed must be int; got \{'x': None\}"),
        (
            [TINY, "--config.train.num_steps.x=1"],
            r"num_steps\.x=1: config\.train\.num_steps has no fields",
        ),
        ([TINY, "--config.pretrain=None"], r"tokenizer is needed when config\.pretrain and"),
        ([TINY, "--config.correction.importance=token"], r"correction\.policy 'old' corrects the"),
        ([TINY, "--config.critic.learning_rate=1e-4"], r"config\.critic is needed when .*'gae'"),
        (
            [TINY, "--config.critc.value_clip=1"],
            r"config\.critc is not a field\. config has: seed,",
        ),
        ([TINY, "--config.seed"], r"--config\.seed needs a value"),
        (["--config=configs/tiny.py:gsop"], r"'gsop' is not one of grpo, grpo_process, dr_grpo"),
        (["--config=configs/tiny.py"], r"configs/tiny\.py:METHOD: '' is not one of grpo"),
    ],
)
def test_a_wrong_command_is_told(capsys, tmp_path, arguments, message):
    if arguments[1:] and "--dry_run" not in arguments:
        arguments = [*arguments, f"--workdir={tmp_path / 'run'}"]
    status, _, err = call(capsys, *arguments)
    assert status == 2
    assert err.startswith("error: ")
    assert re.search(message, err.replace("\n", " ")), err
    assert not (tmp_path / "run").exists(), "nothing is made before the config is known to be good"


@pytest.mark.parametrize(
    "config, place",
    [
        ("configs/tiny_dapo.py", "runs/tiny_dapo"),
        ("configs/tiny.py:grpo", "runs/tiny_grpo"),
        ("/elsewhere/mine.py", "runs/mine"),
    ],
)
def test_the_directory_of_a_run_is_named_after_its_config(config, place):
    arguments = ["program", "--config.seed=1", f"--config={config}"]
    assert cli.default_workdir(arguments) == Path(place)


def test_train_runs_in_the_default_directory(monkeypatch):
    started = []
    monkeypatch.setattr(
        "dapo_jax.train.train", lambda config, workdir, group: started.append(workdir)
    )
    assert train(["program", TINY]) == train(["program", TINY, "--workdir=~/x"]) == 0
    assert started == [Path("runs/tiny_dapo").resolve(), Path.home() / "x"]


def test_any_field_that_may_be_none_can_be_set_to_none():
    """The last of two overrides of a field holds."""
    dual = "--config.objective.clip_dual"
    for arguments, value in (
        ([f"{dual}=None"], None), ([f"{dual}=None", f"{dual}=3.0"], 3.0),
        ([f"{dual}=3.0", f"{dual}=None"], None),
    ):  # fmt: skip
        names = ("model.path", "data.train.sums.scorer", "mesh.rollout_tensor")
        more = [f"--config.{name}=None" for name in names]
        config, _ = parse(["program", *arguments, "--config", "configs/tiny_dapo.py", *more], "")
        assert config.objective.clip_dual == value
        assert config.model.path is None and config.data.train["sums"].scorer is None
        assert config.mesh.rollout_tensor is None


@pytest.mark.parametrize(
    "text, message",
    [
        ("import nosuch_library", r"a_config\.py, line 1: ModuleNotFoundError: No module named"),
        ("\nfrom configs import tiny_nosuch", r"a_config\.py, line 2: ImportError: cannot import"),
        ("\n\ndef get_config(:", r"a_config\.py, line 3: invalid syntax"),
        ("config = {}", r"a_config\.py has no function get_config"),
        ("get_config = lambda: {}", r"must return an ml_collections\.ConfigDict; it returned dict"),
    ],
)
def test_a_mistake_in_a_config_file_is_told(capsys, tmp_path, text, message):
    (tmp_path / "a_config.py").write_text(text)
    status, _, err = call(capsys, f"--config={tmp_path / 'a_config.py'}", "--dry_run")
    assert status == 2 and re.search(message, err), err


def test_what_a_config_file_raises_is_told_with_its_traceback(capsys, tmp_path):
    file = tmp_path / "a_config.py"
    file.write_text("def get_config():\n    return helper()\n\ndef helper():\n    return 1 / 0\n")
    assert train(["program", f"--config={file}", "--dry_run"]) == 2
    err = capsys.readouterr().err
    assert f"error: --config={file}, line 2: ZeroDivisionError: division by zero." in err
    assert "Traceback" in err and "in helper" in err


def test_the_config_file_that_the_docs_show(capsys, tmp_path):
    page = (ROOT / "docs" / "config.md").read_text()
    found = re.search(
        r"(?<=\n\n)( {4}from configs import tiny_dapo\n.*?return config\n)", page, re.DOTALL
    )
    assert found
    (tmp_path / "mine.py").write_text(textwrap.dedent(found[1]))
    status, out, err = call(capsys, f"--config={tmp_path / 'mine.py'}", "--dry_run")
    assert status == 0 and err == "", err
    assert "importance" in out


def test_a_mesh_that_does_not_match_the_devices(capsys, tmp_path):
    arguments = [TINY, f"--workdir={tmp_path / 'run'}", "--config.mesh.data=16"]
    status, _, err = call(capsys, *arguments)
    assert status == 2
    assert "config.mesh (data=16, fsdp=1, context=1, tensor=1) does not fit 8 device(s)" in err


def test_weights_that_are_not_there(capsys, tmp_path):
    file = write_config(
        tmp_path / "config",
        model__path=str(tmp_path / "nowhere"),
        model__tokenizer=str(tokenizer_directory(tmp_path)),
        pretrain=None,
        **{
            f"data__{s}__sums": source_dict(str(jsonl_file(tmp_path, s)), weight=weight)
            for s, weight in (("train", 1.0), ("heldout", None))
        },
    )
    status, out, err = call(capsys, f"--config={file}", f"--workdir={tmp_path / 'run'}")
    assert status == 2 and "config.model.path: there is no directory" in err
    assert out == "" and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "config_json, message",
    [
        (None, r"config\.model\.path \(.*config\.json cannot be read: .*No such file"),
        ({"num_hidden_layers": 7}, r"config\.model\.num_layers is 2, and 7 in the config\.json of"),
        ({"eos_token_id": [1, 5]}, r"stop_token_ids is \(\), and what .* is \(1, 5\)"),
        ({}, None),
    ],
)
def test_a_plan_is_of_the_model_that_is_there(capsys, tmp_path, config_json, message):
    """Also where the config gives every size."""
    place = {"model__path": str(tmp_path), "model__tokenizer": "none", "pretrain": None}
    place |= {"model__stop_token_ids": ()}
    if config_json is not None:
        values = to_hf(tiny_config().model, eos=[], bos=None, dtype="float32")
        (tmp_path / "config.json").write_text(json.dumps(values | config_json))
    file = write_config(tmp_path / "config", **place)
    status, out, err = call(capsys, f"--config={file}", "--dry_run")
    if message is None:
        assert status == 0 and str(tmp_path) in out, err
    else:
        assert status == 2 and out == "" and re.search(message, err), err


def test_overrides_hold_beside_a_model(tmp_path):
    """The rest of the model is that of the directory."""
    values = to_hf(tiny_config().model, eos=[], bos=None, dtype="float32")
    (tmp_path / "config.json").write_text(json.dumps(values))
    of = lambda *more: parse(["program", TINY, f"--model={tmp_path}", *more], "", texts=("model",))
    chosen, _ = of("--config.model.tokenizer=mine", "--config.model.remat=full")
    found = chosen.model
    assert (found.path, found.tokenizer, found.remat) == (str(tmp_path), "mine", "full")
    assert found.hidden_size == tiny_config().model.hidden_size
    with pytest.raises(UserError, match=r"--model and --config\.model\.path both say which model"):
        of("--config.model.path=x")
    with pytest.raises(
        UserError, match=r"config\.model\.hidden_size is 48, and 32 in the config\.json"
    ):
        of("--config.model.hidden_size=48")


def tokenizer_directory(tmp_path):
    from dapo_jax.data.tokenizer import arithmetic_tokenizer

    arithmetic_tokenizer().save_pretrained(str(tmp_path / "tokenizer"))
    return tmp_path / "tokenizer"


def jsonl_file(tmp_path, side):
    file = tmp_path / f"{side}.jsonl"
    numbers = (1, 2, 3) if side == "train" else (4,)
    line = '{{"question": "Add: a={0} b={0}\\n", "answer": "{1}"}}\n'
    file.write_text("".join(line.format(n, 2 * n) for n in numbers))
    return file


@pytest.mark.parametrize("place", ["a file/below", "a file"])
def test_a_workdir_that_cannot_be(capsys, tmp_path, place):
    (tmp_path / "a file").write_text("")
    status, _, err = call(capsys, TINY, f"--workdir={tmp_path / place}")
    assert status == 2 and "cannot be written to" in err and "Choose another" in err


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write everywhere")
def test_a_workdir_without_permission(capsys, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    status, _, err = call(capsys, TINY, f"--workdir={tmp_path / 'locked' / 'run'}")
    assert status == 2 and "cannot be written to" in err


def test_a_workdir_whose_config_is_broken(capsys, tmp_path):
    (tmp_path / "config.json").write_text("{")
    status, _, err = call(capsys, TINY, f"--workdir={tmp_path}")
    assert status == 2 and "cannot be read" in err
    assert (tmp_path / "config.json").read_text() == "{"


def test_a_wrong_scorer(capsys, tmp_path):
    arguments = [
        TINY,
        f"--workdir={tmp_path / 'run'}",
        "--config.reward.scorer=(('exactly', 1.0),)",
    ]
    status, _, err = call(capsys, *arguments)
    assert status == 2 and "config.reward.scorer" in err


def test_an_evaluation_without_a_place_is_told_before_a_model_is_made(capsys):
    status, out, err = call(capsys, TINY, main=load_launcher("evaluate"))
    assert status == 2 and out == "" and "--output is needed where there is no --workdir" in err


def test_help_says_how_to_call_it(capsys):
    with pytest.raises(SystemExit) as left:
        train(["program", "--help"])
    assert left.value.code == 0
    assert "launch/train.py --config=" in capsys.readouterr().out


@pytest.mark.parametrize(
    "change, message",
    [
        (("objective", "clip_higher", 0.3), r"config\.objective\.clip_higher is not a field"),
        (("seed", "0"), r"config\.seed must be int"),
        (("model", "path", "here"), r"config\.pretrain makes a base model when"),
        (
            ("objective", "advantage_args", {"normalise_std": 1}),
            r"advantage_args\.normalise_std must be bool; got 1 \(int\)",
        ),
        (("objective", "clip_dual", 0.5), r"clip_dual must be above 1"),
        (("mesh", "rules", (("embed", "row"),)), r"rules sends 'embed' to 'row'"),
        (("mesh", "fsdp", -1), "at most one axis may be -1"),
        (("objective", "overlong_in_baseline", False), "read only with"),
        (("rollout", "stop_strings", ("a", "")), r"rollout\.stop_strings must be texts .* got"),
        (("reward", "incorrect", 1.0), r"reward\.incorrect must be less than 1, the reward of a"),
        (("model", "rope_scaling", {"rope_type": "dynamic"}), "its rope type must be default, lin"),
        (("model", "rope_scaling", {"rope_type": "linear"}), "its factor is needed"),
        (("model", "rope_scaling", {"type": "linear", "factor": "2"}), "its factor must be a num"),
        (
            ("model", "rope_scaling", {"type": "yarn", "factor": 2.0}),
            r"config\.model\.rope_scaling is .*; its original_max_position_embeddings is needed",
        ),
        (
            ("model", "rope_scaling", {"type": "linear", "factor": 2.0, "beta_fast": 32}),
            "beta_fast is not known here",
        ),
        (
            ("data", "train", {"q": source_dict("q.jsonl", weight=1.0)}),
            "add a source with path 'ar",
        ),
        (("dynamic_sampling", "max_staleness", 0), r"max_staleness must be greater than 0; got 0"),
        (
            ("rollout", "watchdog_limit_seconds", -1.0),
            r"rollout\.watchdog_limit_seconds must be .* got -1",
        ),
        (("dynamic_sampling", "prefilter", 1), r"prefilter must be bool; got 1 \(int\)"),
    ],
)
def test_a_wrong_field_is_named(change, message):
    *groups, field, value = change
    values = inner = tiny_dict()
    for group in groups:
        inner = inner.setdefault(group, {})
    inner[field] = value
    with pytest.raises(UserError, match=message):
        Config.from_dict(values)


def test_partial_rollouts_need_dynamic_sampling():
    on = {"dynamic_sampling__partial_rollouts": True}
    assert Config.from_dict(tiny_dict(**on)).dynamic_sampling.max_staleness == 1
    message = (
        r"partial_rollouts must be False without config\.dynamic_sampling\.enabled: .*got True"
    )
    with pytest.raises(UserError, match=message):
        Config.from_dict(tiny_dict(**on, dynamic_sampling__enabled=False))


FILE = source_dict("problems.jsonl")


@pytest.mark.parametrize(
    "place, value, message",
    [
        ("data.train", {}, r"^config\.data\.train names no source; give at least one"),
        ("data.heldout", {}, r"^config\.data\.heldout names no source"),
        ("data.train", None, r"data\.train must be a group of named fields, not None"),
        ("data.train.sums", None, r"data\.train\.sums must be a group of fields, not None"),
        ("data.train.a/b", FILE | {"weight": 1.0}, r"data\.train: 'a/b' cannot be the name of a"),
        ("data.train.", FILE | {"weight": 1.0}, r"data\.train: '' cannot be the name of a source"),
        ("data.heldout", {3: FILE}, r"data\.heldout: 3 cannot be the name of a source"),
        ("data.train.sums.weight", None, r"train\.sums\.weight must be greater than 0.* got None"),
        ("data.train.sums.weight", 0.0, r"train\.sums\.weight must be greater than 0.* got 0\.0"),
        ("data.train.sums.weight", -1, r"train\.sums\.weight must be greater than 0.* got -1"),
        ("data.train.sums.weight", float("inf"), r"weight must be .* and finite; got inf"),
        ("data.train.sums.weight", float("nan"), r"weight must be .* and finite; got nan"),
        ("data.heldout.sums.weight", 1.0, r"heldout\.sums\.weight must be None: all problems are"),
        ("data.train.sums.num_terms", None, r"train\.sums\.num_terms must be a non-empty tuple"),
        ("data.train.sums.num_terms", (1,), r"train\.sums\.num_terms must be .* from 2 to 11"),
        ("data.train.sums.num_problems", None, r"num_problems must be given for arithmetic"),
        (
            "data.train.sums.num_problems",
            0,
            r"train\.sums\.num_problems must be greater than 0; got 0",
        ),
        ("data.train.sums.split", "test", r"sums\.split must be 'train' or 'heldout'; got 'test'"),
        ("data.train.sums.answer_key", "x", r"sums\.answer_key is not read when .* 'arithmetic'"),
        ("data.train.sums.path", "gsm8k", r"sums\.num_terms is not read when .*path is 'gsm8k'"),
        (
            "data.train.sums.prompt_template",
            "Q: ",
            r"train\.sums\.prompt_template must be a text with \{prompt\}",
        ),
        ("data.prompt_template", "Q: ", r"data\.prompt_template must be a text with \{prompt\}"),
        (
            "data.system_prompt",
            "Think.",
            r"system_prompt is not read when config\.data\.chat is Fa",
        ),
        (
            "data.train.sums.scorer",
            "boxed + ",
            r"train\.sums\.scorer \('boxed \+ '\) must be a scor",
        ),
        ("data.heldout.sums.scorer", "0 * boxed", r"heldout\.sums\.scorer .*'0 \* boxed' is not"),
        (
            "reward.scorer",
            "x * boxed",
            r"^config\.reward\.scorer \('x \* boxed'\) must be a scorer",
        ),
    ],
)
def test_a_wrong_source_is_named(place, value, message):
    values = tiny_dict()
    *groups, field = place.split(".")
    inner = values
    for group in groups:
        inner = inner.setdefault(group, {})
    inner[field] = value
    with pytest.raises(UserError, match=message):
        Config.from_dict(values)


def test_sources_of_every_kind_are_right():
    train = {
        "a-1": FILE | {"weight": 1, "scorer": "boxed + 0.5 * gsm8k", "num_problems": 1},
        "ü_2": FILE | {"weight": 1e-3, "prompt_template": "{prompt} = {{}}"},
    }
    train["sums"] = tiny_dict()["data"]["train"]["sums"]  # pretraining is on sums as long
    settings = {"chat": True, "system_prompt": "Think.", "prompt_template": "Q: {prompt}"}
    values = tiny_dict(data__train=train, **{f"data__{k}": v for k, v in settings.items()})
    config = Config.from_dict(values)
    assert (
        list(config.data.train) == ["a-1", "ü_2", "sums"] and config.data.train["a-1"].weight == 1.0
    )


@pytest.mark.parametrize("group, field", [("model", "vocab_size"), ("data", "heldout")])
def test_a_missing_field_is_named(group, field):
    values = tiny_dict()
    del values[group][field]
    with pytest.raises(UserError, match=rf"config\.{group}\.{field} is missing and has no default"):
        Config.from_dict(values)


def test_every_field_is_read():
    """A field that no code reads is a promise that nothing keeps."""
    code = "".join(
        file.read_text()
        for file in (ROOT / "dapo_jax").rglob("*.py")
        if not file.name.startswith("config")
    )
    groups = [c for c in vars(schema).values() if dataclasses.is_dataclass(c) and c is not Config]
    assert len(groups) > 15
    by_name = {clip for loss in LOSSES.values() for clip in loss.clips}
    for group in groups:
        for field in dataclasses.fields(group):
            assert field.name in by_name or re.search(rf"\.{field.name}\b", code), (
                f"{group.__name__}.{field.name}"
            )


def num_fields(cls):
    """Number of fields of a section and of the sections in it; config.data.heldout has the fields
    of config.data.train."""
    count = 0
    for name, hint in typing.get_type_hints(cls).items():
        sections = [h for h in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(h)]
        count += 0 if name == "heldout" else num_fields(sections[0]) if sections else 1
    return count


def test_the_config_has_few_fields():
    """A new field takes the place of one that no recipe sets."""
    assert 100 < num_fields(Config) <= 125


def leaves(values, prefix=""):
    for name, value in values.items():
        if isinstance(value, dict) and value and not name.endswith("_args"):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def test_every_field_can_be_overridden_whether_or_not_the_file_has_it():
    """With the very text of its value; sections that are None begin with defaults."""
    complete = parse(["program", "--config=configs/tiny.py:ppo"], "")[0]
    given = [f"--config.{name}={value}" for name, value in leaves(complete.to_dict())]
    assert len(given) > 120
    assert parse(["program", TINY, *given], "")[0] == complete


def test_a_section_that_is_none_is_given_on_the_command_line():
    changes = ["--config.rollout.log_prob_source=recompute", "--config.correction.importance=token"]
    found, _ = parse(["program", TINY, *changes, "--config.correction.importance_cap=2"], "")
    assert found.correction == schema.CorrectionConfig(importance="token", importance_cap=2.0)
    arguments = ["--config.objective.loss=sapo", "--config.objective.loss_args.tau_negative=2"]
    clips = [f"--config.objective.clip_{name}=None" for name in ("low", "high", "dual")]
    found, _ = parse(["program", TINY, *arguments, *clips], "")
    assert found.objective.loss_args == {"tau_positive": 1.0, "tau_negative": 2.0}


@pytest.mark.parametrize("name", CONFIGS)
def test_plans(capsys, name):
    status, out, err = call(capsys, f"--config=configs/{name}", "--dry_run")
    assert status == 0 and err == ""
    for title in ("model", "mesh", "batch of one rollout step", "objective", "memory per device"):
        assert title in out


@pytest.mark.parametrize("more", [["--dry_run"], ["--workdir=/nonexistent/run"]])
def test_parameters_that_no_update_would_move_are_not_trained(capsys, more):
    flag = "--config.model.param_dtype=bfloat16"
    status, _, err = call(capsys, "--config=configs/tiny_dapo.py", flag, *more)
    assert status == 2
    assert "param_dtype 'bfloat16' is for evaluation" in err and "Set it to 'float32'" in err


def test_the_plan_of_the_published_run(capsys):
    """Against Qwen2.5-32B's own index (65,527,752,704 bytes in bfloat16) and the paper."""
    slots = ("--config.rollout.slots=704", "--config.rollout.cache_gib=None")
    _, out, _ = call(capsys, "--config=configs/qwen32b_dapo.py", "--dry_run", *slots)
    assert f"{65_527_752_704 // 2:,}" in out
    assert "512 x 16 = 8,192" in out and "32 prompts = 512 responses" in out
    assert re.search(r"updates per rollout step +16\b", out)
    per_device = 65_527_752_704 * 2 / 64 / 2**30  # float32 over 64 devices; norms are not split
    found = re.search(r"parameters +([\d.]+) GiB", out)
    assert found and abs(float(found[1]) - per_device) < 0.01
    # Of each of 16 shards 44 slots with a response at its longest, the page (of 128) that it begins
    # in and two to spare; 45 prompts, one that waits among them; and a page for what is nobody's.
    of_a_shard = 44 * (20480 + 3 * 128) + 45 * 2048 + 128
    cache = 16 * of_a_shard * 2 * 64 * 8 * 128 * 2 / 64 / 2**30
    found = re.search(r"KV cache +([\d.]+) GiB", out)
    assert found and abs(float(found[1]) - cache) < 0.01


def test_the_plan_touches_nothing(tmp_path):
    """No directory is made, no weight and no data looked for, from any current directory."""
    command = [sys.executable, str(ROOT / "launch" / "train.py"), "--dry_run"]
    command.append("--config=configs/qwen32b_dapo.py")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())


def test_grpo_is_dapo_without_its_techniques():
    dapo, grpo = tiny_dapo.get_config(), tiny.get_config("grpo")
    assert grpo.objective.clip_low == grpo.objective.clip_high == dapo.objective.clip_low
    assert dapo.objective.clip_high == 0.28
    assert not grpo.dynamic_sampling.enabled and grpo.reward.overlong_penalty == 0
    assert grpo.train == dapo.train and grpo.optimizer == dapo.optimizer, "the same budget"
    assert grpo.pretrain == dapo.pretrain and grpo.rollout == dapo.rollout


@pytest.mark.parametrize(
    "error, status",
    [
        (jax.errors.JaxRuntimeError("INTERNAL: HBM uncorrectable ECC error on chip 3"), 75),
        (jax.errors.JaxRuntimeError("UNAVAILABLE: ICI link down"), 75),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory allocating 4 GiB"), 1),
        (jax.errors.JaxRuntimeError("INVALID_ARGUMENT: shapes do not match"), 1),
        (jax.errors.JaxRuntimeError("INTERNAL: RET_CHECK failure (lowering_emitter.cc:5506)"), 1),
        (jax.errors.JaxRuntimeError("INTERNAL: Mosaic failed to compile TPU kernel"), 1),
        (OSError(errno.EIO, "Input/output error"), 75),
        (OSError(errno.ESTALE, "Stale file handle"), 75),
        (FileNotFoundError(errno.ENOENT, "No such file"), 1),
        (OSError(errno.ENOSPC, "the disk is full"), 1),
        (RunError("the gradient was not finite"), 1),
        (CheckpointError("checkpoint 3 could not be written", restart=True), 75),
        (CheckpointError("the disk is full"), 1),
        (UserError("no such flag"), 2),
        (KeyError("x"), 1),
    ],
)
def test_the_exit_status_says_whether_to_start_again(error, status, capsys):
    assert cli.fail(error) == status
    assert str(error.args[-1])[:20] in capsys.readouterr().err
