"""launch/check.py: its runner, its verdicts, and what the plan takes from it."""

import functools
import json
import os
import shlex
import signal
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.config import cli
from dapo_jax.rollout import sampling
from dapo_jax.tools.bench.shapes import bench_model
from dapo_jax.tools.check import numerics, page, rollout, runner, trace, tuning
from dapo_jax.tools.check.findings import Finding, Result, Store
from dapo_jax.tools.check.machine import MODELS, Machine, judged
from dapo_jax.tools.plan import chips
from dapo_jax.types import UserError
from tests.conftest import ROOT
from tests.support.helpers import tiny_config
from tests.support.runs import load_launcher

check = load_launcher("check")
CPU = Machine("cpu", "cpu", 1, None, chips.Chip("cpu", None, None, None, None, "", "cpu"), {})
H100 = Machine("gpu", "H100", 1, 80 * 2**30, chips.named("H100"), {"jax": "1"})


def test_the_part_device_on_this_machine(tmp_path, capsys):
    arguments = ["launch/check.py", f"--output={tmp_path}", "--parts=device"]
    assert check(arguments) == 0
    said = capsys.readouterr().out
    assert "ok       products, float32" in said and f"4 ok: {tmp_path}/check.html" in said
    stored = json.loads((tmp_path / "check.json").read_text())
    figures = {finding["name"]: finding["figures"] for finding in stored["findings"]}
    assert figures["memory"]["bytes_per_second"] > 1e8
    assert figures["kernels, small"] == {"rollout": "xla", "training": "xla"}
    assert "memory" in (tmp_path / "check.html").read_text()
    # What has a finding is not run again.
    assert check(arguments) == 0
    assert json.loads((tmp_path / "check.json").read_text()) == stored
    assert "products" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags, field",
    [
        (["--parts=device,speed"], "--parts"),
        (["--minutes=0"], "--minutes"),
        (["--minutes=nan"], "--minutes"),
        (["--here"], "--here needs one part in --parts; got 6"),
        (["--here", "--parts=foo"], "--parts must be some of"),
        (["--output=/dev/null/here"], "--output"),
        (["--output=/dev/null/here", "--tune"], "--output"),
    ],
)
def test_a_wrong_command_names_the_flag(flags, field, tmp_path, capsys):
    output = [] if "--output" in flags[0] else [f"--output={tmp_path}"]
    assert check(["launch/check.py", *flags, *output]) == 2
    assert field in capsys.readouterr().err


def launcher(folder, body):
    """A program that takes the place of launch/check.py in the processes of parts."""
    file = folder / "launcher.py"
    lines = "import sys, time\noutput = sys.argv[1].partition('=')[2]\n"
    file.write_text(lines + textwrap.dedent(body))
    return file


def test_a_part_that_takes_too_long_is_stopped_and_not_lost(tmp_path):
    Store(tmp_path).begin("step", ["one", "two"], {"kind": "x"})
    said = []
    slow = launcher(tmp_path, "time.sleep(60)")
    store = runner.run(slow, tmp_path, ["step", "resume"], 0.01, said.append)
    assert any("step: stopped" in line for line in said) and "resume: not run" in said[-1]
    assert not store.findings and page.counts(store) == "2 not run"


def test_a_check_that_is_stopped_stops_its_part_and_leaves_nothing(tmp_path):
    body = """
    import os, pathlib, signal, tempfile
    pathlib.Path(output, "left").write_text(f"{os.getpid()} {tempfile.mkdtemp()}")
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(60)
    """
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with pytest.raises(SystemExit, match="143"):
            runner.run(launcher(tmp_path, body), tmp_path, ["step"], 0.5, print)
    finally:
        signal.signal(signal.SIGTERM, before)
    pid, place = (tmp_path / "left").read_text().split()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)
    assert not os.path.exists(place) and (tmp_path / "check.html").exists()


