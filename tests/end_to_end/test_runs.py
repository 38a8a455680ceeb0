"""Whole runs: they repeat, they resume bit for bit, and devices do not matter."""

import dataclasses
import gzip
import json
import re
import shutil
import signal
import time
from typing import Any

import jax
import numpy as np
import pytest
from transformers import AutoTokenizer, GenerationConfig

from dapo_jax import train_loop
from dapo_jax.config import Config
from dapo_jax.data.tokenizer import load_tokenizer
from dapo_jax.distributed.process_group import EXIT_RESTART
from dapo_jax.models import hf_weights
from dapo_jax.models.sharding import make_mesh, param_shardings
from dapo_jax.runs.run_directory import RunDirectory
from dapo_jax.training import pretrain
from dapo_jax.types import RunError, UserError
from tests.conftest import ROOT
from tests.models.test_hf_weights import config_of
from tests.studies import fuzz_configs
from tests.support.helpers import tiny_config
from tests.support.runs import (
    finish,
    load_launcher,
    metrics_of,
    params_at,
    rollouts_of,
    run,
    run_here,
    start,
    write_config,
)

STEPS = 6
evaluation, exporting, training = map(load_launcher, ("evaluate", "export", "train"))
RUN = {
    "train__num_steps": STEPS,
    "evaluation__every_steps": 3,
    "evaluation__top_p": 0.7,
    "checkpoint__every_steps": 3,
    "checkpoint__keep_newest": 20,
    "data__train__sums__num_problems": 20,
}
CARRY = {
    "rollout__max_staleness": 2,
    "evaluation__top_p": 1.0,
    "train__num_steps": 5,
    # Steps far enough apart that tokens of the older policy would show in the mismatch.
    "optimizer__learning_rate": 1e-3,
    "optimizer__warmup_steps": 0,
}
WITHOUT_FILTER = {"dynamic_sampling__enabled": False, "evaluation__top_p": 1.0}


@pytest.fixture(scope="module")
def finished(tmp_path_factory, home):
    """The directory of an undisturbed run, and what it printed."""
    workdir = tmp_path_factory.mktemp("runs") / "undisturbed"
    write_config(workdir.with_name("undisturbed_config"), **RUN)  # for launch/evaluate.py
    return workdir, run_here(workdir, home, page=True, **RUN)[1]


def test_a_run_leaves_what_it_promises(finished):
    workdir, out = finished
    summary = json.loads((workdir / "summary.json").read_text())
    assert summary["steps"] == STEPS and 0 <= summary["base_accuracy"] <= 1
    steps = metrics_of(workdir)
    assert [numbers["step"] for numbers in steps] == list(range(STEPS + 1))
    assert summary["final_accuracy"] == steps[-1]["eval/avg@4"]
    assert summary["base_accuracy"] == steps[0]["eval/avg@4"]
    frozen = json.loads((workdir / "config.json").read_text())
    assert Config.from_dict(frozen["config"]) == tiny_config(**RUN)
    assert frozen["versions"]["jax"] == jax.__version__
    for name in ("report.html", "report.png", "tokenizer/tokenizer.json", "tensorboard"):
        assert (workdir / name).exists(), name
    assert len(rollouts_of(workdir)) == STEPS
    evaluated = [f"step_{n['step']:06d}.jsonl" for n in steps if "eval/avg@4" in n]
    assert sorted(rollouts_of(workdir, "heldout")) == evaluated
    for word in ("base model", "reward", "left", "held-out accuracy", "report.html"):
        assert word in out


REQUIRED_METRICS = """
    reward/mean accuracy/sampled accuracy/trained sampling/prompts_tried
    sampling/prompts_kept sampling/prompts_all_right sampling/prompts_all_wrong
    length/mean length/max length/truncated_share policy/entropy policy/token_prob
    policy/clip_high_share policy/clip_low_share policy/ratio_max policy/ratio_min policy/kl_old
    rollout/log_prob_mismatch_mean rollout/log_prob_mismatch_max
    optimizer/grad_norm optimizer/learning_rate
    batch/tokens_trained batch/padding_share time/rollout time/reward time/update time/checkpoint
    time/step perf/tokens_per_second
""".split()


