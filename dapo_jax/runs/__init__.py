"""Run directories, checkpoints, and the page of plots (`dapo_jax.runs.report`).

Checkpoints are imported from `dapo_jax.runs.checkpoint`: orbax and jax take seconds to load.
"""

from dapo_jax.runs.run_directory import RunDirectory, check_same, frozen, read_config

__all__ = ["RunDirectory", "check_same", "frozen", "read_config"]
