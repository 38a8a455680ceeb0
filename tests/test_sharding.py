"""Where the arrays of an update lie on eight devices, and what they exchange, as compiled."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dapo_jax import batching, model, plan, train_step
from dapo_jax.planning import costs, exchanges, hlo
from dapo_jax.sharding import AXES, AXIS_TYPES, copied_bytes, param_shardings, param_specs
from dapo_jax.types import UserError
from tests.helpers import make_mesh, replace_model, tiny_config

# Sizes that no two axes share, so that a shape says what it is.
CONFIG = tiny_config(
    model__width=32,
    model__num_layers=3,
    model__num_heads=8,
    model__num_kv_heads=2,
    model__head_dim=10,
    model__ff_width=96,
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
    params = model.param_shapes(config.model)
    with jax.numpy_dtype_promotion("standard"):
        state = jax.eval_shape(functools.partial(train_step.init_state, config), params)
        rows = batching.to_micro_batches(
            batching.empty_rows(16, tokens), rows_per_micro_batch=8, num_micro_batches=2
        )
        program = train_step.compile_update(config, mesh)
        return program.lower(state, rows, np.int32(2), np.float32(1), np.float32(1), None).compile()


def test_state_comes_and_goes_where_the_rules_put_it(compiled, mesh):
    wanted = param_shardings(CONFIG.model, CONFIG.mesh, mesh)
    (state, *_), _ = compiled.input_shardings
    new, _ = compiled.output_shardings
    adam, adam_new = state.moments[1], new.moments[1]
    shapes = jax.tree.leaves(model.param_shapes(CONFIG.model))
    for tree in (state.params, new.params, adam.mu, adam.nu, adam_new.mu, adam_new.nu):
        for got, want, shape in zip(*map(jax.tree.leaves, (tree, wanted)), shapes, strict=True):
            assert got.is_equivalent_to(want, len(shape.shape)), (shape, got, want)


def test_matrices_are_split_over_every_axis():
    """That is, the rules of the config leave none of them whole over fsdp or tensor."""
    for shape, spec in zip(
        jax.tree.leaves(model.param_shapes(CONFIG.model)),
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
    _, computations = hlo.read(compiled.as_text())
    instructions = (i for computation in computations.values() for i in computation.values())
    held = {sizes(array.dims) for i in instructions for array in i.arrays}
    specs = param_specs(CONFIG.model, CONFIG.mesh)["layers"]
    matrices = {
        name: leaf.shape
        for name, leaf in model.param_shapes(CONFIG.model)["layers"].items()
        if len(leaf.shape) > 2 and not name.endswith("bias")
    }
    assert len(matrices) == 7
    for name, shape in matrices.items():
        cut = functools.partial(part_of, shape, specs[name])
        assert sizes(cut(("fsdp", "tensor"))) in held, f"{name}: the device's own part"
        for axes in ((), ("tensor",), ("fsdp",)):
            assert sizes(cut(axes)) not in held, f"{name}: every layer, split over {axes} alone"
        assert sizes(shape[1:]) not in held, f"{name}: a layer that is not split"
    assert sizes((CONFIG.model.vocab_size, CONFIG.model.width)) not in held


def test_what_an_update_exchanges(compiled, mesh):
    """Weights are gathered and gradients summed over fsdp layer by layer, activations over tensor;
    nothing of the size of a stack of layers travels."""
    found = costs.count(compiled.as_text()).exchanges
    table = exchanges.described(found, mesh.shape)
    print(table)  # with -s; docs/update.md has it
    assert found and all(one.axes(mesh.shape) and one.bytes > 0 for one in found)
    layer = 32 * 96 * 4 // 2  # bytes of the largest matrix of a layer on a device, gathered
    tokens = 8 * 22 // 4 * 96 * 4  # of the widest activation
    assert max(one.bytes for one in found) <= 4 * max(layer, tokens), table
    over = lambda kind, axis: [
        one for one in found if (one.kind, one.axes(mesh.shape)) == (kind, (axis,))
    ]
    gathered = over("all-gather", "fsdp")
    assert any(one.in_open_loop and one.calls % 3 == 0 for one in gathered), table
    assert over("all-reduce", "tensor")


def test_what_rows_over_devices_exchange_besides():
    """Keys and values of each layer, forward and again in the backward pass, and their gradients;
    weights are split over the axis as over fsdp."""
    config = dataclasses.replace(CONFIG, mesh=dataclasses.replace(CONFIG.mesh, fsdp=2, context=2))
    mesh = make_mesh(config, 8)
    compiled = compiled_update(config, mesh, tokens=24)
    found = costs.count(compiled.as_text()).exchanges
    table = exchanges.described(found, mesh.shape)
    print(table)
    over = [one for one in found if "f32" in one.shapes and one.axes(mesh.shape) == ("context",)]
    large = {(one.kind, one.shapes, one.calls) for one in over if one.bytes > 4 * 24 * 4}
    kinds = {"all-gather": ("f32[4,24,1,10]", 3 * 4), "reduce-scatter": ("f32[4,12,1,10]", 3 * 2)}
    assert large == {(kind, *rest) for kind, rest in kinds.items()}, table
    both = ("fsdp", "context")
    gathered = {one.shapes: one.calls for one in found if one.axes(mesh.shape) == both}
    assert gathered["f32[32,48]"] == 3 * 4, table
    (state, *_), _ = compiled.input_shardings
    assert state.params["layers"]["up"].shard_shape((3, 32, 96)) == (3, 32 // 4, 96 // 2)


def with_shapes(layout, rows, row_tokens, slots):
    assert CONFIG.pretrain is not None
    return dataclasses.replace(
        CONFIG,
        mesh=layout,
        pretrain=dataclasses.replace(CONFIG.pretrain, row_tokens=row_tokens),
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
        plan.describe(with_shapes(layout, *shapes))


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
        plan.describe(config)
    with pytest.raises(UserError, match=message):
        param_shardings(config.model, layout, make_mesh(config, max(sizes)))


PROGRAM = """
HloModule m, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  ROOT %s = f32[] add(%a, %b)
}

