"""Programs compile for TPUs and exchange little, with the extra `tpu`'s versions."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tomllib

import pytest

from tests.conftest import ROOT
from tests.studies import tpu_programs

# Of the configs of docs/plan.md the one with the largest mesh and one for a single chip. The others
# take minutes each, and are compiled by the commands of docs/plan.md and docs/lora.md.
COMPILED = {"qwen32b_dapo": "v5p:4x4x4", "qwen0_5b_gsm8k": "v5e:1x1"}


def versions_of_the_extra():
    """{distribution: version} of the extra `tpu` for this Python."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    here = "<" if sys.version_info < (3, 12) else ">="
    pinned = re.compile(r"([\w-]+)(?:\[\w+\])?==([\d.]+); python_version (<|>=) '3\.12'")
    found = [pinned.fullmatch(line) for line in extras["optional-dependencies"]["tpu"]]
    assert all(found), "each line pins one version for one side of Python 3.12"
    return {line[1]: line[2] for line in found if line[3] == here}


def installed(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def test_the_extra_pins_what_pods_install():
    assert versions_of_the_extra().keys() == {"jax", "libtpu"}


def skip_unless_pinned():
    """Skips where other versions are installed than a pod has."""
    for package, version in versions_of_the_extra().items():
        if installed(package) != version:
            found = installed(package) or "none"
            pytest.skip(f"needs {package} {version} (uv sync --extra tpu); installed is {found}")


def environment():
    """Without the tests' own flags, which are for programs that are compiled fast and run once.

    XLA's least effort to make the program fast compiles it in a third of the time. Its memory is
    much the same: 36.1 GB for the 32B's update, with the usual effort 37.0.
    """
    kept = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    effort = {"JAX_EXEC_TIME_OPTIMIZATION_EFFORT": "-1.0"}
    return kept | effort | {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_the_update_compiles_with_the_versions_that_a_pod_installs(name):
    skip_unless_pinned()
    flags = [f"--config=configs/{name}.py", f"--topology={COMPILED[name]}", "--program=train"]
    done = subprocess.run(
        [sys.executable, "launch/plan.py", *flags, "--json"],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    numbers = found["programs"]["train"]
    assert found["fits"] and not numbers["refused"] and numbers["temp_bytes"] > 0
    said = done.stderr.splitlines()
    assert len(said) == 1 and said[0].startswith("compiling train"), "none of libtpu's own errors"


@pytest.fixture(scope="module")
def found_for_all():
    """{topology: what its compiled decode, insert, prefill and update programs have}"""
    skip_unless_pinned()
    done = subprocess.run(
        [sys.executable, "-m", "tests.studies.tpu_programs"],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = map(json.loads, done.stdout.splitlines())
    return {one["topology"]: one for one in found}


@pytest.fixture(scope="module", params=tpu_programs.TOPOLOGIES)
def found(request, found_for_all):
    """What the programs have for four chips of a kind."""
    return found_for_all[request.param]


@pytest.mark.slow
def test_a_decode_step_exchanges_no_logits(found):
    """With top-p. Hidden states of the slots are the largest that any chip gets from another."""
    decode = found["decode"]
    assert decode["exchanges"] > 0
    assert decode["largest"] <= found["hidden"] < found["own_logits"] / 10


@pytest.mark.slow
def test_shards_decode_without_waiting_for_each_other(found):
    """No exchange says whether sequences ended: a loop goes on by what each chip knows."""
    decode = found["decode"]
    assert not decode["between_shards"] + decode["of_one_element"] + decode["in_conditions"]


@pytest.mark.slow
def test_the_pool_is_never_copied(found):
    for name in ("decode", "insert"):
        assert not found[name]["pool_copied"], name
    assert found["decode"]["temporary_bytes"] < found["own_pool_layer_bytes"]


@pytest.mark.slow
def test_keys_and_values_stay_where_prefill_made_them(found):
    prefill = found["prefill"]
    assert prefill["exchanges"] > 0
    assert not prefill["other_than_sums"] + prefill["relaid"]
    assert not found["insert"]["exchanges"]


@pytest.mark.slow
def test_an_update_exchanges_no_logits(found):
    assert found["train"]["exchanges"] > 0 and not found["train"]["large"]
