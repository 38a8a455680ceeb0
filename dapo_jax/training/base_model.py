"""The base model's parameters: read from the run directory or the cache, else made and kept.

A base is a function of the config fields it depends on, the code that makes it and the versions it
runs on; their hash names it in the cache, so that every run and ablation from one seed starts from
the same base, made once.
"""

import dataclasses
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from dapo_jax.config import Config
from dapo_jax.data import arithmetic, tokenizer
from dapo_jax.distributed.process_group import ALONE, ProcessGroup
from dapo_jax.models import decoder, hf_weights, log_probs, rotary
from dapo_jax.models.attention import kernels, xla
from dapo_jax.models.sharding import initial_params, param_shardings
from dapo_jax.runs.checkpoint import Checkpoints
from dapo_jax.training import packing, pretrain
from dapo_jax.types import RunError, UserError

REPORT_EVERY_STEPS = 50
CODE = (
    arithmetic, xla, kernels, packing, log_probs, decoder, pretrain, rotary,
    tokenizer,
)  # fmt: skip


def fingerprint(config: Config) -> str:
    """Hash of all that the base model depends on."""
    assert config.pretrain is not None
    digest = hashlib.sha256()
    fields = {
        "seed": config.seed,
        "model": dataclasses.asdict(config.model),
        "pretrain": dataclasses.asdict(config.pretrain),
        "levels": pretrain.levels(config),
        "row_tokens": config.train.row_tokens,
        "max_response_tokens": config.rollout.max_response_tokens,
        "devices": [jax.device_count(), jax.default_backend(), jax.__version__],
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
) -> tuple[decoder.Params, dict[str, Any]]:
    """(parameters laid out for the mesh, what is known of them: `seconds` it took to make).

    Args:
        directory: where the run keeps its own copy; None: there is no run.
        say: prints a line of progress.
        check_stop: called between steps; raises to abandon the fit.
        them: the processes of the run, which see the same `directory`. The cache is the first's.

    Raises:
        UserError: the checkpoint of `config.model.path` does not fit or cannot be read.
    """
    shardings = param_shardings(config.model, config.mesh, mesh)
    if config.model.path is not None:
        start = time.monotonic()
        params = hf_weights.load(config.model, shardings, say=say, check_stop=check_stop)
        return params, {"seconds": time.monotonic() - start}
    if config.pretrain is None:
        say("base model: random parameters, from config.seed")
        return initial_params(config.model, config.mesh, mesh, config.seed), {"seconds": 0.0}
    like = jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding),
        decoder.param_shapes(config.model),
        shardings,
    )
    cache = _cache_directory() / fingerprint(config)
    if process_group.count > 1:
        # The others may not see the cache, and must not find what the first is copying.
        assert directory is not None
        if process_group.is_primary and cache.is_dir() and not directory.is_dir():
            _copy(cache, directory)
        process_group.all_gather(None)
    restored = None if directory is None else _restore(directory, like)
    if restored is not None:
        say(f"base model: reusing {directory}")
        return restored
    if process_group.count == 1:
        try:
            restored = _restore(cache, like)
        except UserError as error:  # a cache is nobody's only copy: make the base again
            say(f"base model: the cached one is not usable. {error}")
    if restored is not None:
        say(f"base model: reusing {cache}")
        if directory is not None:
            _copy(cache, directory)
        return restored

    p, start = config.pretrain, time.monotonic()
    say(f"base model: fitting {p.num_steps} steps on generated text of mixed quality")

    def report(step: int, loss: float) -> None:
        check_stop()
        if step % REPORT_EVERY_STEPS and step != p.num_steps:
            return
        elapsed = time.monotonic() - start
        left = elapsed / step * (p.num_steps - step)
        say(f"  base {step:5d}/{p.num_steps}  loss {loss:.3f} nats/token  {left:4.0f} s left")

    params = pretrain.make_base(config, mesh, tokenizer, report)
    about = {"seconds": time.monotonic() - start}
    if directory is not None:
        _save(directory, params, about)
    try:
        if process_group.count > 1:
            if process_group.is_primary:
                assert directory is not None
                _copy(directory, cache)
            process_group.all_gather(None)
            return params, about
        temporary = _beside(cache)
        _save(temporary, params, about)
        _put(temporary, cache)
    except (OSError, RunError, UserError) as error:
        say(f"base model: not cached for other runs ({error})")
    return params, about


def _save(place: Path, params: decoder.Params, about: dict[str, Any]) -> None:
    with Checkpoints(place, keep_newest=1, keep_best=0) as checkpoints:
        checkpoints.save(0, params, about, accuracy=None)
        checkpoints.wait()


def _copy(source: Path, target: Path) -> None:
    """The whole directory at once, or nothing: a kill in the middle leaves only a temporary one."""
    temporary = _beside(target)
    shutil.copytree(source, temporary)
    _put(temporary, target)


def _beside(target: Path) -> Path:
    """A name for what is to become `target`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    return target.with_name(f".{target.name}.{os.getpid()}.tmp")


def _put(temporary: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)


def _cache_directory() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "dapo_jax" / "base"


def _restore(place: Path, like: Any) -> tuple[decoder.Params, dict[str, Any]] | None:
    if not place.is_dir():
        return None
    with Checkpoints(place, keep_newest=1, keep_best=0) as checkpoints:
        restored = checkpoints.restore(like)
    return None if restored is None else restored[1:]