def assert_documented(steps):
    documented = (ROOT / "docs" / "metrics.md").read_text()
    for name in set().union(*steps) - {"step"}:
        known = name.replace("@4", "@k")
        assert f"`{known}`" in documented, f"{known} is not in docs/metrics.md"


def test_every_step_with_an_update_has_every_metric(finished):
    steps = [
        json.loads(line) for line in (finished[0] / "metrics.jsonl").read_text().splitlines()[1:]
    ]
    trained = [numbers for numbers in steps if numbers["sampling/prompts_kept"]]
    assert trained
    for numbers in trained:
        assert not set(REQUIRED_METRICS) - set(numbers)
        assert numbers["rollout/log_prob_mismatch_max"] < 1e-5
    assert ["time/evaluation" in numbers for numbers in steps] == 2 * [False, False, True]
    assert_documented(steps)


def test_all_compiles_before_the_first_step(finished):
    steps = [json.loads(line) for line in (finished[0] / "metrics.jsonl").read_text().splitlines()]
    counts = [numbers["perf/compilations"] for numbers in steps]
    assert counts[0] > 0, "the counter counts nothing"
    assert counts[1:] == [0] * STEPS


def stopped_in(step, number, monkeypatch):
    """Has this signal arrive at the beginning of a step."""
    real = train_loop.TrainLoop.one_step

    def one_step(loop, state):
        if state.step + 1 == step:
            signal.raise_signal(number)
        return real(loop, state)

    monkeypatch.setattr(train_loop.TrainLoop, "one_step", one_step)


def test_a_second_run_stopped_three_times_is_the_same_bit_for_bit(
    finished, tmp_path, home, monkeypatch
):
    """Two runs of one seed are the same, and a resumed run equals one that never stopped."""
    workdir = tmp_path / "stopped"
    undisturbed = metrics_of(finished[0])
    for step, number in ((3, signal.SIGTERM), (6, signal.SIGINT)):
        with monkeypatch.context() as patch:
            stopped_in(step, number, patch)
            stopped_by, out = run_here(workdir, home, **RUN)
        assert stopped_by == number and f"stopped after step {step - 1}; the same command" in out
        assert ("resuming after step" in out) == (step > 3)
        assert metrics_of(workdir) == undisturbed[:step]
        assert (workdir / "checkpoints" / str(step - 1)).exists(), "a signal saves first"
        assert not (workdir / "summary.json").exists()
        if step == 3:  # a process of its own, killed
            process, file = start(workdir, home, **RUN), workdir / "metrics.jsonl"
            while process.poll() is None and file.read_text().count("\n") <= 4:
                time.sleep(0.005)
            process.kill()
            assert finish(process)[0] == -signal.SIGKILL
            done = len(metrics_of(workdir))
            assert 4 < done <= STEPS and metrics_of(workdir) == undisturbed[:done]
    assert "resuming after step 5" in run_here(workdir, home, **RUN)[1]
    assert metrics_of(workdir) == undisturbed
    for name in ("rollouts", "heldout"):
        assert rollouts_of(workdir, name) == rollouts_of(finished[0], name)
    ours, theirs = params_at(workdir, STEPS, **RUN), params_at(finished[0], STEPS, **RUN)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.usefixtures("standard_promotion")
