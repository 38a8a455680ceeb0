"""launch/plan.py: what is compiled, what is counted, and what is said of what does not fit."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest

from dapo_jax import batching, model
from dapo_jax.command_line import parse
from dapo_jax.planning import chips, compiled, costs, estimate, plan, programs, report, search
from dapo_jax.sharding import make_mesh
from dapo_jax.types import RunError
from tests.helpers import replace_model, tiny_config
from tests.runs import load_launcher

main = load_launcher("plan")
V5P = chips.CHIPS["TPU v5"]
QWEN = "--config=configs/qwen32b_dapo.py"
MODEL = dict(
    width=64, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16, ff_width=160, remat="full"
)
CONFIG = tiny_config(
    **{f"model__{name}": value for name, value in MODEL.items()},
    mesh__data=2,
    mesh__fsdp=2,
    mesh__tensor=2,
    train__prompts_per_update=4,
    rollout__decode_steps=4,
)
LENGTHS = dict(response_tokens=16, prompt_tokens=8)
RULES = CONFIG.mesh.rules


@pytest.fixture(scope="module")
def found():
    """All programs, compiled for the eight devices of the tests, with the rates of a chip."""
    target = chips.target("local")._replace(chip=V5P)
    with jax.numpy_dtype_promotion("standard"):  # optax is not written for strict promotion
        return plan.plan(CONFIG, target, programs.PROGRAMS, lambda _: None, **LENGTHS)


@pytest.mark.parametrize("share", [False, True])
def test_tokens_of_a_step_are_those_that_packing_makes(share):
    train = dataclasses.replace(CONFIG.train, share_prompts=share, row_tokens=160)
    config = dataclasses.replace(CONFIG, train=train)
    G, num = config.rollout.group_size, config.train.prompts_per_step
    lengths = dict(prompt_tokens=32, response_tokens=63)
    said = estimate.step(config, {}, V5P, 8, cache=None, **lengths)
    prompts = [(i + 1,) * 32 for i in range(num) for _ in range(G)]
    packed = batching.pack(
        prompts, np.zeros(num * G * 63, np.int32), np.full(num * G, 63), 160, share_prompts=share
    )
    assert said["tokens"] == (packed.rows.segments_BT > 0).sum()
    assert said["tokens"] == num * (G * 64 + (G // 2 if share else G) * 31)


def products_of(config, tokens, seen):
    """(of the layers, of the unembedding), operations forward, from the sizes of the matrices."""
    c = config.model
    weights = [
        c.width * c.num_heads * c.head_dim,
        2 * c.width * c.num_kv_heads * c.head_dim,
        c.num_heads * c.head_dim * c.width,
        3 * c.width * c.ff_width,
    ]
    attention = 2 * c.num_heads * c.head_dim * seen
    layers = c.num_layers * (sum(weights) + attention)
    return 2 * tokens * layers, 2 * tokens * c.vocab_size * c.width


def test_operations_are_those_of_the_arithmetic(found):
    """Loops over layers, micro-batches and tokens are counted as often as they run."""
    numbers, t, r = found["programs"], CONFIG.train, CONFIG.rollout
    M = numbers["train"]["trips"]
    assert M > 1, "else the micro-batches show nothing"
    # XLA's attention of 64 tokens: two parts of 32, over 32 keys and over 64.
    assert t.row_tokens == 64
    layers, head = products_of(CONFIG, M * t.rows_per_micro_batch * t.row_tokens, 48)
    # Forward, forward again for the backward pass, and that: two products for each.
    assert numbers["train"]["flops"] * 8 == pytest.approx(4 * layers + 4 * head, rel=0.1)
    assert numbers["old_logprobs"]["flops"] * 8 == pytest.approx(layers + head, rel=0.1)
    seen = programs.cache(CONFIG, make_mesh(CONFIG.mesh)).slot_tokens
    layers, head = products_of(CONFIG, r.slots * r.decode_steps, seen)
    assert numbers["decode"]["flops"] * 8 == pytest.approx(layers + head, rel=0.1)


def test_what_a_trip_adds(found):
    n = found["programs"]["train"]
    assert n["each_trip"]["flops"] * n["trips"] == pytest.approx(n["flops"], rel=0.01)
    assert 0 < n["each_trip"]["bytes_accessed"] * n["trips"] < n["bytes_accessed"]


def test_the_result(found):
    assert found["fits"] and found["hbm_bytes"] > 0 and found["devices"] == 8
    assert set(found["programs"]) == {"train", "old_logprobs", "weights", "decode", "prefill"}
    for name, n in found["programs"].items():
        assert n["loops_counted"] and n["uncounted_kernels"] == 0, name
        assert n["peak_bytes"] >= n["argument_bytes"] + n["temp_bytes"] > 0
        assert (n["flops"] > 0) == (n["roofline"]["compute"] > 0) == (name != "weights")
        assert n["bytes_accessed"] > n["argument_bytes"] / 2
        assert n["compile_seconds"] > 0 and n["roofline"]["seconds"] > 0
    train = found["programs"]["train"]
    assert train["argument_bytes"] == pytest.approx(
        programs.programs(CONFIG, make_mesh(CONFIG.mesh))["train"].argument_bytes, rel=0.05
    )
    assert {"all-gather", "all-reduce"} <= {one["kind"] for one in train["collectives"]}
    assert found["slots_that_fit"] > found["slots"]
    step = found["step"]
    assert step["seconds"] == pytest.approx(step["roofline_seconds"] / estimate.UTILISATION)
    assert {"prefill", "decode", "train"} <= set(step["parts"])
    json.dumps(found, allow_nan=False)


def test_the_text_says_what_is_fact_and_what_is_not(found):
    text = report.describe(CONFIG, found)
    parts = ("Compiled: per device", "Counted in the compiled programs", "Arithmetic of one")
    for part in (*parts, "Estimate of one step", "assumed, not measured", "all-reduce", "it fits"):
        assert part in text, part


def test_an_update_of_fewer_micro_batches_takes_less(found):
    n = found["programs"]["train"]
    one, all_of_them = (estimate.roofline(n, V5P, trips) for trips in (1, None))
    assert one is not None and all_of_them is not None
    assert one.compute == pytest.approx(all_of_them.compute / n["trips"], rel=0.02)
    assert one.memory < all_of_them.memory


def test_what_does_not_fit_says_by_how_much_and_what_would():
    target = chips.target("local")._replace(hbm_bytes=10_000)
    found = plan.plan(CONFIG, target, ("train",), lambda _: None, **LENGTHS)
    assert not found["fits"] and found["programs"]["train"]["compile_seconds"] == 0
    text = report.describe(CONFIG, found)
    assert re.search(
        r"does not fit: train needs at least \d\.\d\d GiB more.*config\.mesh\.fsdp", text
    )
    assert found["needs_more_bytes"] > 0 and found["remedy"] in text
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(
    "changes", [{}, {"cache_gib": 2e-4}, {"decode_steps": 2, "page_tokens": 8}]
)
def test_the_slots_that_are_said_to_fit_do(changes):
    """By the engine's own pool, in which prompts have pages besides those of the slots."""
    config = dataclasses.replace(CONFIG, rollout=dataclasses.replace(CONFIG.rollout, **changes))
    mesh, target = make_mesh(CONFIG.mesh), chips.target("local")
    sized = lambda slots: dataclasses.replace(
        config, rollout=dataclasses.replace(config.rollout, slots=slots)
    )
    decode = programs.programs(config, mesh)["decode"]
    least = decode.argument_bytes + sum(decode.held.values())
    tight = target._replace(hbm_bytes=least - 1)
    found = plan.plan(config, tight, ("decode",), lambda _: None, **LENGTHS)
    slots = found["slots_that_fit"]
    assert 0 < slots < config.rollout.slots and f"config.rollout.slots={slots} " in found["remedy"]
    assert plan.need(compiled.too_large(programs.programs(sized(slots), mesh)["decode"])) < least
    whole = dataclasses.replace(config.rollout, cache_gib=None)
    config = dataclasses.replace(config, rollout=whole)
    for free in range(0, 10 * programs.cache(config, mesh).pool_bytes, 200_001):
        slots = programs.slots_that_fit(config, mesh, free)
        assert slots == 0 or programs.cache(sized(slots), mesh).pool_bytes <= free
        assert programs.cache(sized(slots + 4), mesh).pool_bytes > free


