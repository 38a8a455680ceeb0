"""Run directories: the configs that may resume a run."""

import contextlib
import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from dapo_jax.config import Config
from dapo_jax.runs import run_directory, trackers
from dapo_jax.runs.checkpoint import Checkpoints
from dapo_jax.runs.run_directory import RunDirectory, check_same, frozen, read_config
from dapo_jax.types import Attempt, Attempts, Problem, RunError, UserError, Verdict
from tests.conftest import ROOT
from tests.support.helpers import make_group, tiny_config

COSINE = {"optimizer__final_rate_share": 0.1}
MAY_CHANGE = {
    "model.path",
    "model.tokenizer",
    "data.train.sums.path",
    "data.heldout.sums.path",
    "train.num_steps",
    "checkpoint.every_steps",
    "checkpoint.keep_newest",
    "log.rollouts_per_step",
    "log.profile_steps",
    "log.trackers",
    "reward.workers",
    "rollout.watchdog_limit_seconds",
}


def begun(path, *, steps=(0, 1, 2, 3), **overrides):
    """Returns the directory of a run with these lines of metrics."""
    RunDirectory(path, tiny_config(**overrides)).close()
    lines = [json.dumps({"step": step}) + "\n" for step in steps]
    (path / "metrics.jsonl").write_text("".join(lines) + '{"step": 4, "rew')  # killed while writing
    return path


def files_of(path):
    return {file.name: file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_a_directory_in_which_nothing_ran_takes_a_mended_config(tmp_path):
    RunDirectory(tmp_path, tiny_config(reward__scorer="nosuch"))
    (tmp_path / "checkpoints").mkdir()
    RunDirectory(tmp_path, tiny_config(reward__scorer="boxed"))
    frozen = json.loads((tmp_path / "config.json").read_text())["config"]
    assert frozen["reward"]["scorer"] == "boxed"


@pytest.mark.parametrize("left", ["metrics.jsonl", "base/0/arrays", "checkpoints/0/arrays", "far"])
def test_a_directory_in_which_something_ran_keeps_its_config(tmp_path, left):
    """A base model, too, was made by the config."""
    path, far = tmp_path / "run", str(tmp_path / "elsewhere")
    elsewhere = {"checkpoint__directory": far} if left == "far" else {}
    RunDirectory(path, tiny_config(**elsewhere))
    file = tmp_path / "elsewhere" / "0" / "arrays" if left == "far" else path / left
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text('{"step": 0}\n')
    before = files_of(path)
    with pytest.raises(UserError, match=r"config\.seed: 0 there, 3 now"):
        RunDirectory(path, tiny_config(seed=3, **elsewhere))
    assert files_of(path) == before


def test_a_start_that_is_refused_later_leaves_the_commit_of_the_run(tmp_path, monkeypatch):
    """By a checkpoint of another version of the code, say: the error sends the user to it."""
    commit = lambda: json.loads((tmp_path / "config.json").read_text())["git_commit"]
    monkeypatch.setattr(run_directory, "_git_commit", lambda: "of the run")
    begun(tmp_path)
    monkeypatch.setattr(run_directory, "_git_commit", lambda: "another")
    directory = RunDirectory(tmp_path, tiny_config())
    assert commit() == "of the run"
    directory.rewind(3)  # the run resumes
    directory.close()
    assert commit() == "another"


def test_the_frozen_config_is_complete_and_gives_the_same_config_again(tmp_path):
    """Method arguments that were left out among them."""
    config = tiny_config(objective__loss="dppo-tv", objective__clip_dual=None)
    RunDirectory(tmp_path, config)
    frozen = read_config(tmp_path / "config.json")
    assert frozen["objective"]["loss_args"] == {"ratio_cap": 20.0}
    assert frozen["objective"]["advantage_args"] == {"normalise_std": True, "std_ddof": 1}
    assert frozen["optimizer"]["eps"] == 1e-8 and frozen["critic"] is None
    assert Config.from_dict(frozen) == config


def test_the_commit_is_named_where_there_is_no_git(tmp_path, monkeypatch):
    """In what `git archive` makes, which pods and images get; in a checkout by git itself."""
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    package = tmp_path / "dapo_jax"
    package.mkdir()
    for name in (".gitattributes", "dapo_jax/COMMIT"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    monkeypatch.setattr(run_directory, "__file__", str(package / "runs" / "run_directory.py"))
    assert run_directory._git_commit() is None
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "a"]):
        subprocess.run([*git, *command], check=True)
    commit = run_directory._git_commit()
    assert re.fullmatch("[0-9a-f]{40}", commit)
    archive = subprocess.run([*git, "archive", "HEAD"], check=True, capture_output=True).stdout
    (tmp_path / "pod").mkdir()
    subprocess.run(["tar", "-xC", str(tmp_path / "pod")], input=archive, check=True)
    package = tmp_path / "pod" / "dapo_jax"
    monkeypatch.setattr(run_directory, "__file__", str(package / "runs" / "run_directory.py"))
    monkeypatch.setattr(run_directory.subprocess, "run", None)  # no git is asked
    assert run_directory._git_commit() == commit


