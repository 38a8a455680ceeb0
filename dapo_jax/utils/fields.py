"""Types of config fields with their ranges, and checks of plain values against them.

`dapo_jax.config` declares its sections with these types, and `dapo_jax.algorithms` the arguments of
its methods. A value that does not fit raises an error that names the field.
"""

import ast
import dataclasses
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from dapo_jax.types import UserError

T = TypeVar("T")

# The keys of JAX have 32 bits. No other integer of a config is as large.
NUM_SEEDS = 2**32


class Range(NamedTuple):
    """The values that a field may have."""

    holds: Callable[[Any], bool]
    wanted: str  # completes "must be" in the message


ABOVE_0 = Range(lambda x: x > 0, "greater than 0")
AT_LEAST_0 = Range(lambda x: x >= 0, "0 or more")
Positive = Annotated[float, ABOVE_0]
PositiveInt = Annotated[int, ABOVE_0]
NonNegative = Annotated[float, AT_LEAST_0]
NonNegativeInt = Annotated[int, AT_LEAST_0]
Share = Annotated[float, Range(lambda x: 0 <= x <= 1, "from 0 to 1")]
Below1 = Annotated[float, Range(lambda x: 0 <= x < 1, "in [0, 1)")]
UpTo1 = Annotated[float, Range(lambda x: 0 < x <= 1, "in (0, 1]")]


class Argument(NamedTuple):
    """An argument of a loss or an advantage that a config may set."""

    type: Any  # with its range
    default: Any = dataclasses.MISSING  # where the config must set it


class FrozenDict(dict[str, T]):
    """A mapping inside a frozen config: it has a hash and must not be changed."""

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return hash(tuple(self.items()))


class Text(str):
    """A value from the command line, read as the type of its field."""


def build(cls: type[T], values: Any, path: str) -> T:
    """Returns the dataclass `cls` with the given values, defaults elsewhere.

    Raises:
        UserError: a field is unknown, missing without a default, of the wrong type or out of range.
    """
    if isinstance(values, cls):
        return values
    given = converted(cls, values, path)
    required = [
        field.name
        for field in dataclasses.fields(typing.cast(Any, cls))
        if field.default is field.default_factory is dataclasses.MISSING
    ]
    _check_given([name for name in required if name not in given], path)
    return cls(**given)


def converted(cls: type, values: Any, path: str) -> dict[str, Any]:
    """Returns the given values of the dataclass `cls` as the types of its fields.

    Raises:
        UserError: a field is unknown, of the wrong type or out of range.
    """
    if isinstance(values, Text):
        values = _literal(values)
    if not isinstance(values, Mapping):
        raise UserError(f"{path} must be a group of fields, not {values!r}.")
    hints = typing.get_type_hints(cls, include_extras=True)
    _check_known(values, hints, path)
    return {name: convert(hints[name], value, f"{path}.{name}") for name, value in values.items()}


def bind(
    arguments: Mapping[str, Argument], values: Mapping[str, Any], path: str, method: str
) -> FrozenDict:
    """Returns every argument of a method, the given values checked and defaults elsewhere.

    Args:
        method: the method in words, for messages.

    Raises:
        UserError: an argument is unknown, missing without a default, or not in its range.
    """
    _check_known(values, arguments, path, f" of {method}")
    bound = {name: values.get(name, argument.default) for name, argument in arguments.items()}
    _check_given([name for name, value in bound.items() if value is dataclasses.MISSING], path)
    checked = lambda name: convert(arguments[name].type, bound[name], f"{path}.{name}")
    return FrozenDict({name: checked(name) for name in bound})


def convert(hint: Any, value: Any, path: str) -> Any:
    """Returns `value` as the annotated type.

    Raises:
        UserError: names the field, what it must be, and what was given.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        value = convert(args[0], value, path)
        if not args[1].holds(value):
            raise UserError(f"{path} must be {args[1].wanted}; got {value!r}.")
        return value
    if origin in (typing.Union, types.UnionType) and type(None) in args:
        if value is None:
            return None
        (hint,) = (arg for arg in args if arg is not type(None))
        return convert(hint, value, path)
    if dataclasses.is_dataclass(hint):
        return build(typing.cast(type, hint), value, path)
    if isinstance(value, Text):
        text = hint is str or (origin is Literal and isinstance(args[0], str))
        value = str(value) if text else _literal(value)
        if hint is bool and value in (0, 1):
            value = bool(value)
    if origin is Literal:
        if value not in args:
            choices = ", ".join(repr(arg) for arg in args)
            raise UserError(f"{path} must be one of {choices}; got {value!r}.")
        return value
    if origin is FrozenDict:
        if not isinstance(value, Mapping):
            raise UserError(f"{path} must be a group of named fields, not {value!r}.")
        return FrozenDict({k: convert(args[0], v, f"{path}.{k}") for k, v in value.items()})
    if origin is tuple:
        if not isinstance(value, (tuple, list)):
            raise UserError(f"{path} must be a tuple; got {value!r}.")
        if args[1:] == (Ellipsis,):
            args = args[:1] * len(value)
        if len(value) != len(args):
            raise UserError(f"{path} must have {len(args)} entries; got {value!r}.")
        return tuple(convert(a, v, f"{path}[{i}]") for i, (a, v) in enumerate(zip(args, value)))
    if hint is Any:
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is float and isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{path} must be finite; got {value!r}.")
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise UserError(f"{path} must be {hint.__name__}; got {value!r} ({type(value).__name__}).")
    if hint is int and value >= NUM_SEEDS:
        raise UserError(f"{path} must be below 2**32; got {value!r}.")
    return value


def _check_given(missing: list[str], path: str) -> None:
    if missing:
        raise UserError(f"{path}.{missing[0]} is missing and has no default: add it.")


def _check_known(
    values: Mapping[str, Any], known: Mapping[str, Any], path: str, of: str = ""
) -> None:
    unknown = [name for name in values if name not in known]
    if unknown:
        raise UserError(
            f"{path}.{unknown[0]} is not a field{of}. {path} has: {', '.join(known) or 'none'}. "
            "Remove it, or correct its name."
        )


def _literal(text: Text) -> Any:
    """Returns the number, tuple, bool, None or group that the text spells; else the text itself."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return ast.literal_eval(text)
    # {{0.9, 0.99}} is a set of a set; ten thousand minus signs are too deep.
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return str(text)
