"""Benchmarks of a policy whose answers are known: figures, transcripts, and stops."""

import contextlib
import dataclasses
import itertools
import json
import random
import re
import time
import types

import jax
import numpy as np
import pytest

from dapo_jax.config import SourceConfig
from dapo_jax.data import dataset
from dapo_jax.data.tokenizer import arithmetic_tokenizer
from dapo_jax.evaluation import benchmark_page, benchmarks
from dapo_jax.evaluation.benchmarks import Benchmark
from dapo_jax.rewards.async_scoring import GroupScoring
from dapo_jax.rewards.pool import RewardPool
from dapo_jax.rewards.types import Rubric
from dapo_jax.rollout.admission import GenerationSettings
from dapo_jax.rollout.collector import CollectorOutput, RolloutCollector
from dapo_jax.runs import run_directory
from dapo_jax.tools import evaluate
from dapo_jax.types import Attempt, Problem, Response, StopRequested, UserError, Verdict
from dapo_jax.utils.progress import Progress
from dapo_jax.utils.telemetry import SILENT, Telemetry
from tests.support.helpers import SHARED, source_dict, tiny_config

SETTINGS = {"model": "a stub", "seed": 0}
RUBRIC = Rubric((("math_dapo", 1.0),), 1.0, -1.0)


class StubEngine:
    @contextlib.contextmanager
    def weights(self, params):
        yield params


def make_problems(num):
    return [Problem(i, f"p{i}", (1, 2), str(100 + i), "stub") for i in range(num)]


def answer(problem, sample, num_right):
    """Right in the first `num_right` samples of a problem; wrong ones agree in pairs."""
    if sample < num_right:
        return f"so\nAnswer: {problem.answer}"
    return "no idea" if sample % 5 == 0 else f"Answer: -{sample // 2}"


class Policy(RolloutCollector):
    """A policy whose answers are known, ended in a random order; stopped after `most` of them."""

    def __init__(self, num_samples, num_right, *, seed=0, most=None, text=None):
        self.settings, self.text = GenerationSettings(num_samples), text
        self.num_right, self.seed, self.most = num_right, seed, most
        self.telemetry, self.problems = SILENT, []

    def run(self, prompts, key, *, step=0):
        num = prompts.num_prompts
        self.problems = [prompts.problem(number) for number in range(num)]
        scoring = GroupScoring(
            self.pool, self.rubrics, self.settings.num_samples, step, self.telemetry
        )
        every = list(itertools.product(range(num), range(self.settings.num_samples)))
        random.Random(self.seed).shuffle(every)
        num_done = 0
        for i, (number, sample) in enumerate(every):
            if i == self.most:
                raise StopRequested
            problem = self.problems[number]
            text = self.text or answer(problem, sample, self.num_right(problem.id))
            reason = "length" if sample == 1 else "stop"
            response = Response(np.zeros(len(text), np.int32), np.zeros(0), reason, text)
            scoring.submit([(number, problem, sample, response)])
            groups = list(scoring.completed())
            num_done += len(groups)
            yield CollectorOutput(True, groups, [], False)
        while num_done < num:
            groups = list(scoring.completed())
            num_done += len(groups)
            yield CollectorOutput(False, groups, [], True)


@pytest.fixture(scope="module")
def run():
    """Evaluates a policy in a directory: run(place, policy, num=) -> figures."""
    with RewardPool(RUBRIC.names, workers=1, timeout_seconds=5.0) as pool_of_all:

        def run(place, policy, *, num, all_problems=None, rubric=RUBRIC, pool=pool_of_all):
            benchmarks.open_directory(place, SETTINGS)
            benchmark = Benchmark("stub", all_problems or make_problems(num), rubric)
            policy.pool, policy.rubrics = pool, {"stub": rubric}
            key = jax.random.key(0)
            return benchmarks.run(benchmark, policy, key, place, progress=Progress(0))

        yield run


def lines_of(place):
    return (place / "stub.jsonl").read_text().splitlines()


