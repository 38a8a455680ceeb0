"""Logits are those of transformers (torch, float32), family by family: goldens/make_logits.py."""

import dataclasses
import hashlib
import os
from pathlib import Path

import jax
import numpy as np
import pytest

from dapo_jax.data.tokenizer import load_tokenizer
from dapo_jax.models import decoder
from dapo_jax.rollout.engine import DecoderEngine
from dapo_jax.rollout.engine_config import EngineConfig
from dapo_jax.rollout.sampling import SamplingParams
from tests.support import checkpoints
from tests.support.helpers import logits_of, make_mesh

ATOL = 1e-4
# What each of these models is there for, and the same model without it.
WITHOUT = {
    "qwen2-window": {"sliding_window": None},
    "mistral-window": {"sliding_window": None},
    "qwen2-yarn": {"rope_scaling": None},
    "qwen2-yarn-factors": {"rope_scaling": None},
    "llama-llama3": {"rope_scaling": None},
    "llama-linear": {"rope_scaling": None},
    "qwen2-tied": {"rms_norm_eps": 1e-6},
    "qwen3": {"rms_norm_eps": 1e-2},
    "llama": {"rope_theta": 1e4},
}


def opened(tmp_path, family):
    """(golden, config, parameters) by way of a checkpoint directory."""
    golden = checkpoints.golden(family)
    checkpoints.write(tmp_path / "in", golden.config, golden.weights)
    config = checkpoints.config_of(tmp_path / "in")
    assert config.model.param_dtype == config.model.compute_dtype == "float32"
    return golden, config, checkpoints.load(config)


@pytest.mark.parametrize("family", checkpoints.golden_families())
def test_logits_are_those_of_transformers(tmp_path, family):
    golden, config, params = opened(tmp_path, family)
    found_XV = logits_of(config.model, params, golden.tokens_T)[golden.positions_X]
    assert golden.logits_XV.std() > 1, "large enough for the tolerance to mean something"
    worst = np.abs(found_XV - golden.logits_XV).max()
    print(f"{family}: worst {worst:.1e}")
    assert worst < ATOL, f"the worst of {family} is {worst:.1e}"
    if family in WITHOUT:
        without = dataclasses.replace(config.model, **WITHOUT[family])
        other_XV = logits_of(without, params, golden.tokens_T)[golden.positions_X]
        assert np.abs(other_XV - golden.logits_XV).max() > 100 * ATOL, "or this test cannot fail"


@pytest.mark.parametrize(
    "family, prompt", [("qwen2-window", 9), ("mistral-window", 1), ("qwen2-yarn", 1), ("qwen3", 9)]
)
def test_the_engines_logits_are_those_of_transformers(tmp_path, family, prompt):
    """A prompt is prefilled, and what is sampled greedily goes through the paged cache: at every
    step the whole row of logits is that of the training forward, which is that of transformers."""
    golden, config, params = opened(tmp_path, family)
    T = len(golden.tokens_T)
    engine_config = EngineConfig(
        model=config.model,
        layout=config.mesh,
        slots=2,
        prefill_prompts=1,
        max_prompt_tokens=12,
        max_response_tokens=T,
        stop_tokens=(),
        params=SamplingParams(temperature_X=0.0),
        page_tokens=8,
        decode_steps=1,
    )
    engine = DecoderEngine(engine_config, make_mesh(config, 1))
    loaded = engine.load_params(params)
    tokens = golden.tokens_T[:prompt].tolist()
    prefix = engine.prefill(params=loaded, padded_tokens=np.array(tokens), true_length=prompt)
    state = engine.insert(prefix, engine.init_decode_state(), slot=1)
    logits = lambda hidden_D: np.asarray(hidden_D @ decoder.unembedding(params).T)
    found = [logits(prefix.hidden_PD[0, 0])]
    while len(tokens) < T:
        state, results = engine.generate(loaded, state)
        tokens.append(int(results.convert_to_numpy().get_result_at_slot(1).tokens[0, 0]))
        assert tokens[-1] == np.argmax(found[-1])
        found.append(logits(state.hidden_BD[0, 0]))  # its sample has the first free slot
    expected_TV = logits_of(config.model, params, np.array(tokens, np.int32))
    np.testing.assert_allclose(found, expected_TV[prompt - 1 :], rtol=0, atol=ATOL)
    at = [i for i, t in enumerate(golden.positions_X.tolist()) if t == prompt - 1]
    if at:  # the prompt is the golden's own beginning
        np.testing.assert_allclose(found[0], golden.logits_XV[at[0]], rtol=0, atol=ATOL)


def published_checkpoint(golden):
    """The directory of the checkpoint that the golden was made from, or a skip with the reason."""
    path = os.environ.get("SMOLLM2_135M")
    if path is None:
        pytest.skip("SMOLLM2_135M is not set: the directory of the checkpoint of smollm2_135m.npz")
    with (Path(path) / "model.safetensors").open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != golden["sha256"].item():
        pytest.skip("SMOLLM2_135M has other weights: see goldens/make_checkpoint_logits.py")
    return Path(path)


def test_a_published_checkpoint_has_the_logits_of_transformers():
    """SmolLM2-135M-Instruct, 30 layers: goldens/make_checkpoint_logits.py."""
    with np.load(checkpoints.GOLDENS.parent / "smollm2_135m.npz") as file:
        golden = dict(file)
    place = published_checkpoint(golden)
    config, tokens_T = checkpoints.config_of(place), golden["tokens"]
    prompt = int(golden["prompt_tokens"])
    tokenizer = load_tokenizer(dataclasses.replace(config.model, tokenizer=None))
    tokens = tokenizer.encode(golden["text"].item(), add_special_tokens=False)
    assert tokens == tokens_T[:prompt].tolist()
    logits_TV = logits_of(config.model, checkpoints.load(config), tokens_T)
    log_probs_TV = jax.nn.log_softmax(logits_TV[:-1].astype(np.float64))
    log_probs_T = np.take_along_axis(np.asarray(log_probs_TV), tokens_T[1:, None], 1)[:, 0]
    worst = np.abs(logits_TV[::8, ::97] - golden["logits"]).max()
    worst_log_prob = np.abs(log_probs_T - golden["log_probs"]).max()
    print(f"largest difference: logits {worst:.1e}, log-probs {worst_log_prob:.1e}")
    assert worst < ATOL and worst_log_prob < ATOL
    greedy = np.argmax(logits_TV[prompt - 1 : -1], axis=-1)
    np.testing.assert_array_equal(greedy, tokens_T[prompt:])
