"""The decoder, its log-probs, its layout on a mesh, and its Hugging Face weights."""

from dapo_jax.models import hf_weights
from dapo_jax.models.attention.xla import packed, prefilling
from dapo_jax.models.chunked_softmax import logits
from dapo_jax.models.decoder import (
    Attend,
    Decoder,
    Params,
    bind,
    init_params,
    param_axes,
    param_shapes,
    unembedding,
)
from dapo_jax.models.log_probs import TokenStatistics, row_statistics, token_statistics
from dapo_jax.models.sharding import HeadLayout, make_mesh, param_shardings, rollout_mesh

__all__ = [
    "Attend",
    "Decoder",
    "HeadLayout",
    "Params",
    "TokenStatistics",
    "bind",
    "hf_weights",
    "init_params",
    "logits",
    "make_mesh",
    "packed",
    "param_axes",
    "param_shapes",
    "param_shardings",
    "prefilling",
    "rollout_mesh",
    "row_statistics",
    "token_statistics",
    "unembedding",
]
