"""config.json of a Hugging Face checkpoint, as the fields of `ModelConfig`, and back.

A key that changes the computation is refused by its name, unless its value changes nothing here: a
nearly right model gives nearly right numbers. One warning names the unknown keys, which are
ignored.
"""

import contextlib
import functools
import json
import sys
from collections.abc import Mapping
from typing import Any, Literal

from dapo_jax.config import rope_scaling
from dapo_jax.config.schema import ModelConfig
from dapo_jax.types import UserError
from dapo_jax.utils import hf_hub

CONFIG, GENERATION = "config.json", "generation_config.json"
ADAPTER = "adapter_config.json"  # in the place of CONFIG in a directory of adapters of peft
# Its keys that change what adapters compute, with the values that change nothing here.
ADAPTER_COMPUTATION: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    **dict.fromkeys(("use_dora", "use_rslora", "fan_in_fan_out", "lora_bias"), (False,)),
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), ({},)),
    # The other kinds subtract the first adapter from the weights of the base.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
    "alora_invocation_tokens": (),
    **dict.fromkeys(("modules_to_save", "layers_to_transform", "layer_replication"), ()),
}
# Our field: Hugging Face's key.
SIZES = {name: name for name in ("vocab_size", "hidden_size", "intermediate_size", "rms_norm_eps")}
SIZES |= {"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads"}
# The fields of ModelConfig that a checkpoint determines.
FIELDS = (*SIZES, "num_kv_heads", "head_dim", "rope_theta", "rope_scaling", "qkv_bias", "qk_norm")
FIELDS += ("tie_embeddings", "sliding_window", "stop_token_ids")
# By model_type: properties that its config.json does not state, and its class.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"qkv_bias": True, "qk_norm": False, "class": "Qwen2ForCausalLM"},
    "qwen3": {"qkv_bias": False, "qk_norm": True, "class": "Qwen3ForCausalLM"},
    "llama": {"qkv_bias": False, "qk_norm": False, "class": "LlamaForCausalLM"},
    "mistral": {"qkv_bias": False, "qk_norm": False, "class": "MistralForCausalLM"},
}
# By model_type: the values that transformers takes for a missing key, which differs from null.
QWEN = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
ABSENT: dict[str, dict[str, int]] = {
    "qwen2": QWEN,
    "qwen3": QWEN | {"head_dim": 128},
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
}
# Keys that change what a decoder computes, with the values (besides null) that change nothing in
# the decoder here. Any other value is refused.
OFF = """attention_bias mlp_bias use_bias use_parallel_residual use_qk_norm qk_layernorm
    attn_temperature_tuning alibi use_alibi use_mrope rope_interleaved"""
ZERO = "num_experts num_local_experts n_routed_experts no_rope_layer_interval"
ONE = """partial_rotary_factor rotary_pct embedding_multiplier residual_multiplier scale_emb
    logit_scale logits_scaling"""
NULL = """quantization_config clip_qkv q_lora_rank kv_lora_rank query_pre_attn_scalar
    attention_multiplier attn_logit_softcapping attention_chunk_size rope_local_base_freq
    scale_depth dim_model_base final_logit_softcapping"""
COMPUTATION: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("hidden_act", "hidden_activation"), ("silu", "swish")),
    **dict.fromkeys(OFF.split(), (False,)),
    **dict.fromkeys(ZERO.split(), (0,)),
    **dict.fromkeys(ONE.split(), (1,)),
    **dict.fromkeys(NULL.split(), ()),
    "is_causal": (True,),
    "no_rope_layers": ((), []),
    "position_embedding_type": ("rope", "rotary", "absolute"),  # "absolute" is BERT's default
}
READ = {*SIZES.values()} | set(
    """model_type num_key_value_heads head_dim rope_theta rope_scaling rope_parameters
    tie_word_embeddings sliding_window use_sliding_window max_window_layers layer_types
    max_position_embeddings""".split()
)
# Common keys that change nothing here. A key that is missing in this list costs a warning.
HARMLESS = set(
    """architectures attention_dropout bos_token_id eos_token_id pad_token_id unk_token_id
    sep_token_id cls_token_id decoder_start_token_id initializer_range torch_dtype dtype
    transformers_version use_cache pretraining_tp _name_or_path name_or_path output_attentions
    output_hidden_states return_dict id2label label2id chunk_size_feed_forward
    _attn_implementation attn_implementation hidden_dropout resid_pdrop embd_pdrop unsloth_version
    unsloth_fixed""".split()
)