@pytest.mark.parametrize(
    "message, peak, reason",
    [
        (
            "XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 123.50G "
            "of 95.74G hbm. Exceeded hbm capacity by 27.76G.",
            123.5,
            "Used 123.50G of 95.74G hbm",
        ),
        (
            "E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
            "temporaries (103.50G) exceeds available HBM (95.73G). HLO module: jit_update.",
            103.5,
            "required for HLO temporaries (103.50G) exceeds available HBM (95.73G)",
        ),
    ],
)
def test_a_program_that_the_compiler_refuses_has_the_figure_of_the_compiler(message, peak, reason):
    """Its figure has the arguments in it: a product whose arguments are 15 GiB, and which has 3 GiB
    of others, libtpu refuses for "temporaries (18.00G)"."""

    class Lowered:
        def compile(self, **_):
            raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {message}")

    program = programs.Program(Lowered, 2, {"optimiser": 5}, 2**30)
    n = compiled.measure(program, {"fsdp": 8})
    assert n["peak_bytes"] == peak * 2**30
    assert n["temp_bytes"] == (peak - 1) * 2**30
    assert n["refused"] == reason and n["held_bytes"] == 5


def test_a_program_that_is_refused_for_something_else_ends_the_plan():
    class Lowered:
        def compile(self, **_):
            raise jax.errors.JaxRuntimeError(
                "RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom:\nRan out of memory in memory "
                "space vmem while allocating on stack for %ragged_paged_attention_kernel.5"
            )

    program = programs.Program(Lowered, 2, {}, 2**30)
    with pytest.raises(RunError, match=r"(?s)ragged_paged_attention.*rollout\.kernel='xla'"):
        compiled.measure(program, {"fsdp": 8})


