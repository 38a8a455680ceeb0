"""Speed next to Tunix and TRL on one model and one shape: the table of docs/results.md, Speed.

Command: python -m tests.peers.speed [--series=2] [--cases=rollout,update,step] [--output=FILE]

On CPU, with nothing else running; 21 minutes a series on 2 slow cores. uv makes each peer an
environment of its own, with torch and jax. All three do a piece of work in turn, each in a
new process; a time is the median of several, after one that is not counted. Tunix and TRL sample
static batches, so their time for long-tailed lengths, 256 responses, is that of 8 batches of 32 of
the longest. Prints a table; --output gets every time, as JSON.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PEERS = {
    "tunix": ("google-tunix==0.1.7", "jax==0.10.2"),
    "trl": ("torch==2.13.0", "trl==1.16.0", "transformers", "accelerate", "datasets"),
}
LONG_TAIL = ("--lengths=longtail", "--prompts=32", "--slots=32")
BATCHES = 8  # static ones that the long-tailed work takes


class Case(NamedTuple):
    """A piece of work that all three do."""

    name: str
    ours: tuple[str, ...]  # arguments of launch/bench.py
    peers: tuple[str, ...]  # and of the scripts that time the peers
    rate: bool = True  # the table has tokens per second; else seconds
    batches: int = 1  # times that a peer has to do its own


WIDE = ("--vocab=32768",)
CASES = (
    Case("rollout, vocabulary 512", ("rollout", "--runs=7"), ("rollout", "--runs=7")),
    Case("rollout, vocabulary 32,768", ("rollout", "--runs=5", *WIDE), ("rollout", *WIDE)),
    Case(
        "rollout, long-tailed lengths",
        ("rollout", "--runs=3", *LONG_TAIL),
        ("rollout",),
        rate=False,
        batches=BATCHES,
    ),
    Case("update, vocabulary 512", ("train", "--runs=5"), ("update", "--runs=5")),
    Case("update, vocabulary 32,768", ("train", "--runs=5", *WIDE), ("update", *WIDE)),
    Case("step", ("step", "--micro_batch=8", "--runs=3"), ("step",), rate=False),
    Case(
        "step, long-tailed lengths",
        ("step", "--micro_batch=8", "--runs=3", *LONG_TAIL, "--share_prompts"),
        ("step",),
        rate=False,
        batches=BATCHES,
    ),
)


class Timed(NamedTuple):
    """What one of the three needed for a case."""

    seconds: list[float]
    tokens: int  # sampled, or trained on with their prompts
    peak_gb: float

    def figure(self, case: Case) -> float:
        """Returns tokens per second or seconds, as the case has it."""
        median = statistics.median(self.seconds)
        return self.tokens / median if case.rate else median


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--series", type=int, default=2, help="times that all is repeated")
    parser.add_argument("--cases", default="", help="the first words of those that are run")
    parser.add_argument("--output", help="a file")
    args = parser.parse_args()
    cases = [case for case in CASES if case.name.startswith(tuple(args.cases.split(",")))]
    found: dict[str, dict[str, list[Timed]]] = {case.name: {} for case in cases}
    begun, done, total = time.monotonic(), 0, 3 * len(cases) * args.series
    for number in range(1, args.series + 1):
        for case in cases:
            for who in ("ours", *PEERS):
                timed = run(case, who)
                found[case.name].setdefault(who, []).append(timed)
                done += 1
                left = (time.monotonic() - begun) / done * (total - done) / 60
                line = f"{case.name}, {who}: {timed.figure(case):,.4g}"
                print(f"series {number}: {line}; {left:.0f} min left", file=sys.stderr)
        if args.output:
            Path(args.output).write_text(json.dumps(found))
    print("\n".join(table(cases, found)))


def run(case: Case, who: str) -> Timed:
    """Returns the times of one process.

    Raises:
        RuntimeError: it failed.
    """
    if who == "ours":
        command = [sys.executable, str(ROOT / "launch" / "bench.py"), *case.ours, "--json"]
    else:
        uv = shutil.which("uv") or str(ROOT / ".uv" / "bin" / "uv")
        packages = [word for package in PEERS[who] for word in ("--with", package)]
        command = [uv, "run", "-q", "--no-project", "--isolated", "--python", "3.11", *packages]
        command += ["python", "-m", f"tests.peers.{who}_speed", *case.peers]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    values: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    batches = 1 if who == "ours" else case.batches
    seconds = [batches * t for t in values["seconds"]]
    return Timed(seconds, batches * values["tokens"], values["peak_rss_mb"] / 1000)


def table(cases: list[Case], found: dict[str, dict[str, list[Timed]]]) -> list[str]:
    """Returns the lines of a Markdown table: a figure and a peak of memory for each series."""
    joined = lambda values, form: ", ".join(format(value, form) for value in values)
    lines = ["| | ours | Tunix | TRL | to Tunix | to TRL | peak memory, GB |", "|" + "---|" * 7]
    for case in cases:
        figures = {who: [t.figure(case) for t in timed] for who, timed in found[case.name].items()}
        ours = figures["ours"]
        form = ",.0f" if case.rate else ".3g"
        cells = [f"{case.name}: {'tokens per second' if case.rate else 'seconds'}"]
        cells += [joined(values, form) for values in figures.values()]
        for peer in PEERS:  # above 1: ours is faster
            pairs = zip(ours, figures[peer])
            cells.append(joined((a / b if case.rate else b / a for a, b in pairs), ".1f"))
        peaks = [max(t.peak_gb for t in timed) for timed in found[case.name].values()]
        lines.append(f"| {' | '.join([*cells, joined(peaks, '.2g')])} |")
    return lines


if __name__ == "__main__":
    main()
