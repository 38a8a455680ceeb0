"""Imports point downward only, and each heavy library stays in its place."""

import ast

import pytest

from tests.conftest import ROOT

# Each layer may import those before it, and its own.
LAYERS = [
    ["types", "fields", "products", "reward"],
    # methods: functions, and the arguments that a config may give them
    ["objective", "policy_losses", "advantage"],
    ["objective_checks", "config_checks"],
    ["config"],
    # pure, and hosts' small tools
    ["aggregation", "corrections", "covariance", "batching", "row_order", "scorers", "rows", "hub",
     "sources", "prompts", "estimators", "arithmetic", "prefilter", "partial_rollouts", "progress",
     "board", "processes", "teams", "stop_signals", "watchdog",
     "profiling", "compilations", "hf_config", "rotary", "random_streams"],
    ["model", "attention", "attention_kernels", "vocabulary", "log_probs", "sharding",
     "samples", "data", "tokenizer", "checkpoint", "reward_pool", "scoring", "votes",
     "run_directory", "report", "benchmark_page", "report_data", "report_plots", "paper_curves"],
    ["rollout.jetstream", "rollout.sampling", "rollout.kernels", "rollout.tiles",
     "rollout.paged", "rollout.slots", "rollout.spec", "rollout.programs", "rollout.engine",
     "rollout.stop_strings", "rollout.admission", "rollout.scheduler", "rollout"],
    ["optimizer", "train_step", "critic", "dynamic_sampling", "pretrain", "problems", "memory",
     "plan"],
    ["weights"],
    ["base", "evaluate", "metrics", "score_file"],
    ["benchmarks"],
    ["learner"],
    ["trainer"],
    ["planning.chips", "planning.programs", "planning.compiled", "planning.estimate",
     "planning.plan", "planning.report", "planning.search", "planning.virtual",
     "planning.workload", "planning.simulation", "planning.price", "planning.many_hosts",
     "planning"],
    ["drawing", "train", "evaluate_model"],
    ["export", "generate"],
    ["bench.memory", "bench.load", "bench.shapes", "bench.rollout", "bench.gap", "bench.train",
     "bench.packing", "bench.step", "bench"],
    ["command_line"],
]  # fmt: skip

# Who may import what, by the first part of its name.
PLACES = {
    "jetstream": {"rollout.jetstream"},
    "orbax": {"checkpoint"},
    "etils": {"checkpoint"},
    "fsspec": {"checkpoint"},
    "grain": {"data"},
    "transformers": {"tokenizer"},
    "tokenizers": {"tokenizer"},
    "huggingface_hub": {"hub"},
    "safetensors": {"weights", "bench.load"},
    "pyarrow": {"rows", "problems"},
    "jinja2": {"prompts"},
    "matplotlib": {"report_plots", "benchmark_page"},
    "tensorboardX": {"run_directory"},
    "pebble": {"reward_pool"},
    "math_verify": {"scorers"},
    "ml_collections": {"command_line"},
    "absl": {"command_line", "rollout.jetstream"},
    "scipy": {"advantage"},
}
WITHOUT_JAX = {
    "types", "fields", "objective_checks", "config_checks", "config",
    "reward", "scorers", "reward_pool", "estimators", "rows", "hub", "hf_config", "sources",
    "prompts", "problems", "votes", "scoring",
    "arithmetic", "data", "aggregation", "advantage", "corrections", "covariance", "batching",
    "samples", "prefilter", "partial_rollouts", "progress", "board", "watchdog", "report",
    "report_data", "report_plots", "paper_curves",
}  # fmt: skip
PACKAGES = {"dapo_jax", "dapo_jax.rollout", "dapo_jax.bench", "dapo_jax.planning"}
NEVER = {"torch", "tensorflow", "seqio"}


def modules():
    files = sorted((ROOT / "dapo_jax").rglob("*.py"))
    name = lambda file: ".".join(file.relative_to(ROOT / "dapo_jax").with_suffix("").parts)
    return {name(file).removesuffix(".__init__"): file for file in files} | {}


def imports_of(file):
    """Names imported anywhere in the file, modules of ours as `dapo_jax.name`; for types alone not
    counted."""
    tree = ast.parse(file.read_text())
    for statement in tree.body:
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING":
            statement.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, "imports are absolute"
            if node.module in (
                "dapo_jax",
                "dapo_jax.rollout",
                "dapo_jax.bench",
                "dapo_jax.planning",
            ):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            else:
                yield node.module


LAYER_OF = {name: number for number, names in enumerate(LAYERS) for name in names}


def test_every_module_has_a_layer():
    assert set(modules()) - {"__init__"} == set(LAYER_OF)


@pytest.mark.parametrize("name", sorted(LAYER_OF))
def test_imports_point_downward(name):
    for imported in imports_of(modules()[name]):
        root, _, rest = imported.partition(".")
        if root == "dapo_jax":
            assert LAYER_OF[rest] <= LAYER_OF[name], f"{name} imports {rest}, which stands above it"
        assert root not in NEVER, f"{name} imports {root}"
        assert name in PLACES.get(root, {name}), f"{root} is imported in {name}"
        if name in WITHOUT_JAX:
            assert root not in ("jax", "flax", "optax"), f"{name} imports {root}"


def test_no_import_circles():
    """Within a layer too: the modules can be put in an order."""
    left = {
        name: {i.removeprefix("dapo_jax.") for i in imports_of(file) if i.startswith("dapo_jax.")}
        for name, file in modules().items()
    }
    while left:
        free = [name for name, needs in left.items() if not needs & left.keys()]
        assert free, f"a circle among {sorted(left)}"
        for name in free:
            del left[name]
