"""config.json of a Hugging Face checkpoint, as the fields of `ModelConfig`, and back.

A key that is known to change the computation is refused by its name, unless its value is one with
which it changes nothing: a nearly right model gives nearly right numbers. Unknown keys are ignored
and named in one warning.
"""

import functools
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from dapo_jax.config import rope_scaling
from dapo_jax.config.schema import ModelConfig
from dapo_jax.types import UserError
from dapo_jax.utils import hf_hub

CONFIG, GENERATION = "config.json", "generation_config.json"
# Of our fields: the key of each.
SAME = ("vocab_size", "hidden_size", "intermediate_size", "rms_norm_eps")
SIZES = {name: name for name in SAME} | {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
}
FIELDS = (
    *SIZES, "num_kv_heads", "head_dim", "rope_theta", "rope_scaling", "qkv_bias", "qk_norm",
    "tie_embeddings", "sliding_window", "sliding_layers", "stop_token_ids",
)  # fmt: skip
# By model_type: what the family has that its config.json does not say, and its class.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"qkv_bias": True, "qk_norm": False, "class": "Qwen2ForCausalLM"},
    "qwen3": {"qkv_bias": False, "qk_norm": True, "class": "Qwen3ForCausalLM"},
    "llama": {"qkv_bias": False, "qk_norm": False, "class": "LlamaForCausalLM"},
    "mistral": {"qkv_bias": False, "qk_norm": False, "class": "MistralForCausalLM"},
}
# By model_type: what transformers takes where a key is left out, which is not the same as null.
QWEN = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
ABSENT: dict[str, dict[str, int]] = {
    "qwen2": QWEN,
    "qwen3": QWEN | {"head_dim": 128},
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
}
# Keys that change what a decoder computes, with the values that change nothing in the decoder here.
# None always changes nothing. Any other value is refused.
COMPUTATION: dict[str, tuple[Any, ...]] = {
    # Layers.
    "hidden_act": ("silu", "swish"),
    "hidden_activation": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_bias": (False,),
    "use_parallel_residual": (False,),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "n_routed_experts": (0,),
    "quantization_config": (),
    # Attention.
    "is_causal": (True,),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "clip_qkv": (),
    "q_lora_rank": (),
    "kv_lora_rank": (),
    "query_pre_attn_scalar": (),
    "attention_multiplier": (),
    "attn_logit_softcapping": (),
    "attention_chunk_size": (),
    "attn_temperature_tuning": (False,),
    # Positions.
    "alibi": (False,),
    "use_alibi": (False,),
    "position_embedding_type": ("rope", "rotary", "absolute"),  # "absolute" is BERT's default
    "use_mrope": (False,),
    "rope_interleaved": (False,),
    "rope_local_base_freq": (),
    "partial_rotary_factor": (1,),
    "rotary_pct": (1,),
    "no_rope_layers": ((), []),
    "no_rope_layer_interval": (0,),
    # Scales.
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "scale_emb": (1,),
    "scale_depth": (),
    "dim_model_base": (),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "final_logit_softcapping": (),
}
READ = {
    *SIZES.values(), "model_type", "num_key_value_heads", "head_dim", "rope_theta", "rope_scaling",
    "rope_parameters", "tie_word_embeddings", "sliding_window", "use_sliding_window",
    "max_window_layers", "layer_types", "max_position_embeddings",
}  # fmt: skip
# Common keys that change nothing here. A key that is missing in this list costs a warning.
HARMLESS = {
    "architectures", "attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id",
    "unk_token_id", "sep_token_id", "cls_token_id", "decoder_start_token_id", "initializer_range",
    "torch_dtype", "dtype", "transformers_version", "use_cache", "pretraining_tp", "_name_or_path",
    "name_or_path", "output_attentions", "output_hidden_states", "return_dict", "id2label",
    "label2id", "chunk_size_feed_forward", "_attn_implementation", "attn_implementation",
    "hidden_dropout", "resid_pdrop", "embd_pdrop", "unsloth_version", "unsloth_fixed",
}  # fmt: skip


def read(path: str) -> dict[str, Any]:
    """config.json of a local directory or of a repository on the hub.

    Raises:
        UserError: there is none, or it is not JSON.
    """
    return _read_json(hf_hub.model_directory(path, [CONFIG, GENERATION]) / CONFIG, path)


def _read_json(file: Path, path: str) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"config.model.path ({path}): {file} cannot be read: {error}.") from error
    if not isinstance(values, dict):
        raise UserError(f"config.model.path ({path}): {file} must hold a JSON object.")
    return values


