"""The gradient of adapters in twenty random ways against a plain program in float64.

    python -m tests.studies.lora_gradients

Meshes of up to 8 virtual devices, packing, cuts into micro-batches, remat, ranks and scales are
drawn. What is compared, and how closely: tests/training/test_exact_gradient.py, whose tests are the
first three.
"""

import numpy as np
import pytest

import tests.conftest  # noqa: F401  8 virtual devices
from tests.support.helpers import in_groups, random_samples
from tests.training.test_exact_gradient import check_adapters, random_way

if __name__ == "__main__":
    samples = in_groups(random_samples(np.random.default_rng(0), 12), 4)
    for seed in range(20):
        with pytest.MonkeyPatch.context() as patch:
            check_adapters(seed, samples, patch)
        print(f"{seed}: equal, {random_way(np.random.default_rng(seed))}", flush=True)
