"""Command lines of the programs in launch/: flags, config files, and how failures are reported."""

import errno
import inspect
import os
import re
import runpy
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
from absl import flags
from ml_collections import ConfigDict

from dapo_jax.config import hf_config
from dapo_jax.config.schema import Config, ModelConfig
from dapo_jax.config.sft import SftConfig
from dapo_jax.distributed import process_group
from dapo_jax.distributed.process_group import EXIT_RESTART, ProcessGroup
from dapo_jax.types import RunError, UserError
from dapo_jax.utils import fields, hf_hub
from dapo_jax.utils.fields import Text
from dapo_jax.utils.progress import drop_unread_output

ROOT = Path(__file__).resolve().parents[2]
AnyConfig = TypeVar("AnyConfig", Config, SftConfig)
# Status codes of JAX's runtime that another start would meet again.
PERMANENT_STATUS = ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "UNIMPLEMENTED")
# Words of compilers that refuse a program, under any status code.
COMPILER_WORDS = ("RET_CHECK", "Mosaic", "ompilation")
# Errors of the file system that are no failure of the storage.
PERMANENT_ERRNOS = ["ENOENT", "EACCES", "EPERM", "EROFS", "EEXIST", "ENOTDIR", "EISDIR"]
PERMANENT_ERRNOS += ["ENAMETOOLONG", "ENOSPC", "EDQUOT"]

# Of a GPU's memory, unless the environment says otherwise. JAX takes 0.75 and never more. CUDA and
# its libraries need the rest. Read when JAX starts its devices, after this import.
if not os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION"):  # the old name: JAX refuses both
    os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", "0.92")


def parse(
    argv: list[str],
    usage: str,
    *,
    switches: Sequence[str] = (),
    texts: Sequence[str] = (),
    integers: Sequence[str] = (),
    floats: Sequence[str] = (),
    kind: type[AnyConfig] = Config,
) -> tuple[AnyConfig, Any]:
    """Returns the checked config and the flags of a command line: `workdir` and the named ones.

    A flag that is not given is None, a switch False. A given `model` replaces the config's model,
    except for the fields that are overridden.

    Raises:
        UserError: a flag, the config file or a field is wrong.
    """
    _help(argv, usage)
    place, arguments, overrides = _split(argv[1:])
    values = _parse_flags(
        [argv[0], *arguments],
        dict.fromkeys(("workdir", *texts)),
        dict.fromkeys(integers),
        dict.fromkeys(floats),
        switches,
        before=("config=FILE", "config.FIELD=VALUE"),
    )
    for name in ("workdir", *texts):
        if values[name].value == "":  # of an unset shell variable; as a path, the current directory
            raise UserError(f"--{name}= has no value: give one, or leave --{name} out.")
    model = values.model if "model" in texts else None
    return load_config(place, overrides, model=model, kind=kind), values


def load_config(
    place: str,
    overrides: Mapping[str, Any],
    *,
    model: str | None = None,
    kind: type[AnyConfig] = Config,
) -> AnyConfig:
    """Returns the checked config of FILE or FILE:ARGUMENT, a file here or in the project's
    directory.

    Args:
        overrides: values by field, such as "train.num_steps".
        model: Hugging Face directory or hub id. It replaces the config's model and tokenizer,
            except for the fields that are overridden.
        kind: of the config.

    Raises:
        UserError: the file or a field is wrong.
    """
    given = _load(place)
    for name, value in overrides.items():
        _set(given, name, value)
    section = given.get("model")
    if isinstance(section, dict):  # Config.from_dict refuses anything else
        if model is not None:
            if "model.path" in overrides:
                raise UserError("--model and --config.model.path both say which model: give one.")
            taken = ("tokenizer", *hf_config.FIELDS)
            kept = lambda name: name not in taken or f"model.{name}" in overrides
            section = {name: value for name, value in section.items() if kept(name)}
            section = {"tokenizer": model} | section | {"path": model}
            given.pop("pretrain", None)
        section = {name: value for name, value in section.items() if value is not None}
        given["model"] = hf_config.filled(fields.converted(ModelConfig, section, "config.model"))
    config = kind.from_dict(given)
    # The hub is asked for missing fields only; the others are checked when weights are loaded.
    if config.model.path is not None and not hf_hub.is_repository(config.model.path):
        hf_config.check(config.model)
    return config


