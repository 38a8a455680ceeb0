"""Signatures of algorithms and models name the shapes of their arrays, and tests check them."""

import importlib
import inspect
import re
import typing

import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from dapo_jax import types
from dapo_jax.algorithms import advantages, surrogate
from tests.conftest import CHECKED
from tests.test_layers import MODULES


def public_functions():
    for name in MODULES:
        if not name.startswith(CHECKED):
            continue
        module = importlib.import_module(f"dapo_jax.{name}")
        for function_name, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__ == module.__name__ and not function_name.startswith("_"):
                yield f"{name}.{function_name}", function


@pytest.mark.parametrize("function", [pytest.param(f, id=id) for id, f in public_functions()])
def test_the_shape_of_every_array_is_the_end_of_its_name(function):
    for name, parameter in inspect.signature(function).parameters.items():
        found = re.search(r"_([A-Z]+)$", name)
        if found is None:
            continue
        options = typing.get_args(parameter.annotation) or (parameter.annotation,)
        dims = [option.dim_str for option in options if hasattr(option, "dim_str")]
        assert [dim.replace("*", "") for dim in dims] == [" ".join(found[1])], name
        for letter in found[1]:
            key = re.findall(rf"(?m)(?:^ {{4}}| {{3}}){letter}  \w", types.__doc__)
            assert len(key) == 1, f"{letter} of {name} has {len(key)} meanings in types.py"


def test_a_wrong_shape_or_type_is_found_in_the_tests():
    rows_BT = jnp.zeros((2, 3))
    with pytest.raises(jaxtyping.TypeCheckError, match="mask_BT"):
        surrogate.masked_log_ratio(rows_BT, rows_BT, jnp.ones((3, 2), bool))
    with pytest.raises(jaxtyping.TypeCheckError, match="mask_BT"):
        surrogate.masked_log_ratio(rows_BT, rows_BT, jnp.ones((2, 3)))
    with pytest.raises(jaxtyping.TypeCheckError, match="groups_R"):
        advantages.rloo(np.zeros(4), np.zeros(3, int))