def test_a_check_that_ends_its_process_is_wrong_and_the_others_are_run(tmp_path):
    Store(tmp_path).begin("step", ["one", "two", "three"], {"kind": "x"})
    body = f"""
    sys.path.insert(0, {str(ROOT)!r})
    from pathlib import Path
    from dapo_jax.tools.check.findings import Finding, Store
    store = Store(Path(output))
    for name in ("one", "two", "three"):
        if store.find("step", name) is None:
            if name == "two":
                sys.exit(-9)
            store.add(Finding("step", name, "ok", "", {{}}, 0.0))
    """
    store = runner.run(launcher(tmp_path, body), tmp_path, ["step"], 1, print)
    verdicts = {finding.name: finding.verdict for finding in store.findings}
    assert verdicts == {"one": "ok", "two": "wrong", "three": "ok"}
    assert "step.log" in store.findings[1].reason


def test_findings_of_another_machine_are_refused(tmp_path):
    Store(tmp_path).begin("device", ["memory"], H100.identity())
    with pytest.raises(UserError, match="kind"):
        runner.run_here(tmp_path, "device", {})
    (tmp_path / "check.json").write_text("{}")
    with pytest.raises(UserError, match="--output"):
        Store(tmp_path)


@pytest.mark.parametrize("part", ["update", "step", "resume"])
def test_a_part_whose_models_do_not_fit_says_so(part, tmp_path, monkeypatch):
    small = H100._replace(memory_bytes=12 * 2**30)
    monkeypatch.setattr("dapo_jax.tools.check.machine.this_machine", lambda: small)
    runner.run_here(tmp_path, part, {})
    (found,) = Store(tmp_path).findings
    assert found.part == part and found.verdict == "not run" and "memory" in found.reason


@pytest.mark.parametrize(
    "error, verdict",
    [
        (ValueError("first line\nsecond"), "wrong"),
        (RuntimeError("RESOURCE_EXHAUSTED: 3 GB"), "not run"),
    ],
)
def test_a_check_that_fails(error, verdict):
    def fails():
        raise error

    result = runner._result(fails)
    assert result.verdict == verdict and "second" not in result.reason


def test_models_that_fit():
    assert list(CPU.models(2)) == ["small"]
    assert list(H100.models(2)) == ["0.5B", "1.5B", "7B"]
    assert list(H100.models(16)) == ["0.5B", "1.5B"]
    assert H100.models(2)["7B"][-1] == "bfloat16"


def test_a_chip_is_judged_by_its_share_and_a_cpu_is_not():
    assert judged(0.4, 0.5, H100, "40 %", {}).verdict == "slow"
    assert judged(0.6, 0.5, H100, "60 %", {}).verdict == "ok"
    assert judged(0.1, 0.5, CPU, "10 %", {}).verdict == "ok"


def test_nothing_is_tuned_without_a_tpu(tmp_path, capsys):
    assert check(["launch/check.py", f"--output={tmp_path}", "--tune"]) == 0
    assert "nothing to tune here" in capsys.readouterr().out
    assert not (tmp_path / tuning.FILE).exists()


def test_blocks_that_are_refused_without_a_reason_are_passed_over(monkeypatch):
    def refuses(*_):
        raise AssertionError

    said = []
    monkeypatch.setattr(tuning, "program", lambda *_: (refuses, []))
    monkeypatch.setattr(tuning, "values", lambda *_: [])
    assert tuning.measured(tiny_config().model, "decode", {"a": 1}, said.append) is None
    assert said == ["  {'a': 1}: AssertionError()"]


