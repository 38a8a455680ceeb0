"""What checks of a config say: the field, what is required of it, and what it is."""

from typing import Any

from dapo_jax.types import UserError


def require(condition: bool, field: str, value: Any, wanted: str) -> None:
    """Raises UserError unless the condition holds; `wanted` follows "must be"."""
    if not condition:
        raise UserError(f"config.{field} must be {wanted}; got {value!r}.")


def positive(config: Any, *fields: str) -> None:
    """Raises UserError unless each field is above 0."""
    for field in fields:
        value = get(config, field)
        require(value > 0, field, value, "greater than 0")


def non_negative(config: Any, *fields: str) -> None:
    """Raises UserError unless each field is 0 or more."""
    for field in fields:
        value = get(config, field)
        require(value >= 0, field, value, "0 or more")


def get(config: Any, field: str) -> Any:
    """The value of a field such as "model.width"."""
    for name in field.split("."):
        config = getattr(config, name)
    return config


def divides(config: Any, small: str, large: str) -> None:
    """Raises UserError unless the value of one field divides that of another."""
    a, b = get(config, small), get(config, large)
    if b % a:
        raise UserError(
            f"config.{small} ({a}) must divide config.{large} ({b}). "
            f"Nearest that do: {b - b % a or a} or {b + a - b % a} for config.{large}."
        )
