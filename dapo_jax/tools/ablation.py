"""An ablation: one run for each row and seed, a table with intervals over seeds, and a figure."""

import contextlib
import csv
import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from types import FrameType
from typing import NamedTuple

from dapo_jax.config import Config
from dapo_jax.config.cli import definitions
from dapo_jax.runs import run_directory
from dapo_jax.runs.report.data import Method, Run, load_runs
from dapo_jax.runs.report.plots import COLOURS, GREY, label_axis, new_figure, to_png
from dapo_jax.types import RunError, StopRequested, UserError
from dapo_jax.utils.bootstrap import bootstrap_interval
from dapo_jax.utils.files import make_writable
from dapo_jax.utils.progress import duration

TRAIN = Path(__file__).resolve().parents[2] / "launch" / "train.py"
LAST_STEPS = 8  # rollout steps that "late" figures are means of
FIRST, ALL, LATE, LAST = slice(1), slice(None), slice(-LAST_STEPS, None), slice(-1, None)
# The paper's Table 1, AIME 2024 avg@32 of Qwen2.5-32B after each row, in percent.
PAPER = {
    "grpo": 30,
    "overlong_filter": 36,
    "clip_higher": 38,
    "overlong_punishment": 41,
    "token_loss": 42,
    "dapo": 50,
}


class Column(NamedTuple):
    """A figure of a run."""

    name: str  # in table.csv
    title: str
    scale: float
    digits: int
    of: Callable[[Run], float]


def _mean(metric: str, steps: slice) -> Callable[[Run], float]:
    return lambda run: fmean([numbers[metric] for numbers in run.steps if metric in numbers][steps])


def _wrong_length(run: Run) -> float:
    """Returns the mean length of the wrong responses stored late in the run, in tokens."""
    files = sorted((run.directory / "rollouts").glob("step_*.jsonl"))[-LAST_STEPS:]
    records = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    wrong = [record["length"] for record in records if not record["correct"]]
    return fmean(wrong) if wrong else float("nan")


def _informative(run: Run) -> float:
    """Returns the share of sampled groups with right and wrong responses, late in the run."""
    return 1 - _mean("share/all_right", LATE)(run) - _mean("share/all_wrong", LATE)(run)


COLUMNS = (
    Column("accuracy", "held-out avg@k, %", 100, 1, _mean("eval/avg@k", LAST)),
    Column("pass_at_k", "held-out pass@k, %", 100, 1, _mean("eval/pass@k", LAST)),
    Column("tokens", "million tokens sampled", 1e-6, 2, _mean("tokens", LAST)),
    Column("informative", "informative groups late, %", 100, 1, _informative),
    Column("entropy", "entropy late, nats", 1, 3, _mean("policy/entropy", LATE)),
    Column("clipped_high", "clipped high, %", 100, 3, _mean("policy/clip_high_share", ALL)),
    Column("cut_first", "cut in the first step, %", 100, 1, _mean("length/truncated_share", FIRST)),
    Column("cut_late", "cut late, %", 100, 1, _mean("length/truncated_share", LATE)),
    Column("wrong_length", "tokens of a wrong response, late", 1, 1, _wrong_length),
)


def place(workdir: Path, row: str, seed: int) -> Path:
    """Returns the run directory of a row and seed."""
    return workdir / row / f"seed_{seed}"


def is_done(workdir: Path, row: str, seed: int) -> bool:
    """Returns whether the run of a row and seed has reached its last step."""
    return (place(workdir, row, seed) / "summary.json").exists()


def row_names(config: str) -> list[str]:
    """Returns the names of the rows of a config file, in its order.

    Raises:
        UserError: there is no such file, or it has no ROWS.
    """
    rows = definitions(config)[1].get("ROWS")
    if not rows:
        raise UserError(
            f"--config={config}: the file has no ROWS, the list of functions that change its "
            "config, see configs/ablation.py."
        )
    return [row.__name__ for row in rows]


