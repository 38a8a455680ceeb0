"""Where the arrays of an update lie on eight devices, and what they exchange, as compiled."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dapo_jax.models import decoder
from dapo_jax.models.sharding import AXES, AXIS_TYPES, copied_bytes, param_shardings, param_specs
from dapo_jax.tools.plan import dry_run
from dapo_jax.training import packing, step
from dapo_jax.types import UserError
from tests.support.helpers import make_mesh, replace_model, tiny_config
from tests.support.hlo import arrays, collectives

# Sizes that no two axes share, so that a shape says what it is.
CONFIG = tiny_config(
    model__hidden_size=32,
    model__num_layers=3,
    model__num_heads=8,
    model__num_kv_heads=2,
    model__head_dim=10,
    model__intermediate_size=96,
    model__vocab_size=56,
    mesh__data=1,
    mesh__fsdp=4,
    mesh__tensor=2,
)
CONFIG = dataclasses.replace(
    CONFIG,
    model=replace_model(CONFIG, remat="full"),
    mesh=dataclasses.replace(CONFIG.mesh, rules=(("vocab", "tensor"), *CONFIG.mesh.rules[1:])),
)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(CONFIG, 8)


@pytest.fixture(scope="module")
def compiled(mesh):
    return compiled_update(CONFIG, mesh)


def compiled_update(config, mesh, tokens=22):
    """Of two micro-batches of eight rows of as many tokens."""
    params = decoder.param_shapes(config.model)
    with jax.numpy_dtype_promotion("standard"):
        state = jax.eval_shape(functools.partial(step.init_state, config), params)
        rows = packing.to_micro_batches(
            packing.empty_rows(16, tokens), rows_per_micro_batch=8, num_micro_batches=2
        )
        program = step.jitted_update(config, mesh)
        return program.lower(state, rows, np.int32(2), np.float32(1), np.float32(1), None).compile()


def test_state_comes_and_goes_where_the_rules_put_it(compiled, mesh):
    wanted = param_shardings(CONFIG.model, CONFIG.mesh, mesh)
    (state, *_), _ = compiled.input_shardings
    new, _ = compiled.output_shardings
    adam, adam_new = state.moments[1], new.moments[1]
    shapes = jax.tree.leaves(decoder.param_shapes(CONFIG.model))
    for tree in (state.params, new.params, adam.mu, adam.nu, adam_new.mu, adam_new.nu):
        for got, want, shape in zip(*map(jax.tree.leaves, (tree, wanted)), shapes, strict=True):
            assert got.is_equivalent_to(want, len(shape.shape)), (shape, got, want)


def test_matrices_are_split_over_every_axis():
    """That is, the rules of the config leave none of them whole over fsdp or tensor."""
    for shape, spec in zip(
        jax.tree.leaves(decoder.param_shapes(CONFIG.model)),
        jax.tree.leaves(param_specs(CONFIG.model, CONFIG.mesh)),
        strict=True,
    ):
        if np.prod(shape.shape) > 1000:
            assert {axis for axis in spec if axis} == {"fsdp", "tensor"}, (shape, spec)


def part_of(shape, spec, axes):
    """What a device has of an array that is split over these of the axes that its spec names."""
    sizes = {"fsdp": 4, "tensor": 2}
    return tuple(n // (sizes[axis] if axis in axes else 1) for n, axis in zip(shape, spec))


def test_no_device_ever_holds_all_of_a_matrix(compiled):
    """Parameters, gradients, moments and whatever is made of them: a device has at most one layer
    of a matrix, gathered over fsdp and still split over tensor."""
    sizes = lambda shape: tuple(sorted(n for n in shape if n > 1))  # axes in any order
    held = {sizes(shape) for _, shape in arrays(compiled.as_text())}
    specs = param_specs(CONFIG.model, CONFIG.mesh)["layers"]
    matrices = {
        name: leaf.shape
        for name, leaf in decoder.param_shapes(CONFIG.model)["layers"].items()
        if len(leaf.shape) > 2 and not name.endswith("bias")
    }
    assert len(matrices) == 7
    for name, shape in matrices.items():
        cut = functools.partial(part_of, shape, specs[name])
        assert sizes(cut(("fsdp", "tensor"))) in held, f"{name}: the device's own part"
        for axes in ((), ("tensor",), ("fsdp",)):
            assert sizes(cut(axes)) not in held, f"{name}: every layer, split over {axes} alone"
        assert sizes(shape[1:]) not in held, f"{name}: a layer that is not split"
    assert sizes((CONFIG.model.vocab_size, CONFIG.model.hidden_size)) not in held


def test_an_update_exchanges_single_layers_and_activations_alone(compiled):
    """Weights are gathered layer by layer and activations summed; nothing of the size of a stack of
    layers travels."""
    found = collectives(compiled.as_text())
    kinds = {kind for kind, _, _ in found}
    assert {"all-gather", "all-reduce"} <= kinds
    layer = 32 * 96 // 2  # elements of the largest matrix of a layer on a device, gathered
    tokens = 8 * 22 // 4 * 96  # of the widest activation
    assert max(np.prod(shape) for _, _, shape in found) <= max(layer, tokens)
    assert ("all-gather", "f32", (32, 48)) in found, "gate and up, split over tensor alone"
    assert ("all-reduce", "f32", (8 * 22 // 4, 32)) in found, "hidden states, over tensor"


def test_rows_over_devices_exchange_keys_and_values_too():
    """Keys and values of whole rows, and their gradients reduced to a device's own part; weights
    are split over the axis as over fsdp."""
    config = dataclasses.replace(CONFIG, mesh=dataclasses.replace(CONFIG.mesh, fsdp=2, context=2))
    mesh = make_mesh(config, 8)
    compiled = compiled_update(config, mesh, tokens=24)
    found = collectives(compiled.as_text())
    assert ("all-gather", "f32", (4, 24, 1, 10)) in found
    assert ("reduce-scatter", "f32", (4, 12, 1, 10)) in found
    assert ("all-gather", "f32", (32, 48)) in found
    (state, *_), _ = compiled.input_shardings
    assert state.params["layers"]["up"].shard_shape((3, 32, 96)) == (3, 32 // 4, 96 // 2)


def test_each_device_looks_up_its_own_tokens():
    """In zig-zag order too, and hidden states stay where they are."""
    layout = dataclasses.replace(CONFIG.mesh, fsdp=2, context=4, tensor=1)
    config = dataclasses.replace(CONFIG, mesh=layout)
    text = compiled_update(config, make_mesh(config, 8), tokens=48).as_text()
    assert re.findall(r"= f32\[(\d+),1,32\]\S* gather\(", text) == [str(8 * 48 // 8)]
    assert not [shape for _, _, shape in collectives(text) if shape[0] == 4 and shape[-1] == 32]


def with_shapes(layout, rows, row_tokens, slots):
    return dataclasses.replace(
        CONFIG,
        mesh=layout,
        train=dataclasses.replace(CONFIG.train, rows_per_micro_batch=rows, row_tokens=row_tokens),
        rollout=dataclasses.replace(CONFIG.rollout, slots=slots, prefill_prompts=slots),
    )


@pytest.mark.parametrize(
    "shapes, message",
    [
        (
            (9, 64, 16),
            r"rows_per_micro_batch \(9\) must .*mesh.data x config.mesh.fsdp = 2; .*: 10.",
        ),
        (
            (8, 68, 16),
            r"row_tokens \(68\) must be a multiple of 2 x config.mesh.context = 8; .*: 72.",
        ),
        ((8, 64, 20), r"rollout.slots \(20\) .*fsdp x config.mesh.context = 8; nearest: 24."),
    ],
)
def test_a_mesh_that_does_not_divide_the_batch(shapes, message):
    layout = dataclasses.replace(CONFIG.mesh, fsdp=2, context=4, tensor=1)
    with pytest.raises(UserError, match=message):
        dry_run.describe(with_shapes(layout, *shapes))


@pytest.mark.parametrize(
    "sizes, message",
    [
        ((1, 1, 1, 4), r"mesh.tensor \(4\) does not divide the axis 'kv_heads' \(2\) .* such as 2"),
        (
            (1, 3, 1, 1),
            r"mesh.fsdp \(3\) does not divide the axis 'embed' \(32\) .* such as 2,",
        ),
        (
            (1, 1, 3, 1),
            r"config.mesh.context x config.mesh.fsdp \(3\) does not divide the axis 'embed' \(32\)",
        ),
    ],
)
def test_a_mesh_that_does_not_divide_the_model(sizes, message):
    layout = dataclasses.replace(CONFIG.mesh, **dict(zip(AXES, sizes, strict=True)))
    config = with_shapes(layout, 3 * 8, 3 * 32, 3 * 16)
    with pytest.raises(UserError, match=message):
        dry_run.describe(config)
    with pytest.raises(UserError, match=message):
        param_shardings(config.model, layout, make_mesh(config, max(sizes)))


def test_bytes_of_copies():
    mesh = jax.make_mesh((1, 8, 1, 1), AXES, axis_types=AXIS_TYPES)
    split, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("fsdp",), ()))
    x, y = jax.device_put(np.zeros((8, 3), np.float32), split), jax.device_put(np.zeros(5), whole)
    assert copied_bytes((x, y), (x, y)) == 0
    assert copied_bytes((jax.device_put(x, whole), y), (x, y)) == 8 * x.nbytes
    assert copied_bytes((x, y.astype(np.float16)), (x, y)) == 8 * 2 * 5
