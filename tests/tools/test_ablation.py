"""The ablation's table, from run directories that the test writes, and how runs are started."""

import csv
import json
import subprocess
import sys
import time

import pytest

import dapo_jax
from dapo_jax.runs.report.data import load_runs
from dapo_jax.tools import ablation
from dapo_jax.types import RunError, UserError
from tests.runs.test_report import write_run
from tests.support.helpers import tiny_config
from tests.support.runs import load_launcher

# Stands for launch/train.py: counts its starts, and fails where a file says so.
PROGRAM = """
import pathlib, sys
flags = dict(argument[2:].split("=", 1) for argument in sys.argv[1:])
place = pathlib.Path(flags["workdir"])
with (place / "starts").open("a") as file:
    file.write(flags["config"] + " " + flags["config.seed"] + "\\n")
if (place / "fail").exists():
    sys.exit("no luck")
(place / "summary.json").write_text("{}")
"""


def test_the_table_has_means_and_paired_intervals(tmp_path):
    # Held-out accuracy at the last step: 0.85 + 0.01 seed, for "dapo" two steps, 0.2, more.
    for seed in range(3):
        write_run(ablation.place(tmp_path, "token_loss", seed), steps=6, seed=seed)
        write_run(ablation.place(tmp_path, "dapo", seed), steps=8, seed=seed)
        write_run(ablation.place(tmp_path, "no_clip_higher", seed), steps=6, seed=seed)
    rows = ("token_loss", "dapo", "no_clip_higher")
    text = ablation.write_table(rows, range(3), tmp_path).read_text()
    assert "| token_loss | 86.0 (85.0 to 87.0) |  |  | 42 |" in text
    assert "| dapo | 106.0 (105.0 to 107.0) | +20.0 (+20.0 to +20.0) | token_loss | 50 |" in text
    assert ("| no_clip_higher | 86.0 (85.0 to 87.0) | -20.0 (-20.0 to -20.0) | dapo |  |") in text
    with (tmp_path / "table.csv").open(newline="") as file:
        records = list(csv.DictReader(file))
    assert [(r["row"], r["seed"]) for r in records[:4]] == [
        ("token_loss", "0"),
        ("token_loss", "1"),
        ("token_loss", "2"),
        ("dapo", "0"),
    ]
    # 8 prompts a step; in step i, i of them are all right: 1 - 3.5 / 8 over six steps.
    assert float(records[0]["informative"]) == pytest.approx(1 - 3.5 / 8)
    assert float(records[0]["wrong_length"]) == 3
    assert (tmp_path / "table.png").stat().st_size > 10_000


def test_figures_are_of_the_steps_that_their_titles_name(tmp_path):
    """Late: the last eight. In step i of twelve these shares and the entropy are i / 100."""
    run = write_run(tmp_path / "run", steps=12)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    names = "policy/entropy", "policy/clip_high_share", "length/truncated_share"
    for numbers in lines[1:]:
        numbers |= dict.fromkeys(names, numbers["step"] / 100)
        numbers |= {"sampling/prompts_all_right": 2, "sampling/prompts_all_wrong": 3}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (found,) = load_runs([run])
    figures = {column.name: column.of(found) for column in ablation.COLUMNS}
    late, every = sum(range(5, 13)) / 800, sum(range(1, 13)) / 1200
    wanted = {"cut_first": 0.01, "cut_late": late, "entropy": late, "clipped_high": every}
    wanted |= {"informative": 3 / 8, "accuracy": 1.45, "pass_at_k": 0.9}
    assert {name: figures[name] for name in wanted} == pytest.approx(wanted)


def tables_of_one_seed(**accuracies):
    names = [column.name for column in ablation.COLUMNS]
    return ablation.markdown_tables(
        {row: {key: [value] for key in names} for row, value in accuracies.items()}
    )


def test_rows_without_dapo_are_compared_with_the_first():
    text = tables_of_one_seed(sync=0.8, carry=0.9)
    assert "| sync | 80.0 |  |  |  |" in text and "| carry | 90.0 | +10.0 | sync |  |" in text


def test_one_seed_has_no_interval():
    text = tables_of_one_seed(grpo=0.85, dapo=0.9)
    assert "| grpo | 85.0 |  |  | 30 |" in text and "| dapo | 90.0 | +5.0 | grpo | 50 |" in text


WAITING = """
import pathlib, signal, sys, time
place = pathlib.Path(next(a for a in sys.argv if a.startswith("--workdir=")).split("=")[1])
def stop(*_):
    (place / "saved").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
(place / "begun").touch()
time.sleep(100)
"""


