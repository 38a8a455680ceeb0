"""The decoder: flax holds its parameters, one pure function trains on packed rows and decodes.

Architecture: RMSNorm before attention and MLP, rotary positions, grouped-query attention, SwiGLU;
with biases on q, k and v it is Qwen2's (arXiv:2407.10671), with norms on q and k Qwen3's
(arXiv:2505.09388), with neither Llama's (arXiv:2407.21783). Layers are stacked and scanned.

What differs between training, prefill and decoding is only how a query finds its keys. That is the
`attend` argument, a function of `models.attention`; weights, precision and log-probabilities are
the same. Outside this module there is no module object: parameters are a pure nested dict.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from dapo_jax.config import ModelConfig
from dapo_jax.models.rotary import rotary_angles
from dapo_jax.utils.precision import at_least_float32

Params = dict[str, Any]
NO_WINDOW = 2**30  # positions: more than there are
# (layer index, q_BTNH, k_BTKH, v_BTKH, cache, window) -> (attended values BTNH, cache). The window
# is how many positions a query sees, itself included; None: all before it, in every layer.
Attend = Callable[
    [jax.Array | int, jax.Array, jax.Array, jax.Array, Any, jax.Array | int | None],
    tuple[jax.Array, Any],
]


class Decoder(nnx.Module):
    """The parameters of a stack of decoder layers. Each names its logical axes for `sharding`."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        c, dtype = config, jnp.dtype(config.param_dtype)

        def normal(shape: tuple[int, ...], axes: tuple[str | None, ...], fan_in: int) -> nnx.Param:
            # 1/sqrt(fan_in) keeps the variance of activations; Qwen2's own 0.02 is for width 2048+.
            value = jax.random.normal(rngs.params(), shape, jnp.float32) * fan_in**-0.5
            return nnx.Param(value.astype(dtype), logical_axes=axes)

        def constant(
            value: float, shape: tuple[int, ...], axes: tuple[str | None, ...]
        ) -> nnx.Param:
            return nnx.Param(jnp.full(shape, value, dtype), logical_axes=axes)

        L, D, N, K, H, F = (
            c.num_layers, c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim,
            c.intermediate_size,
        )  # fmt: skip
        self.embed = normal((c.vocab_size, D), ("vocab", "embed"), D)
        if not c.tie_embeddings:
            self.unembed = normal((c.vocab_size, D), ("vocab", "embed"), D)
        self.final_norm = constant(1.0, (D,), (None,))
        heads, kv_heads = ("layers", "heads", None), ("layers", "kv_heads", None)
        biases = {
            "q_bias": constant(0.0, (L, N, H), heads),
            "k_bias": constant(0.0, (L, K, H), kv_heads),
            "v_bias": constant(0.0, (L, K, H), kv_heads),
        }
        norms = {
            "q_norm": constant(1.0, (L, H), ("layers", None)),
            "k_norm": constant(1.0, (L, H), ("layers", None)),
        }
        biases, norms = biases if c.qkv_bias else {}, norms if c.qk_norm else {}
        self.layers = nnx.data(
            {
                "attention_norm": constant(1.0, (L, D), ("layers", None)),
                "q": normal((L, D, N, H), ("layers", "embed", "heads", None), D),
                "k": normal((L, D, K, H), ("layers", "embed", "kv_heads", None), D),
                "v": normal((L, D, K, H), ("layers", "embed", "kv_heads", None), D),
                **biases,
                **norms,
                "o": normal((L, N, H, D), ("layers", "heads", None, "embed"), N * H * 2 * L),
                "mlp_norm": constant(1.0, (L, D), ("layers", None)),
                "gate": normal((L, D, F), ("layers", "embed", "ff"), D),
                "up": normal((L, D, F), ("layers", "embed", "ff"), D),
                "down": normal((L, F, D), ("layers", "ff", "embed"), F * 2 * L),
            }
        )


def rms_norm(x: jax.Array, scale_D: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) * scale over the last axis of x [..., D], computed in float32 at least, in the
    dtype of x."""
    y = at_least_float32(x)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    scale = scale_D.astype(y.dtype).reshape((1,) * (x.ndim - 1) + (-1,))
    return (y * scale).astype(x.dtype)


def rotate(x_BTNH: jax.Array, sin_cos: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotary position embedding, halves paired as in Qwen2 and Llama checkpoints."""
    a, b = jnp.split(at_least_float32(x_BTNH), 2, axis=-1)
    sin, cos = (angle.astype(a.dtype) for angle in sin_cos)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTNH.dtype)


@functools.cache
def _abstract(config: ModelConfig) -> tuple[Any, Any]:
    """(graph definition, abstract state) of the decoder: structure and shapes, no memory."""
    return nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))


def init_params(config: ModelConfig, key: jax.Array) -> Params:
    """Random parameters as a nested dict of arrays; jittable."""
    return nnx.to_pure_dict(nnx.state(Decoder(config, rngs=nnx.Rngs(params=key))))


def param_shapes(config: ModelConfig) -> Params:
    """The nested dict of `jax.ShapeDtypeStruct` of the parameters."""
    return jax.eval_shape(lambda key: init_params(config, key), jax.random.key(0))


def param_axes(config: ModelConfig) -> Params:
    """The nested dict of logical axis names of the parameters, one tuple per array."""
    _, state = _abstract(config)
    is_param = lambda leaf: isinstance(leaf, nnx.Variable)
    axes = jax.tree.map(lambda leaf: leaf.get_metadata()["logical_axes"], state, is_leaf=is_param)
    return nnx.to_pure_dict(axes)


