"""The base model: a supervised fit on generated text of mixed quality (see `arithmetic`)."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from dapo_jax.config import Config, PretrainConfig
from dapo_jax.data import arithmetic
from dapo_jax.models import decoder
from dapo_jax.models.log_probs import row_statistics
from dapo_jax.models.sharding import (
    head_layout,
    initial_params,
    param_shardings,
    row_sharding,
    to_mesh,
)
from dapo_jax.training import packing
from dapo_jax.types import Rows

LEARNING_RATE = 3e-3
ROW_MULTIPLE = 128  # tokens; whatever the mesh, its context axis divides a row


def row_tokens(config: Config) -> int:
    """Returns the length of the packed rows of text. `train.row_tokens` has no part in it: how the
    updates are computed must not change the base model."""
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    return -(-longest // ROW_MULTIPLE) * ROW_MULTIPLE


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
    """
    p = config.pretrain
    assert p is not None
    shardings = param_shardings(config.model, config.mesh, mesh)
    layout = head_layout(config.model, config.mesh, mesh)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule(p), b1=0.9, b2=0.98, weight_decay=0.01),
    )

    def loss(params: decoder.Params, rows: Rows) -> jax.Array:
        statistics = row_statistics(config.model, params, rows, temperature=1.0, layout=layout)
        log_prob_BT = statistics.log_prob_BT
        total = -jnp.sum(jnp.where(rows.mask_BT, log_prob_BT, 0.0))
        return total / jnp.sum(rows.mask_BT, dtype=jnp.float32)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(carry: Any, rows: Rows) -> tuple[Any, jax.Array]:
        params, moments = carry
        value, grads = jax.value_and_grad(loss)(params, rows)
        changes, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, changes), moments), value

    params = initial_params(config.model, config.mesh, mesh, config.seed)
    carry = (params, jax.jit(optimizer.init)(params))
    batches = text_rows(config, tokenizer)
    at = row_sharding(mesh)
    value = None
    for i in range(1, p.num_steps + 1):
        rows = to_mesh(next(batches), at)  # made while the device works on the step before
        carry, new_value = step(carry, rows)
        if value is not None:  # one step late: the device is already at the next
            report(i - 1, float(value))
        value = new_value
    assert value is not None
    report(p.num_steps, float(value))
    return jax.device_put(carry[0], shardings)
