"""Packing keeps every token, in rows that first-fit-decreasing would make."""

import numpy as np
import pytest

from dapo_jax.tools.bench.shapes import sample_lengths
from dapo_jax.training import packing
from tests.support.helpers import (
    in_groups,
    pack_samples,
    random_samples,
    rows_of,
    segments_of,
    tiny_config,
)


def unpack(rows):
    """Every field of `Rows` cut to each segment, in order of their rows."""
    for row, at in segments_of(rows):
        assert rows.positions_BT[row, at].tolist() == list(range(at.sum()))
        yield type(rows)(*(x[row, at] for x in rows))


def test_every_sample_comes_back_whole():
    samples = random_samples(np.random.default_rng(0), 40)
    rows = rows_of(samples, 64)
    seen = {tuple(segment.tokens_BT.tolist()): segment for segment in unpack(rows)}
    assert len(seen) == 40
    for sample in samples:
        P = len(sample.prompt_tokens)
        got = seen[(*sample.prompt_tokens, *sample.response_tokens.tolist())]
        assert got.mask_BT.tolist() == [False] * P + [True] * len(sample.response_tokens)
        np.testing.assert_allclose(got.log_prob_old_BT[P:], sample.log_prob_old)
        np.testing.assert_allclose(got.advantage_BT[P:], sample.advantage, rtol=1e-6)
        np.testing.assert_allclose(got.weight_BT[P:], sample.weight, rtol=1e-6)
        assert not got.weight_BT[:P].any() and not got.advantage_BT[:P].any()
        assert not got.log_prob_ref_BT.any() and not got.staleness_BT.any()


@pytest.mark.parametrize("seed", range(3))
def test_responses_of_a_row_share_their_prompt(seed):
    """Read back along `prefixes_BT`, every sample is whole, and no row has a prompt twice."""
    samples = in_groups(random_samples(np.random.default_rng(seed), 40), 5)
    packed = pack_samples(samples, 64, share_prompts=True)
    rows, found, prefixes = packed.rows, [], []
    for row, segments in enumerate(rows.segments_BT):
        in_row = []
        for segment in range(1, segments.max() + 1):
            at = segments == segment
            (prefix,) = set(rows.prefixes_BT[row, at])
            before = (segments == prefix) & (prefix != segment)
            positions = [*rows.positions_BT[row, before], *rows.positions_BT[row, at]]
            assert positions == list(range(len(positions)))
            tokens = [*rows.tokens_BT[row, before], *rows.tokens_BT[row, at]]
            if rows.mask_BT[row, at].any():
                assert not before.any() or np.flatnonzero(before)[-1] < np.flatnonzero(at)[0]
                found.append(tokens)
            else:  # what others see
                assert (rows.prefixes_BT[row, segments != segment] == segment).any()
                in_row.append(tuple(tokens))
        assert len(set(in_row)) == len(in_row)
        prefixes += in_row
    whole = [[*sample.prompt_tokens, *sample.response_tokens] for sample in samples]
    assert sorted(found) == sorted(whole)
    tokens_M = rows.tokens_BT.reshape(-1)[packed.where_M]
    assert tokens_M.tolist() == [t for sample in samples for t in sample.response_tokens]
    assert rows.mask_BT.sum() == len(tokens_M)
    padding = rows.segments_BT == 0
    assert not rows.prefixes_BT[padding].any() and not rows.positions_BT[padding].any()
    # All that is there: prefixes once a row, the last token of each prompt, and responses.
    assert (~padding).sum() == sum(map(len, prefixes)) + len(samples) + len(tokens_M)
    alone = rows_of(samples, 64).segments_BT
    assert (~padding).sum() < (alone > 0).sum() and len(padding) <= len(alone)


