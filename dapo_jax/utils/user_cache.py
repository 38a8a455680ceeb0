"""The directory where the runs of a user share what is costly to make."""

import os
from pathlib import Path


def directory(kind: str) -> Path:
    """Returns the directory of one kind of content, such as "base" for base models. It may not
    exist yet."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "dapo_jax" / kind