def test_the_fastest_blocks_are_chosen_group_by_group():
    """What is refused, or hardly faster than the default, is not; a later group has the first's."""
    groups = (
        tuning.Group("decode", ({"paged_kv": 512}, {"paged_kv": 2048}, {"paged_kv": 4096})),
        tuning.Group("decode", ({"paged_queries": 1}, {"paged_queries": 2})),
        tuning.Group("forward", ({"splash_q": 256}, {"splash_q": 1024})),
    )
    of = {512: 1.2, 2048: 0.8, 4096: None, 256: 0.99, 1024: 0.7}

    def seconds(pass_, blocks):
        sizes = dict(blocks)
        if pass_ == "forward":
            return of.get(sizes.get("splash_q"), 1.0)
        took = of.get(sizes.get("paged_kv"), 1.0)
        return took if took is None else took * {2: 0.5}.get(sizes.get("paged_queries"), 1.0)

    blocks, lines = tuning.best(groups, seconds)
    assert blocks == (("paged_kv", 2048), ("paged_queries", 2), ("splash_q", 1024))
    assert len(lines) == 10
    assert lines[3] == {"pass": "decode", "blocks": {"paged_kv": 4096}, "seconds": None}
    of[1024] = 0.985
    assert tuning.best(groups, seconds)[0] == (("paged_kv", 2048), ("paged_queries", 2))


def test_the_flag_of_tuned_blocks_sets_them():
    blocks = (("splash_q", 1024), ("paged_kv", 2048))
    arguments = [f"--config={ROOT / 'configs' / 'tiny_dapo.py'}", *shlex.split(tuning.flag(blocks))]
    config, _ = cli.parse(["launch/train.py", *arguments], "")
    assert config.model.kernel_blocks == blocks


@pytest.mark.parametrize("name", ["0.5B", "1.5B", "7B"])
def test_candidates_are_sizes_that_a_config_takes(name):
    c = bench_model((*MODELS[name], "bfloat16"))
    groups = tuning.groups(c)
    assert {group.pass_ for group in groups} >= {"forward", "backward"}
    assert any(group.pass_ == "decode" for group in groups) == (c.head_dim == 128)
    for group in groups:
        for candidate in group.candidates:
            tiny_config(model__kernel_blocks=tuple(candidate.items()))
        _, shapes = tuning.program(c, group.pass_, ())
        arguments = jax.eval_shape(functools.partial(tuning.values, group.pass_, shapes))
        assert [(x.shape, x.dtype) for x in arguments] == [(x.shape, x.dtype) for x in shapes]


def test_the_bytes_and_operations_of_a_token():
    """Qwen2.5-1.5B in bfloat16: 1.54e9 parameters, 28,672 bytes of cache a token."""
    c = rollout.bench_model(H100.models(2)["1.5B"])
    shape = rollout._shape(H100.models(2)["1.5B"], H100, 64)
    operations, read = rollout.decode_work(c, shape, 1)
    cached = 64 * (512 + 128)
    assert read == pytest.approx(2 * 1.544e9 + cached * 28_672, rel=0.01)
    assert operations == pytest.approx(64 * 2 * 1.544e9 + 4 * 28 * 1536 * cached, rel=0.01)
    # Two heads of keys: eight devices are four replicas of two, and each reads the weights.
    of_four = rollout.decode_work(c, shape, 8)
    assert of_four[0] == operations
    assert of_four[1] == pytest.approx(4 * 2 * 1.544e9 + cached * 28_672, rel=0.01)


def test_attention_that_forgets_segments_is_found(monkeypatch):
    packed = numerics.xla.packed
    forgets = lambda segments, choice: packed(jnp.zeros_like(segments), choice)
    monkeypatch.setattr(numerics.xla, "packed", forgets)
    assert numerics._attention(CPU, "float32", None).verdict == "wrong"


def test_a_sampler_that_keeps_too_much_is_found(monkeypatch):
    sample = sampling.sample
    all_of_it = lambda logits, keys, at, params, mode: sample(
        logits, keys, at, params._replace(top_p_X=jnp.ones(len(keys))), mode
    )
    assert numerics._sampling().verdict == "ok"
    monkeypatch.setattr(numerics.sampling, "sample", all_of_it)
    assert numerics._sampling().verdict == "wrong"


def test_a_comparison_that_is_not_a_number_is_wrong():
    found = numerics._compared({"x": (np.array([np.nan]), np.ones(1))}, 1.0, "text")
    assert found.verdict == "wrong"