@pytest.mark.parametrize("most_segments", [32, 2])
@pytest.mark.parametrize("seed", range(20))
def test_shared_prompts_need_no_more_rows_than_are_compiled_for(monkeypatch, seed, most_segments):
    """`most_rows` counts on rows with room for k of the longest sequences having k."""
    monkeypatch.setattr(packing, "most_segments", lambda row_tokens: most_segments)
    rng = np.random.default_rng(seed)
    row_tokens, longest = int(rng.integers(20, 90)), int(rng.integers(5, 20))
    sequences = 4 * int(rng.integers(1, 12))
    prompts = [(q,) * int(rng.integers(1, longest)) for q in range(sequences // 4)] * 4
    lengths = [int(rng.integers(len(p) + 1, longest + 1)) for p in prompts]
    if seed % 2:  # the worst there is
        lengths = [longest] * sequences
    rows = packing.first_fit_decreasing(lengths, row_tokens, [p[:-1] for p in prompts])
    assert len(rows) <= -(-sequences // min(row_tokens // longest, most_segments))
    assert max(map(len, rows)) <= most_segments
    assert sorted(i for row in rows for i in row) == list(range(sequences))


def test_columns_come_back_in_the_order_of_their_tokens():
    packed = pack_samples(random_samples(np.random.default_rng(3), 20), 64)
    column = np.arange(1, len(packed.where_M) + 1)
    rows = packing.fill(packed, log_prob_old_BT=column)
    micro = packing.to_micro_batches(rows, rows_per_micro_batch=4, num_micro_batches=5)
    assert packing.take_columns(packed, micro.log_prob_old_BT).tolist() == column.tolist()
    assert (micro.log_prob_old_BT > 0).sum() == len(column)
    assert not packed.rows.log_prob_old_BT.any()  # the packed rows themselves are left alone


def test_a_response_left_out_keeps_its_tokens_and_loses_its_weight():
    (sample,) = random_samples(np.random.default_rng(1), 1)
    rows = rows_of([sample._replace(trained=False)], 64)
    assert not rows.mask_BT.any() and not rows.weight_BT.any()
    assert (rows.segments_BT == 1).sum() == sample.length


@pytest.mark.parametrize("seed", range(5))
def test_first_fit_decreasing(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 60, 100).tolist()
    rows = packing.first_fit_decreasing(lengths, 64)
    assert sorted(i for row in rows for i in row) == list(range(100))
    loads = [sum(lengths[i] for i in row) for row in rows]
    assert max(loads) <= 64
    # No row's largest member would have fitted in an earlier row when it came.
    for later, row in enumerate(rows):
        for earlier in range(later):
            before = sum(lengths[i] for i in rows[earlier] if lengths[i] >= lengths[row[0]])
            assert before + lengths[row[0]] > 64


def test_a_row_holds_no_more_sequences_than_cudnn_takes():
    """Rows of 512 to 16,384 tokens take 32, one of 32,768 takes 64: so many of 512 fill it."""
    sizes = lambda lengths, row: [len(x) for x in packing.first_fit_decreasing(lengths, row)]
    assert sizes([2] * 70, 512) == [32, 32, 6]
    assert sizes([3] + [1] * 70, 512) == [32, 32, 7]
    assert sizes([100] * 50, 16_384) == [32, 18]
    assert sizes([512] * 65, 32_768) == [64, 1]
    segments = rows_of(random_samples(np.random.default_rng(0), 80), 4096).segments_BT
    assert segments.max() == 32 and len(segments) == 3
    config = tiny_config(
        data__max_prompt_tokens=4,
        rollout__max_response_tokens=8,
        reward__overlong_buffer_tokens=4,
        rollout__group_size=4,
        train__prompts_per_step=40,
        dynamic_sampling__max_prompts=40,
        train__prompts_per_update=40,
        train__row_tokens=512,
        train__rows_per_micro_batch=2,
    )
    assert packing.max_micro_batches(config) == 3, "160 sequences in five rows"


def test_the_longest_mini_batch_fills_the_update_that_is_compiled():
    """Two would share a row without their prompts, and two without their responses."""
    config = tiny_config(train__rows_per_micro_batch=2)
    prompt, n = (5,) * config.data.max_prompt_tokens, config.rollout.max_response_tokens
    row_tokens = config.train.row_tokens
    assert max(len(prompt), n) <= row_tokens // 2 < len(prompt) + n
    tokens_M, lengths_R = np.ones(8 * n, np.int32), np.full(8, n)  # two groups of four
    rows = packing.pack([prompt] * 8, tokens_M, lengths_R, row_tokens).rows
    assert packing.used_micro_batches(len(rows.tokens_BT), 2) == 4
    assert packing.max_micro_batches(config) == 4


def test_too_long_a_sequence_is_refused():
    with pytest.raises(ValueError, match="sequence 1 has 65 tokens"):
        packing.first_fit_decreasing([3, 65], 64)


def test_micro_batches_are_padded_with_empty_rows():
    rows = rows_of(random_samples(np.random.default_rng(2), 20), 64)
    R = len(rows.tokens_BT)
    micro = packing.to_micro_batches(rows, rows_per_micro_batch=4, num_micro_batches=5)
    assert micro.tokens_BT.shape == (5, 4, 64)
    assert [packing.used_micro_batches(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    for before, after in zip(rows, micro):
        flat = after.reshape(20, 64)
        np.testing.assert_array_equal(flat[:R], before)
        assert not flat[R:].any()
    with pytest.raises(ValueError, match="do not fit"):
        packing.to_micro_batches(rows, rows_per_micro_batch=1, num_micro_batches=R - 1)


def imbalance(layout, lengths, *, rows_per_micro_batch, shards):
    """The attention of the costliest shard over that of the mean one, summed over micro-batches."""
    B, costliest, mean = rows_per_micro_batch, 0.0, 0.0
    for m in range(0, len(layout), B):
        loads = [
            sum(lengths[i] ** 2 for row in layout[s : s + B // shards] for i in row)
            for s in range(m, m + B, B // shards)
        ]
        costliest, mean = costliest + max(loads), mean + sum(loads) / shards
    return costliest / mean


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("B, shards", [(8, 4), (8, 8), (4, 2)])
def test_rows_are_put_in_order_for_the_shards(seed, B, shards):
    lengths = (
        np.clip(np.random.default_rng(seed).lognormal(2.5, 1, 150), 1, 64).astype(int).tolist()
    )
    layout = packing.first_fit_decreasing(lengths, 64)
    cut = {"rows_per_micro_batch": B, "shards": shards}
    ordered = packing.balanced(layout, lengths, **cut)
    assert ordered == packing.balanced(layout, lengths, **cut)
    assert sorted(row for row in ordered if row) == sorted(layout)
    assert len(ordered) == -(-len(layout) // B) * B, "as many micro-batches, all of them whole"
    assert imbalance(ordered, lengths, **cut) <= imbalance(layout, lengths, **cut)
    if B > shards:
        assert imbalance(ordered, lengths, **cut) < 1.3


@pytest.mark.parametrize(
    "B, shards, before, after",
    [(64, 16, 1.585, 1.061), (32, 16, 1.217, 1.086), (16, 4, 1.093, 1.007), (16, 16, 1.116, 1.115)],
)
def test_the_order_is_as_even_as_docs_update_says(B, shards, before, after):
    lengths = (512 + sample_lengths(512, 22_016, "longtail")).tolist()
    layout = packing.first_fit_decreasing(lengths, 22_528)
    assert len(layout) == 138 and round(1 - sum(lengths) / (138 * 22_528), 3) == 0.009
    cut = {"rows_per_micro_batch": B, "shards": shards}
    ordered = packing.balanced(layout, lengths, **cut)
    assert round(imbalance(layout, lengths, **cut), 3) == before
    assert round(imbalance(ordered, lengths, **cut), 3) == after


def test_few_rows_lie_over_all_shards():
    layout = [[0], [1], [2]]
    ordered = packing.balanced(layout, [5, 6, 7], rows_per_micro_batch=8, shards=4)
    assert ordered == [[2], [], [1], [], [0], [], [], []]


def test_one_shard_takes_the_rows_as_they_are():
    layout = [[1], [3, 2], [0]]
    ordered = packing.balanced(layout, [9, 60, 30, 33], rows_per_micro_batch=4, shards=1)
    assert ordered == layout


def test_columns_find_their_tokens_between_empty_rows():
    samples = random_samples(np.random.default_rng(4), 9)
    packed = pack_samples(samples, 64, rows_per_micro_batch=8, shards=4)
    assert len(packed.rows.tokens_BT) % 8 == 0
    assert (packed.rows.segments_BT == 0).all(axis=1).any(), "there are empty rows"
    tokens_M = packed.rows.tokens_BT.reshape(-1)[packed.where_M]
    assert tokens_M.tolist() == [t for sample in samples for t in sample.response_tokens]
    assert packed.rows.mask_BT.sum() == len(tokens_M)