HLO = """HloModule made_up

%inside (p.1: (s32[], f32[4,8])) -> pred[] {
  %p.1 = (s32[], f32[4,8]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%p.1), index=0
  %limit = s32[] constant(5)
  ROOT %less = pred[] compare(%i.1, %limit), direction=LT
}

%layer (p.2: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %p.2 = (s32[], f32[4,8]{1,0}) parameter(0)
  %i.2 = s32[] get-tuple-element(%p.2), index=0
  %x = f32[4,8]{1,0} get-tuple-element(%p.2), index=1
  %w = f32[8,8]{1,0:T(8,128)S(1)} constant({...})
  %y = f32[4,8]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %sum = f32[4,8]{1,0} all-reduce(%y), replica_groups=[2,4]<=[8], to_apply=%add
  ROOT %t = (s32[], f32[4,8]{1,0}) tuple(%i.2, %sum)
}

%told (p.3: (s32[], s32[], f32[4,8])) -> pred[] {
  %p.3 = (s32[], s32[], f32[4,8]{1,0}) parameter(0)
  %i.3 = s32[] get-tuple-element(%p.3), index=0
  %n = s32[] get-tuple-element(%p.3), index=1
  ROOT %less.2 = pred[] compare(%i.3, %n), direction=LT
}

%micro_batch (p.4: (s32[], s32[], f32[4,8])) -> (s32[], s32[], f32[4,8]) {
  %p.4 = (s32[], s32[], f32[4,8]{1,0}) parameter(0)
  %i.4 = s32[] get-tuple-element(%p.4), index=0
  %n.2 = s32[] get-tuple-element(%p.4), index=1
  %x.2 = f32[4,8]{1,0} get-tuple-element(%p.4), index=2
  %t.2 = (s32[], f32[4,8]{1,0}) tuple(%i.4, %x.2)
  %loop = (s32[], f32[4,8]{1,0}) while(%t.2), condition=%inside, body=%layer
  %x.3 = f32[4,8]{1,0} get-tuple-element(%loop), index=1
  ROOT %t.3 = (s32[], s32[], f32[4,8]{1,0}) tuple(%i.4, %n.2, %x.3)
}

%sliced (a: f32[100,8], b: s32[]) -> f32[1,8] {
  %a = f32[100,8]{1,0} parameter(0)
  %b = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %slice = f32[1,8]{1,0} dynamic-slice(%a, %b, %zero), dynamic_slice_sizes={1,8}
}

ENTRY %main (n.3: s32[], x.4: f32[4,8], table: f32[100,8]) -> f32[1,8] {
  %n.3 = s32[] parameter(0)
  %x.4 = f32[4,8]{1,0} parameter(1)
  %table = f32[100,8]{1,0} parameter(2)
  %t.4 = (s32[], s32[], f32[4,8]{1,0}) tuple(%n.3, %n.3, %x.4)
  %outer = (s32[], s32[], f32[4,8]{1,0}) while(%t.4), condition=%told, body=%micro_batch
  ROOT %row = f32[1,8]{1,0} fusion(%table, %n.3), kind=kLoop, calls=%sliced
}
"""


