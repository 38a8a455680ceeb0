"""The precision of matrix products."""

import functools
import re

import jax
import numpy as np
import pytest

from dapo_jax.models import decoder
from dapo_jax.rollout.programs import Programs
from dapo_jax.training import packing, step
from dapo_jax.training.learner import Learner
from dapo_jax.utils.precision import multiply_in
from tests.support.engines import make_engine
from tests.support.helpers import make_mesh, tiny_config


@pytest.fixture
def precision():
    """Reads the default of the process, which is reset after the test."""
    yield lambda: jax.config.jax_default_matmul_precision
    jax.config.update("jax_default_matmul_precision", None)


def products_of_an_update(dtype):
    """Returns the matrix products of an update with float32 parameters, as lines of its program."""
    config = tiny_config(model__compute_dtype=dtype)
    params = decoder.param_shapes(config.model)
    state = jax.eval_shape(functools.partial(step.init_state, config), params)
    rows = packing.to_micro_batches(
        packing.empty_rows(16, 22), rows_per_micro_batch=8, num_micro_batches=2
    )
    lowered = step.jitted_update(config, make_mesh(config, 1)).lower(
        state, rows, np.int32(2), np.float32(1), np.float32(1), None
    )
    return re.findall(r".* stablehlo.dot_general .*", lowered.as_text())


@pytest.mark.parametrize(
    "dtype, platform, wanted",
    [("float32", "tpu", "highest"), ("float32", "cpu", None), ("bfloat16", "tpu", None)],
)
@pytest.mark.usefixtures("standard_promotion")
def test_models_in_float32_multiply_in_float32_on_accelerators(precision, dtype, platform, wanted):
    multiply_in(dtype, platform)
    assert precision() == wanted
    products = products_of_an_update(dtype)
    highest = ["HIGHEST" in line for line in products]
    assert len(products) > 10 and all(highest) == any(highest) == (wanted is not None)


def test_engine_and_learner_set_the_precision(monkeypatch):
    calls = []
    for module in ("training.learner", "rollout.programs"):
        monkeypatch.setattr(f"dapo_jax.{module}.multiply_in", lambda *given: calls.append(given))
    Programs.cache_clear()
    make_engine()
    config = tiny_config()
    Learner(config, make_mesh(config, 1), lambda x: [], print)
    assert calls == [("float32", "cpu")] * 2