def by_enumeration(right_QN, k):
    """pass@k as the mean over all subsets of k samples."""
    subsets = list(itertools.combinations(range(right_QN.shape[1]), k))
    return np.mean([[row[list(s)].any() for s in subsets] for row in right_QN])


def test_figures_of_known_answers(run, tmp_path):
    counts = [0, 1, 3, 6]
    figures = run(tmp_path, Policy(6, lambda i: counts[i]), num=4)
    right = np.arange(6) < np.array(counts)[:, None]
    assert figures["avg@6"]["value"] == pytest.approx(10 / 24)
    for k in (1, 2, 4, 6):
        assert figures[f"pass@{k}"]["value"] == pytest.approx(by_enumeration(right, k))
    # Votes. 0 right: no vote. 1 right: -0 (sample 1) abstain at 5 and 0 is right: -1, -1, -2 and
    # one right lose to the pair -1. 3 right: three against -1 and -2. 6 right: all.
    assert figures["cons@6"]["value"] == pytest.approx((0 + 0 + 1 + 1) / 4)
    assert figures["truncated_share"] == pytest.approx(1 / 6)
    assert figures["unparsed_share"] == pytest.approx((2 + 1 + 1 + 0) / 24)
    low, high = figures["avg@6"]["interval"]
    assert low <= 10 / 24 <= high and high - low > 0.3
    assert figures["problems"] == 4 and figures["samples"] == 6 and figures["faults"] == 0


def test_transcripts_figures_and_page(run, tmp_path):
    figures = run(tmp_path, Policy(4, lambda i: i), num=3)
    assert json.loads((tmp_path / "results.json").read_text()) == {"stub": figures}
    records = [json.loads(line) for line in lines_of(tmp_path)]
    assert [record["problem_id"] for record in records] == [0, 1, 2]
    assert [sum(s["correct"] for s in record["samples"]) for record in records] == [0, 1, 2]
    first, second, *_ = records[2]["samples"]
    assert first["extracted"] == "102" and second["truncated"]
    page = (tmp_path / "stub.html").read_text()
    assert page.count("<details>") == 3 + 12 and "2 of 4 correct" in page
    text = benchmark_page.table({"stub": figures, "other": {"avg@4": figures["avg@4"]}})
    assert "25.0 %" in text and text.splitlines()[0].split() == ["stub", "other"]
    assert len({len(line) for line in text.splitlines()}) == 1, "columns are aligned"