def test_counting_in_a_program_by_hand():
    found = costs.count(HLO, unknown_trips=3)
    loops = 3 * 5
    assert found.flops == loops * 2 * 4 * 8 * 8
    (reduced,) = found.exchanges
    assert (reduced.kind, reduced.calls, reduced.bytes) == ("all-reduce", loops, 128)
    assert reduced.groups == ((0, 1, 2, 3), (4, 5, 6, 7)) and reduced.in_open_loop
    assert found.wire_bytes == loops * 128 * 2 * 3 / 4
    # The product reads x and writes y, not the matrix on the chip; the sum reads and writes; the
    # slice reads a row of the table and its number, and writes the row.
    assert found.bytes_accessed == loops * (2 * 128 + 2 * 128) + 32 + 4 + 32
    assert costs.count(HLO).flops == found.flops / 3


RETILED = """%same (q: s8[100,8]) -> s8[100,8] {
  %q = s8[100,8]{1,0:T(32,128)(4,1)} parameter(0)
  ROOT %as_is = s8[100,8]{1,0:T(8,128)(4,1)} copy(%q)
}

%page (a: s8[100,8], b: s32[]) -> s8[1,8] {
  %a = s8[100,8]{1,0:T(32,128)(4,1)} parameter(0)
  %b = s32[] parameter(1)
  %zero = s32[] constant(0)
  %tiles = s8[100,8]{1,0:T(8,128)(4,1)} fusion(%a), kind=kLoop, \
output_to_operand_aliasing={{}: (0, {})}, calls=%same
  ROOT %slice = s8[1,8]{1,0} dynamic-slice(%tiles, %b, %zero), dynamic_slice_sizes={1,8}
}

ENTRY %main (pool: s8[100,8], n: s32[]) -> s8[1,8] {
  %pool = s8[100,8]{1,0:T(32,128)(4,1)} parameter(0)
  %n = s32[] parameter(1)
  ROOT %row = s8[1,8]{1,0} fusion(%pool, %n), kind=kLoop, calls=%page
}
"""


def test_of_an_array_in_another_tiling_what_is_sliced_is_read():
    """So TPUs read a page of a cache of int8; whole, where nothing says that it is the same."""
    assert costs.count(RETILED).bytes_accessed == 8 + 4 + 8
    copied = RETILED.replace(" output_to_operand_aliasing={{}: (0, {})},", "")
    assert costs.count(copied.replace("\\\n", "")).bytes_accessed == 800 + 4 + 8


@pytest.mark.parametrize(
    "left, right, out, attributes, flops",
    [
        # A product of 4 tokens with 10 heads, as TPUs have it: the padding is not computed.
        ("4,16,1", "16,10,8", "4,10,8", "window={size=10 pad=9_9 rhs_reversal=1}, "
         "dim_labels=bf0_i0o->b0f", 2 * 4 * 16 * 80),
        # Two heads, each with its own keys: 5 queries, 6 keys.
        ("2,5,16", "2,6,16", "2,5,6", "window={size=2 lhs_dilate=2}, dim_labels=0bf_0oi->0bf",
         2 * 2 * 5 * 6 * 16),
        ("4,16", "16,8", "4,8", "dim_labels=bf_io->bf", 2 * 4 * 16 * 8),
    ],
)  # fmt: skip
def test_products_of_tpus_are_convolutions(left, right, out, attributes, flops):
    text = f"""ENTRY %main (a: bf16[{left}], b: bf16[{right}]) -> f32[{out}] {{
  %a = bf16[{left}]{{0}} parameter(0)
  %b = bf16[{right}]{{0}} parameter(1)
  ROOT %c = f32[{out}]{{0}} convolution(%a, %b), {attributes}
}}
"""
    assert costs.count(text).flops == flops


