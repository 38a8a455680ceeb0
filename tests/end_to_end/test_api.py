"""The public Python interface: a run, its evaluation, export and generation, without sys.argv."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import dapo_jax
from dapo_jax.runs.run_directory import RunDirectory
from dapo_jax.types import UserError
from tests.conftest import ROOT
from tests.support.helpers import SMALL
from tests.support.runs import metrics_of, programs

TINY = "configs/tiny_dapo.py"
SMALL = SMALL | {"train.num_steps": 1, "mesh.data": 8}
SCORER = """
def any_answer(text, answer):
    return "Answer:" in text
"""


@pytest.mark.slow
def test_a_run_from_config_to_text(tmp_path, home, monkeypatch, standard_promotion):
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    monkeypatch.setattr(sys, "argv", ["a notebook"])
    jax.config.update("jax_compilation_cache_dir", programs(home))
    (tmp_path / "own.py").write_text(SCORER)
    scorer = f"{tmp_path / 'own.py'}:any_answer"
    workdir = tmp_path / "run"
    config = dapo_jax.load_config(TINY, SMALL | {"reward.scorer": scorer})

    log = RunDirectory.log

    def log_and_interrupt(self, metrics):
        log(self, metrics)
        os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "log", log_and_interrupt)
        with pytest.raises(KeyboardInterrupt, match="the same call resumes"):
            dapo_jax.train(config, workdir)
    (first,) = metrics_of(workdir)
    run = dapo_jax.train(config, workdir)
    assert run.workdir == workdir and run.summary["steps"] == 1
    assert [numbers["step"] for numbers in run.metrics] == [0, 1]
    assert first.items() < run.metrics[0].items()  # which has times, too

    asked = dict(num_samples=2, num_problems=4, top_p=1.0)
    found = dapo_jax.evaluate(config, workdir, scorer="exact_match", **asked)
    assert found.directory.is_relative_to(workdir)
    assert found.results == json.loads((found.directory / "results.json").read_text())
    assert found.results["sums"]["problems"] == 4
    assert 0 <= found.results["sums"]["avg@2"]["value"] <= 1  # the key of docs/api.md

    assert dapo_jax.report(workdir) == workdir / "report.html"
    model = dapo_jax.export(workdir, tmp_path / "hf")
    prompts = ["Add: a=7 b=9 c=4\n", [1, 2, 3]]
    texts = dapo_jax.generate(model, prompts, num_samples=2, max_new_tokens=4)
    assert [text["prompt"] for text in texts] == prompts
    assert all(len(text["samples"]) == 2 for text in texts)
    answers = [{"prediction": "Answer: 3", "answer": 3}, {"prediction": "3", "answer": 3, "id": 7}]
    verdicts = dapo_jax.score(scorer, answers)
    assert [verdict["correct"] for verdict in verdicts] == [True, False]
    assert verdicts[1]["id"] == 7


@pytest.mark.slow
def test_the_loop_of_the_guide_runs(tmp_path, home, monkeypatch, capsys, standard_promotion):
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    monkeypatch.chdir(tmp_path)
    section = (ROOT / "docs" / "api.md").read_text().split("## A loop of your own\n")[1]
    lines = section.split("\n## ")[0].splitlines()
    code = "\n".join(line[4:] for line in lines if line.startswith("    "))
    load = dapo_jax.load_config
    monkeypatch.setattr(dapo_jax, "load_config", lambda file: load(file, SMALL))
    exec(code, {"__name__": "__main__"})
    assert [line[0] for line in capsys.readouterr().out.splitlines()[-2:]] == ["1", "2"]


def test_a_config_file_may_be_a_path():
    assert dapo_jax.load_config(Path(TINY)) == dapo_jax.load_config(TINY)


def test_mistakes_are_named():
    with pytest.raises(UserError, match=r"config.train.steps is not a field"):
        dapo_jax.load_config(TINY, {"train.steps": 1})
    with pytest.raises(UserError, match=r"config.train.num_steps must be int; got '3'"):
        dapo_jax.load_config(TINY, {"train.num_steps": "3"})
    with pytest.raises(UserError, match="record 0: no \"answer\"; it has 'prediction'"):
        dapo_jax.score("exact_match", [{"prediction": "3"}])
    with pytest.raises(UserError, match=r"a scorer is named: built in, or 'path/to/file\.py"):
        dapo_jax.score(lambda text, answer: True, [])
    with pytest.raises(UserError, match=r"from dapo_jax\.load_sft_config; got a Config"):
        dapo_jax.sft(dapo_jax.load_config(TINY), "none")
    with pytest.raises(UserError, match=r"from dapo_jax\.load_config; got a dict"):
        dapo_jax.train({"seed": 1}, "none")
    with pytest.raises(UserError, match="--program must be one of train"):
        dapo_jax.plan(dapo_jax.load_config(TINY), "local", program="none")


@pytest.mark.parametrize(
    "call, name",
    [
        (lambda: dapo_jax.generate("none", "Add: a=1\n"), "prompts"),
        (lambda: dapo_jax.generate("none", ["Add: a=1\n"], stop="\n\n"), "stop"),
        (lambda: dapo_jax.report("none", "other"), "compare"),
        (lambda: dapo_jax.diagnose("none", "other"), "compare"),
        (lambda: dapo_jax.fit_curves("none", "other"), "compare"),
        (
            lambda: dapo_jax.evaluate(dapo_jax.load_config(TINY), "none", benchmarks="gsm8k"),
            "benchmarks",
        ),
    ],
)
def test_one_text_is_no_list(call, name):
    with pytest.raises(UserError, match=f"^{name} must be a list; got '"):
        call()


def test_the_import_is_cheap():
    """Also for the processes that score."""
    code = "import dapo_jax, sys; print({'jax', 'numpy', 'absl'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert found.stdout == "set()\n", found.stderr
