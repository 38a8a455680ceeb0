"""The precision of matrix products."""

import dataclasses
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
from tests.support.helpers import make_mesh, replace_model, tiny_config


@pytest.fixture
def precision():
    """The default, which is set for a process, as it was before the test."""
    yield lambda: jax.config.jax_default_matmul_precision
    jax.config.update("jax_default_matmul_precision", None)


def products_of_an_update(dtype):
    """The matrix products of an update with parameters in float32, as lines of its program."""
    config = tiny_config()
    config = dataclasses.replace(config, model=replace_model(config, compute_dtype=dtype))
    params = decoder.param_shapes(config.model)
    state = jax.eval_shape(functools.partial(step.init_state, config), params)
    rows = packing.to_micro_batches(
        packing.empty_rows(16, 22), rows_per_micro_batch=8, num_micro_batches=2
    )
    lowered = step.compile_update(config, make_mesh(config, 1)).lower(
        state, rows, np.int32(2), np.float32(1), np.float32(1), None
    )
    return re.findall(r".* stablehlo.dot_general .*", lowered.as_text())


@pytest.mark.parametrize(
    "dtype, platform, set_",
    [
        ("float32", "tpu", "highest"),
        ("float32", "cuda", "highest"),
        ("float32", "cpu", None),
        ("bfloat16", "tpu", None),
    ],
)
@pytest.mark.usefixtures("standard_promotion")
def test_models_in_float32_multiply_in_float32_on_accelerators(precision, dtype, platform, set_):
    multiply_in(dtype, platform)
    assert precision() == set_
    products = products_of_an_update(dtype)
    highest = ["HIGHEST" in line for line in products]
    assert len(products) > 10 and all(highest) == any(highest) == (set_ is not None)


def test_whoever_makes_the_programs_says_so(precision, monkeypatch):
    said = []
    for module in ("training.learner", "rollout.programs"):
        monkeypatch.setattr(f"dapo_jax.{module}.multiply_in", lambda *given: said.append(given))
    Programs.cache_clear()
    make_engine()
    config = tiny_config()
    Learner(config, make_mesh(config, 1), lambda x: [], print)
    assert said == [("float32", "cpu")] * 2
