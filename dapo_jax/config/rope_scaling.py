"""`config.model.rope_scaling`: Hugging Face's `rope_scaling`, checked and completed."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from dapo_jax.types import UserError
from dapo_jax.utils.fields import FrozenDict

KINDS = ("linear", "llama3", "yarn")


def completed(
    values: Mapping[str, Any], refuse: Callable[[str], UserError], longest: int = 0
) -> FrozenDict[Any] | None:
    """Returns the mapping with every key of its rope type; None for the type "default".

    Args:
        refuse: makes an error of a reason.
        longest: positions of the model; the original ones where the mapping has none.

    Raises:
        UserError: a key is missing, unknown or not a number.
    """
    left = dict(values)
    kind = left.pop("rope_type", None) or left.get("type") or "default"
    left.pop("type", None)
    if kind == "default":
        left.pop("original_max_position_embeddings", None)
        # A factor of 1 changes nothing.
        neutral = lambda key: left[key] is None or (key.endswith("factor") and left[key] == 1)
        if others := [key for key in sorted(left) if not neutral(key)]:
            raise refuse(f"a rope type is needed with {', '.join(others)}")
        return None
    if kind not in KINDS:
        raise refuse(f"its rope type must be default, {', '.join(KINDS[:-1])} or {KINDS[-1]}")

    def number(key: str, default: float | None = None) -> float:
        value = left.pop(key, None)
        value = default if value is None else value
        if value is None:
            raise refuse(f"its {key} is needed")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise refuse(f"its {key} must be a number above 0")
        return float(value)

    original: float | None = None
    if kind == "linear":
        left.pop("original_max_position_embeddings", None)
    else:
        original = number("original_max_position_embeddings", longest or None)
    extended = longest / original if kind == "yarn" and original and longest else None
    found: dict[str, Any] = {"rope_type": kind, "factor": number("factor", extended)}
    if original is not None:
        found["original_max_position_embeddings"] = int(original)
    if kind == "llama3":
        found |= {key: number(key) for key in ("low_freq_factor", "high_freq_factor")}
    if kind == "yarn":
        found |= {"beta_fast": number("beta_fast", 32), "beta_slow": number("beta_slow", 1)}
        own = None if left.get("attention_factor") is None else number("attention_factor")
        found["attention_factor"] = own or _attention_factor(left, found["factor"])
        truncate = left.pop("truncate", None)
        if truncate not in (None, True, False):
            raise refuse("its truncate must be True or False")
        found["truncate"] = truncate is None or bool(truncate)
    for key in ("attention_factor", "truncate", "mscale", "mscale_all_dim", "finetuned"):
        left.pop(key, None)
    unknown = sorted(key for key, value in left.items() if value is not None)
    if unknown:
        raise refuse(f"{', '.join(unknown)} is not known here")
    return FrozenDict(found)


def _attention_factor(values: dict[str, Any], factor: float) -> float | None:
    mscale, all_dim = values.get("mscale"), values.get("mscale_all_dim")
    if not (mscale and all_dim):
        return None
    by = lambda m: 0.1 * m * math.log(factor) + 1.0 if factor > 1 else 1.0
    return by(mscale) / by(all_dim)


def of_field(values: Mapping[str, Any]) -> FrozenDict[Any] | None:
    """Returns `config.model.rope_scaling`, completed; raises UserError as `completed`."""

    def refuse(why: str) -> UserError:
        return UserError(
            f"config.model.rope_scaling is {dict(values)!r}; {why}. It takes the keys of "
            "rope_scaling in Hugging Face's config.json."
        )

    return completed(values, refuse)
