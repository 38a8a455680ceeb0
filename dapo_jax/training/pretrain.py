"""The base model: a supervised fit on generated text of mixed quality (see `arithmetic`)."""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from dapo_jax.config import Config, OptimizerConfig, PretrainConfig
from dapo_jax.data import arithmetic
from dapo_jax.models import decoder
from dapo_jax.models.sharding import (
    BATCH_AXES,
    check_multiples,
    initial_params,
    parts_of,
    row_sharding,
    to_mesh,
)
from dapo_jax.training import packing, step, supervised
from dapo_jax.types import Rows, UserError

LEARNING_RATE = 3e-3
OPTIMIZER = OptimizerConfig(betas=(0.9, 0.98), weight_decay=0.01)
ROW_MULTIPLE = 128  # tokens: a context axis of 2, 4, ... 64 splits a row


def row_tokens(config: Config) -> int:
    """Returns the length of the packed rows of text. `train.row_tokens` has no part in it: how the
    updates are computed must not change the base model."""
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    return -(-longest // ROW_MULTIPLE) * ROW_MULTIPLE


def _check_rows(config: Config, axis_sizes: Mapping[str, int]) -> None:
    """Raises UserError unless the rows of a step split evenly over the mesh."""
    assert config.pretrain is not None
    of_rows = parts_of(BATCH_AXES, axis_sizes), "config.mesh.data x config.mesh.fsdp"
    check_multiples(("pretrain.rows_per_step", config.pretrain.rows_per_step, of_rows))
    context, tokens = axis_sizes["context"], row_tokens(config)
    if context > 1 and tokens % (2 * context):
        raise UserError(
            f"config.mesh.context ({context}) must divide half of the {tokens} tokens in a row of "
            "config.pretrain. Powers of two up to 64 do."
        )


def levels(config: Config) -> tuple[int, ...]:
    """Returns the numbers of terms of the training sources' sums."""
    sums = [source for source in config.data.train.values() if source.path == "arithmetic"]
    return tuple(dict.fromkeys(n for source in sums for n in source.levels or ()))


def text_rows(config: Config, tokenizer: Any) -> Iterator[Rows]:
    """Yields batches of packed rows [rows_per_step, row_tokens], prompts with written responses.

    Deterministic in `config.seed`, and without the held-out problems.
    """
    p, length_of_row = config.pretrain, row_tokens(config)
    assert p is not None
    choices = levels(config)
    rng = np.random.default_rng([config.seed, 1])
    waiting: list[tuple[list[int], np.ndarray]] = []  # prompts with their responses
    length = lambda text: len(text[0]) + len(text[1])
    while True:
        tokens = sum(map(length, waiting))
        while tokens < p.rows_per_step * length_of_row:
            terms = tuple(rng.integers(1, 10, rng.choice(choices)).tolist())
            prompt_text = arithmetic.prompt_text(terms)
            if arithmetic.is_heldout(prompt_text):
                continue
            text, complete = arithmetic.write_response(
                terms, rng, config.rollout.max_response_tokens
            )
            prompt = tokenizer.encode(prompt_text)
            response = tokenizer.encode(text) + ([tokenizer.eos_token_id] if complete else [])
            response = np.asarray(response[: config.rollout.max_response_tokens], np.int32)
            waiting.append((prompt, response))
            tokens += length(waiting[-1])
        layout = packing.first_fit_decreasing([length(text) for text in waiting], length_of_row)
        used = sorted(i for row in layout[: p.rows_per_step] for i in row)
        prompts, responses = zip(*(waiting[i] for i in used))
        lengths_R = np.array([len(response) for response in responses])
        yield packing.pack(prompts, np.concatenate(responses), lengths_R, length_of_row).rows
        taken = set(used)
        waiting = [text for i, text in enumerate(waiting) if i not in taken]


def schedule(config: PretrainConfig) -> optax.Schedule:
    """Returns linear warm-up over a twelfth of the steps, then cosine to a tenth of the rate."""
    warmup_steps = max(1, config.num_steps // 12)
    return optax.warmup_cosine_decay_schedule(
        0.0, LEARNING_RATE, warmup_steps, config.num_steps, LEARNING_RATE / 10
    )


def make_base(
    config: Config,
    mesh: Mesh,
    tokenizer: Any,
    report: Callable[[int, float], None],
) -> decoder.Params:
    """Returns the parameters of the base model, laid out for the mesh.

    Args:
        report: called with (step, loss in nats per token) after every step.

    Raises:
        UserError: the rows of a step do not split evenly over the mesh.
    """
    p = config.pretrain
    assert p is not None
    _check_rows(config, mesh.shape)
    rate = jax.jit(schedule(p))
    update = supervised.jitted_update(config.model, config.mesh, OPTIMIZER, mesh)
    params = initial_params(config.model, config.mesh, mesh, config.seed)
    state_at = step.model_state_shardings(config.model, config.mesh, OPTIMIZER, mesh)
    new_state = functools.partial(step.model_state, OPTIMIZER)
    state = jax.jit(new_state, out_shardings=state_at)(params)
    batches = text_rows(config, tokenizer)
    at = row_sharding(mesh, batch_dim=1)
    value = None
    for i in range(1, p.num_steps + 1):
        rows = next(batches)  # made while the device works on the step before
        tokens = np.float32(rows.mask_BT.sum())
        rows = to_mesh(jax.tree.map(lambda x: x[None], rows), at)
        state, metrics = update(state, rows, np.int32(1), tokens, rate(i - 1))
        if value is not None:  # one step late: the device is already at the next
            report(i - 1, float(value))
        value = metrics.loss
    assert value is not None
    report(p.num_steps, float(value))
    return state.params