def test_a_stop_while_the_base_is_made(tmp_path, home, monkeypatch, capsys):
    """Before the first step there is nothing to save: the same command starts again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    monkeypatch.setattr(
        pretrain, "make_base", lambda *arguments: arguments[-1](1, signal.raise_signal(15) or 0.0)
    )
    config = write_config(tmp_path / "config", **RUN | {"seed": 5})
    arguments = ["program", f"--config={config}", f"--workdir={tmp_path / 'run'}"]
    assert training(arguments) == 128 + signal.SIGTERM
    assert "stopped while starting" in capsys.readouterr().out


@pytest.mark.slow
def test_eight_devices_train_as_one(tmp_path, home, finished):
    """The same rewards, and the same parameters to 1e-5 after 3 steps, sharded 2 x 2 x 2.

    With the usual eps of 1e-8 Adam makes whole steps of the rounding of a gradient that is 0.
    """
    settings = RUN | {"train__num_steps": 3, "optimizer__eps": 1e-6}
    eight = {"mesh__data": 2, "mesh__context": 2, "mesh__tensor": 2}
    first, workdir = tmp_path / "one", tmp_path / "eight"
    for place in (first, workdir):
        shutil.copytree(finished[0] / "base", place / "base")  # the same base to the last bit
    run_here(first, home, **settings)
    run_here(workdir, home, devices=8, **settings | eight)
    for ours, theirs in zip(metrics_of(first)[1:], metrics_of(workdir)[1:], strict=True):
        for name in ("reward/mean", "accuracy/sampled", "length/mean", "batch/tokens_trained"):
            assert ours.get(name) == theirs.get(name), (ours["step"], name)
    a, b = params_at(first, 3, **settings), params_at(workdir, 3, **settings)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), a, b)
    assert rollouts_of(workdir) == rollouts_of(first)


def evaluate(finished, output, *arguments):
    """The exit status of launch/evaluate.py."""
    config = finished[0].with_name("undisturbed_config") / "a_config.py"
    common = [f"--config={config}", f"--workdir={finished[0]}", f"--output={output}"]
    return evaluation(["program", *common, *arguments])


def test_an_evaluation_by_itself(finished, tmp_path, capsys):
    """It repeats by its seed, and resumes with the problems that are left."""
    place, again = tmp_path / "evaluation", tmp_path / "again"
    assert evaluate(finished, place, "--num_samples=8", "--step=3") == 0
    results = json.loads((place / "results.json").read_text())["sums"]
    assert results["problems"] == 8 and results["samples"] == 8
    out, err = capsys.readouterr()
    assert err == ""
    for name in ("avg@8", "cons@8", "pass@1", "pass@8", "no answer found"):
        assert name in out
    lines = (place / "sums.jsonl").read_text().splitlines(keepends=True)
    assert len(lines) == 8
    again.mkdir()
    shutil.copy(place / "settings.json", again)
    (again / "sums.jsonl").write_text(lines[6] + lines[1])
    assert evaluate(finished, again, "--num_samples=8", "--step=3") == 0
    assert "sums: 2 of 8 problems were done before" in capsys.readouterr().out
    assert (again / "sums.jsonl").read_text() == "".join(lines)
    assert json.loads((again / "results.json").read_text())["sums"] == results


def test_an_evaluation_of_training_problems_begins_the_pass_rates_of_a_run(
    finished, tmp_path, home
):
    place = tmp_path / "rates"
    arguments = "--benchmarks=train/sums", "--num_samples=2", "--num_problems=12", "--step=6"
    assert evaluate(finished, place, *arguments) == 0
    (file,) = place.glob("*.jsonl")
    samples = {
        record["prompt"]: [sample["correct"] for sample in record["samples"]]
        for record in map(json.loads, file.read_text().splitlines())
    }
    assert len(samples) == 12 and all(len(of_prompt) == 2 for of_prompt in samples.values())
    _, out = run_here(
        tmp_path / "run",
        home,
        **RUN | {"train__num_steps": 1, "evaluation__every_steps": 1},
        data__train__sums__pass_rates=str(file),
        data__pass_rate_band=(0.0, 0.5),
    )
    assert "train.sums: pass rates of 12 of 20 problems" in out
    lines = (tmp_path / "run" / "pass_rates.jsonl").read_text().splitlines()
    before = json.loads(lines[0])["visits"]
    expected = [[-1, sum(correct), 2] for correct in samples.values()]
    assert sorted(visit[1:] for visit in before) == sorted(expected)
    solved = {visit[0] for visit in before if visit[2] > 0}
    tried = {visit[0] for line in lines[1:] for visit in json.loads(line)["visits"]}
    assert solved and not solved & tried and len(tried) >= 4


@pytest.mark.parametrize(
    "argument, message",
    [
        ("--step=4", "has no checkpoint 4; it has 0, 3, 6"),
        ("--step=6", "model was '.*, step 3' and is '.*, step 6' now. Choose another --output"),
        ("--benchmarks=train/nope", "train/nope is not a source of the config, train/sums"),
        ("--benchmarks=nope", "there is no file .*nope.* one of dapo-math-17k, aime24"),
        ("--top_p=0", r"--top_p must be in \(0, 1\].* got 0"),
        ("--model=x", "config.model.path: there is no directory .*x. Give a directory"),
        ("--config.model.hidden_size=64", "config.model.hidden_size is 64, and 32 in"),
        ("--scorer=5 * ", "--scorer=5 . : .* is not a scorer"),
        ("--scorer=nosuch", "error: --scorer: 'nosuch' is not one of exact_match"),
        ("--num_samples=0", "--num_samples must be above 0; got 0"),
        ("--seed=4294967296", r"--seed must be from 0 to 2\*\*32 - 1.* got 4294967296"),
    ],
)
def test_a_wrong_evaluation_is_an_error(finished, tmp_path, capsys, argument, message):
    (tmp_path / "settings.json").write_text(json.dumps({"model": f"{finished[0].name}, step 3"}))
    assert evaluate(finished, tmp_path, argument) == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err and re.search(message, err), err


def test_an_exported_checkpoint_is_read_again(finished, tmp_path, capsys):
    """The run's own parameters, bit for bit, with the files that other tools need."""
    out = tmp_path / "hf"
    arguments = ["program", f"--workdir={finished[0]}", f"--output={out}", "--step=3"]
    assert exporting(arguments) == 0
    assert "step 3: 0.1 MB in float32" in capsys.readouterr().out
    names = {file.name for file in out.iterdir()}
    assert names >= {"config.json", "generation_config.json", "model.safetensors", "README.md"}
    assert AutoTokenizer.from_pretrained(out).eos_token == "<eos>"
    said = GenerationConfig.from_pretrained(out)
    assert said.do_sample and (said.temperature, said.top_p, said.top_k) == (1.0, 0.7, 0)
    config = config_of(out)
    ours, theirs = (
        load_tokenizer(dataclasses.replace(config.model, tokenizer=str(place)))("Add: a=8 b=9\n")
        for place in (finished[0] / "tokenizer", out)
    )
    assert ours.input_ids == theirs.input_ids
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    loaded = hf_weights.load(config.model, param_shardings(config.model, config.mesh, mesh))
    ours = params_at(finished[0], 3, **RUN)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(loaded), ours)
    for flag, message in (("--dtype=float16", "float16 must be"), ("--adapter", "lora_rank 0")):
        assert exporting([*arguments, flag]) == 2 and message in capsys.readouterr().err
    assert exporting(arguments) == 2 and "is not empty" in capsys.readouterr().err
    arguments = ["program", f"--workdir={tmp_path}", f"--output={tmp_path / 'x'}"]
    assert exporting(arguments) == 2 and "holds no run" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"config": {"seed": 0, "train": {}}}')
    assert exporting(arguments) == 2 and "--model takes its directory" in capsys.readouterr().err


