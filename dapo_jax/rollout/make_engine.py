"""The engine of a config: what `config.rollout` asks for, on this process's part of the mesh."""

from typing import Any

from jax.sharding import Mesh

from dapo_jax.config import Config
from dapo_jax.data.tokenizer import stop_tokens
from dapo_jax.models.sharding import own_mesh, rollout_mesh
from dapo_jax.rollout.engine import DecoderEngine
from dapo_jax.rollout.engine_config import make_engine_config


def make_engine(
    config: Config,
    mesh: Mesh,
    tokenizer: Any,
    *,
    max_prompt_tokens: int,
) -> DecoderEngine:
    """The engine that draws responses of the config's model, as `config.rollout` says unless a
    request says otherwise. Of several processes each has one, on its own devices, with its share of
    the slots; or those that draw together have one.

    Raises:
        UserError: the KV cache of `config.rollout.cache_gib` does not hold one sequence.
    """
    stops = stop_tokens(config.model, tokenizer)
    everywhere = rollout_mesh(mesh, config.mesh.rollout_tensor)
    own = own_mesh(everywhere)
    engine_config = make_engine_config(
        config,
        own.shape,
        max_prompt_tokens,
        stops,
        platform=own.devices.flat[0].platform,
        run_sizes=everywhere.shape,
    )
    return DecoderEngine(engine_config, own, mesh)
