"""Benchmarks: figures of a policy whose answers are known, transcripts, what a stop costs."""

import itertools
import json
import random

import numpy as np
import pytest

from dapo_jax import benchmark_page, benchmarks, evaluate_model, problems
from dapo_jax.benchmarks import Benchmark
from dapo_jax.config import Config, SourceConfig
from dapo_jax.progress import Progress
from dapo_jax.reward import Rubric
from dapo_jax.reward_pool import RewardPool
from dapo_jax.tokenizer import arithmetic_tokenizer
from dapo_jax.types import Problem, Response, StopRequested, UserError
from dapo_jax.watchdog import UNWATCHED, Watchdog
from tests.helpers import SHARED, source_dict, tiny_config, tiny_dict

SETTINGS = {"model": "a stub", "seed": 0}
RUBRIC = Rubric((("math_dapo", 1.0),), 1.0, -1.0)


def make_problems(num):
    return [Problem(i, f"p{i}", (1, 2), str(100 + i), "stub") for i in range(num)]


def answer(problem, sample, num_right):
    """Right in the first `num_right` samples of a problem; wrong ones agree in pairs."""
    if sample < num_right:
        return f"so\nAnswer: {problem.answer}"
    return "no idea" if sample % 5 == 0 else f"Answer: -{sample // 2}"


def drawing(num_samples, num_right, *, seed=0, most=None):
    """A policy: hands its responses over in a random order, and is stopped after `most` of them."""

    def draw(left, finished):
        every = list(itertools.product(range(len(left)), range(num_samples)))
        random.Random(seed).shuffle(every)
        for i, (index, sample) in enumerate(every):
            if i == most:
                raise StopRequested
            text = answer(left[index], sample, num_right(left[index].id))
            tokens = np.zeros(len(text), np.int32)
            reason = "length" if sample == 1 else "stop"
            finished([(index, sample, Response(tokens, np.zeros(0), reason, text))])

    return draw


@pytest.fixture(scope="module")
def run():
    """Evaluates a stub in a directory: run(place, draw, num=, num_samples=) -> figures."""
    with RewardPool(RUBRIC.names, workers=1, timeout_seconds=5.0) as pool:

        def run(
            place, draw, *, num, num_samples, all_problems=None, rubric=RUBRIC, watch=UNWATCHED
        ):
            benchmarks.open_directory(place, SETTINGS)
            benchmark = Benchmark("stub", all_problems or make_problems(num), rubric)
            return benchmarks.run(
                benchmark, draw, pool, place,
                num_samples=num_samples, progress=Progress(0, 0), watch=watch,
            )  # fmt: skip

        yield run


def lines_of(place):
    return (place / "stub.jsonl").read_text().splitlines()


def by_enumeration(right_QN, k):
    """pass@k as the mean over all subsets of k samples."""
    subsets = list(itertools.combinations(range(right_QN.shape[1]), k))
    return np.mean([[row[list(s)].any() for s in subsets] for row in right_QN])


def test_figures_of_known_answers(run, tmp_path):
    counts = [0, 1, 3, 6]
    figures = run(tmp_path, drawing(6, lambda i: counts[i]), num=4, num_samples=6)
    right = np.arange(6) < np.array(counts)[:, None]
    assert figures["avg@6"]["value"] == pytest.approx(10 / 24)
    for k in (1, 2, 4, 6):
        assert figures[f"pass@{k}"]["value"] == pytest.approx(by_enumeration(right, k))
    # Votes. 0 right: nobody. 1 right: -0 (sample 1) abstain at 5 and 0 is right: -1, -1, -2 and
    # one right lose to the pair -1. 3 right: three against -1 and -2. 6 right: all.
    assert figures["cons@6"]["value"] == pytest.approx((0 + 0 + 1 + 1) / 4)
    assert figures["truncated_share"] == pytest.approx(1 / 6)
    assert figures["unparsed_share"] == pytest.approx((2 + 1 + 1 + 0) / 24)
    low, high = figures["avg@6"]["interval"]
    assert low <= 10 / 24 <= high and high - low > 0.3
    assert figures["problems"] == 4 and figures["samples"] == 6 and figures["faults"] == 0


def test_what_is_left_behind(run, tmp_path):
    figures = run(tmp_path, drawing(4, lambda i: i), num=3, num_samples=4)
    assert json.loads((tmp_path / "results.json").read_text()) == {"stub": figures}
    rows = [json.loads(line) for line in lines_of(tmp_path)]
    assert [row["problem_id"] for row in rows] == [0, 1, 2]
    assert [sum(s["correct"] for s in row["samples"]) for row in rows] == [0, 1, 2]
    assert rows[2]["samples"][0]["extracted"] == "102" and rows[2]["samples"][1]["truncated"]
    page = (tmp_path / "stub.html").read_text()
    assert page.count("<details>") == 3 + 12 and "2 of 4 correct" in page
    text = benchmark_page.table({"stub": figures, "other": {"avg@4": figures["avg@4"]}})
    assert "25.0 %" in text and text.splitlines()[0].split() == ["stub", "other"]
    assert len({len(line) for line in text.splitlines()}) == 1, "columns are aligned"