def test_a_run_of_an_earlier_version_is_exported(finished, tmp_path, capsys):
    """Where a later version refuses a relation between fields; a field that is gone is named."""
    workdir = tmp_path / "earlier"
    shutil.copytree(finished[0], workdir)
    frozen = json.loads((workdir / "config.json").read_text())
    frozen["config"]["train"]["row_tokens"] = 8
    (workdir / "config.json").write_text(json.dumps(frozen))
    assert exporting(["program", f"--workdir={workdir}", f"--output={tmp_path / 'hf'}"]) == 0
    assert (tmp_path / "hf" / "README.md").exists()
    frozen["config"]["train"]["gone"] = 1
    (workdir / "config.json").write_text(json.dumps(frozen))
    assert exporting(["program", f"--workdir={workdir}", f"--output={tmp_path / 'x'}"]) == 2
    err = capsys.readouterr().err
    assert "config.train.gone is not a field" in err and "git_commit" in err


def test_a_finished_run_that_is_started_again_took_no_longer(finished, tmp_path, home):
    workdir = tmp_path / "again"
    shutil.copytree(finished[0], workdir)
    before = json.loads((workdir / "summary.json").read_text())
    run_here(workdir, home, **RUN)
    after = json.loads((workdir / "summary.json").read_text())
    assert 0 < after.pop("seconds") <= before.pop("seconds") and after == before