def unstacked(layers: Params) -> tuple[Params, ...]:
    """Stacked layers one by one. With these in their place `hidden_states` writes the layers out
    one after another instead of scanning over them."""
    num = len(next(iter(layers.values())))
    return tuple({n: x[i] for n, x in layers.items()} for i in range(num))


def hidden_states(
    config: ModelConfig,
    params: Params,
    tokens_BT: jax.Array,
    positions_BT: jax.Array,
    attend: Attend,
    cache: Any = None,
    *,
    parts: int = 1,
) -> tuple[jax.Array, Any]:
    """Final hidden states [B, T, D] in the compute dtype, and the cache as `attend` left it.

    Args:
        params: from `init_params` or a checkpoint; their layers may be `unstacked`.
        tokens_BT: int32 token ids.
        positions_BT: int32 positions, restarting at 0 in each packed segment.
        attend: how queries find keys: see `dapo_jax.models.attention.xla`.
        cache: any pytree that `attend` reads and returns.
        parts: equal ones, that the tokens of every row lie in on the devices.
    """
    c, dtype = config, jnp.dtype(config.compute_dtype)
    B, T = tokens_BT.shape
    L = c.num_layers
    sin_cos = rotary_angles(positions_BT, c.head_dim, c.rope_theta, c.rope_scaling)
    windows_L = np.full(L, NO_WINDOW, np.int32)
    windows_L[list(c.sliding_layers)] = c.sliding_window or NO_WINDOW

    # X = B * T tokens: products with weights are plain matrix products, forward and backward.
    # With B and T apart XLA's CPU backend transposes activations for the weight gradients,
    # which made the backward pass 1.7 times as slow. They are in the order in which devices have
    # them: the first part of every row, then the second, so that to join B and T moves nothing.
    def joined(x: jax.Array) -> jax.Array:  # [B, T, ...] -> [X, ...]
        rest = x.shape[2:]
        return x.reshape(B, parts, T // parts, *rest).swapaxes(0, 1).reshape(-1, *rest)

    def apart(x: jax.Array) -> jax.Array:  # [X, ...] -> [B, T, ...]
        rest = x.shape[1:]
        return x.reshape(parts, B, T // parts, *rest).swapaxes(0, 1).reshape(B, T, *rest)

    def layer(carry, weights_and_index):
        x_XD, cache = carry
        weights, index, window = weights_and_index
        window = window if c.sliding_layers else None
        w = {name: value.astype(dtype) for name, value in weights.items()}
        y_XD = rms_norm(x_XD, weights["attention_norm"], c.rms_norm_eps)
        q_XNH = jnp.einsum("XD,DNH->XNH", y_XD, w["q"])
        k_XKH = jnp.einsum("XD,DKH->XKH", y_XD, w["k"])
        v_XKH = jnp.einsum("XD,DKH->XKH", y_XD, w["v"])
        if c.qkv_bias:
            q_XNH = q_XNH + w["q_bias"][None]
            k_XKH = k_XKH + w["k_bias"][None]
            v_XKH = v_XKH + w["v_bias"][None]
        if c.qk_norm:
            q_XNH = rms_norm(q_XNH, weights["q_norm"], c.rms_norm_eps)
            k_XKH = rms_norm(k_XKH, weights["k_norm"], c.rms_norm_eps)
        q_BTNH, k_BTKH = rotate(apart(q_XNH), sin_cos), rotate(apart(k_XKH), sin_cos)
        a_BTNH, cache = attend(index, q_BTNH, k_BTKH, apart(v_XKH), cache, window)
        x_XD = x_XD + jnp.einsum("XNH,NHD->XD", joined(a_BTNH), w["o"])
        y_XD = rms_norm(x_XD, weights["mlp_norm"], c.rms_norm_eps)
        gate_XF = checkpoint_name(jnp.einsum("XD,DF->XF", y_XD, w["gate"]), "mlp")
        up_XF = checkpoint_name(jnp.einsum("XD,DF->XF", y_XD, w["up"]), "mlp")
        x_XD = x_XD + jnp.einsum("XF,FD->XD", jax.nn.silu(gate_XF) * up_XF, w["down"])
        return (x_XD, cache), None

    x_XD = params["embed"].astype(dtype)[joined(tokens_BT)]
    layers = params["layers"]
    if isinstance(layers, tuple):
        for i, weights in enumerate(layers):
            (x_XD, cache), _ = layer((x_XD, cache), (weights, i, int(windows_L[i])))
    else:
        (x_XD, cache), _ = jax.lax.scan(
            _rematerialised(layer, c.remat),
            (x_XD, cache),
            (layers, jnp.arange(L), jnp.asarray(windows_L)),
        )
    x_XD = rms_norm(x_XD, params["final_norm"], c.rms_norm_eps)
    return apart(x_XD), cache


def _rematerialised(layer: Callable[..., Any], remat: str) -> Callable[..., Any]:
    """The body of the scan over layers, with what `ModelConfig.remat` says kept of it."""
    if remat == "none":
        return layer
    known = jax.checkpoint_policies
    policies = {
        "dots": known.dots_saveable,
        "dots_no_batch": known.dots_with_no_batch_dims_saveable,
        "attention_mlp": known.save_only_these_names("attention", "mlp"),
        "attention": known.save_only_these_names("attention"),
        "full": known.nothing_saveable,
    }
    # Inside a scan nothing is common to forward and backward pass that XLA could join again.
    return jax.checkpoint(layer, prevent_cse=False, policy=policies[remat])


def unembedding(params: Params) -> jax.Array:
    """The matrix [V, D] that turns hidden states into logits."""
    return params["unembed"] if "unembed" in params else params["embed"]