def test_runs_that_are_done_are_kept_and_a_failure_is_named(tmp_path, monkeypatch, capsys):
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    monkeypatch.setattr(ablation, "TRAIN", program)
    workdir = tmp_path / "work"
    broken = ablation.place(workdir, "b", 1)
    broken.mkdir(parents=True)
    (broken / "fail").touch()
    run_all = lambda: ablation.run_all("c.py", ["a", "b"], range(2), workdir, 2)
    with pytest.raises(RunError, match=r"b/seed_1/log.txt"):
        run_all()
    log = f"the log of each is {workdir}/ROW/seed_S/log.txt"
    assert capsys.readouterr().out.startswith(f"4 of 4 runs to do, 2 at a time; {log}\n")
    assert (broken / "log.txt").read_text() == "no luck\n"
    (broken / "fail").unlink()
    run_all()
    assert capsys.readouterr().out.startswith("1 of 4 runs to do, ")
    starts = {
        (row, seed): (ablation.place(workdir, row, seed) / "starts").read_text().splitlines()
        for row in "ab"
        for seed in range(2)
    }
    twice = {("b", 1): 2}
    assert starts == {
        (row, seed): [f"c.py:{row} {seed}"] * twice.get((row, seed), 1) for row, seed in starts
    }


def test_finished_runs_of_another_config_are_refused(tmp_path):
    config = tiny_config(evaluation__num_samples=4)
    write_run(ablation.place(tmp_path, "dapo", 1), seed=1)
    ablation.check_done({"dapo": config, "grpo": config}, range(3), tmp_path)
    other = tiny_config(evaluation__num_samples=4, optimizer__learning_rate=0.5)
    with pytest.raises(UserError, match=r"dapo/seed_1 belongs[^$]*learning_rate: .* 0\.5 now"):
        ablation.check_done({"dapo": other}, range(3), tmp_path)
    longer = tiny_config(evaluation__num_samples=4, train__num_steps=60)
    with pytest.raises(UserError, match=r"run of \d+ steps, and config.train.num_steps is 60"):
        ablation.check_done({"dapo": longer}, range(3), tmp_path)


def test_sigterm_goes_to_the_runs_and_no_other_begins(tmp_path):
    program, workdir = tmp_path / "train.py", tmp_path / "work"
    program.write_text(WAITING)
    code = (
        "import pathlib, sys; from dapo_jax.tools import ablation; from dapo_jax.types import "
        f"StopRequested; ablation.TRAIN = pathlib.Path({str(program)!r})\n"
        f"try: ablation.run_all('c.py', ['a', 'b'], range(2), pathlib.Path({str(workdir)!r}), 2)\n"
        "except StopRequested: sys.exit(7)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 60
        while len(list(workdir.glob("*/*/begun"))) < 2:
            assert time.monotonic() < until and process.poll() is None
            time.sleep(0.05)
        process.terminate()
        assert process.wait(60) == 7
    finally:
        process.kill()
    stopped = [path.parent.relative_to(workdir).as_posix() for path in workdir.glob("*/*/saved")]
    assert sorted(stopped) == ["a/seed_0", "a/seed_1"] and not (workdir / "b").exists()


def test_rows_are_the_functions_that_a_config_file_lists(tmp_path):
    assert ablation.row_names("configs/ablation_smollm2.py") == [
        "grpo",
        "dapo",
        "no_dynamic_sampling",
        "no_token_loss",
    ]
    with pytest.raises(UserError, match="configs/tiny.py: the file has no ROWS"):
        ablation.row_names("configs/tiny.py")


# clip_high, aggregation, filter of cut responses, punished tokens, dynamic sampling.
MEAN = "seq-mean-token-mean"
TABLE_1 = {
    "grpo": (0.2, MEAN, False, 0, False),
    "overlong_filter": (0.2, MEAN, True, 0, False),
    "clip_higher": (0.28, MEAN, True, 0, False),
    "overlong_punishment": (0.28, MEAN, False, 4096, False),
    "token_loss": (0.28, "token-mean", False, 4096, False),
    "dapo": (0.28, "token-mean", False, 4096, True),
}


def test_a_row_that_is_named_twice_is_refused(tmp_path, capsys):
    main = load_launcher("ablate")
    assert main(["launch/ablate.py", f"--workdir={tmp_path}", "--rows=dapo,grpo,dapo"]) == 2
    assert "--rows=dapo,grpo,dapo names a row twice" in capsys.readouterr().err


def test_a_workdir_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="--workdir=.*file cannot be written to: File exists"):
        ablation.run_all("configs/ablation.py", ["dapo"], [0], tmp_path / "file", 1)


def test_the_rows_of_table_1_at_32b():
    found = {}
    for row in TABLE_1:
        c = dapo_jax.load_config(f"configs/qwen32b_dapo.py:{row}")
        o, punished = c.objective, c.reward.overlong_buffer_tokens
        of_samples = punished, c.dynamic_sampling.enabled
        found[row] = (o.clip_high, o.aggregation, o.overlong_filter, *of_samples)
    assert found == TABLE_1
    plain = dapo_jax.load_config("configs/qwen32b_dapo.py")
    assert plain == dapo_jax.load_config("configs/qwen32b_dapo.py:dapo")
    with pytest.raises(UserError, match="'naive' is not one of grpo, overlong_filter"):
        dapo_jax.load_config("configs/qwen32b_dapo.py:naive")