@pytest.mark.slow
def test_a_run_of_more_steps_resumes_before_a_damaged_checkpoint(finished, tmp_path, home):
    """6 steps, then 7, is a run of 7: num_steps may change. One step is traced."""
    workdir = tmp_path / "longer"
    shutil.copytree(finished[0], workdir)
    for file in (workdir / "checkpoints" / str(STEPS) / "arrays").rglob("d/*"):
        file.write_bytes(b"\0" * file.stat().st_size)
    longer = {"train__num_steps": STEPS + 1, "log__profile_steps": (5,)}
    _, out = run_here(workdir, home, **RUN | longer)
    assert f"checkpoint {STEPS}" in out and "is damaged" in out
    assert f"resuming after step {STEPS - 3} of {STEPS + 1}" in out
    assert metrics_of(workdir)[: STEPS + 1] == metrics_of(finished[0])
    assert len(metrics_of(workdir)) == STEPS + 2
    (trace,) = (workdir / "profile" / "step_000005").rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    spans = {event["name"]: event["dur"] for event in events if event.get("ph") == "X"}
    assert spans["rollout step"] > spans["step 5: sampling"] > 0
    assert not (workdir / "profile" / "step_000006").exists()


LOST_VERDICTS = f"""
import runpy, sys
sys.path.insert(0, {str(ROOT)!r})
if __name__ == "__main__":
    from dapo_jax.rewards.pool import RewardPool
    ready = RewardPool.ready
    lost = lambda pending: any(x.endswith(":even") for t in pending.tasks for x in t.scorers)
    RewardPool.ready = lambda self, pending: not lost(pending) and ready(self, pending)
    runpy.run_path({str(ROOT / "launch" / "train.py")!r}, run_name="__main__")
"""


@pytest.mark.slow
def test_a_run_in_which_nothing_moves_ends_and_can_be_started_again(tmp_path, home):
    """The limit holds within a step, and not while the base is evaluated before."""
    settings = RUN | {
        "pretrain__num_steps": 2,
        "reward__scorer": f"{ROOT / 'tests' / 'support' / 'scorers.py'}:even",
        "reward__timeout_seconds": 0.3,
        "data__heldout__sums__scorer": "exact_match",
        "rollout__watchdog_limit_seconds": 3.0,
    }
    program = tmp_path / "hangs.py"
    program.write_text(LOST_VERDICTS)
    code, _, err = finish(start(tmp_path / "run", home, program=program, **settings))
    assert code == EXIT_RESTART, err
    assert "waiting for reward workers" in err and "resumes from the last checkpoint" in err
    assert len(metrics_of(tmp_path / "run")) == 1