def read(path: str) -> dict[str, Any]:
    """Returns the config.json of a local directory or of a repository on the hub; for adapters of
    peft that of their base model.

    Raises:
        UserError: there is none, or it is not JSON.
    """
    return _read_json(base_path(path), CONFIG)


def base_path(path: str) -> str:
    """Returns the directory or hub id (with its revision) of the base model where `path` holds
    adapters of peft, else `path`.

    Raises:
        UserError: they name no base model.
    """
    values = _read_json(path, ADAPTER)
    base = values.get("base_model_name_or_path")
    if values and not isinstance(base, str):
        raise UserError(
            f"config.model.path ({path}): {ADAPTER} has base_model_name_or_path = {base!r}; it "
            "must be the directory or hub id of the base model."
        )
    if not isinstance(base, str):
        return path
    revision = values.get("revision")
    return f"{base}@{revision}" if revision and hf_hub.is_repository(base) else base


def adapter_fields(path: str) -> dict[str, Any]:
    """Returns the fields of `ModelConfig` that an adapter_config.json determines; {} where `path`
    holds no adapters.

    Raises:
        UserError: they are of another kind than those here.
    """
    values = _read_json(path, ADAPTER)
    for key, harmless in ADAPTER_COMPUTATION.items():
        value = values.get(key)
        if value is not None and value not in harmless:
            supported = " or ".join(map(repr, harmless)) or "null"
            raise UserError(
                f"config.model.path ({path}): {ADAPTER} has {key} = {value!r}; adapters here "
                f"support {supported} only."
            )
    if not values:
        return {}
    return {"lora_rank": values.get("r"), "lora_alpha": values.get("lora_alpha", 8)}


def _read_json(path: str, name: str) -> dict[str, Any]:
    """Returns the content of a file; of one that need not exist {} where it does not."""
    file = hf_hub.model_directory(path, [CONFIG, GENERATION, ADAPTER]) / name
    try:
        values = json.loads(file.read_text()) if name == CONFIG or file.exists() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"config.model.path ({path}): {file} cannot be read: {error}.") from error
    if not isinstance(values, dict):
        raise UserError(f"config.model.path ({path}): {file} must hold a JSON object.")
    return values


