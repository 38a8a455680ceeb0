"""Directories and files that a program writes."""

import os
from pathlib import Path

from dapo_jax.types import UserError


def make_writable(path: Path, flag: str) -> None:
    """Makes a directory if it is missing.

    Args:
        flag: that gave the path, for the message.

    Raises:
        UserError: it cannot be written to.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(
            f"{flag}={path} cannot be written to: {error.strerror}. Choose another directory or "
            "mend its permissions."
        ) from error


def write_atomically(path: Path, text: str) -> None:
    """Writes the whole text, or leaves the file as it was."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)
