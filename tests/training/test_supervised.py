"""The supervised loss is transformers', and no way of cutting the batch changes its gradient."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from dapo_jax.config.sft import SftConfig
from dapo_jax.data import examples
from dapo_jax.models import decoder
from dapo_jax.tools.sft import pack
from dapo_jax.training import packing, supervised
from tests.conftest import ROOT
from tests.support import checkpoints
from tests.support.helpers import tiny_config
from tests.support.problems import write_rows

GOLDEN = json.loads((ROOT / "tests" / "goldens" / "sft_loss.json").read_text())


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    """The golden's model and parameters, and its chats as examples."""
    place = tmp_path_factory.mktemp("golden")
    model = checkpoints.golden(GOLDEN["family"])
    checkpoints.write(place / "model", model.config, model.weights)
    config = checkpoints.config_of(place / "model", model__compute_dtype="float32").model
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(GOLDEN["tokenizer"])),
        eos_token="<|im_end|>",
        chat_template=GOLDEN["chat_template"],
    )
    file = write_rows(place / "chats.jsonl", [{"messages": chat} for chat in GOLDEN["chats"]])
    values = {"model": vars(config), "data": {"train": {"chats": {"path": str(file)}}}}
    values["train"] = {"num_steps": 1, "row_tokens": 256}
    sft_config = SftConfig.from_dict(values)
    found = examples.load(
        sft_config, sft_config.data.train, tokenizer, field="data.train", say=lambda _: None
    )
    config = checkpoints.config_of(place / "model", model__compute_dtype="float32")
    return config.model, checkpoints.load(config), found


def test_tokens_and_labels_of_chats_are_those_of_transformers(golden):
    for example, ids, labels in zip(golden[2], GOLDEN["input_ids"], GOLDEN["labels"], strict=True):
        tokens = [*example.prompt, *example.response]
        trained = [False] * len(example.prompt) + example.trained.tolist()
        ends = len(tokens)  # transformers keeps the new line after the last turn
        assert tokens == ids[:ends] and set(labels[ends:]) <= {-100}
        assert [t if m else -100 for t, m in zip(tokens, trained)] == labels[:ends]
    turns = [
        int(np.diff(example.trained.astype(int), prepend=0).clip(0).sum()) for example in golden[2]
    ]
    assert turns == [1, 3, 1]


def test_the_loss_is_that_of_transformers(golden):
    _, loss = gradient(*golden, 256, 1)
    np.testing.assert_allclose(loss, GOLDEN["loss"], rtol=2e-6)


def gradient(model, params, found, row_tokens, rows_per_micro_batch):
    """(gradient, loss) of one mini-batch, by the program of an update without its optimiser."""
    rows = pack(found, row_tokens, rows_per_micro_batch).rows
    count = -(-len(rows.tokens_BT) // rows_per_micro_batch)
    stacked = packing.to_micro_batches(
        rows, rows_per_micro_batch=rows_per_micro_batch, num_micro_batches=count + 1
    )
    denominator = np.float32(sum(example.trained.sum() for example in found))
    return jax.jit(supervised.gradient, static_argnums=0)(
        model, params, jax.tree.map(jnp.asarray, stacked), np.int32(count), denominator
    )


def random_examples(seed, num=12):
    """Examples with one or two trained spans."""
    rng = np.random.default_rng(seed)
    for _ in range(num):
        prompt, n = rng.integers(3, 30, rng.integers(1, 9)), int(rng.integers(1, 20))
        trained = np.ones(n, bool)
        trained[1 : rng.integers(1, n + 1)] = False
        trained[-1] = True
        response = rng.integers(3, 30, n).astype(np.int32)
        yield examples.Example(tuple(prompt.tolist()), response, trained)


@pytest.fixture(scope="module")
def model():
    config = tiny_config().model
    return config, decoder.init_params(config, jax.random.key(0))


def test_the_cut_into_rows_and_micro_batches_changes_no_gradient(model):
    found = list(random_examples(0))
    whole, loss = gradient(*model, found, 512, 1)
    other, other_loss = gradient(*model, found, 40, 3)
    np.testing.assert_allclose(other_loss, loss, rtol=1e-6)
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6, rtol=2e-5)
    jax.tree.map(close, other, whole)


def test_tokens_that_are_not_trained_are_read_and_not_learnt(model):
    """Their log-probs are no part of the loss, and the tokens after them depend on them."""
    config, params = model
    (found,) = random_examples(5, num=1)
    between = np.flatnonzero(~found.trained)
    assert len(between) and found.trained[0]
    first = found._replace(response=found.response[:1], trained=found.trained[:1])
    changed = found.response.copy()
    changed[between] = (changed[between] - 3 + 7) % 27 + 3
    loss = lambda example: float(gradient(config, params, [example], 64, 1)[1])
    assert loss(found._replace(response=changed)) != pytest.approx(loss(found), rel=1e-4)
    only_first = found._replace(trained=np.arange(len(found.trained)) == 0)
    assert loss(only_first) == pytest.approx(loss(first), rel=1e-6)
    assert loss(only_first._replace(response=changed)) == pytest.approx(loss(first), rel=1e-6)


@pytest.mark.parametrize("most_segments", [32, 2])
@pytest.mark.parametrize("seed", range(20))
def test_no_mini_batch_has_more_rows_than_the_bound(monkeypatch, seed, most_segments):
    """Nor where a row is full of sequences before it is full of tokens."""
    monkeypatch.setattr(packing, "most_segments", lambda row_tokens: most_segments)
    rng = np.random.default_rng(seed)
    row_tokens = int(rng.integers(20, 60))
    largest = row_tokens // (1 if seed % 2 else 6)  # short ones too
    longest = sorted(rng.integers(1, largest + 1, 30).tolist(), reverse=True)[:9]
    bound = packing.most_rows(longest, row_tokens)
    assert bound <= 9
    for _ in range(50):
        lengths = [int(rng.integers(1, most + 1)) for most in longest]
        assert len(packing.first_fit_decreasing(lengths, row_tokens)) <= bound
    assert len(packing.first_fit_decreasing(longest, row_tokens)) <= bound