def filled(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `config.model` with those that are None read from the config.json of its
    `path`; those that are given must agree with it. Where all are given nothing is read.

    Raises:
        UserError: they differ, or the checkpoint asks for what is not there.
    """
    path = fields.get("path")
    sizes = (*SIZES, "num_kv_heads", "head_dim", "rope_theta", "stop_token_ids")
    needed = [name for name in sizes if fields.get(name) is None]
    if path is None or not needed:
        return dict(fields)
    found = model_fields(read(path), path)
    if fields.get("stop_token_ids") is None:
        found["stop_token_ids"] = stop_token_ids(path)
    else:
        _check_stops(fields["stop_token_ids"], path)
    for name, value in found.items():
        given = fields.get(name)
        if name == "rope_scaling" and given is not None:
            given = rope_scaling.of_field(given)
        if given is not None and _plain(given) != _plain(value):
            raise UserError(
                f"config.model.{name} is {given!r}, and {value!r} in the config.json of {path}. "
                "Set it to None to take what is there."
            )
    return dict(fields) | found


def stop_token_ids(path: str) -> tuple[int, ...]:
    """The tokens that end what a model writes: eos_token_id of its generation_config.json, or where
    that has none, as in transformers, of its config.json.

    Raises:
        UserError: it is neither a token nor a list of tokens.
    """
    directory = hf_hub.model_directory(path, [CONFIG, GENERATION])
    values = _read_json(directory / GENERATION, path) if (directory / GENERATION).exists() else {}
    file, found = GENERATION, values.get("eos_token_id")
    if found is None:
        file, found = CONFIG, read(path).get("eos_token_id")
    tokens = tuple(found) if isinstance(found, list) else () if found is None else (found,)
    if not all(isinstance(token, int) and token >= 0 for token in tokens):
        raise UserError(
            f"config.model.path ({path}): {file} has eos_token_id = {found!r}; a token id or a "
            "list of them is wanted."
        )
    return tokens


def _check_stops(given: Any, path: str) -> None:
    """More may end a response than the checkpoint says, but what it ends with has to."""
    tokens = stop_token_ids(path)
    if not set(tokens) <= set(given):
        raise UserError(
            f"config.model.stop_token_ids is {tuple(given)}, and what a response of {path} ends "
            f"with is {tokens}: a model whose end is not seen writes on to the limit. Add what is "
            "missing, or set it to None to take what is there."
        )


def stored_dtype(path: str) -> Literal["float32", "bfloat16"]:
    """That in which a checkpoint is to be computed by its config.json; float16 counts as bfloat16,
    which is as wide."""
    values = read(path)
    return (
        "float32"
        if (values.get("dtype") or values.get("torch_dtype")) in (None, "float32")
        else "bfloat16"
    )


def check(config: ModelConfig) -> None:
    """The config must describe the checkpoint of its `path`, and know all that it ends with.

    Raises:
        UserError: a field differs.
    """
    assert config.path is not None
    for name, value in model_fields(read(config.path), config.path).items():
        given = getattr(config, name)
        if _plain(given) != _plain(value):
            raise UserError(
                f"config.model.{name} is {given!r}, and {value!r} in the config.json of "
                f"{config.path}. Correct it, or set the sizes to None to take what is there."
            )
    _check_stops(config.stop_token_ids, config.path)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return tuple(value) if isinstance(value, list) else value


def model_fields(values: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The fields of `ModelConfig` that a config.json determines.

    Raises:
        UserError: a key is missing, or asks for what the decoder does not do.
    """

    def refuse(key: str, why: str) -> UserError:
        return UserError(
            f"config.model.path ({path}): config.json has {key} = {values.get(key)!r}; {why}."
        )

    family = FAMILIES.get(values.get("model_type", ""))
    if family is None:
        raise refuse("model_type", f"known are {', '.join(FAMILIES)}")
    for key, value in values.items():
        harmless = COMPUTATION.get(key)
        if harmless is not None and value is not None and value not in harmless:
            supported = " or ".join(map(repr, harmless)) or "null"
            raise refuse(key, f"the decoder here supports {supported} only")
    unknown = [
        key
        for key, value in values.items()
        if key not in COMPUTATION.keys() | READ | HARMLESS and value not in (None, False)
    ]
    if unknown:
        _warn_unknown(path, tuple(sorted(unknown)))
    for key in SIZES.values():
        if key not in values:
            raise refuse(key, "it is needed")
    values = ABSENT[values["model_type"]] | dict(values)
    fields = {name: values[key] for name, key in SIZES.items()}
    heads = fields["num_heads"]
    fields["num_kv_heads"] = values.get("num_key_value_heads") or heads
    fields["head_dim"] = values.get("head_dim") or fields["hidden_size"] // heads
    fields["tie_embeddings"] = bool(values.get("tie_word_embeddings", False))
    fields |= {"qkv_bias": family["qkv_bias"], "qk_norm": family["qk_norm"]}
    fields["rms_norm_eps"] = float(fields["rms_norm_eps"])
    return fields | _rope(values, refuse) | _windows(values, refuse)


@functools.cache  # once in a process, however often a config is read
def _warn_unknown(path: str, keys: tuple[str, ...]) -> None:
    print(
        f"warning: config.json of {path} has unknown keys, which are ignored: {', '.join(keys)}",
        file=sys.stderr,
    )


def _rope(values: Mapping[str, Any], refuse: Any) -> dict[str, Any]:
    """rope_theta and rope_scaling, from the keys of transformers 4 or those of 5."""
    key = "rope_parameters" if values.get("rope_parameters") else "rope_scaling"
    scaling = dict(values.get(key) or {})
    theta = float(scaling.pop("rope_theta", None) or values.get("rope_theta") or 10_000.0)
    longest = values.get("max_position_embeddings") or 0
    found = rope_scaling.bound(scaling, lambda why: refuse(key, why), longest)
    return {"rope_theta": theta, "rope_scaling": found}


def _windows(values: Mapping[str, Any], refuse: Any) -> dict[str, Any]:
    """Which layers see a window only."""
    num, window = values["num_hidden_layers"], values.get("sliding_window")
    types, family = values.get("layer_types"), values["model_type"]
    wanted = family == "mistral" or values.get("use_sliding_window", False)
    if family != "llama" and "sliding_attention" in (types or ()) and not (wanted and window):
        raise refuse("layer_types", "without a window (sliding_window, use_sliding_window)")
    if window is None or family == "llama":
        layers: tuple[int, ...] = ()
    elif types is not None:
        unknown = set(types) - {"full_attention", "sliding_attention"}
        if unknown or len(types) != num:
            raise refuse("layer_types", f"it must name {num} full or sliding attentions")
        layers = tuple(i for i, kind in enumerate(types) if kind == "sliding_attention")
    elif family == "mistral":
        layers = tuple(range(num))
    elif wanted:
        layers = tuple(range(values["max_window_layers"], num))
    else:
        layers = ()
    return {"sliding_window": window if layers else None, "sliding_layers": layers}


def to_hf(config: ModelConfig, *, eos: list[int], bos: int | None, dtype: str) -> dict[str, Any]:
    """config.json of a model: the inverse of `model_fields`, in the keys that every version of
    transformers reads.

    Raises:
        UserError: no family of transformers has these options together.
    """
    for name in ("qwen2", "qwen3", "mistral", "llama"):
        family = FAMILIES[name]
        if (family["qkv_bias"], family["qk_norm"]) != (config.qkv_bias, config.qk_norm):
            continue
        every = config.sliding_layers == tuple(range(config.num_layers))
        if name == "mistral" and not (config.sliding_layers and every):
            continue
        if name == "llama" and config.sliding_layers:
            continue
        break
    else:
        raise UserError(
            f"config.model: no known family has qkv_bias {config.qkv_bias}, qk_norm "
            f"{config.qk_norm} and sliding_layers {config.sliding_layers}; it cannot be exported."
        )
    s = config.rope_scaling
    longest = (
        131_072
        if s is None
        else int(s.get("original_max_position_embeddings", 32_768) * s["factor"])
    )
    values: dict[str, Any] = {
        "architectures": [family["class"]],
        "model_type": name,
        **{key: getattr(config, field) for field, key in SIZES.items()},
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "max_position_embeddings": longest,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if s is None else {k: v for k, v in s.items() if v is not None},
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": dtype,
        "bos_token_id": bos,
        "eos_token_id": eos[0] if len(eos) == 1 else eos,
        "use_cache": True,
    }
    if name == "qwen2":
        del values["attention_bias"]
    if config.sliding_layers:
        sliding = set(config.sliding_layers)
        values["sliding_window"] = config.sliding_window
        if name != "mistral":
            kinds = ("full_attention", "sliding_attention")
            values["layer_types"] = [kinds[i in sliding] for i in range(config.num_layers)]
            values |= {"use_sliding_window": True, "max_window_layers": min(sliding)}
    return values
