"""Memory by arithmetic: against the arrays there are, and the size of a replica chosen by it."""

import dataclasses
import re
from types import SimpleNamespace

import jax
import pytest
from jax.sharding import Mesh

from dapo_jax.config.cli import parse
from dapo_jax.models.sharding import (
    AXES,
    AXIS_TYPES,
    copied_bytes,
    initial_params,
    make_mesh,
    rollout_mesh,
)
from dapo_jax.rollout import memory_budget
from dapo_jax.rollout.engine import DecoderEngine
from dapo_jax.rollout.engine_config import make_engine_config
from dapo_jax.rollout.memory_budget import GIB, held, with_replica_size
from dapo_jax.setup import RunComponents
from dapo_jax.tools.plan import chips, plan
from dapo_jax.training import step
from dapo_jax.types import UserError
from dapo_jax.utils.progress import Progress
from tests.support.helpers import tiny_config

ONE = dict(mesh__data=1, mesh__fsdp=1, mesh__context=1, mesh__tensor=1)
HEAD = dict(model__compute_dtype="bfloat16", model__head_dtype="float32")
COPY = "rollout copy of the parameters"
# Heads lie over an axis of the rows: a device gathers those that it lacks.
OF_SHARDS = dict(tiny_config().mesh.rules) | dict(embed=None, heads="fsdp", kv_heads="fsdp")
OF_SHARDS = tuple(OF_SHARDS.items())


def bytes_of(tree):
    """Bytes on one device."""
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def own_buffers(arrays, others):
    """The buffers of arrays that are not those of the others."""
    buffers = lambda tree: {
        shard.data.unsafe_buffer_pointer()
        for x in jax.tree.leaves(tree)
        for shard in x.addressable_shards
    }
    return buffers(arrays) - buffers(others)


def test_a_process_of_several_samples_from_the_trainers_own_arrays():
    """Process 0 of two with four devices each, in one process: nothing is copied where the
    parameters are laid out as in rollouts."""
    config = tiny_config(**ONE | {"mesh__data": 8})
    mesh = make_mesh(config.mesh)
    own = Mesh(mesh.devices[:4], AXES, axis_types=AXIS_TYPES)
    engine_config = make_engine_config(
        config, own.shape, config.data.max_prompt_tokens, (1,), platform="cpu", run_sizes=mesh.shape
    )
    params = initial_params(config.model, config.mesh, mesh, seed=0)
    loaded = DecoderEngine(engine_config, own, mesh).load_params(params).prefill
    assert own_buffers(loaded, params) == set() and copied_bytes(loaded, params) == 0
    assert jax.tree.leaves(loaded)[0].sharding.mesh.size == 4
    halved = tiny_config(**ONE | {"mesh__data": 8, "model__compute_dtype": "bfloat16"})
    engine_config = dataclasses.replace(engine_config, model=halved.model)
    loaded = DecoderEngine(engine_config, own, mesh).load_params(params).prefill
    assert copied_bytes(loaded, params) > 0 and own_buffers(loaded, params)


def test_a_critic_holds_what_the_policy_does_and_a_reference_its_parameters():
    sizes = dict(data=2, fsdp=2, context=1, tensor=2)
    of = lambda name: held(parse(["program", f"--config=configs/{name}"], "")[0], sizes).always
    plain = of("tiny_dapo.py")
    parameters = plain["parameters"]
    assert plain == {"parameters": parameters, "optimiser state": 2 * parameters}
    assert of("tiny.py:ppo")["critic with optimiser"] == 3 * parameters
    assert of("tiny.py:grpo")["reference"] == parameters