def test_more_steps_are_another_schedule_where_the_rate_decays(tmp_path):
    begun(tmp_path / "constant")
    RunDirectory(tmp_path / "constant", tiny_config(train__num_steps=9))
    begun(tmp_path / "cosine", **COSINE)
    RunDirectory(tmp_path / "cosine", tiny_config(**COSINE))
    with pytest.raises(UserError, match=r"num_steps: 3 there, 9 now, .*final_rate_share"):
        RunDirectory(tmp_path / "cosine", tiny_config(train__num_steps=9, **COSINE))
    by_stage = {"stages": ((2, {"optimizer.final_rate_share": 0.1}),)}
    old = frozen(tiny_config(train__num_steps=3, **by_stage))
    longer = tiny_config(train__num_steps=9, **by_stage)
    check_same(old, longer, "there", 1)  # the rates of the steps done do not depend on it
    with pytest.raises(UserError, match=r"num_steps: 3 there, 9 now, .*final_rate_share"):
        check_same(old, longer, "there", 2)


def test_a_run_resumes_with_every_field_but_these_as_it_was():
    config = tiny_config()
    names = trackers.flatten(frozen(config)).keys() - {"stages"}
    assert MAY_CHANGE < names
    for name in names:
        old = inner = frozen(config)
        *groups, last = name.split(".")
        for group in groups:
            inner = inner[group]
        inner[last] = "another"
        if name in MAY_CHANGE:
            check_same(old, config, "there", 1)
            continue
        with pytest.raises(UserError, match=re.escape(f"config.{name}: 'another' there, ")):
            check_same(old, config, "there", 1)


@pytest.mark.parametrize("done", [0, 1])
def test_a_refused_change_is_accepted_in_the_stage_that_the_error_names(tmp_path, done):
    begun(tmp_path, steps=range(done + 1))
    with pytest.raises(UserError, match="add a stage") as refused:
        RunDirectory(tmp_path, tiny_config(optimizer__learning_rate=1e-9))
    (first,) = map(int, re.findall(r"from step (\d+) on", str(refused.value)))
    slower = {"optimizer.learning_rate": 1e-9}
    RunDirectory(tmp_path, tiny_config(stages=((first, slower),))).close()


def test_a_finished_run_is_offered_no_stage():
    config = tiny_config()
    with pytest.raises(UserError, match="the config it was made with.$"):
        check_same(frozen(config) | {"seed": 7}, config, "there", config.train.num_steps)


def test_fields_of_another_version_of_the_code_are_named(tmp_path):
    config = tiny_config()
    old = frozen(config)
    old["rollout"]["gone"] = 3
    del old["rollout"]["min_p"]
    with pytest.raises(UserError) as raised:
        check_same(old, config, "there", 1)
    assert "config.rollout.gone: 3 there, no such field now" in str(raised.value)
    assert "config.rollout.min_p: no such field there, 0.0 now" in str(raised.value)


@pytest.mark.parametrize("text", ['{"config": null}', '{"config": []}', "[]", '{"config": {}}'])
def test_a_file_that_is_no_config_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match="config.json cannot be read"):
        RunDirectory(tmp_path, tiny_config())


