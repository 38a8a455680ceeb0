"""A pretrained model: its weights, and its adapters where the config has a rank for them."""

from collections.abc import Callable

from jax.sharding import Mesh

from dapo_jax.config import MeshConfig, ModelConfig, hf_config
from dapo_jax.models import decoder, hf_weights, lora, peft_adapter
from dapo_jax.models.sharding import param_shardings


def load(
    c: ModelConfig,
    layout: MeshConfig,
    mesh: Mesh,
    seed: int,
    *,
    say: Callable[[str], None] = lambda _: None,
    check_stop: Callable[[], None] = lambda: None,
) -> decoder.Params:
    """Returns the parameters of `c.path`, laid out for the mesh. Adapters are those of the path, or
    new ones that change nothing yet.

    Args:
        seed: of new adapters.
        say: prints progress.
        check_stop: raises where the program is to stop.

    Raises:
        UserError: the files do not fit the model or cannot be read.
    """
    assert c.path is not None
    base = lora.base_of(c) if c.lora_rank else c
    at = param_shardings(base, layout, mesh)
    params = hf_weights.load(base, at, say=say, check_stop=check_stop)
    if not c.lora_rank:
        return params
    params = lora.attached(c, layout, mesh, params, seed)
    if not hf_config.adapter_fields(c.path):
        return params
    return peft_adapter.load(c, params, param_shardings(c, layout, mesh))