def test_a_difference_that_is_not_a_number_is_the_worst():
    assert numerics._worst({"first": 1.0, "far": float("nan"), "last": 2.0}) == "far"


def test_time_in_which_something_runs_counts_once():
    assert trace._union([(0, 2), (5, 6), (1, 3), (5, 5.5)]) == 4


def test_a_trace_of_this_machine():
    x = jnp.ones((400, 400))
    found = trace.traced(lambda: (x @ x).block_until_ready())
    assert 0 < found.busy_seconds <= found.seconds * 1.5 and found.longest(1)[0]["times"] >= 1


def profile(folder, **figures):
    store = Store(folder)
    store.begin("rollout", figures, {"kind": "NVIDIA H200"})
    for name, value in figures.items():
        store.add(Finding("rollout", name, *Result("ok", "", {name: value}), seconds=1.0))
    return store.file


def test_the_plan_takes_measured_shares(tmp_path):
    file = profile(tmp_path, products_share=0.6, memory_share=0.7)
    chip = chips.with_profile(chips.named("H200"), file)
    assert (chip.products_share, chip.memory_share) == (0.6, 0.7)
    assert chip.flops == chips.named("H200").flops
    with pytest.raises(UserError, match="'NVIDIA H200'.*H100"):
        chips.with_profile(chips.named("H100"), file)


def test_of_several_models_the_largest_counts(tmp_path):
    """Also where a smaller one was checked again, and is last in the file."""
    store = Store(tmp_path)
    store.begin("rollout", ["0.5B", "1.5B"], {"kind": "NVIDIA H200"})
    for name, share in (("1.5B", 0.5), ("0.5B", 0.2)):
        figures = {"products_share": share, "memory_share": share}
        store.add(Finding("rollout", name, "ok", "", figures, 1.0))
    chip = chips.with_profile(chips.named("H200"), store.file)
    assert (chip.products_share, chip.memory_share) == (0.5, 0.5)


def test_a_profile_without_measurements_names_the_parts(tmp_path):
    with pytest.raises(UserError, match="memory_share.*rollout"):
        chips.with_profile(chips.named("H200"), profile(tmp_path, products_share=0.6))
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(UserError, match="--profile"):
        chips.with_profile(chips.named("H200"), tmp_path / "other.json")


def test_a_profile_of_a_chip_without_stated_rates_says_so():
    file = ROOT / "docs" / "accelerators" / "cpu" / "check.json"
    with pytest.raises(UserError, match="'cpu', whose rates are not known.*NVIDIA H200"):
        chips.with_profile(CPU.chip, file)


def test_the_document_is_that_of_the_stored_checks(tmp_path):
    stored = ROOT / "docs" / "accelerators.md"
    copy = tmp_path / "accelerators.md"
    copy.write_text(stored.read_text())
    page.write_document(copy, stored.with_suffix(""))
    assert copy.read_text() == stored.read_text()


def test_what_was_wrong_is_checked_again(tmp_path):
    store = Store(tmp_path)
    store.begin("step", ["one", "two"], {"kind": "x"})
    for name, verdict in (("one", "ok"), ("two", "wrong")):
        store.add(Finding("step", name, verdict, "", {}, 1.0))
    again = """
        import pathlib
        from dapo_jax.tools.check.findings import Finding, Store
        store = Store(pathlib.Path(output))
        store.begin("step", ["one", "two"], {"kind": "x"})
        assert [finding.name for finding in store.findings] == ["one"]
        store.add(Finding("step", "two", "slow", "this time", {}, 1.0))
    """
    body = f"sys.path.insert(0, {str(ROOT)!r})\n{textwrap.dedent(again)}"
    said = []
    store = runner.run(launcher(tmp_path, body), tmp_path, ["step"], 1, said.append)
    assert page.counts(store) == "1 ok, 1 slow"
    assert [line for line in said if "two" in line and "this time" in line] and len(said) == 2
