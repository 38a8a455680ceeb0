"""The decoder: one flax module that trains on packed rows and decodes with a cache.

Architecture: RMSNorm before attention and MLP, rotary positions, grouped-query attention, SwiGLU.
Biases on q, k and v make it Qwen2 (arXiv:2407.10671), norms on q and k Qwen3 (arXiv:2505.09388),
neither of them Llama (arXiv:2407.21783) or Mistral (arXiv:2310.06825). Layers may have a sliding
window; they are stacked and scanned.

Training, prefill and decoding differ in how a query finds its keys: the `attend` argument. Outside
this module parameters are a nested dict of arrays; `bind` puts them into the module. With
`lora_rank` each product with a matrix of a layer gets a low-rank one added (`models.lora`), and
the matrix may be in int8 (`models.int8`).
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from dapo_jax.config import ModelConfig
from dapo_jax.models import int8
from dapo_jax.models.int8 import INPUT_AXES
from dapo_jax.models.rotary import rotary_angles, rotate
from dapo_jax.utils.precision import at_least_float32

Params = dict[str, Any]
NO_WINDOW = 2**30  # positions: more than any sequence has
# (layer index, q_BTNH, k_BTKH, v_BTKH, cache, window) -> (attended values BTNH, cache). The window
# is how many positions a query sees, itself included; None: no layer of the model slides.
Attend = Callable[
    [jax.Array | int, jax.Array, jax.Array, jax.Array, Any, jax.Array | int | None],
    tuple[jax.Array, Any],
]


class Decoder(nnx.Module):
    """A stack of decoder layers. Each parameter names its logical axes for `sharding`."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, unrolled: bool = False):
        """Makes random parameters.

        Args:
            unrolled: hold the layers one by one, see `unstacked`.
        """
        self.config = c = config
        dtype = jnp.dtype(c.base_dtype)

        def normal(
            shape: tuple[int, ...], axes: tuple[str | None, ...], fan_in: int, dtype: Any = dtype
        ) -> nnx.Param:
            # 1/sqrt(fan_in) keeps the variance of activations; Qwen2's own 0.02 is for width 2048+.
            value = jax.random.normal(rngs.params(), shape, jnp.float32) * fan_in**-0.5
            return nnx.Param(value.astype(dtype), logical_axes=axes)

        def constant(value: float, shape: tuple[int, ...], *axes: str | None) -> nnx.Param:
            return nnx.Param(jnp.full(shape, value, dtype), logical_axes=axes)

        L, D, F = c.num_layers, c.hidden_size, c.intermediate_size
        N, K, H = c.num_heads, c.num_kv_heads, c.head_dim
        self.embed = normal((c.vocab_size, D), ("vocab", "embed"), D)
        if not c.tie_embeddings:
            self.unembed = normal((c.vocab_size, D), ("vocab", "embed"), D)
        self.final_norm = constant(1.0, (D,), None)
        layers = {
            "attention_norm": constant(1.0, (L, D), "layers", None),
            "q": normal((L, D, N, H), ("layers", "embed", "heads", None), D),
            "k": normal((L, D, K, H), ("layers", "embed", "kv_heads", None), D),
            "v": normal((L, D, K, H), ("layers", "embed", "kv_heads", None), D),
            "o": normal((L, N, H, D), ("layers", "heads", None, "embed"), N * H * 2 * L),
            "mlp_norm": constant(1.0, (L, D), "layers", None),
            "gate": normal((L, D, F), ("layers", "embed", "ff"), D),
            "up": normal((L, D, F), ("layers", "embed", "ff"), D),
            "down": normal((L, F, D), ("layers", "ff", "embed"), F * 2 * L),
        }
        if c.qkv_bias:
            layers["q_bias"] = constant(0.0, (L, N, H), "layers", "heads", None)
            layers["k_bias"] = constant(0.0, (L, K, H), "layers", "kv_heads", None)
            layers["v_bias"] = constant(0.0, (L, K, H), "layers", "kv_heads", None)
        if c.qk_norm:
            layers["q_norm"] = constant(1.0, (L, H), "layers", None)
            layers["k_norm"] = constant(1.0, (L, H), "layers", None)
        for name, num_in in INPUT_AXES.items() if c.lora_rank else ():
            shape, axes = layers[name].shape, layers[name].get_metadata()["logical_axes"]
            into, out = slice(1, 1 + num_in), slice(1 + num_in, None)
            a = (L, *shape[into], c.lora_rank), ("layers", *axes[into], None)
            b = (L, c.lora_rank, *shape[out]), ("layers", None, *axes[out])
            # As peft: the variance of its uniform distribution for A, and B is 0.
            dtype = jnp.dtype(c.trained_dtype)
            layers[f"{name}_lora_a"] = normal(*a, 3 * math.prod(shape[into]), dtype)
            layers[f"{name}_lora_b"] = nnx.Param(jnp.zeros(b[0], dtype), logical_axes=b[1])
        if c.param_dtype == "int8":
            axes = {name: param.get_metadata()["logical_axes"] for name, param in layers.items()}
            for name, num_in in INPUT_AXES.items():
                axes[int8.scale_name(name)] = "layers", *axes[name][1 + num_in :]
            values = int8.quantized_layers({name: param[...] for name, param in layers.items()})
            layers = {n: nnx.Param(x, logical_axes=axes[n]) for n, x in values.items()}
        one = lambda i: {name: nnx.Param(param[i]) for name, param in layers.items()}
        self.layers = nnx.data([one(i) for i in range(L)] if unrolled else layers)

    def __call__(
        self,
        tokens_BT: Int[Array, "B T"],
        positions_BT: Int[Array, "B T"],
        attend: Attend,
        cache: Any = None,
        *,
        context: int = 1,
    ) -> tuple[Float[Array, "B T {self.config.hidden_size}"], Any]:
        """Returns final hidden states [B, T, D] in the compute dtype, and the cache.

        Args:
            tokens_BT: token ids.
            positions_BT: restart at 0 in each packed segment.
            attend: how queries find keys: `dapo_jax.models.attention`, `dapo_jax.rollout.paged`.
            cache: any pytree that `attend` reads and returns.
            context: devices that the tokens of each row lie over.
        """
        c, (B, T) = self.config, tokens_BT.shape
        dtype, L = jnp.dtype(c.compute_dtype), c.num_layers
        sin_cos = rotary_angles(positions_BT, c.head_dim, c.rope_theta, c.rope_scaling)
        windows_L = np.full(L, NO_WINDOW, np.int32)
        if c.sliding_window is not None:
            size, layers = c.sliding_window
            windows_L[list(layers)] = size

        # X = B * T tokens: products with weights are plain matrix products, forward and backward.
        # With B and T apart XLA's CPU backend transposes activations for the weight gradients,
        # 1.7 times the time of the backward pass. The order of X is that of the devices: the first
        # part of every row, then the second. So joining B and T moves nothing.
        def join(x: jax.Array) -> jax.Array:  # [B, T, ...] -> [X, ...]
            rest = x.shape[2:]
            return x.reshape(B, context, T // context, *rest).swapaxes(0, 1).reshape(-1, *rest)

        def split(x: jax.Array) -> jax.Array:  # [X, ...] -> [B, T, ...]
            rest = x.shape[1:]
            return x.reshape(context, B, T // context, *rest).swapaxes(0, 1).reshape(B, T, *rest)

        def layer(carry: Any, weights_and_index: Any) -> tuple[Any, None]:
            x_XD, cache = carry
            weights, index, window = weights_and_index
            window = window if c.sliding_window else None
            w = {name: value.astype(dtype) for name, value in weights.items()}

            def project(equation: str, x: jax.Array, name: str) -> jax.Array:
                y = jnp.einsum(equation, x, w[name])
                if (scale := weights.get(int8.scale_name(name))) is not None:
                    y = at_least_float32(y)
                    y = (y * scale.astype(y.dtype)[None]).astype(dtype)
                if not c.lora_rank:
                    return y
                a, b = w[f"{name}_lora_a"], w[f"{name}_lora_b"]
                low_XR = jnp.tensordot(x, a, INPUT_AXES[name])
                return y + (c.lora_alpha / c.lora_rank) * jnp.tensordot(low_XR, b, 1)

            y_XD = rms_norm(x_XD, weights["attention_norm"], c.rms_norm_eps)
            q_XNH = project("XD,DNH->XNH", y_XD, "q")
            k_XKH = project("XD,DKH->XKH", y_XD, "k")
            v_XKH = project("XD,DKH->XKH", y_XD, "v")
            if c.qkv_bias:
                q_XNH = q_XNH + w["q_bias"][None]
                k_XKH = k_XKH + w["k_bias"][None]
                v_XKH = v_XKH + w["v_bias"][None]
            if c.qk_norm:
                q_XNH = rms_norm(q_XNH, weights["q_norm"], c.rms_norm_eps)
                k_XKH = rms_norm(k_XKH, weights["k_norm"], c.rms_norm_eps)
            q_BTNH, k_BTKH = rotate(split(q_XNH), sin_cos), rotate(split(k_XKH), sin_cos)
            a_BTNH, cache = attend(index, q_BTNH, k_BTKH, split(v_XKH), cache, window)
            x_XD = x_XD + project("XNH,NHD->XD", join(a_BTNH), "o")
            y_XD = rms_norm(x_XD, weights["mlp_norm"], c.rms_norm_eps)
            gate_XF = checkpoint_name(project("XD,DF->XF", y_XD, "gate"), "mlp")
            up_XF = checkpoint_name(project("XD,DF->XF", y_XD, "up"), "mlp")
            x_XD = x_XD + project("XF,FD->XD", jax.nn.silu(gate_XF) * up_XF, "down")
            return (x_XD, cache), None

        # Looked up before it is rounded: the gradient then adds a token's occurrences in float32.
        # In bfloat16 that of a token with 512 of them was up to 12 % off. Joined after it: each
        # device then looks up its own tokens.
        carry = join(self.embed[...][tokens_BT].astype(dtype)), cache
        layers = jax.tree.map(lambda param: param[...], self.layers, is_leaf=_is_param)
        if isinstance(layers, dict):
            stacked = layers, jnp.arange(L), jnp.asarray(windows_L)
            carry, _ = jax.lax.scan(rematerialised(layer, c.remat), carry, stacked)
        else:
            for i, weights in enumerate(layers):
                carry, _ = layer(carry, (weights, i, int(windows_L[i])))
        x_XD, cache = carry
        return split(rms_norm(x_XD, self.final_norm[...], c.rms_norm_eps)), cache


def bind(config: ModelConfig, params: Params) -> Decoder:
    """Returns the decoder with these parameters, whose layers may be `unstacked`."""
    layers = params["layers"]
    if isinstance(layers, dict):
        return nnx.merge(_abstract(config)[0], params)
    params = params | {"layers": dict(enumerate(layers))}
    return nnx.merge(_abstract(config, unrolled=True)[0], params)


def rms_norm(x: Float[Array, "*X D"], scale_D: Float[Array, " D"], eps: float) -> Array:
    """Returns x / rms(x) * scale over the last axis, computed in float32 at least, in x's dtype."""
    y = at_least_float32(x)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    scale = scale_D.astype(y.dtype).reshape((1,) * (x.ndim - 1) + (-1,))
    return (y * scale).astype(x.dtype)


def rematerialised(layer: Callable[..., Any], remat: str) -> Callable[..., Any]:
    """Returns the body of the scan over layers, keeping what `ModelConfig.remat` names of it."""
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


def init_params(config: ModelConfig, key: jax.Array) -> Params:
    """Returns random parameters as a nested dict of arrays; jittable."""
    return nnx.to_pure_dict(nnx.state(Decoder(config, rngs=nnx.Rngs(params=key))))


def param_shapes(config: ModelConfig) -> Params:
    """Returns the nested dict of `jax.ShapeDtypeStruct` of the parameters."""
    return jax.eval_shape(lambda key: init_params(config, key), jax.random.key(0))


def param_axes(config: ModelConfig) -> Params:
    """Returns the nested dict of logical axis names of the parameters, one tuple per array."""
    axes = lambda param: param.get_metadata()["logical_axes"]
    return nnx.to_pure_dict(jax.tree.map(axes, _abstract(config)[1], is_leaf=_is_param))


def unstacked(layers: Params) -> tuple[Params, ...]:
    """Returns stacked layers one by one; with them the decoder unrolls instead of scanning."""
    num = len(next(iter(layers.values())))
    return tuple({n: x[i] for n, x in layers.items()} for i in range(num))


def is_adapter(name: str) -> bool:
    """Returns whether a parameter of a layer is a part of an adapter."""
    return name.endswith(("_lora_a", "_lora_b"))


def unembedding(params: Params) -> jax.Array:
    """Returns the matrix [V, D] that turns hidden states into logits."""
    return params["unembed"] if "unembed" in params else params["embed"]


@functools.cache
def _abstract(config: ModelConfig, *, unrolled: bool = False) -> tuple[Any, Any]:
    """Returns (graph definition, abstract state) of the decoder: no memory."""
    make = lambda: Decoder(config, rngs=nnx.Rngs(0), unrolled=unrolled)
    return nnx.split(nnx.eval_shape(make))


def _is_param(node: Any) -> bool:
    return isinstance(node, nnx.Variable)
