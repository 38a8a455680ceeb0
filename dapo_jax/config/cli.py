"""Flags of the programs in launch/, and how their failures are told."""

import errno
import importlib.machinery
import importlib.util
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from absl import flags
from ml_collections import ConfigDict

from dapo_jax.config import hf_config
from dapo_jax.config.schema import Config, ModelConfig
from dapo_jax.distributed.process_group import EXIT_RESTART
from dapo_jax.types import RunError, UserError
from dapo_jax.utils import fields, hf_hub
from dapo_jax.utils.fields import Text

ROOT = Path(__file__).resolve().parents[2]
# Status codes of JAX's runtime for what another start would meet again.
OF_THE_PROGRAM = ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "UNIMPLEMENTED")
# Words of compilers that refuse a program, under whatever code.
OF_COMPILERS = ("RET_CHECK", "Mosaic", "ompilation")
# Numbers of an OSError that says how things are, not that the storage failed.
LASTING = {
    errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR,
    errno.EISDIR, errno.ENAMETOOLONG, errno.ENOSPC, errno.EDQUOT, None,
}  # fmt: skip


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
    not given is None, a switch False. A `model` that is given takes the place of the config's, but
    for those of its fields that are overridden.

    Raises:
        UserError: a flag, the config file or a field is wrong.
    """
    if any(argument in ("--help", "-h", "-help") for argument in argv):
        print(usage.strip())
        raise SystemExit(0)
    place, arguments, overrides = _split(argv[1:])
    given = _load(place)
    for name, text in overrides.items():
        _set(given, name, text)
    values = flags.FlagValues()
    flags.DEFINE_string("workdir", None, "directory of the run", flag_values=values)
    for name in switches:
        flags.DEFINE_bool(name, False, name, flag_values=values)
    for name in texts:
        flags.DEFINE_string(name, None, name, flag_values=values)
    for name in integers:
        flags.DEFINE_integer(name, None, name, flag_values=values)
    for name in floats:
        flags.DEFINE_float(name, None, name, flag_values=values)
    named = ["config=FILE", "config.FIELD=VALUE", "workdir=DIR", *texts, *integers, *floats]
    known = f"Flags: {', '.join(f'--{name}' for name in [*named, *switches])}."
    try:
        rest = values([argv[0], *arguments])[1:]
    except flags.Error as error:
        raise UserError(f"{error}. {known}") from error
    if rest:
        raise UserError(f"{rest[0]!r} is not a flag. {known}")
    model = given.get("model")
    if isinstance(model, dict):  # of anything else the config says what is wrong
        if "model" in texts and values.model is not None:
            # Everything that its config.json says is taken from there, unless overridden.
            if "model.path" in overrides:
                raise UserError("--model and --config.model.path both say which model: give one.")
            taken = ("tokenizer", *hf_config.FIELDS)
            model = {k: v for k, v in model.items() if k not in taken or f"model.{k}" in overrides}
            model = {"tokenizer": values.model} | model | {"path": values.model}
            given["pretrain"] = None
        model = {name: value for name, value in model.items() if value is not None}
        given["model"] = hf_config.filled(fields.converted(ModelConfig, model, "config.model"))
    config = Config.from_dict(given)
    # The hub is asked only for what is None; what it has is checked when weights are loaded.
    if config.model.path is not None and not hf_hub.is_repository(config.model.path):
        hf_config.check(config.model)
    return config, values


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


def _split(arguments: list[str]) -> tuple[str, list[str], dict[str, Text]]:
    """Returns the value of --config, the arguments that are not of the config, and the text of each
    overridden field in the order given; the last of several for one field holds."""
    place, rest, overrides = None, [], {}
    while arguments:
        argument, *arguments = arguments
        found = re.fullmatch(r"--?config(?:\.([^=]+))?(?:=(.*))?", argument, re.DOTALL)
        if found is None:
            rest.append(argument)
            continue
        name, value = found.groups()
        if value is None:  # --config FILE
            if not arguments or arguments[0].startswith("--"):
                raise UserError(f"{argument} needs a value: {argument}=VALUE.")
            value, *arguments = arguments
        if name is None:
            place = value
        else:
            overrides.pop(name, None)
            overrides[name] = Text(value)
    if not place:
        raise UserError("--config is needed, for example --config=configs/tiny_dapo.py.")
    return place, rest, overrides


def _set(values: dict[str, Any], name: str, text: Text) -> None:
    """Sets the field `name`, such as "critic.learning_rate"; a section that is None begins with
    defaults. `Config.from_dict` says what is wrong with it."""
    *groups, last = name.split(".")
    for i, group in enumerate(groups):
        if values.get(group) is None:
            values[group] = {}
        values = values[group]
        if not isinstance(values, dict):
            above = ".".join(groups[: i + 1])
            raise UserError(f"--config.{name}={text}: config.{above} has no fields.")
    values[last] = None if text == "None" else text


def _load(place: str) -> dict[str, Any]:
    """What get_config of FILE, or with the text after the colon that of FILE:TEXT, returns. The
    file is looked for here and then beside the project's own configs.

    Raises:
        UserError: there is no such file, or something is wrong in it.
    """
    path, colon, parameter = place.partition(":")
    file = next((p.resolve() for p in (Path(path), ROOT / path) if p.is_file()), None)
    if file is None:
        known = ", ".join(f"configs/{p.name}" for p in sorted((ROOT / "configs").glob("[a-z]*.py")))
        raise UserError(f"--config={path}: no such file. The project has {known}.")
    loader = importlib.machinery.SourceFileLoader("config_file", str(file))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = sys.modules[loader.name] = importlib.util.module_from_spec(spec)
    try:
        loader.exec_module(module)
        if not callable(getattr(module, "get_config", None)):
            raise UserError(f"--config={file} has no function get_config.")
        config = module.get_config(*([parameter] if colon else []))
    except UserError:
        raise
    except Exception as error:
        raise UserError(_mistake(file, error)) from error
    if not isinstance(config, ConfigDict):
        raise UserError(
            f"get_config of --config={file} must return an ml_collections.ConfigDict; it returned "
            f"{type(config).__name__}."
        )
    return config.to_dict()


def _mistake(file: Path, error: Exception) -> str:
    """What is wrong in a config file, and where; what is not plain from that, by its traceback on
    standard error."""
    place, line, trace = str(file), None, error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != place:
        trace = trace.tb_next
    if isinstance(error, SyntaxError):
        place, line, said = error.filename or place, error.lineno, error.msg
    else:
        line, said = trace and trace.tb_lineno, f"{type(error).__name__}: {error}"
        if not isinstance(error, ImportError):
            traceback.print_exception(error.with_traceback(trace))
    return f"--config={place}{f', line {line}' if line else ''}: {said}."


def fail(error: Exception) -> int:
    """Prints what went wrong to standard error, without a traceback where the message says it all.

    Returns:
        The exit status: 2 for the user's mistakes, START_AGAIN for faults of devices and storage
        that a new start may not meet, 1 otherwise.
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
        return EXIT_RESTART if error.restart else 1
    traceback.print_exception(error)
    return EXIT_RESTART if _may_pass(error) else 1


def _may_pass(error: Exception) -> bool:
    """Whether an error is one of a device or of the storage and not of the program."""
    if isinstance(error, jax.errors.JaxRuntimeError):
        text = str(error)
        return not (text.startswith(OF_THE_PROGRAM) or any(word in text for word in OF_COMPILERS))
    return isinstance(error, OSError) and error.errno not in LASTING