def test_another_config_is_refused_and_nothing_changes(finished, home):
    before = (finished[0] / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match=r"optimizer.learning_rate: 0.0001 there, 0.5 now"):
        run_here(finished[0], home, **RUN | {"optimizer__learning_rate": 0.5})
    assert (finished[0] / "metrics.jsonl").read_bytes() == before


def test_recomputed_log_probs_reference_filter_and_stop_strings(tmp_path, home):
    """The scoring program equals the rollout, the base model is the reference, and a response ends
    with its stop string."""
    switches = {
        "rollout__log_prob_source": "recompute",
        "objective__kl_coefficient": 0.1,
        "objective__kl_estimator": "k3",
        "objective__overlong_filter": True,
        "rollout__stop_strings": ("=",),
        "train__num_steps": 2,
    }
    run_here(tmp_path / "run", home, **RUN | WITHOUT_FILTER | switches)
    steps = metrics_of(tmp_path / "run")[1:]
    assert all(numbers["rollout/log_prob_mismatch_max"] < 1e-5 for numbers in steps)
    assert all(numbers["policy/kl_ref"] > 0 for numbers in steps)
    assert all(numbers["optimizer/updates"] == 2 for numbers in steps)
    texts = rollouts_of(tmp_path / "run").values()
    written = [json.loads(line) for text in texts for line in text.splitlines()]
    stopped = [record for record in written if "=" in record["response"]]
    assert stopped and all(record["finish_reason"] == "stop" for record in stopped)
    assert all(record["response"].find("=") + 1 == len(record["response"]) for record in stopped)


def test_responses_that_repeat_themselves_end_in_training_alone(tmp_path, home):
    switches = {
        "objective__overlong_filter": True,
        "objective__advantage": "remax",
        "rollout__end_repetition": 3,
        "rollout__temperature": 0.1,  # sure of its tokens
        "evaluation__temperature": 0.1,
        "train__num_steps": 1,
        "log__rollouts_per_step": 100,
    }
    run_here(tmp_path / "run", home, **RUN | WITHOUT_FILTER | switches)
    of = lambda kind: [
        json.loads(line)
        for text in rollouts_of(tmp_path / "run", kind).values()
        for line in text.splitlines()
    ]
    reasons = [record["finish_reason"] for record in of("rollouts")]
    step = metrics_of(tmp_path / "run")[1]
    assert step["rollout/ended_repetition"] == reasons.count("repetition") / len(reasons) > 0
    assert step["length/truncated_share"] == reasons.count("length") / len(reasons)
    trained = [r["length"] for r in of("rollouts") if r["finish_reason"] == "stop"]
    assert step["batch/tokens_trained"] == sum(trained)
    assert_documented([step])
    assert {r["finish_reason"] for r in of("heldout")} == {"stop"}, "as sure of its tokens"


