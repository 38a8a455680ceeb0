"""What a user sees who gets something wrong: the field, the value, the remedy; no traceback."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from jax.errors import JaxRuntimeError

from configs import tiny, tiny_dapo
from configs.recipes import RUNS
from configs.tiny import METHODS
from dapo_jax.config import cli, schema
from dapo_jax.config.cli import parse
from dapo_jax.config.hf_config import to_hf
from dapo_jax.runs.checkpoint import CheckpointError
from dapo_jax.types import RunError, UserError
from tests.conftest import ROOT
from tests.support.helpers import tiny_config
from tests.support.runs import call_main, load_launcher, write_config

train = load_launcher("train")
TINY = "--config=configs/tiny_dapo.py"
FILES = {file.stem for file in (ROOT / "configs").glob("[a-z]*.py")}
OTHERS = {"tiny", "recipes", "sft_word_problems"}  # the latter is launch/sft.py's
CONFIGS = sorted(f"{name}.py" for name in FILES - OTHERS)
CONFIGS += [f"tiny.py:{m}" for m in [*METHODS, *RUNS]] + [f"recipes.py:{m}" for m in RUNS]


def call(capsys, *arguments, main=train):
    return call_main(capsys, main, *arguments)


ADDRESSES = ("garbage", ":9", "host:", "host:x")


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--workdri=x", r"workdri.*Flags: --config"),
        ("stray", "'stray' is not a flag"),
        ("--config.train.nmu_steps=3", r"config\.train\.nmu_steps is not a field"),
        ("--config.train.nmu_steps=None", r"config\.train\.nmu_steps is not a field"),
        ("--config.train.num_steps=three", "num_steps must be int; got 'three'"),
        ("--config.train.num_steps=0", r"num_steps must be greater than 0; got 0"),
        ("--config.optimizer.betas={{0.9,0.99}}", r"betas must be a tuple; got '\{\{0\.9"),
        ("--config.train.num_steps.x=1", "config.train.num_steps has no fields"),
        ("--config.model.path=here --config.pretrain=None", "there is no directory .*here"),
        ("--config.mesh.data=3 --dry_run", r"micro_batch \(16\) must be a multiple .* 18"),
        ("--config.reward.scorer=boxd --dry_run", "'boxd' is not one of exact_match,"),
        ("--coordinator_timeout=0", "--coordinator_timeout must be above 0 seconds; got 0"),
        ("--config.seed.x=None", r"config\.seed must be int; got \{'x': None\}"),
        ("--config.pretrain=None", r"tokenizer is needed when config\.pretrain and"),
        (
            "--config.correction.importance=('token',None,2.0)",
            r"correction\.policy 'old' corrects the",
        ),
        ("--config.critc.value_clip=1", r"config\.critc is not a field\. config has: seed,"),
        ("--config.seed", r"--config\.seed needs a value"),
        ("--config=", "--config is needed"),
        ("--config=configs/none.py", "no such file. The project has configs/.*tiny_dapo.py"),
        ("--config=configs/tiny.py:gsop", "'gsop' is not one of grpo, grpo_process, dr_grpo"),
        ("--config=configs/tiny.py", "FILE:METHOD: the method '' is not one of grpo"),
        ("--config=configs/smollm2_word_problems.py:x", "'x' is not one of lora, grpo"),
        ("--config=configs/qwen0_5b_gsm8k.py:t5", "DEVICE: the device 't5' is not t4"),
        ("--config=configs/tiny_dapo.py:x", "takes no argument: leave :x out"),
        ("--config.train={'num_steps':3}", r"config\.train is a section, and its other fields"),
        ("--model=", "--model= has no value: give one, or leave --model out"),
        ("--workdir=", "--workdir= has no value"),
        ("--workdir=~no_such_user/x", "home directory is not known.* path that begins with ~NAME"),
        ("--config.mesh.rollout_tensor=3 --dry_run", r"tensor \(3\) must divide the devices \(8\)"),
        *(
            (
                f"--coordinator_address={a} --num_processes=2 --process_id=0",
                f"--coordinator_address must be HOST:PORT, of process 0; got '{a}'",
            )
            for a in ADDRESSES
        ),
    ],
)
def test_a_wrong_command_is_reported(capsys, tmp_path, flags, message):
    workdir = tmp_path / "run"
    status, _, err = call(capsys, TINY, f"--workdir={workdir}", *flags.split())
    assert status == 2
    assert err.startswith("error: ")
    assert re.search(message, err.replace("\n", " ")), err
    assert not workdir.exists(), "nothing is made before the config is known to be good"


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
        "dapo_jax.train_loop.train", lambda config, workdir, group: started.append(workdir)
    )
    assert train(["program", TINY]) == train(["program", TINY, "--workdir=~/x"]) == 0
    assert started == [Path("runs/tiny_dapo").resolve(), Path.home() / "x"]


def test_any_field_that_may_be_none_can_be_set_to_none():
    """The last of two overrides of a field holds."""
    names = ("model.path", "data.train.sums.scorer", "mesh.rollout_tensor")
    more = [f"--config.{name}=None" for name in names]
    for first, last in (("3.0", None), (None, 3.0)):
        dual = [f"--config.objective.clip_dual={value}" for value in (first, last)]
        config, _ = parse(["program", *dual, "--config", "configs/tiny_dapo.py", *more], "")
        assert config.objective.clip_dual == last
        assert config.model.path is None and config.data.train["sums"].scorer is None
        assert config.mesh.rollout_tensor is None


@pytest.mark.parametrize(
    "text, message",
    [
        ("import nosuch_library", r"a_config\.py, line 1: ModuleNotFoundError: No module named"),
        ("import next_to_it", r"named 'next_to_it'\. Set PYTHONPATH=/\S+ to import files next to"),
        ("\nfrom configs import tiny_nosuch", r"a_config\.py, line 2: ImportError: cannot import"),
        ("\n\ndef get_config(:", r"a_config\.py, line 3: invalid syntax"),
        ("config = {}", r"a_config\.py has no function get_config"),
        ("get_config = lambda: {}", r"must return an ml_collections\.ConfigDict; it returned dict"),
    ],
)
def test_a_mistake_in_a_config_file_is_reported(capsys, tmp_path, text, message):
    (tmp_path / "a_config.py").write_text(text)
    (tmp_path / "next_to_it.py").write_text("")
    status, _, err = call(capsys, f"--config={tmp_path / 'a_config.py'}", "--dry_run")
    assert status == 2 and re.search(message, err), err


def test_a_module_that_lacks_a_name_is_not_a_missing_one(capsys, tmp_path, monkeypatch):
    """Its directory is in PYTHONPATH already."""
    (tmp_path / "a_module.py").write_text("")
    (tmp_path / "a_config.py").write_text("from a_module import nosuch")
    monkeypatch.syspath_prepend(tmp_path)
    status, _, err = call(capsys, f"--config={tmp_path / 'a_config.py'}", "--dry_run")
    assert status == 2 and "cannot import name 'nosuch'" in err and "PYTHONPATH" not in err


def test_what_a_config_file_raises_is_reported_with_its_traceback(capsys, tmp_path):
    file = tmp_path / "a_config.py"
    file.write_text("def get_config():\n    return helper()\n\ndef helper():\n    return 1 / 0\n")
    assert train(["program", f"--config={file}", "--dry_run"]) == 2
    err = capsys.readouterr().err
    assert f"error: --config={file}, line 2: ZeroDivisionError: division by zero." in err
    assert "Traceback" in err and "in helper" in err


def test_the_config_file_that_the_docs_show(capsys, tmp_path):
    page = (ROOT / "docs" / "config.md").read_text()
    found = re.search(r"\n\n( {4}from configs import tiny_dapo\n.*?return \w+\n)", page, re.DOTALL)
    assert found
    (tmp_path / "mine.py").write_text(textwrap.dedent(found[1]))
    status, out, err = call(capsys, f"--config={tmp_path / 'mine.py'}", "--dry_run")
    assert status == 0 and err == "", err
    assert "importance" in out


@pytest.mark.parametrize(
    "config_json, message",
    [
        (None, r"config\.model\.path \(.*config\.json cannot be read: .*No such file"),
        ({"num_hidden_layers": 7}, r"config\.model\.num_layers is 2, and 7 in the config\.json of"),
        ({"hidden_size": None}, "config.json has hidden_size = None; a number above 0 is needed"),
        ({"num_attention_heads": 0}, "has num_attention_heads = 0; a number above 0"),
        ({"rms_norm_eps": "small"}, "has rms_norm_eps = 'small'; a number above 0"),
        ({"rope_scaling": "linear"}, "has rope_scaling = 'linear'; it must be an object"),
        ({"rope_theta": ["1e6"]}, r"config\.model\.rope_theta must be float; got \['1e6'\]"),
        ({"layer_types": 1}, "has layer_types = 1; it must be a list"),
        ({"model_type": ["qwen2"]}, r"has model_type = \['qwen2'\]; known are qwen2"),
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


def test_a_mesh_that_does_not_match_the_devices(capsys, tmp_path):
    status, _, err = call(capsys, TINY, f"--workdir={tmp_path}", "--config.mesh.data=16")
    assert status == 2
    assert "config.mesh (data=16, fsdp=1, context=1, tensor=1) does not fit 8 device(s)" in err


@pytest.mark.parametrize("place", ["a file/below", "a file", "locked/run", "broken"])
def test_a_workdir_that_cannot_be(capsys, tmp_path, place):
    if place.startswith("locked") and os.geteuid() == 0:
        pytest.skip("the superuser may write everywhere")
    (tmp_path / "a file").write_text("")
    (tmp_path / "locked").mkdir(mode=0o500)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    status, _, err = call(capsys, TINY, f"--workdir={tmp_path / place}")
    wanted = "cannot be read" if place == "broken" else "cannot be written to"
    assert status == 2 and wanted in err and str(tmp_path / place) in err
    assert (tmp_path / "broken" / "config.json").read_text() == "{"


def test_a_model_is_no_run(capsys, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    flags = (f"--workdir={tmp_path}", f"--output={tmp_path / 'out'}")
    status, _, err = call(capsys, *flags, main=load_launcher("export"))
    assert status == 2 and "holds no run: its config.json is not that of a run" in err


def test_an_evaluation_without_a_place_is_reported_before_a_model_is_made(capsys):
    status, out, err = call(capsys, TINY, main=load_launcher("evaluate"))
    assert status == 2 and out == "" and "--output is needed where there is no --workdir" in err


def test_help_says_how_to_call_it(capsys):
    with pytest.raises(SystemExit) as left:
        train(["program", "--help"])
    assert left.value.code == 0 and "launch/train.py --config=" in capsys.readouterr().out


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
    weights = "--config.correction.importance=('token', None, 2.0)"
    found, _ = parse(["program", TINY, "--config.rollout.log_prob_source=recompute", weights], "")
    assert found.correction == schema.CorrectionConfig(importance=("token", None, 2.0))
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


def test_the_plan_of_the_published_run(capsys, tmp_path, monkeypatch):
    """Against Qwen2.5-32B's own index (65,527,752,704 bytes in bfloat16) and the paper. From any
    directory, with no file made, and no weight and no data looked for."""
    monkeypatch.chdir(tmp_path)
    slots = ("--config.rollout.slots=704", "--config.rollout.cache_gib=None")
    _, out, _ = call(capsys, "--config=configs/qwen32b_dapo.py", "--dry_run", *slots)
    assert f"{65_527_752_704 // 2:,}" in out
    assert "512 x 16 = 8,192" in out and "32 prompts = 512 responses" in out
    assert re.search(r"updates per rollout step +16\b", out)
    per_device = 65_527_752_704 * 2 / 64 / 2**30  # float32 over 64 devices; norms are not split
    found = re.search(r"parameters +([\d.]+) GiB", out)
    assert found and abs(float(found[1]) - per_device) < 0.01
    # In each of 16 shards: 44 slots with the longest response, the page (of 128) that it begins in
    # and two to spare; 45 prompts, one of them waiting; and a scratch page.
    of_a_shard = 44 * (20480 + 3 * 128) + 45 * 2048 + 128
    cache = 16 * of_a_shard * 2 * 64 * 8 * 128 * 2 / 64 / 2**30
    found = re.search(r"KV cache +([\d.]+) GiB", out)
    assert found and abs(float(found[1]) - cache) < 0.01
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
        (JaxRuntimeError("INTERNAL: HBM uncorrectable ECC error on chip 3"), 75),
        (JaxRuntimeError("UNAVAILABLE: ICI link down"), 75),
        (JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory allocating 4 GiB"), 1),
        (JaxRuntimeError("INVALID_ARGUMENT: shapes do not match"), 1),
        (JaxRuntimeError("INTERNAL: RET_CHECK failure (lowering_emitter.cc:5506)"), 1),
        (JaxRuntimeError("INTERNAL: Mosaic failed to compile TPU kernel"), 1),
        (JaxRuntimeError("UNIMPLEMENTED: no such operation"), 1),
        (JaxRuntimeError("INTERNAL: Compilation failure: unsupported"), 1),
        (OSError("a file that is no parquet"), 1),
        (OSError(errno.EIO, "Input/output error"), 75),
        (OSError(errno.ESTALE, "Stale file handle"), 75),
        (FileNotFoundError(errno.ENOENT, "No such file"), 1),
        (OSError(errno.ENOSPC, "the disk is full"), 1),
        (OSError(errno.EDQUOT, "the quota is full"), 1),
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


def test_a_disk_that_is_full_while_a_directory_is_copied_is_named(tmp_path, capsys):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").touch()

    def full(source, target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), target)

    with pytest.raises(OSError) as copied:
        shutil.copytree(tmp_path / "a", tmp_path / "b", copy_function=full)
    assert cli.fail(copied.value) == 1
    assert capsys.readouterr().err.startswith("error: the disk is full")


def test_output_that_no_process_reads_is_no_failure():
    code = """
        import sys
        from dapo_jax.config.cli import fail
        try:
            print("a line", flush=True)
        except Exception as error:
            sys.exit(fail(error))
    """
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


SHARE, OLD_SHARE = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"


@pytest.mark.parametrize(
    ("given", "share"), [({}, 0.92), ({SHARE: "0.5"}, 0.5), ({OLD_SHARE: "0.5"}, 0.5)]
)
def test_gpus_give_most_of_their_memory(given, share):
    """As jaxlib reads its options, in a process of its own: this one has started its devices."""
    read = (
        "import jaxlib.xla_client, dapo_jax.config.cli\n"
        "print(jaxlib.xla_client.generate_pjrt_gpu_plugin_options()['memory_fraction'])"
    )
    env = {k: v for k, v in os.environ.items() if k not in (SHARE, OLD_SHARE)} | given
    done = subprocess.run(
        [sys.executable, "-c", read], env=env, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert float(done.stdout) == share
