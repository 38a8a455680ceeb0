"""launch/bench.py: what it prints, and what it says of a wrong command."""

import json
import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from dapo_jax.tools.bench.memory import peaks
from dapo_jax.tools.bench.shapes import sample_lengths
from dapo_jax.tools.bench.train import TrainShape, make_rows
from tests.support.runs import load_launcher

bench = load_launcher("bench")
MODEL = ("--layers=1", "--width=16", "--heads=2", "--kv_heads=1", "--d_ff=16", "--vocab=40")
SMALL = (*MODEL, "--prompts=5", "--group=4", "--prompt_len=5", "--gen_len=12", "--runs=1")


def test_the_rollout_bench(capsys):
    arguments = ["program", "rollout", *SMALL, "--slots=8", "--lengths=longtail", "--json"]
    assert bench(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["compilations"] == 0 and found["tokens_per_second"] > 0
    assert found["occupancy"] > 0.95, "slots are refilled on the device"
    assert found["peak_rss_mb"] > 100
    assert found["peak_device_mb"] is None, "a CPU does not say"
    assert 20 <= found["tokens"] <= 20 * 12 and found["slots"] == 8
    phases = found["seconds_by_phase"]
    assert set(phases) == {"prefill", "insert", "decode", "host"} and min(phases.values()) > 0


def test_the_most_that_any_device_held(monkeypatch):
    each = [SimpleNamespace(memory_stats=lambda n=n: {"peak_bytes_in_use": n}) for n in (2e6, 3e6)]
    monkeypatch.setattr(jax, "local_devices", lambda: each)
    assert peaks()["peak_device_mb"] == 3.0


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    "packing", [("--micro_batch=0",), ("--packed", "--micro_batch=8", "--remat=full")]
)
def test_the_bench_of_an_update(capsys, packing):
    rows = ("--batch=16", "--row_len=40", "--lengths=longtail", "--runs=1")
    arguments = ["program", "train", *MODEL, *rows, "--prompt_len=5", *packing, "--json"]
    assert bench(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokens_per_second"] > 0 and found["peak_rss_mb"] > 100
    assert found["fraction_of_limit"] > 0 and found["compile_seconds"] > 0
    assert found["shape"]["remat"] == ("full" if "--remat=full" in packing else "dots")
    places = 16 * 40
    assert found["padding_fraction"] == pytest.approx(1 - found["tokens"] / places, abs=1e-4)
    if "--packed" in packing:
        assert found["responses"] > 24 and found["padding_fraction"] < 0.1
    else:
        assert found["responses"] == 16 and found["padding_fraction"] > 0.4


@pytest.mark.slow
@pytest.mark.parametrize("sharing", [(), ("--share_prompts",)])
def test_the_step_bench(capsys, standard_promotion, sharing):
    arguments = ["program", "step", *SMALL, "--slots=8", "--lengths=longtail", *sharing, "--json"]
    assert bench(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["share_prompts"] == bool(sharing)
    phases = found["seconds_by_phase"]
    assert set(phases) == {"rollout", "update"} and min(phases.values()) > 0
    assert sum(phases.values()) == pytest.approx(found["seconds_per_step"], abs=2e-4)
    assert found["compilations"] == 0 and 0 < found["padding_fraction"] < 0.5


def test_packed_long_tailed_rows_are_full():
    shape = TrainShape(4, 256, 4, 2, 1024, 512, "float32", 32, 160, 32, "longtail", True, 0, 1)
    rows = make_rows(shape)
    assert rows.tokens_BT.shape == (32, 160)
    assert (rows.segments_BT == 0).mean() <= 0.05


@pytest.mark.parametrize("longest", [8, 128, 4096])
def test_long_tailed_lengths_are_as_stated(longest):
    lengths = sample_lengths(1024, longest, "longtail")
    assert lengths.shape == (1024,) and 1 <= lengths.min() and lengths.max() == longest
    assert abs(lengths.mean() / longest - 0.25) < 0.02
    assert np.median(lengths) < 0.8 * lengths.mean(), "a tail"
    assert (sample_lengths(9, longest, "uniform") == longest).all()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("", "Known are rollout, mismatch, train, step; got"),
        ("walk", "got 'walk'"),
        ("rollout --lengths=short", "--lengths must be uniform or longtail"),
        ("rollout --heads=3", r"--heads \(3\) must divide --width \(256\)"),
        ("rollout --runs=0", "--runs must be above 0; got 0"),
        ("rollout --slots=-1", "--slots must be 0 or more; got -1"),
        ("rollout --vocab=1", "--vocab must be 2 or more.*got 1"),
        ("rollout --top_p=0", "--top_p must be above 0 and at most 1; got 0"),
        ("mismatch --temperature=0", "--temperature must be above 0"),
        ("mismatch --temperature=-1", "--temperature must be 0 or more; got -1"),
        ("train --heads=256 --kv_heads=256", r"--heads \(256\) must be even .*; got 1"),
        ("rollout --lengths=longtail --gen_len=1", "--lengths=longtail .*got 1 .*--gen_len"),
        ("train --lengths=longtail --row_len=35", "--lengths=longtail .*got 3 .*--row_len"),
        ("step --group=1", "--group must be 2 or more.*got 1"),
        ("step --temperature=2", "temperature.*Flags: --dtype"),
        ("rollout --gigabytes=1", "gigabytes.*Flags: --dtype"),
        ("train --row_len=32", r"--row_len \(32\) must be above --prompt_len \(32\)"),
        ("train --micro_batch=5", r"a divisor of --batch \(32\); got 5"),
        ("train --batch=6 --micro_batch=0", r"--batch \(6\) must be a multiple of 4"),
        ("train --batch=0", "--batch must be above 0; got 0"),
        ("train --remat=all", "--remat must be one of none, dots, .*; got 'all'"),
    ],
)
def test_a_wrong_command_is_refused(capsys, arguments, message):
    assert bench(["program", *arguments.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err and re.search(message, err), err