def check_done(configs: Mapping[str, Config], seeds: Sequence[int], workdir: Path) -> None:
    """Raises UserError where a finished run has another config than its row has now.

    Args:
        configs: by row.
    """
    for (row, config), seed in itertools.product(configs.items(), seeds):
        directory = place(workdir, row, seed)
        if is_done(workdir, row, seed):
            try:
                old = run_directory.read_config(directory / "config.json")
            except run_directory.UNREADABLE as error:
                raise UserError(f"{directory} holds no run: {error}.") from error
            config = dataclasses.replace(config, seed=seed)
            run_directory.check_same(old, config, directory, config.train.num_steps)
            done = old["train"]["num_steps"]
            if done != config.train.num_steps:
                raise UserError(
                    f"{directory} holds a finished run of {done} steps, and config.train.num_steps "
                    f"is {config.train.num_steps}. Choose another --workdir; or delete its "
                    "summary.json, and the same command resumes it where that is more."
                )


def run_all(
    config: str,
    rows: Sequence[str],
    seeds: Sequence[int],
    workdir: Path,
    processes: int,
    flags: Sequence[str] = (),
) -> None:
    """Runs what is not done, some at a time, each with its share of the cores.

    Args:
        config: the file; a row is its argument.
        processes: runs at a time.
        flags: more flags of launch/train.py.

    Raises:
        RunError: a run failed; finished runs are kept, and the same call resumes.
        StopRequested: SIGTERM came; it was sent to the runs too.
    """
    make_writable(workdir, "--workdir")
    every = [(row, seed) for seed in seeds for row in rows]
    jobs = [job for job in every if not is_done(workdir, *job)]
    print(
        f"{len(jobs)} of {len(every)} runs to do, {processes} at a time; "
        f"the log of each is {workdir}/ROW/seed_S/log.txt",
        flush=True,
    )
    # The first row of a seed makes the base model that the others reuse.
    first = [job for job in jobs if job[0] == rows[0]]
    others = [job for job in jobs if job[0] != rows[0]]
    for part in (first, others):
        _run_jobs(config, part, every, workdir, processes, flags)


def _run_jobs(
    config: str,
    jobs: Sequence[tuple[str, int]],
    every: Sequence[tuple[str, int]],
    workdir: Path,
    processes: int,
    flags: Sequence[str],
) -> None:
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    shares = [cores[i::processes] for i in range(processes)]
    started, failed, running = time.monotonic(), [], set[subprocess.Popen]()

    def stop(number: int, frame: FrameType | None) -> None:
        for process in list(running):
            process.terminate()  # it saves and stops; Ctrl-C comes to it by itself
        failed.append(workdir)  # no other run begins
        raise StopRequested

    def run(job: tuple[str, int]) -> None:
        if failed:
            return
        directory, share = place(workdir, *job), shares.pop()
        directory.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(TRAIN), f"--config={config}:{job[0]}"]
        command += [f"--workdir={directory}", f"--config.seed={job[1]}", *flags]
        with (directory / "log.txt").open("a") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
            running.add(process)
            if failed:  # it began as the signal came
                process.terminate()
            if share:
                os.sched_setaffinity(process.pid, share)
            if process.wait():
                failed.append(directory / "log.txt")
            running.discard(process)
        shares.append(share)

    before = signal.signal(signal.SIGTERM, stop)
    with contextlib.ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGTERM, before)
        pool = stack.enter_context(ThreadPoolExecutor(processes))
        for done, (job, _) in enumerate(zip(jobs, pool.map(run, jobs)), 1):
            if failed:
                break
            left = (time.monotonic() - started) / done * (len(jobs) - done)
            total, count = sum(is_done(workdir, *each) for each in every), len(every)
            name = place(workdir, *job).relative_to(workdir)
            print(f"{total}/{count} runs, {name}, {duration(left)} left of this part", flush=True)
    if failed:
        raise RunError(f"a run failed: {failed[0]} says why. The same command resumes it.")