@pytest.mark.slow
def test_thinking_is_ended_in_training_and_evaluation(tmp_path, home, monkeypatch):
    """The phrase is scored and counts in lengths, and is not trained. The run carries responses,
    and repeats its second step where it resumes after the first."""
    workdir, n = tmp_path / "run", 5
    settings: dict[str, Any] = RUN | CARRY | {"dynamic_sampling__enabled": False}
    settings |= {
        "rollout__end_of_thinking": (n, "\nAnswer: "),
        "train__num_steps": 2,
        "checkpoint__every_steps": 1,
    }
    answer = load_tokenizer(tiny_config().model).encode("\nAnswer: ")
    groups, real = {}, RunDirectory.save_rollouts  # by step

    def save(self, step, sampled, *more):
        groups[step] = sampled
        return real(self, step, sampled, *more)

    monkeypatch.setattr(RunDirectory, "save_rollouts", save)
    run_here(workdir, home, **settings)

    def num_given(response):
        tokens = response.tokens.tolist()
        if len(tokens) <= n or answer[-1] in tokens[:n]:
            assert response.sampled.all()
            return 0
        assert tokens[n : n + 2] == answer and "\nAnswer: " in response.text
        assert len(tokens) > n + 2 and np.flatnonzero(~response.sampled).tolist() == [n, n + 1]
        return 2

    steps = metrics_of(workdir)[1:]
    assert_documented([{re.sub(r"/\d$", "/AGE", name): 0 for name in step} for step in steps])
    for step in steps:
        responses = [r for group in groups[step["step"]] for r in group.responses]
        given = [num_given(r) for r in responses]
        assert step["rollout/ended_thinking"] == given.count(2) / len(given) > 0.2
        lengths = [len(r.tokens) for r in responses]
        assert step["length/mean"] == pytest.approx(np.mean(lengths))
        assert step["batch/tokens_trained"] == sum(lengths) - sum(given)
    assert steps[0]["rollout/log_prob_mismatch_max"] < 1e-5
    assert steps[1]["carry/tokens_resumed"] > 0
    written = "".join(rollouts_of(workdir, "heldout").values())
    heldout = [json.loads(line) for line in written.splitlines()]
    longer = [record["response"] for record in heldout if record["length"] > n + 2]
    assert longer and all("Answer: " in text for text in longer)
    resumed = tmp_path / "resumed"
    shutil.copytree(workdir, resumed)
    shutil.rmtree(resumed / "checkpoints" / "2")
    assert "resuming after step 1 of 2" in run_here(resumed, home, **settings)[1]
    assert metrics_of(resumed) == metrics_of(workdir)
    assert rollouts_of(resumed) == rollouts_of(workdir)


@pytest.mark.slow
def test_carried_responses_are_trained_on_and_a_killed_run_is_the_same(tmp_path, home):
    """An update has tokens of several policies; those of the older are not in the mismatch. The
    run that is killed also evaluates between all steps, while responses are in flight."""
    workdir, settings = tmp_path / "run", RUN | CARRY | {"checkpoint__every_steps": 1}
    run(workdir, home, **settings)
    steps = metrics_of(workdir)[1:]
    assert sum(numbers["carry/tokens_resumed"] for numbers in steps) > 0
    assert sum(numbers["optimizer/updates"] for numbers in steps) >= 6
    assert max(numbers.get("rollout/log_prob_mismatch_max", 0.0) for numbers in steps) < 1e-5
    assert 1 <= max(numbers["carry/staleness_max"] for numbers in steps) <= 2
    assert_documented([{re.sub(r"/\d$", "/AGE", name): 0 for name in step} for step in steps])
    killed, settings = tmp_path / "killed", settings | {"evaluation__every_steps": 1}
    process, file = start(killed, home, **settings), killed / "metrics.jsonl"
    while process.poll() is None and not (file.exists() and file.read_text().count("\n") > 3):
        time.sleep(0.005)
    process.kill()
    assert finish(process)[0] == -signal.SIGKILL
    assert "resuming after step" in run(killed, home, **settings)
    trained = lambda workdir: [
        {name: value for name, value in step.items() if not name.startswith("eval/")}
        for step in metrics_of(workdir)
    ]
    assert trained(killed) == trained(workdir)
    assert rollouts_of(killed) == rollouts_of(workdir)
    ours, theirs = (params_at(place, 5, **settings) for place in (killed, workdir))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.slow
def test_divergence_ends_the_run_and_keeps_what_was_saved(tmp_path, home):
    overrides = RUN | WITHOUT_FILTER | {"optimizer__learning_rate": 1e38}
    with pytest.raises(RunError, match=r"all 16 responses were not finite.*learning_rate"):
        run_here(tmp_path / "run", home, **overrides)
    assert (tmp_path / "run" / "checkpoints" / "0").exists()


@pytest.mark.slow
def test_how_a_step_is_computed_does_not_matter(cache_home):
    """For one random config; `python -m tests.studies.fuzz_configs` takes more."""
    assert fuzz_configs.main(["--first=2", "--last=3"]) == 0