@pytest.mark.parametrize(
    "target, config, flops, uncounted",
    [
        ("__cublas$gemm", '{"gemm_backend_config":{"dot_dimension_numbers":'
         '{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}', 1024, 0),
        ("tpu_custom_call", '{"custom_call_config":{"cost_estimate":{"flops":"77"}}}', 77, 0),
        ("tpu_custom_call", "{}", 0, 1),
        ("Sharding", "{}", 0, 0),
    ],
)  # fmt: skip
def test_kernels_count_with_what_they_say(target, config, flops, uncounted):
    text = f"""ENTRY %main (a: bf16[4,16], b: bf16[16,8]) -> bf16[4,8] {{
  %a = bf16[4,16]{{1,0}} parameter(0)
  %b = bf16[16,8]{{1,0}} parameter(1)
  ROOT %c = bf16[4,8]{{1,0}} custom-call(%a, %b), custom_call_target="{target}", \
backend_config={config}
}}
"""
    found = costs.count(text)
    assert (found.flops, found.uncounted_kernels) == (flops, uncounted)


def test_training_needs_six_operations_a_parameter():
    config = tiny_config(model__tie_embeddings=False)
    c = config.model
    layers, head = products_of(config, 1, 0)
    assert estimate.model_flops(config, 0) == 3 * (layers + head)
    attention = estimate.model_flops(config, 100) - estimate.model_flops(config, 0)
    assert attention == 6 * c.num_layers * c.num_heads * c.head_dim * 100


@pytest.mark.parametrize(
    "remat, attention, passes",
    [
        ("none", "splash", 4.5),
        ("dots", "splash", 5.5),
        ("dots_no_batch", "splash", 5.5),
        ("attention_mlp", "splash", 4.5),
        ("attention", "auto", 4.5),
        ("attention", "flash", 5.5),
        ("full", "splash", 5.5),
    ],
)
def test_a_kernel_runs_again_unless_remat_keeps_what_it_gives(remat, attention, passes):
    """As docs/update.md says and tests/test_attention.py counts kernels."""
    config = dataclasses.replace(
        CONFIG, model=replace_model(CONFIG, remat=remat, attention=attention)
    )
    of = lambda program: estimate._kernel_flops(config, V5P, 100, program)
    assert of("train") == of("critic_train") == passes * of("old_logprobs")


