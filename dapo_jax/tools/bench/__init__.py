"""Measurements: what launch/bench.py runs."""

from dapo_jax.tools.bench.mismatch import bench_mismatch
from dapo_jax.tools.bench.rollout import bench_rollout
from dapo_jax.tools.bench.shapes import Shape
from dapo_jax.tools.bench.step import bench_step
from dapo_jax.tools.bench.train import TrainShape, bench_train

__all__ = [
    "Shape",
    "TrainShape",
    "bench_mismatch",
    "bench_rollout",
    "bench_step",
    "bench_train",
]