%inner (p: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {
  %g = f32[8,64]{1,0:T(8,128)} all-gather(%x), replica_groups=[2,4]<=[4,2]T(1,0), dimensions={1}
  ROOT %t = (s32[], f32[8,16]{1,0}) tuple(%i, %y)
}

%outer (p: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {
  %w = (s32[], f32[8,16]) while(%p), condition=%c, body=%inner, backend_config={"known_trip_count":{"n":"5"}}
  %g2 = (bf16[4,4], bf16[16,4]) all-gather-start(%z), replica_groups={{0,2,4,6},{1,3,5,7}}, dimensions={0}
  ROOT %q = (s32[], f32[8,16]{1,0}) tuple(%i, %y)
}

ENTRY %main (p: f32[8,16]) -> f32[8,16] {
  %u = (s32[], f32[8,16]) while(%p), condition=%c, body=%outer
  %r = (f32[], pred[3]) all-reduce(%k, %l), replica_groups={}, to_apply=%add
  %r2 = f32[7] all-reduce(%k), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add
  %m = f32[2,3]{1,0} collective-permute(%n), source_target_pairs={{0,2},{2,0}}
  %a1 = f32[3] all-reduce(%k), replica_groups=mesh['a'=4,'b'=2] {'b'}, to_apply=%add
  %a2 = f32[5] all-reduce(%k), replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}
  ROOT %o = f32[8,16] copy(%v)
}
"""  # noqa: E501


def test_exchanges_are_read_from_a_program():
    mesh = {"data": 1, "fsdp": 4, "tensor": 2}
    found = costs.count(PROGRAM).exchanges
    short = lambda one: (one.kind, one.axes(mesh), one.shapes, one.bytes, one.calls)
    assert {(*short(one), one.in_open_loop) for one in found} == {
        ("all-gather", ("fsdp",), "f32[8,64]", 2048, 5, True),
        ("all-gather", ("fsdp",), "bf16[16,4]", 128, 1, True),
        ("all-reduce", ("fsdp", "tensor"), "f32[], pred[3]", 7, 1, False),
        ("all-reduce", ("tensor",), "f32[7]", 28, 1, False),
        ("all-reduce", ("tensor",), "f32[3]", 12, 1, False),
        ("all-reduce", ("fsdp",), "f32[5]", 20, 1, False),
        ("collective-permute", ("fsdp",), "f32[2,3]", 24, 1, False),
    }
    rows = exchanges.described(found, mesh).splitlines()
    assert rows[2] == "| all-gather | fsdp | f32[8,64] | 2,048 | 5 per micro-batch |"


def test_bytes_of_copies():
    mesh = jax.make_mesh((1, 8, 1, 1), AXES, axis_types=AXIS_TYPES)
    split, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("fsdp",), ()))
    x, y = jax.device_put(np.zeros((8, 3), np.float32), split), jax.device_put(np.zeros(5), whole)
    assert copied_bytes((x, y), (x, y)) == 0
    assert copied_bytes((jax.device_put(x, whole), y), (x, y)) == 8 * x.nbytes
    assert copied_bytes((x, y.astype(np.float16)), (x, y)) == 8 * 2 * 5
