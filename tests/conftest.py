"""Eight virtual CPU devices, strict promotion, and small configs shared by the tests."""

import gc
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
# The tests compile much and compute little. XLA's older emitters of fusions compile twice as fast
# as the new ones. The option is an extra one: XLA passes over those of them that it does not know.
FAST_COMPILATION = (
    "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1 "
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
)
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=8 {FAST_COMPILATION}"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"  # a test that reaches for the network fails at once
if sys.dont_write_bytecode:
    # Where modules may not have byte code next to them, pytest's cache has it: a run in a process
    # of its own imports 2,000 modules, in 5 s from byte code and in 13 s from their sources.
    sys.dont_write_bytecode = False
    sys.pycache_prefix = str(ROOT / ".pytest_cache" / "d" / "bytecode")
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
    os.environ["PYTHONDONTWRITEBYTECODE"] = ""  # empty is off

import jax
import pytest
from jaxtyping import install_import_hook

from tests.support import type_checker

# Every test checks the shapes and types of their signatures. The hook precedes their first import.
CHECKED = (
    "algorithms",
    "models.attention",
    "models.chunked_softmax",
    "models.decoder",
    "models.log_probs",
    "models.rotary",
)
install_import_hook([f"dapo_jax.{name}" for name in CHECKED], f"{type_checker.__name__}.checked")

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

from tests.support.helpers import tiny_config

# Each compiled program takes 3 to 15 maps of memory, and a process may have 65,530 on Linux. XLA
# crashes at the next one (docs/log.md).
MOST_MAPS = 30_000


@pytest.fixture(scope="module", autouse=True)
def freeze():
    """Compiled programs stay after a file, millions of objects, and each collection of garbage
    looked through all of them, for 2 s after some files. It passes over what is frozen."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()
        gc.unfreeze()
    gc.collect()
    gc.freeze()


@pytest.fixture
def config():
    """A checked config of a model small enough for a test."""
    return tiny_config()


@pytest.fixture(scope="session")
def home(tmp_path_factory):
    """A user's cache directory, shared by the whole runs of a session: base models, programs."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def cache_home(tmp_path_factory, monkeypatch):
    """A user cache directory of the test's own."""
    home = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    return home


@pytest.fixture
def standard_promotion():
    """For tests that run optax's update, which is not written for strict promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


LONGEST = (
    "test_compiled_for_tpus",
    "test_lost_processes",
    "test_processes",
    "test_replicas",
    "test_runs",
    "test_notebooks",
    "test_learning",
    "test_methods",
    "test_properties",
)


def pytest_collection_modifyitems(items):
    """The longest files first, so that the processes end together (see addopts)."""
    rank = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(LONGEST)))
