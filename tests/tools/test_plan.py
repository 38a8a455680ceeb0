"""launch/plan.py: memory as compiled, the search, and the report of what does not fit."""

import dataclasses
import json
import os
import re

import jax
import numpy as np
import pytest

from dapo_jax.config.cli import parse
from dapo_jax.models.sharding import AXES, make_mesh
from dapo_jax.rollout import memory_budget
from dapo_jax.tools.plan import chips, compiled, estimate, plan, programs, report, search
from dapo_jax.training import packing
from dapo_jax.types import RunError, UserError
from tests.support.helpers import replace_model, tiny_config
from tests.support.runs import load_launcher

main = load_launcher("plan")
V5P = chips.CHIPS["TPU v5"]
QWEN = "--config=configs/qwen32b_dapo.py"
MODEL = dict(
    hidden_size=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=160,
    remat="full",
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
    said = estimate.step(config, make_mesh(config.mesh).shape, V5P, **lengths)
    prompts = [(i + 1,) * 32 for i in range(num) for _ in range(G)]
    packed = packing.pack(
        prompts, np.zeros(num * G * 63, np.int32), np.full(num * G, 63), 160, share_prompts=share
    )
    assert said["tokens"] == (packed.rows.segments_BT > 0).sum()
    assert said["tokens"] == num * (G * 64 + (G // 2 if share else G) * 31)


def test_the_result(found):
    assert found["fits"] and found["hbm_bytes"] > 0 and found["devices"] == 8
    assert set(found["programs"]) == {"train", "old_logprobs", "weights", "decode", "prefill"}
    for n in found["programs"].values():
        assert n["peak_bytes"] >= n["argument_bytes"] + n["temp_bytes"] > 0
        assert n["compile_seconds"] > 0 and n["refused"] is None
    train = found["programs"]["train"]
    assert train["argument_bytes"] == pytest.approx(
        programs.programs(CONFIG, make_mesh(CONFIG.mesh))["train"].argument_bytes, rel=0.05
    )
    assert found["slots_that_fit"] > found["slots"]
    step = found["step"]
    assert set(step["parts"]) == {"weights", "prefill", "decode", "train"}
    assert 0 < step["seconds_at_best"] < step["seconds"]
    json.dumps(found, allow_nan=False)
    text = report.describe(CONFIG, found)
    assert re.search(r"(?s)Compiled: per.*assumed, not measured: 55% of the peak.*it fits", text)


def test_where_pages_may_run_short_the_longest_prefill_is_compiled_too():
    """A preempted sequence is prefilled with all that it had sampled."""
    mesh = make_mesh(CONFIG.mesh)
    bounded = dataclasses.replace(CONFIG.rollout, cache_gib=2e-4)
    config = dataclasses.replace(CONFIG, rollout=bounded)
    assert programs.PREEMPTED not in programs.names(CONFIG)
    assert programs.PREEMPTED not in programs.programs(CONFIG, mesh)
    assert programs.PREEMPTED in programs.names(config)
    known = programs.programs(config, mesh)
    tokens = lambda name: known[name].lower().in_avals[0][1].shape[2]
    page, most = config.rollout.page_tokens, config.data.max_prompt_tokens
    assert most <= tokens("prefill") < most + page
    most += config.rollout.max_response_tokens
    assert most <= tokens(programs.PREEMPTED) < most + page


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


def test_the_remedy_is_of_the_program_that_is_too_large():
    """Slots are a value where fewer than the config's fit, and are not named where no cache is.
    Full remat is not named where it is set."""
    gib = 2**30
    sizes = dict(argument_bytes=gib, temp_bytes=gib, held={}, refused=None, compile_seconds=1.0)
    result = {"slots": 160, "slots_that_fit": 373, "needs_more_bytes": gib, "remat": "dots"}

    def remedy(name):
        program = sizes | {"peak_bytes": 2 * gib, "held_bytes": 0}
        return plan.remedy(result | {"programs": {name: program}}).partition("help: ")[2]

    assert "slots" not in remedy("weights") and "rollout_tensor" in remedy("weights")
    assert "fewer config.rollout.prefill_prompts, fewer config.rollout.slots" in remedy("prefill")
    assert "373" not in remedy("decode")
    assert remedy("train").startswith("config.model.remat='full', fewer config.train.rows")
    result["remat"] = "full"
    assert remedy("train").startswith("fewer config.train.rows")
    result["slots_that_fit"] = 90
    assert remedy("decode").startswith("config.rollout.slots=90 or")


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
    pool = lambda config: programs.pool_bytes(programs.engine_of(config, mesh))
    for free in range(0, 10 * pool(config), 200_001):
        slots = programs.slots_that_fit(config, mesh, free)
        assert slots == 0 or pool(sized(slots)) <= free
        assert pool(sized(slots + 4)) > free


def refused(message):
    """A program that a compiler refuses."""

    class Lowered:
        def compile(self, **_):
            raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {message}")

    return programs.Program(Lowered, {"optimiser": 5}, 2**30)


@pytest.mark.parametrize(
    "message, peak",
    [
        ("XLA:TPU compile permanent error. Used 123.50G of 95.74G hbm.", 123.5),
        (
            "E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
            "temporaries (103.50G) exceeds available HBM (95.73G). HLO module: jit_update.",
            103.5,
        ),
    ],
)
def test_a_program_that_the_compiler_refuses_has_the_figure_of_the_compiler(message, peak):
    """Its figure has the arguments in it: a product whose arguments are 15 GiB, and which has 3 GiB
    of others, libtpu refuses for "temporaries (18.00G)"."""
    n = compiled.measure(refused(message))
    assert n["peak_bytes"] == peak * 2**30 and n["temp_bytes"] == (peak - 1) * 2**30
    assert n["refused"] in message and f"{peak:.2f}G" in n["refused"] and n["held_bytes"] == 5


def test_a_program_that_is_refused_for_something_else_ends_the_plan():
    message = (
        "E1001: CompileTimeScopedVmemOom:\nmemory space vmem: %ragged_paged_attention_kernel.5"
    )
    with pytest.raises(RunError, match=r"(?s)ragged_paged_attention.*rollout\.kernel='xla'"):
        compiled.measure(refused(message))


def test_search_tries_context_where_it_cuts_rows():
    rows = dataclasses.replace(CONFIG.train, row_tokens=100)  # 4 does not cut them in 8 parts
    config = dataclasses.replace(CONFIG, train=rows)
    target = chips.target("local")._replace(chip=V5P)
    ranked, refused = search.candidates(config, target, **LENGTHS)
    names = {c.name.split(",")[0] for c in ranked}
    by_context = {
        1: {"fsdp 8 x tensor 1", "fsdp 4 x tensor 2"},
        2: {"fsdp 4 x context 2 x tensor 1", "fsdp 2 x context 2 x tensor 2"},
    }
    assert names == by_context[1] | by_context[2]
    assert len(refused) == 2, "tensor 4 and 8, once each"
    for group, changes in (
        ("train", {"row_tokens": 98}),
        ("mesh", {"rules": tuple((k, None if k == "kv_heads" else v) for k, v in RULES)}),
        ("model", {"attention": "flash"}),
    ):
        other = dataclasses.replace(getattr(CONFIG, group), **changes)
        changed = dataclasses.replace(CONFIG, **{group: other})
        ranked_there, _ = search.candidates(changed, target, **LENGTHS)
        contexts = {c.config.mesh.context for c in ranked_there}
        assert contexts == {1}, "rows or heads do not lie so"
    of = lambda shape: next(c for c in ranked if c.name == f"{shape}, remat full")
    cut, whole = of("fsdp 4 x context 2 x tensor 1"), of("fsdp 8 x tensor 1")
    assert cut.seconds > whole.seconds, "keys and values are received besides"
    config = dataclasses.replace(CONFIG, mesh=dataclasses.replace(CONFIG.mesh, context=2))
    ranked, _ = search.candidates(config, target, **LENGTHS)
    for c in ranked:
        m, r = c.config.mesh, c.config.rollout
        assert m.data * m.fsdp * m.context * m.tensor == 8
        assert r.slots % (m.fsdp * m.context) == r.prefill_prompts % (m.fsdp * m.context) == 0


@pytest.mark.usefixtures("standard_promotion")
def test_search_ranks_shapes_that_divide_and_compiles_the_best():
    slow = V5P._replace(flops=1e9)  # so that products, not links, take the time of so small a model
    target, said = chips.target("local")._replace(chip=slow), []
    ranked, refused = search.candidates(CONFIG, target, **LENGTHS)
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
    assert "fastest first" in text and "does not divide" in text and "--config.mesh.fsdp=" in text
    assert any("candidate 1 of at most" in line for line in said)
    assert result["programs"] == result["found"][0]["plan"]["programs"]
    json.dumps(result, allow_nan=False)


@pytest.mark.parametrize("most", [0, 800_000, 1_300_000])
def test_search_goes_on_until_enough_fit(monkeypatch, most):
    """With the arithmetic's bytes as the compiler's: what fits with slack alone does not."""

    target = chips.target("local")._replace(chip=V5P, hbm_bytes=most)
    ranked, _ = search.candidates(CONFIG, target, **LENGTHS)

    def compiled_to(config, *_, **__):
        size = next(c.bytes for c in ranked if c.config == config)
        numbers = {"peak_bytes": size, "held_bytes": 0}
        return {"fits": size <= most, "programs": {"train": numbers}}

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
            "--program must be one of train, old_logprobs, weights, decode, .*; got 'sing'",
        ),
        (["--topology=v9:1"], "--topology=v9:1 is not known. .*v5p:4x4x4.*local"),
        (["--topology=v5p:8x8"], "--topology=v5p:8x8 is not known. .*v5p:4x4x4.*v6e:8x8"),
        (["--topology=v6e:4x4x4"], "--topology=v6e:4x4x4 is not known. .*v5p:4x4x4.*v6e:8x8"),
        (["--topology=local"], r"config.mesh .*does not fit 8 device"),
        (["--topology=local", "--workdir=x"], "leave --workdir out"),
        (
            ["--topology=local", "--accept=0.3", "--chip=v5p"],
            "--simulate_hosts=N .* --chip, --accept",
        ),
        (["--simulate_hosts=2", "--topology=local", "--search"], "leave --topology, --search out"),
        (["--topology=local", "--response_tokens=99999"], "from 1 to 20,480; got 99999"),
    ],
)
def test_a_wrong_command_is_refused(capsys, arguments, message):
    assert main(["program", QWEN, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err and re.search(message, err), err


def test_the_command_prints_one_object(capsys):
    arguments = ["--config=configs/tiny_dapo.py", "--topology=local", "--program=prefill", "--json"]
    assert main(["program", *arguments, "--config.mesh.data=8"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["fits"] and set(found["programs"]) == {"prefill"} and found["hbm_bytes"] > 0
    assert found["step"]["seconds"] is None, "rates of a CPU are not known"
    assert "compiling prefill for 8" in err


def test_a_copy_for_rollouts_that_is_the_policy_is_no_copy():
    layout = dataclasses.replace(CONFIG.mesh, data=4, fsdp=1, tensor=2)

    def held(**changes):
        model = replace_model(CONFIG, **changes)
        config = dataclasses.replace(CONFIG, mesh=layout, model=model)
        found = programs.programs(config, make_mesh(config.mesh))
        return [set(found[name].held) for name in ("train", "decode")]

    policy, twice = {"parameters", "optimiser state"}, {"layers once more"}  # as CPUs need
    assert held() == [set(), {"optimiser state"} | twice]
    assert held(compute_dtype="bfloat16") == [set(), policy | twice]
    assert held(num_layers=33) == [set(), {"optimiser state"}]
    spread = programs.programs(CONFIG, make_mesh(CONFIG.mesh))["decode"].held
    assert policy <= set(spread), "gathered over fsdp"


@pytest.mark.parametrize("fsdp, moved", [(1, "parameters"), (4, "frozen parameters")])
def test_adapters_and_their_base_are_moved_one_after_the_other(fsdp, moved):
    """The base stays where it is whole on each device. The run holds both parts meanwhile."""
    layout = dataclasses.replace(CONFIG.mesh, data=4 // fsdp, fsdp=fsdp, tensor=2)
    model = replace_model(CONFIG, lora_rank=4, compute_dtype="bfloat16")
    config = dataclasses.replace(CONFIG, mesh=layout, model=model)
    weights = programs.programs(config, make_mesh(layout))["weights"]
    held = memory_budget.held(config, dict(zip(AXES, (4 // fsdp, fsdp, 1, 2)))).always
    assert weights.argument_bytes == held[moved]
    assert compiled.measure(weights)["argument_bytes"] == weights.argument_bytes
    others = {name: size for name, size in held.items() if name != moved}
    copy = {"copy of the parameters"} if fsdp > 1 else set()
    assert weights.held.keys() - others.keys() == copy and others.items() <= weights.held.items()


def test_a_run_with_a_critic_has_its_programs_too():
    config, _ = parse(["program", "--config=configs/tiny.py:ppo", "--config.mesh.data=8"], "")
    found = programs.programs(config, make_mesh(config.mesh))
    known = {*programs.PROGRAMS, "critic_train", "critic_values"}
    assert {*found, "weights"} == set(programs.names(config)) == known
    policy, critic = {"parameters", "optimiser state"}, {"critic", "critic's optimiser"}
    assert set(found["train"].held) == {"reference"} | critic
    assert set(found["critic_train"].held) == {"reference"} | policy
    assert set(found["critic_values"].held) == {"reference", "critic's optimiser"} | policy
    lowered = found["critic_values"].lower().as_text()
    assert "func.func public @main" in lowered


# GiB that programs may have: of a v5e, and 0.92 of what a T4 and an L4 report.
@pytest.mark.parametrize("form, gib", [("", 15.75), (":t4", 13.5), ("", 20.7)])
def test_gsm8k_fits_one_accelerator(form, gib):
    config, _ = parse(["program", f"--config=configs/qwen0_5b_gsm8k.py{form}"], "")
    held = memory_budget.held(config, dict.fromkeys(AXES, 1))
    assert held.rollout_bytes <= memory_budget.HELD_SHARE * gib * 2**30
    logits = 4 * config.model.log_prob_chunk_tokens * config.model.vocab_size
    assert held.update_bytes + 3 * logits <= memory_budget.HELD_SHARE * gib * 2**30
    assert config.model.compute_dtype == ("float32" if form else "bfloat16")
    text = config.data.prompt_template.format(prompt="1 + 1?")
    assert text.startswith("1 + 1?") and text.endswith(r"\boxed{}.")


def test_a_plan_leaves_the_environment_as_it_was(monkeypatch):
    """JAX in a child process would take the host for one of GKE."""
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)
    seen = {}

    def topology(**_):
        seen.update(os.environ)
        raise RuntimeError("no such shape")

    monkeypatch.setattr(chips.topologies, "get_topology_desc", topology)
    before = dict(os.environ)
    with pytest.raises(UserError, match="no such shape"):
        chips.target("v5e:2x4")
    assert seen["TPU_WORKER_HOSTNAMES"] == "localhost" and dict(os.environ) == before