@pytest.mark.parametrize("most", [1, 17, 39])
def test_a_stop_costs_only_unfinished_problems(run, tmp_path, most):
    whole = run(tmp_path / "whole", Policy(4, lambda i: i % 5), num=10)
    place = tmp_path / "stopped"
    with pytest.raises(StopRequested):
        run(place, Policy(4, lambda i: i % 5, most=most), num=10)
    done = [json.loads(line)["problem_id"] for line in lines_of(place)]
    assert len(done) == len(set(done)) and len(done) <= most // 4
    with (place / "stub.jsonl").open("a") as file:
        file.write('{"problem_id": 3, "samp')  # a kill in the middle of a line
    policy = Policy(4, lambda i: i % 5, seed=1)
    assert run(place, policy, num=10) == whole
    again = [problem.id for problem in policy.problems]
    assert sorted(again + done) == list(range(10)), "finished problems are not sampled again"
    for name in ("stub.jsonl", "results.json", "stub.html"):
        assert (place / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_an_evaluation_that_is_done_samples_nothing(run, tmp_path):
    first = run(tmp_path, Policy(4, lambda i: i), num=3)
    policy = Policy(4, lambda i: pytest.fail("nothing is left to generate"))
    assert run(tmp_path, policy, num=3) == first


def test_samples_of_another_evaluation_are_refused(run, tmp_path):
    run(tmp_path, Policy(4, lambda i: i), num=3)
    with pytest.raises(UserError, match="--output=.*stub.jsonl/below cannot be used"):
        benchmarks.open_directory(tmp_path / "stub.jsonl" / "below", SETTINGS)
    with pytest.raises(UserError, match="seed was 0 and is 1 now. Choose another --output"):
        benchmarks.open_directory(tmp_path, SETTINGS | {"seed": 1})
    other = [problem._replace(answer="7") for problem in make_problems(3)]
    with pytest.raises(UserError, match=r"stub\.jsonl, line 1: .* other problems"):
        run(tmp_path, Policy(4, lambda i: i), num=3, all_problems=other)
    with pytest.raises(UserError, match="number of samples"):
        run(tmp_path, Policy(5, lambda i: i), num=3)
    judged = RUBRIC._replace(incorrect_reward=0.0)
    with pytest.raises(UserError, match=r"line 1: .* judged by .*'incorrect_reward': -1.0.*: 0.0"):
        run(tmp_path, Policy(4, lambda i: i), num=3, rubric=judged)


def test_verdicts_of_an_edited_scorer_are_refused(run, tmp_path):
    """They would pass for those of the scorer as it is now."""
    file, place = tmp_path / "mine.py", tmp_path / "out"
    rubric = Rubric(((f"{file}:even", 1.0),), 1.0, -1.0)

    def evaluate_with(remainder):
        file.write_text(f"def even(text, answer):\n    return len(text) % 2 == {remainder}\n")
        with RewardPool(rubric.names, workers=1, timeout_seconds=5.0) as pool:
            return run(place, Policy(2, lambda i: i), num=2, rubric=rubric, pool=pool)

    first = evaluate_with(0)
    assert evaluate_with(0) == first
    with pytest.raises(UserError, match=r"line 1: these were judged by .*'files'.*Choose another"):
        evaluate_with(1)


@pytest.mark.parametrize("line", ["", "{", "[]", '{"problem_id": 0}'])
def test_a_line_that_is_no_transcript_is_refused(run, tmp_path, line):
    """As of an earlier version of this program, or edited."""
    run(tmp_path, Policy(1, lambda i: i), num=1)
    with (tmp_path / "stub.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(UserError, match=r"stub\.jsonl, line 2: .* no transcript .*remove the file"):
        run(tmp_path, Policy(1, lambda i: i), num=1)


def test_a_benchmark_numbers_its_problems_whatever_stands_before_it(tmp_path, monkeypatch):
    """The key of a sample is made from the number of its problem."""
    for name, answers in (("a", (1, 2, 3)), ("b", (4, 5))):
        lines = [f'{{"question": "Add: a={n}\\n", "answer": "{n}"}}\n' for n in answers]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    numbers = {}

    def run(benchmark, *_, **__):
        numbers[benchmark.name] = [(p.id, p.answer) for p in benchmark.problems]

    names = ",".join(str(tmp_path / f"{name}.jsonl") for name in "ab")
    evaluate_stubbed(tiny_config(), run, monkeypatch, benchmarks=names, output=tmp_path / "out")
    assert numbers == {"a": [(0, "1"), (1, "2"), (2, "3")], "b": [(0, "4"), (1, "5")]}


def evaluate_stubbed(config, run, monkeypatch, **given):
    """Evaluates with a stub in the place of the model; returns the configs of the collectors."""
    configs = []

    def collector(config, *_):
        configs.append(config)
        return RolloutCollector.__new__(Policy)

    monkeypatch.setattr(benchmarks, "run", run)
    monkeypatch.setattr(evaluate, "load_params", lambda *_: ("a stub", {}))
    monkeypatch.setattr(evaluate, "_collector", collector)
    monkeypatch.setattr(Policy, "engine", StubEngine(), raising=False)
    monkeypatch.setattr(evaluate, "table", lambda _: "")
    flags = dict.fromkeys(evaluate.Request._fields) | given
    request = evaluate.request(config, types.SimpleNamespace(**flags))
    assert evaluate.evaluate_model(config, request).stopped_by is None
    return configs


def test_the_first_generated_problems_are_those_of_the_whole_benchmark(tmp_path, monkeypatch):
    """A generator asked for fewer problems would make others."""
    prompts = []

    def run(benchmark, *_, **__):
        prompts.append([problem.prompt for problem in benchmark.problems])

    for number in (None, 3, 1000):
        output = tmp_path / str(number)
        evaluate_stubbed(tiny_config(), run, monkeypatch, num_problems=number, output=output)
    whole, three, more = prompts
    assert len(whole) > 3 and three == whole[:3] and more == whole


@pytest.mark.parametrize(
    "step, saved, tokens", [(None, (2, 4), 11), (3, (2, 3), 10), (None, (0,), 9)]
)
def test_limits_are_those_of_the_stage_of_the_step(tmp_path, monkeypatch, step, saved, tokens):
    config = tiny_config(
        rollout__max_response_tokens=9,
        stages=((3, {"rollout.max_response_tokens": 10}), (4, {"rollout.max_response_tokens": 11})),
    )
    written = json.dumps({"config": run_directory.frozen(config)})
    (tmp_path / "config.json").write_text(written)
    for number in saved:
        (tmp_path / "checkpoints" / str(number)).mkdir(parents=True)
    configs = evaluate_stubbed(
        config, lambda *_, **__: None, monkeypatch, workdir=tmp_path, step=step
    )
    assert {config.rollout.max_response_tokens for config in configs} == {tokens}


def test_awaited_verdicts_are_named(run, tmp_path):
    """The last verdicts are missing when all is sampled."""
    waited = []

    class Listening(Telemetry):
        def waiting_for(self, what):
            waited.append(what)

    policy = Policy(2, lambda i: i)
    policy.telemetry = Listening()
    run(tmp_path, policy, num=3)
    assert any(re.match(r"reward workers: \d of 6 verdicts there, 3 prompts", w) for w in waited)


def test_the_page_leaves_out_what_a_browser_cannot_hold(run, tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark_page, "PAGE_CHARACTERS", 80)
    text = "<b>" + "x" * 500 + "\ud800 Answer: 100"
    run(tmp_path, Policy(1, lambda i: i, text=text), num=2)
    page = (tmp_path / "stub.html").read_text()
    assert "characters left out" in page and "<b>x" not in page and "x" * 100 not in page
    assert json.loads(lines_of(tmp_path)[0])["samples"][0]["text"] == text


def test_the_cells_of_the_table_and_the_notes_of_a_sample():
    figures = {"avg@4": {"value": 0.25, "interval": [0.125, 0.5]}, "truncated_share": 0.125}
    figures |= {"length_mean": 1234.56, "faults": 1200}
    _, *lines = benchmark_page.table({"a": figures}).splitlines()
    cells = [line.split("  ")[-1].strip() for line in lines]
    assert cells == ["25.0 % [12.5, 50.0]", "12.5 %", "1,234.6", "1,200"]
    attempt = Attempt("text", 5, True, Verdict(False, -1.0, None, "timeout"), True)
    notes = "3: wrong, no answer found, 5 tokens, cut at the limit, invalid, timeout"
    assert notes in benchmark_page._sample(3, attempt, 100)


def test_avg_at_32_on_the_official_file(run, tmp_path):
    """The published file repeats 30 problems 32 times; a policy right in i of 32 samples of the
    i-th of them has an avg@32 of 29 / 64."""
    file = SHARED / "data" / "aime" / "aime-2024.parquet"
    if not file.exists():
        pytest.skip(f"the official file is not there: {file}")
    long = {"data__max_prompt_tokens": 2**20, "train__row_tokens": 2**21}
    config = tiny_config(pretrain=None, model__tokenizer="not read", **long)
    source = SourceConfig(**source_dict(str(file)))
    said = []
    found = dataset.load(
        config, {"stub": source}, arithmetic_tokenizer(), field="benchmark", say=said.append
    )
    assert len(found) == 30 and "30 distinct prompts, 32 records of each" in said[0]
    figures = run(tmp_path, Policy(32, lambda i: i), num=30, all_problems=found)
    assert figures["avg@32"]["value"] == pytest.approx(np.mean(np.arange(30) / 32))
    assert figures["pass@32"]["value"] == pytest.approx(29 / 30)
    assert figures["pass@1"]["value"] == pytest.approx(figures["avg@32"]["value"])


def asked_of(**given):
    """The request that the flags of launch/evaluate.py make, all but these left out."""
    flags = dict.fromkeys(evaluate.Request._fields) | {"output": "x"} | given
    return evaluate.request(tiny_config(), types.SimpleNamespace(**flags))


def test_a_greedy_evaluation_has_one_sample_of_each_problem():
    greedy = {"temperature": 0.0}
    assert asked_of().num_samples == 32 and asked_of(**greedy).num_samples == 1
    with pytest.raises(UserError, match="--num_samples must be 1 at temperature 0; got 4"):
        asked_of(num_samples=4, **greedy)


def test_the_settings_of_an_evaluation_are_all_that_its_samples_depend_on():
    config, request = tiny_config(), asked_of()
    weights = {"w": jax.numpy.arange(4.0)}

    def settings(label="a run, step 3", weights=weights, rollout=(), stops=(), **asked):
        changed = dataclasses.replace(config.rollout, **dict(rollout))
        model = dataclasses.replace(config.model, stop_token_ids=stops)
        of = dataclasses.replace(config, rollout=changed, model=model)
        found = evaluate._settings(of, request._replace(**asked), label, weights)
        return json.dumps(found, sort_keys=True)

    others = [
        *(settings(**{name: 1}) for name in ("num_samples", "top_k", "seed")),
        *(settings(**{name: 0.5}) for name in ("temperature", "top_p", "min_p")),
        settings(scorer="boxed"),
        settings(label="a run, step 4"),
        settings(weights={"w": weights["w"][::-1]}),
        settings(rollout={"max_response_tokens": 33}),
        settings(rollout={"stop_strings": ("=",)}),
        settings(rollout={"end_of_thinking": (9, "A: ")}),
        settings(stops=(3,)),
    ]
    assert settings() == settings() and len({settings(), *others}) == 1 + len(others)


def test_a_run_of_an_earlier_version_has_the_defaults_of_later_fields(tmp_path):
    config = tiny_config()
    frozen = run_directory.frozen(config)
    for name in ("lora_rank", "lora_alpha", "kernel_blocks", "head_dtype"):
        del frozen["model"][name]
    (tmp_path / "config.json").write_text(json.dumps({"config": frozen}))
    assert evaluate._run_of(config, tmp_path) == frozen
    with pytest.raises(UserError, match=r"config\.model\.lora_rank is 2, and 0 in "):
        evaluate._run_of(tiny_config(model__lora_rank=2), tmp_path)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"benchmarks": "a/one.jsonl,b/one.jsonl"}, "two of them have one name"),
        ({"step": 3}, "--step=3 needs the --workdir of a run"),
    ],
)
def test_an_evaluation_that_would_be_another_is_refused(given, message):
    with pytest.raises(UserError, match=message):
        evaluate._sources(tiny_config(), asked_of(**given))


def test_the_time_left_is_that_of_the_problems_left(run, tmp_path, monkeypatch, capsys):
    """Each takes ten seconds."""
    monotonic = lambda: 10.0 * len(lines_of(tmp_path))
    clock = types.SimpleNamespace(monotonic=monotonic, sleep=time.sleep)
    monkeypatch.setattr(benchmarks, "time", clock)
    monkeypatch.setattr(benchmarks, "REPORT_EVERY_SECONDS", 0.0)
    run(tmp_path, Policy(1, lambda i: 1), num=4)
    line = r"stub: (\d) of 4 problems, 100\.0 % correct so far, about (\d+) s left"
    found = re.findall(line, capsys.readouterr().out)
    assert found and all(int(left) == 10 * (4 - int(done)) for done, left in found)