@pytest.mark.parametrize("length", [700, 1300, 2900, 8192])
def test_blocks_that_sequences_touch_are_counted_in_training(length):
    """As many as splash attention computes of a long row, to a twentieth."""
    row = 8192 if length == 8192 else 512 * length  # as many sequences as begin in all ways
    train = dataclasses.replace(CONFIG.train, row_tokens=row)
    config = dataclasses.replace(CONFIG, train=train)
    found = estimate._kernel_flops(config, V5P, length, "old_logprobs")
    first, last = np.arange(0, row, length) // 512, np.arange(length - 1, row, length) // 512
    # Blocks of queries and keys below the diagonal, from the first of the first sequence in them.
    block = np.arange(row // 512)
    pairs = np.sum(block - first[np.searchsorted(last, block)] + 1) * 512**2 / row
    c = config.model
    assert found == pytest.approx(4 * c.num_layers * c.num_heads * c.head_dim * pairs, rel=0.05)


def test_flash_attention_computes_whole_rows():
    of = lambda chip, length: estimate._kernel_flops(
        dataclasses.replace(CONFIG, train=dataclasses.replace(CONFIG.train, row_tokens=8192)),
        chip, length, "old_logprobs",
    )  # fmt: skip
    h200 = chips.CHIPS["NVIDIA H200"]
    assert of(h200, 100) == of(h200, 4000) > of(V5P, 4000) > of(V5P, 100)


def test_kernels_are_counted_in_training():
    """A row of one block is computed whole: twice the row, twice as much for a token."""
    numbers = {
        "flops": 0.0, "bytes_accessed": 0.0, "wire_bytes": 0.0, "trips": 1, "loops_counted": True,
        "uncounted_kernels": 3,
        "each_trip": {"flops": 0.0, "bytes_accessed": 0.0, "wire_bytes": 0.0},
    }  # fmt: skip

    def a_token(row_tokens):
        train = dataclasses.replace(CONFIG.train, row_tokens=row_tokens)
        found = estimate.step(
            dataclasses.replace(CONFIG, train=train), {"train": numbers}, V5P, 1,
            programs.Cache(0, 0, 1, 1), response_tokens=8, prompt_tokens=2,
        )  # fmt: skip
        computed = found["updates"] * found["micro_batches_per_update"] * row_tokens
        return found["parts"]["train"]["roofline_seconds"] / computed

    assert a_token(256) == pytest.approx(2 * a_token(128))


def test_search_tries_context_where_it_cuts_rows():
    rows = dataclasses.replace(CONFIG.train, row_tokens=100)  # 4 does not cut them in 8 parts
    config = dataclasses.replace(CONFIG, train=rows)
    target = chips.target("local")._replace(chip=V5P)
    ranked, refused = search.candidates(config, target)
    names = {c.name.split(",")[0] for c in ranked}
    assert names == {
        "fsdp 8 x tensor 1", "fsdp 4 x tensor 2",
        "fsdp 4 x context 2 x tensor 1", "fsdp 2 x context 2 x tensor 2",
    }  # fmt: skip
    assert len(refused) == 2, "tensor 4 and 8, once each"
    for group, changes in (
        ("pretrain", {"row_tokens": 98}),
        ("mesh", {"rules": tuple((k, None if k == "kv_heads" else v) for k, v in RULES)}),
        ("model", {"attention": "flash"}),
    ):
        other = dataclasses.replace(getattr(CONFIG, group), **changes)
        ranked_there, _ = search.candidates(dataclasses.replace(CONFIG, **{group: other}), target)
        contexts = {c.config.mesh.context for c in ranked_there}
        assert contexts == {1}, "rows or heads do not lie so"
    of = lambda shape: next(c for c in ranked if c.name == f"{shape}, remat full")
    cut, whole = of("fsdp 4 x context 2 x tensor 1"), of("fsdp 8 x tensor 1")
    assert cut.seconds > whole.seconds, "keys and values are received besides"
    config = dataclasses.replace(CONFIG, mesh=dataclasses.replace(CONFIG.mesh, context=2))
    ranked, _ = search.candidates(config, target)
    for c in ranked:
        m, r = c.config.mesh, c.config.rollout
        assert m.data * m.fsdp * m.context * m.tensor == 8
        assert r.slots % (m.fsdp * m.context) == r.prefill_prompts % (m.fsdp * m.context) == 0


@pytest.mark.usefixtures("standard_promotion")
def test_search_ranks_shapes_that_divide_and_compiles_the_best():
    target, said = chips.target("local")._replace(chip=V5P), []
    ranked, refused = search.candidates(CONFIG, target)
    names = {c.name for c in ranked}
    assert "fsdp 4 x tensor 2, remat full" in names and "fsdp 8 x tensor 1, remat none" in names
    assert any("tensor 8" in text and "does not divide" in text for text in refused), refused
    full, none = (
        next(c for c in ranked if c.name == f"fsdp 8 x tensor 1, remat {remat}")
        for remat in ("full", "none")
    )
    assert full.seconds is not None and none.seconds is not None
    assert full.seconds > none.seconds and full.bytes < none.bytes
    result = search.search(CONFIG, target, ("train",), said.append, enough=1, **LENGTHS)
    assert result["fits"] and [row["plan"] is not None for row in result["found"]].count(True) == 1
    text = search.describe(result)
    assert "best first" in text and "does not divide" in text and "--config.mesh.fsdp=" in text
    assert any("candidate 1 of at most" in line for line in said)
    assert result["programs"] == result["found"][0]["plan"]["programs"]
    json.dumps(result, allow_nan=False)


@pytest.mark.parametrize("most", [0, 800_000, 1_300_000])
def test_search_goes_on_until_enough_fit(monkeypatch, most):
    """With the arithmetic's bytes as the compiler's: what fits with slack alone does not."""

    def compiled_to(config, *_, **__):
        needed = {"peak_bytes": search._by_arithmetic(config, target).bytes, "held_bytes": 0}
        numbers = needed | {"roofline": {"seconds": 1.0, "links": 0.5}}
        return {"fits": needed["peak_bytes"] <= most, "programs": {"train": numbers}}

    target = chips.target("local")._replace(chip=V5P, hbm_bytes=most)
    ranked, _ = search.candidates(CONFIG, target)
    monkeypatch.setattr(plan, "plan", compiled_to)
    found = search.search(CONFIG, target, ("train",), lambda _: None, **LENGTHS)
    fitting = [row["name"] for row in found["found"] if row["plan"] and row["plan"]["fits"]]
    assert fitting == [c.name for c in ranked if c.bytes <= most][: search.WANTED]
    assert found["fits"] == bool(fitting)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "--topology is needed"),
        (
            ["--topology=v5p:4x4x4", "--program=sing"],
            "--program must be one of train, old_logprobs, weights, decode, prefill, all; got ",
        ),
        (["--topology=v9:1"], r"--topology=v9:1 is not known. Known are .*v5p:4x4x4.*local"),
        (["--topology=local"], r"config.mesh .*does not fit 8 device"),
        (["--topology=local", "--workdir=x"], "of a config and of no run: leave --workdir out"),
        (
            ["--topology=local", "--accept=0.3", "--chip=v5p"],
            "--simulate_hosts=N simulates: give it, or leave --chip, --accept out",
        ),
        (
            ["--simulate_hosts=2", "--topology=local", "--search"],
            "with --simulate_hosts: leave --topology, --search out",
        ),
        (["--simulate_hosts=2", "--program=train"], "leave --program out"),
        (["--topology=local", "--response_tokens=99999"], "from 1 to 20,480; got 99999"),
    ],
)
def test_a_wrong_command_is_told(capsys, arguments, message):
    assert main(["program", QWEN, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err and re.search(message, err), err


def test_the_command_prints_one_object(capsys):
    arguments = ["--config=configs/tiny_dapo.py", "--topology=local", "--program=prefill", "--json"]
    assert main(["program", *arguments, "--config.mesh.data=8"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["fits"] and set(found["programs"]) == {"prefill"} and found["hbm_bytes"] > 0
    assert found["programs"]["prefill"]["roofline"] is None, "rates of a CPU are not known"
    assert "compiling prefill for 8" in err


def test_a_copy_for_rollouts_that_is_the_policy_is_no_copy():
    def held(**changes):
        config = dataclasses.replace(
            CONFIG, mesh=dataclasses.replace(CONFIG.mesh, data=4, fsdp=1, tensor=2)
        )
        config = dataclasses.replace(config, model=replace_model(config, **changes))
        found = programs.programs(config, make_mesh(config.mesh))
        return [set(found[name].held) for name in ("train", "decode")]

    again = "layers for prefill"  # on CPUs it and decoding have their own
    assert held() == [set(), {"optimiser", again}]
    assert held(compute_dtype="bfloat16") == [set(), {"policy with optimiser", again}]
    spread = programs.programs(CONFIG, make_mesh(CONFIG.mesh))["decode"].held
    assert "policy with optimiser" in spread, "gathered over fsdp"


def test_what_is_copied_for_rollouts_is_counted(capsys):
    """Trained over fsdp alone, drawn two devices together: each receives what it has not of half
    the parameters."""
    layout = dataclasses.replace(CONFIG.mesh, data=1, fsdp=8, tensor=1, rollout_tensor=2)
    config = dataclasses.replace(CONFIG, mesh=layout)
    target = chips.target("local")
    found = plan.plan(config, target, ("weights",), lambda _: None, **LENGTHS)
    n = found["programs"]["weights"]
    whole = 4 * sum(x.size for x in jax.tree.leaves(model.param_shapes(config.model)))
    least = whole / 2 - whole / 8
    assert least <= n["wire_bytes"] <= 1.2 * least, (least, n["collectives"])
    shared = ["program", "--config=configs/tiny_dapo.py", "--topology=local", "--program=weights"]
    assert main([*shared, "--config.mesh.data=8"]) == 2
    assert "rollouts read the trainer's own arrays" in capsys.readouterr().err


def test_a_run_with_a_critic_has_its_programs_too():
    config, _ = parse(["program", "--config=configs/tiny.py:ppo", "--config.mesh.data=8"], "")
    found = programs.programs(config, make_mesh(config.mesh))
    assert {*found, "weights"} == set(programs.names(config)) == {
        *programs.PROGRAMS, "critic_train", "critic_values",
    }  # fmt: skip
    assert "critic with optimiser" in found["train"].held
    assert "critic with optimiser" not in found["critic_train"].held
    lowered = found["critic_values"].lower().as_text()
    assert "func.func public @main" in lowered