def test_the_config_of_a_supervised_run_is_named(tmp_path):
    """Its directory is none of a run of launch/train.py."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"config": {"model": {}, "data": {}, "train": {}}}))
    with pytest.raises(ValueError, match=r"that of launch/sft\.py.* in model/"):
        read_config(file)


def test_a_run_whose_checkpoints_are_missing_is_not_started_again(tmp_path):
    """A storage that is not mounted, or a copy without them."""
    directory = RunDirectory(begun(tmp_path / "run", steps=range(3)), tiny_config())
    directory.check_never_saved("PLACE")  # it was killed before a checkpoint was complete
    with Checkpoints(
        tmp_path / "place", keep_newest=1, keep_best=0, completed=directory.note_saved
    ) as checkpoints:
        checkpoints.save(2, {"w": jax.numpy.zeros(2)}, None, accuracy=None)
    with pytest.raises(UserError, match="up to step 2, .* and PLACE has none of them.*Mount"):
        directory.check_never_saved("PLACE")
    moved = RunDirectory(tmp_path / "new", tiny_config())  # of a run whose bucket has checkpoints
    moved.check_never_saved("PLACE")
    moved.rewind(0)
    with pytest.raises(UserError, match="up to step 0, .* and PLACE has none of them"):
        moved.check_never_saved("PLACE")
    for opened in (directory, moved):
        opened.close()


@pytest.mark.parametrize(
    "last, summary, refused", [(4, False, False), (5, False, True), (1, True, True)]
)
def test_a_run_of_an_earlier_version_whose_checkpoints_are_missing(
    tmp_path, last, summary, refused
):
    """It has no file that says whether it saved."""
    settings = {"checkpoint__every_steps": 2, "train__num_steps": 9}
    begun(tmp_path, steps=range(last + 1), **settings)
    if summary:
        (tmp_path / "summary.json").write_text("{}")
    expected = pytest.raises(UserError, match=f"up to step {last}, .* and PLACE has none of them")
    with expected if refused else contextlib.nullcontext():
        RunDirectory(tmp_path, tiny_config(**settings)).check_never_saved("PLACE")


def test_one_process_trains_in_a_directory(tmp_path, monkeypatch):
    code = (
        "import sys, pathlib; from dapo_jax.runs import run_directory\n"
        f"run_directory._lock(pathlib.Path({str(tmp_path)!r}), print)\n"
        "print('held', flush=True); sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    holder = subprocess.Popen([sys.executable, "-c", code], text=True, **pipes)
    with holder:
        assert holder.stdout is not None and holder.stdin is not None
        assert holder.stdout.readline() == "held\n"
        monkeypatch.setattr(run_directory, "LOCK_SECONDS", 0.1)
        said = []
        with pytest.raises(UserError, match=rf"another process trains in .*process {holder.pid} "):
            RunDirectory(tmp_path, tiny_config(), say=said.append)
        assert len(said) == 1 and "waiting for its end" in said[0]
        assert not (tmp_path / "config.json").exists()
        monkeypatch.setattr(run_directory.socket, "gethostname", lambda: "another")
        RunDirectory(tmp_path, tiny_config(), say=said.append).close()
        assert f"still locked by process {holder.pid} on" in said[-1]
        holder.stdin.close()
    RunDirectory(tmp_path, tiny_config()).close()


def test_the_users_of_a_group_share_a_run_and_others_are_named_its_lock(tmp_path, monkeypatch):
    before = os.umask(0o002)
    try:
        RunDirectory(tmp_path, tiny_config()).close()
    finally:
        os.umask(before)
    assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o664

    def closed(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(run_directory.os, "open", closed)
    with pytest.raises(UserError, match="lock cannot be written to: another user made it.*chmod"):
        run_directory._lock(tmp_path, print)


def test_a_run_past_the_last_step_is_left_as_it_is(tmp_path):
    before = files_of(begun(tmp_path))
    with pytest.raises(UserError, match=r"num_steps is 2, and the run in .* is past it, at step 3"):
        RunDirectory(tmp_path, tiny_config(train__num_steps=2))
    assert files_of(tmp_path) == before


def test_responses_that_are_written_are_spread_over_the_groups_of_a_step(tmp_path):
    groups = [make_group([True, False, True], id=i) for i in range(4)]
    rewards = [[i + 0.5, i, i] for i in range(4)]
    directory = RunDirectory(tmp_path, tiny_config())

    def written(most):
        directory.save_rollouts(3, groups, rewards, most)
        lines = (tmp_path / "rollouts" / "step_000003.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    for most, ids in ((2, "01"), (4, "0123"), (9, "00112233"), (100, "000111222333")):
        assert "".join(str(record["problem_id"]) for record in written(most)) == ids
    second = [(r["response"], r["reward"], r["correct"]) for r in written(9)[2:4]]
    assert second == [("text 0", 1.5, True), ("text 1", 1.0, False)]
    directory.close()


def test_responses_to_held_out_problems_are_spread_and_rewound(tmp_path):
    verdicts = [Verdict(True, 1.0), Verdict(False, -1.0)]
    groups = [
        Attempts(
            Problem(i, f"prompt {i}", (), "7", "sums" if i < 8 else "words"),
            tuple(Attempt(f"text {i} {j}", 5, j == 1, v) for j, v in enumerate(verdicts)),
        )
        for i in range(22)
    ]
    directory = RunDirectory(tmp_path, tiny_config())
    for step in (0, 3, 6):
        directory.save_heldout(step, groups)
        directory.save_rollouts(step, [make_group([True])], [[1.0]], 1)
        directory.save_pass_rates(step, [[7, 0, 1, 4]])
    directory.save_summary({"seconds": 1.0})
    directory.rewind(3)
    directory.close()
    assert not (tmp_path / "summary.json").exists(), "the run has not ended any more"
    lines = (tmp_path / "pass_rates.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 3]
    rollouts = sorted(file.name for file in (tmp_path / "rollouts").iterdir())
    assert rollouts == ["step_000000.jsonl", "step_000003.jsonl"]
    files = sorted((tmp_path / "heldout").iterdir())
    assert [file.name for file in files] == ["step_000000.jsonl", "step_000003.jsonl"]
    records = [json.loads(line) for line in files[1].read_text().splitlines()]
    assert [record["problem_id"] for record in records] == [0, 3, 6, 9, 12, 15, 18, 21]
    assert records[-1] == {
        "step": 3, "problem_id": 21, "source": "words", "prompt": "prompt 21", "answer": "7",
        "response": "text 21 0", "correct": True, "accuracy": 0.5, "length": 5,
        "finish_reason": "stop", "note": "",
    }  # fmt: skip
    RunDirectory(tmp_path / "other", tiny_config(), writes=False).save_heldout(0, groups)
    assert not (tmp_path / "other").exists()


def test_steps_that_were_not_saved_are_not_in_the_way(tmp_path):
    """A kill left metrics of steps that the run makes again."""
    begun(tmp_path)
    (tmp_path / "checkpoints" / "1").mkdir(parents=True)
    RunDirectory(tmp_path, tiny_config(train__num_steps=2))


def test_lines_that_are_no_text_are_dropped(tmp_path):
    """A file system that lost its last block leaves any bytes."""
    begun(tmp_path)
    for name in ("metrics.jsonl", "pass_rates.jsonl"):
        with (tmp_path / name).open("ab") as file:
            file.write(b"\xff\xfe\n")
    directory = RunDirectory(tmp_path, tiny_config())
    directory.rewind(2)
    directory.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2]
    assert (tmp_path / "pass_rates.jsonl").read_text() == ""


@pytest.mark.parametrize("mounted", [False, True])
def test_a_run_ends_whose_directory_was_moved(tmp_path, mounted):
    directory = RunDirectory(tmp_path / "run", tiny_config())
    directory.rewind(-1)
    directory.log({"step": 0})
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    if mounted:  # the empty directory that a storage was mounted on is there still
        (tmp_path / "run").mkdir()
    with pytest.raises(RunError, match="run was moved, deleted or unmounted.* Restore it"):
        directory.log({"step": 1})
    directory.close()
    assert (tmp_path / "elsewhere" / "metrics.jsonl").read_text() == '{"step": 0}\n'


@pytest.mark.parametrize(
    "name, remedy",
    [
        ("reward/mean", "look at what config.reward.scorer returns"),
        ("advantage/mean", "look at what config.reward.scorer returns"),
        ("policy/loss", "a lower config.optimizer.learning_rate"),
    ],
)
def test_a_metric_that_is_not_finite_ends_the_run(tmp_path, name, remedy):
    directory = RunDirectory(tmp_path, tiny_config())
    directory.rewind(-1)
    with pytest.raises(RunError, match=f"{name} is nan at step 3.* {remedy}"):
        directory.log({"step": 3, name: float("nan")})
    directory.close()


def test_metrics_are_on_the_disk_before_a_checkpoint_is(tmp_path, monkeypatch):
    """A machine that loses its power keeps what was synchronised: the whole line."""
    directory = RunDirectory(tmp_path, tiny_config(log__trackers=()))
    directory.rewind(-1)
    kept, file = [], tmp_path / "metrics.jsonl"
    monkeypatch.setattr(run_directory.os, "fsync", lambda _: kept.append(file.read_text()))
    directory.log({"step": 0})
    directory.log({"step": 1})
    directory.close()
    assert kept == ['{"step": 0}\n', '{"step": 0}\n{"step": 1}\n']


def test_a_file_that_cannot_be_written_whole_stays_as_it_was(tmp_path, monkeypatch):
    """A run that resumes on a full disk keeps the metrics that it had."""
    begun(tmp_path)
    directory = RunDirectory(tmp_path, tiny_config())
    before, write = (tmp_path / "metrics.jsonl").read_text(), Path.write_text

    def full(path, text):
        write(path, text[: len(text) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        for name in ("config.json", "metrics.jsonl"):
            with pytest.raises(OSError, match="No space left"):
                run_directory.write_atomically(tmp_path / name, 100 * "text ")
    assert (tmp_path / "metrics.jsonl").read_text() == before
    assert read_config(tmp_path / "config.json") == frozen(tiny_config())
    directory.rewind(2)
    directory.close()