@pytest.mark.parametrize("most", [1, 17, 39])
def test_a_stop_costs_only_what_was_not_whole(run, tmp_path, most):
    whole = run(tmp_path / "whole", drawing(4, lambda i: i % 5), num=10, num_samples=4)
    place = tmp_path / "stopped"
    with pytest.raises(StopRequested):
        run(place, drawing(4, lambda i: i % 5, most=most), num=10, num_samples=4)
    done = [json.loads(line)["problem_id"] for line in lines_of(place)]
    assert len(done) == len(set(done)) and len(done) <= most // 4
    with (place / "stub.jsonl").open("a") as file:
        file.write('{"problem_id": 3, "samp')  # a kill in the middle of a line
    drawn = []

    def draw(left, finished):
        drawn.extend(problem.id for problem in left)
        drawing(4, lambda i: i % 5, seed=1)(left, finished)

    assert run(place, draw, num=10, num_samples=4) == whole
    assert sorted(drawn + done) == list(range(10)), "what is done is not drawn again"
    for name in ("stub.jsonl", "results.json", "stub.html"):
        assert (place / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_an_evaluation_that_is_done_draws_nothing(run, tmp_path):
    first = run(tmp_path, drawing(4, lambda i: i), num=3, num_samples=4)

    def never(left, finished):
        pytest.fail("nothing is left to draw")

    assert run(tmp_path, never, num=3, num_samples=4) == first


def test_samples_of_another_evaluation_are_refused(run, tmp_path):
    run(tmp_path, drawing(4, lambda i: i), num=3, num_samples=4)
    with pytest.raises(UserError, match="seed was 0 and is 1 now. Choose another --output"):
        benchmarks.open_directory(tmp_path, SETTINGS | {"seed": 1})
    other = [problem._replace(answer="7") for problem in make_problems(3)]
    with pytest.raises(UserError, match=r"stub\.jsonl, line 1: .* other problems"):
        run(tmp_path, drawing(4, lambda i: i), num=3, num_samples=4, all_problems=other)
    with pytest.raises(UserError, match="number of samples"):
        run(tmp_path, drawing(5, lambda i: i), num=3, num_samples=5)
    judged = RUBRIC._replace(incorrect=0.0)
    with pytest.raises(UserError, match=r"line 1: .* judged by .*'incorrect': -1.0.*: 0.0"):
        run(tmp_path, drawing(4, lambda i: i), num=3, num_samples=4, rubric=judged)


def test_what_stands_before_a_benchmark_does_not_number_its_problems(tmp_path, monkeypatch):
    """The key of a sample is made from the number of its problem."""
    for name, answers in (("a", (1, 2, 3)), ("b", (4, 5))):
        lines = [f'{{"question": "Add: a={n}\\n", "answer": "{n}"}}\n' for n in answers]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    numbers = {}

    def run(benchmark, *_, **__):
        numbers[benchmark.name] = [(p.id, p.answer) for p in benchmark.problems]

    monkeypatch.setattr(benchmarks, "run", run)
    monkeypatch.setattr(evaluate_model, "load_params", lambda *_: ("a stub", {}))
    monkeypatch.setattr(evaluate_model, "_drawing", lambda *_: None)
    monkeypatch.setattr(evaluate_model, "table", lambda _: "")
    config = tiny_config()
    request = evaluate_model.Request(
        None, None, tuple(str(tmp_path / f"{name}.jsonl") for name in "ab"), 1, None, 1.0, 1.0, 0,
        0.0, 0, None, tmp_path / "out",
    )  # fmt: skip
    assert evaluate_model.evaluate_model(config, request) is None
    assert numbers == {"a": [(0, "1"), (1, "2"), (2, "3")], "b": [(0, "4"), (1, "5")]}


def test_verdicts_that_are_waited_for_are_told_of(run, tmp_path):
    """With the last problems, whose verdicts are not there when all is drawn."""
    waited = []

    class Watch(Watchdog):
        def waiting_for(self, what):
            waited.append(what)

    run(tmp_path, drawing(2, lambda i: i), num=3, num_samples=2, watch=Watch(0.0, print))
    assert "reward workers, problems without verdicts: 1" in waited


def test_a_directory_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be used"):
        benchmarks.open_directory(tmp_path / "file" / "below", SETTINGS)


def test_the_page_leaves_out_what_a_browser_cannot_hold(run, tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark_page, "PAGE_CHARACTERS", 80)
    text = "<b>" + "x" * 500 + "\ud800 Answer: 100"

    def draw(left, finished):
        tokens = np.zeros(3, np.int32)
        finished([(i, 0, Response(tokens, np.zeros(0), "stop", text)) for i in (0, 1)])

    run(tmp_path, draw, num=2, num_samples=1)
    page = (tmp_path / "stub.html").read_text()
    assert "characters left out" in page and "<b>x" not in page and "x" * 100 not in page
    assert json.loads(lines_of(tmp_path)[0])["samples"][0]["text"] == text


def test_avg_at_32_on_the_official_file(run, tmp_path):
    """The published file repeats 30 problems 32 times; a policy right in i of 32 samples of the
    i-th of them has an avg@32 of 29 / 64."""
    file = SHARED / "data" / "aime" / "aime-2024.parquet"
    if not file.exists():
        pytest.skip(f"the official file is not there: {file}")
    config = Config.from_dict(
        tiny_dict(
            data__max_prompt_tokens=2**20,
            train__row_tokens=2**21,
            pretrain=None,
            model__tokenizer="not read",
        )
    )
    source = SourceConfig(**source_dict(str(file)))
    said = []
    found = problems.load(
        config, {"stub": source}, arithmetic_tokenizer(), field="benchmark", say=said.append
    )
    assert len(found) == 30 and "30 distinct prompts, 32 rows of each" in said[0]
    figures = run(tmp_path, drawing(32, lambda i: i), num=30, num_samples=32, all_problems=found)
    assert figures["avg@32"]["value"] == pytest.approx(np.mean(np.arange(30) / 32))
    assert figures["pass@32"]["value"] == pytest.approx(29 / 30)
    assert figures["pass@1"]["value"] == pytest.approx(figures["avg@32"]["value"])
