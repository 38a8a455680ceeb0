"""Packages import downward only, and each heavy library stays in its place."""

import ast

import pytest

from tests.conftest import ROOT

# Each package or top module may import those before it, and itself.
ORDER = [
    "types", "utils", "algorithms", "rewards", "distributed", "config", "data", "models",
    "rollout", "runs", "training", "evaluation", "setup", "train_loop", "tools", "api",
]  # fmt: skip
# Besides: these do not import each other, and algorithms are pure.
APART = {"training": {"rollout"}, "algorithms": {"rewards"}}
# Modules that may import a library, by the first part of its name.
PLACES = {
    "jetstream": {"rollout.jetstream"},
    "orbax": {"runs.checkpoint"},
    "etils": {"runs.checkpoint"},
    "fsspec": {"runs.checkpoint"},
    "grain": {"data.stream"},
    "transformers": {"data.tokenizer"},
    "tokenizers": {"data.tokenizer"},
    "huggingface_hub": {"utils.hf_hub"},
    "safetensors": {"models.hf_weights"},
    "pyarrow": {"data.records", "data.dataset"},
    "jinja2": {"data.prompts"},
    "matplotlib": {"runs.report.plots"},
    "tensorboardX": {"runs.trackers"},
    "pebble": {"rewards.pool"},
    "math_verify": {"rewards.scorers"},
    "ml_collections": {"config.cli"},
    "absl": {"config.cli", "rollout.jetstream"},
    "scipy": {"algorithms.advantages", "runs.report.scaling"},
}
# Reward workers import these: they start in a second, not in five.
WITHOUT_JAX = {"types", "rewards.types", "rewards.scorers", "rewards.pool"}
NEVER = {"torch", "tensorflow", "seqio"}
MOST_EDGES = 80  # between packages


def modules():
    files = sorted((ROOT / "dapo_jax").rglob("*.py"))
    name = lambda file: ".".join(file.relative_to(ROOT / "dapo_jax").with_suffix("").parts)
    return {name(file).removesuffix("__init__").removesuffix("."): file for file in files}


MODULES = modules()


def imports_of(file):
    """Names imported anywhere in the file, except for type checking alone; modules of ours as
    `dapo_jax.name`."""
    tree = ast.parse(file.read_text())
    only_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in only_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, "imports are absolute"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full.removeprefix("dapo_jax.") in MODULES else node.module


def ours(name):
    """Modules of this project that a module imports."""
    for imported in imports_of(MODULES[name]):
        root, _, rest = imported.partition(".")
        if root == "dapo_jax" and rest:
            yield rest


def package_of(name):
    return name.split(".")[0]


def test_every_package_has_its_place():
    assert {package_of(name) for name in MODULES} - {""} == set(ORDER)


@pytest.mark.parametrize("name", sorted(set(MODULES) - {""}))
def test_imports_point_downward(name):
    package = package_of(name)
    for imported in ours(name):
        other = package_of(imported)
        where = f"{name} imports {imported}"
        assert ORDER.index(other) <= ORDER.index(package), f"{where}, which stands above it"
        assert other not in APART.get(package, ()), where
    for imported in imports_of(MODULES[name]):
        root = imported.partition(".")[0]
        assert root not in NEVER, f"{name} imports {root}"
        assert name in PLACES.get(root, {name}), f"{root} is imported in {name}"


def test_packages_have_few_edges():
    edges = {
        (package_of(name), package_of(imported))
        for name in MODULES
        if name
        for imported in ours(name)
    }
    assert len({(a, b) for a, b in edges if a != b}) <= MOST_EDGES


def test_what_reward_workers_import_needs_no_jax():
    reached, waiting = set(), list(WITHOUT_JAX)
    while waiting:
        name = waiting.pop()
        if name in reached:
            continue
        reached.add(name)
        for imported in imports_of(MODULES[name]):
            assert imported.partition(".")[0] not in ("jax", "flax", "optax"), name
        parents = [".".join(name.split(".")[:i]) for i in range(1, name.count(".") + 1)]
        waiting += [*ours(name), *parents]


def test_no_import_circles():
    """Within a package too: the modules can be put in an order."""
    left = {name: set(ours(name)) - {name} for name in MODULES}
    while left:
        free = [name for name, needs in left.items() if not needs & left.keys()]
        assert free, f"a circle among {sorted(left)}"
        for name in free:
            del left[name]
