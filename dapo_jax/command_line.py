"""Flags of the programs in launch/, and how their failures are told."""

import errno
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import config_flags

from dapo_jax import hf_config
from dapo_jax.config import Config
from dapo_jax.types import RunError, UserError

ROOT = Path(__file__).resolve().parent.parent


def parse(
    argv: list[str],
    usage: str,
    *,
    switches: Sequence[str] = (),
    texts: Sequence[str] = (),
    integers: Sequence[str] = (),
    floats: Sequence[str] = (),
) -> tuple[Config, Any]:
    """(checked config, flags with `workdir` and those named) from a command line. A flag that is
    not given is None, a switch False. A `model` that is given takes the place of the config's.

    Raises:
        UserError: a flag, the config file or a field is wrong.
    """
    if any(argument in ("--help", "-h", "-help") for argument in argv):
        print(usage.strip())
        raise SystemExit(0)
    argv = [argv[0], *(_find_config(argument) for argument in argv[1:])]
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=argv)
    flags.DEFINE_string("workdir", None, "directory of the run", flag_values=values)
    for name in switches:
        flags.DEFINE_bool(name, False, name, flag_values=values)
    for name in texts:
        flags.DEFINE_string(name, None, name, flag_values=values)
    for name in integers:
        flags.DEFINE_integer(name, None, name, flag_values=values)
    for name in floats:
        flags.DEFINE_float(name, None, name, flag_values=values)
    flags.DEFINE_bool("help", False, "show this text", short_name="h", flag_values=values)
    named = ["config=FILE", "config.FIELD=VALUE", "workdir=DIR", *texts, *integers, *floats]
    known = f"Flags: {', '.join(f'--{name}' for name in [*named, *switches])}."
    try:
        rest = values(argv)[1:]
    except flags.Error as error:
        raise UserError(f"{error}. {known}") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        # ml_collections raises these for an override that names no field or has the wrong type.
        raise UserError(f"{_message(error)} In: {' '.join(argv[1:])}") from error
    if rest:
        raise UserError(f"{rest[0]!r} is not a flag. {known}")
    if values.config is None:
        raise UserError("--config is needed, for example --config=configs/tiny_dapo.py.")
    fields = values.config.to_dict()
    if "model" in texts and values.model is not None:
        # Everything that its config.json says is taken from there.
        fields["model"] |= dict.fromkeys(hf_config.FIELDS)
        fields["model"] |= {"path": values.model, "tokenizer": values.model}
        fields["pretrain"] = None
    fields["model"] = hf_config.filled(fields["model"])
    return Config.from_dict(fields), values


def parse_flags(
    argv: list[str],
    usage: str,
    *,
    text: dict[str, str | None],
    numbers: dict[str, float],
    switches: Sequence[str] = (),
) -> dict[str, Any]:
    """The values of --name=value flags, for the programs without a config.

    Args:
        text: default of each flag that is text; None: it has to be given.
        numbers: default of each flag that is a number, an integer where that is one.
        switches: names of the flags that are True where they are given.

    Raises:
        UserError: an unknown, missing or malformed flag.
    """
    if any(argument in ("--help", "-h", "-help") for argument in argv):
        print(usage.strip())
        raise SystemExit(0)
    values = flags.FlagValues()
    for name, default in text.items():
        flags.DEFINE_string(name, default, name, flag_values=values)
    for name, default in numbers.items():
        if isinstance(default, int):
            flags.DEFINE_integer(name, default, name, flag_values=values)
        else:
            flags.DEFINE_float(name, default, name, flag_values=values)
    for name in switches:
        flags.DEFINE_bool(name, False, name, flag_values=values)
    known = ", ".join(f"--{name}" for name in [*text, *numbers, *switches])
    try:
        rest = values(argv)[1:]
    except flags.Error as error:
        raise UserError(f"{error}. Flags: {known}.") from error
    if rest:
        raise UserError(f"{rest[0]!r} is not a flag. Flags: {known}.")
    missing = [name for name, default in text.items() if default is None and not values[name].value]
    if missing:
        raise UserError(f"--{missing[0]} is needed. Flags: {known}.")
    return {name: values[name].value for name in [*text, *numbers, *switches]}


def _find_config(argument: str) -> str:
    """--config=FILE with FILE looked for here and then beside the project's own configs."""
    name, equals, value = argument.partition("=")
    if name not in ("--config", "-config") or not equals:
        return argument
    path, colon, parameter = value.partition(":")
    for place in (Path(path), ROOT / path):
        if place.is_file():
            return f"{name}={place.resolve()}{colon}{parameter}"
    known = ", ".join(f"configs/{p.name}" for p in sorted((ROOT / "configs").glob("[a-z]*.py")))
    raise UserError(f"--config={path}: no such file. The project has {known}.")


def _message(error: BaseException) -> str:
    """The text of an error on one line; ml_collections gives it as a quoted KeyError."""
    text = str(error.args[0]) if error.args else type(error).__name__
    return text.replace("\\n", " ").replace("\n", " ").replace("\\", "").replace("'", "")


def fail(error: Exception) -> int:
    """Tells what went wrong on standard error, without a traceback where the message says it all.

    Returns:
        The exit status: 2 for the user's mistakes, 1 otherwise.
    """
    if isinstance(error, UserError):
        print(f"error: {error}", file=sys.stderr)
        return 2
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        print(
            f"error: the disk is full ({error.filename or 'while writing to --workdir'}). "
            "Checkpoints saved before are intact: free some space and start the same command.",
            file=sys.stderr,
        )
        return 1
    if isinstance(error, RunError):
        print(f"error: {error}", file=sys.stderr)
        return 1
    traceback.print_exception(error)
    return 1