def default_workdir(argv: list[str]) -> Path:
    """Returns runs/NAME for a command line with --config: NAME is the file's stem and argument."""
    file, _, argument = _split(argv[1:])[0].partition(":")
    stem = Path(file).stem
    return Path("runs", f"{stem}_{argument}" if argument else stem)


def parse_flags(
    argv: list[str],
    usage: str,
    *,
    text: dict[str, str | None],
    numbers: dict[str, float],
    switches: Sequence[str] = (),
) -> dict[str, Any]:
    """Returns the values of --name=value flags, for the programs without a config.

    Args:
        text: default of each text flag; None: the flag is required.
        numbers: default of each number flag; the flag takes integers where its default is one.
        switches: flags that are True where given.

    Raises:
        UserError: an unknown, missing or malformed flag.
    """
    _help(argv, usage)
    integers = {name: default for name, default in numbers.items() if isinstance(default, int)}
    floats = {name: default for name, default in numbers.items() if name not in integers}
    values = _parse_flags(argv, text, integers, floats, switches)
    names = [*text, *numbers, *switches]
    for name, default in text.items():
        if default is None and not values[name].value:
            known = ", ".join(f"--{known}" for known in names)
            raise UserError(f"--{name} is needed. Flags: {known}.")
    return {name: values[name].value for name in names}


def _help(argv: list[str], usage: str) -> None:
    if {"--help", "-h", "-help"} & set(argv):
        print(usage.strip())
        raise SystemExit(0)


def _parse_flags(
    argv: list[str],
    texts: Mapping[str, str | None],
    integers: Mapping[str, int | None],
    floats: Mapping[str, float | None],
    switches: Sequence[str],
    before: Sequence[str] = (),
) -> flags.FlagValues:
    """Parses flags with these defaults; `before` are other flags, named in errors."""
    values = flags.FlagValues()
    for name, text in texts.items():
        flags.DEFINE_string(name, text, name, flag_values=values)
    for name, integer in integers.items():
        flags.DEFINE_integer(name, integer, name, flag_values=values)
    for name, number in floats.items():
        flags.DEFINE_float(name, number, name, flag_values=values)
    for name in switches:
        flags.DEFINE_bool(name, False, name, flag_values=values)
    known = ", ".join(f"--{name}" for name in (*before, *texts, *integers, *floats, *switches))
    try:
        rest = values(argv)[1:]
    except flags.Error as error:
        raise UserError(f"{error}. Flags: {known}.") from error
    if rest:
        raise UserError(f"{rest[0]!r} is not a flag. Flags: {known}.")
    return values


def _split(arguments: list[str]) -> tuple[str, list[str], dict[str, Text]]:
    """Splits arguments into the value of --config, those of no config, and the text of each
    overridden field; the last of several for one field holds."""
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
        raise UserError(
            "--config is needed, such as --config=configs/tiny_dapo.py, for launch/sft.py "
            "--config=configs/sft_word_problems.py."
        )
    return place, rest, overrides


def _set(values: dict[str, Any], name: str, value: Any) -> None:
    """Sets the field `name`, such as "critic.learning_rate"; a section that is None starts with its
    defaults. `Config.from_dict` checks the value."""
    *groups, last = name.split(".")
    for i, group in enumerate(groups):
        if values.get(group) is None:
            values[group] = {}
        values = values[group]
        if not isinstance(values, dict):
            above = ".".join(groups[: i + 1])
            raise UserError(f"--config.{name}={value}: config.{above} has no fields.")
    if not groups and value is not None and value != "None" and isinstance(values.get(last), dict):
        raise UserError(
            f"--config.{name}={value}: config.{name} is a section, and its other fields would be "
            f"lost. Give single fields, --config.{name}.FIELD=VALUE."
        )
    values[last] = None if isinstance(value, Text) and value == "None" else value


def definitions(path: str) -> tuple[Path, dict[str, Any]]:
    """Returns a config file, here or in the project's directory, and what it defines by name.

    Raises:
        UserError: there is no such file, or it cannot be run.
    """
    file = next((p.resolve() for p in (Path(path), ROOT / path) if p.is_file()), None)
    if file is None:
        known = ", ".join(f"configs/{p.name}" for p in sorted((ROOT / "configs").glob("[a-z]*.py")))
        raise UserError(f"--config={path}: no such file. The project has {known}.")
    try:
        return file, runpy.run_path(str(file))
    except UserError:
        raise
    except Exception as error:
        raise UserError(_mistake(file, error)) from error