@pytest.mark.parametrize(
    "changes",
    [
        dict(mesh__fsdp=4, mesh__tensor=2),
        dict(mesh__fsdp=8, mesh__rollout_tensor=2),
        dict(mesh__fsdp=2, mesh__context=2, mesh__tensor=2, rollout__cache_gib=0.001),
        dict(mesh__data=8, model__compute_dtype="bfloat16"),
        HEAD | dict(mesh__data=8),
        HEAD | dict(mesh__data=8, model__tie_embeddings=False),
        HEAD | dict(mesh__fsdp=4, mesh__tensor=2, model__tie_embeddings=False),
        dict(mesh__data=4, mesh__tensor=2, rollout__max_staleness=2),
        dict(mesh__fsdp=4, mesh__tensor=2, mesh__rules=OF_SHARDS),
    ],
)
def test_held_bytes_are_those_of_the_arrays(changes):
    config = tiny_config(**ONE | {"model__num_kv_heads": 4} | changes)
    mesh = make_mesh(config.mesh)
    found = held(config, mesh.shape)
    params = initial_params(config.model, config.mesh, mesh, seed=0)
    at = step.state_shardings(config, mesh)
    state = jax.jit(lambda p: step.init_state(config, p), out_shardings=at)(params)
    counters = 64  # bytes of step counts and the like, at most
    assert 0 <= bytes_of(state) - sum(found.always.values()) <= counters
    rollout_on = rollout_mesh(mesh, config.mesh.rollout_tensor)
    prompt = config.data.max_prompt_tokens
    engine_config = make_engine_config(config, rollout_on.shape, prompt, (1,), platform="cpu")
    engine = DecoderEngine(engine_config, rollout_on, mesh)
    assert found.rollout["KV cache"] == bytes_of(engine.init_decode_state().pool)
    loaded = engine.load_params(params).prefill
    assert found.rollout.get(COPY, 0) == copied_bytes(loaded, params) / 8
    assert own_buffers(loaded, params) == set() or COPY in found.rollout
    copies = jax.tree.map(copied_bytes, loaded, params)
    is_copy = jax.tree.map(lambda x, y: bool(own_buffers(x, y)), loaded, params)
    assert jax.tree.map(bool, copies) == is_copy, "what is not counted is not held"
    assert found.update["gradients"] == bytes_of(params), "both are float32"


