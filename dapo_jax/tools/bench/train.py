"""Benchmark of an update: tokens per second, share of the limit, memory, compilation, padding."""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dapo_jax.config import Config, ModelConfig
from dapo_jax.models.sharding import AXES, fitting, initial_params, make_mesh, row_sharding
from dapo_jax.tools.bench.memory import peaks
from dapo_jax.tools.bench.shapes import (
    bench_model,
    check_model,
    check_positive,
    check_row,
    no_text,
    sample_lengths,
)
from dapo_jax.training import packing
from dapo_jax.training.learner import Learner
from dapo_jax.types import Rows, UserError


class TrainShape(NamedTuple):
    """The model and the rows of one update."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    d_ff: int
    vocab: int
    dtype: str
    batch: int  # rows of the update
    row_len: int  # tokens of a row
    prompt_len: int
    lengths: str
    packed: bool  # responses share rows; else each has a row of its own
    micro_batch: int  # rows; 0: all of them at once
    runs: int
    remat: str = "dots"  # see ModelConfig

    def check(self) -> None:
        """Raises UserError for a value out of range."""
        check_model(*self[:7])
        check_positive(self, zero=("micro_batch",))
        check_row(self.row_len, self.prompt_len, self.lengths)
        if self.micro_batch and self.batch % self.micro_batch:
            raise UserError(
                f"--micro_batch must be 0 or a divisor of --batch ({self.batch}); "
                f"got {self.micro_batch}."
            )


def bench_train(shape: TrainShape, base: dict[str, Any]) -> dict[str, Any]:
    """Returns the figures of the median of `shape.runs` updates, after a warm-up update.

    Args:
        base: a config with its objective and optimiser.
    """
    shape.check()
    config = train_config(shape, base)
    B = config.train.rows_per_micro_batch
    used = packing.used_micro_batches(shape.batch, B)
    over = config.mesh.data * config.mesh.fsdp
    if B % over:
        raise UserError(
            f"--{'micro_batch' if shape.micro_batch else 'batch'} ({B}) must be a multiple of "
            f"{over}, the devices that share them."
        )
    rows = make_rows(shape)
    mesh = make_mesh(config.mesh)
    learner = Learner(config, mesh, no_text, print)
    state = learner.init_state(initial_params(config.model, config.mesh, mesh, seed=0)).policy
    stacked = packing.to_micro_batches(rows, rows_per_micro_batch=B, num_micro_batches=used)
    on_mesh = jax.device_put(stacked, row_sharding(mesh, batch_dim=1))
    program: Any = learner.update
    learning_rate, entropy_coefficient = np.float32(1e-6), None  # None: the config's
    denominator = np.float32(rows.mask_BT.sum())
    rest = (on_mesh, np.int32(used), denominator, learning_rate, entropy_coefficient)
    start = time.perf_counter()
    compiled = program.lower(state, *rest).compile()
    compile_seconds = time.perf_counter() - start
    seconds, skipped = [], 0
    for _ in range(shape.runs + 1):
        start = time.perf_counter()
        state, result = jax.block_until_ready(compiled(state, *rest))
        seconds.append(time.perf_counter() - start)
        skipped += int(result.skipped)
    assert skipped == 0, "a gradient was not finite"
    peak = peaks()  # before the products below are measured
    memory = compiled.memory_analysis()
    whole = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    whole += memory.output_size_in_bytes - memory.alias_size_in_bytes
    seconds = sorted(seconds[1:])
    median = statistics.median(seconds)
    places, tokens = rows.tokens_BT.size, int((rows.segments_BT > 0).sum())
    # Virtual devices of a CPU share its cores, and one product uses them all.
    devices = 1 if jax.default_backend() == "cpu" else mesh.size
    limit = devices * places / products_seconds(config.model, places)
    return {
        "tokens_per_second": round(tokens / median, 1),
        "fraction_of_limit": round(tokens / median / limit, 4),
        **peak,
        "compile_seconds": round(compile_seconds, 2),
        "padding_fraction": round(1 - tokens / places, 4),
        "limit_tokens_per_second": round(limit, 1),
        "temp_mb": round(memory.temp_size_in_bytes / 1e6, 1),
        "compiled_mb": round(whole / 1e6, 1),  # what the compiler says that a device needs
        "seconds": [round(t, 4) for t in seconds],
        "tokens": tokens,
        "responses": int((rows.positions_BT[rows.segments_BT > 0] == 0).sum()),
        "device": jax.devices()[0].device_kind,
        "shape": shape._asdict(),
    }


def train_config(shape: TrainShape, base: dict[str, Any]) -> Config:
    """Returns the config of one update of these rows; `base` as in `bench_train`."""
    return bench_config(
        bench_model(shape, shape.remat, param_dtype="float32"),
        base,
        prompts=max(1, shape.batch // 2),
        group=2,
        prompt_len=shape.prompt_len,
        row_len=shape.row_len,
        rows_per_micro_batch=shape.micro_batch or shape.batch,
    )


def bench_config(
    c: ModelConfig,
    base: dict[str, Any],
    *,
    prompts: int,
    group: int,
    prompt_len: int,
    row_len: int,
    rows_per_micro_batch: int,
    **rollout: int,
) -> Config:
    """Returns a config of this shape on all devices: all prompts of a step in one update, rows as
    long as the longest sequence.

    Args:
        base: other fields.
        rollout: other fields of `config.rollout`.
    """
    layout = fitting(c, jax.device_count())
    sizes = {name: getattr(layout, name) for name in (*AXES, "rules")}
    changes: dict[str, dict[str, Any]] = {
        "model": dataclasses.asdict(c),
        "mesh": sizes,
        "data": {"max_prompt_tokens": prompt_len},
        "rollout": {"max_response_tokens": row_len - prompt_len, "group_size": group} | rollout,
        "reward": {"overlong_buffer_tokens": 0, "overlong_penalty": 0.0},
        "train": {
            "row_tokens": row_len,
            "rows_per_micro_batch": rows_per_micro_batch,
            "prompts_per_update": prompts,
            "prompts_per_step": prompts,
        },
        "dynamic_sampling": {"max_prompts": prompts},
    }
    return Config.from_dict(
        base | {name: base.get(name, {}) | fields for name, fields in changes.items()}
    )


def make_rows(shape: TrainShape) -> Rows:
    """Returns `shape.batch` rows of random tokens: as many responses as fit in them when packed,
    otherwise one in each."""
    number = shape.batch
    if shape.packed:
        while len(_layout(shape, number + 1)) <= shape.batch:
            number += 1
    rng = np.random.default_rng(0)
    lengths_R = _lengths(shape, number)
    layout = _layout(shape, number) if shape.packed else [[i] for i in range(number)]
    each = []
    for members in layout:
        prompts = rng.integers(1, shape.vocab, (len(members), shape.prompt_len)).tolist()
        lengths = lengths_R[members]
        tokens_N = rng.integers(1, shape.vocab, lengths.sum()).astype(np.int32)
        each.append(packing.pack(prompts, tokens_N, lengths, shape.row_len).rows)
    empty = packing.empty_rows(shape.batch - len(layout), shape.row_len)
    rows = Rows(*(np.concatenate(columns) for columns in zip(*each, empty)))
    mask_BT = rows.mask_BT.astype(np.float32)
    return rows._replace(
        weight_BT=mask_BT,
        log_prob_old_BT=-np.log(np.float32(shape.vocab)) * mask_BT,
        advantage_BT=rng.standard_normal(mask_BT.shape, np.float32) * mask_BT,
        correction_BT=mask_BT,
    )


def _layout(shape: TrainShape, number: int) -> list[list[int]]:
    lengths = shape.prompt_len + _lengths(shape, number)
    return packing.first_fit_decreasing(lengths.tolist(), shape.row_len)


def _lengths(shape: TrainShape, number: int) -> np.ndarray:
    return sample_lengths(number, shape.row_len - shape.prompt_len, shape.lengths)


def products_seconds(c: ModelConfig, tokens: int) -> float:
    """Measures the seconds of the matrix products with weights, forward and backward, of this many
    tokens, one program each. Attention and recomputation do not count."""
    D, N, K, H, F = c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim, c.intermediate_size
    layer = [(D, N * H), (D, K * H), (D, K * H), (N * H, D), (D, F), (D, F), (F, D)]
    # A wide vocabulary is measured by a part: time is proportional to its columns.
    part = next(v for v in range(min(c.vocab_size, 4096), 0, -1) if c.vocab_size % v == 0)
    times: dict[tuple[int, int], float] = {}
    for n, m in {*layer, (D, part)}:
        times[n, m] = sum(
            product_seconds(a, b, d, c.compute_dtype)
            for a, b, d in ((tokens, n, m), (tokens, m, n), (n, tokens, m))
        )
    of_layers = c.num_layers * sum(times[shape] for shape in layer)
    return of_layers + times[D, part] * (c.vocab_size // part)


def product_seconds(rows: int, inner: int, columns: int, dtype: str) -> float:
    """Measures the median time of [rows, inner] @ [inner, columns]."""
    key = jax.random.key(0)
    a = jax.random.normal(key, (rows, inner), jnp.dtype(dtype))
    b = jax.random.normal(key, (inner, columns), jnp.dtype(dtype))
    product = jax.jit(jnp.matmul).lower(a, b).compile()
    return median_seconds(lambda: product(a, b))


def median_seconds(run: Callable[[], Any]) -> float:
    """Returns the median time of five calls, after one more."""
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])