def _load(place: str) -> dict[str, Any]:
    """Returns the config of FILE or FILE:ARGUMENT, a file here or in the project's directory.

    Raises:
        UserError: there is no such file, or something is wrong in it.
    """
    path, colon, argument = place.partition(":")
    file, names = definitions(path)
    get_config = names.get("get_config")
    if not callable(get_config):
        raise UserError(f"--config={file} has no function get_config.")
    arguments = [argument] if colon else []
    try:
        inspect.signature(get_config).bind(*arguments)
    except TypeError as error:
        mend = f"takes no argument: leave :{argument} out"
        if not colon:
            mend = f"needs an argument: write --config={path}:ARGUMENT"
        raise UserError(f"get_config of --config={path} {mend}.") from error
    try:
        config = get_config(*arguments)
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
    """Describes an error in a config file, with its line. Prints the traceback, unless the error is
    one of syntax or import, whose message says it all."""
    place, line, message = str(file), None, f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):
        place, line, message = error.filename or place, error.lineno, error.msg
    else:
        trace = traceback.extract_tb(error.__traceback__)
        line = next((frame.lineno for frame in trace if frame.filename == place), None)
        if not isinstance(error, ImportError):
            traceback.print_exception(error)
        missing = isinstance(error, ModuleNotFoundError)
        if missing and (file.parent / f"{error.name}.py").is_file():
            message += f". Set PYTHONPATH={file.parent} to import files next to the config"
    return f"--config={place}{f', line {line}' if line else ''}: {message}."


def run_in_group(flags: Any, work: Callable[[ProcessGroup], int | None]) -> int:
    """Runs `work` in the process group that the flags name; returns the exit status.

    Args:
        work: returns the number of the signal that stopped it, or None.
    """
    group, seconds = process_group.ALONE, flags.coordinator_timeout
    try:
        group = process_group.start(
            flags.coordinator_address,
            flags.num_processes,
            flags.process_id,
            300 if seconds is None else seconds,
        )
        group.watch()
        stopped_by = work(group)
    except Exception as error:
        return group.shutdown(fail(error), error)
    return group.shutdown(0 if stopped_by is None else 128 + stopped_by)


def fail(error: Exception) -> int:
    """Prints an error to standard error, with a traceback unless its message says it all.

    Returns:
        The exit status: 2 for the user's mistakes, EXIT_RESTART for faults of devices and storage
        that a new start may not meet, 1 otherwise.
    """
    if isinstance(error, BrokenPipeError) and drop_unread_output():  # `| head`, say
        return 128 + signal.SIGPIPE
    if isinstance(error, OSError) and (full := _full(error)):
        error = RunError(
            f"the {full} is full ({error.filename or 'while writing to --workdir'}). "
            "Checkpoints saved before are intact: free some space and start the same command."
        )
    # Of Path.expanduser and Path.home.
    if isinstance(error, RuntimeError) and "home directory" in str(error):
        error = UserError(
            "a home directory is not known. Set HOME for your own, where caches are too; write a "
            "path that begins with ~NAME in full."
        )
    if isinstance(error, UserError | RunError):
        print(f"error: {error}", file=sys.stderr)
        if isinstance(error, UserError):
            return 2
        return EXIT_RESTART if error.restart else 1
    traceback.print_exception(error)
    return EXIT_RESTART if _is_transient(error) else 1


def _full(error: OSError) -> str | None:
    """Returns what is full if that is the error. shutil's error of a whole directory has the errors
    of its files as text alone."""
    for number, full in ((errno.ENOSPC, "disk"), (errno.EDQUOT, "quota")):
        if error.errno == number or os.strerror(number) in str(error):
            return full
    return None


def _is_transient(error: Exception) -> bool:
    """Returns whether an error is a fault of a device or of the storage, not of the program."""
    if isinstance(error, jax.errors.JaxRuntimeError):
        text = str(error)
        words = any(word in text for word in COMPILER_WORDS)
        return not (words or text.startswith(PERMANENT_STATUS))
    if not isinstance(error, OSError) or error.errno is None:
        return False
    return errno.errorcode.get(error.errno) not in PERMANENT_ERRNOS