def write_table(rows: Sequence[str], seeds: Sequence[int], workdir: Path) -> Path:
    """Writes table.csv (a line for each run), table.md and table.png from finished runs.

    Intervals are 95 %, percentile bootstrap over seeds; of a difference, over pairs of one seed.
    Rows of the paper's order are compared with the row before. Others are compared with the row
    `dapo`, or with the first row where there is none.

    Returns:
        Path of table.md.
    """
    methods = {
        row: Method(row, tuple(load_runs([place(workdir, row, seed) for seed in seeds])))
        for row in rows
    }
    figures = {
        row: {c.name: [c.of(run) for run in method.runs] for c in COLUMNS}
        for row, method in methods.items()
    }
    with (workdir / "table.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["row", "seed", *(column.name for column in COLUMNS)])
        for row, values in figures.items():
            for i, seed in enumerate(seeds):
                writer.writerow([row, seed, *(f"{values[c.name][i]:.6g}" for c in COLUMNS)])
    (workdir / "table.md").write_text(markdown_tables(figures))
    (workdir / "table.png").write_bytes(_figure(methods))
    return workdir / "table.md"


def markdown_tables(figures: dict[str, dict[str, list[float]]]) -> str:
    """Returns two tables in markdown: accuracies with their differences, and the other columns.

    Args:
        figures: by row and by column of table.csv, a value for each seed.
    """
    before = {b: a for a, b in itertools.pairwise(row for row in PAPER if row in figures)}
    reference = "dapo" if "dapo" in figures else next(iter(figures), None)
    lines = [
        "| row | held-out avg@k, % | difference | compared with | paper |",
        "|---|---|---|---|---|",
    ]
    for row, values in figures.items():
        accuracy = values["accuracy"]
        cells = [row, _percent(accuracy, bootstrap_interval(accuracy), ".1f")]
        other = before.get(row) if row in PAPER else reference
        if other is not None and other != row:
            theirs = figures[other]["accuracy"]
            pairs = [a - b for a, b in zip(accuracy, theirs, strict=True)]
            # Of pairs: what a seed does to both methods cancels.
            cells += [_percent(pairs, bootstrap_interval(pairs), "+.1f"), other]
        else:
            cells += ["", ""]
        lines.append(f"| {' | '.join(cells)} | {PAPER.get(row, '')} |")
    lines += ["", f"| row | {' | '.join(column.title for column in COLUMNS[1:])} |"]
    lines.append("|---" * len(COLUMNS) + "|")
    for row, values in figures.items():
        cells = [f"{c.scale * fmean(values[c.name]):.{c.digits}f}" for c in COLUMNS[1:]]
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _percent(values: Sequence[float], interval: tuple[float, float], form: str) -> str:
    """Returns the mean over seeds with its interval, in percent; one seed has no interval."""
    mean, low, high = (format(100 * x, form) for x in (fmean(values), *interval))
    return mean if len(values) == 1 else f"{mean} ({low} to {high})"


def _figure(methods: dict[str, Method]) -> bytes:
    """Returns plots, as a PNG: accuracy by steps and tokens of GRPO and of DAPO with and without
    dynamic sampling, and the end of every row with the paper's."""
    figure = new_figure(14, 4.2)
    by_step, by_tokens, ends = figure.subplots(1, 3)
    curves = [row for row in ("dapo", "grpo", "token_loss") if row in methods] or list(methods)
    over = "seeds" if len(next(iter(methods.values())).runs) > 1 else "problems"
    for axis, x, unit, title in (
        (by_step, "step", 1, "rollout steps"),
        (by_tokens, "tokens", 1000, "thousand tokens sampled"),
    ):
        for colour, row in zip(itertools.cycle(COLOURS), curves):
            points = methods[row].points("eval/avg@k", x)
            xs, ys = [p.x / unit for p in points], [100 * p.value for p in points]
            axis.plot(xs, ys, color=colour, marker="o", markersize=3, label=row)
            bands = [p.interval or (p.value, p.value) for p in points]
            lows, highs = ([100 * band[side] for band in bands] for side in (0, 1))
            axis.fill_between(xs, lows, highs, color=colour, alpha=0.15, linewidth=0)
        label_axis(axis, f"held-out accuracy, %; 95 % bands over {over}", title)
        axis.legend(frameon=False, fontsize=8)
    for i, (row, method) in enumerate(methods.items()):
        last = method.points("eval/avg@k")[-1]
        low, high = last.interval or (last.value, last.value)
        error = [[100 * (last.value - low)], [100 * (high - last.value)]]
        ends.errorbar([100 * last.value], [i], xerr=error, fmt="o", color=COLOURS[0], capsize=3)
        if row in PAPER:
            ends.plot([PAPER[row]], [i], "x", color=GREY)
    ends.plot([], [], "o", color=COLOURS[0], label="here, at the end")
    ends.plot([], [], "x", color=GREY, label="paper: 32B, AIME 2024")
    ends.set_yticks(range(len(methods)), list(methods))
    ends.invert_yaxis()
    label_axis(ends, "accuracy at the end", "%")
    # Below the plot: inside it the legend's marks would look like those of a row.
    ends.legend(loc="upper left", bbox_to_anchor=(0, -0.17), ncols=2, frameon=False, fontsize=8)
    return to_png(figure)
