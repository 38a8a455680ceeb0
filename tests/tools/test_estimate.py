"""Operations and bytes by arithmetic: by hand, against XLA's own analysis, and against the field's
rules of thumb."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from configs import qwen32b_dapo
from dapo_jax.config import Config
from dapo_jax.models import decoder
from dapo_jax.models.sharding import AXES, make_mesh
from dapo_jax.tools.plan import chips, estimate, programs
from dapo_jax.training import packing
from tests.algorithms.test_policy_losses import configured
from tests.support.helpers import replace_model, tiny_config

V5P = chips.CHIPS["TPU v5"]
ONE = dict.fromkeys(AXES, 1)
QWEN = Config.from_dict(qwen32b_dapo.get_config().to_dict())
POD = {"data": 1, "fsdp": 16, "context": 1, "tensor": 4}
# By hand, of one layer: q and o are 4 x 2 x 2 = 16 each, k and v 4 x 1 x 2 = 8 each: 48. gate and
# up are 4 x 3 = 12 each, down 12, the unembedding 5 x 4 = 20.
HAND = dict(
    hidden_size=4,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=2,
    intermediate_size=3,
    vocab_size=5,
    tie_embeddings=False,
)


def by_hand(**model_changes):
    config = tiny_config()
    train = dataclasses.replace(config.train, row_tokens=32, rows_per_micro_batch=1)
    sizes = replace_model(config, **HAND, **model_changes)
    return dataclasses.replace(config, model=sizes, train=train)


def batch(config, program, *, micro_batches=1, sequence_tokens=16.0, platform="cpu", sizes=None):
    lengths = dict(micro_batches=micro_batches, sequence_tokens=sequence_tokens)
    return estimate.batch_work(config, sizes or ONE, platform, program, **lengths)


def test_a_tiny_model_by_hand():
    config = by_hand(remat="none")
    assert tuple(estimate.matrices(config.model)) == (48, 24, 12, 20)
    # 32 tokens, 2 operations an element; each sees 32 keys, in 2 heads of 2, scores and values.
    matrices, attention = 32 * 2 * (48 + 24 + 12 + 20), 32 * 32 * 2 * 2 * 2 * 2
    assert batch(config, "old_logprobs").flops == matrices + attention
    # Gradients of inputs and of matrices, and the logits once more.
    logits = 32 * 2 * 20
    assert batch(config, "train").flops == 3 * matrices + logits + 3 * attention
    # Everything again but the product with `down`.
    again = 32 * 2 * (48 + 24) + attention
    assert (
        batch(by_hand(remat="full"), "train").flops == 3 * matrices + logits + 3 * attention + again
    )
    # A critic has no logits.
    assert batch(config, "critic_values").flops == matrices - logits + attention
    token = estimate.decode_token(config, 1, slots=3, cached_tokens=7)
    assert token.flops == 3 * 2 * 104 + 7 * 2 * 2 * 2 * 2
    prompt = estimate.prefill_call(config, 1, prompts=2, prompt_tokens=5)
    assert prompt.flops == 2 * 5 * 2 * 84 + 2 * 5 * 5 * 2 * 2 * 2 * 2


def test_the_bytes_of_a_tiny_model_by_hand():
    """104 weights of 4 bytes. A token goes in and out of the products of its layer with 37 values:
    4 in, 2 x 2 + 2 x 2 out; 4 in, 4 out; 4 in, 2 x 3 out; 3 in, 4 out."""
    config, weights, values = by_hand(remat="none"), 4 * 104, 4 * 32 * 37
    assert batch(config, "old_logprobs").memory_bytes == weights + values
    # Three passes. Gradients are read and written by each micro-batch, and read once at the end,
    # where a weight and its two moments are read and written.
    moved = lambda num: batch(config, "train", micro_batches=num).memory_bytes
    passes = 3 * (weights + values) + 2 * weights
    assert moved(1) == passes + weights + 2 * 3 * weights
    assert moved(5) - moved(1) == 4 * passes


@pytest.mark.parametrize(
    "axis, scored, trained",
    [
        # Half of the gradients' sums, and the other half of them summed.
        ("data", 0, 4 * 104),
        # Half of the matrices for each pass, and half of the gradients.
        ("fsdp", 4 * 52, 3 * 4 * 52),
        # Twice a pass, as over data: 32 tokens of 4 values.
        ("tensor", 2 * 4 * 32 * 4, 4 * 4 * 32 * 4),
        # As over fsdp. Of the other 16 tokens the key and the value, 2 numbers each, for each pass,
        # and their gradients.
        ("context", 4 * 52 + 4 * 16 * 4, 3 * 4 * 52 + 3 * 4 * 16 * 4),
    ],
)
def test_the_bytes_that_one_of_two_devices_receives_by_hand(axis, scored, trained):
    config, sizes = by_hand(remat="none"), ONE | {axis: 2}
    received = lambda program: batch(config, program, sizes=sizes).received_bytes
    assert (received("old_logprobs"), received("train")) == (scored, trained)


def test_training_needs_six_operations_a_parameter():
    """6 N D, with N the parameters of all matrices but the embedding."""
    shapes = decoder.param_shapes(QWEN.model)
    small = ("bias", "norm")
    layers = (x for name, x in shapes["layers"].items() if not name.endswith(small))
    matrices = sum(x.size for x in layers if len(x.shape) > 2) + shapes["unembed"].size
    assert matrices == pytest.approx(32.0e9, rel=0.01), "a 32B without its embedding"
    assert estimate.model_flops(QWEN, 0) == 6 * matrices
    # Causal attention: token t of S sees t keys, 2 products forward and 4 backward.
    c, S = QWEN.model, 1000
    seen = sum(range(S)) / S
    attention = 6 * 2 * c.num_layers * c.num_heads * c.head_dim * seen
    assert estimate.model_flops(QWEN, S) - 6 * matrices == pytest.approx(attention, rel=0.01)


@pytest.mark.parametrize("remat", ["none", "dots", "dots_no_batch", "attention_mlp", "full"])
def test_operations_are_those_that_xla_counts(remat):
    """Of programs in which nothing is looped over: one layer, micro-batch, chunk and token."""
    sizes = dict(hidden_size=256, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=32)
    sizes |= dict(intermediate_size=512, vocab_size=512, remat=remat, log_prob_chunk_tokens=4096)
    config = tiny_config(
        **{f"model__{name}": value for name, value in sizes.items()},
        train__prompts_per_update=1,
        train__prompts_per_step=2,
        train__row_tokens=256,
        train__rows_per_micro_batch=2,
        rollout__group_size=2,
        rollout__decode_steps=1,
        rollout__slots=8,
        rollout__prefill_prompts=2,
        rollout__max_response_tokens=64,
        data__max_prompt_tokens=64,
    )
    assert packing.max_micro_batches(config) == 1
    with jax.numpy_dtype_promotion("standard"):
        known = programs.programs(config, make_mesh(config.mesh, jax.devices()[:1]))
        counted = lambda name: known[name].lower().compile().cost_analysis()["flops"]
        assert batch(config, "train").flops == pytest.approx(counted("train"), rel=0.1)
        if remat != "none":
            return
        scored = batch(config, "old_logprobs").flops
        assert scored == pytest.approx(counted("old_logprobs"), rel=0.1)
        token = estimate.decode_token(config, 1, slots=8, cached_tokens=8 * 128)
        assert token.flops == pytest.approx(counted("decode"), rel=0.1)
        prompts = estimate.prefill_call(config, 1, prompts=2, prompt_tokens=64)
        assert prompts.flops == pytest.approx(counted("prefill"), rel=0.1)


def test_the_32b_on_its_pod():
    """Published sizes: 64 layers of 8 KV heads of 128 are 256 KiB a token in bfloat16, 32.8 billion
    parameters less an embedding of 0.78 are 64 GB."""
    assert estimate.token_bytes(QWEN.model, QWEN.rollout) == 64 * 2 * 8 * 128 * 2 == 262_144
    assert estimate.weight_bytes(QWEN.model) == pytest.approx(64.0e9, rel=0.01)
    token = estimate.decode_token(QWEN, 4, slots=44, cached_tokens=40 * 2816)
    assert token.memory_bytes == pytest.approx((64.0e9 + 40 * 2816 * 262_144) / 4, rel=0.01)
    assert token.flops == pytest.approx(44 * 2 * 32.0e9 / 4, rel=0.1)
    # An update of 32 micro-batches of 16 rows. With `full` three quarters of the layers twice.
    tokens = 32 * 16 * 22_528
    work = batch(QWEN, "train", micro_batches=32, sequence_tokens=5376.0, platform="tpu", sizes=POD)
    assert work.flops * 64 == pytest.approx(tokens * 7.5 * 32.0e9, rel=0.15)
    # Each device gathers its quarter of the matrices twice, and gives away their gradients.
    assert work.received_bytes > 32 * 3 * 64.0e9 / 4 * 15 / 16


def test_devices_share_what_one_would_do():
    config = dataclasses.replace(
        QWEN, mesh=dataclasses.replace(QWEN.mesh, data=1, fsdp=1, context=1, tensor=1)
    )
    alone, pod = (batch(config, "train", sizes=sizes, platform="tpu") for sizes in (ONE, POD))
    assert pod.flops == pytest.approx(alone.flops / 64)
    assert alone.received_bytes == 0 < pod.received_bytes


@pytest.mark.parametrize(
    "remat, attention, passes",
    [
        ("none", "splash", 4.5),
        ("dots", "splash", 5.5),
        ("dots_no_batch", "splash", 5.5),
        ("attention_mlp", "splash", 4.5),
        ("attention", "auto", 4.5),
        ("attention", "flash", 5.5),
        ("attention", "cudnn", 5.5),
        ("full", "splash", 5.5),
    ],
)
def test_a_kernel_runs_again_unless_remat_keeps_what_it_gives(remat, attention, passes):
    """As docs/update.md says. In longer sequences only attention computes more."""
    config = by_hand(remat=remat, attention=attention)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, row_tokens=8192))
    platform = "gpu" if attention in ("flash", "cudnn") else "tpu"

    def more(program):
        if attention == "flash":  # computes whole rows: of a longer row
            long = dataclasses.replace(
                config, train=dataclasses.replace(config.train, row_tokens=16_384)
            )
            of = lambda c: batch(c, program, platform=platform).flops / c.train.row_tokens
            return of(long) - of(config)
        of = lambda length: batch(config, program, platform=platform, sequence_tokens=length).flops
        return of(4000.0) - of(2000.0)

    assert more("train") == pytest.approx(more("critic_train")) and more("train") == pytest.approx(
        passes * more("old_logprobs")
    )


@pytest.mark.parametrize(
    "changes, kernel",
    [
        ({"model__head_dim": 16, "model__compute_dtype": "bfloat16"}, "cudnn"),
        ({"model__head_dim": 16, "model__compute_dtype": "float32"}, "xla"),
        ({"model__head_dim": 8, "model__compute_dtype": "bfloat16"}, "xla"),
        (
            {
                "model__head_dim": 16,
                "model__compute_dtype": "bfloat16",
                "model__sliding_window": (16, (0,)),
            },
            "xla",
        ),
        (
            {"model__head_dim": 16, "model__compute_dtype": "bfloat16", "mesh__context": 2},
            "xla",
        ),
    ],
)
def test_what_the_kernel_does_not_take_is_planned_with_xlas_attention(changes, kernel):
    """On a GPU from Hopper on, as docs/update.md says."""
    assert estimate.kernel(tiny_config(**changes), "gpu") == kernel


def test_each_pass_that_scores_the_batch_is_counted():
    """Besides the recomputed log-probs, the default."""
    passes = lambda **changes: estimate.scoring_passes(tiny_config(**changes))
    otb = {"objective__advantage": "optimal-token-baseline"}
    assert passes(rollout__log_prob_source="rollout") == 0
    assert passes(rollout__log_prob_source="recompute", **otb) == 2
    assert passes(rollout__log_prob_source="recompute", objective__top_entropy_share=0.2) == 2
    assert passes(rollout__log_prob_source="rollout", **configured("clip-cov")) == 1
    adapts = {"objective__entropy_adaptation": (0.2, 0.005), "rollout__log_prob_source": "rollout"}
    assert passes(**adapts) == passes(**adapts, objective__top_entropy_share=0.2) == 1


@pytest.mark.parametrize("length", [700, 1300, 2900, 8192])
def test_blocks_that_sequences_touch_are_counted_in_training(length):
    """As many as splash attention computes of a long row, to a twentieth."""
    row = 8192 if length == 8192 else 512 * length  # as many sequences as begin in all ways
    config = by_hand()
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, row_tokens=row))
    first, last = np.arange(0, row, length) // 512, np.arange(length - 1, row, length) // 512
    # Blocks of queries and keys below the diagonal, from the first of the first sequence in them.
    block = np.arange(row // 512)
    pairs = np.sum(block - first[np.searchsorted(last, block)] + 1) * 512**2 / row
    assert estimate.keys_per_query(config, "tpu", length) == pytest.approx(pairs, rel=0.05)


def test_time_is_the_longest_of_three():
    chip = V5P._replace(flops=100.0, memory_rate=10.0, link_rate=1.0, products_share=0.5)
    best = estimate.at_best(estimate.Work(1000, 50, 2), chip)
    assert best == (10, 5, 2) and best.longest == 10 and best.bound == "compute"
    likely = estimate.expected(estimate.Work(1000, 200, 2), chip)
    assert likely.compute == 20 and likely.memory == pytest.approx(20 / 0.47)
    assert likely.bound == "memory"
    assert estimate.expected(estimate.Work(1, 1), chip._replace(flops=None)) is None


def test_a_step_by_hand():
    """16 responses of 30 tokens to 4 prompts of 2, in two updates. Slots are busy to 90 %, rows are
    full to 95 %, and responses in the middle of their length."""
    config = tiny_config(
        rollout__slots=4, rollout__prefill_prompts=4, rollout__decode_steps=4, train__row_tokens=64
    )
    found = estimate.step(config, ONE, chips.named("v5e"), response_tokens=30, prompt_tokens=2)
    decode = found["parts"]["decode"]
    assert decode["calls"] == math.ceil(16 * 30 / (0.9 * 4) / 4) == 34
    # In float32 a token has 256 bytes: keys and values of 2 heads of 8, in 2 layers.
    read = estimate.weight_bytes(config.model) + 0.9 * 4 * (2 + 15) * 256
    assert decode["memory_bytes"] == pytest.approx(4 * read)
    assert (found["responses"], found["tokens"], found["updates"]) == (16, 16 * 32, 2)
    assert found["rows_per_update"] == math.ceil(256 / (0.95 * 64)) == 5


def test_each_chunk_of_a_prompt_reads_the_weights_and_the_cache():
    of = lambda tokens: estimate.prefill_call(by_hand(), 1, prompts=2, prompt_tokens=tokens)
    # 84 weights of a layer, and a key and a value of 2 numbers for each token.
    assert of(512).memory_bytes == 4 * 84 + 2 * 512 * 16
    assert of(1024).memory_bytes == 2 * (4 * 84 + 2 * 1024 * 16)


def test_weights_are_received_once():
    """Trained over fsdp 8, generated by 2: each receives what it lacks of half the parameters."""
    sizes = {"data": 1, "fsdp": 8, "context": 1, "tensor": 1}
    config = dataclasses.replace(QWEN, mesh=dataclasses.replace(QWEN.mesh, rollout_tensor=2))
    number = sum(math.prod(x.shape) for x in jax.tree.leaves(decoder.param_shapes(QWEN.model)))
    found = estimate.weights_call(config, sizes)
    assert found.received_bytes == pytest.approx(2 * number * (1 / 2 - 1 / 8), rel=0.01)
    assert found.memory_bytes == pytest.approx(4 * number / 8 + 2 * number / 2, rel=0.01)


def test_a_head_in_float32_is_read_moved_and_multiplied_as_such():
    exact = dataclasses.replace(QWEN, model=dataclasses.replace(QWEN.model, head_dtype="float32"))
    c, head = QWEN.model, QWEN.model.vocab_size * QWEN.model.hidden_size
    assert estimate.weight_bytes(exact.model) - estimate.weight_bytes(c) == 2 * head
    sizes = {"data": 1, "fsdp": 8, "context": 1, "tensor": 1}
    found, plain = (estimate.weights_call(config, sizes) for config in (exact, QWEN))
    assert found.memory_bytes - plain.memory_bytes == pytest.approx(2 * head)
    token = [estimate.decode_token(config, 1, slots=8, cached_tokens=0) for config in (exact, QWEN)]
    assert token[0].flops - token[1].flops == pytest.approx(5 * 2 * 8 * head)
    # Frozen in bfloat16, under adapters, it is as it was.
    frozen = dataclasses.replace(exact.model, lora_rank=8)
    assert estimate.head_products(frozen) == head


def test_float32_takes_six_products_of_bfloat16():
    """The operations are the same, the time of the products is not."""
    wide = dataclasses.replace(QWEN, model=dataclasses.replace(QWEN.model, compute_dtype="float32"))
    lengths = dict(response_tokens=512, prompt_tokens=128)
    parts, exact = (
        estimate.step(config, ONE, chips.named("v5e"), **lengths)["parts"]["train"]
        for config in (QWEN, wide)
    )
    assert parts["bound"] == exact["bound"] == "compute" and parts["flops"] == exact["flops"]
    assert exact["seconds"] == pytest.approx(6 * parts["seconds"])


def test_the_assumptions_say_that_decoding_lasts_as_long_as_the_longest_response():
    """More slots than responses, all of them short."""
    config = tiny_config(rollout__slots=1024, rollout__decode_steps=4)
    found = estimate.step(config, ONE, chips.named("v5e"), response_tokens=3, prompt_tokens=2)
    assert found["parts"]["decode"]["calls"] * 4 == config.rollout.max_response_tokens == 32
    assert "as long as config.rollout.max_response_tokens" in found["assumptions"]
    # The cache is that of the 16 responses, with 256 bytes a token.
    read = estimate.weight_bytes(config.model) + 16 * (2 + 3 / 2) * 256
    assert found["parts"]["decode"]["memory_bytes"] == pytest.approx(4 * read)


def test_a_recompute_pass_is_in_the_step():
    lengths = dict(response_tokens=5120, prompt_tokens=256)

    def of(source):
        rollout = dataclasses.replace(QWEN.rollout, log_prob_source=source)
        return estimate.step(dataclasses.replace(QWEN, rollout=rollout), POD, V5P, **lengths)

    without, with_it = of("rollout"), of("recompute")
    more = with_it["parts"]["old_logprobs"]
    assert with_it["seconds"] == pytest.approx(without["seconds"] + more["seconds"])
    # Forward only: a quarter of what an update with remat "full" does.
    assert more["flops"] == pytest.approx(with_it["parts"]["train"]["flops"] / 4, rel=0.15)
