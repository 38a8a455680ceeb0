"""The base model's parameters: loaded, made at random, or fitted and kept for other runs.

A fitted base is a function of the config fields, the code and the versions that it depends on.
Their hash names it in the user's cache, so runs and ablations of one seed share one base.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from dapo_jax.config import Config, hf_config
from dapo_jax.data import arithmetic, tokenizer
from dapo_jax.distributed.process_group import ALONE, ProcessGroup
from dapo_jax.models import (
    chunked_softmax,
    decoder,
    log_probs,
    lora,
    pretrained,
    rotary,
    sharding,
)
from dapo_jax.models.attention import cudnn, kernels, xla, zigzag
from dapo_jax.runs.checkpoint import Checkpoints
from dapo_jax.training import optimizer, packing, pretrain, supervised
from dapo_jax.training import step as train_step
from dapo_jax.types import RunError, UserError
from dapo_jax.utils import precision, user_cache

REPORT_EVERY_STEPS = 50
# The modules that compute a fitted base, and the versions of what they call.
CODE = arithmetic, tokenizer, kernels, xla, zigzag, cudnn, chunked_softmax, decoder, log_probs
CODE += rotary, sharding, packing, optimizer, supervised, pretrain, train_step, precision
LIBRARIES = "jax", "flax", "numpy", "optax"


def fingerprint(config: Config) -> str:
    """Returns a hash of everything that a fitted base model depends on."""
    assert config.pretrain is not None
    digest = hashlib.sha256()
    fields = {
        "seed": config.seed,
        "model": dataclasses.asdict(config.model),
        "pretrain": dataclasses.asdict(config.pretrain),
        "levels": pretrain.levels(config),
        "row_tokens": pretrain.row_tokens(config),
        "max_response_tokens": config.rollout.max_response_tokens,
        "devices": [jax.device_count(), jax.default_backend()],
        "versions": [importlib.metadata.version(name) for name in LIBRARIES],
    }
    digest.update(json.dumps(fields, sort_keys=True).encode())
    for module in CODE:
        digest.update(Path(str(module.__file__)).read_bytes())
    return digest.hexdigest()[:16]


def load_or_make(
    config: Config,
    mesh: Mesh,
    tokenizer: Any,
    directory: Path | None,
    *,
    say: Callable[[str], None],
    check_stop: Callable[[], None],
    process_group: ProcessGroup = ALONE,
) -> tuple[decoder.Params, float]:
    """Returns the parameters, laid out for the mesh, and the seconds that it took to make them.

    Args:
        directory: where the run keeps its own copy; None: there is no run.
        say: prints a line of progress.
        check_stop: called between steps; raises to abandon the fit.
        process_group: the processes of the run, which see the same `directory`. Only the primary
            uses the cache.

    Raises:
        UserError: the checkpoint of `config.model.path` does not fit or cannot be read, or the rows
            of `config.pretrain` do not split evenly over the mesh.
    """
    c = config.model
    if c.lora_rank and c.path is None:  # a base that is made is one, with adapters or without
        plain = dataclasses.replace(lora.base_of(c), param_dtype=c.trained_dtype)
        params, seconds = load_or_make(
            dataclasses.replace(config, model=plain),
            mesh,
            tokenizer,
            directory,
            say=say,
            check_stop=check_stop,
            process_group=process_group,
        )
        return lora.attached(c, config.mesh, mesh, params, config.seed), seconds
    start = time.monotonic()
    if c.path is not None:
        _warn_of_positions(config, say)
        params = pretrained.load(c, config.mesh, mesh, config.seed, say=say, check_stop=check_stop)
        return params, time.monotonic() - start
    if config.pretrain is None:
        say("base model: random parameters, from config.seed")
        return sharding.initial_params(config.model, config.mesh, mesh, config.seed), 0.0
    cache = user_cache.directory("base") / fingerprint(config)
    directory = directory or cache
    copies = directory != cache and process_group.is_primary  # from and to the cache
    if copied := copies and cache.is_dir() and not directory.is_dir():
        _copy(cache, directory)
    # As the primary sees it: the file system of another host may show the directory later.
    copied, exists = process_group.all_gather((copied, directory.is_dir()))[0]
    replaceable = copied or directory == cache
    try:
        restored = _restore(config, mesh, directory) if exists else None
    except UserError as error:
        if not replaceable:
            raise
        say(f"base model: the cached one cannot be used, and is made again. {error}")
        restored = None
    if restored is not None:
        say(f"base model: reusing {directory}")
        return restored

    params = _fit(config, mesh, tokenizer, say, check_stop)
    seconds = time.monotonic() - start
    if replaceable and process_group.is_primary:
        shutil.rmtree(directory, ignore_errors=True)
    process_group.all_gather(None)
    try:
        gather = process_group.all_gather
        with Checkpoints(directory, keep_newest=1, keep_best=0, all_gather=gather) as checkpoints:
            checkpoints.save(0, params, {"seconds": seconds}, accuracy=None)
            checkpoints.wait()
    except (OSError, RunError, UserError) as error:
        if directory != cache:
            raise
        say(f"base model: not cached for other runs ({error})")
    if copies:
        try:
            _copy(directory, cache)
        except OSError as error:
            say(f"base model: not cached for other runs ({error})")
    process_group.all_gather(None)
    return params, seconds


def _fit(
    config: Config,
    mesh: Mesh,
    tokenizer: Any,
    say: Callable[[str], None],
    check_stop: Callable[[], None],
) -> decoder.Params:
    """Makes the base model, and reports its progress."""
    assert config.pretrain is not None
    num_steps, start = config.pretrain.num_steps, time.monotonic()
    say(f"base model: fitting {num_steps} steps on generated text of mixed quality")

    def report(step: int, loss: float) -> None:
        check_stop()
        if step % REPORT_EVERY_STEPS == 0 or step == num_steps:
            left = (time.monotonic() - start) / step * (num_steps - step)
            say(f"  base {step:5d}/{num_steps}  loss {loss:.3f} nats/token  {left:4.0f} s left")

    return pretrain.make_base(config, mesh, tokenizer, report)


def _restore(config: Config, mesh: Mesh, directory: Path) -> tuple[decoder.Params, float] | None:
    """Returns the parameters and seconds that are kept in a directory, if any."""
    at = sharding.param_shardings(config.model, config.mesh, mesh)
    like = sharding.with_shardings(decoder.param_shapes(config.model), at)
    with Checkpoints(directory, keep_newest=1, keep_best=0) as checkpoints:
        restored = checkpoints.restore(like)
    return None if restored is None else (restored[1], restored[2]["seconds"])


def _warn_of_positions(config: Config, say: Callable[[str], None]) -> None:
    """Says so where a text of the run may be longer than those that the model was made for."""
    stages = [config, *(config.at(first) for first, _ in config.stages)]
    longest = max(c.data.max_prompt_tokens + c.rollout.max_response_tokens for c in stages)
    most = hf_config.positions(config.model)
    if most is not None and longest > most:
        say(
            f"warning: a prompt with its response may have {longest:,} tokens, and "
            f"{config.model.path} is made for {most:,} (max_position_embeddings): beyond these its "
            "text may be nonsense. Set fewer config.rollout.max_response_tokens, in stages too."
        )


def _copy(source: Path, target: Path) -> None:
    """Copies a directory. A kill or an error halfway leaves the target as it was."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        shutil.copytree(source, temporary)
    except OSError:  # the disk is full, say, and must not stay so
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)