def filled(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of `config.model`; missing ones are read from its checkpoint.

    The given fields must agree with the checkpoint. It is not read where no size is None.

    Raises:
        UserError: they differ, or the checkpoint needs a decoder that is not here.
    """
    path = fields.get("path")
    sizes = (*SIZES, "num_kv_heads", "head_dim", "rope_theta", "stop_token_ids")
    if path is None or all(fields.get(name) is not None for name in sizes):
        return dict(fields)
    given = {name: value for name, value in fields.items() if value is not None}
    if "rope_scaling" in given:
        given["rope_scaling"] = rope_scaling.of_field(given["rope_scaling"])
    found = model_fields(read(path), path) | {"stop_token_ids": stop_token_ids(path)}
    found |= adapter_fields(path)
    _check_same(given, found, path)
    return found | given


def check(config: ModelConfig) -> None:
    """Checks that the config describes the checkpoint of its `path`.

    Raises:
        UserError: a field differs.
    """
    assert config.path is not None
    found = model_fields(read(config.path), config.path) | adapter_fields(config.path)
    found["stop_token_ids"] = stop_token_ids(config.path)
    _check_same(vars(config), found, config.path)


def _check_same(given: Mapping[str, Any], found: Mapping[str, Any], path: str) -> None:
    """Raises UserError unless the given fields are those found; more tokens may end a response."""
    plain = lambda value: list(value) if isinstance(value, list | tuple) else value
    for name, value in found.items():
        ours = given.get(name, value)
        if name == "stop_token_ids":
            if not set(value) <= set(ours):
                raise UserError(
                    f"config.model.stop_token_ids is {tuple(ours)}, and what ends a response of "
                    f"{path} is {value}: a model whose end is not seen writes on to the limit. Add "
                    "the missing ones, or set it to None."
                )
        elif plain(ours) != plain(value):
            file = ADAPTER if name.startswith("lora_") else CONFIG
            raise UserError(
                f"config.model.{name} is {ours!r}, and {value!r} in the {file} of {path}. "
                "Correct it, or set it to None to take the checkpoint's."
            )


def stop_token_ids(path: str) -> tuple[int, ...]:
    """Returns the tokens that end a response: eos_token_id of generation_config.json or, as in
    transformers, of config.json where that has none.

    Raises:
        UserError: it is neither a token nor a list of tokens.
    """
    file, found = GENERATION, _read_json(base_path(path), GENERATION).get("eos_token_id")
    if found is None:
        file, found = CONFIG, read(path).get("eos_token_id")
    tokens = tuple(found) if isinstance(found, list) else () if found is None else (found,)
    if not all(isinstance(token, int) and token >= 0 for token in tokens):
        raise UserError(
            f"config.model.path ({path}): {file} has eos_token_id = {found!r}; it must be a token "
            "id or a list of them."
        )
    return tokens


def stored_dtype(path: str) -> Literal["float32", "bfloat16"]:
    """Returns the dtype of a checkpoint by its config.json; bfloat16 also for float16."""
    values = read(path)
    dtype = values.get("dtype") or values.get("torch_dtype")
    return "float32" if dtype in (None, "float32") else "bfloat16"


def positions(config: ModelConfig) -> int | None:
    """Returns the tokens of the longest text that the checkpoint of `config.path` is made for; None
    where its config.json does not say."""
    assert config.path is not None
    found, s = read(config.path).get("max_position_embeddings"), config.rope_scaling
    if found is None or s is None:
        return found
    # Where a user added the scaling, max_position_embeddings may still be the original ones.
    return max(found, int(s.get("original_max_position_embeddings", found) * s["factor"]))


def model_fields(values: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Returns the fields of `ModelConfig` that a config.json determines.

    Raises:
        UserError: a key is missing, or has a value that the decoder here does not support.
    """

    def refuse(key: str, why: str) -> UserError:
        return UserError(
            f"config.model.path ({path}): config.json has {key} = {values.get(key)!r}; {why}."
        )

    family = FAMILIES.get(str(values.get("model_type")))
    if family is None and "config" in values:
        raise UserError(
            f"config.model.path ({path}) is the directory of a run, not a model. Export a "
            f"checkpoint: python launch/export.py --workdir={path} --output=HFDIR"
        )
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
        if type(values.get(key)) not in (int, float) or values[key] <= 0:
            raise refuse(key, "a number above 0 is needed")
    values = ABSENT[values["model_type"]] | dict(values)
    fields = {name: values[key] for name, key in SIZES.items()}
    heads = fields["num_heads"]
    fields["num_kv_heads"] = values.get("num_key_value_heads") or heads
    fields["head_dim"] = values.get("head_dim") or fields["hidden_size"] // heads
    fields["tie_embeddings"] = bool(values.get("tie_word_embeddings", False))
    fields |= {"qkv_bias": family["qkv_bias"], "qk_norm": family["qk_norm"]}
    return fields | _rope(values, refuse) | _windows(values, refuse)


@functools.cache  # once in a process
def _warn_unknown(path: str, keys: tuple[str, ...]) -> None:
    print(
        f"warning: config.json of {path} has unknown keys, which are ignored: {', '.join(keys)}",
        file=sys.stderr,
    )


def _rope(values: Mapping[str, Any], refuse: Any) -> dict[str, Any]:
    """Returns rope_theta and rope_scaling, from the keys of transformers 4 or 5.

    A file has both keys where transformers 5 wrote it and a user added the rope_scaling of a model
    card. transformers then reads rope_scaling alone, without the rope_theta of the other.
    """
    keys = [key for key in ("rope_parameters", "rope_scaling") if values.get(key)]
    found = [_rope_of(values, key, refuse) for key in keys or ["rope_scaling"]]
    if found[0] != found[-1]:
        raise refuse("rope_scaling", "its rope_parameters differ: put all into one of the two")
    return found[0]


def _rope_of(values: Mapping[str, Any], key: str, refuse: Any) -> dict[str, Any]:
    """Returns rope_theta and rope_scaling by one of the two keys."""
    given, longest = values.get(key) or {}, values.get("max_position_embeddings") or 0
    if not isinstance(given, Mapping):
        raise refuse(key, "it must be an object")
    if type(longest) not in (int, float):
        raise refuse("max_position_embeddings", "it must be a number")
    scaling = dict(given)
    theta = scaling.pop("rope_theta", None) or values.get("rope_theta") or 10_000.0
    found = rope_scaling.completed(scaling, lambda why: refuse(key, why), longest)
    return {"rope_theta": theta, "rope_scaling": found}


def _windows(values: Mapping[str, Any], refuse: Any) -> dict[str, Any]:
    """Returns the size of the attention window, and the layers that have it."""
    num, window = values["num_hidden_layers"], values.get("sliding_window")
    types, family = values.get("layer_types"), values["model_type"]
    wanted = family == "mistral" or values.get("use_sliding_window", False)
    if not isinstance(types, list | None):
        raise refuse("layer_types", "it must be a list")
    known = "full_attention", "sliding_attention"
    if types is not None and (len(types) != num or any(kind not in known for kind in types)):
        raise refuse("layer_types", f"it must name {num} full or sliding attentions")
    if family != "llama" and "sliding_attention" in (types or ()) and not (wanted and window):
        raise refuse("layer_types", "without a window (sliding_window, use_sliding_window)")
    if window is None or family == "llama":
        layers: tuple[int, ...] = ()
    elif types is not None:
        layers = tuple(i for i, kind in enumerate(types) if kind == "sliding_attention")
    elif family == "mistral":
        layers = tuple(range(num))
    elif wanted:
        if type(values["max_window_layers"]) is not int:
            raise refuse("max_window_layers", "a number of layers is needed")
        layers = tuple(range(values["max_window_layers"], num))
    else:
        layers = ()
    return {"sliding_window": (window, layers) if layers else None}


def to_hf(config: ModelConfig, *, eos: list[int], bos: int | None, dtype: str) -> dict[str, Any]:
    """Returns the config.json of a model, the inverse of `model_fields`, in the keys that every
    version of transformers reads.

    Raises:
        UserError: no family of transformers has these options together.
    """
    window, sliding = config.sliding_window or (None, ())
    every = sliding == tuple(range(config.num_layers))
    plain = "llama" if not sliding else "mistral" if every else None
    kinds = {(True, False): "qwen2", (False, True): "qwen3", (False, False): plain}
    name = kinds.get((config.qkv_bias, config.qk_norm))
    if name is None:
        raise UserError(
            f"config.model: no known family has qkv_bias {config.qkv_bias}, qk_norm "
            f"{config.qk_norm} and sliding_window {config.sliding_window}; it cannot be exported."
        )
    s = config.rope_scaling
    values: dict[str, Any] = {
        "architectures": [FAMILIES[name]["class"]],
        "model_type": name,
        **{key: getattr(config, field) for field, key in SIZES.items()},
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "max_position_embeddings": _positions(config),
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
    if sliding:
        values["sliding_window"] = window
        if name != "mistral":
            kinds = ("full_attention", "sliding_attention")
            values["layer_types"] = [kinds[i in sliding] for i in range(config.num_layers)]
            values |= {"use_sliding_window": True, "max_window_layers": min(sliding)}
    return values


def _positions(config: ModelConfig) -> int:
    """Returns max_position_embeddings: the checkpoint's or, where that cannot be read, a guess."""
    with contextlib.suppress(UserError):
        if config.path is not None and (found := read(config.path).get("max_position_embeddings")):
            return int(found)
    if (s := config.rope_scaling) is None:
        return 131_072
    return int(s.get("original_max_position_embeddings", 32_768) * s["factor"])