def devices(number, per_process, platform="tpu"):
    return [
        SimpleNamespace(platform=platform, process_index=i // per_process) for i in range(number)
    ]


def test_decoding_on_a_gpu_holds_the_layers_once_more():
    config = tiny_config(**ONE | {"mesh__data": 8})
    of = lambda platform: held(config, dict.fromkeys(AXES, 1), platform=platform).rollout
    mesh = make_mesh(config.mesh)
    prompt = config.data.max_prompt_tokens
    engine_config = make_engine_config(config, mesh.shape, prompt, (1,), platform="cpu")
    params = initial_params(config.model, config.mesh, mesh, seed=0)
    decoded = DecoderEngine(engine_config, mesh, mesh).load_params(params).decode["layers"]
    assert COPY not in of("tpu")
    assert of("cuda")[COPY] == bytes_of(decoded) == bytes_of(params["layers"])
    deep = dataclasses.replace(config, model=dataclasses.replace(config.model, num_layers=33))
    assert COPY not in held(deep, dict.fromkeys(AXES, 1), platform="cuda").rollout
    adapters = dataclasses.replace(config, model=dataclasses.replace(config.model, lora_rank=2))
    assert COPY not in held(adapters, dict.fromkeys(AXES, 1), platform="cuda").rollout
    one = tiny_config(**ONE)
    less = held(one, dict.fromkeys(AXES, 1), platform="cuda").rollout_bytes - 1
    chosen = lambda platform: with_replica_size(one, devices(1, 1, platform), less, print)
    assert chosen("tpu") is one
    with pytest.raises(UserError, match=COPY):
        chosen("cuda")


SPREAD = """--config.mesh.tensor=1 --config.mesh.fsdp=-1 --config.train.rows_per_micro_batch=128
--config.rollout.slots=32 --config.rollout.prefill_prompts=32""".split()


def published(*changes):
    return parse(["program", "--config=configs/qwen32b_dapo.py", *SPREAD, *changes], "")[0]


@pytest.mark.parametrize(
    "number, per_process, gib, size",
    [
        (64, 4, 95.73, 1),  # v5p: 65.5 GB whole
        (128, 4, 31.24, 4),  # v6e: a host's
        (128, 4, 15.75, 8),  # v5e: two hosts'; 4 would hold 16.4 GB
        (128, 1, 31.24, 4),  # a process for each
    ],
)
def test_the_smallest_replica_that_holds_it(number, per_process, gib, size):
    config, there, said = published(), devices(number, per_process), []
    found = with_replica_size(config, there, int(gib * GIB), said.append)
    assert (found.mesh.rollout_tensor or 1) == size
    if size == 1:
        assert found is config and not said
        return
    assert re.search(
        rf"{size} devices form an inference replica, .* of {gib:.2f} GiB; with 1 ", said[0]
    )
    assert dataclasses.replace(found, mesh=config.mesh) == config
    given = published("--config.mesh.rollout_tensor=2")
    assert with_replica_size(given, there, int(gib * GIB), said.append) is given
    assert with_replica_size(config, there, None, said.append) is config, "memory not known"


def test_where_no_size_holds_it_the_error_shows_the_arithmetic():
    message = (
        r"inference replica of 8 would hold parameters 7.63 GiB, .*: .* of 15.00 GiB\. Set "
        r"config\.rollout\.cache_gib"
    )
    with pytest.raises(UserError, match=message):
        config = published("--config.rollout.slots=64")
        with_replica_size(config, devices(16, 4), 15 * GIB, print)


def test_a_cache_that_only_a_replica_of_several_can_have():
    """4 GiB do not hold the pages of one sequence with all its heads."""
    there, memory_bytes, said = devices(128, 4), int(15.75 * GIB), []
    found = with_replica_size(
        published("--config.rollout.cache_gib=4"), there, memory_bytes, said.append
    )
    assert found.mesh.rollout_tensor == 8 and said
    with pytest.raises(UserError, match=r"config.rollout.cache_gib \(0.01\) holds 2 pages"):
        with_replica_size(published("--config.rollout.cache_gib=0.01"), there, memory_bytes, print)


@pytest.mark.parametrize("page_tokens", [4, 16, 64, 128])
def test_the_cache_that_a_refusal_asks_for_is_enough(page_tokens):
    config, sizes = published(f"--config.rollout.page_tokens={page_tokens}"), dict.fromkeys(AXES, 1)

    def with_cache(gib):
        rollout = dataclasses.replace(config.rollout, cache_gib=gib)
        return held(dataclasses.replace(config, rollout=rollout), sizes)

    with pytest.raises(UserError) as refused:
        with_cache(0.001)
    (needed,) = re.findall("set it to (.*) or more", str(refused.value))
    with_cache(float(needed))
    with pytest.raises(UserError):
        with_cache(0.99 * float(needed))


def test_slots_divide_among_replicas():
    """3 of 6 devices would hold it, but 9 slots are not for two."""
    config = tiny_config(
        **ONE | {"mesh__fsdp": 3, "mesh__tensor": 2},
        **{"model__num_heads": 6, "model__num_kv_heads": 6, "model__hidden_size": 24},
        **{"model__intermediate_size": 48, "model__vocab_size": 36},
        **{"rollout__slots": 9, "rollout__prefill_prompts": 3, "train__rows_per_micro_batch": 3},
    )
    need = held(config, dict(data=1, fsdp=3, context=1, tensor=2)).rollout_bytes
    found = with_replica_size(config, devices(6, 6), int(need / 0.95), print)
    assert found.mesh.rollout_tensor in (None, 6)


def test_a_run_and_its_plan_choose_the_same_size(monkeypatch, tmp_path):
    """On eight devices with so little memory that a replica needs two."""
    config = tiny_config(**ONE | {"mesh__fsdp": 8, "model__num_kv_heads": 4, "model__path": None})
    sizes = dict(data=1, fsdp=8, context=1, tensor=1)
    alone = held(config, sizes, platform="cpu").rollout_bytes
    assert memory_budget.device_bytes(jax.devices()) is None, "a CPU does not report it"
    monkeypatch.setattr(memory_budget, "device_bytes", lambda _: alone)
    run = RunComponents(config, tmp_path, Progress(0, quiet=True))
    assert dict(run.engine.mesh.shape) == dict(data=4, fsdp=1, context=1, tensor=2)
    said, target = [], chips.target("local")
    gpu = target._replace(devices=devices(8, 8, "cuda"), hbm_bytes=alone)
    assert plan.with_replicas(config, gpu, said.append) == run.config
    assert "2 devices form an inference replica" in said[0]
    assert plan.with_replicas(config, target, said.append) is config, "nor does the run know it"
    least = plan.with_replicas(config, gpu._replace(hbm_bytes=1), said.append)
    assert least.mesh.rollout_tensor == 4, "a plan takes the closest"
    found = plan.plan(
        run.config, target, ("decode",), said.append, response_tokens=8, prompt_tokens=8
    )
    assert found["rollout_tensor"] == 2
    rolled = sum(held(run.config, sizes).rollout.values())
    assert rolled <= found["programs"]["decode"]["argument_bytes"] <= 1.1 * rolled
